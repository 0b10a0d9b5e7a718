"""Models of packages that no other bench names, in their own losses, under plans: is it what one device computes?

    PYTHONPATH=src:FOLDER python bench/foreign_models.py [--only WORD ...] [--plan NAME ...] [--again STATUS ...]
    python bench/foreign_models.py --table

FOLDER holds the packages (`pip install --target FOLDER --no-deps ...`, as docs/architectures.md names
them). A model is the constructor call of tests/programs/models/foreign_table.py, with random weights, random samples in
real shapes and the loss that the package's own training uses. How a pair is judged, and every status, is
bench/breadth.py's; here data × tensor and shard × tensor on four workers are among the plans.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import breadth
import foreign_table

from meshwise.spec.plan import Plan

PLANS = breadth.PLANS | {
    "data × tensor": Plan(data=2, tensor=2),
    "shard × tensor": Plan(shard=2, tensor=2),
    "zero1": Plan(data=2, zero1=True),
}
LINES = breadth.ROOT / "runs" / "foreign_models.jsonl"


def main() -> None:
    """Run what has no line yet."""
    asked = breadth.options(__doc__, LINES, PLANS).parse_args()
    if asked.table:
        import architectures_page

        architectures_page.write_foreign(asked.lines)
        return
    models = foreign_table.MODELS
    facts = {
        name: breadth.Row(package=model.package, version=foreign_table.version_of(model), call=model.call)
        for name, model in models.items()
    }
    done = breadth.play(
        asked, {name: (facts[name], model.plans) for name, model in models.items()}, foreign_table, PLANS
    )
    sys.exit(0 if done else 75)


if __name__ == "__main__":
    main()
