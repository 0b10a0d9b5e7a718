"""How soon a range of nodes goes on without a node that it lost, on a real Slurm that notices after 300 s.

    python bench/slurm.py                                       the Slurm of this machine
    MESHWISE_SLURM_ROOT=DIR python bench/slurm.py               another one (tests/slurm.py): both are kept

A node of three is killed, or its link is cut, while `meshwise submit --nodes 2-3` trains there. Seconds from then: the
verdict that it is lost, the second srun, the first step that is new after it.

Claim: the second srun is there within 60 s, and no step is lost or done twice in the record.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from keep import RESULTS, keep

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.launcher.engines.test_submit_slurm import STEPS, lose_a_node, prepare, steps_of
from tests.slurm import slurm


def main() -> None:
    """Lose nodes, keep the times beside those of the other Slurm."""
    path = RESULTS / "slurm.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for lost in ("killed", "cut off"):
        with tempfile.TemporaryDirectory() as name, slurm(3, timeout=300) as cluster:
            version = cluster.call("sinfo", "--version").stdout.split()[-1]
            prepare(Path(name))
            run, _, seconds = lose_a_node(cluster, Path(name), lost)
            whole = steps_of(run) == list(range(1, STEPS + 1))
        rows.setdefault(version, {})[lost] = {**seconds, "whole": whole}
        print(version, lost, rows[version][lost])
    every = [row for found in rows.values() for row in found.values()]
    claim = " ".join((__doc__ or "").partition("Claim: ")[2].split())
    held = all(row["whole"] and row["second srun"] < 60 for row in every)
    keep("slurm", {"claim": claim, "held": held, "rows": rows})


if __name__ == "__main__":
    main()
