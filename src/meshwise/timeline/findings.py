"""What limited a run: a sentence each with its number, and the next thing to try.

Shares are of the time of a step, mean over ranks, without the first step of a session. A finding is reported from its
LEAST share on. A straggler must also be last more often than chance makes a rank last (see `stragglers.CHANCE`), and by
more than twice the error of the clocks.

Tested in tests/timeline/test_stragglers.py and test_slow_link.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.spec.units import bytes_text, percent_text, seconds_text
from meshwise.timeline.run_report import MEMORY, CollectiveReport, Finding, GoodputPart
from meshwise.timeline.spans import KINDS
from meshwise.timeline.step_table import StepTable
from meshwise.timeline.stragglers import straggler_ranks
from meshwise.timeline.timeline import Counter

LEAST = {"straggler": 0.02, "input": 0.10, "communication": 0.10, "imbalance": 0.10, "idle": 0.10, "stalls": 0.10}
LEAST_OF_RUN = {"checkpoint": 0.10, "evaluation": 0.30}
STALL = 3.0
FEWEST = 10
"""Steps below which a run is too short to name a straggler."""
GROWTH, GROWTH_STEPS, GROWTH_SAMPLES = 0.05, 500, 100
"""Memory that grows by this share from third to third of a run's last three quarters is a finding, if there are so many
steps and samples of it: allocators warm up for a while."""

_SLOWER_COMPUTE = "Look for another program on its device, a lower clock, longer samples, or extra work on this rank."
TRY_FOR_STRAGGLER = {
    "data": "Compare its data source with the others': slower storage, larger samples, fewer loader workers.",
    "transfer": "Compare the path from host to device with the others': meshwise run prints which cores it uses.",
    "forward": _SLOWER_COMPUTE,
    "backward": _SLOWER_COMPUTE,
    "optimizer": "Look for another program on its device or cores, a lower clock or throttling.",
    "evaluate": "Its part of the test set takes longer; look for other work on its device.",
    "checkpoint": "It saves while the others wait: save less often (--save-every), or to faster storage.",
    "idle": "Its time is spent between the phases: look for host work in its loop, or another program.",
}


@dataclass(frozen=True)
class _Shares:
    """The time of a step: seconds by kind, mean over ranks and steady steps."""

    steps: int
    seconds: dict[str, float]
    step: float

    def share(self, *kinds: str) -> float:
        return sum(self.seconds[kind] for kind in kinds) / self.step if self.step else 0.0

    def bound(self, title: str, share: float) -> str:
        """`Input-bound: ` where that is the largest part of a step, else `Input: `."""
        computing = self.share("forward", "backward", "optimizer")
        most = max(computing, self.share("communication"), self.share("waiting"), self.share("data", "transfer"))
        return f"{title}-bound: " if share >= most else f"{title}: "

    def of_step(self, share: float) -> str:
        """`18 % of a step (1.6 ms)`."""
        return f"{percent_text(share)} of a step ({seconds_text(share * self.step)})"

    def finding(self, kind: str, phase: str | None, share: float, sentence: str, advice: str) -> Finding:
        return Finding(kind, sentence, advice, share, share * self.step, phase=phase)


def findings_of(
    table: StepTable,
    error_seconds: float,
    goodput: Sequence[GoodputPart],
    collectives: Sequence[CollectiveReport],
    counters: Sequence[Counter],
) -> list[Finding]:
    """What limits a step, the largest share first; then how much of it is computing; then growing memory."""
    steady = table.steady
    if not steady.any():
        return []
    mean = table.kind_seconds()[steady].mean(axis=0)
    seconds = dict(zip(KINDS, mean.tolist(), strict=True))
    shares = _Shares(int(steady.sum()), seconds, float(table.step_seconds()[steady].mean()))
    stragglers = list(_stragglers(table, shares, error_seconds))
    found = [*stragglers, *_input(shares), *_communication(table, shares, collectives, stragglers)]
    found += [*_imbalance(shares, stragglers), *_idle(shares), *_of_run(goodput), *_stalls(table)]
    return [*sorted(found, key=lambda finding: -finding.share), _computing(shares), *_memory(counters)]


def verdict_of(findings: Sequence[Finding]) -> str:
    """The one sentence: that of the first finding."""
    return findings[0].sentence if findings else "No step was recorded, so nothing limited one."


def _stragglers(table: StepTable, shares: _Shares, error_seconds: float) -> Iterator[Finding]:
    points = table.sync_points
    steady = np.isin(points.step, table.step[table.steady])
    compared = steady & points.overlapped if points.overlapped.any() else steady
    for rank in straggler_ranks(points, table.arrivals.ranks) if shares.steps >= FEWEST else ():
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
        sentence = (
            f"Rank {rank} is a straggler: last in {percent_text(often)} of the steps, by {seconds_text(delay)}, "
            f"{where}. Without the delay a step would take {seconds_text(cost)} less ({percent_text(share)})."
        )
        yield Finding("straggler", sentence, TRY_FOR_STRAGGLER[phase], share, cost, rank, phase)


def _input(shares: _Shares) -> Iterator[Finding]:
    share = shares.share("data", "transfer")
    if share >= LEAST["input"]:
        sentence = f"{shares.bound('Input', share)}{shares.of_step(share)} is spent waiting for a batch."
        advice = "Read ahead with more loader workers (loader_workers of a Job, num_workers of a DataLoader)."
        yield shares.finding("input", "data", share, sentence, advice)


def _communication(
    table: StepTable, shares: _Shares, collectives: Sequence[CollectiveReport], stragglers: Sequence[Finding]
) -> Iterator[Finding]:
    share = shares.share("communication")
    if share < LEAST["communication"]:
        return
    delays = table.sync_points.delay
    why = f" on (ranks arrive within {seconds_text(float(np.median(delays)) if len(delays) else 0.0)})"
    if shares.share("waiting") < share / 2:
        why += ": the links are slow, not a rank"
    if len(table.arrivals.ranks) < 2:
        why = ", or waiting for ranks that left no log: the two cannot be told apart"
    elif stragglers:
        why = f" on, besides what rank {', '.join(str(found.rank) for found in stragglers)} costs: the links are slow"
    rates = [c for c in collectives if c.bus_bandwidth and c.bytes]
    largest = max(rates, key=lambda c: c.bytes * c.count, default=None)
    speed = ""
    if largest is not None and largest.bus_bandwidth:
        rate = bytes_text(largest.bus_bandwidth)
        speed = f" The largest part moves {bytes_text(largest.bytes)} at a bus bandwidth of {rate}/s."
    sentence = (
        f"{shares.bound('Communication', share)}{shares.of_step(share)} is exposed communication (not overlapped with "
        f"computing), from the last rank's arrival{why}.{speed}"
    )
    advice = (
        "Fewer reductions a sample: a larger batch (--batch-size), or accumulate (--accumulate, mw.accumulate); half "
        "the bytes: bf16 (--precision bf16)."
    )
    yield shares.finding("communication", "communication", share, sentence, advice)


def _imbalance(shares: _Shares, stragglers: Sequence[Finding]) -> Iterator[Finding]:
    share = shares.share("waiting")
    if share >= LEAST["imbalance"] and sum(finding.share for finding in stragglers) <= share / 2:
        sentence = f"Load imbalance: {shares.of_step(share)} is spent waiting for the slowest rank, which varies."
        advice = (
            "Samples of unequal length: batch similar ones together. A shared or throttling machine: look for other "
            "programs."
        )
        yield shares.finding("imbalance", "waiting", share, sentence, advice)


def _idle(shares: _Shares) -> Iterator[Finding]:
    share = shares.share("idle")
    if share >= LEAST["idle"]:
        sentence = f"Between phases: {shares.of_step(share)} is in none of them."
        advice = "Look for host work in the training loop: printing, .item(), logging, metrics."
        yield shares.finding("idle", "idle", share, sentence, advice)


def _stalls(table: StepTable) -> Iterator[Finding]:
    """Steps far longer than usual that take much of the time."""
    seconds, steps = table.step_seconds()[table.steady], table.step[table.steady]
    usual = float(np.median(seconds))
    beyond = np.where(seconds > STALL * usual, seconds - usual, 0.0)
    share = float(beyond.sum() / seconds.sum())
    if len(seconds) < FEWEST or share < LEAST["stalls"]:
        return
    worst = int(steps[seconds.argmax()])
    sentence = (
        f"Stalls: {percent_text((beyond > 0).mean(), 1)} of the steps take more than {STALL:.0f} times the median of "
        f"{seconds_text(usual)}, and {percent_text(share)} of the time beyond it; the longest is step {worst} with "
        f"{seconds_text(float(seconds.max()))}."
    )
    advice = f"See meshwise report RUN --steps {worst}. Often another program, a slow disk, or garbage collection."
    yield Finding("stalls", sentence, advice, share, float(beyond[beyond > 0].mean()))


def _of_run(goodput: Sequence[GoodputPart]) -> Iterator[Finding]:
    parts = {part.name: part for part in goodput}
    for kind, part, phase, verb, advice in (
        ("checkpoint", "saving", "checkpoint", "Saving", "Save less often (--save-every), or to faster storage."),
        ("evaluation", "evaluation", "evaluate", "Evaluating", "Evaluate less often, or on fewer samples."),
    ):
        share, seconds = parts[part].share, parts[part].seconds
        if share >= LEAST_OF_RUN[kind]:
            sentence = f"{verb} takes {percent_text(share)} of the run ({seconds_text(seconds)})."
            yield Finding(kind, sentence, advice, share, seconds, phase=phase)


def _memory(counters: Sequence[Counter]) -> Iterator[Finding]:
    """Memory that grows all the time: the medians of a run's thirds rise by GROWTH each."""
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
            yield Finding("memory", sentence, advice, 0.0, 0.0, counter.rank)


def _computing(shares: _Shares) -> Finding:
    share = shares.share("forward", "backward", "optimizer")
    took = f"{seconds_text(share * shares.step)} of {seconds_text(shares.step)}"
    sentence = f"Computing takes {percent_text(share)} of a step ({took})."
    if share >= 0.8:
        sentence = f"Compute-bound: {shares.of_step(share)} is forward, backward and optimizer."
    advice = "To go faster: more devices, bf16 (--precision bf16), torch.compile, or a smaller model."
    return shares.finding("compute", None, share, sentence, advice)
