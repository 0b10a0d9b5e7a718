"""Write docs/internals/evidence.md: every claim about devices, and the rung of evidence on which it stands.

    make evidence            runs the tests on the fake CUDA, keeps what passed, and calls this
    python bench/evidence.py of what was kept

Reads bench/results: evidence.json (tests/cuda/evidence.py), imports.json, races.json, foreign_on_fake.json, and
gpu.json where a GPU has run bench/gpu.py. tests/docs/test_evidence_page.py holds that the page is what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "bench/results", ROOT / "docs/internals/evidence.md"
Row = tuple[str, ...]
HEAD = """# What is known of devices, and how

<!-- made by bench/evidence.py -->

A claim about devices names its rung, and stands here with the command that shows it. Rows without a date were run at
`{commit}` ({date}, torch {torch}). **Several GPUs have not run meshwise yet.**

| rung | what runs | does not find |
|---|---|---|
| R0 | CPU workers over gloo: `make test` | whatever only a device does |
| R1 | the CUDA wheel, imported, without a device: what spoils a fork | all else |
| R2 | torch's CUDA code and ours on [a fake CUDA](fake-gpu.md), with real numbers | speed, kernels, fragmentation |
| R3 | R2, watched by `mw.find_races`: what happens before what | what no run reaches |
| R5 | one GPU | several devices |
| R6 | several GPUs | |
"""
FAKE = """
## On a fake GPU

| claim | rung | shown by | command |
|---|---|---|---|
"""
GPU = """
## On one GPU

R5, by [gpu.py](../../bench/gpu.py): {accelerator}, {date}, torch {torch}; kept by `{commit}`. **Not run since.**

| claim | then |
|---|---|
"""
NONE = """
## Not known

Rung none: step times, overlap and memory that the allocator reserves (predicted: [accuracy](accuracy.md); two
configurations were measured on one GPU, above); fragmentation and expandable segments; kernels, `torch.compile` and
CUDA graphs on several devices; access between devices (`peer`) and memory that processes share, which the fake refuses.
Once in three runs, beside another session of tests, `side_stream` of test_whole.py left other losses: cause unknown.

Of `meshwise submit --kubernetes`, the rules as documented were played, and no controller was run:
[test_several_pods.py](../../tests/launcher/engines/test_several_pods.py) kills, drains and silences three pods.
"""


def of_tests(kept: dict[str, Any]) -> Iterator[Row]:
    """Claims that files of tests stand for: claim, rung, what was found, where."""
    for claim, found in kept["claims"].items():
        files = ", ".join(f"[{Path(file).name}](../../{file})" for file in found["files"])
        tests = found["passed"] + len(found["others"])
        passed = f"{tests} test{'s' if tests > 1 else ''}"
        passed = f"{found['passed']} of {passed}" if found["others"] else passed
        yield claim, "none: not all passed" if found["others"] else found["rung"], passed, f"`make cuda`: {files}"


def of_benches() -> Iterator[Row]:
    """Claims that scripts stand for."""
    races, builds, foreign = (_kept(name) for name in ("races", "imports", "foreign_on_fake"))
    found = races["summary"]
    told = f"{found['by the checker, with file and line']} of {found['faults']} planted faults, "
    told += f"{found['hidden, by the checker']} of {found['hidden']} by who had not read the checker; no alarm in "
    told += f"{found['without alarm, with the checker on']} of {found['clean programs']} right programs"
    yield "races are told by line", "R3", told + _on(races), "[races.py](../../bench/races.py) `--checker`"
    for build in builds["builds"]:
        what = f"{build['imported without a GPU, then forked']}{_on(builds)}"
        yield f"torch {build['torch']}: no module spoils a fork", "R1", what, "[imports.py](../../bench/imports.py)"
    every = foreign["programs"].values()
    held = f"{sum(each['holds'] for each in every)} of {len(every)} as on two CPU workers, or in a bound{_on(foreign)}"
    where = "[foreign_on_fake.py](../../bench/foreign_on_fake.py)"
    yield "programs of pytorch/examples with the two lines, on two GPUs", "R2", held, where


def _on(kept: dict[str, Any]) -> str:
    commit = kept["machine"].get("commit")
    return f" ({kept['machine']['date']}, `{commit}`)" if commit else f" ({kept['machine']['date']})"


def _kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def page() -> str:
    """The text of docs/internals/evidence.md."""
    kept, gpu = _kept("evidence"), _kept("gpu")
    text = HEAD.format(**kept["machine"]) + FAKE
    text += "".join(f"| {' | '.join(row)} |\n" for row in (*of_tests(kept), *of_benches()))
    text += GPU.format(**gpu["machine"])
    return text + "".join(f"| {name} | {value} |\n" for name, value in gpu["claims"].items()) + NONE


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
