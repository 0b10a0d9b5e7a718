"""Scripts of accelerate and peft, with `mw.distribute` in place of `prepare`: data of `frameworks.py`.

They were chosen before any of them was run. `ours` is what docs/from-accelerate.md says, line by line.
"""

from __future__ import annotations

from typing import Any

import frameworks_accelerate_probe as local
from frameworks_scripts import Edit, Script

ACCELERATE_AT = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
PEFT_AT = ("huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40")
PROBE = "frameworks_accelerate_probe"
BERT = "bert-base-cased"

# What is smaller: a model and data in folders, more to see of a few steps.
SMALL: tuple[Edit, ...] = (
    ("from datasets import load_dataset", "from datasets import load_from_disk"),
    ('load_dataset("nyu-mll/glue", "mrpc")', 'load_from_disk("mrpc")'),
    ('evaluate.load("glue", "mrpc")', f"{PROBE}.Metric()"),
    ('"bert-base-cased"', '"bert"'),
    ('{"lr": 2e-5, "num_epochs": 3', '{"lr": 2e-3, "num_epochs": 2'),
    ("num_warmup_steps=100", "num_warmup_steps=3"),
)
# What is looked at, in every run.
LOSS = ("accelerator.backward(loss)", f"accelerator.backward(loss); {PROBE}.tell(loss=loss.item())")
END = ("accelerator.end_training()", f"{PROBE}.weights(model); accelerator.end_training()")
EPOCH = (
    'accelerator.print(f"epoch {epoch}:", eval_metric)',
    f'{PROBE}.tell(epoch=epoch, metrics=eval_metric); accelerator.print(f"epoch {{epoch}}:", eval_metric)',
)
# What meshwise asks for.
DEVICE = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
MADE = ("accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)", DEVICE)
NO_XLA = (" and accelerator.distributed_type != DistributedType.XLA", "")
MULTIPLE = (
    '        if accelerator.mixed_precision == "fp8":…        else:\n            pad_to_multiple_of = None\n',
    "        pad_to_multiple_of = None\n",
)
LENGTH = ("128 if accelerator.distributed_type == DistributedType.XLA else None", "None")
LOADERS: tuple[Edit, ...] = (
    ("get_dataloaders(accelerator: Accelerator, batch_size", "get_dataloaders(batch_size"),
    ("get_dataloaders(accelerator, batch_size)", "get_dataloaders(batch_size)"),
)
COMMON: tuple[Edit, ...] = (
    ("with accelerator.main_process_first():", "with mw.main_first():"),
    (".to(accelerator.device)", ".to(device)"),
    ("accelerator.prepare(", "mw.distribute("),
    ("accelerator.backward(loss)", "loss = mw.backward(loss)"),
    ("accelerator.gather_for_metrics(", "mw.gather_samples("),
    ("accelerator.print(", "mw.print("),
    ("; accelerator.end_training()", ""),
)
UNDER_WAY = tuple(edit for edit in COMMON if edit[0] != LOSS[0])  # where the loss is written otherwise
IMPORTED = ("from accelerate import Accelerator, DistributedType\n", "")
DROPPED = ('drop_last=(accelerator.mixed_precision == "fp8"),', "drop_last=False,")
NLP = (IMPORTED, MADE, MULTIPLE, LENGTH, *LOADERS, *COMMON)


def accumulated(name: str, indent: int, body: str, window: str = "gradient_accumulation_steps") -> Edit:
    """accelerate's context with the loop's own end of a window. name: of the outputs; body: its first lines."""
    at = " " * indent
    inner = f"{at}with accelerator.accumulate(model):\n{body}{at}    loss = {name}.loss\n{at}    {LOSS[1]}\n"
    ends = "".join(f"{at}    {each}\n" for each in ("optimizer.step()", "lr_scheduler.step()", "optimizer.zero_grad()"))
    ours = (
        f"{at}with mw.accumulate():\n{body}{at}    loss = {name}.loss / {window}\n"
        f"{at}    loss = mw.backward(loss) * {window}; {PROBE}.tell(loss=loss.item())\n"
        f"{at}if (step + 1) % {window} == 0 or step + 1 == len(train_dataloader):\n"
    )
    return inner + ends, ours + ends


