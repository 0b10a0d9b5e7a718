"""Move the modules of training/, the launcher and split tensors into rooms of one idea: `python bench/moves.py`.

It works on the tree that lies here, with what is not committed. It changes nothing where one of its tables does not
fit the tree, and says each line that does not: a new file of training/ needs a line in TABLE, a new test of it a word
in TESTS. Then come ruff, and bench/path.py for docs/architecture.md, which takes minutes (`--no-path` leaves it out).
Remove this file when the moves are in main.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "meshwise"
SRC = ROOT / "src" / PACKAGE

# ---- The tables ------------------------------------------------------------------------------------------------------

ROOMS: dict[str, tuple[int, str, str]] = {
    # room: floor, the docstring of its __init__.py, what docs/architecture.md says of it
    "data": (
        7,
        "Who reads which sample, and draws which random numbers: the order, loaders, keyed draws.",
        "who reads which sample: the order, data sets and loaders; random draws that are keyed by samples",
    ),
    "injection": (
        7,
        "Faults that a run is told to have (`--fault`).",
        "faults that a run is told to have (`--fault`)",
    ),
    "recording": (
        8,
        "What a rank records of its run: a script's, a job's, and that of a program without our verbs.",
        "what a rank records of its run, whoever has started it; programs without our verbs",
    ),
    "engine": (
        9,
        "The engine: a plan applied to a program's models; one exact step, in a script's loop and in a job's.",
        "a plan applied to a program's models; one exact step: weights, backward, sums over the ranks, draws",
    ),
    "guards": (
        11,
        "What is wrong with a step or a loop, told before it costs numbers: one file a guard.",
        "what is wrong with a step or a loop, told before it costs numbers: one file a guard",
    ),
    "slips": (
        10,
        "Mistakes of a script that its source shows: sums, averages and counters of this rank's part alone.",
        "mistakes of a script that its source shows: sums, averages, counters of one rank's part",
    ),
    "process": (
        12,
        "The engine of this process: its plan, its end, and what an error is told with.",
        "the engine of this process: its plan, its end, and what an error is told with",
    ),
    "tracking": (
        13,
        "Where a run's numbers go: metrics.jsonl, the launcher, trackers.",
        "where a run's numbers go: metrics.jsonl, the launcher, trackers",
    ),
    "job": (
        14,
        "A job: what it is, its step, its loop, its options.",
        "a job: what it is, its step, its loop, its evaluations, the options of a run",
    ),
    "script": (
        14,
        "A script that keeps its own loop: the two lines, its loader, its sums, its checkpoint.",
        "a script that keeps its own loop: the two lines, its loader, its sums, its checkpoint",
    ),
    "prediction": (
        15,
        "Predictions: every sample once, in the data's order.",
        "predictions: every sample once, in the data's order, written as they come",
    ),
    "launcher": (
        17,
        "The launcher of a run: started, watched, started again, on one machine and on several.",
        "the launcher of a run: started, watched, started again, on one machine and on several",
    ),
}
NEW_ROOMS_BELOW: dict[str, tuple[int, str, str]] = {
    "autograd": (
        2,
        "What the autograd graph of a loss tells of it.",
        "what the autograd graph of a loss tells: sums over samples, penalties, samples that are coupled",
    ),
    "splits": (5, "", "split tensors: plain code sees the whole, each rank holds a part; a rule an operator"),
}
FLOORS_OF_OTHERS = {
    "spec": 0,
    "compat": 1,
    "records": 1,
    "schedulers": 1,
    "terminal": 1,
    "races": 2,
    "timeline": 2,
    "workers": 2,
    "transfer": 3,
    "machine": 4,
    "arrays": 5,
    "recovery": 5,
    "parallel": 6,
    "equivalence": 16,
    "jobs": 16,
    "rehearsal": 16,
    "api": 18,
    "commands": 19,
    "cli": 20,
    "__main__": 21,
    "__init__": 22,
}

# New module: the old ones whose bodies it has, in their order. `?` marks one that may be gone, or not there yet.
TABLE: dict[str, str] = {
    "data.order": "training.order",
    "data.source": "training.source",
    "data.generators": "training.generators",
    "data.keyed": "training.keyed",
    "data.split_loader": "training.split_loader",
    "data.wrapped_loader": "training.wrapped_loader",
    "injection.faults": "training.faults",
    "injection.faulty_disk": "training.faulty_disk",
    "injection.faulty_link": "training.faulty_link",
    "recording.recording": "training.recording",
    "recording.joined_run": "training.joined_run",
    "recording.plain_program": "training.plain_program",
    "recording.block_spans": "training.block_spans",
    "engine.engine": "training.engine",
    "engine.program": "training.step_errors? training.program",
    "engine.weighing": "training.weighing",
    "engine.model_stream": "training.model_stream",
    "engine.phases": "training.phases training.script_steps?",
    "engine.loops": "training.loops",
    "engine.watcher": "training.watcher? training.loop_state?",
    "engine.events": "training.events?",
    "engine.listeners": "training.listeners?",
    "engine.director": "training.director?",
    "engine.carried": "training.carried?",
    "engine.notices": "training.notices?",
    "engine.given": "training.given?",
    "engine.split_batch": "training.split_batch",
    "engine.waiting_gradients": "training.waiting_gradients?",
    "engine.steps": "training.steps?",
    "guards.registry": "training.guards?",
    "guards.probation": "training.probation?",
    "guards.loss_looks": "training.loss_looks?",
    "guards.draws_note": "training.draws_note?",
    "guards.changeless_steps": "training.changeless_steps?",
    "guards.agreed": "training.agreed",
    "guards.batch_shapes": "training.batch_shapes",
    "guards.replicas": "training.settings training.replicas",
    "guards.behind_loop": "training.behind_loop?",
    "guards.same_data": "training.same_data",
    "guards.made_in_forward": "training.made_in_forward",
    "guards.finite_losses": "training.finite_losses",
    "guards.by_hand": "training.by_hand",
    "guards.coupled": "training.coupled",
    "guards.undistributed": "training.undistributed",
    "guards.unsummed": "training.unsummed",
    "slips.user_source": "training.user_source",
    "slips.counted_parts": "training.counted_parts",
    "slips.own_loss": "training.own_loss",
    "slips.summed_twice": "training.summed_twice",
    "slips.padded_sums": "training.padded_sums",
    "slips.divided_batch": "training.divided_batch",
    "slips.resumed_loop": "training.resumed_loop",
    "slips.epochs_read": "training.epochs_read",
    "process.session": "training.session",
    "process.plan_choice": "training.plan_choice",
    "process.explain": "training.explain",
    "process.smaller": "training.smaller",
    "process.same_work": "training.same_work",
    "tracking.tracking": "training.tracking",
    "tracking.trackers": "training.trackers",
    "tracking.metrics_log": "training.metrics_log",
    "tracking.loss_ledger": "training.loss_ledger",
    "job.job": "training.job",
    "job.loop": "training.loop",
    "job.step": "training.microbatches training.job_step",
    "job.run": "training.job_start? training.job_data? training.pace? training.job_run",
    "job.options": "training.run_options",
    "job.best": "training.best",
    "job.evaluate": "training.evaluate",
    "job.replica_check": "training.replica_check",
    "job.not_finite": "training.not_finite",
    "job.left_out": "training.left_out",
    "job.spikes": "training.spikes",
    "job.last_step": "training.last_step",
    "script.distribute": "training.distribute",
    "script.distributed_loader": "training.distributed_loader",
    "script.checkpoint": "training.checkpoint",
    "script.saved_loop": "training.saved_loop",
    "script.state_folder": "training.state_folder",
    "script.things": "training.given_things? training.loop_things?",
    "script.extra_values": "training.extra_values",
    "script.in_loss": "training.in_loss",
    "script.over_ranks": "training.over_ranks",
    "script.verbs": "training.verbs",
    "script.files": "training.files",
    "prediction.predict": "training.predict",
    "prediction.options": "training.predict_options",
    "prediction.rows": "training.predicted_rows",
    "prediction.files": "training.prediction_files",
    "prediction.writer": "training.prediction_writer",
    "recovery.resume_changes": "training.resume_changes",
    "recovery.finite_state": "training.finite_state",
    "launcher.start": "api.start",
    "launcher.alone": "api.alone",
    "launcher.several": "api.several",
    "launcher.joined": "api.joined",
    "launcher.own_folder": "api.own_folder",
    "launcher.placing": "api.placing",
    "launcher.restarts": "api.restarts",
    "launcher.rescue": "api.rescue",
    "launcher.supervise": "api.supervise",
    "launcher.devices_left": "api.devices_left",
    "autograd.loss_graph": "compat.loss_graph",
    "autograd.coupled_loss": "compat.coupled_loss",
    "rehearsal.fakes.cuda": "compat.fake_cuda",
    "rehearsal.fakes.world": "compat.fake_world",
    "splits": "parallel.split",
    "parallel.layout": "parallel.split.layout",
    **{
        f"splits.{name}": f"parallel.split.{name}"
        for name in (
            *("along", "attention", "axis", "crossing", "elementwise", "losses", "packing", "places"),
            *("products", "rule", "rules", "shapes", "tensor"),
        )
    },
}
EMPTIED = ("training",)
"""Rooms of which every file has a line above; they are gone afterwards."""
# The first that is there takes these, instead of the line above.
INSTEAD = {"training.loop_state": ("training.given", "training.watcher")}
DOCSTRINGS = {
    "job.run": "A job as a rank runs it: its data, its state before the first step, and what it "
    "holds while it runs.\n\n"
    "Tested in tests/data/test_source.py, tests/job/test_plans_in_a_loop.py and tests/tracking/test_metrics_log.py.\n",
    "guards.replicas": """What replicas hold is alike on every rank: settings of optimizers, sums of what they train.

