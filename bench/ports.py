"""Claim: scripts of others, ported with the README, have one device's numbers on 1, 2 and 3 devices.

    python bench/ports.py ORIGINALS [NAME ...]      torchvision, timm, datasets, evaluate, accelerate, lightning-fabric

ORIGINALS is a folder with the scripts as their projects publish them, under the paths and commits of SCRIPTS. Of each
script, `bench/ports/NAME.base.ed` makes the plain script for one device (small pictures and models, a line that records
an epoch; clipping and the best checkpoint where there are none), and `NAME.PORT.ed` a port from that. They are ed
scripts, which hold the new lines alone. Lines changed: those added and removed, without blank lines and comments. The
data is made here. accelerate and Fabric run on two gloo processes with half of the batch size, the nearest that they
have to one device. `nudged` runs are the plain script with each start weight moved by one rounding, up or down: how far
they end from it is how well one device knows its own numbers. Each run is in the results as soon as it has ended;
`PORTS_IN=FOLDER`, the folder of the first line, goes on where it was stopped; `PORTS_AT_ONCE=2` runs two at once.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PORTS = HERE / "ports"
RESULTS = HERE / "results" / "ports.json"
TOOLS = ("meshwise", "accelerate", "fabric")
LIBRARIES = ("torch", "torchvision", "timm", "transformers", "datasets", "evaluate", "accelerate", "lightning-fabric")
Numbers = list[dict[str, float]]


@dataclass(frozen=True)
class Script:
    """option, batch: of the batch size. stopped, resumed: options of the two starts of a run that is resumed."""

    source: str
    commit: str
    path: str
    sha256: str
    option: str
    batch: int
    arguments: str
    stopped: str = ""
    resumed: str = ""


IMAGES = "-j 0 --epochs 4 --seed 0 --lr 0.01 -a resnet18 {data}/images"
GLUE = (
    "--model_name_or_path {data}/bert-{dtype} --train_file {data}/train.csv --validation_file {data}/validation.csv "
    "--seed 0 --num_train_epochs 6 --learning_rate 2e-3 --num_warmup_steps 5 --output_dir out "
    "--checkpointing_steps epoch --with_tracking --per_device_eval_batch_size {batch}"
)
TIMM = (
    "--device cpu --data-dir {data}/images --val-split val --num-classes 6 --model test_resnet --input-size 3 32 32 "
    "--epochs 6 --opt adamw --lr 2e-3 --warmup-epochs 1 --clip-grad 1.0 --no-aug --workers 0 --seed 0 --output out "
    "--experiment e --model-ema --model-ema-decay 0.9 --smoothing 0.1"
)
SCRIPTS = {
    "imagenet": Script(
        "pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
        "imagenet/main.py",
        "f67ca2cd730bf91afe0504694abf07b88cbd03ac8c8a0426023620d29175c158",
        "-b",
        16,
        IMAGES,
        "--epochs 2",
        "--resume checkpoint.pth.tar",
    ),
    "glue": Script(
        "huggingface/transformers",
        "a22a4378d97d06b7a1d9abad6e0086d30fdea199",
        "examples/pytorch/text-classification/run_glue_no_trainer.py",
        "1df9005c62a283da4b7e72d15dcb203d28718f33a095befacccec1ae4db743b0",
        "--per_device_train_batch_size",
        16,
        GLUE,
    ),
    "timm": Script(
        "huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d",
        "train.py",
        "f0bb70b9e1c8c576eb1f7beba9cb46953d01ec1308d68c59ec055a6266f76388",
        "-b",
        16,
        TIMM,
    ),
}


@dataclass(frozen=True)
class Run:
    """port: of the script. devices: 0 is plain Python. threads: of each process that meshwise does not start. nudged: a
    seed, 0 for none. then: devices of a second start, which goes on where the first stopped after some epochs."""

    port: str
    dtype: str
    devices: int = 0
    threads: int = 1
    nudged: int = 0
    then: int | None = None


RUNS = {
    "plain": Run("base", "float64"),
    **{f"meshwise, {n}": Run("meshwise", "float64", n) for n in (1, 2, 3)},
    "accelerate, 2": Run("accelerate", "float64", 2),
    "fabric, 2": Run("fabric", "float64", 2),
    "plain, float32": Run("base", "float32"),
    **{f"plain, float32, {n} threads": Run("base", "float32", threads=n) for n in (2, 3)},
    "plain, float32, nudged": Run("base", "float32", nudged=1),
    **{f"meshwise, float32, {n}": Run("meshwise", "float32", n) for n in (1, 2, 3)},
}
RESUMED = {
    "plain, nudged": Run("base", "float64", nudged=1),
    "plain, resumed": Run("base", "float64", then=0),
    "meshwise, resumed, 2 then 3": Run("meshwise", "float64", 2, then=3),
}


def edited(lines: list[str], script: str) -> list[str]:
    """`lines` as the ed script leaves them: its commands go from the last line to the first."""
    left, commands = list(lines), iter(script.splitlines())
    for command in commands:
        found = re.fullmatch(r"(\d+)(?:,(\d+))?([acd])", command)
        assert found, f"not a command of diff --ed: {command}"
        first, kind = int(found[1]), found[3]
        last = int(found[2] or first)
        new = [] if kind == "d" else list(iter(lambda: next(commands), "."))
        left[first if kind == "a" else first - 1 : last] = new
    return left


def is_code(line: str) -> bool:
    """Neither blank nor a comment."""
    return bool(line.strip()) and not line.strip().startswith("#")


def changed(before: list[str], after: list[str]) -> dict[str, int]:
    """How many lines of code were added and removed."""
    told = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return {
        word: sum(line.startswith(sign) and is_code(line[1:]) for line in told)
        for word, sign in (("added", "+"), ("removed", "-"))
    }


def ports_of(name: str, originals: Path) -> dict[str, list[str]]:
    """The plain script and its ports. Exits where the original is another version."""
    script = SCRIPTS[name]
    text = (originals / script.path).read_text()
    if script.sha256 and hashlib.sha256(text.encode()).hexdigest() != script.sha256:
        sys.exit(f"{script.path} is not that of {script.source} at {script.commit}")
    base = edited(text.splitlines(), (PORTS / f"{name}.base.ed").read_text())
    ports = {tool: edited(base, (PORTS / f"{name}.{tool}.ed").read_text()) for tool in TOOLS}
    return {"original": text.splitlines(), "base": base, **ports}


def make_data(folder: Path) -> None:
    """Six kinds of waves under noise as pictures; sentences that hold one of three words; a tiny BERT, without dropout;
    and the accuracy of `evaluate`, which would be downloaded."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    y, x = numpy.mgrid[0:40, 0:40] / 40
    for split, count in (("train", 107), ("val", 37)):
        for number in range(count):
            kind = number % 6
            shown = kind if draw.random() > 0.15 else int(draw.integers(6))
            wave = 6 * (x * numpy.cos(shown) + y * numpy.sin(shown)) * (1 + shown % 3)
            picture = 128 + 45 * numpy.stack([numpy.sin(wave + k) for k in range(3)], -1)
            picture += draw.normal(0, 60, picture.shape)
            file = folder / "images" / split / f"class{kind}" / f"{number:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.clip(0, 255).astype("uint8")).save(file)
    made = random.Random(0)
    words = [f"w{i}" for i in range(60)]
    for split, count in (("train", 203), ("validation", 61)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["sentence1", "sentence2", "label"])
            for _ in range(count):
                both = [[made.choice(words) for _ in range(made.randint(3, 12))] for _ in range(2)]
                label = int(any(word in both[0] + both[1] for word in words[:3]))
                rows.writerow([*map(" ".join, both), label if made.random() < 0.95 else 1 - label])
    _make_bert(folder, words)
    (folder / "accuracy").mkdir()
    shutil.copy(PORTS / "accuracy.py", folder / "accuracy" / "accuracy.py")


