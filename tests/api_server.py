"""A server that keeps Kubernetes' objects, and does nothing with them, for the real kubectl.

    with api_server() as server:
        subprocess.run(["kubectl", f"--server={server.address}", "get", "pods"])
        server.kept["pods"]["train-0"] = {...}

No controller is here, no schema and no right: a manifest that a cluster would refuse is taken.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

KINDS = {
    "v1": {"services": "Service", "pods": "Pod"},
    "batch/v1": {"jobs": "Job"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"},
}
VERBS = ["create", "get", "list", "patch", "delete"]
Values = dict[str, Any]


@dataclass
class Server:
    """kept: objects by plural and name. asked: method, path and body of each request."""

    address: str = ""
    kept: defaultdict[str, dict[str, Values]] = field(default_factory=lambda: defaultdict(dict))
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def answer(self, method: str, url: str, body: str) -> tuple[int, Any]:
        """The status and the object, or the text of a log."""
        path, query = urlparse(url).path, parse_qs(urlparse(url).query)
        self.asked.append((method, path, body))
        groups = [group for group in KINDS if path in (f"/apis/{group}", f"/api/{group}")]
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(map(_group, filter(_named, KINDS)))}
        if groups:
            rows = [_resource(plural, kind) for plural, kind in KINDS[groups[0]].items()]
            return 200, {"kind": "APIResourceList", "groupVersion": groups[0], "resources": rows}
        found = re.fullmatch(r"/apis?/(.+)/namespaces/([^/]+)/(\w+)(?:/([^/]+))?(/log)?", path)
        if found is None or found[3] not in KINDS.get(found[1], ()):
            return 404, _missing(path)
        version, space, plural, name, log = found.groups()
        if log:
            return 200, f"line of {name}\n"
        return self._object(method, version, space, plural, name, body, query)

    def _object(
        self, method: str, version: str, space: str, plural: str, name: str | None, body: str, query: Any
    ) -> tuple[int, Any]:
        kept = self.kept[plural]
        if method == "POST":
            made = json.loads(body)
            made["metadata"] |= {"namespace": space, "uid": f"of {made['metadata']['name']}", "resourceVersion": "1"}
            kept[made["metadata"]["name"]] = made
            return 201, made
        if name is None:
            named = [each for text in query.get("fieldSelector", ()) for each in text.split("=")[1:]]
            wanted = dict(each.split("=") for text in query.get("labelSelector", ()) for each in text.split(","))
            items = [
                each
                for each in kept.values()
                if wanted.items() <= each["metadata"].get("labels", {}).items()
                and (not named or each["metadata"]["name"] in named)
            ]
            kind = f"{KINDS[version][plural]}List"
            return 200, {"kind": kind, "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": items}
        if name not in kept:
            return 404, _missing(f"{plural} {name}")
        if method == "DELETE":
            gone = kept.pop(name)
            details = {"name": name, "uid": gone["metadata"]["uid"]}
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details}
        return 200, kept[name]


def _named(group: str) -> bool:
    return "/" in group


def _group(group: str) -> Values:
    version = {"groupVersion": group, "version": group.partition("/")[2]}
    return {"name": group.partition("/")[0], "versions": [version], "preferredVersion": version}


def _resource(plural: str, kind: str) -> Values:
    return {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}


def _missing(what: str) -> Values:
    said = {"status": "Failure", "reason": "NotFound", "code": 404, "message": f"{what} not found"}
    return {"kind": "Status", "apiVersion": "v1", **said}


@contextlib.contextmanager
def api_server() -> Iterator[Server]:
    """A server at 127.0.0.1, until the end of the with-statement."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            status, said = server.answer(self.command, self.path, body)
            data = (said if isinstance(said, str) else json.dumps(said)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(said, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.address = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
