"""Scripts of transformers, TRL and peft, and the lines that are others: more data of `frameworks.py`.

Models, tokenizers and data sets lie in the folder of a script (`frameworks_trainer_data.py`) and are named by its
arguments; metrics come from the probe.
"""

from __future__ import annotations

from functools import partial

import frameworks_trainer_data as data
from frameworks_scripts import Edit, Script

TRANSFORMERS = ("huggingface/transformers", "5a67f0a7aca8c18de6235e80e47fd00a9ecf9d58")
TRL = ("huggingface/trl", "f2cd57710ae345ea6428ae95363267fcf38a3dc8")
PEFT = ("huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40")
PROBE = "frameworks_trainer_probe"
METRICS: tuple[Edit, ...] = (("import evaluate\n", f"import {PROBE} as evaluate\n"),)
OURS: tuple[Edit, ...] = (
    ("        train_result = trainer.train(", "        mw.distribute(trainer)\n        train_result = trainer.train("),
)
KEPT: tuple[Edit, ...] = (
    ("trainer.train(resume_from_checkpoint=checkpoint)", f"trainer.train(resume_from_checkpoint={PROBE}.newest())"),
)
LAST_BATCH = ("eval_loss", "Seq2SeqTrainer alone counts the last batch of an evaluation as if it were a full one")
COMMON = "--output_dir out --per_device_train_batch_size 8 --per_device_eval_batch_size 6 --logging_steps 1 "
COMMON += "--report_to none --disable_tqdm True --save_steps 1000 --learning_rate 0.003 --lr_scheduler_type cosine "
BOTH = "--do_train --do_eval --num_train_epochs 2 --eval_strategy epoch "
MODEL = "--model_name_or_path model "


def _files(ends: str, begins: str = "") -> str:
    return f"--train_file {begins}train.{ends} --validation_file {begins}validation.{ends} "


def _of_transformers(path: str, arguments: str, *made: data.Made, **options: object) -> Script:
    given = {"small": METRICS, "ours": OURS, "kept": KEPT} | options
    return Script(
        TRANSFORMERS, f"examples/pytorch/{path}", package="transformers", probe=PROBE, made=made,
        arguments=COMMON + arguments, **given,  # type: ignore[arg-type]
    )  # fmt: skip


def _of_trl(name: str, arguments: str, **options: object) -> Script:
    """arguments: the data set, and what more."""
    return Script(
        TRL, f"trl/scripts/{name}.py", (("    trainer.train()", "    mw.distribute(trainer)\n    trainer.train()"),),
        package="transformers", probe=PROBE, made=(data.gpt2, data.chats),
        arguments=COMMON + MODEL + "--dtype auto --eval_strategy epoch --num_train_epochs 2 "
        f"--gradient_checkpointing False --bf16 False --dataset_name {arguments}", **options,  # type: ignore[arg-type]
    )  # fmt: skip


