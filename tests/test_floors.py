"""The floors of the house: a room imports only rooms on lower floors, and nothing is hidden.

The table below is the one truth of what may import what. A new room or module gets its line here first. The checker
reads sources with `ast` and imports nothing; the second half of this file plants each violation and sees it caught.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "meshwise"
SOURCES = Path(__file__).parents[1] / "src" / PACKAGE

HOUSES = (
    *("spec", "terminal", "records", "torch_compat", "reports", "workers", "transfer", "parallel", "hardware"),
    *("training", "integrations", "checker", "planner", "arrays", "launcher"),
)
"""The folders of the package, from the ground: each imports only those before it."""
ROOMS = {
    "reports": ("reports", "reports/views", "reports/report", "reports/commands"),
    "parallel": ("parallel/splits", "parallel"),
    "hardware": (
        *("hardware", "hardware/measure", "hardware/views", "hardware/machines", "hardware/bench"),
        "hardware/commands",
    ),
    "training": (
        "training/autograd training/recovery",
        *("training/data", "training/slips", "training/engine", "training", "training/recording", "training/guards"),
        *("training/process", "training/tracking training/whole", "training/job training/script"),
        *("training/prediction", "training/jobs", "training/commands"),
    ),
    "checker": ("checker/races", "checker", "checker/plain checker/views", "checker/check", "checker/commands"),
    "planner": ("planner/fakes", "planner", "planner/views", "planner/plan", "planner/commands"),
    "launcher": ("launcher/engines", "launcher", "launcher/commands"),
}
"""The rooms of a house, from its ground: folders, files that stand above the others, and all its other files under the
name of the house. Rooms in one text do not import each other. A house that is not here is one room."""
ORDER = [floor for house in HOUSES for floor in ROOMS.get(house, (house,))] + ["cli", "__main__", "__init__"]
FLOORS = {room: number for number, floor in enumerate(ORDER) for room in floor.split()}
WITHOUT_TORCH = {"spec", "records", "launcher/engines", "terminal"}
# What starts without torch: its imports at the top of a file, and what those import in turn. A command waits for torch,
# which takes a second or more, where it is used: in a function, or in a file of a house imported on its first use.
STARTS_WITHOUT_TORCH = ("cli.py", "reports/report.py", "launcher/script.py", "reports/views/")
STARTS_WITHOUT_TORCH += tuple(f"{house}/commands/" for house in HOUSES)
WITH_PRIVATE_TORCH = ("torch_compat/", "training/autograd/", "planner/fakes/", "integrations/private_parts.py")
PRIVATE_OF_THE_STANDARD_LIBRARY = {"_exit", "_getframe", "_current_frames", "_fields", "_asdict", "_replace"}
ASKED_FOR_BY_NOTEBOOKS = {"_repr_html_"}
# Files of parallel/ that techniques may import: a floor that they share, itself no technique.
SHARED_BY_TECHNIQUES = {"technique", "blocks", "mesh", "op_record", "op_replay", "rebind"}
SHARED_BY_TECHNIQUES |= {
    "shard_units",
    "step_hooks",
    "probe_optimizer",
    "layout",
    "schedule",
    "passing",
    "holding",
    "shard_refusals",
    "single_numbers",
    "skipped",
    "splits",
    "rng_notes",
}
JOIN_TECHNIQUES = {"apply", "fits"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "manager", "managers", "base", "misc"}

MOST_FILE_LINES = 350
MOST_LINES_OF_ONE_CLASS = 450
"""Of a file that is one class, which has three quarters of its lines."""
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8
# What must be longer, and why: "room/file.py", "room/file.py:function", or for parameters "room/file.py:function()".
LONGER: dict[str, str] = {
    "parallel/data.py": "one class, which all of a backward's calls are flat in",
}

MOST_SAY_CUDA = 20
"""Files whose code says `cuda`, messages and docstrings left out: the rest asks `has_streams` and
`torch.get_device_module`. May only fall."""
MOST_WORDS = 12
"""Of the first line of a module's docstring."""
NO_VERBS = {"A", "An", "How", "The", "What", "Where", "Whether", "Which"}
MOST_UNTESTED = 125
"""Modules without a test file of their name and not named in the docstring of one. May only fall."""


