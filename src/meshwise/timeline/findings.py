"""What limited a run: a sentence each with its number, and the next thing to try.

Shares are of the time of a step, mean over ranks, without the first step of a session. A finding is made from its
LEAST share on; a late rank also needs to be late more often than chance makes one (see `late.CHANCE`) and by more than
twice the error of the clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.spec.units import bytes_text, percent_text, seconds_text
from meshwise.timeline.book import Book
from meshwise.timeline.late import late_ranks
from meshwise.timeline.report import MEMORY, CollectiveReport, Finding, Part
from meshwise.timeline.spans import KINDS
from meshwise.timeline.timeline import Counter

LEAST = {"late-rank": 0.02, "input": 0.10, "communication": 0.10, "imbalance": 0.10, "idle": 0.10, "stalls": 0.10}
LEAST_OF_RUN = {"checkpoint": 0.10, "evaluation": 0.30}
STALL = 3.0
FEWEST = 10
"""Steps below which a run is too short to say who is late."""
GROWTH, GROWTH_STEPS, GROWTH_SAMPLES = 0.05, 500, 100
"""Memory that grows by this share from third to third of a run's last three quarters is a finding, if there are so many
steps and samples of it: allocators warm up for a while."""

TRY_IF_LATE = {
    "data": "Compare its data source with the others': slower storage, larger samples, fewer loader workers.",
    "transfer": "Compare the path from host to device with the others': meshwise run prints which cores it uses.",
    "forward": "Look for another program on its device, a lower clock, longer samples, or work that it alone does.",
    "backward": "Look for another program on its device, a lower clock, longer samples, or work that it alone does.",
    "optimizer": "Look for another program on its device or cores, a lower clock or throttling.",
    "evaluate": "Its part of the test set takes longer; look for other work on its device.",
    "checkpoint": "It saves while the others wait: save less often (--save-every), or to faster storage.",
    "idle": "Its time goes by between the phases: look for work of the host in its loop, or another program.",
}


@dataclass(frozen=True)
class _Shares:
    """Of the time of a step: seconds and share by kind, mean over ranks and steady steps."""

    steps: int
    seconds: dict[str, float]
    step: float

    def bound(self, what: str, share: float) -> str:
        """`Input-bound: ` where that is the largest part of a step, else `Input: `."""
        computing = self.share("forward", "backward", "optimizer")
        most = max(computing, self.share("communication"), self.share("waiting"), self.share("data", "transfer"))
        return f"{what}-bound: " if share >= most else f"{what}: "

    def share(self, *kinds: str) -> float:
        return sum(self.seconds[kind] for kind in kinds) / self.step if self.step else 0.0


def findings_of(
    book: Book,
    error_seconds: float,
    goodput: list[Part],
    collectives: list[CollectiveReport],
    counters: tuple[Counter, ...],
) -> list[Finding]:
    """What limits a step, the largest share first; how computing stands, which is always told; growing memory."""
    steady = book.steady
    if not steady.any():
        return []
    mean = book.kind_seconds()[steady].mean(axis=0)
    shares = _Shares(
        int(steady.sum()), dict(zip(KINDS, mean.tolist(), strict=True)), float(book.step_seconds()[steady].mean())
    )
    late = _late(book, shares, error_seconds)
    found = [*late, *_input(shares), *_communication(book, shares, collectives, late), *_imbalance(shares, late)]
    found += [*_idle(shares), *_of_run(goodput), *_stalls(book)]
    return [*sorted(found, key=lambda finding: -finding.share), _computing(shares), *_memory(counters)]


def verdict_of(findings: list[Finding]) -> str:
    """The one sentence: the first finding's."""
    return findings[0].sentence if findings else "No step was recorded, so nothing limited one."


