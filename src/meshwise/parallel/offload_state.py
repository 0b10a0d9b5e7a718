"""Offload the optimizer's state to the host, bucket by bucket.

The state of only one bucket at a time is on the device.

`step` runs once per bucket. Only the parameters of one bucket then have gradients and state, and every torch optimizer
skips a parameter without a gradient. So any optimizer that treats each parameter separately works unchanged, and the
device never holds the state of several buckets. Counters of a parameter group advance once per step.

The copies on the host are pinned if the device is a GPU. On a CPU, host and device share one memory; copies are made
nevertheless, so that tests there run the code of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwise.parallel.probe_optimizer import unlike_by_parameters
from meshwise.parallel.step_hooks import Order, buckets_of, has_closure, subscribe
from meshwise.parallel.technique import Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.modules import step_without_hooks
from meshwise.torch_compat.sharding import local_of, with_local

BUCKET = 64 << 20  # bytes of parameters whose state is on the device at once, or more if a single parameter is larger


class OffloadedState:
    """Keeps the state of `optimizer` in host memory between steps. The optimizer itself is changed in place."""

    def __init__(self, optimizer: Optimizer, bucket: int = BUCKET) -> None:
        if why := unlike_by_parameters(optimizer):
            raise PlanError(
                f"offload='optimizer' updates parameters in groups, and {type(optimizer).__name__} may then compute "
                f"different values: {why}. Use another optimizer, or remove offload='optimizer'."
            )
        self._bucket = bucket
        self._gradients: dict[Tensor, Tensor] = {}
        self._last: list[Tensor] = []
        self._all_to_host(optimizer)
        optimizer.register_load_state_dict_post_hook(self._all_to_host)
        subscribe(Order.OFFLOAD, self._before, self._after, self._failed, optimizer=optimizer)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step all buckets of parameters but the last, one by one. Prepare the last for the optimizer's own step."""
        if has_closure(args, kwargs):
            raise PlanError(
                "offload='optimizer': optimizer.step(closure) needs all of the state at once. Call backward, then "
                "optimizer.step()."
            )
        ready = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._gradients = {p: p.grad for p in ready}
        for p in ready:
            p.grad = None
        buckets = buckets_of(ready, self._bucket)
        for bucket in buckets[:-1]:
            settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            self._begin(optimizer, bucket)
            step_without_hooks(optimizer)(optimizer)
            self._end(optimizer, bucket)
            for group, before in zip(optimizer.param_groups, settings, strict=True):
                for key in [key for key in group if key != "params" and key not in before]:
                    del group[key]
                group.update(before)
        self._last = buckets[-1] if buckets else []
        self._begin(optimizer, self._last)

    def _after(self, optimizer: Optimizer) -> None:
        self._end(optimizer, self._last)
        self._give_back()

    def _failed(self, optimizer: Optimizer) -> None:
        self._all_to_host(optimizer)
        self._give_back()

    def _give_back(self) -> None:
        for p, gradient in self._gradients.items():
            p.grad = gradient
        self._gradients, self._last = {}, []

    def _begin(self, optimizer: Optimizer, bucket: Sequence[Tensor]) -> None:
        """Give the parameters in `bucket` their gradients, and fetch their state to the device."""
        for p in bucket:
            p.grad = self._gradients[p]
            entry = optimizer.state.get(p, {})
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if _travels(value):
                    entry[key] = _fetched(value, p)

    def _end(self, optimizer: Optimizer, bucket: Sequence[Tensor]) -> None:
        self._to_host(optimizer, bucket)
        for p in bucket:
            p.grad = None

    def _all_to_host(self, optimizer: Optimizer) -> None:
        self._to_host(optimizer, list(optimizer.state))

    def _to_host(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        device = None
        for p in parameters:
            entry = optimizer.state.get(p, {})
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if _travels(value):
                    device = local_of(p).device
                    entry[key] = _sent(value)
        if device is not None and device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()  # wait for copies to the host


def _travels(value: Any) -> bool:
    """Return whether a value of the optimizer state is offloaded. Counters stay where the optimizer put them."""
    return isinstance(value, Tensor) and value.ndim > 0


def _sent(value: Tensor) -> Tensor:
    part = local_of(value).detach()
    on_gpu = part.device.type != "cpu"
    host = torch.empty_like(part, device="cpu", pin_memory=on_gpu)
    return with_local(value, host.copy_(part, non_blocking=on_gpu))


def _fetched(value: Tensor, parameter: Tensor) -> Tensor:
    part = local_of(value)
    there = torch.empty_like(part, device=local_of(parameter).device)
    return with_local(value, there.copy_(part, non_blocking=True))


def _bind(optimizer: Optimizer, plan: Plan, world: World) -> None:
    if "optimizer" in plan.offload and "parameters" not in plan.offload:  # else the state is on the host already
        OffloadedState(optimizer)


OFFLOAD_STATE = Technique(bind=_bind)