A scheduler or the program sets what optimizers step with, on each rank. Gradients are reduced, so parameters part only
where something changes them apart: noise that each rank draws for itself, or a rule that looks at this rank's samples.
The sums travel with the loss (agreed.py) at backward 2, 4, 8 … of each program.

Tested in tests/guards/test_agreed.py and test_replicas.py.
""",
    "script.things": "The program's things: what `mw.checkpoint` is given, and what of "
    "`mw.distribute` a loop would lose "
    "in silence.\n\nTested in tests/script/test_checkpoint.py and test_lost_in_a_loop.py.\n",
    "spec.reductions": "How a loss joins its samples: `reduction=` of a job and of `mw.backward`.\n\n"
    "Tested in tests/engine/test_sum_losses.py.\n",
    "rehearsal.fakes": "What a rehearsal runs on that is not there, made with private torch: CUDA "
    "by its name, other ranks.",
}
LAZY = {"engine", "recording", "process", "tracking", "injection", "launcher"}
"""Rooms whose files are imported when they are first used, as those of `api`."""

# (old module, name): the new module that gets it.
NAMES_THAT_MOVE = {
    ("training.job", "REDUCTIONS"): "spec.reductions",
    ("training.resume_changes", "made_with"): "job.run",
}
# (old module, class): its new name.
CLASSES = {
    ("api.check", "Program"): "CheckedProgram",
    ("api.start", "Program"): "LaunchedProgram",
    ("training.engine", "Part"): "Microbatch",
    ("machine.catalog", "Part"): "CatalogPart",
    ("recovery.layout", "Part"): "WriteItem",
    ("parallel.split.axis", "Part"): "SplitPart",
    ("training.prediction_files", "Memory"): "InMemory",
    ("rehearsal.estimate", "Memory"): "MemoryEstimate",
    ("arrays.array", "Memory"): "ViewedMemory",
    ("races.memory", "Memory"): "ShadowMemory",
    ("rehearsal.work", "Collective"): "CollectiveOperation",
    ("workers.heartbeat", "Collective"): "CollectiveCall",
    ("records.checkpoints", "Piece"): "StoredPiece",
    ("rehearsal.growth", "Piece"): "Insertion",
    ("rehearsal.growth", "Pieces"): "Insertions",
    ("arrays.moves", "Piece"): "Move",
    ("api.logs", "Progress"): "RunProgress",
    ("timeline.views.live_progress", "Progress"): "TrainingProgress",
    ("rehearsal.replay", "Axis"): "GrowthAxis",
    ("parallel.expert_axis", "Axis"): "ExpertAxis",
    ("parallel.expert_axis", "MeshAxis"): "ExpertMeshAxis",
    ("training.loop_state", "LoopState"): "CheckpointedLoop",
}

TESTS: dict[str, str] = {
    # room of the tests: files of tests/training (test_ and .py left out); `a>b` renames
    "data": "exact_random generators order source split_loader wrapped_loader",
    "injection": "faults",
    "recording": "block_spans plain_program",
    "engine": "backward_value compiled_step? events? program split_batch step_mistakes steps? sum_losses "
    "waiting_gradients? weighing",
    "guards": "agreed batch_shapes behind_loop? by_hand coupled_losses finite_losses made_in_forward replicas "
    "same_data undistributed unsummed",
    "slips": "padded_sums resumed_loop slips",
    "process": "same_work several_programs smaller",
    "tracking": "metrics_log tracking",
    "job": "best equal_losses last_step left_out not_finite part_trained plans_in_a_loop precision_runs replica_check "
    "resume run_options>options spikes",
    "script": "checkpoint distribute distributed_loader generate in_loss load lost_in_a_loop over_ranks read_values "
    "saved_loop state_folder torch_state two_loaders verbs",
    "prediction": "predict",
    "recovery": "resume_changes",
}
OTHER_TESTS = {
    "parallel/test_split_rules": "splits/test_split_rules",
    "parallel/test_split_levels": "splits/test_split_levels",
}

TEXTS: list[tuple[str, str, str]] = [
    # file (new path), old text (a `re:` pattern after the moves), new text; each must be found
    (
        "src/meshwise/slips/user_source.py",
        '.startswith("meshwise.training.")',
        ".startswith(ROOMS_OF_VERBS)",
    ),
    (
        "src/meshwise/slips/user_source.py",
        "re:\n\n\n(?=@dataclass|class |def )",
        '\n\nROOMS_OF_VERBS = ("meshwise.script.", "meshwise.process.", "meshwise.tracking.", "meshwise.job.")\n\n\n',
    ),
    (
        "docs/make_api.py",
        '("meshwise.training", "meshwise.parallel")',
        '(\n        "meshwise.script",\n        "meshwise.process",\n        "meshwise.tracking",\n'
        '        "meshwise.job",\n        "meshwise.parallel",\n    )',
    ),
    ("tests/docs/test_api.py", '"meshwise.training." not in page', '"meshwise.script." not in page'),
    (
        "bench/device_branches.py",
        '"parallel", "training", "transfer", "workers")',
        '"parallel", "engine", "guards", "job", "script", "transfer", "workers")',
    ),
    (
        "tests/conftest.py",
        '    "training": 30,\n',
        "",
    ),
    (
        "tests/conftest.py",
        '    "equivalence": 60,\n',
        '    "engine": 8,\n    "equivalence": 60,\n',
    ),
    ("tests/conftest.py", '    "docs": 10,\n', '    "data": 5,\n    "docs": 10,\n'),
    (
        "tests/conftest.py",
        '    "jobs": 10,\n',
        '    "guards": 15,\n    "injection": 3,\n    "job": 8,\n    "jobs": 10,\n',
    ),
    (
        "tests/conftest.py",
        '    "races": 10,\n',
        '    "prediction": 5,\n    "process": 5,\n    "races": 10,\n    "recording": 5,\n',
    ),
    (
        "tests/conftest.py",
        '    "spec": 5,\n',
        '    "script": 10,\n    "slips": 5,\n    "spec": 5,\n    "splits": 10,\n',
    ),
    ("tests/conftest.py", '    "transfer": 30,\n', '    "tracking": 3,\n    "transfer": 30,\n'),
    # tests/test_floors.py
    ("tests/test_floors.py", "re:FLOORS = \\{.*?\n\\}\n", "<FLOORS>"),
    (
        "tests/test_floors.py",
        'WITH_PRIVATE_TORCH = {"compat"}',
        'WITH_PRIVATE_TORCH = ("compat/", "autograd/", "rehearsal/fakes/")',
    ),
    (
        "tests/test_floors.py",
        "re:if source\\.room in WITH_PRIVATE_TORCH:",
        "if source.path.startswith(WITH_PRIVATE_TORCH):",
    ),
    ("tests/test_floors.py", '    "split",\n', '    "layout",\n'),
    (
        "tests/test_floors.py",
        "MOST_FILE_LINES = 350\n",
        "MOST_FILE_LINES = 350\nMOST_LINES_OF_ONE_CLASS = 450\n"
        '"""Of a file that is one class, which has three quarters of its lines."""\n',
    ),
    (
        "tests/test_floors.py",
        "    yield source.path, len(source.text.splitlines()), MOST_FILE_LINES\n",
        "    most = MOST_LINES_OF_ONE_CLASS if _is_one_class(source) else MOST_FILE_LINES\n"
        "    yield source.path, len(source.text.splitlines()), most\n",
    ),
    (
        "tests/test_floors.py",
        "def _called(call: ast.Call) -> str:\n",
        "def _is_one_class(source: Source) -> bool:\n"
        '    """Whether one class has three quarters of the lines of a file."""\n'
        "    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]\n"
        "    lines = [(node.end_lineno or 0) - node.lineno + 1 for node in classes]\n"
        "    return max(lines, default=0) >= 0.75 * len(source.text.splitlines())\n\n\n"
        "def _called(call: ast.Call) -> str:\n",
    ),
    (
        "tests/test_floors.py",
        "    floor = FLOORS.get(source.room)\n    for node, room in own_imports(source):\n"
        "        if floor is None or room == source.room:\n",
        "    floor, upward = FLOORS.get(source.room), UPWARD.get(source.path, set())\n"
        "    for node, room in own_imports(source):\n"
        "        if floor is None or room == source.room or room in upward:\n",
    ),
    (
        "tests/test_floors.py",
        "def test_every_floor_has_a_room() -> None:\n",
        "def test_every_import_upward_is_still_there() -> None:\n"
        "    found = {s.path: {room for _, room in own_imports(s)} for s in own_sources() if s.path in UPWARD}\n"
        "    gone = {path: rooms - found.get(path, set()) for path, rooms in UPWARD.items()}\n"
        '    assert not any(gone.values()), f"no such import any more: remove it from UPWARD: {gone}"\n\n\n'
        "def test_every_floor_has_a_room() -> None:\n",
    ),
    (
        "tests/test_floors.py",
        '"import meshwise.job.job", "spec (floor 0) imports training"',
        '"import meshwise.job.job", "spec (floor 0) imports job"',
    ),
    (
        "tests/test_floors.py",
        '        "parallel/a.py",\n'
        '        "from meshwise.recovery import state",\n        "parallel (floor 5) imports",\n',
        '        "script/a.py",\n'
        '        "from meshwise.job import loop",\n        "script (floor 14) imports job (floor 14)",\n',
    ),
    (
        "tests/test_floors.py",
        '"training (floor 6) imports __init__ (floor 12)"',
        '"engine (floor 9) imports __init__ (floor 22)"',
    ),
    ("tests/test_floors.py", '"training (floor 6) imports __init__"', '"engine (floor 9) imports __init__"'),
    ("tests/test_floors.py", 're:"training/', '"engine/'),
    (
        "tests/test_floors.py",
        '    "a long function": (\n',
        '    "a long file of one class": (\n        "spec/a.py",\n'
        '        "class A:\\n" + "    x = 1\\n" * MOST_LINES_OF_ONE_CLASS,\n'
        '        "spec/a.py: 451 lines, more than 450",\n    ),\n'
        '    "a long function": (\n',
    ),
    (
        "tests/test_floors.py",
        '    "as many parameters as may be":',
        '    "a file of one class": ("spec/a.py", "class A:\\n" + "    x = 1\\n" * MOST_FILE_LINES),\n'
        '    "as many parameters as may be":',
    ),
    # docs
    ("docs/architecture.md", "re:\\| floor \\| room \\| what it is for \\|\n\\|[-|]*\\|\n(?:\\|.*\n)+", "<ROOMS>"),
    ("docs/architecture.md", "`parallel/split/`", "`splits/`"),
    ("docs/architecture.md", "maybe:| `job/loop.py`, `parallel/shard.py` |", "| `job/step.py`, `parallel/shard.py` |"),
    (
        "CONTRIBUTING.md",
        "maybe:private names of torch are used in `compat/` only",
        "private names of torch are used in `compat/`, `autograd/` and `rehearsal/fakes/` only",
    ),
    (
        "tests/engine/test_sum_losses.py",
        "autograd/loss_graph.py too",
        "autograd/loss_graph.py and spec/reductions.py too",
    ),
]
FLOORS_COMMENTS = {
    "launcher": "    # The top floors, in the order in which their modules import each other.\n",
    "__init__": "    # Reads the public names when they are used: of its own it imports nothing.\n",
}
UPWARD_FROM, UPWARD_TO = {"engine"}, {"guards", "slips"}
"""Imports upward that are allowed where they are found; all others are faults."""
MOST_FILES, MOST_LINES = 15, 450
REWRITTEN = ("src", "tests", "bench", "examples", "docs")
KEPT = ("bench/moves.py", "bench/results", "docs/log.md", "docs/api.md", "tests/old")
ALSO = (
    "README.md",
    "README.zh.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    "Makefile",
    "bench/results/device_branches.json",
)
"""Files outside of these folders, or in what is kept, that are rewritten all the same."""


# ---- The tables against the tree -------------------------------------------------------------------------------------


def module_of(file: Path) -> str:
    """The module of a file, without the name of the package."""
    parts = file.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(module: str, package: bool = False) -> Path:
    """The file of a module; of a package, its `__init__.py`."""
    path = SRC.joinpath(*module.split("."))
    return path / "__init__.py" if package else path.with_suffix(".py")


@dataclass
class Moves:
    """What goes where in this tree. olds: of each new module, the old ones. new: of each old module, the new one."""

    olds: dict[str, list[str]] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)  # tests/training/test_x.py: tests/room/test_y.py
    exports: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # `import x as x`: where x is from
    lazily: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def home(self, module: str, name: str) -> str:
        """The new module in which a name of an old module is."""
        while (module, name) in self.exports:
            module, name = self.exports[module, name]
        return NAMES_THAT_MOVE.get((module, name), self.new.get(module, module))

    def class_name(self, module: str, name: str) -> str:
        while (module, name) in self.exports:
            module, name = self.exports[module, name]
        return CLASSES.get((module, name), name)


def read_tables() -> Moves:
    """Raises SystemExit with every line of the tables that does not fit the tree."""
    if not any((SRC / room).is_dir() for room in EMPTIED):
        raise SystemExit("These moves are made already: remove bench/moves.py.")
    there = {module_of(file): file for file in sorted(SRC.rglob("*.py"))}
    moves, wrong, listed = Moves(), list[str](), set[str]()
    for new, line in TABLE.items():
        for word in line.split():
            old = word.removesuffix("?")
            listed.add(old)
            if old not in there:
                if not word.endswith("?"):
                    wrong.append(f"TABLE: {old} is not there (for {new}). Mark it `?`, or remove it")
                continue
            into = new
            first = next((each for each in INSTEAD.get(old, ()) if each in there), None)
            if first is not None:
                into = next(n for n, words in TABLE.items() if first in words.replace("?", "").split())
            elif old in INSTEAD:
                into = f"{new.split('.')[0]}.{old.split('.')[-1]}"
            moves.olds.setdefault(into, []).append(old)
            moves.new[old] = into
    for room in EMPTIED:
        wrong += [
            f"{module} is in no room. Give it a line in TABLE"
            for module in there
            if module.startswith(f"{room}.") and module not in listed
        ]
    for new, olds in moves.olds.items():
        if new in there and new not in moves.new:
            wrong.append(f"{new} is there already, beside {', '.join(olds)}")
    moves.olds.pop("splits", None)  # a package, see `_packages`
    rooms = {module.split(".")[0] for module in there} | {new.split(".")[0] for new in moves.olds}
    known = {*ROOMS, *NEW_ROOMS_BELOW, *FLOORS_OF_OTHERS, *EMPTIED, ""}
    wrong += [f"{room} has no floor. Give it a line in ROOMS or FLOORS_OF_OTHERS" for room in sorted(rooms - known)]
    wrong += [f"TESTS: {text}" for text in _read_tests(moves)]
    for (module, name), _ in (*CLASSES.items(), *NAMES_THAT_MOVE.items()):
        optional = any(f"{module}?" in line.split() for line in TABLE.values())
        if module not in there:
            wrong += [] if optional else [f"CLASSES or NAMES_THAT_MOVE: no module {module} (for {name})"]
        elif name not in _defined(there[module]):
            wrong.append(f"CLASSES or NAMES_THAT_MOVE: {module} has no {name}")
    if wrong:
        raise SystemExit("\n".join(["bench/moves.py does not fit this tree:", *wrong]))
    for module, file in there.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
                origin = (node.module or "").removeprefix(f"{PACKAGE}.")
                moves.exports |= {(module, a.asname): (origin, a.name) for a in node.names if a.asname == a.name}
    return moves


def _read_tests(moves: Moves) -> Iterator[str]:
    there = {file.stem.removeprefix("test_") for file in (ROOT / "tests" / "training").glob("*.py")}
    strange = [
        file
        for file in (ROOT / "tests" / "training").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not re.fullmatch(r"test_\w+\.py", file.name)
    ]
    yield from (f"{file} is no test: say where it goes" for file in strange)
    for room, line in TESTS.items():
        for word in line.split():
            old, _, new = word.removesuffix("?").partition(">")
            if old not in there:
                if not word.endswith("?"):
                    yield f"tests/training/test_{old}.py is not there"
                continue
            moves.tests[f"tests/training/test_{old}.py"] = f"tests/{room}/test_{new or old}.py"
            there.discard(old)
    yield from (f"tests/training/test_{stem}.py is in no room" for stem in sorted(there))
    for old, new in OTHER_TESTS.items():
        if not (ROOT / "tests" / f"{old}.py").exists():
            yield f"tests/{old}.py is not there"
        moves.tests[f"tests/{old}.py"] = f"tests/{new}.py"


def _defined(file: Path) -> set[str]:
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


# ---- One file --------------------------------------------------------------------------------------------------------


class Text:
    """A source with places by line and column of `ast`, and changes of it that are made together."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = [0]
        self._raw = text.splitlines(keepends=True)
        for line in self._raw:
            self._lines.append(self._lines[-1] + len(line))
        self._changes: dict[tuple[int, int], str] = {}

    def at(self, line: int, column: int) -> int:
        """ast counts bytes of UTF-8."""
        row = self._raw[line - 1] if line <= len(self._raw) else ""
        return self._lines[line - 1] + len(row.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        begin = self.at(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return begin, self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def change(self, span: tuple[int, int], new: str) -> None:
        self._changes[span] = new

    def changed(self) -> str:
        pieces, done = list[str](), 0
        for (begin, end), new in sorted(self._changes.items()):
            assert begin >= done, f"two changes of one place: {self.text[begin:end]!r}"
            pieces += [self.text[done:begin], new]
            done = end
        return "".join([*pieces, self.text[done:]])


class Rewriting:
    """The rewriting of one Python file, which is module `module` where it is of the package."""

    def __init__(self, path: str, text: str, moves: Moves, module: str = "") -> None:
        self.path, self.moves, self.module = path, moves, module
        self.tree = ast.parse(text)
        self.source = Text(text)
        self.renamed: dict[str, str] = {}
        self.wrong: list[str] = []
        self.in_strings = {
            id(inner) for node in ast.walk(self.tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)
        }

    def rewritten(self) -> str:
        self._own_classes()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                self._import_from(node)
            elif isinstance(node, ast.Import):
                self._import(node)
        self._names()
        return self._in_f_strings(self.source.changed())

    # Names that are defined here.

    def _own_classes(self) -> None:
        for (module, name), new in CLASSES.items():
            if module != self.module:
                continue
            self.renamed[name] = new
            for node in self.tree.body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    begin = self.source.at(node.lineno, node.col_offset) + len("class ")
                    self.source.change((begin, begin + len(name)), new)

    # Imports.

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            old = alias.name.removeprefix(f"{PACKAGE}.")
            if alias.name.startswith(f"{PACKAGE}.") and old in self.moves.new:
                if alias.asname is None:
                    self.wrong.append(f"{self.path}:{node.lineno}: import {alias.name}: write `from … import …`")
                    continue
                begin, end = self.source.span(alias)
                self.source.change((begin, end), f"{PACKAGE}.{self.moves.new[old]} as {alias.asname}")

    def _import_from(self, node: ast.ImportFrom) -> None:
        assert node.module is not None
        if node.module == PACKAGE:
            self._rooms(node)
            return
        if not node.module.startswith(f"{PACKAGE}."):
            return
        old = node.module.removeprefix(f"{PACKAGE}.")
        stub = self.path.endswith("__init__.pyi") and self.path != f"src/{PACKAGE}/__init__.pyi"
        found, same = list[tuple[str, str]](), True
        for alias in node.names:
            target, name = self._found(old, alias)
            is_moved = (target, name) != (old, alias.name)
            if stub and is_moved:
                same = False  # a package's list of its files
                continue
            asname = alias.asname
            if name != alias.name and asname is None:
                self.renamed[alias.name] = name
            if asname == alias.name and self.module in self.moves.new:  # handed on by a module that is moved
                asname, same = None, False
            if asname in (name, alias.name) and asname is not None and name != alias.name:
                asname = name
            if target == self.moves.new.get(self.module, self.module) and self.module in self.moves.new:
                same = False  # what is merged into one file
                if asname not in (None, name):
                    self.wrong.append(f"{self.path}:{node.lineno}: {name} as {asname} is merged into this file")
                continue
            same = same and not is_moved
            found.append((target, name if asname is None else f"{name} as {asname}"))
        if same:
            return
        begin, end = self.source.span(node)
        line_end = self.source.text.find("\n", end)
        comment = self.source.text[end : line_end if line_end >= 0 else None].strip()
        if "#" in self.source.text[begin:end]:
            self.wrong.append(f"{self.path}:{node.lineno}: a comment inside of an import that changes")
        by_module: dict[str, list[str]] = {}
        for target, name in found:
            by_module.setdefault(target, []).append(name)
        indent = "\n" + " " * node.col_offset
        behind = f"  {comment}" if comment and len(by_module) > 1 else ""
        lines = [
            f"from {f'{PACKAGE}.{target}'.rstrip('.')} import {', '.join(sorted(names))}"
            for target, names in by_module.items()
        ]
        if not lines:
            begin, end = self.source.at(node.lineno, 0), (line_end + 1 if line_end >= 0 else end)
            if self.source.text[begin : self.source.at(node.lineno, node.col_offset)].strip():
                self.wrong.append(f"{self.path}:{node.lineno}: an import that is not alone on its line")
        self.source.change((begin, end), f"{behind}{indent}".join(lines))

    def _found(self, old: str, alias: ast.alias) -> tuple[str, str]:
        """Where the name is now: module and name."""
        inner = f"{old}.{alias.name}"
        if inner in self.moves.new:  # a module
            room, _, leaf = self.moves.new[inner].rpartition(".")
            return room, leaf
        return self.moves.home(old, alias.name), self.moves.class_name(old, alias.name)

    def _rooms(self, node: ast.ImportFrom) -> None:
        """`from meshwise import training`, and `training.session.tell` further on."""
        kept, rooms = list[str](), set[str]()
        for alias in node.names:
            if alias.asname is not None or not (SRC / alias.name).is_dir():
                kept.append(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}")
                continue
            for use in ast.walk(self.tree):
                if isinstance(use, ast.Name) and use.id == alias.name:
                    leaf = self._leaf(use)
                    new = self.moves.new.get(f"{alias.name}.{leaf}", f"{alias.name}.{leaf}")
                    room, _, new_leaf = new.rpartition(".")
                    rooms.add(room)
                    if new != f"{alias.name}.{leaf}" and leaf:
                        begin, _ = self.source.span(use)
                        self.source.change((begin, begin + len(f"{alias.name}.{leaf}")), f"{room}.{new_leaf}")
                        self.moves.lazily[room].add(new_leaf)
                    elif not leaf:
                        rooms.discard(room)
                        rooms.add(alias.name)
        if rooms or kept:
            taken = {each.arg for each in ast.walk(self.tree) if isinstance(each, ast.arg)} | {
                each.id
                for each in ast.walk(self.tree)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            names = {alias.name for alias in node.names}
            self.wrong += [
                f"{self.path}:{node.lineno}: the room {room} has the name of a variable here"
                for room in sorted((rooms - names) & taken)
            ]
            if rooms != names - set(kept):
                line = f"from {PACKAGE} import {', '.join(sorted({*rooms, *kept}))}"
                self.source.change(self.source.span(node), line)

    def _leaf(self, use: ast.Name) -> str:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and node.value is use:
                return node.attr
        return ""

    # Uses of names.

    def _names(self) -> None:
        modules = self._modules()
        for node in ast.walk(self.tree):
            if id(node) in self.in_strings and sys.version_info < (3, 12):
                continue
            if isinstance(node, ast.Name) and node.id in self.renamed:
                begin, _ = self.source.span(node)
                self.source.change((begin, begin + len(node.id)), self.renamed[node.id])
            elif isinstance(node, ast.Attribute) and (words := ast.unparse(node.value)) in modules:
                new = self.moves.class_name(modules[words], node.attr)
                if new != node.attr:
                    _, end = self.source.span(node)
                    self.source.change((end - len(node.attr), end), new)

    def _modules(self) -> dict[str, str]:
        """Names that stand for modules of ours, as old modules."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                room = (node.module or "").removeprefix(PACKAGE).removeprefix(".")
                for alias in node.names:
                    module = f"{room}.{alias.name}".removeprefix(".")
                    if file_of(module).exists():
                        found[alias.asname or alias.name] = module
                    elif file_of(module, package=True).exists():
                        files = file_of(module, package=True).parent.glob("*.py")
                        found |= {f"{alias.name}.{file.stem}": f"{module}.{file.stem}" for file in files}
        return found

    def _in_f_strings(self, text: str) -> str:
        """Before Python 3.12, `ast` does not know where the names inside f-strings are."""
        used = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and id(n) in self.in_strings}
        for name in sorted(used & set(self.renamed)):
            text = re.sub(rf"(\{{[^{{}}\"']*)(?<![\w.]){name}\b", rf"\g<1>{self.renamed[name]}", text)
        return text


# ---- Texts -----------------------------------------------------------------------------------------------------------


class Words:
    """Modules, files and tests by their names in strings, comments and pages."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        olds = sorted(moves.new, key=len, reverse=True)
        dotted = "|".join(re.escape(old) for old in olds)
        self._dotted = re.compile(rf"(?<![\w.])({PACKAGE}\.|`)({dotted})(?:\.(\w+))?(?![\w])")
        paths = "|".join(re.escape(old.replace(".", "/")) for old in olds)
        self._paths = re.compile(rf"(?<![\w-])({paths})\.py\b")
        self._split = re.compile(r"(?<![\w/])split/(\w+)\.py\b")
        tests = sorted(moves.tests, key=len, reverse=True)
        self._tests = re.compile("|".join(re.escape(old.removesuffix(".py")) + r"(?=\.py\b|\b)" for old in tests))
        self._test_modules = re.compile(
            "|".join(re.escape(old.removesuffix(".py").replace("/", ".")) + r"\b" for old in tests)
        )

    def rewritten(self, text: str, path: str = "") -> str:
        if path.startswith(f"src/{PACKAGE}/") and self._tests.search(text):
            text = re.sub(r"(?<![\w/])(test_\w+\.py)\b", self._whole_test, text)
        text = self._dotted.sub(self._new_dotted, text)
        text = self._paths.sub(lambda m: self._path(m[1].replace("/", ".")), text)
        text = self._split.sub(lambda m: self._path(f"parallel.split.{m[1]}"), text)
        text = self._tests.sub(lambda m: self.moves.tests[f"{m[0]}.py"].removesuffix(".py"), text)
        return self._test_modules.sub(
            lambda m: self.moves.tests[f"{m[0].replace('.', '/')}.py"].removesuffix(".py").replace("/", "."), text
        )

    def _whole_test(self, m: re.Match[str]) -> str:
        """The path of a test that a docstring names beside one of another room."""
        found = list((ROOT / "tests").rglob(m[1]))
        return found[0].relative_to(ROOT).as_posix() if len(found) == 1 else m[1]

    def _new_dotted(self, m: re.Match[str]) -> str:
        before, old, name = m[1], m[2], m[3]
        if name is None:
            return f"{before}{self.moves.new[old]}"
        return f"{before}{self.moves.home(old, name)}.{self.moves.class_name(old, name)}"

    def _path(self, old: str) -> str:
        return self.moves.new[old].replace(".", "/") + ".py"


def in_class_words(text: str, renamed: dict[str, str]) -> str:
    """Classes in the backticks of docstrings and comments."""
    for old, new in renamed.items():
        text = re.sub(rf"`{old}`", f"`{new}`", text)
    return text


def wrapped(text: str, most: int = 120) -> str:
    """Lines of docstrings and comments that have become too long are broken, into the line below if there is one."""
    while True:
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        except tokenize.TokenError:
            return text
        lines = text.splitlines()
        for token in tokens:
            first, last = token.start[0], token.end[0]
            long = [n for n in range(first, min(last, len(lines)) + 1) if len(lines[n - 1]) > most]
            if not long:
                continue
            if token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""'):
                number = long[0]
                line = lines[number - 1]
                indent = re.match(r" *", line)[0]  # type: ignore[index]
                cut = line.rfind(" ", len(indent) + 1, most - 2)
                if cut <= len(indent):
                    continue
                rest = line[cut + 1 :]
                lines[number - 1] = line[:cut]
                below = lines[number] if number < last else ""
                if (
                    below.strip()
                    and below.strip() != '"""'
                    and re.match(r" *", below)[0] == indent
                    and not rest.endswith('"""')
                ):  # type: ignore[index]
                    lines[number] = f"{indent}{rest} {below.strip()}"
                else:
                    lines.insert(number, f"{indent}{rest}")
                break
            if token.type == tokenize.COMMENT and lines[first - 1].strip().startswith("#"):
                line = lines[first - 1]
                indent = re.match(r" *", line)[0]  # type: ignore[index]
                cut = line.rfind(" ", len(indent) + 3, most)
                if cut > len(indent) + 2:
                    rest = line[cut + 1 :]
                    lines[first - 1] = line[:cut]
                    below = lines[first] if first < len(lines) else ""
                    if below.startswith(f"{indent}# "):
                        lines[first] = f"{indent}# {rest} {below.strip()[2:]}"
                    else:
                        lines.insert(first, f"{indent}# {rest}")
                    break
        else:
            return text
        new = "\n".join(lines) + ("\n" if text.endswith("\n") else "")
        if new == text:
            return text
        text = new


# ---- Files of the package --------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """A module in parts: its docstring (source), its imports, the rest."""

    docstring: str
    imports: list[str]
    body: str

    @classmethod
    def of(cls, text: str) -> Parts:
        tree, source = ast.parse(text), Text(text)
        nodes, docstring = list(tree.body), ""
        if ast.get_docstring(tree) is not None:
            begin, end = source.span(nodes.pop(0))
            docstring = text[begin:end]
        last, imports = (end if docstring else 0), list[str]()
        while nodes and isinstance(nodes[0], ast.Import | ast.ImportFrom):
            begin, _ = source.span(nodes[0])
            _, end = source.span(nodes.pop(0))
            stop = text.find("\n", end)
            imports.append(text[begin : stop if stop >= 0 else len(text)])
            last = stop + 1 if stop >= 0 else len(text)
        return cls(docstring, imports, text[last:].strip("\n"))


def merged(new: str, texts: dict[str, str]) -> str:
    """Bodies one after the other, imports together."""
    parts = {old: Parts.of(text) for old, text in texts.items()}
    defined = Counter(name for old, text in texts.items() for name in _top_level(text))
    if twice := [name for name, times in defined.items() if times > 1]:
        raise SystemExit(f"{new}: {', '.join(texts)} all define {', '.join(twice)}")
    if new in DOCSTRINGS:
        docstring = f'"""{DOCSTRINGS[new]}"""'
    else:
        own = [part.docstring for old, part in parts.items() if old.split(".")[-1] == new.split(".")[-1]]
        docstring = (own or [part.docstring for part in parts.values()])[0]
    imports = dict.fromkeys(line for part in parts.values() for line in part.imports)
    future = [line for line in imports if line.startswith("from __future__")]
    rest = [line for line in imports if line not in future]
    return (
        "\n\n".join(
            filter(None, [docstring, "\n".join(future), "\n".join(rest), *(part.body for part in parts.values())])
        )
        + "\n"
    )


def _top_level(text: str) -> set[str]:
    return {
        name
        for node in ast.parse(text).body
        for name in (
            [node.name]
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            else [t.id for t in node.targets if isinstance(t, ast.Name)]
            if isinstance(node, ast.Assign)
            else [node.target.id]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else []
        )
    }


def move_name(files: dict[str, str], origin: str, name: str, target: str) -> None:
    """Take a definition out of one new module and put it into another. files: texts by new module."""
    text = files[origin]
    tree, source = ast.parse(text), Text(text)
    nodes = tree.body
    number = next(i for i, node in enumerate(nodes) if name in _top_level(ast.unparse(node)))
    node = nodes[number]
    begin = source.at(min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]), 0)
    _, end = source.span(node)
    after = nodes[number + 1] if number + 1 < len(nodes) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        _, end = source.span(after)
    stop = text.find("\n", end)
    moved = text[begin : stop if stop >= 0 else len(text)]
    rest = text[:begin].rstrip("\n") + "\n\n\n" + text[stop + 1 :].lstrip("\n") if stop >= 0 else text[:begin]
    used = {n.id for n in ast.walk(ast.parse(moved)) if isinstance(n, ast.Name)}
    imports = [line for line in Parts.of(text).imports if _bound(line) & used]
    own = (used & _top_level(rest)) - {name}
    if own:
        imports.append(f"from {PACKAGE}.{origin} import {', '.join(sorted(own))}")
    if name in {n.id for n in ast.walk(ast.parse(rest)) if isinstance(n, ast.Name)}:
        rest = _with_imports(rest, [f"from {PACKAGE}.{target} import {name}"])
    files[origin] = rest.rstrip("\n") + "\n"
    files.setdefault(target, f'"""{DOCSTRINGS.get(target)}"""\n\nfrom __future__ import annotations\n')
    into = Parts.of(_with_imports(_without(files[target], origin, name), imports))
    body = [moved, into.body] if isinstance(node, ast.Assign | ast.AnnAssign) else [into.body, moved]
    files[target] = "\n\n".join([into.docstring, "\n".join(into.imports), "\n\n\n".join(body)]) + "\n"


def _bound(line: str) -> set[str]:
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.parse(textwrap.dedent(line)).body
        for alias in getattr(node, "names", [])
    }


