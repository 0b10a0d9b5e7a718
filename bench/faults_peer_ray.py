"""The loop of bench/faults_peer_script.py as Ray Train has it: two workers, three failures, a save each 4 steps."""

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

HERE = str(Path(__file__).parent)


def worker(_: dict[str, Any]) -> None:
    """Train, save, go on from the newest state."""
    from faults_peer_script import AGAIN, AT, FAULT, OUT, STEPS, happen, network, samples, trained

    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    wrapped = prepare_model(network())
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    first, checkpoint = 0, train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        wrapped.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    x = samples()
    for step in range(first + 1, STEPS + 1):
        if FAULT and step == AT and not AGAIN:
            happen(rank, wrapped.module)
        loss = trained(rank, step, wrapped, optimizer, x)
        if step % 4 == 0:
            with tempfile.TemporaryDirectory() as name:
                state = {"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                if rank == 0:
                    torch.save(state, Path(name) / "state.pt")
                train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(name) if rank == 0 else None)
    if rank == 0:
        torch.save(wrapped.module.state_dict(), OUT / "last.pt")


def main() -> None:
    """A cluster of one machine, and a run on it."""
    out = Path(os.environ["PEER_OUT"])
    names = ("PEER_OUT", "FAULT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    variables = {name: os.environ[name] for name in names} | {"PYTHONPATH": HERE}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=False)
    TorchTrainer(
        worker,
        train_loop_config={},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(out / "ray"),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=None),
        ),
    ).fit()


if __name__ == "__main__":
    main()
