"""Mistakes that begin late: what a run says of them, by where they begin, beside another checkout.

    python bench/guards.py [--against CHECKOUT] [--devices 2xcpu,3xcpu] [--begins "step 3,resume"] [--parts FOLDER]

Each mistake begins at a step, in the second epoch, in a loop at another place, in a second program of the process, on
one rank alone, at the uneven tail of an epoch, or where a stopped run goes on. Two mistakes at once, rank 0's and the
others', begin at a step. Kept are the lines that are said and the errors, without places and numbers; what the last
result has of other rows stays. The claim: nothing that the other checkout says, or refuses, is missing here, two
mistakes end in the one sentence that they ended in there, and nothing hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]
STEPS = 58  # of an epoch: 230 samples in batches of 4
BEGINS = (
    "step 1",
    "step 3",
    "step 9",
    "step 50",
    "epoch 2",
    "second loop",
    "second program",
    "tail",
    "one rank",
    "resume",
)
STOPS = 25  # steps of a run that another goes on from: it saves each 10
Loss = Callable[["Program", Tensor, Tensor, bool], Any]


class Program:
    """A small program that trains, with a mistake from some moment on."""

    def __init__(self, mw: Any, begins: str, folder: str) -> None:
        self.mw, self.begins, self.folder = mw, begins, folder
        self.step, self.epoch, self.loop, self.number, self.resumed = 0, 1, 1, 1, False

    def make(self) -> None:
        """Its things, new ones in a second program."""
        torch.manual_seed(0)
        x = torch.randn(230, 6)
        self.model: Any = nn.Linear(6, 3)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.01)
        self.loader: Any = DataLoader(TensorDataset(x, x.sum(1).long() % 3), batch_size=4)
        made = self.mw.distribute(self.model, self.optimizer, self.loader)
        self.model, self.optimizer, self.loader = made
        if self.begins == "resume":
            things = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
            self.resumed = self.mw.checkpoint(self.folder, every=10, **things).restored

    @property
    def bad(self) -> bool:
        """Whether the mistake is made in this step."""
        kind, _, number = self.begins.partition(" ")
        if kind == "step":
            return self.step >= int(number)
        return {
            "epoch 2": self.epoch >= 2,
            "second loop": self.loop >= 2,
            "second program": self.number >= 2,
            "tail": self.step % STEPS == 0,
            "one rank": self.mw.rank() == 1,
            "resume": self.resumed,
        }[self.begins]

    def train(self, one_step: Loss, epochs: int) -> None:
        """Its loop."""
        for _ in range(epochs):
            for x, y in self.loader:
                self.step += 1
                one_step(self, x, y, self.bad)
                if self.begins == "resume" and not self.resumed and self.step == STOPS:
                    return
            self.epoch += 1

    def run(self, one_step: Loss) -> None:
        """All of it."""
        self.make()
        self.train(one_step, 2 if self.begins == "epoch 2" else 1)
        if self.begins == "second loop":
            self.loop = 2
            self.train(one_step, 1)
        if self.begins == "second program":
            self.number = 2
            self.make()
            self.train(one_step, 1)

    def update(self, loss: Tensor) -> None:
        """A step as it should be."""
        self.mw.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _summed(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    p.update(F.cross_entropy(p.model(x), y, reduction="sum" if bad else "mean"))


def _coupled(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    out = p.model(x)
    p.update(F.cross_entropy(out, y) + (out.mean(0).square().sum().sqrt() if bad else 0))


def _classes(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    p.update(F.cross_entropy(p.model(x), y, weight=torch.tensor([1.0, 2.0, 5.0]) if bad else None))


def _by_hand(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    loss = F.cross_entropy(p.model(x), y)
    if not bad:
        p.update(loss)
        return
    loss.backward()
    with torch.no_grad():
        for w in p.model.parameters():
            w -= 0.01 * w.grad
            w.grad = None


def _rates(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    for group in p.optimizer.param_groups if bad else ():
        group["lr"] = 0.01 * (1 + p.mw.rank())
    p.update(F.cross_entropy(p.model(x), y))


def _noise(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    p.update(F.cross_entropy(p.model(x), y))
    with torch.no_grad():
        for w in p.model.parameters() if bad else ():
            w += 0.01 * (1 + p.mw.rank())


def _not_finite(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    p.update(F.cross_entropy(p.model(x), y) * (float("nan") if bad else 1))


def _changeless(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    if bad:
        p.optimizer.step()
        p.optimizer.zero_grad()
    else:
        p.update(F.cross_entropy(p.model(x), y))


def _foreign_step(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    loss = F.cross_entropy(p.model(x), y)
    if bad:
        loss.backward()
        p.optimizer.step()
        p.optimizer.zero_grad()
    else:
        p.update(loss)


def _made(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    if bad and not hasattr(p.model, "more"):
        hook = p.model.register_forward_pre_hook(lambda m, _: setattr(m, "more", nn.Linear(2, 2)))
        torch.manual_seed(p.mw.rank())
        p.update(F.cross_entropy(p.model(x), y))
        hook.remove()
        return
    p.update(F.cross_entropy(p.model(x), y))


def _evaluated(p: Program, x: Tensor, y: Tensor, bad: bool) -> None:
    p.update(F.cross_entropy(p.model(x), y))
    if bad and p.step % 10 == 0:
        right = 0
        with torch.no_grad():
            for a, b in p.loader:
                right += int((p.model(a).argmax(1) == b).sum())
        print(right)


MISTAKES = {
    f.__name__[1:]: f for f in (_summed, _coupled, _classes, _by_hand, _rates, _noise, _not_finite, _changeless, _made)
}
MISTAKES |= {f.__name__[1:]: f for f in (_foreign_step, _evaluated)}
TWO = (("summed", "coupled"), ("coupled", "summed"), ("summed", "rates"), ("made", "summed"), ("noise", "classes"))
TWO += (("by_hand", "summed"), ("summed", "changeless"), ("not_finite", "summed"))


def steps_of(mistake: str) -> Loss:
    """What each rank does in a step."""
    first, _, second = mistake.partition(" beside ")
    return lambda p, x, y, bad: MISTAKES[second if second and p.mw.rank() else first](p, x, y, bad)


def cells(begins: list[str]) -> list[tuple[str, str]]:
    """Each mistake, and where it begins. Two at once begin at steps alone."""
    two = [f"{first} beside {second}" for first, second in TWO]
    found = [(mistake, where) for where in begins for mistake in MISTAKES]
    return found + [(mistake, where) for where in begins if where.startswith("step") for mistake in two]


def told(text: str) -> str:
    """A line without what differs between checkouts: places and numbers."""
    return re.sub(r"\d[\d.e-]*", "N", re.sub(r"\S+\.py:\d+|\S+/state", "HERE", text))[:160]


def case(mistake: str, begins: str, folder: str) -> dict[str, Any]:
    """What is said of it on this rank."""
    import meshwise as mw

    try:
        from meshwise.process.session import default_engine, end_sessions
    except ImportError:
        from meshwise.training.session import default_engine, end_sessions

    error = ""
    try:
        Program(mw, begins, folder).run(steps_of(mistake))
    except Exception as raised:
        if " beside " in mistake:
            raise  # what the launcher says of it, alone
        error = f"{type(raised).__name__}: {raised}"
    notes = sorted({told(note) for note in default_engine().notes})
    end_sessions()
    return {"said": notes, "error": told(error)}


def one(mistake: str, begins: str, devices: str) -> Any:
    """In a run of its own, which ends as one."""
    import meshwise as mw

    with tempfile.TemporaryDirectory() as folder:
        try:
            for _ in range(2 if begins == "resume" else 1):
                ranks = mw.launch(case, mistake, begins, f"{folder}/state", devices=devices)
        except mw.MeshwiseError as error:
            return {"said": [], "error": told(str(error))}
    return {"said": ranks[0]["said"], "error": next((rank["error"] for rank in ranks if rank["error"]), "")}


def look(devices: str, begins: list[str], file: Path) -> None:
    """All of this checkout; what the file has already is not run again."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for mistake, where in cells(begins):
        name = f"{mistake}, {where}, {devices}"
        if name not in found:
            found[name] = one(mistake, where, devices)
            file.write_text(json.dumps(found))