def _with_imports(text: str, lines: Iterable[str]) -> str:
    parts = Parts.of(text)
    imports = dict.fromkeys([*parts.imports, *lines])
    return "\n\n".join(filter(None, [parts.docstring, "\n".join(imports), parts.body])) + "\n"


def _without(text: str, module: str, name: str) -> str:
    """The text without the import of a name from a module."""
    source = Text(text)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            left = [alias for alias in node.names if alias.name != name]
            names = ", ".join(a.name if a.asname is None else f"{a.name} as {a.asname}" for a in left)
            source.change(source.span(node), f"from {node.module} import {names}" if left else "")
    return source.changed()


# ---- All of it -------------------------------------------------------------------------------------------------------


def tracked() -> list[str]:
    """The files of the tree, but for links and what git ignores."""
    found = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return sorted(
        {path for path in found.stdout.splitlines() if (ROOT / path).is_file() and not (ROOT / path).is_symlink()}
    )


def is_rewritten(path: str) -> bool:
    """Whether names of modules are changed in a file."""
    if path in ALSO:
        return True
    return path.startswith(tuple(f"{folder}/" for folder in REWRITTEN)) and not path.startswith(KEPT)


def apply(moves: Moves) -> list[str]:
    """Change the tree. Returns what is for a person to look at."""
    words, texts, wrong, notes = Words(moves), dict[str, str](), list[str](), list[str]()
    modules: dict[str, str] = {}  # texts of old modules that move
    gone = list[str]()
    for path in tracked():
        if not is_rewritten(path):
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        new = text
        in_package = path.startswith(f"src/{PACKAGE}/") and path.endswith(".py")
        module = module_of(ROOT / path) if in_package else ""
        if path.endswith((".py", ".pyi")):
            try:
                rewriting = Rewriting(path, text, moves, module)
            except SyntaxError:
                notes.append(f"{path}: no Python of this version; words alone are rewritten")
            else:
                new = in_class_words(rewriting.rewritten(), rewriting.renamed)
                wrong += rewriting.wrong
        new = words.rewritten(new, path)
        if path.endswith(".py") and new != text:
            new = wrapped(new)
        if module in moves.new:
            modules[module] = new
            gone.append(path)
        elif path in moves.tests:
            texts[moves.tests[path]] = new
            gone.append(path)
        elif new != text:
            texts[path] = new
    files = {}
    for into, olds in moves.olds.items():
        files[into] = modules[olds[0]] if len(olds) == 1 else wrapped(merged(into, {old: modules[old] for old in olds}))
    for (old, name), target in NAMES_THAT_MOVE.items():
        move_name(files, moves.new[old], name, target)
    if wrong:
        raise SystemExit("\n".join(["bench/moves.py does not fit this tree:", *wrong]))
    texts |= {f"src/{PACKAGE}/{new.replace('.', '/')}.py": text for new, text in files.items()}
    gone += _packages(moves, texts, modules)
    wrong = change_texts(texts)
    without_longer_classes(texts)
    if wrong:
        raise SystemExit("\n".join(["TEXTS of bench/moves.py does not fit this tree:", *wrong]))
    for path in gone:
        (ROOT / path).unlink()
    for path, text in texts.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    for folder in sorted({(ROOT / path).parent for path in gone}, reverse=True):
        _remove_if_empty(folder)
    return notes


