"""Lightning scripts of others, and the lines that are others: data of `frameworks.py`, and its form.

Of each edit the old text stands in the original and is replaced, wherever it stands: `small` is what makes it run in
seconds, without a download; `ours` is what meshwise asks for; `kept` goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Edit = tuple[str, str]
LIGHTNING = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")
TUTORIALS = ("Lightning-AI/tutorials", "15817658a2d63afa338b9e1cd8454fb98d746fac")
MW = "import meshwise as mw"


@dataclass(frozen=True)
class Script:
    """A script of a repository. package: of its Trainer. options: of `meshwise run` on several devices. subcommand:
    of its command line without ours. folders: it reads folders of pictures. draws: it augments
    pictures, which draws are keyed by the sample here. refused: a part of the sentence with which it is refused. probe:
    the module that looks on. beside: other files of its folder that it imports, and small_beside: edits of those. made:
    what writes models and data into its folder. shown: what gives the probe something to see, in every run.
    unlike: what plain python gives otherwise, and why."""

    source: tuple[str, str]
    path: str
    ours: tuple[Edit, ...]
    small: tuple[Edit, ...] = ()
    kept: tuple[Edit, ...] = ()
    package: str = "lightning.pytorch"
    arguments: str = ""
    options: str = ""
    subcommand: str = ""
    folders: bool = False
    draws: bool = False
    stop: int = 5
    refused: str = ""
    probe: str = "frameworks_probe"
    beside: tuple[str, ...] = ()
    small_beside: tuple[tuple[str, str, str], ...] = ()
    made: tuple[Callable[[Path], None], ...] = ()
    shown: tuple[Edit, ...] = ()
    unlike: tuple[str, str] = ("", "")


OF_CLI = (("    cli.trainer.fit(", "    mw.distribute(cli.trainer)\n    cli.trainer.fit("),)
ON = ", ckpt_path=frameworks_probe.newest())"
FIT = (
    (
        "cli.trainer.fit(cli.model, datamodule=cli.datamodule)",
        "cli.trainer.fit(cli.model, datamodule=cli.datamodule" + ON,
    ),
)
SPLIT = ("[55000, 5000]", "[163, 34]")
SCRIPTS = {
    "transformer": Script(
        LIGHTNING,
        "examples/pytorch/basics/transformer.py",
        (
            (
                "    trainer.fit(model, train_dataloader",
                "    mw.distribute(trainer)\n    trainer.fit(model, train_dataloader",
            ),
        ),
        (
            ("[n - 4000, 2000, 2000]", "[n - 40, 20, 20]"),
            ("max_epochs=20", "max_epochs=3"),
            ("Transformer(vocab_size=vocab_size)", "Transformer(vocab_size, 12, 2, 16, 1, dropout=0.0)"),
        ),
        (("val_dataloader)", "val_dataloader" + ON),),
    ),
    "autoencoder": Script(
        LIGHTNING,
        "examples/pytorch/basics/autoencoder.py",
        OF_CLI,
        (SPLIT, ('"max_epochs": 10', '"max_epochs": 2')),
        FIT,
    ),
    "backbone_image_classifier": Script(
        LIGHTNING,
        "examples/pytorch/basics/backbone_image_classifier.py",
        OF_CLI,
        (SPLIT,),
        FIT,
        arguments="--trainer.max_epochs=2 --trainer.accumulate_grad_batches=2",
    ),
    "bug_report_model": Script(
        LIGHTNING,
        "examples/pytorch/bug_report/bug_report_model.py",
        (("    trainer.fit(", "    mw.distribute(trainer)\n    trainer.fit("),),
        (("limit_train_batches=1,", ""), ("max_epochs=1", "max_epochs=1")),
        (("val_dataloaders=val_data)", "val_dataloaders=val_data" + ON),),
    ),
    "imagenet": Script(
        LIGHTNING,
        "examples/pytorch/domain_templates/imagenet.py",
        (
            ("    LightningCLI(\n", "    cli = LightningCLI(\n        run=False,\n        model_class="),
            (
                'save_config_kwargs={"overwrite": True},\n    )\n',
                'save_config_kwargs={"overwrite": True},\n    )\n    mw.distribute(cli.trainer)\n'
                "    cli.trainer.fit(cli.model)\n",
            ),
        ),
        (('"max_epochs": 90', '"max_epochs": 2'), ("224", "64"), ("Resize(256)", "Resize(70)")),
        (("cli.trainer.fit(cli.model)", "cli.trainer.fit(cli.model" + ON),),
        arguments="--model.data_path=pictures --model.batch_size=8 --model.workers=0 --model.lr=0.001",
        draws=True,
        subcommand="fit",
        folders=True,
    ),
    "computer_vision_fine_tuning": Script(
        LIGHTNING,
        "examples/pytorch/domain_templates/computer_vision_fine_tuning.py",
        (
            ("    MyLightningCLI(", "    cli = MyLightningCLI("),
            (
                "seed_everything_default=1234)\n",
                "seed_everything_default=1234, run=False)\n    mw.distribute(cli.trainer)\n"
                "    cli.trainer.fit(cli.model, cli.datamodule)\n",
            ),
        ),
        (
            ('"resnet50"', '"resnet18"'),
            ('weights="DEFAULT"', "weights=None"),
            ("nn.Linear(2048, 256)", "nn.Linear(512, 256)"),
            ("download_and_extract_archive(url=DATA_URL, download_root=self._dl_path, remove_finished=True)", "pass"),
            ('Path(self._dl_path).joinpath("cats_and_dogs_filtered")', 'Path("pictures")'),
            ("(224, 224)", "(32, 32)"),
            ('"trainer.max_epochs": 15', '"trainer.max_epochs": 3'),
            ("milestones: tuple = (5, 10)", "milestones: tuple = (1, 2)"),
        ),
        # Lightning's BaseFinetuning leaves frozen what was unfrozen before a run was cut: not resumed here.
        subcommand="fit",
        folders=True,
        draws=True,
    ),
    "generative_adversarial_net": Script(
        LIGHTNING,
        "examples/pytorch/domain_templates/generative_adversarial_net.py",
        (("    trainer.fit(", "    mw.distribute(trainer)\n    trainer.fit("),),
        (
            ('accelerator="gpu", devices=1', 'accelerator="cpu", max_epochs=1'),
            ("MNISTDataModule()", "MNISTDataModule(val_split=34)"),
        ),
        draws=True,
        refused="manual optimisation is refused",
    ),
    "mnist-hello-world": Script(
        TUTORIALS,
        "lightning_examples/mnist-hello-world/hello-world.py",
        (("\ntrainer.fit(m", "\nmw.distribute(trainer)\ntrainer.fit(m"),),
        (SPLIT,),
        package="pytorch_lightning",
        options="--exact-random",
    ),
    "datamodules": Script(
        TUTORIALS,
        "lightning_examples/datamodules/datamodules.py",
        (("\ntrainer.fit(m", "\nmw.distribute(trainer)\ntrainer.fit(m"),),
        (SPLIT, ("[45000, 5000]", "[163, 34]"), ("max_epochs=5", "max_epochs=2"), ("max_epochs=3", "max_epochs=2")),
        package="pytorch_lightning",
        options="--exact-random",
    ),
    "cifar10-baseline": Script(
        TUTORIALS,
        "lightning_examples/cifar10-baseline/baseline.py",
        (
            ("\ntrainer.fit(m", "\nmw.distribute(trainer)\ntrainer.fit(m"),
            ("\nswa_trainer.fit(swa", "\nmw.distribute(swa_trainer)\nswa_trainer.fit(swa"),
        ),
        (
            ("resnet18(pretrained=False, num_classes=10)", "resnet18(num_classes=10)"),
            ("45000 // BATCH_SIZE", "158 // BATCH_SIZE + 1"),
            ("int(os.cpu_count() / 2)", "0"),
            ("max_epochs=5", "max_epochs=2"),
        ),
        package="pytorch_lightning",
        draws=True,
    ),
}