def _make_bert(folder: Path, words: list[str]) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=65,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )
    model = BertForSequenceClassification(config)
    for dtype in ("float32", "float64"):
        model.to(getattr(torch, dtype)).save_pretrained(folder / f"bert-{dtype}")
        BertTokenizerFast(str(vocabulary)).save_pretrained(folder / f"bert-{dtype}")


def runs_of(name: str) -> dict[str, Run]:
    """The runs of a script, those that can be compared first."""
    return RUNS | (RESUMED if SCRIPTS[name].resumed else {})


def folder_of(folder: Path, name: str, label: str) -> Path:
    """Where a run is."""
    return folder / name / label.replace(", ", "-").replace(" ", "-")


def run(name: str, label: str, folder: Path) -> str:
    """One run; gives the end of its output where it fails."""
    script, asked = SCRIPTS[name], runs_of(name)[label]
    out = folder_of(folder, name, label)
    if asked.then is None:
        return started(name, asked, asked.devices, folder, out, "")
    first = started(name, asked, asked.devices, folder, out, script.stopped)
    return first or started(name, asked, asked.then, folder, out, script.resumed)


def command(port: str, devices: int) -> list[str]:
    """What stands before a script's name."""
    fabric = ["-m", "lightning_fabric.cli", "--accelerator", "cpu", "--strategy", "ddp", f"--devices={devices}"]
    return {
        "base": [],
        "meshwise": ["-m", "meshwise", "run", "--devices", f"{devices}xcpu"],
        "check": ["-m", "meshwise", "check", "--devices", f"{devices}xcpu"],
        "accelerate": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)],
        "fabric": fabric,
    }[port]


