"""Write docs/internals/evidence.md: every claim about devices, and the rung of evidence on which it stands.

    make evidence            runs the tests on the fake CUDA, keeps what passed, and calls this
    python bench/evidence.py of what was kept

Reads bench/results: evidence.json (tests/cuda/evidence.py), imports.json, races.json, device_branches.json, and
gpu.json where a GPU has run bench/gpu.py. tests/docs/test_evidence_page.py holds that the page is what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "bench/results", ROOT / "docs/internals/evidence.md"
NONE = {
    "step times, overlap, and memory that the allocator reserves on a GPU": "predicted ([accuracy.md](accuracy.md)); "
    "two configurations were measured on one GPU (R5 above), none on several",
    "fragmentation, expandable segments": "the fake's memory is the host's",
    "kernels of a GPU and CUDA graphs on several devices": "the fake computes by the CPU's kernels, and refuses "
    "`compile` and graphs; on one GPU they were run (R5 above)",
    "access between devices (`peer`), memory that processes share": "refused by the fake; copies go by the host",
}
PODS = (
    "what `meshwise submit --kubernetes` prints starts again, bit for bit, after pods are killed, drained or silent",
    "rules as documented, controllers not run",
    "three pods in network namespaces, under a stand-in that follows the documented rules of Job, JobSet and Trainer",
    "[test_several_pods.py](../../tests/launcher/engines/test_several_pods.py)",
)
HEAD = """# What is known of devices, and how

<!-- made by bench/evidence.py -->

{state} What can be run of CUDA without a GPU is run: the CUDA wheel of torch, unchanged, over a small CUDA of our own
([tests/cuda](../../tests/cuda/README.md)). Each claim about devices stands on a rung:

| rung | what runs | finds | does not find |
|---|---|---|---|
| R0 | CPU workers over gloo | numbers, plans, faults, restarts | whatever only a device does |
| R1 | the CUDA wheel, imported, without a device | what spoils a fork | all else |
| R2 | torch's CUDA code and ours on a fake CUDA, with real numbers: allocator, streams, events, generators, NCCL's \
process group, DDP, FSDP2 | control flow, wrong devices, missing waits as wrong numbers under three schedules, \
collectives that differ, memory limits | speed, kernels, fragmentation |
| R3 | R2 under a checker of what happens before what (`meshwise check --perturb`, `mw.find_races`) | races between \
streams, by line | what no run reaches |
| R5 | one GPU | real kernels and streams | several devices |
| R6 | several GPUs | links, NCCL | |

"""


def of_tests(kept: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Claims that tests stand for: claim, rung, what was found, where. made: of tests run apart from the others."""
    for claim, found in kept["claims"].items():
        files = ", ".join(f"[{Path(file).name}](../../{file})" for file in found["files"])
        tests = found["passed"] + len(found["others"])
        what = f"{found['passed']} of {tests} tests" if found["others"] else f"{tests} test{'s' if tests > 1 else ''}"
        yield (
            claim,
            found["rung"] if not found["others"] else "none: not all tests passed",
            what + (f" ({found['made']})" if "made" in found else ""),
            f"`make cuda`: {files}",
        )


def of_benches() -> Iterator[tuple[str, str, str, str]]:
    """Claims that scripts stand for."""
    for build in _kept("imports")["builds"]:
        name, ran = build["torch"], build["mnist-mlp, 2xcuda, one epoch"]
        command = "[imports.py](../../bench/imports.py)"
        yield (
            f"torch {name}: no module of ours spoils a fork",
            "R1",
            build["imported without a GPU, then forked"],
            command,
        )
        if ran.startswith("accuracy"):
            yield f"torch {name}: `meshwise run mnist-mlp --devices 2xcuda`", "R2", ran, command
    races = _kept("races")["summary"]
    found = f"{races['by the checker, with file and line']} of {races['faults']} planted faults told with file and line"
    hidden = f"; {races['hidden, by the checker']} of {races['hidden']} planted without having read the checker"
    clean = f"; no alarm in {races['without alarm, with the checker on']} of {races['clean programs']} clean programs"
    yield "races between streams are told by line", "R3", found + hidden + clean, "[races.py](../../bench/races.py)"
    foreign = _kept("foreign_on_fake")["programs"]
    count = sum(each["holds"] for each in foreign.values())
    held = f"{count} of {len(foreign)}: losses equal, or within a bound with its reason"
    where = "[foreign_on_fake.py](../../bench/foreign_on_fake.py)"
    yield "programs of pytorch/examples with the two lines on two GPUs, beside two CPU workers", "R2", held, where
    asked = _kept("device_branches")
    both = f"{asked['questions'] - len(asked['one way only'])} of {asked['questions']} answered both ways"
    where = "[device_branches.py](../../bench/device_branches.py)"
    yield "every question that the code asks about the kind of a device", "R2", both, where


def page() -> str:
    """The text of docs/internals/evidence.md."""
    kept, gpu = _kept("evidence"), RESULTS / "gpu.json"
    machine = kept["machine"]
    state = "**No GPU has run meshwise yet.**"
    rows = [*of_tests(kept), *of_benches()]
    if gpu.exists():
        parts = json.loads(gpu.read_text())
        state = f"A GPU has run parts of it ({parts['machine']['accelerator']}, {parts['machine']['date']})."
        rung = "R6" if parts.get("gpus", 1) > 1 else "R5"
        rows += [
            (name, rung, str(value)[:120], "[gpu.py](../../bench/gpu.py)") for name, value in parts["claims"].items()
        ]
    rows.append(PODS)
    lines = ["| claim | rung | shown by | command |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [f"| {claim} | none | {why} | |" for claim, why in NONE.items()]
    made = f"Made on {machine['date']}: torch {machine['torch']}, Python {machine['python']}, {machine['processor']}."
    return HEAD.format(state=state) + "\n".join(lines) + f"\n\n{made} `make evidence` makes this page anew.\n"


def _kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