SCRIPTS = {
    "run_glue": _of_transformers(
        "text-classification/run_glue.py",
        BOTH + MODEL + _files("json", "pairs-") + "--max_seq_length 32",
        partial(data.bert, kind="SequenceClassification", dropout=0.1),
        data.classes,
        options="--exact-random",
    ),
    "run_classification": _of_transformers(
        "text-classification/run_classification.py",
        BOTH + MODEL + _files("csv", "texts-") + "--test_file texts-test.csv --do_predict --text_column_names text "
        "--label_column_name label --metric_name accuracy --max_seq_length 32",
        partial(data.bert, kind="SequenceClassification", classes=4),
        data.classes,
    ),
    "run_clm": _of_transformers(
        "language-modeling/run_clm.py",
        BOTH + MODEL + _files("txt") + "--block_size 16 --gradient_accumulation_steps 2 --max_grad_norm 0.5",
        data.gpt2,
        data.texts,
    ),
    "run_mlm": _of_transformers(
        "language-modeling/run_mlm.py",
        BOTH + MODEL + _files("txt") + "--line_by_line --max_seq_length 32",
        data.bert,
        data.texts,
        options="--exact-random",
        refused="a collator that masks at random",
        kept=(),
    ),
    "run_ner": _of_transformers(
        "token-classification/run_ner.py",
        BOTH + MODEL + _files("json") + "--test_file test.json --do_predict --gradient_accumulation_steps 2",
        partial(data.bert, kind="TokenClassification", classes=3),
        data.tags,
    ),
    "run_qa": _of_transformers(
        "question-answering/run_qa.py",
        BOTH + MODEL + _files("json") + "--max_seq_length 24 --doc_stride 8",
        partial(data.bert, kind="QuestionAnswering"),
        data.questions,
        beside=("trainer_qa.py", "utils_qa.py"),
        small=METRICS,
    ),
    "run_swag": _of_transformers(
        "multiple-choice/run_swag.py",
        BOTH
        + MODEL
        + _files("json")
        + "--load_best_model_at_end --metric_for_best_model accuracy --save_strategy epoch",
        partial(data.bert, kind="MultipleChoice"),
        data.choices,
        small=(),
    ),
    "run_image_classification": _of_transformers(
        "image-classification/run_image_classification.py",
        BOTH + MODEL + "--train_dir pictures/train --validation_dir pictures/validation --remove_unused_columns False "
        "--label_column_name label --dataloader_num_workers 0",
        data.vit,
        data.pictures,
        draws=True,
    ),
    "run_mae": _of_transformers(
        "image-pretraining/run_mae.py",
        BOTH + "--model_name_or_path model --image_processor_name model --dataset_name imagefolder "
        "--train_dir pictures/train/*/*.png --validation_dir pictures/validation/*/*.png "
        "--remove_unused_columns False --base_learning_rate 0.1",
        data.mae,
        data.pictures,
        small=(),
        stop=3,
        options="--exact-random",
    ),
    "run_summarization": _of_transformers(
        "summarization/run_summarization.py",
        BOTH + MODEL + _files("json", "summary-") + "--predict_with_generate --num_beams 2 --max_source_length 24 "
        "--max_target_length 16",
        data.bart,
        data.translations,
        unlike=LAST_BATCH,
        small=(
            *METRICS,
            ("import nltk ", "nltk = frameworks_trainer_probe.Words() "),
        ),
    ),
    "run_translation": _of_transformers(
        "translation/run_translation.py",
        BOTH + MODEL + _files("json") + "--source_lang de --target_lang en --label_smoothing_factor 0.1 "
        "--max_source_length 24 --max_target_length 16",
        data.bart,
        data.translations,
        unlike=LAST_BATCH,
    ),
    "trl_sft": _of_trl(
        "sft",
        "chats --max_length 24 --gradient_accumulation_steps 2",
        kept=(("trainer.train()", f"trainer.train(resume_from_checkpoint={PROBE}.newest())"),),
    ),
    "trl_reward": _of_trl("reward", "preferences --max_length 48", refused="TRL's RewardTrainer"),
    "trl_dpo": _of_trl("dpo", "preferences --max_length 48", refused="TRL's DPOTrainer"),
    "peft_sft": Script(
        PEFT,
        "examples/sft/train.py",
        (("    trainer.train(", "    mw.distribute(trainer)\n    trainer.train("),),
        kept=KEPT,
        package="transformers",
        probe=PROBE,
        beside=("utils.py",),
        made=(data.gpt2, data.chats),
        arguments=COMMON + MODEL + "--dataset_name texts --splits train,test --max_length 24 --eval_strategy epoch "
        "--num_train_epochs 2 --gradient_checkpointing False --bf16 False --use_peft_lora True --lora_r 4 "
        "--lora_alpha 8 --lora_dropout 0.0 --lora_target_modules c_attn,c_proj --dataset_text_field text",
        small_beside=(("utils.py", "else torch.float32", "else torch.float64"),),
    ),
    "peft_olora": Script(
        PEFT,
        "examples/olora_finetuning/olora_finetuning.py",
        (("    trainer.train()", "    mw.distribute(trainer)\n    trainer.train()"),),
        (("warmup_steps=100", "warmup_steps=2"), ("logging_steps=100", 'logging_steps=1, report_to="none"')),
        kept=(("trainer.train()", f"trainer.train(resume_from_checkpoint={PROBE}.newest())"),),
        package="transformers",
        probe=PROBE,
        made=(data.gpt2, data.chats),
        arguments="--base_model model --data_path instructions --output_dir out --batch_size 8 --num_epochs 2 "
        "--learning_rate 0.003 --cutoff_len 24 --eval_step 5 --save_step 5 --device_map cpu --dtype float64 --lora_r 4 "
        "--seed 3 --init_lora_weights gaussian",
        options="--exact-random",
    ),
    "peft_dora": Script(
        PEFT,
        "examples/dora_finetuning/dora_finetuning.py",
        (("    trainer.train()", "    mw.distribute(trainer)\n    trainer.train()"),),
        (
            ('        logging_dir="./logs",\n', ""),
            ("warmup_steps=100", "warmup_steps=2"),
            ("gradient_accumulation_steps=16", "gradient_accumulation_steps=2"),
            ("        fp16=True,\n", '        report_to="none",\n'),
        ),
        kept=(("trainer.train()", f"trainer.train(resume_from_checkpoint={PROBE}.newest())"),),
        package="transformers",
        probe=PROBE,
        made=(data.gpt2, data.chats),
        arguments="--base_model model --data_path texts --output_dir out --batch_size 8 --num_epochs 2 --use_dora "
        "--learning_rate 0.003 --cutoff_len 24 --eval_step 1 --save_step 1000 --device cpu --lora_r 4 --lora_alpha 8 "
        "--lora_dropout 0.0 --lora_target_modules c_attn,c_proj",
    ),
}