def started(name: str, asked: Run, devices: int, folder: Path, out: Path, more: str) -> str:
    """A script is started and ends: the end of its output where it fails, or what a check found."""
    script, port = SCRIPTS[name], asked.port
    if not out.exists():
        out.mkdir(parents=True)
        shutil.copytree(folder / "accuracy", out / "accuracy")
    batch = script.batch // devices if port in ("accelerate", "fabric") else script.batch
    arguments = f"{script.arguments} {script.option} {batch} {more}"
    environment = {
        **os.environ,
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
        "HF_HOME": str(folder / name / "meshwise-1" / "hf" if port == "check" else out / "hf"),
        "PYTHONPATH": os.pathsep.join([str(PORTS), os.environ.get("PYTHONPATH", "")]),
        "PORTS_OUT": str(out),
        "PORTS_DTYPE": asked.dtype,
        "PORTS_NUDGED": str(asked.nudged),
        "OMP_NUM_THREADS": str(asked.threads),
        "OMP_WAIT_POLICY": "passive",
        "ACCELERATE_USE_CPU": "true",
    }
    file = folder / name / f"with_{'meshwise' if port == 'check' else port}.py"
    told = arguments.format(data=folder, dtype=asked.dtype, batch=batch).split()
    done = subprocess.run(
        [sys.executable, *command(port, devices), str(file), *told],
        cwd=out,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    (out / "log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return (done.stdout + done.stderr)[-600:]
    return done.stdout.partition("\n\n")[0] if port == "check" else ""


def history(out: Path) -> Numbers:
    """What was recorded in a run."""
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def difference(one: Path, other: Path) -> dict[str, Any]:
    """The largest difference of all recorded numbers and of the losses alone (relative above 1), and of the weights;
    whether the best epochs are the same, of which there must be some."""
    import torch

    a, b = history(one), history(other)
    if [line.keys() for line in a] != [line.keys() for line in b]:
        return {"numbers": None, "why": f"{len(a)} and {len(b)} lines"}
    apart = {
        k: max(abs(x[k] - y[k]) / max(1, abs(x[k])) for x, y in zip(a, b, strict=True) if x.get(k) is not None)
        for k in {k for line in a for k, value in line.items() if not isinstance(value, bool | None)}
    }
    p, q = ({k.removeprefix("module."): v for k, v in torch.load(out / "weights.pt").items()} for out in (one, other))
    weights = [(p[k].double() - q[k].double()).abs().max() for k in p if p[k].numel() and k in q]
    return {
        "numbers": max(apart.values()),
        "losses": max(value for k, value in apart.items() if "loss" in k),
        "weights": float(max(weights)) if p.keys() == q.keys() else None,
        "same_best_epochs": bool(best_epochs(a)) and best_epochs(a) == best_epochs(b),
    }


def best_epochs(lines: Numbers) -> list[Any]:
    """The epochs that were the best so far."""
    return [line.get("best_epoch", line.get("epoch")) for line in lines if line.get("is_best") or "best_epoch" in line]


def reference(asked: Run) -> str:
    """The run with which a run is compared."""
    return "plain, resumed" if asked.then is not None else "plain" if asked.dtype == "float64" else "plain, float32"


def finished(name: str, label: str, folder: Path) -> str:
    """A run, or what is left of one that ended before: gives the end of its output where it failed."""
    out = folder_of(folder, name, label)
    note = out / "finished"
    if not note.exists():
        shutil.rmtree(out, ignore_errors=True)
        note.write_text(run(name, label, folder))
    return note.read_text()


def compared(name: str, label: str, folder: Path, why: str) -> dict[str, Any]:
    """What a run says beside the run that it is compared with."""
    outs = [folder_of(folder, name, word) for word in (reference(runs_of(name)[label]), label)]
    complete = all((out / "weights.pt").exists() for out in outs)
    return ({"failed": why} if why else {}) | (difference(outs[0], outs[1]) if complete else {})


def measure(name: str, originals: Path, folder: Path, at_once: int) -> Iterator[dict[str, Any]]:
    """All runs of a script, and `meshwise check`: what is known after each."""
    ports = ports_of(name, originals)
    (folder / name).mkdir(exist_ok=True)
    for port, lines in ports.items():
        (folder / name / f"with_{port}.py").write_text("\n".join(lines) + "\n")
    runs, script = runs_of(name), SCRIPTS[name]
    found: dict[str, Any] = {}
    told: dict[str, Any] = {
        "source": f"{script.source} {script.path} at {script.commit}",
        "lines": sum(map(is_code, ports["original"])),
        "lines_of_base": sum(map(is_code, ports["base"])),
        "changed": {tool: changed(ports["base"], ports[tool]) for tool in TOOLS},
        "epochs": [],
        "runs": found,
        "check": "not yet",
    }
    with ThreadPoolExecutor(at_once) as pool:
        ended = pool.map(lambda label: finished(name, label, folder), runs)
        for label, why in zip(runs, ended, strict=True):
            found[label] = compared(name, label, folder, why)
            print(name, label, found[label], flush=True)
            if label == "plain" and not why:
                told["epochs"] = history(folder / name / "plain")
            yield told
    shutil.rmtree(folder / name / "check", ignore_errors=True)
    checked = started(name, Run("check", "float32"), 2, folder, folder / name / "check", "")
    print(name, checked, flush=True)
    yield told | {"check": " ".join(checked.split())}


def figures(found: dict[str, Any]) -> str:
    """A run's cell in the tables of docs/ports.md: numbers, losses and weights; and the best epochs."""
    if found.get("numbers") is None:
        return str(found.get("why", "failed"))
    values = [found[name] for name in ("numbers", "losses", "weights")]
    text = ", ".join("other names" if value is None else f"{value:.0e}".replace("e-0", "e-") for value in values)
    text += ", same" if found["same_best_epochs"] else ", other best epochs"
    return text + (", then an error" if "failed" in found else "")


def tables(scripts: dict[str, Any]) -> str:
    """Those tables."""
    lines = []
    for names in ([n for n in RUNS if "32" not in n], [n for n in RUNS if "32" in n], RESUMED):
        lines += ["", "| script | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        for script, found in scripts.items():
            cells = [figures(found["runs"][name]) if name in found["runs"] else "" for name in names]
            lines += [f"| {script} | " + " | ".join(cells) + " |"] if any(cells) else []
    return "\n".join(lines)


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Measure, and write the results."""
    originals, names = Path(sys.argv[1]), sys.argv[2:] or list(SCRIPTS)
    folder = Path(os.environ.get("PORTS_IN") or tempfile.mkdtemp(prefix="ports")).resolve()
    print("in", folder, flush=True)
    if not (folder / "accuracy" / "accuracy.py").exists():
        make_data(folder)
    told: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    told["machine"] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    told["versions"] = {name: installed(name) for name in LIBRARIES} | {"python": platform.python_version()}
    for name in names:
        at_once = int(os.environ.get("PORTS_AT_ONCE", "1"))
        for found in measure(name, originals, folder, at_once):
            told.setdefault("scripts", {})[name] = found
            RESULTS.write_text(json.dumps(told, indent=1) + "\n")
    print(tables(told["scripts"]))


if __name__ == "__main__":
    main()