def _remove_if_empty(folder: Path) -> None:
    left = [entry for entry in folder.iterdir() if entry.name != "__pycache__"]
    if not left:
        for file in folder.rglob("*"):
            if file.is_file():
                file.unlink()
        for inner in sorted((f for f in folder.rglob("*") if f.is_dir()), reverse=True):
            inner.rmdir()
        folder.rmdir()


def _packages(moves: Moves, texts: dict[str, str], modules: dict[str, str]) -> list[str]:
    """The __init__ files of new rooms into `texts`; gives those that go."""
    gone = [f"src/{PACKAGE}/{room}/{name}" for room in EMPTIED for name in ("__init__.py", "__init__.pyi")]
    texts[f"src/{PACKAGE}/splits/__init__.py"] = modules["parallel.split"]
    texts[f"src/{PACKAGE}/rehearsal/fakes/__init__.py"] = f'"""{DOCSTRINGS["rehearsal.fakes"]}"""\n'
    for room, (_, docstring, _) in (ROOMS | NEW_ROOMS_BELOW).items():
        path = f"src/{PACKAGE}/{room}/__init__.py"
        if path not in texts and not (ROOT / path).exists():
            lazy = f"\n\nfrom {PACKAGE}.spec.lazy import files_of\n\n__getattr__ = files_of(__name__)\n"
            texts[path] = f'"""{docstring}"""' + (lazy if room in LAZY else "\n")
    for room, files in moves.lazily.items():
        if room not in LAZY:
            raise SystemExit(f"{room} is used as `from {PACKAGE} import {room}`: add it to LAZY")
        lines = [f"from {PACKAGE}.{room} import {file} as {file}\n" for file in sorted(files)]
        texts[f"src/{PACKAGE}/{room}/__init__.pyi"] = "".join(lines)
    for path in gone:
        texts.pop(path, None)
    return [path for path in gone if (ROOT / path).exists()]


