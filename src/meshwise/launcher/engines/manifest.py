"""Write the objects of a run as YAML, with comments.

The text can be changed, and applied by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwise.launcher.engines.kubernetes import GONE, JOB, NEVER_AGAIN, Lines, PodJob, objects
from meshwise.spec.errors import UsageError
from meshwise.spec.exit_codes import AGAIN

INSTALL = "pip install 'meshwise[kubernetes]'"
MEANS = f"""\
{", ".join(map(str, NEVER_AGAIN))}: the program failed, the request cannot work, no progress: never
again. {AGAIN}: saved, start again. DisruptionTarget: a pod of a machine that is
drained, or gone: start again."""
COMMENTS = {
    "podFailurePolicy": MEANS,
    "backoffLimit": "the first pod that fails ends all: see failurePolicy",
    "backoffLimitPerIndex": f"of pods that were killed; {AGAIN} is not counted",
    "maxFailedIndexes": "the others do not wait for one that is given up",
    "maxRestarts": f"after pods that were killed; {AGAIN} is not counted",
    "restartStrategy": "new pods only once all old ones are gone",
    "publishNotReadyAddresses": "launchers meet before pods are ready",
    "enableServiceLinks": "a service named master would set MASTER_PORT",
    "tolerations": f"given up after {GONE} s of silence, not after 5 min",
    "command": "process 1, without a shell: a shell would keep SIGTERM",
    "volumes": "a container's own /dev/shm has 64 MB; this counts as memory",
    "limits": "no limit on cores: it would slow them, not share them",
}


def manifest(job: PodJob) -> str:
    """Return the text of a run's objects, in YAML with comments."""
    try:
        import yaml
    except ImportError:
        raise UsageError(f"--kubernetes needs PyYAML, which is not installed. Use {INSTALL}.") from None

    def lines(dumper: Any, value: Lines) -> Any:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=False)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(Lines, lines)
    comments = {**COMMENTS, "terminationGracePeriodSeconds": f"to save after SIGTERM: {job.why}"}
    if job.kind == JOB:
        comments["podFailurePolicy"] += " Neither is counted; each pod starts anew."
    form = {"sort_keys": False, "default_flow_style": None, "width": math.inf, "allow_unicode": True}
    texts = [yaml.dump(each, Dumper=dumper, **form) for each in objects(job)]
    head = f"# {job.name}: written by meshwise submit. By hand: kubectl apply -f FILE\n"
    return head + "---\n".join(_commented(text, comments) for text in texts)


def _commented(text: str, comments: Mapping[str, str]) -> str:
    """Write each comment above the first line that begins with its key. No value is longer than a line, so a comment
    never falls into one."""
    found, left = [], dict(comments)
    for line in text.splitlines():
        key, colon, _ = line.lstrip(" -").partition(":")
        indent = " " * (len(line) - len(line.lstrip()))
        said = left.pop(key, "") if colon else ""
        found += [*(f"{indent}# {each}" for each in said.splitlines()), line]
    return "\n".join([*found, ""])
