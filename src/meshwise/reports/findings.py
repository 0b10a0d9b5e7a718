"""Find what limited a run, and suggest what to try.

Shares are fractions of a step's time, averaged over ranks, without the first step of a session. A finding is reported
if its share is at least LEAST. A straggler must also be last more often than by chance (see `step_table.CHANCE`), and
by more than twice the error of the clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.reports.advice import TRY, TRY_FOR_COMMUNICATION, TRY_FOR_STRAGGLER, advised
from meshwise.reports.expected import one_device_seconds
from meshwise.reports.run_report import COMPUTING, MEMORY, CollectiveReport, Finding, GoodputPart, PipelineReport
from meshwise.reports.spans import KIND, KINDS, Counter
from meshwise.reports.step_table import StepTable, decisive, straggler_ranks
from meshwise.spec.units import bytes_text, percent_text, seconds_text

LEAST = {"straggler": 0.02, "input": 0.10, "communication": 0.10, "imbalance": 0.10, "idle": 0.10, "stalls": 0.10}
LEAST_OF_RUN = {"checkpoint": 0.10, "evaluation": 0.30}
STALL = 3.0
SLOWER = 0.9
"""One device counts as faster if its step is estimated to take at most this share of the run's step."""
FEWEST = 10
"""A run with fewer steps is too short to name a straggler."""
LEAST_UNEQUAL = 1.1
"""Unequal shares of a batch are suggested if the fastest rank computes this many times as fast as the slowest."""
GROWTH, GROWTH_STEPS, GROWTH_SAMPLES = 0.05, 500, 100
"""Memory grows if the median rises by more than GROWTH from each third of the samples to the next. The first quarter of
a run does not count. At least GROWTH_STEPS steps and GROWTH_SAMPLES samples are needed."""

LATENCY_BOUND = 16 * 1024
"""A collective of at most this many bytes takes about as long as one of 1 byte, on links of 1 GB/s and 10 µs."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its spans do not show."""

    program: str
    pipeline: PipelineReport | None
    shares: Sequence[float]


@dataclass(frozen=True)
class _Shares:
    """How the time of a step divides into kinds of time, such as forward, as the mean over ranks and over `steps`
    steady steps (see `StepTable.steady`). `seconds` has the time of each kind in a step, and `step` is the time of the
    whole step."""

    steps: int
    seconds: dict[str, float]
    step: float
    table: StepTable
    collectives: Sequence[CollectiveReport]
    facts: RunFacts

    def share(self, *kinds: str) -> float:
        return sum(self.seconds[kind] for kind in kinds) / self.step if self.step else 0.0

    def bound(self, title: str, share: float) -> str:
        """Append `-bound` to `title`, as in `Input-bound`, if no kind of time takes more of a step than the fraction
        `share`. The compared kinds are computing, communication, waiting and input."""
        computing = self.share(*COMPUTING)
        most = max(computing, self.share("communication"), self.share("waiting"), self.share("data", "transfer"))
        return f"{title}-bound" if share >= most else title

    def of_step(self, share: float) -> str:
        """Write a share of a step as text: `18 % of a step (1.6 ms of 8.9 ms on average)`."""
        part, whole = seconds_text(share * self.step), seconds_text(self.step)
        return f"{percent_text(share)} of a step ({part} of {whole} on average)"

    def advised(self, text: str) -> str:
        return advised(text, self.facts.program)

    def finding(self, kind: str, phase: str | None, headline: str, share: float, sentence: str, advice: str) -> Finding:
        whole, advice = f"{headline}: {percent_text(share)} of a step.", self.advised(advice)
        return Finding(kind, whole, sentence, advice, share, share * self.step, phase=phase)


def findings_of(
    table: StepTable,
    error_seconds: float,
    goodput: Sequence[GoodputPart],
    collectives: Sequence[CollectiveReport],
    counters: Sequence[Counter],
    facts: RunFacts,
) -> list[Finding]:
    """Return the findings of a run."""
    steady = table.steady
    if not steady.any():
        return []
    seconds = dict(zip(KINDS, table.kind_seconds()[steady].mean(axis=0).tolist(), strict=True))
    step = float(table.step_seconds()[steady].mean())
    shares = _Shares(int(steady.sum()), seconds, step, table, collectives, facts)
    stragglers = list(_stragglers(shares, error_seconds))
    found = [*stragglers, *_of_step(shares, stragglers), *_communication(shares, stragglers)]
    found += [*_of_run(goodput, facts.program), *_stalls(table)]
    found.sort(key=lambda finding: -finding.share)
    late = [one for one in stragglers if one.kind == "late"]  # a late rank alone does not limit a run: list it last
    found = [one for one in found if one.kind != "late"]
    return [*_slower_than_one(shares), *found, _computing(shares), *late, *_memory(counters)]


def verdict_of(findings: Sequence[Finding]) -> str:
    """Return the verdict on a run, which is the sentence of its first finding."""
    return findings[0].sentence if findings else "No step was recorded, so it is unknown what limits a step."