def floors() -> dict[str, int]:
    """Each room with its floor, from below."""
    own = {room: line[0] for room, line in (ROOMS | NEW_ROOMS_BELOW).items()}
    found = {**FLOORS_OF_OTHERS, **own}
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def upward(texts: dict[str, str]) -> dict[str, set[str]]:
    """Imports of higher floors that are allowed for now, as they are. texts: by path."""
    found: dict[str, set[str]] = {}
    for path in sorted(texts):
        own = path.removeprefix(f"src/{PACKAGE}/")
        if own == path or own.split("/")[0] not in UPWARD_FROM or not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(texts[path])):
            parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            if len(parts) > 1 and parts[0] == PACKAGE and parts[1] in UPWARD_TO:
                found.setdefault(own, set()).add(parts[1])
    return found


def floors_text(texts: dict[str, str]) -> str:
    """FLOORS and UPWARD of tests/test_floors.py."""
    lines = [f'{FLOORS_COMMENTS.get(room, "")}    "{room}": {floor},\n' for room, floor in floors().items()]
    up = "".join(
        f'    "{path}": {{{", ".join(f"{chr(34)}{room}{chr(34)}" for room in sorted(rooms))}}},\n'
        for path, rooms in upward(texts).items()
    )
    return (
        f"FLOORS = {{\n{''.join(lines)}}}\n"
        "# Imports of a higher floor that are to go: file -> rooms. They may only become fewer.\n"
        f"UPWARD: dict[str, set[str]] = {{\n{up}}}\n"
    )


