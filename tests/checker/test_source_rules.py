"""Mistakes that the source of a script shows: each rule finds its own, with its line, and is silent beside it.

Tests checker/source_rules.py, checker/finding.py and `meshwise check --static`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwise.checker.commands.check import _look_for_mistakes
from meshwise.checker.source_rules import mistakes_in
from meshwise.spec.errors import UsageError

DDP = """
model = DistributedDataParallel(Net().to(rank))
sampler = DistributedSampler(data)
loader = DataLoader(data, 32, sampler=sampler)  # of this rank
for epoch in range(9):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        dist.all_reduce(loss)
        if rank == 0: print(loss)
    done = evaluate(model.module)
    if done: break
"""
ACCELERATE = """
accelerator = Accelerator(gradient_accumulation_steps=4)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, loader = accelerator.prepare(model, loader)
for batch in tqdm(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
"""
SHARDED = "def main():\n    if args.fsdp:\n        fully_shard(model)\n    optimizer = Adam(model.parameters())\n"
OURS = "loader = DataLoader(x, 64)\nmodel, loader = mw.distribute(model, loader)\n"
MISTAKES = [
    (DDP, "    sampler.set_epoch(epoch)\n", "", "set_epoch is missing", 3),
    (DDP, "32, sampler=sampler", "64 // world_size, shuffle=True", "all ranks read the same samples", 4),
    (DDP, "model(x)", "model.module.encode(x)", "gradients not reduced", 8),
    (DDP, "print(loss)", "dist.all_reduce(loss)", "ranks diverge", 11),
    (DDP, "if done: ", "if rank == 0 and done: ", "ranks diverge", 13),
    (ACCELERATE, "prepare(model, loader)", "prepare(model, other)", "all ranks read the same samples", 3),
    (ACCELERATE, "model(**batch)", "accelerator.unwrap_model(model)(**batch)", "gradients not reduced", 6),
    (ACCELERATE, "    accel", "    loss /= accumulation\n    accel", "divided twice", 8),
    (SHARDED, "    if", "    optimizer = Adam(model.parameters())\n    if", "", 0),  # made anew afterwards
    (SHARDED.rpartition("    opt")[0], "    if", "    optim = Adam(model.parameters())\n    if", "optimizer bound", 4),
    (OURS, "64", "64 // mw.world_size()", "divided twice", 1),
]


@pytest.mark.parametrize(("right", "old", "new", "kind", "line"), MISTAKES)
def test_a_mistake_is_found_in_its_line_and_not_beside_it(
    right: str, old: str, new: str, kind: str, line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(right.replace(old, new))
    assert _look_for_mistakes(script, True, "text") == (1 if kind else 0)
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["kind"][:15], each["places"]) for each in found] == [(kind[:15], [f"{script}:{line}"])] * bool(kind)
    _look_for_mistakes(script, False, "github")
    assert f"::error file={script},line={line}," in capsys.readouterr().out or not kind
    (tmp_path / "right.py").write_text(right)
    assert not [*mistakes_in(tmp_path / "right.py")]


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("a b")
    for name in ("train.py", "mnist-mlp"):
        with pytest.raises(UsageError, match="--static reads a Python file"):
            list(mistakes_in(tmp_path / name))
