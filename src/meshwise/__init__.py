"""meshwise: many devices work as one for anyone who writes PyTorch.

Each name is read from its home when it is first used, so that a command which needs no torch does not wait for it.
`__init__.pyi` tells type checkers the same.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_HOMES = {
    "meshwise.api.bench": ["bench"],
    "meshwise.api.check": ["check"],
    "meshwise.api.machines": ["find_machine"],
    "meshwise.api.report": ["report"],
    "meshwise.api.run": ["launch", "run"],
    "meshwise.parallel.deferred": ["deferred"],
    "meshwise.parallel.load": ["load_weights"],
    "meshwise.spec.errors": [
        "CheckpointError",
        "DataError",
        "LossError",
        "MeshwiseError",
        "PlanError",
        "TransferError",
        "UsageError",
        "WorkerFailed",
    ],
    "meshwise.spec.machine": ["Machine"],
    "meshwise.spec.plan": ["Plan"],
    "meshwise.training.job": ["Job"],
    "meshwise.training.own_files": ["load", "save"],
    "meshwise.training.own_loop": ["accumulate", "backward", "distribute", "rank", "sum", "world_size"],
    "meshwise.transfer.comm_log": ["comm_log"],
    "meshwise.transfer.copy": ["copy", "to"],
    "meshwise.transfer.device_collectives": ["all_reduce", "broadcast", "gather", "scatter"],
    "meshwise.transfer.devices": ["device_of"],
    "meshwise.transfer.virtual": ["virtual_devices"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwise' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
