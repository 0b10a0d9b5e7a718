"""How fast plans are found: a trace, the tables of `meshwise plan`, and plans of a large model on many devices.

    python bench/plan_speed.py [--minutes 5] [--sample 20] [--only trace|tables|many]

    trace     Llama-3-8B on 64 ranks, as `meshwise plan` traces it: the first time in a process, and again (imports not
              counted); and all blocks
    tables    `mw.plan` of Llama 3 1B and 8B on 8xH100 in a new process: seconds to the first table and to the end,
              imports counted
    many      plans of Llama-3-70B on 512 H100 that differ in mesh, microbatch, recompute and schedule, for so many
              minutes in an order drawn by a seed; of --sample of them the whole model is traced too, and compared

Of each the largest resident memory of its process. Results: bench/results/plan_speed.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOALS = {"trace": 4.0, "first table": 15.0, "table": 60.0, "1,000 plans": 60.0, "GB": 4.0, "difference": 0.01}


def trace_of_8b() -> dict[str, Any]:
    """Seconds of what stands for a trace of all 32 blocks, and of that trace."""
    import transformers  # noqa: F401
    from llamas import llama_8b

    import meshwise as mw
    from meshwise.rehearsal.from_few import Tracer
    from meshwise.rehearsal.trace import trace

    plan = mw.Plan(shard=64, precision="bf16")

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        began = time.perf_counter()
        found = call()
        return time.perf_counter() - began, found

    tracer = Tracer(llama_8b)
    seconds = [timed(lambda: tracer(plan, "gpu"))[0] for _ in range(3)]
    whole, found = timed(lambda: trace(llama_8b, plan))
    launches = sum(1 for _ in found[0].step.launches)
    told = {"first": seconds[0], "again": seconds[1:], "all blocks": whole, "launches": launches}
    return {"plan": "shard=64 precision=bf16"} | told


def tables(size: str, began: float) -> dict[str, Any]:
    """began: by the clock of the system, when the process was started."""
    import llamas

    import meshwise as mw

    shown: list[float] = []
    found = mw.plan(
        getattr(llamas, f"llama_{size}"),
        machine="8xH100",
        settings=("precision=bf16",),
        show=lambda plans: shown.append(time.time() - began),
    )
    return {
        "first table": shown[0],
        "shown": shown,
        "end": time.time() - began,
        "plans": [str(each.plan) for each in found.found.estimates],
        "refused": Counter(each.why for each in found.found.refused),
        "left": len(found.found.left),
        "best": str(found.found.estimates[0].plan),
    }


def many(minutes: float, sample: int, seed: int) -> dict[str, Any]:
    """Plans a minute, bounds included, and how far estimates are from those of traces of the whole model."""
    from llamas import llama_70b

    from meshwise.machine.words import machine_from_words
    from meshwise.rehearsal.bounds import Bounds
    from meshwise.rehearsal.estimator import rehearser
    from meshwise.rehearsal.from_few import Tracer
    from meshwise.rehearsal.search import Known, search
    from meshwise.rehearsal.trace import trace

    class Whole(Tracer):
        def __call__(self, plan: Any, kind: str, speeds: Any = ()) -> Any:
            return trace(self.job, plan, kind, speeds)

    machine = machine_from_words("64x8xH100@400Gb")
    program = Tracer(llama_70b)
    bounds, rehearse = Bounds(program.model, machine, None), rehearser(program, machine)
    plans = _plans(llama_70b.batch_size)
    random.Random(seed).shuffle(plans)
    taken: list[float] = []

    def estimate(plan: Any) -> Any:
        start = time.perf_counter()
        try:
            found = rehearse(plan)
        finally:
            taken.append(time.perf_counter() - start)
        bounds.learn(found)
        return found.estimate

    found = search(plans, estimate, minutes * 60, known=Known(bounds))
    done = len(plans) - len(found.left)
    whole = rehearser(Whole(llama_70b), machine)
    compared = [_compared(each.plan, each, whole) for each in found.estimates[:sample]]
    return {
        "of": len(plans),
        "rehearsed": len(found.estimates),
        "refused": Counter(each.why for each in found.refused),
        "left": len(found.left),
        "seconds": found.seconds,
        "1,000 plans": 1000 * found.seconds / max(done, 1),
        "median of one": statistics.median(taken),
        "most of one": max(taken),
        "compared": compared,
    }


def _compared(plan: Any, found: Any, whole: Callable[[Any], Any]) -> dict[str, Any]:
    start = time.perf_counter()
    other = whole(plan).estimate
    pairs = {
        "seconds": (found.seconds and found.seconds.value, other.seconds and other.seconds.value),
        "allocated": (found.memory.allocated, other.memory.allocated),
        "total": (found.memory.total.value, other.memory.total.value),
    }
    off = {name: one / two - 1 if one and two else None for name, (one, two) in pairs.items()}
    return {"plan": str(plan), "took": time.perf_counter() - start} | off


def _plans(batch: int) -> list[Any]:
    import meshwise as mw
    from meshwise.spec.errors import PlanError

    found = []
    for tensor, pipeline in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        replicas = 512 // (tensor * pipeline)
        for shard in sorted({1, 8, 64, replicas}):
            local = batch // replicas
            for power in range(local.bit_length()):
                for recompute, schedule in itertools.product(("none", "full"), ("gpipe", "1f1b", "interleaved")):
                    if replicas % shard or local % 2**power or (pipeline == 1 and schedule != "1f1b"):
                        continue
                    values = {"data": replicas // shard, "shard": shard, "tensor": tensor, "pipeline": pipeline}
                    if pipeline > 1:
                        values["schedule"] = schedule
                    try:
                        found.append(mw.Plan(**values, accumulate=2**power, recompute=recompute, precision="bf16"))
                    except PlanError:
                        continue
    return list(dict.fromkeys(found))


def main() -> None:
    """Each measurement in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("trace", "tables", "many"))
    parser.add_argument("--inside", nargs=2, metavar=("WHAT", "BEGAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        what, began = options.inside
        if what == "trace":
            found = trace_of_8b()
        elif what == "many":
            found = many(options.minutes, options.sample, options.seed)
        else:
            found = tables(what, float(began))
        found["GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps(found))
        return
    from keep import keep

    words = {"trace": ["trace"], "tables": ["1b", "8b"], "many": ["many"]}
    result: dict[str, Any] = {"goals": GOALS, "load": os.getloadavg()[0]}
    for what in itertools.chain.from_iterable(words[one] for one in words if options.only in (None, one)):
        command = [sys.executable, __file__, "--inside", what, str(time.time()), "--minutes", str(options.minutes)]
        command += ["--sample", str(options.sample), "--seed", str(options.seed)]
        done = subprocess.run(command, capture_output=True, text=True)
        result[what] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-2000:]
        print(what, json.dumps(result[what], indent=1), flush=True)
    keep("plan_speed" if options.only is None else f"plan_speed_{options.only}", result)


if __name__ == "__main__":
    main()
