"""A script with the two lines is rehearsed up to its second step: as a job of the same program is, or refused by name.

Of planner/fakes/cuda.py and planner/as_worker.py too.
"""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from meshwise.hardware.words import machine_from_words
from meshwise.planner.memory import memory_curve, memory_parts
from meshwise.planner.scripts import Script, known_script, trace_script
from meshwise.planner.trace import trace
from meshwise.planner.work import Launch, Operation
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.jobs.script import run_script_file

SCRIPT = """
import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import meshwise as mw

options = argparse.ArgumentParser()
options.add_argument("--size", type=int, default=32)
size = options.parse_args().size
torch.manual_seed(0)
random.seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data, _ = random_split(TensorDataset(torch.randn(60, 8), torch.randint(3, (60,))), [40, 20])
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
model = nn.Sequential(nn.Linear(8, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Linear(size, 3)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
# before
for x, y in loader:
    x, y = x.to(device), y.to(device)
    assert x.is_cuda == (x.device.type == "cuda") == (device == "cuda")
    loss = mw.backward(nn.functional.cross_entropy(model(x), y))
    # changed
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


@pytest.fixture
def script(tmp_path):
    """`script(text, *arguments)`: what the rehearsal runs, of a file with this text."""

    def written(text=SCRIPT, *arguments):
        file = tmp_path / "train.py"
        file.write_text(text)
        return Script("train.py", partial(run_script_file, file, arguments))

    return written


def job():
    def model():
        layers = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
        return torch.nn.Sequential(*layers)

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    data = torch.randn(40, 8), torch.randint(3, (40,))
    return Job("same", model, loss, partial(torch.optim.AdamW, lr=0.01), data, batch_size=8)


def launched(work, phases=("forward", "backward", "optimizer")):
    return [each.what for each in work.launches if isinstance(each.what, Operation) and each.phase in phases]


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_its_step_is_that_of_a_job_of_the_same_program(script, kind):
    ours, theirs = trace_script(script(), Plan(), kind)[0], trace(job(), Plan(), kind)[0]
    for work, of_job in ((ours.first, theirs.first), (ours.step, theirs.step)):
        assert launched(work) == launched(of_job)
    assert ours.step.flops == theirs.step.flops > 0


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=4, precision="bf16"), Plan(tensor=2)], ids=str)
def test_a_plan_comes_to_it_as_to_a_worker(script, plan):
    work, of_job = trace_script(script(), plan)[0].step, trace(job(), plan)[0].step
    assert work.ranks == plan.devices
    assert launched(work, ["forward"]) == launched(of_job, ["forward"])
    assert launched(work, ["optimizer"]) == launched(of_job, ["optimizer"])
    kinds = {launch.what.kind for launch in work.launches if hasattr(launch.what, "kind")}
    assert kinds >= {launch.what.kind for launch in of_job.launches if hasattr(launch.what, "kind")}


@pytest.mark.parametrize("plan", [Plan(), Plan(data=2), Plan(shard=2)], ids=str)
def test_a_script_that_sees_whole_batches_is_rehearsed_as_one_that_sees_rows(script, plan):
    whole = SCRIPT.replace(', view="rank")', ")")
    whole = whole.replace("loss = mw.backward(nn.functional.cross_entropy(model(x), y))", "loss = CE(model(x), y)")
    whole = whole.replace("# changed", "loss.backward()").replace("CE", "nn.functional.cross_entropy")
    ours, theirs = trace_script(script(whole), plan)[0].step, trace_script(script(), plan)[0].step
    for phase in ("forward", "optimizer"):
        assert launched(ours, [phase]) == launched(theirs, [phase]) != []
    assert ours.flops == theirs.flops > 0
    kinds, others = ([each.what.kind for each in w.launches if hasattr(each.what, "kind")] for w in (ours, theirs))
    assert kinds == others


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("plan", [Plan(data=2), Plan(tensor=2)], ids=str)
def test_a_script_that_averages_its_model_is_rehearsed(script, plan, kind):
    """`AveragedModel` copies the model, whose parameters may be DTensors of fake tensors."""
    text = SCRIPT.replace("# before", "average = torch.optim.swa_utils.AveragedModel(model)")
    text = text.replace("optimizer.zero_grad()", "optimizer.zero_grad(); average.update_parameters(model)")
    assert trace_script(script(text), plan, kind)[0].step.flops > 0


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_devices_and_autocast_by_their_name_are_those_of_the_kind_that_is_rehearsed(script, kind):
    """`torch.device("cuda")` says `cuda` to the script, which took the branch of a CPU where it said `sim`."""
    text = SCRIPT.replace('device = "cuda" if', 'device = torch.device("cuda") if').replace(
        'else "cpu"', 'else torch.device("cpu")'
    )
    text = text.replace(
        '(device == "cuda")', '(device.type == "cuda") == (torch.zeros(1).to(device).device == torch.device("cuda:0"))'
    )
    half = "dtype=torch.float16" if kind == "cpu" else ""  # which is CUDA's own
    text = text.replace("    loss =", f"    with torch.autocast(device.type, {half}): out = model(x)\n    loss =")
    work = trace_script(script(text.replace("model(x), y", "out.float(), y")), Plan(), kind)[0].step
    products = [what for what in launched(work, ["forward"]) if what.name in ("aten.addmm", "aten.linear")]
    assert [set(what.dtypes) for what in products] == [{"fp16"}] * 2


def test_memory_has_its_categories(script):
    work = trace_script(script(), Plan())[0].step
    held = dict.fromkeys(("parameters", "buffers", "optimizer", "input"), 0)
    for event in work.held:
        if not event.on_host and event.category in held:
            held[event.category] += event.size
    parameters = 4 * (8 * 32 + 32 * 2 + 32 + 32 * 3 + 3)
    buffers = 4 * 32 * 2 + 8  # of the batch norm
    assert (held["parameters"], held["buffers"]) == (parameters, buffers)
    assert 2 * parameters <= held["optimizer"] <= 2 * parameters + 100
    assert held["input"] == 2 * (8 * 8 * 4 + 8 * 8)  # the loop's variables hold the last batch while the next comes


def test_the_data_of_a_script_are_no_gradients(script):
    """On a CPU a data set of tensors is memory of the device, and stays."""
    text = SCRIPT.replace("torch.randn(60, 8)", "torch.randn(6000, 8)").replace("[40, 20]", "[40, 5960]")
    text = text.replace("torch.randint(3, (60,))", "torch.randint(3, (6000,))")
    (traced,) = trace_script(script(text), Plan(), "cpu")
    split = memory_curve(traced.step).peak.split
    assert split["input"] >= 6000 * 8 * 4 and 0 < split["gradients"] < 1.5 * traced.step.holds("parameters")


def test_what_a_search_must_know_of_it(script):
    found = known_script("train.py", script(SCRIPT, "--size", "16").run, "cpu")
    assert (found.batch_size, found.model.batch_norms) == (8, True)
    forward, flops = found.model.forward, 2 * 8 * (8 * 16 + 16 * 3)
    assert forward.flops == flops and forward.operators > 4 and forward.kept > 0


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "GRU-without-bias", "RNN"])
def test_recurrent_layers_are_rehearsed_cell_by_cell_on_a_gpu(script, layer):
    """torch has the shapes of CUDA's LSTM cell, and no other's: a GRU ended in an error about `sim`."""
    kind, _, bias = layer.partition("-")
    text = SCRIPT.replace("# before", "").replace("model(x)", "model(x[:, None])[0][:, 0]")
    of_layers = text[text.index("nn.Sequential(") : text.index(".to(device)\n")]
    text = text.replace(of_layers, f"nn.{kind}(8, 16, 2, batch_first=True, bidirectional=True, bias={not bias})")
    for plan in (Plan(), Plan(data=2)):
        work = trace_script(script(text), plan)[0].step
        cells = [what for what in launched(work) if "fused" in what.name and "cell" in what.name]
        assert len(cells) == (0 if kind == "RNN" else 2 * 2 * 2)  # layers, directions, and each one's backward
        assert sum(what.flops for what in launched(work, ["backward"])) > 0


def test_a_script_knows_how_many_of_its_parameters_are_computed_wide(script):
    parameters = 8 * 32 + 32 + 2 * 32 + 32 * 3 + 3
    assert known_script("train.py", script().run, "gpu").model.wide == parameters
    narrow = SCRIPT.replace(
        "    loss = ", "    with torch.autocast('cuda', torch.bfloat16): out = model(x)\n    loss = "
    )
    found = known_script("train.py", script(narrow.replace("model(x), y", "out, y")).run, "gpu")
    assert found.model.wide == 0 and found.model.parameters == 4 * parameters


def test_a_number_that_is_shown_is_taken_for_one_and_said(script):
    notes = trace_script(script(), Plan())[0].step.notes
    assert any("train.py:" in note and "assumes 1" in note for note in notes)


def test_this_process_is_as_it_was_before(script):
    changes = """
