"""Write a job's driver for `ray job submit`, and submit it.

The driver reserves the nodes by a placement group, and calls `meshwise run` once on each.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from meshwise.launcher.engines.batch_script import BatchJob, nodes_of
from meshwise.records.files import make_folder, write_text
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.exit_codes import AGAIN

DRIVER = "submit.py"
TEXT = """\
# {name}: written by meshwise submit. By hand: ray job submit --address ADDRESS -- python {driver}
import socket, subprocess, sys, time
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as On

LEAST, MOST, NODE = {low}, {high}, {node}
RUN = {run}
WORDS = {words}

@ray.remote(max_retries=0, num_cpus=0)
def address():  # where the other nodes reach the first one
    with socket.create_server(("", 0)) as free:
        return ray.util.get_node_ip_address(), free.getsockname()[1]

@ray.remote(max_retries=0, num_cpus=NODE["CPU"], num_gpus=NODE.get("GPU", 0))
def node(rank, nodes, host, port):
    where = ["--nnodes", nodes, "--node-rank", rank, "--master-addr", host, "--master-port", port]
    return subprocess.call([*RUN, *map(str, where), *WORDS], cwd={workdir})

ray.init()
code, killed = {again}, 0
while code == {again} or code < 0 and killed < 10:  # a lost node, a state that was saved before a limit, a kill
    up = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    nodes = max(LEAST, min(MOST, sum(all(each.get(kind, 0) >= NODE[kind] for kind in NODE) for each in up)))
    group = placement_group([NODE] * nodes, strategy="STRICT_SPREAD")
    while not group.wait(60):  # nodes may be in use
        print("waiting for", nodes, "nodes with", NODE, flush=True)
        if nodes > LEAST:
            remove_placement_group(group)
            nodes -= 1
            group = placement_group([NODE] * nodes, strategy="STRICT_SPREAD")
    on = [On(group, rank) for rank in range(nodes)]
    try:
        where = ray.get(address.options(scheduling_strategy=on[0]).remote())
        tasks = [node.options(scheduling_strategy=each).remote(rank, nodes, *where) for rank, each in enumerate(on)]
        ray.wait(tasks, num_returns=nodes)  # when a node is lost, the others end by themselves
        codes = ray.get(tasks)
        code = next((each for each in codes if each not in (0, {again})), max(codes))
        killed += code < 0
    except (ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError, ray.exceptions.ObjectLostError) as lost:
        print(lost, flush=True)  # any other error ends the job
        time.sleep(10)
    remove_placement_group(group)
sys.exit(code)
"""


def driver_text(job: BatchJob) -> str:
    """Return the text of the job's driver. Raises UsageError for settings that Ray cannot follow."""
    site, (low, high) = job.site, nodes_of(job.nodes)
    for name in ("setup", "container", "secrets", "options"):
        if getattr(site, name):
            raise UsageError(f"{site.file}: {name} is for Slurm. On Ray, set up the nodes, and leave {name} out.")
    if job.seconds is not None:
        raise UsageError("--time: Ray has no time limit of a job. Leave it out, or use ray job stop.")
    cpus = re.search(r"\b(\d+)xcpu\b", " ".join(job.words))
    node = {"CPU": site.cpus or (int(cpus[1]) if cpus else 1), **({"GPU": job.gpus} if job.gpus else {})}
    run = [*job.command, "run", "--folder", str(job.run)]
    sizes = {"low": low, "high": high, "node": node, "again": AGAIN}
    names = {"name": " ".join(job.name.split()), "driver": shlex.quote(str(job.run / DRIVER))}
    return TEXT.format(**sizes, **names, run=run, words=list(job.words), workdir=repr(str(job.workdir)))


def send(job: BatchJob, address: str) -> Path:
    """Write the driver into the run's folder, and submit it. Ray prints the rest. Return its path."""
    text, driver = driver_text(job), job.run / DRIVER
    if shutil.which("ray") is None:
        raise UsageError("the command ray is not installed here. Use pip install 'ray[default]'.")
    try:
        make_folder(job.run)
        write_text(driver, text)
    except OSError as error:
        raise UsageError(f"{driver} cannot be written ({error.strerror}). Use another folder with --out.") from None
    command = ["ray", "job", "submit", "--address", address, "--submission-id", job.run.name, "--no-wait"]
    code = subprocess.run([*command, *job.options, "--", "python", str(driver)]).returncode
    if code:
        raise MeshwiseError(f"ray job submit ended with exit code {code}. The driver is {driver}")
    return driver
