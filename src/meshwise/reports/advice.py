"""Suggest what to try next, given what limited a run.

Advice only names options that the kind of program has. A script has no `--batch-size`, and a plain program has no plan.
"""

from __future__ import annotations

_SLOWER_COMPUTE = "Look for another program on its device, a lower clock, longer samples, or extra work on this rank."
TRY_FOR_STRAGGLER = {
    "data": "Look for slower storage, larger samples or fewer loader workers than on the other ranks.",
    "transfer": "Look for a slower path from host to device than on other ranks. meshwise run prints the cores.",
    "forward": _SLOWER_COMPUTE,
    "backward": _SLOWER_COMPUTE,
    "optimizer": "Look for another program on its device or cores, a lower clock or throttling.",
    "evaluate": "This rank's part of the test set takes longer. Look for other programs on its device.",
    "checkpoint": "This rank saves while the other ranks wait: {save}, or use faster storage.",
    "idle": "This rank spends time between the phases. Look for host work in its loop, or for another program.",
}
TRY_FOR_COMMUNICATION = {
    "batch norm": "Make fewer, larger steps: {batch}. Or use a norm without communication: GroupNorm{local_norm}.",
    "parameters": "Gather less often: {shard}, or {batch}.",
    "mw.sum": "Add the values up in the loop, and call mw.sum once after the loop instead of in every batch.",
    "": "For fewer reductions per sample: {batch}, or {accumulate}. For half the bytes: {half}.",
}
"""Advice against slow collectives, by the kind of data that they send. The key "" is for any other kind of data."""
TRY = {
    "slower": "Use one device, or give each device more to compute in a step: {batch}, or {accumulate}.",
    "input": "Read ahead with more loader workers ({workers}).",
    "imbalance": (
        "If samples differ in length, batch similar lengths together. If the machine is shared or throttles, look for "
        "other programs."
    ),
    "bubble": "Use more microbatches (--accumulate), or schedule=interleaved with twice as many blocks as ranks.",
    "idle": "Look for host work in the training loop: printing, .item(), logging, metrics.",
    "checkpoint": "Save less often{save_option}, or to faster storage.",
    "evaluation": "Evaluate less often, or on fewer samples.",
    "memory": "Do not keep autograd graphs alive: append loss.item() or loss.detach(), not loss.",
    "compute": "To go faster: more devices, {bf16}, torch.compile, or a smaller model.",
}
_OF_A_PLAN = {
    "local_norm": ", or --set batch_norm=local, which gives other numbers than one device",
    "shard": "shard over fewer devices (--set shard=…)",
    "half": "bf16 (--set precision=bf16)",
    "bf16": "bf16 (--set precision=bf16)",
}
_OF_A_LOOP = {
    "batch": "a larger batch (batch_size of its DataLoader)",
    "workers": "num_workers of its DataLoader",
    "save": "save less often",
    "save_option": "",
}
_OF_A_SCRIPT = _OF_A_PLAN | _OF_A_LOOP | {"accumulate": "accumulate (mw.accumulate)"}
WORDS = {
    "job": _OF_A_PLAN
    | {
        "batch": "a larger batch (--batch-size)",
        "accumulate": "accumulate (--accumulate)",
        "half": "bf16 (--precision bf16)",
        "bf16": "bf16 (--precision bf16)",
        "workers": "loader_workers of the Job",
        "save": "save less often (--save-every)",
        "save_option": " (--save-every)",
    },
    "script": _OF_A_SCRIPT,
    "trainer": _OF_A_SCRIPT
    | {
        "batch": "a larger batch (per_device_train_batch_size)",
        "accumulate": "accumulate (gradient_accumulation_steps)",
        "workers": "dataloader_num_workers",
        "save": "save less often (save_steps)",
        "save_option": " (save_steps)",
    },
    "lightning": _OF_A_SCRIPT | {"accumulate": "accumulate (accumulate_grad_batches)"},
    "plain": _OF_A_LOOP
    | {
        "local_norm": "",
        "shard": "keep them gathered (reshard_after_forward=False of fully_shard)",
        "accumulate": "accumulate (model.no_sync() of DDP, set_requires_gradient_sync(False) of fully_shard)",
        "half": "bf16 (bf16_compress_hook of DDP, reduce_dtype of fully_shard)",
        "bf16": "bf16 (torch.autocast)",
    },
}
"""For each kind of program, the text that replaces each placeholder such as `{batch}` in a piece of advice."""


def advised(text: str, program: str) -> str:
    """Replace the placeholders of an advice text, such as `{batch}`, by the options that this kind of program has.

    program: a key of `WORDS`. Any other value counts as "script".
    """
    return text.format_map(WORDS.get(program, WORDS["script"]))