def _balanced(table: StepTable, taken: Sequence[float]) -> str:
    """Suggest shares of the batch in proportion to the ranks' speeds.
    Return "" if the speeds are about equal."""
    if len(taken) != len(table.ranks) or len(taken) < 2:
        return ""
    computing = table.seconds[table.steady][:, :, [KIND["forward"], KIND["backward"]]].sum(axis=2)
    rates = np.array(taken) / np.maximum(np.median(computing, axis=0), 1e-9)
    if rates.max() < LEAST_UNEQUAL * rates.min():
        return ""
    return f" If this rank stays slow: --set shares={','.join(f'{rate:.2g}' for rate in rates / rates.min())}."


def _stragglers(shares: _Shares, error_seconds: float) -> Iterator[Finding]:
    """Report each rank that delays the other ranks."""
    table = shares.table
    points, less = table.sync_points, _balanced(table, shares.facts.shares)
    steady = np.isin(points.step, table.step[table.steady])
    compared = np.isin(np.arange(len(steady)), decisive(points)) & steady
    for rank in straggler_ranks(points.rank[compared], table.arrivals.ranks) if shares.steps >= FEWEST else ():
        of_rank = steady & (points.rank == rank)
        counted = of_rank & compared
        delay, cost = float(np.median(points.delay[counted])), float(points.cost[of_rank].sum()) / shares.steps
        share = cost / shares.step
        if share < LEAST["straggler"] or delay < 2 * error_seconds:
            continue
        by_phase = np.bincount(points.phase[of_rank], weights=points.cost[of_rank], minlength=len(KINDS))
        phase = KINDS[int(by_phase.argmax())]
        where = "between phases" if phase == "idle" else f"in {phase}"
        often = counted.sum() / max(compared.sum(), 1)
        mostly = often >= min(2 / 3, 1.5 / len(table.ranks))
        what = f"Rank {rank} is {'a straggler' if mostly else 'often late'}"
        sentence = (
            f"{what} {where}: last in {percent_text(often)} of the steps, by {seconds_text(delay)}. "
            f"Without the delay a step would take {seconds_text(cost)} less ({percent_text(share)})."
        )
        advice = shares.advised(TRY_FOR_STRAGGLER[phase]) + (less if phase in ("forward", "backward") else "")
        yield Finding("straggler" if mostly else "late", f"{what} {where}.", sentence, advice, share, cost, rank, phase)


def _slower_than_one(shares: _Shares) -> Iterator[Finding]:
    """Report that one device would be faster than all ranks, if a step takes clearly less time on one device."""
    table = shares.table
    ranks = len(table.ranks)
    if ranks < 2 or shares.steps < FEWEST:
        return
    least, most = one_device_seconds(table, shares.collectives)
    step = float(np.median(table.step_seconds()[table.steady]))
    if most > SLOWER * step:
        return
    headline = f"{ranks} devices are slower than one."
    sentence = (
        f"{headline[:-1]}: a step takes {seconds_text(step)}, and one device would need {seconds_text(least)} to "
        f"{seconds_text(most)} (estimated from what the ranks compute and read)."
    )
    yield Finding("slower", headline, sentence, shares.advised(TRY["slower"]), 1 - most / step, step - most)


def _of_step(shares: _Shares, stragglers: Sequence[Finding]) -> Iterator[Finding]:
    """Report input, idle time and imbalance that take a large share of a step."""
    share = shares.share("data", "transfer")
    if share >= LEAST["input"]:
        title = shares.bound("Input", share)
        sentence = f"{title}: {shares.of_step(share)} is spent waiting for a batch."
        yield shares.finding("input", "data", title, share, sentence, TRY["input"])
    share = shares.share("idle")
    if share >= LEAST["idle"]:
        sentence = f"Between phases: {shares.of_step(share)} is in no phase, such as forward or backward."
        yield shares.finding("idle", "idle", "Between phases", share, sentence, TRY["idle"])
    share = shares.share("waiting")
    if share < LEAST["imbalance"]:
        return
    if shares.facts.pipeline is not None:
        yield _bubble(shares, shares.facts.pipeline, share)
    elif sum(finding.share for finding in stragglers) <= share / 2:
        sentence = f"Load imbalance: {shares.of_step(share)} is spent waiting for the slowest rank, which varies."
        yield shares.finding("imbalance", "waiting", "Load imbalance", share, sentence, TRY["imbalance"])


def _communication(shares: _Shares, stragglers: Sequence[Finding]) -> Iterator[Finding]:
    share, table = shares.share("communication"), shares.table
    collectives = [c for c in shares.collectives if c.bytes and 2 * c.count >= shares.steps]  # skip rare collectives
    if share < LEAST["communication"]:
        return
    delays = table.sync_points.delay
    why = f" (ranks arrive within {seconds_text(float(np.median(delays)) if len(delays) else 0.0)})"
    if len(table.arrivals.ranks) < 2:
        why = ", or waiting for ranks that left no log (the two look the same)"
    elif stragglers:
        why = f", without the cost of rank {', '.join(str(found.rank) for found in stragglers)}: sending is slow"
    elif shares.share("waiting") < share / 2:
        why += ": sending is slow, not a rank"
    title = shares.bound("Communication", share)
    sentence = (
        f"{title}: {shares.of_step(share)} is exposed communication (not overlapped with computing), counted from the "
        f"last rank's arrival{why}.{_most_expensive(collectives, shares.steps)}"
    )
    of = collectives[0].of if collectives else ""
    advice = TRY_FOR_COMMUNICATION.get(of, TRY_FOR_COMMUNICATION[""])
    mostly = of and sum(each.share for each in collectives if each.of == of) > 0.5
    headline = title + (f", mostly {of}" if mostly else "")
    yield shares.finding("communication", "communication", headline, share, sentence, advice)