import os, sys, random
import numpy as np
os.environ["CHANGED"] = "1"
sys.argv.append("changed")
torch.set_default_dtype(torch.float64)
torch.set_default_dtype(torch.float32)
torch.set_float32_matmul_precision("high")
torch.set_default_device(device)
torch.set_grad_enabled(True)
np.random.seed(3)
os.makedirs("made", exist_ok=True)
os.chdir("made")
# before
"""
    before, folder = settings(), Path.cwd()
    try:
        trace_script(script(SCRIPT.replace("# before", changes)), Plan(data=2))
        after = settings()
    finally:
        (folder / "made").rmdir()
    assert after == before


def settings():
    return (
        [sys.argv[:], sys.path[:], dict(os.environ), Path.cwd(), torch.get_rng_state().tolist()],
        [torch.get_float32_matmul_precision(), torch.get_default_device(), torch.cuda.is_available()],
        [DataLoader.__init__, torch.distributed.is_initialized()],
    )


def test_an_evaluation_before_and_batches_that_add_up_are_no_steps(script):
    evaluation = """
model.eval()
with torch.no_grad():
    print(sum(model(x.to(device)).sum().item() for x, y in loader))
model.train()
"""
    several = SCRIPT.replace("# before", evaluation).replace(
        "for x, y in loader:", "for n, (x, y) in enumerate(loader):"
    )
    several = several.replace("    # changed\n", "    if n % 2 == 0:\n        continue\n")
    work = trace_script(script(several), Plan())[0].step
    forwards = [what for what in launched(work) if what.name == "aten.addmm"]
    assert len(forwards) == 2 * 2
    assert sum(what.name.startswith("aten._foreach_") for what in launched(work)) > 0
    assert {launch.microbatch for launch in work.launches if launch.phase == "forward"} == {0, 1}


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=2)], ids=str)
@pytest.mark.parametrize("inside", ["every batch", "all but the last", "none"])
def test_gradients_of_several_batches_are_named_with_what_needs_less(script, plan, inside):
    """Those that wait in `mw.accumulate()` were called temporary, and what a clip makes, activations."""
    keeps = {"every batch": "mw.accumulate()", "all but the last": "mw.accumulate() if n % 2 else nullcontext()"}
    text = SCRIPT.replace("import argparse", "import argparse\nfrom contextlib import nullcontext")
    text = text.replace("for x, y in loader:", "for n, (x, y) in enumerate(loader, 1):")
    text = text.replace("    loss = mw", f"    with {keeps.get(inside, 'nullcontext()')}:\n        loss = mw")
    clips = "if n % 2:\n        continue\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    traced = trace_script(script(text.replace("# changed", clips), "--size", "4096"), plan)[0]
    found = memory_parts(traced.first, traced.step, machine_from_words("2xH100").devices[0]).phases["forward"]
    weights = 4 * (8 * 4096 + 4096 + 2 * 4096 + 3 * 4096 + 3)
    waiting = weights if inside != "none" or plan.shard == 1 else weights / 2
    assert 0.9 * waiting < found["gradients"] < 2.5 * weights
    assert found.get("temporary", 0) < weights / 10
    notes = " ".join(traced.step.notes)
    assert ("keeps whole gradients" in notes) == (plan.shard > 1 and inside != "none")
    assert ("Leave the last batch outside of mw.accumulate()" in notes) == (plan.shard == 1 and inside == "every batch")


def test_it_ends_though_it_catches_every_exception(script):
    catches = SCRIPT.replace("for x, y in loader:", "while True:\n  for x, y in loader:").replace("\n    ", "\n      ")
    text = catches.replace("\n      # changed", "\n      try:\n          pass\n      except Exception:\n          pass")
    assert any(isinstance(event, Launch) for event in trace_script(script(text), Plan())[0].step.events)


def test_a_plain_script_is_refused_after_its_first_steps(script):
    plain = SCRIPT.replace('mw.distribute(model, optimizer, loader, view="rank")', "model, optimizer, loader")
    plain = plain.replace("mw.backward(loss)", "loss.backward()")
    assert plain.count("for x, y in loader:") == 1
    text = plain.replace("for x, y in loader:", "for x, y in (batch for _ in iter(int, 1) for batch in loader):")
    with pytest.raises(UsageError, match=r"never passes a model to mw\.distribute"):
        trace_script(script(text), Plan())


PLAIN = {
    "DDP": """