def of_checkout(root: Path, devices: str, begins: str, parts: Path) -> dict[str, Any]:
    """What a checkout says, in a process of its own. parts: a folder that keeps what is known, for a run that is cut
    off."""
    file = parts / f"{root.resolve().name}-{devices}.json"
    words = [sys.executable, __file__, "--look", str(file), "--devices", devices, "--begins", begins]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(root / "src")}
        subprocess.run(words, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def main() -> None:
    """Look, compare, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path)
    parser.add_argument("--devices", default="2xcpu,3xcpu")
    parser.add_argument("--begins", default=",".join(BEGINS))
    parser.add_argument("--parts", type=Path, default=Path(tempfile.gettempdir()) / "meshwise-guards")
    parser.add_argument("--look", type=Path)
    options = parser.parse_args()
    if options.look:
        look(options.devices, options.begins.split(","), options.look)
        return
    options.parts.mkdir(parents=True, exist_ok=True)
    from keep import RESULTS, keep

    less_than = "less than the other checkout"
    last: dict[str, Any] = json.loads((RESULTS / "guards.json").read_text())
    result: dict[str, Any] = {"found": last["found"], less_than: last[less_than]}
    for devices in options.devices.split(","):
        here = of_checkout(ROOT, devices, options.begins, options.parts)
        result["found"] |= here
        if options.against:
            for name, before in of_checkout(options.against, devices, options.begins, options.parts).items():
                now = here[name]
                result[less_than].pop(name, None)
                less = [line for line in before["said"] if line not in now["said"]]
                if less or (
                    before["error"] and (" beside " in name or not now["error"]) and before["error"] != now["error"]
                ):
                    result[less_than][name] = {"before": before, "now": now}
    quiet = [name for name, facts in result["found"].items() if not facts["said"] and not facts["error"]]
    print(f"\n{len(result['found'])} mistakes; nothing is said of {len(quiet)}: {quiet}")
    print(f"less than the other checkout: {json.dumps(result[less_than], indent=1)}")
    result["nothing is said of"] = quiet
    keep("guards", result)


if __name__ == "__main__":
    main()