def _most_expensive(collectives: Sequence[CollectiveReport], steps: int) -> str:
    """Describe the collectives that take the most time, by number per step, kind, size and time.
    "" if there are none."""
    if not collectives:
        return ""
    first = collectives[0]
    same = [c for c in collectives if c.of == first.of and (first.of or c is first)]
    share, every = (sum(c.share for c in these) for these in (same, collectives))
    count, total = (sum(c.count for c in these) for these in (same, collectives))
    size = bytes_text(max(c.bytes for c in same))
    what = f"of {first.of}" if first.of else f"{first.name}s of {size}"
    sentence = (
        f" {count / steps:.0f} of {total / steps:.0f} collectives a step are {what}, of at most {size}: "
        f"{percent_text(share / every if every else 0.0)} of the time of all collectives."
    )
    if first.bus_bandwidth is None:
        return sentence
    rate = f"{bytes_text(first.bus_bandwidth)}/s"
    bound = "latency, not bandwidth, is the limit" if first.bytes <= LATENCY_BOUND else f"bus bandwidth {rate}"
    return f"{sentence[:-1]}; {bound}."


def _bubble(shares: _Shares, pipeline: PipelineReport, share: float) -> Finding:
    stages = pipeline.stages
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    slowest, quickest = stages[seconds.index(max(seconds))], stages[seconds.index(min(seconds))]
    sentence = (
        f"Pipeline bubble: {percent_text(pipeline.bubble)} of the time from the first forward to the last backward. "
        f"The schedule alone ({len(stages)} stages, {pipeline.microbatches} microbatches) causes "
        f"{percent_text(pipeline.bubble_of_schedule)}, these unequal stages {percent_text(pipeline.bubble_of_stages)}: "
        f"stage {slowest.stage} takes {seconds_text(max(seconds))} a microbatch, stage {quickest.stage} takes "
        f"{seconds_text(min(seconds))}."
    )
    return shares.finding("bubble", "waiting", "Pipeline bubble", share, sentence, TRY["bubble"])


def _stalls(table: StepTable) -> Iterator[Finding]:
    """Report stalls, which are steps that take more than STALL times the median."""
    seconds, steps = table.step_seconds()[table.steady], table.step[table.steady]
    usual = float(np.median(seconds))
    beyond = np.where(seconds > STALL * usual, seconds - usual, 0.0)
    share = float(beyond.sum() / seconds.sum())
    if len(seconds) < FEWEST or share < LEAST["stalls"]:
        return
    worst = int(steps[seconds.argmax()])
    sentence = (
        f"Stalls: {percent_text((beyond > 0).mean(), 1)} of the steps take more than {STALL:.0f} times the median of "
        f"{seconds_text(usual)}. Their time beyond the median is {percent_text(share)} of the time of all steps. The "
        f"longest is step {worst} with {seconds_text(float(seconds.max()))}."
    )
    advice = f"See meshwise report RUN --steps {worst}. Look for another program, a slow disk or garbage collection."
    headline, each = f"Stalls take {percent_text(share)} of the time.", float(beyond[beyond > 0].mean())
    yield Finding("stalls", headline, sentence, advice, share, each)


def _of_run(goodput: Sequence[GoodputPart], program: str) -> Iterator[Finding]:
    parts = {part.name: part for part in goodput}
    for kind, part, phase, verb in (
        ("checkpoint", "saving", "checkpoint", "Saving"),
        ("evaluation", "evaluation", "evaluate", "Evaluating"),
    ):
        share, seconds = parts[part].share, parts[part].seconds
        if share >= LEAST_OF_RUN[kind]:
            headline = f"{verb} takes {percent_text(share)} of the run"
            sentence = f"{headline} ({seconds_text(seconds)})."
            yield Finding(kind, f"{headline}.", sentence, advised(TRY[kind], program), share, seconds, phase=phase)


def _memory(counters: Sequence[Counter]) -> Iterator[Finding]:
    """Report memory that keeps growing (see GROWTH)."""
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
            headline = f"Memory grows on rank {counter.rank}."
            yield Finding("memory", headline, sentence, TRY["memory"], 0.0, 0.0, counter.rank)


def _computing(shares: _Shares) -> Finding:
    share = shares.share(*COMPUTING)
    title = "Compute-bound" if share >= 0.8 else "Computing"
    sentence = f"{title}: {shares.of_step(share)} is forward, backward and optimizer."
    return shares.finding("compute", None, title, share, sentence, TRY["compute"])