def _late(book: Book, shares: _Shares, error_seconds: float) -> list[Finding]:
    met = book.meetings
    steady = np.isin(met.step, book.step[book.steady])
    if shares.steps < FEWEST:
        return []
    found = []
    for rank in late_ranks(met, book.arrivals.ranks):
        of_rank = steady & (met.rank == rank)
        counted = of_rank & met.beside if met.beside.any() else of_rank
        by, cost = float(np.median(met.late[counted])), float(met.cost[of_rank].sum()) / shares.steps
        if cost / shares.step < LEAST["late-rank"] or by < 2 * error_seconds:
            continue
        by_phase = np.bincount(met.phase[of_rank], weights=met.cost[of_rank], minlength=len(KINDS))
        phase = KINDS[int(by_phase.argmax())]
        often = counted.sum() / max((steady & met.beside).sum() if met.beside.any() else steady.sum(), 1)
        where = "between phases" if phase == "idle" else f"in {phase}"
        sentence = (
            f"Rank {rank} is late: last in {percent_text(often)} of the steps, by {seconds_text(by)}, {where}. "
            f"On time it would save {seconds_text(cost)} a step ({percent_text(cost / shares.step)})."
        )
        found.append(Finding("late-rank", sentence, TRY_IF_LATE[phase], cost / shares.step, cost, rank, phase))
    return found


def _input(shares: _Shares) -> list[Finding]:
    share = shares.share("data", "transfer")
    if share < LEAST["input"]:
        return []
    seconds = shares.seconds["data"] + shares.seconds["transfer"]
    return [
        Finding(
            "input",
            f"{shares.bound('Input', share)}{_of_step(share, seconds)} waits for a batch.",
            "Read ahead with more loader workers (loader_workers of a Job, num_workers of a DataLoader).",
            share,
            seconds,
            phase="data",
        )
    ]


def _communication(
    book: Book, shares: _Shares, collectives: list[CollectiveReport], late: list[Finding]
) -> list[Finding]:
    share, seconds = shares.share("communication"), shares.seconds["communication"]
    if share < LEAST["communication"]:
        return []
    spread = float(np.median(book.meetings.late)) if len(book.meetings.late) else 0.0
    rates = [c for c in collectives if c.bus_bandwidth and c.bytes]
    largest = max(rates, key=lambda c: c.bytes * c.count, default=None)
    speed = ""
    if largest is not None and largest.bus_bandwidth:
        rate = bytes_text(largest.bus_bandwidth)
        speed = f" The largest part moves {bytes_text(largest.bytes)} at a bus bandwidth of {rate}/s."
    links = f"(they come within {seconds_text(spread)})"
    if shares.share("waiting") < share / 2:
        links += ": the links, not a rank"
    if len(book.arrivals.ranks) < 2:
        links = "or waiting for ranks of which there is no log: that cannot be told"
    elif late:
        links = f"and so beside what rank {', '.join(str(finding.rank) for finding in late)} costs: that is the links"
    sentence = (
        f"{shares.bound('Communication', share)}{_of_step(share, seconds)} is communication that "
        f"no computing hides, counted from the last rank's arrival {links}.{speed}"
    )
    advice = (
        "Fewer reductions a sample: a larger batch (--batch-size), or accumulate (--accumulate, mw.accumulate); half "
        "the bytes: bf16 (--precision bf16)."
    )
    return [Finding("communication", sentence, advice, share, seconds, phase="communication")]


def _imbalance(shares: _Shares, late: list[Finding]) -> list[Finding]:
    explained = sum(finding.share for finding in late)
    share = shares.share("waiting")
    if share < LEAST["imbalance"] or explained > share / 2:
        return []
    sentence = (
        f"Uneven: {_of_step(share, shares.seconds['waiting'])} waits for whichever rank comes last; none is it always."
    )
    advice = (
        "Samples of unequal length: batch alike ones together. A shared or throttling machine: look for other programs."
    )
    return [Finding("imbalance", sentence, advice, share, shares.seconds["waiting"], phase="waiting")]


def _idle(shares: _Shares) -> list[Finding]:
    share = shares.share("idle")
    if share < LEAST["idle"]:
        return []
    sentence = f"Between phases: {_of_step(share, shares.seconds['idle'])} is in none of them."
    advice = "Look for work of the host in the loop: printing, .item(), logging, metrics."
    return [Finding("idle", sentence, advice, share, shares.seconds["idle"], phase="idle")]


