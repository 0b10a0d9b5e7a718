"""Monte Carlo on many devices: pi from points in a square, and the price of an option, beside what is exact.

Random numbers depend on the seed and on their place in the array alone: any number of devices draws the same points,
and only sums move.

python examples/arrays/monte_carlo.py [--devices 4xcpu] [--points 5000000] [--seed 7]
"""

import math

from shown import arguments, measured

import meshwise as mw


def area(xp, x, y):
    """Pi, as four times the share of points of the unit square that lie in the circle."""
    return 4 * float(xp.mean(xp.astype(x * x + y * y <= 1, xp.float64)))


def call_price(xp, normal, price=100.0, strike=105.0, rate=0.03, volatility=0.25, years=1.0):
    """(price, standard error) of a European call: what it pays on average, discounted."""
    growth = (rate - volatility**2 / 2) * years + volatility * math.sqrt(years) * normal
    paid = xp.maximum(price * xp.exp(growth) - strike, xp.zeros_like(normal)) * math.exp(-rate * years)
    return float(xp.mean(paid)), float(xp.std(paid)) / math.sqrt(math.prod(paid.shape))


def exact_call_price(price=100.0, strike=105.0, rate=0.03, volatility=0.25, years=1.0):
    """The formula of Black and Scholes."""
    spread = volatility * math.sqrt(years)
    above = (math.log(price / strike) + (rate + volatility**2 / 2) * years) / spread

    def below(z):
        return (1 + math.erf(z / math.sqrt(2))) / 2

    return price * below(above) - strike * math.exp(-rate * years) * below(above - spread)


def main():
    words = arguments(__doc__, points=5_000_000, seed=7)
    xp = mw.array_namespace(words.devices)
    rng = xp.random.default_rng(words.seed)
    found = measured("pi", lambda: area(xp, rng.random(words.points), rng.random(words.points)))
    print(f"pi about {found:.5f}, off by {abs(found - math.pi):.5f}")
    price, error = measured("price of a call", lambda: call_price(xp, rng.standard_normal(words.points)))
    print(f"price {price:.4f} ± {error:.4f}; Black and Scholes: {exact_call_price():.4f}")


if __name__ == "__main__":
    main()