def saved(indent: int = 4, *, epochs: str = "range(num_epochs)", more: str = "", folder: str = '"state"') -> Edit:
    """The loop that goes on where it was stopped."""
    at, ends = " " * indent, epochs.rpartition("(")[2].rpartition(", ")[2]
    given = f"model=model, optimizer=optimizer, scheduler=lr_scheduler, loader=train_dataloader{more}"
    return (
        f"{at}for epoch in {epochs}:\n",
        f"{at}saved = mw.checkpoint({folder}, {given})\n{at}for epoch in range(saved.epoch, {ends}:\n",
    )


COUNTED = ("in enumerate(train_dataloader)", "in enumerate(train_dataloader, train_dataloader.start)")


def of_accelerate(name: str, ours: tuple[Edit, ...], **more: Any) -> Script:
    """One of its examples, which trains a BERT on pairs unless it says what else."""
    given: dict[str, Any] = {
        "small": SMALL,
        "shown": (LOSS, END, EPOCH),
        "kept": (saved(),),
        "stop": 3,  # inside an epoch
        "made": (local.write_pairs,),
        **more,
    }
    return Script(ACCELERATE_AT, f"examples/{name}.py", ours, package="accelerate", probe=PROBE, **given)


PICTURES: tuple[Edit, ...] = (
    ("os.listdir(args.data_dir)", "sorted(os.listdir(args.data_dir))"),
    ("num_workers=4", "num_workers=0"),
    ('create_model("resnet50d", pretrained=True', 'create_model("resnet10t", pretrained=False'),
    (
        '"num_epochs": 3, "seed": 42, "batch_size": 64, "image_size": 224',
        '"num_epochs": 2, "seed": 42, "batch_size": 10, "image_size": 64',
    ),
)
FROM_UTILS = ("from accelerate.utils import set_seed\n", "from transformers import set_seed\n")
SHOWN_PICTURES = (
    'accelerator.print(f"epoch {epoch}: {100',
    f'{PROBE}.tell(epoch=epoch, metrics={{"accuracy": eval_metric, "samples": num_elems}}); '
    'accelerator.print(f"epoch {epoch}: {100',
)
TRAINED = '"train loss": total_loss.item() / len(train_dataloader)'
TRACKED_PICTURES = (SHOWN_PICTURES[0], SHOWN_PICTURES[1].replace('"samples"', f'{TRAINED}, "samples"'))
TRACKED = (EPOCH[0], EPOCH[1].replace("metrics=eval_metric", f"metrics={{**eval_metric, {TRAINED}}}"))
NO_STATES: tuple[Edit, ...] = (
    ("    # We need to initialize the trackers…        accelerator.init_trackers(run, config)\n", ""),
    (
        "    # Potentially load in the weights and states from a previous save\n…    # Now we train",
        "    # Now we train",
    ),
    (
        "        if args.resume_from_checkpoint and epoch…active_dataloader = train_dataloader\n        for",
        "        for",
    ),
    (
        "            if args.with_tracking:\n                total_loss += loss.detach().float()\n"
        f"            {LOSS[1]}\n",
        f"            loss = mw.backward(loss); {PROBE}.tell(loss=loss.item())\n"
        "            if args.with_tracking:\n                total_loss += loss.detach().float()\n",
    ),
    ("            if isinstance(checkpointing_steps, int):\n…accelerator.save_state(output_dir)\n", ""),
    ('        if checkpointing_steps == "epoch":\n            output_dir…accelerator.save_state(output_dir)\n', ""),
    ("accelerator.log(", "mw.log("),
)
SCRIPTS: dict[str, Script] = {
    "nlp_example": of_accelerate("nlp_example", (*NLP, NO_XLA, DROPPED)),
    "gradient_accumulation": of_accelerate(
        "by_feature/gradient_accumulation",
        (
            IMPORTED,
            (
                "    accelerator = Accelerator(\n…    if accelerator.distributed_type…        )\n",
                f"    {DEVICE}\n",
            ),
            MULTIPLE,
            LENGTH,
            *LOADERS,
            accumulated("output", 12, "                output = model(**batch)\n"),
            *UNDER_WAY,
        ),
        arguments="--gradient_accumulation_steps 2",
        kept=(saved(), COUNTED),
    ),
    "multi_process_metrics": of_accelerate(
        "by_feature/multi_process_metrics",
        (
            *(edit for edit in NLP if "gather" not in edit[0]),
            NO_XLA,
            ("accelerator.gather((", "mw.gather_samples(("),
            (
                "            if accelerator.use_distributed:\n…samples_seen += references.shape[0]\n",
                "",
            ),
            ("        samples_seen = 0\n", ""),
        ),
    ),
    "early_stopping": of_accelerate(
        "by_feature/early_stopping",
        (
            *NLP,
            NO_XLA,
            DROPPED,
            (
                "                accelerator.set_trigger()\n…                break\n",
                "                break\n",
            ),
        ),
        kept=(saved(more=", extra=vars(callback)"),),
    ),
    "local_sgd": of_accelerate(
        "by_feature/local_sgd",
        (
            IMPORTED,
            ("from accelerate.local_sgd import LocalSGD\n", ""),
            (
                "    accelerator = Accelerator(\n…    )\n",
                f"    {DEVICE}\n",
            ),
            MULTIPLE,
            LENGTH,
            *LOADERS,
            (
                "        with LocalSGD(\n…) as local_sgd:\n",
                "        if True:\n",
            ),
            (
                "                    # LocalSGD-specific line\n                    local_sgd.step()\n",
                "",
            ),
            accumulated("output", 16, "                    output = model(**batch)\n"),
            *UNDER_WAY,
        ),
        arguments="--gradient_accumulation_steps 2 --local_sgd_steps 4",
        kept=(saved(), COUNTED),
    ),
    "cross_validation": of_accelerate(
        "by_feature/cross_validation",
        (
            *(edit for edit in NLP if edit not in LOADERS),
            NO_XLA,
            ("    accelerator: Accelerator, dataset: DatasetDict,", "    dataset: DatasetDict,"),
            ("            accelerator,\n            datasets,\n", "            datasets,\n"),
            (
                "train_dataloader, eval_dataloader, lr_scheduler",
                "train_dataloader, eval_dataloader, test_dataloader, lr_scheduler",
            ),
            ("model, optimizer = accelerator.free_memory(model, optimizer)", "del model, optimizer"),
        ),
        small=(
            ("from datasets import DatasetDict, load_dataset", "from datasets import DatasetDict, load_from_disk"),
            *SMALL[1:],
        ),
        shown=(
            LOSS,
            EPOCH,
            ("        # We now need to release", f"        {PROBE}.weights(model)\n        # We now need to release"),
            ("accelerator.end_training()", f"{PROBE}.tell(test=test_metric); accelerator.end_training()"),
        ),
        kept=(saved(8, folder='f"state-{i}"'),),
        stop=9,
    ),
    "gradient_accumulation_for_autoregressive_models": of_accelerate(
        "by_feature/gradient_accumulation_for_autoregressive_models",
        (
            IMPORTED,
            ("import contextlib\n", ""),
            (
                "    if args.with_wandb_tracking:\n        accelerator = Accelerator(\n…Gradient…        )\n",
                f"    {DEVICE}\n",
            ),
            ("    # We need to initialize the trackers…        )\n", ""),
            ("with accelerator.local_main_process_first():", "with mw.main_first():"),
            MULTIPLE,
            (
                "        max_length = (\n…        )\n",
                '        max_length = max([len(e["input_ids"]) for e in examples])\n',
            ),
            *LOADERS,
            ("accelerator.gather(local_num_items_in_batch).sum().item()", "mw.sum(local_num_items_in_batch).item()"),
            (
                "                ctx = (\n…                with ctx():\n",
                "                with mw.accumulate():\n",
            ),
            ("                    loss = loss * gradient_accumulation_steps * accelerator.num_processes\n", ""),
            (
                "accelerator.backward(loss)",
                'loss = mw.backward(loss, reduction="sum") * gradient_accumulation_steps',
            ),
            ("accelerator.clip_grad_norm_(", "torch.nn.utils.clip_grad_norm_("),
            (
                "losses = accelerator.gather(sum(losses)).sum().item() / (\n…            )\n",
                "losses = sum(losses).item() / gradient_accumulation_steps\n",
            ),
            ("            if args.with_wandb_tracking:\n…                )\n", ""),
            (
                "accelerator.gather_for_metrics(loss.repeat(EVAL_BATCH_SIZE))",
                'mw.gather_samples(loss.repeat(len(batch["labels"])))',
            ),
            ("        if args.with_wandb_tracking:\n…            )\n", ""),
            *(edit for edit in UNDER_WAY if "gather" not in edit[0]),
        ),
        small=(
            SMALL[0],
            ('"HuggingFaceTB/SmolLM-360M"', '"gpt2"'),
            ('load_dataset("Salesforce/wikitext", "wikitext-2-v1")', 'load_from_disk("wikitext")'),
            ("max_training_samples=500", "max_training_samples=54"),
            ('{"lr": 2e-5, "num_epochs": 3', '{"lr": 2e-3, "num_epochs": 2'),
        ),
        shown=(
            (
                '            accelerator.print(\n                f"epoch {epoch} - update',
                f"            {PROBE}.tell(clipped=grad_norm, loss=losses)\n"
                '            accelerator.print(\n                f"epoch {epoch} - update',
            ),
            (
                'accelerator.print(f"epoch {epoch}:: eval',
                f'{PROBE}.tell(epoch=epoch, metrics={{"perplexity": perplexity}}); '
                'accelerator.print(f"epoch {epoch}:: eval',
            ),
            END,
        ),
        kept=(
            saved(more=", every=1"),
            (
                "for update_step in range(total_gradient_updates):",
                "for update_step in range(train_dataloader.start // gradient_accumulation_steps, "
                "total_gradient_updates):",
            ),
        ),
        arguments="--gradient_accumulation_steps 3 --per_device_batch_size 4",
        made=(local.write_lines,),
    ),
    "automatic_gradient_accumulation": of_accelerate(
        "by_feature/automatic_gradient_accumulation",
        (
            ("from accelerate import Accelerator\nfrom accelerate.utils import find_executable_batch_size\n", ""),
            MADE,
            MULTIPLE,
            *LOADERS,
            ("    @find_executable_batch_size(starting_batch_size=int(observed_batch_size))\n", ""),
            ("        nonlocal accelerator\n", ""),
            ("        accelerator.gradient_accumulation_steps = num_gradient_accumulation_steps\n", ""),
            ("        accelerator.free_memory()\n", ""),
            (
                "with accelerator.accumulate(model):\n"
                "                    # We could avoid this line since we set the accelerator with "
                "`device_placement=True`.\n                    batch.to(accelerator.device)\n",
                "with accelerator.accumulate(model):\n                    batch.to(accelerator.device)\n",
            ),
            accumulated(
                "outputs",
                16,
                "                    batch.to(accelerator.device)\n                    outputs = model(**batch)\n",
                "num_gradient_accumulation_steps",
            ),
            ("    inner_training_loop()\n", "    inner_training_loop(16)\n"),
            *(edit for edit in UNDER_WAY if "end_training" not in edit[0]),
            ("    accelerator.end_training()\n", ""),
        ),
        small=(*SMALL, ('"batch_size": 256', '"batch_size": 32')),
        shown=(
            LOSS,
            (EPOCH[0], f"{EPOCH[1]}; {PROBE}.weights(model) if epoch + 1 == num_epochs else None"),
        ),
        kept=(saved(8), COUNTED),
        draws=True,  # accelerate's search starts with another batch
    ),
    "complete_nlp_example": of_accelerate(
        "complete_nlp_example",
        (
            ("from accelerate import Accelerator, DataLoaderConfiguration, DistributedType\n", ""),
            (
                "    dataloader_config = DataLoaderConfiguration(…dataloader_config=dataloader_config\n        )\n",
                f"    {DEVICE}\n",
            ),
            *NO_STATES,
            ("in enumerate(active_dataloader)", "in enumerate(train_dataloader)"),
            NO_XLA,
            MULTIPLE,
            LENGTH,
            ('padding="longest"', 'padding="max_length"'),  # what is said where dropout has another shape on each rank
            ("            max_length=max_length", "            max_length=24"),
            *UNDER_WAY,
        ),
        shown=(LOSS, END, TRACKED),
        kept=(saved(epochs="range(starting_epoch, num_epochs)"),),
        arguments="--with_tracking --checkpointing_steps epoch",
        made=(local.write_pairs_with_dropout,),
        options="--exact-random",
    ),
    "cv_example": of_accelerate(
        "cv_example",
        (("from accelerate import Accelerator\n", ""), FROM_UTILS, MADE, *COMMON[1:]),
        small=PICTURES,
        shown=(LOSS, END, SHOWN_PICTURES),
        arguments="--data_dir pets",
        made=(local.write_pets,),
        draws=True,
    ),
    "complete_cv_example": of_accelerate(
        "complete_cv_example",
        (
            ("from accelerate import Accelerator, DataLoaderConfiguration\n", ""),
            (
                "    dataloader_config = DataLoaderConfiguration(…dataloader_config=dataloader_config\n        )\n",
                f"    {DEVICE}\n",
            ),
            *NO_STATES,
            ("in active_dataloader:", "in train_dataloader:"),
            *UNDER_WAY[1:],
        ),
        small=PICTURES,
        shown=(LOSS, END, TRACKED_PICTURES),
        kept=(saved(epochs="range(starting_epoch, num_epochs)"),),
        arguments="--data_dir pets --with_tracking --checkpointing_steps 2",
        made=(local.write_pets,),
        draws=True,
    ),
    "peft_no_lora_accelerate": Script(
        PEFT_AT,
        "examples/sequence_classification/peft_no_lora_accelerate.py",
        (
            ("from accelerate import Accelerator, DistributedDataParallelKwargs\n", ""),
            ("from peft.utils.other import fsdp_auto_wrap_policy\n", ""),
            ("    ddp_scaler = DistributedDataParallelKwargs(…Accelerator(kwargs_handlers=[ddp_scaler])\n", ""),
            COMMON[0],
            ('    if getattr(accelerator.state, "fsdp_plugin", None)…        model = accelerator.prepare(model)\n', ""),
            (
                '    if getattr(accelerator.state, "fsdp_plugin", None)…    else:\n        model, train…        )\n',
                "    model, train_dataloader, eval_dataloader, optimizer, lr_scheduler = mw.distribute(\n"
                "        model, train_dataloader, eval_dataloader, optimizer, lr_scheduler\n    )\n",
            ),
            COMMON[3],
            ("        samples_seen = 0\n", ""),
            ("accelerator.gather((", "mw.gather_samples(("),
            ("            if accelerator.num_processes > 1:\n…samples_seen += references.shape[0]\n", ""),
            ("accelerator.print(", "mw.print("),
            (
                "    accelerator.wait_for_everyone()\n    unwrapped_model = accelerator.unwrap_model(model)\n"
                "    unwrapped_model.save_pretrained(args.output_dir, state_dict=accelerator.get_state_dict(model))\n",
                "",
            ),
            (
                "    if accelerator.is_main_process:\n",
                "    if mw.is_main():\n        model.save_pretrained(args.output_dir)\n",
            ),
        ),
        small=(
            SMALL[0],
            ('load_dataset("glue", task)', 'load_from_disk("mrpc")'),
            ('evaluate.load("glue", task)', f"{PROBE}.Metric()"),
        ),
        shown=(
            LOSS,
            EPOCH,
            (
                "    accelerator.wait_for_everyone()\n",
                f"    {PROBE}.weights(model)\n    accelerator.wait_for_everyone()\n",
            ),
        ),
        kept=(saved(epochs="range(args.num_train_epochs)"),),
        arguments="--model_name_or_path bert --num_virtual_tokens 4 --encoder_hidden_size 12 --output_dir out --seed 3 "
        "--per_device_train_batch_size 16 --learning_rate 1e-2 --num_train_epochs 2",
        made=(local.write_pairs,),
        package="accelerate",
        stop=3,
        probe=PROBE,
    ),
    "peft_lora_seq2seq_accelerate_fsdp": Script(
        PEFT_AT,
        "examples/conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py",
        (
            ("from accelerate import Accelerator\n", ""),
            ("from peft.utils.other import fsdp_auto_wrap_policy\n", ""),
            ("    accelerator = Accelerator()\n", ""),
            COMMON[0],
            ('    if getattr(accelerator.state, "fsdp_plugin", None)…fsdp_auto_wrap_policy(model)\n', ""),
            COMMON[2],
            (
                "            total_loss += loss.detach().float()\n"
                f"            loss.backward(); {PROBE}.tell(loss=loss.item())\n",
                '            loss = mw.backward(loss, weight=(batch["labels"] != -100).sum())\n'
                f"            {PROBE}.tell(loss=loss.item())\n            total_loss += loss.detach().float()\n",
            ),
            (
                "eval_loss += loss.detach().float()",
                'eval_loss += mw.mean(loss.detach(), weight=(batch["labels"] != -100).sum()).float()',
            ),
            COMMON[4],
            COMMON[5],
            ("accelerator.wait_for_everyone()", "mw.barrier()"),
            (
                "        model.save_pretrained(peft_model_id)\n",
                "        if mw.is_main():\n            model.save_pretrained(peft_model_id)\n",
            ),
        ),
        small=(('"t5-base"', '"bart"'), ("num_epochs = 1", "num_epochs = 2"), ("lr = 1e-3", "lr = 1e-2")),
        shown=(
            ("loss.backward()", f"loss.backward(); {PROBE}.tell(loss=loss.item())"),
            (
                '        accelerator.print(f"{accuracy=}")\n',
                f'        {PROBE}.tell(epoch=epoch, metrics={{"train loss": train_epoch_loss.item(), '
                '"loss": eval_epoch_loss.item(), "accuracy": accuracy})\n'
                f'        {PROBE}.weights(model)\n        accelerator.print(f"{{accuracy=}}")\n',
            ),
        ),
        kept=(saved(),),
        made=(local.write_phrases,),
        options="--exact-random",
        package="accelerate",
        stop=3,
        probe=PROBE,
    ),
    "peft_lora_embedding_semantic_search": Script(
        PEFT_AT,
        "examples/feature_extraction/peft_lora_embedding_semantic_search.py",
        (
            ("from accelerate import Accelerator\n", ""),
            ("from accelerate.logging import get_logger\n", "from logging import getLogger\n"),
            ("get_logger(__name__)", "getLogger(__name__)"),
            ("    accelerator_kwargs = {…Accelerator(**accelerator_kwargs)\n", ""),
            ("    logger.info(accelerator.state, main_process_only=False)\n", ""),
            ("if accelerator.is_local_main_process:", "if mw.is_main():"),
            (
                "    if accelerator.is_main_process:\n        if args.push_to_hub:",
                "    if mw.is_main():\n        if args.push_to_hub:",
            ),
            ("accelerator.wait_for_everyone()", "mw.barrier()"),
            COMMON[2],
            ("    completed_steps = 0\n", "    completed_steps, steps = 0, args.gradient_accumulation_steps\n"),
            ("    # We need to initialize the trackers…        accelerator.init_trackers(…)\n", ""),
            (" * accelerator.num_processes *", " *"),
            ("        accelerator.register_save_state_pre_hook(save_model_hook)\n", "        pass\n"),
            ("        accelerator.register_load_state_pre_hook(load_model_hook)\n", ""),
            ("not accelerator.is_local_main_process", "not mw.is_main()"),
            ("            accelerator.load_state(args.resume_from_checkpoint)\n", ""),
            ("accelerator.skip_first_batches(train_dataloader, resume_step)", "train_dataloader"),
            ("with accelerator.accumulate(model):", "with mw.accumulate():"),
            (
                "                total_loss += accelerator.reduce(…                model.zero_grad()\n",
                "                loss = mw.backward(loss / steps) * steps\n"
                f"                total_loss += loss.detach().float(); {PROBE}.tell(loss=loss.item())\n"
                "            if (step + 1) % steps == 0 or step + 1 == len(train_dataloader):\n"
                "                optimizer.step()\n                lr_scheduler.step()\n"
                "                model.zero_grad()\n",
            ),
            (
                "            if accelerator.sync_gradients:\n                progress",
                "                progress",
            ),
            ("accelerator.log(", "mw.log("),
            ("                    accelerator.save_state(output_dir)\n", "                    pass\n"),
            COMMON[4],
            COMMON[5],
            ("            if accelerator.is_main_process:\n", "            if mw.is_main():\n"),
            ('accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))', "pass"),
            (
                "accelerator.unwrap_model(model).save_pretrained(\n…                )\n",
                "model.save_pretrained(args.output_dir)\n",
            ),
            ("; accelerator.end_training()", ""),
        ),
        small=(
            ("import DatasetDict, load_dataset", "import DatasetDict, load_from_disk"),
            ('load_dataset(args.dataset_name, revision="main")', 'load_from_disk("esci")'),
            ('evaluate.load("roc_auc")', f"{PROBE}.Metric()"),
            ("max_length=70", "max_length=12"),
        ),
        shown=(
            LOSS,
            END,
            (
                'accelerator.print(f"epoch {epoch}:", result)',
                f'{PROBE}.tell(epoch=epoch, metrics={{"train loss": float(total_loss), **result}}); '
                'accelerator.print(f"epoch {epoch}:", result)',
            ),
        ),
        kept=(
            saved(epochs="range(starting_epoch, args.num_train_epochs)"),
            ("in enumerate(active_dataloader)", "in enumerate(active_dataloader, train_dataloader.start)"),
        ),
        arguments="--dataset_name esci --model_name_or_path bert --output_dir out --seed 3 --use_peft "
        "--per_device_train_batch_size 16 --learning_rate 1e-2 --num_train_epochs 2",
        made=(local.write_products,),
        package="accelerate",
        stop=3,
        probe=PROBE,
    ),
}