import os
import torch
from torch import nn
torch.distributed.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2).to(int(os.environ["LOCAL_RANK"])))
""",
    "a rank of its own": "import os\nrank = int(os.environ['LOCAL_RANK'])\n",
    "accelerate": """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator, model = Accelerator(), torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    accelerator.backward(model(x).mean())
    optimizer.step()
""",
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_script_of_another_library_is_told_of_the_lines(script, name, kind):
    """It ended in an error about MASTER_ADDR."""
    if name == "accelerate":
        pytest.importorskip("accelerate")
    with pytest.raises(UsageError, match=r"never passes a model to mw\.distribute.*Trainer of .*docs/from-ddp\.md"):
        trace_script(script(PLAIN[name]), Plan(), kind)


TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import meshwise as mw
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = BertConfig(vocab_size=64, **sizes)
data = [{"input_ids": torch.arange(8) + i, "labels": i % 2} for i in range(48)]
options = TrainingArguments("out", per_device_train_batch_size=8, report_to=[], save_strategy="no", max_steps=3)
trainer = mw.distribute(Trainer(BertForSequenceClassification(config), options, train_dataset=data))
trainer.train()
"""
LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
import meshwise as mw

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

loader = DataLoader(TensorDataset(torch.randn(48, 32), torch.randint(2, (48,))), batch_size=8)
trainer = mw.distribute(L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False))
trainer.fit(Model(), loader)
"""


@pytest.mark.parametrize("kind", ["gpu", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("library", "text"), [("transformers", TRAINER), ("lightning", LIGHTNING)])
def test_a_trainer_that_is_distributed_is_rehearsed(script, library, text, kind):
    """Lightning's ended in `Device should be GPU, got sim`, transformers' in an error about MASTER_ADDR."""
    pytest.importorskip(library)
    (alone,), (half,), (part,) = (
        trace_script(script(text), plan, kind) for plan in (Plan(), Plan(data=2), Plan(shard=2))
    )
    assert alone.step.flops == 2 * half.step.flops == 2 * part.step.flops > 0
    for work in (alone.step, half.step):
        assert launched(work, ["forward"]) and launched(work, ["backward"])
        assert all("addmm" not in what.name and what.name != "mm" for what in launched(work, ["optimizer"]))
    sent = [launch.what.kind for launch in half.step.launches if hasattr(launch.what, "kind")]
    assert "all-reduce" in sent
    peak = memory_curve(alone.first).peak.split
    assert peak["gradients"] > 0 and alone.step.holds("optimizer") >= 2 * alone.step.holds("parameters")


def test_a_trainer_that_is_told_to_use_the_cpu_is_where_the_run_is(script):
    """Its batches went to the CPU, and its model to the GPU."""
    pytest.importorskip("transformers")
    text = TRAINER.replace("report_to=[]", "report_to=[], use_cpu=True")
    assert trace_script(script(text), Plan(), "gpu")[0].step.flops > 0


def test_a_loss_is_taken_for_finite(script):
    text = SCRIPT.replace("# changed", "assert not torch.isnan(loss) and not torch.isinf(loss).any()")
    assert trace_script(script(text), Plan())[0].step.flops > 0


def test_a_script_that_makes_its_model_on_the_cpu_is_planned_on_the_gpu(script):
    """As a worker's is moved: README's own loop was refused once."""
    text = SCRIPT.replace(".to(device)\noptimizer", "\noptimizer").replace(
        "    x, y = x.to(device), y.to(device)\n", ""
    )
    text = text.replace("    assert x.is_cuda", "    0 and x.is_cuda")
    found = known_script("train.py", script(text).run, "gpu")
    moved, plain = (trace_script(each, Plan(data=2))[0].step for each in (found, script()))
    assert launched(moved) == launched(plain)
    with pytest.raises(UsageError, match="tensors on two devices"):
        known_script("train.py", script(SCRIPT.replace("torch.cuda.is_available()", "False")).run, "gpu")


def test_a_first_guess_knows_blocks_activations_and_the_optimizer(script):
    """Activations were those at the peak, which is often in the optimizer, and all of a model one block."""
    blocks = "*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)), "
    text = SCRIPT.replace("nn.Linear(size, 3)", f"nn.Linear(size, 512), {blocks}nn.Linear(512, 3)")
    model = known_script("train.py", script(text).run, "gpu").model
    weights = 4 * (6 * (512 * 512 + 512) + 32 * 512)
    assert model.forward.blocks >= 6 and model.forward.kept > 8 * 512 * 4 * 6
    assert 15 < model.stepped < 25 and model.parameters > weights


REFUSED = {
    "no line": (
        ('mw.distribute(model, optimizer, loader, view="rank")', "model, optimizer, loader"),
        "never passes a model",
    ),
    "no step": (("    optimizer.step()\n", ""), "no optimizer made a step"),
    "a value decides": (("# changed", "if loss > 1: break"), "train.py:28: train.py is rehearsed on tensors without"),
    "a value in the model": (("nn.ReLU()", "Reads()"), "this line needs a value"),
    "it ends itself": (("# changed", "sys.exit('no licence')"), "ends before its second step: no licence"),
    "its own options": (("# changed", ""), "unrecognized arguments: --colour"),
    "a file that is not there": (("# changed", "open('missing.txt')"), "No such file or directory: 'missing.txt'"),
    "processes": (("# changed", "torch.multiprocessing.Process(target=print).start()"), "starts processes"),
    "nothing on the GPU": (("torch.cuda.is_available()", "False"), "tensors on two devices"),
    "the variable of a launcher": (
        ("# changed", "__import__('os').environ['LOCAL_RANK']"),
        "Write os.environ.get('LOCAL_RANK', 0)",
    ),
    "a device beside the other": (("model(x)", "model(x.cpu())"), "tensors on two devices"),
    "packed sequences": (
        ("model(x)", "model(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([8] * 8)))"),
        "train.py:27: train.py calls pack_padded_sequence",
    ),
    "rows that do not fit": (("model(x)", "model(x[:, :7])"), "cannot be rehearsed"),
}
READS = "class Reads(nn.Module):\n    def forward(self, x):\n        return x if x.max().item() > 0 else -x\n\n"


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_sentence(script, case):
    (old, new), says = REFUSED[case]
    text = SCRIPT.replace(old, new).replace("import random\n", "import random\nimport sys\n")
    text = text.replace("torch.manual_seed(0)\n", READS + "torch.manual_seed(0)\n") if "Reads" in new else text
    with pytest.raises(MeshwiseError) as refused:
        trace_script(script(text, *(["--colour"] if case == "its own options" else [])), Plan())
    assert says in str(refused.value), refused.value


def test_a_pipeline_needs_a_job(script):
    with pytest.raises(MeshwiseError, match="Write a Job"):
        trace_script(script(), Plan(pipeline=2, accumulate=2))