@dataclass(frozen=True)
class Source:
    """One file of the package: its path inside the package, its text and its tree."""

    path: str
    text: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        return room_of(self.path.removesuffix(".py").split("/"))

    @property
    def module(self) -> str:
        parts = [part for part in self.path.removesuffix(".py").split("/") if part != "__init__"]
        return ".".join([PACKAGE, *parts])

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"


def room_of(parts: list[str]) -> str:
    """The room of a file or module, whose path in the package has these parts."""
    within = "/".join(parts[:2])
    return within if within in FLOORS else parts[0]


def read_sources(package: Path) -> list[Source]:
    files = sorted(package.rglob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [Source(f.relative_to(package).as_posix(), t, ast.parse(t)) for f, t in zip(files, texts, strict=True)]


def imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Every absolute import in a file with its node. `from a import b` counts as `a.b`: b may be a module."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def own_imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Imports of our own package as (node, room or `__init__`)."""
    for node, name in imports(source):
        package, *parts = name.split(".")
        if package == PACKAGE:
            known = parts and (room_of(parts) in FLOORS or len(parts) > 1 or parts[0] in HOUSES)
            yield node, room_of(parts) if known else "__init__"


def lower_floors_only(source: Source) -> Iterator[str]:
    floor = FLOORS.get(source.room)
    for node, room in own_imports(source):
        if floor is None or room == source.room:
            continue
        if room not in FLOORS:
            yield f"{source.at(node)}: imports {room}, which has no floor"
        elif FLOORS[room] >= floor:
            yield (
                f"{source.at(node)}: {source.room} (floor {floor}) imports {room} (floor {FLOORS[room]}). "
                "Import only from lower floors; pass a function or plain data instead"
            )


def absolute_imports_only(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{source.at(node)}: a relative import. Write from {PACKAGE}.room.file import name"


def nothing_hidden(source: Source) -> Iterator[str]:
    for node, room in own_imports(source):
        if node not in source.tree.body:
            yield f"{source.at(node)}: a hidden import of {room}, in a function or a condition. Move it to the top"
    for node in source.nodes:
        if isinstance(node, ast.Call) and node.args and _called(node) in {"import_module", "__import__"}:
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).split(".")[0] == PACKAGE:
                yield f"{source.at(node)}: a hidden import of {name.value} by its name. Move it to the top"


def no_torch_below(source: Source) -> Iterator[str]:
    for node, name in imports(source):
        if source.room in WITHOUT_TORCH and f"{name}.".startswith(("torch.", "torchvision.", "safetensors.torch.")):
            yield f"{source.at(node)}: {source.room} imports torch. Write dtypes and devices as strings there"


def no_private_torch(source: Source) -> Iterator[str]:
    if source.path.startswith(WITH_PRIVATE_TORCH):
        return
    for node, name in imports(source):
        if name.split(".")[0] == "torch" and any(map(_private, name.split("."))):
            yield f"{source.at(node)}: imports {name}, private in torch. Wrap it in torch_compat"
    known = _torch_names(source)
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and _private(node.attr) and _root(node.value) in known:
            yield f"{source.at(node)}: uses {ast.unparse(node)}, private in torch. Wrap it in torch_compat"


def no_private_attributes_of_others(source: Source) -> Iterator[str]:
    """What an import does not show: `tensor._base`, `getattr(module, "_buffers")`. A file's own private names are those
    that it defines or assigns."""
    if source.path.startswith(WITH_PRIVATE_TORCH):
        return
    own = _own_names(source.tree) | PRIVATE_OF_THE_STANDARD_LIBRARY | ASKED_FOR_BY_NOTEBOOKS
    for node in ast.walk(source.tree):
        name = node.attr if isinstance(node, ast.Attribute) else _name_of_getattr(node)
        if isinstance(node, ast.expr) and _private(name) and name not in own:
            text = f"{source.at(node)}: reads {ast.unparse(node)}, private in the object's own package"
            yield f"{text}. Wrap it in torch_compat, with a probe"


def techniques_stand_alone(source: Source) -> Iterator[str]:
    technique = source.path.removeprefix("parallel/").removesuffix(".py")
    if source.room != "parallel" or technique in JOIN_TECHNIQUES | {"__init__"}:
        return
    for node, name in imports(source):
        parts = name.split(".")
        other = parts[2] if parts[:2] == [PACKAGE, "parallel"] and len(parts) > 2 else technique
        if other != technique and other not in SHARED_BY_TECHNIQUES:
            joins = " and ".join(sorted(JOIN_TECHNIQUES))
            yield f"{source.at(node)}: technique {technique} imports {other}. Only {joins} join techniques"


def kind_names(source: Source) -> Iterator[str]:
    for part in source.path.removesuffix(".py").split("/"):
        if part.strip("_") in FORBIDDEN_NAMES:
            yield f"{source.path}: '{part}' says nothing of what is inside. Name the one idea of the file"


def in_the_table(source: Source) -> Iterator[str]:
    if source.room not in FLOORS:
        yield f"{source.path}: {source.room} has no floor. Give it a line in FLOORS, or put the file into a room"


def short_enough(source: Source) -> Iterator[str]:
    for what, lines, most in _lengths(source):
        if lines > most and what not in LONGER:
            unit = "parameters" if what.endswith(")") else "lines"
            yield f"{what}: {lines} {unit}, more than {most}. Split it by idea, or give the reason in LONGER"


RULES: list[Callable[[Source], Iterator[str]]] = [
    lower_floors_only,
    absolute_imports_only,
    nothing_hidden,
    no_torch_below,
    no_private_torch,
    no_private_attributes_of_others,
    techniques_stand_alone,
    kind_names,
    in_the_table,
    short_enough,
]


@functools.cache
def own_sources() -> list[Source]:
    return read_sources(SOURCES)


def faults(sources: list[Source]) -> list[str]:
    found = [fault for source in sources for rule in RULES for fault in rule(source)]
    return [*found, *_circles(sources), *_waiting_for_torch(sources)]


def _circles(sources: list[Source]) -> Iterator[str]:
    """Floors keep rooms apart; inside a room, files must not import each other in a circle either."""
    modules = {source.module for source in sources}
    graph = {
        source.module: {
            next((m for m in (name, name.rpartition(".")[0]) if m in modules and m != source.module), "")
            for _, name in imports(source)
        }
        - {"", PACKAGE}
        for source in sources
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"modules import each other in a circle: {' <- '.join(error.args[1])}"


def _waiting_for_torch(sources: list[Source]) -> Iterator[str]:
    """Files that should start without torch, and import it at once, themselves or through others."""
    by_module = {source.module: source for source in sources}

    def way(module: str, seen: set[str]) -> list[str]:
        """The modules through which a module imports torch; empty where it does not."""
        source = by_module[module]
        names = [name for node, name in imports(source) if node in source.tree.body]
        if any(f"{name}.".startswith(("torch.", "torchvision.", "safetensors.torch.")) for name in names):
            return [module]
        for name in names:
            other = next((m for m in (name, name.rpartition(".")[0]) if m in by_module), None)
            if other is not None and other not in seen:
                seen.add(other)
                if found := way(other, seen):
                    return [module, *found]
        return []

    for source in sources:
        if source.path.startswith(STARTS_WITHOUT_TORCH) and (through := way(source.module, set())):
            text = f"{source.path}: imports torch at its start, by {' <- '.join(reversed(through))}"
            yield f"{text}. Import torch in the function that needs it, or use `from meshwise import launcher`"


def _lengths(source: Source) -> Iterator[tuple[str, int, int]]:
    most = MOST_LINES_OF_ONE_CLASS if _is_one_class(source) else MOST_FILE_LINES
    yield source.path, len(source.text.splitlines()), most
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{source.path}:{node.name}", (node.end_lineno or 0) - node.lineno + 1, MOST_FUNCTION_LINES
            given = node.args
            names = {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
            yield f"{source.path}:{node.name}()", len(names), MOST_PARAMETERS


def _is_one_class(source: Source) -> bool:
    """Whether one class has three quarters of the lines of a file."""
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    lines = [(node.end_lineno or 0) - node.lineno + 1 for node in classes]
    return max(lines, default=0) >= 0.75 * len(source.text.splitlines())


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(tree: ast.Module) -> set[str]:
    """The names that a file defines: functions, classes, variables, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
            names.add(node.attr)
    return names


def _name_of_getattr(node: ast.AST) -> str:
    """The attribute that `getattr(x, "name")` and its like name."""
    if not isinstance(node, ast.Call) or _called(node) not in {"getattr", "setattr", "hasattr"} or len(node.args) < 2:
        return ""
    name = node.args[1]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def _root(node: ast.expr) -> str:
    """The name that an expression such as `dist.group.WORLD` or `torch.empty(1)[0]` begins with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def _torch_names(source: Source) -> set[str]:
    """The names in a file that stand for torch, one of its modules, or something imported from it."""
    names = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names |= {a.asname or "torch" for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_the_house_stands_on_its_floors() -> None:
    found = faults(own_sources())
    assert not found, "\n" + "\n".join(found)


def outdated(reasons: dict[str, str], sources: list[Source]) -> list[str]:
    """Reasons to be longer, of what is not longer any more."""
    longer = {what for source in sources for what, lines, most in _lengths(source) if lines > most}
    return sorted(set(reasons) - longer)


def numbers_of_code(source: Source) -> set[int]:
    """Numbers of the lines without blank lines, comments and docstrings."""
    found: set[int] = set()
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in layout:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                found -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def untested(sources: list[Source], tests: Path) -> list[str]:
    """Modules with no `test_STEM.py`, whose path in the package stands in no docstring of a test file either."""
    files = [file for file in tests.rglob("test_*.py") if file != Path(__file__)]
    docstrings = " ".join(ast.get_docstring(ast.parse(file.read_text())) or "" for file in files)
    stems = {file.stem.removeprefix("test_") for file in files}
    return sorted(
        source.path
        for source in sources
        if Path(source.path).stem not in stems | {"__init__", "__main__"} and source.path not in docstrings
    )


def test_every_reason_to_be_longer_is_still_needed() -> None:
    assert outdated(LONGER, own_sources()) == [], "not longer any more: remove it from LONGER"


def test_a_reason_that_is_not_needed_is_found(tmp_path: Path) -> None:
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec" / "a.py").write_text("x = 1\n" * (MOST_FILE_LINES + 1))
    (tmp_path / "spec" / "b.py").write_text("x = 1\n")
    reasons = {"spec/a.py": "long", "spec/b.py": "short by now", "spec/gone.py": "gone"}
    assert outdated(reasons, read_sources(tmp_path)) == ["spec/b.py", "spec/gone.py"]


def test_every_floor_has_a_room() -> None:
    rooms = {source.room for source in own_sources()}
    assert set(FLOORS) <= rooms, f"no such room: {sorted(set(FLOORS) - rooms)}"


def says_cuda(source: Source) -> bool:
    """In names, imports and texts without a space: no sentences."""
    docstrings = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    for node in source.nodes:
        said = (
            [node.id] if isinstance(node, ast.Name)
            else [node.attr] if isinstance(node, ast.Attribute)
            else [node.name] if isinstance(node, ast.alias)
            else [node.value] if isinstance(node, ast.Constant) and id(node) not in docstrings
            else []
        )  # fmt: skip
        if any(isinstance(word, str) and "cuda" in word.lower() and " " not in word.strip() for word in said):
            return True
    return False


def test_few_files_are_of_one_kind_of_accelerator() -> None:
    found = [source.path for source in own_sources() if says_cuda(source)]
    assert len(found) <= MOST_SAY_CUDA, found


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    text = '"""Doc\nstring."""\n\n# comment\ndef f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert numbers_of_code(Source("spec/a.py", text, ast.parse(text))) == {5, 7, 8, 9}


def test_every_module_says_where_it_is_tested() -> None:
    missing = untested(own_sources(), Path(__file__).parent)
    assert len(missing) <= MOST_UNTESTED, "\n".join(missing)


def test_a_module_without_a_test_is_found(tmp_path: Path) -> None:
    for path, text in {"test_plan.py": '"""Of spec/errors.py too."""', "test_other.py": ""}.items():
        (tmp_path / path).write_text(text)
    sources = [Source(path, "", ast.parse("")) for path in ("spec/plan.py", "spec/errors.py", "spec/world.py")]
    assert untested(sources, tmp_path) == ["spec/world.py"]


def says_in_one_line(source: Source) -> bool:
    """Whether the docstring of a module begins with one short sentence on a line of its own: what the module does."""
    line, *more = (ast.get_docstring(source.tree) or "").splitlines() or [""]
    words = line.split()
    is_sentence = line.endswith(".") and not re.search(r"[.!?] ", line) and not any(more[:1])
    return is_sentence and len(words) <= MOST_WORDS and words[0] not in NO_VERBS


def test_every_module_says_in_one_line_what_it_does() -> None:
    found = [source.path for source in own_sources() if not says_in_one_line(source)]
    assert not found, f"begin with a verb, at most {MOST_WORDS} words and a period: {found}"


@pytest.mark.parametrize(
    ("docstring", "is_told"),
    [
        ("Average gradients over ranks that each hold the whole model.\n\nMore of it.", False),
        ("", True),
        ("Average gradients", True),
        ("Average gradients. Read in torch 2.13.", True),
        ("Average gradients.\nMore of it.", True),
        ("The mean of gradients.", True),
        ("Average" + " the gradients" * 6 + ".", True),
    ],
)
def test_a_long_or_missing_first_line_is_found(docstring: str, is_told: bool) -> None:
    text = f'"""{docstring}"""'
    assert says_in_one_line(Source("spec/a.py", text, ast.parse(text))) is not is_told


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {file.parent for file in SOURCES.rglob("*.py")}
    bare = sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists())
    assert not bare, f"an __init__.py with one line of purpose is missing in {bare}"


# Each violation planted alone: path, source, and what the checker must say of it.
PLANTED = {
    "an import of a higher floor": (
        "spec/a.py",
        "import meshwise.training.job.job",
        "spec (floor 0) imports training/job",
    ),
    "an import of the same floor": (
        "training/script/a.py",
        "from meshwise.training.job import loop",
        "imports training/job (floor {training/job})",
    ),
    "a room from the root": ("reports/a.py", "from meshwise import workers", "imports workers (floor {workers})"),
    "the package itself": ("transfer/a.py", "import meshwise as mw", "imports __init__ (floor {__init__})"),
    "a public verb": ("transfer/a.py", "from meshwise import backward", "imports __init__ (floor"),
    "a room without a floor": (
        "training/engine/a.py",
        "from meshwise.attic.box import lid",
        "imports attic, which has no floor",
    ),
    "a relative import": ("spec/a.py", "from . import plan", "a relative import"),
    "a relative import of a sibling": ("spec/a.py", "from .plan import Plan", "a relative import"),
    "an import in a function": (
        "cli.py",
        "def run():\n    from meshwise.launcher.run import run\n    return run",
        "cli.py:2: a hidden import of launcher",
    ),
    "an import under TYPE_CHECKING": (
        "training/engine/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from meshwise.spec.plan import Plan",
        "training/engine/a.py:3: a hidden import of spec",
    ),
    "an import that may fail": (
        "training/engine/a.py",
        "try:\n    import meshwise.spec.plan\nexcept ImportError:\n    pass",
        "a hidden import of spec",
    ),
    "an import by name": (
        "training/engine/a.py",
        "import importlib\nplan = importlib.import_module('meshwise.launcher')",
        "a hidden import of meshwise.launcher by its name",
    ),
    "torch in spec": ("spec/a.py", "import torch", "spec imports torch"),
    "torch in a function of records": ("records/a.py", "def f():\n    from torch import nn", "records imports torch"),
    "torch through safetensors": ("records/a.py", "from safetensors.torch import save_file", "records imports torch"),
    "a private name of torch": ("parallel/a.py", "from torch.optim.lr_scheduler import _x", "private in torch"),
    "a private module of torch": ("parallel/a.py", "import torch._dynamo", "private in torch"),
    "a private attribute of torch": ("training/engine/a.py", "import torch\ntorch._C._log()", "uses torch._C,"),
    "a private attribute under another name": (
        "transfer/a.py",
        "import torch.distributed as dist\ndist.group.WORLD._get_backend(1)",
        "uses dist.group.WORLD._get_backend",
    ),
    "a private attribute of what torch returns": (
        "transfer/a.py",
        "from torch import nn\nnn.Linear(1, 1)._apply(print)",
        "uses nn.Linear(1, 1)._apply",
    ),
    "a private attribute of an object": (
        "parallel/a.py",
        "def f(tensor):\n    return tensor._base",
        "reads tensor._base, private",
    ),
    "a private attribute by its name": (
        "parallel/a.py",
        "def f(module):\n    return getattr(module, '_buffers')",
        "_buffers'), private",
    ),
    "a technique that imports a technique": (
        "parallel/shard.py",
        "from meshwise.parallel.data import reduce",
        "technique shard imports data",
    ),
    "a technique as a module": (
        "parallel/shard.py",
        "from meshwise.parallel import data",
        "technique shard imports data",
    ),
    "a technique that imports apply": (
        "parallel/shard.py",
        "from meshwise.parallel.apply import apply",
        "technique shard imports apply",
    ),
    "a forbidden room": ("utils/a.py", "", "'utils' says nothing"),
    "a forbidden file": ("training/engine/_helpers.py", "", "'_helpers' says nothing"),
    "a module without a floor": ("extra.py", "", "extra has no floor"),
    "a room that is not in the table": ("attic/a.py", "", "attic has no floor"),
    "a long file": ("spec/a.py", "x = 1\n" * (MOST_FILE_LINES + 1), "spec/a.py: 351 lines, more than 350"),
    "a long file of one class": (
        "spec/a.py",
        "class A:\n" + "    x = 1\n" * MOST_LINES_OF_ONE_CLASS,
        "spec/a.py: 451 lines, more than 450",
    ),
    "a long function": (
        "spec/a.py",
        "class A:\n    def long(self):\n" + "        x = 1\n" * MOST_FUNCTION_LINES,
        "spec/a.py:long: 61 lines, more than 60",
    ),
    "many parameters": (
        "spec/a.py",
        "def wide(a, b, c, d, e, *, f, g, h, i):\n    return a",
        "spec/a.py:wide(): 9 parameters, more than 8",
    ),
}

ALLOWED = {
    "a lower floor": ("training/engine/a.py", "from meshwise.spec.plan import Plan\nimport meshwise.parallel.apply"),
    "its own room": ("workers/a.py", "from meshwise.workers.channel import CHANNEL"),
    "apply joins the techniques": ("parallel/apply.py", "from meshwise.parallel import data, precision"),
    "private torch in compat": ("torch_compat/a.py", "import torch\nfrom torch._C import _x\ntorch._C._log()"),
    "torch's own dunders": ("training/engine/a.py", "import torch\nprint(torch.__version__)"),
    "private names of our own": (
        "training/engine/a.py",
        "import torch\nclass A:\n    def f(self):\n        return self._x",
    ),
    "private attributes of its own classes": (
        "training/engine/a.py",
        "class A:\n    def f(self, other):\n        self._x = other._x\n    def _y(self): ...\ndef g(a):\n    a._y()",
    ),
    "another package in a function": ("training/engine/a.py", "def f():\n    import tensorboard"),
    "the public names": ("__init__.py", "from meshwise.launcher.run import run"),
    "a file of one class": ("spec/a.py", "class A:\n" + "    x = 1\n" * MOST_FILE_LINES),
    "as many parameters as may be": ("spec/a.py", "class A:\n    def f(self, a, b, c, d, e, f, *more, g, h): ..."),
    "the longest function": ("spec/a.py", "def f():\n" + "    x = 1\n" * (MOST_FUNCTION_LINES - 1)),
}


def plant(package: Path, path: str, text: str) -> list[str]:
    file = package / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return faults(read_sources(package))


@pytest.mark.parametrize("name", PLANTED)
def test_the_checker_catches(tmp_path: Path, name: str) -> None:
    path, text, message = PLANTED[name]
    message, found = re.sub(r"\{(.*)\}", lambda room: str(FLOORS[room[1]]), message), plant(tmp_path, path, text)
    assert len([fault for fault in found if message in fault]) == 1, found


@pytest.mark.parametrize("name", ALLOWED)
def test_the_checker_allows(tmp_path: Path, name: str) -> None:
    assert plant(tmp_path, *ALLOWED[name]) == []


def test_the_checker_catches_files_of_a_room_in_a_circle(tmp_path: Path) -> None:
    assert plant(tmp_path, "spec/a.py", "from meshwise.spec.b import x") == []
    assert "spec.a" in plant(tmp_path, "spec/b.py", "from meshwise.spec import a")[0]


def test_the_checker_catches_torch_at_the_start_of_a_command(tmp_path: Path) -> None:
    assert plant(tmp_path, "hardware/b.py", "import torch") == []
    assert plant(tmp_path, "hardware/c.py", "def f():\n    import torch") == []
    assert plant(tmp_path, "launcher/commands/c.py", "from meshwise.hardware.c import f") == []
    (found,) = plant(tmp_path, "launcher/commands/b.py", "from meshwise.hardware.b import x")
    assert (
        "launcher/commands/b.py: imports torch at its start, by meshwise.hardware.b <- meshwise.launcher.commands.b"
        in found
    )


def test_two_violations_in_one_file_are_both_told(tmp_path: Path) -> None:
    found = plant(tmp_path, "spec/a.py", "import torch\nfrom . import b")
    assert len(found) == 2