def _stalls(book: Book) -> list[Finding]:
    """Steps far longer than usual that take much of the time."""
    seconds, steps = book.step_seconds()[book.steady], book.step[book.steady]
    usual = float(np.median(seconds))
    long = seconds > STALL * usual
    share = float((seconds[long] - usual).sum() / seconds.sum()) if len(seconds) else 0.0
    if len(seconds) < FEWEST or share < LEAST["stalls"]:
        return []
    worst = int(steps[seconds.argmax()])
    sentence = (
        f"Stalls: {percent_text(long.mean(), 1)} of the steps take more than {STALL:.0f} times the median of "
        f"{seconds_text(usual)}, and {percent_text(share)} of the time beyond it; the longest is step {worst} with "
        f"{seconds_text(float(seconds.max()))}."
    )
    advice = (
        f"Look at it: meshwise report RUN --steps {worst}. Often another program, a slow disk, or garbage collection."
    )
    return [Finding("stalls", sentence, advice, share, float((seconds[long] - usual).mean()))]


def _of_run(goodput: list[Part]) -> list[Finding]:
    parts = {part.name: part for part in goodput}
    found = []
    saving, evaluation = parts["saving"], parts["evaluation"]
    if saving.share >= LEAST_OF_RUN["checkpoint"]:
        sentence = f"Saving takes {percent_text(saving.share)} of the run ({seconds_text(saving.seconds)})."
        advice = "Save less often (--save-every), or to faster storage."
        found.append(Finding("checkpoint", sentence, advice, saving.share, saving.seconds, phase="checkpoint"))
    if evaluation.share >= LEAST_OF_RUN["evaluation"]:
        sentence = f"Evaluating takes {percent_text(evaluation.share)} of the run ({seconds_text(evaluation.seconds)})."
        advice = "Evaluate less often, or on fewer samples."
        found.append(Finding("evaluation", sentence, advice, evaluation.share, evaluation.seconds, phase="evaluate"))
    return found


def _memory(counters: tuple[Counter, ...]) -> list[Finding]:
    """Memory that grows all the time: the medians of a run's thirds rise by GROWTH each."""
    found = []
    for counter in counters:
        late = slice(len(counter.value) // 4, None)
        value, step = counter.value[late], counter.step[late]
        if counter.name not in MEMORY or len(value) < GROWTH_SAMPLES:
            continue
        steps = float(step[-1] - step[0])
        first, second, third = (float(np.median(part)) for part in np.array_split(value, 3))
        if steps >= GROWTH_STEPS and second > first * (1 + GROWTH) and third > second * (1 + GROWTH):
            slope = (value[-1] - value[0]) / steps * 1000
            sentence = (
                f"Memory grows on rank {counter.rank}: {counter.name} from {bytes_text(first)} to {bytes_text(third)}, "
                f"{bytes_text(slope)} every 1,000 steps."
            )
            advice = "Keep no graph alive: append loss.item() or loss.detach(), not loss."
            found.append(Finding("memory", sentence, advice, 0.0, 0.0, counter.rank))
    return found


def _computing(shares: _Shares) -> Finding:
    share = shares.share("forward", "backward", "optimizer")
    seconds = share * shares.step
    took = f"{seconds_text(seconds)} of {seconds_text(shares.step)}"
    sentence = f"Computing takes {percent_text(share)} of a step ({took})."
    if share >= 0.8:
        sentence = f"Compute-bound: {_of_step(share, seconds)} is forward, backward and optimizer."
    advice = "To go faster: more devices, bf16 (--precision bf16), torch.compile, or a smaller model."
    return Finding("compute", sentence, advice, share, seconds)


def _of_step(share: float, seconds: float) -> str:
    """`18 % of a step (1.6 ms)`."""
    return f"{percent_text(share)} of a step ({seconds_text(seconds)})"