def rooms_text(texts: dict[str, str]) -> str:
    """The table of rooms of docs/architecture.md."""
    page = subprocess.run(
        ["git", "show", "HEAD:docs/architecture.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said = {m[1]: m[2] for m in re.finditer(r"^\| \d+ \| `(\w+)(?:/|\.py)` \| (.*) \|$", page.stdout, re.MULTILINE)}
    said |= {room: line[2] for room, line in (ROOMS | NEW_ROOMS_BELOW).items()}
    rows = [
        f"| {floor} | `{room}{'.py' if (SRC / f'{room}.py').exists() else '/'}` | {said[room]} |\n"
        for room, floor in sorted(floors().items(), key=lambda item: (-item[1], item[0]))
        if not room.startswith("__")
    ]
    return "| floor | room | what it is for |\n|---|---|---|\n" + "".join(rows)


def change_texts(texts: dict[str, str]) -> list[str]:
    """Make the changes of TEXTS in these texts, by path. Returns those that find no place."""
    wrong, made = list[str](), {"<FLOORS>": floors_text, "<ROOMS>": rooms_text}
    for path, old, new in TEXTS:
        whole = texts.get(path) or ((ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else "")
        text = made[new](texts) if new in made else new
        pattern, flags = re.escape(old.removeprefix("maybe:")), re.NOFLAG
        if old.startswith("re:"):
            pattern, flags = old.removeprefix("re:"), re.DOTALL if "FLOORS = " in old else re.NOFLAG
        everywhere = old in ('re:"training/', "re:if source\\.room in WITH_PRIVATE_TORCH:")
        whole, found = re.subn(pattern, lambda _, text=text: text, whole, count=0 if everywhere else 1, flags=flags)
        if found:
            texts[path] = whole
        elif not old.startswith("maybe:"):
            wrong.append(f"{path}: no {old!r}")
    return wrong


def without_longer_classes(texts: dict[str, str]) -> None:
    """Take reasons to be longer out of tests/test_floors.py, of files that are one class: they may be longer now."""
    path = "tests/test_floors.py"
    for line in re.findall(r'^    "[\w/]+\.py": ".*",\n', texts[path], re.MULTILINE):
        own = f"src/{PACKAGE}/{line.split(chr(34))[1]}"
        text = texts.get(own) or ((ROOT / own).read_text(encoding="utf-8") if (ROOT / own).exists() else "")
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        most = max((node.end_lineno or 0) - node.lineno + 1 for node in classes) if classes else 0
        length = len(text.splitlines())
        if text and length <= MOST_LINES and most >= 0.75 * length:
            texts[path] = texts[path].replace(line, "")
    texts[path] = texts[path].replace("LONGER: dict[str, str] = {\n}\n", "LONGER: dict[str, str] = {}\n")


def run(*words: str) -> int:
    """Run Python with these words on the changed tree."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False).returncode


def leftovers() -> list[str]:
    """Words of what is gone, for a person to look at."""
    pattern = re.compile(r"meshwise\.training|\btraining/\w+\.py|`training[./]|parallel[./]split\b|tests[./]training\b")
    found = []
    for path in tracked():
        if is_rewritten(path) and path not in KEPT:
            try:
                lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError:
                continue
            found += [f"{path}:{n}: {line.strip()[:150]}" for n, line in enumerate(lines, 1) if pattern.search(line)]
    return found


def main() -> None:
    """Move everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-path", action="store_true", help="do not run bench/path.py")
    given = parser.parse_args()
    moves = read_tables()
    notes = apply(moves)
    run("-m", "ruff", "check", "-q", "--fix", "--select", "I,F401,F811", ".")
    run("-m", "ruff", "format", "-q", ".")
    run("-m", "ruff", "check", "-q", "--fix", "--select", "I", ".")
    if not given.no_path:
        run("bench/path.py")
    print("\n".join([*notes, *(f"for a person to look at: {line}" for line in leftovers())]))
    counts = {room: sum(f.name != "__init__.py" for f in (SRC / room).rglob("*.py")) for room in floors()}
    rooms = (*NEW_ROOMS_BELOW, *ROOMS, "recovery")
    print("rooms:", ", ".join(f"{room} {counts[room]}" for room in rooms))
    if many := [room for room in rooms if counts[room] > MOST_FILES]:
        print(f"more than {MOST_FILES} files: {', '.join(many)}")


if __name__ == "__main__":
    main()
