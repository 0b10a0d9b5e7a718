"""Read the variables of Kubernetes.

They belong to an Indexed Job, a JobSet, or a TrainJob of Kubeflow Trainer. Each pod is a machine.

Kubernetes sets JOB_COMPLETION_INDEX alone. A manifest of your own may set NNODES, MASTER_ADDR and MASTER_PORT beside
it; `meshwise submit` prints options of `meshwise run` instead. Kubeflow Trainer sets torchrun's variables PET_*.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.spec.errors import UsageError
from meshwise.workers.places.place import Place, number

INDEX, NODES, NODE = "JOB_COMPLETION_INDEX", "NNODES", "PET_NODE_RANK"


def of_kubernetes(environment: Mapping[str, str]) -> Place | None:
    """Return the place of the first process of a pod. None outside of a job of several pods."""
    pet = "PET_" if NODE in environment else ""
    index = NODE if pet else INDEX
    if not {index, pet + NODES} <= environment.keys() or (nodes := number(environment, pet + NODES)) < 2:
        return None
    host, port = environment.get(f"{pet}MASTER_ADDR"), number(environment, f"{pet}MASTER_PORT", 0)
    node = number(environment, index)
    if not 0 <= node < nodes:
        raise UsageError(f"{index}={node}, but {pet}{NODES}={nodes}. Nodes are counted from 0.")
    return Place(
        "Kubernetes",
        rank=node,
        size=nodes,
        node=node,
        nodes=nodes,
        job=environment.get("JOB_NAME", ""),
        hosts=(host,) if host else (),
        address=(host, port) if host and port else None,
    )
