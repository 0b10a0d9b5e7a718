"""Check a script's plan, of which its launcher knows only the file.

Tested in tests/engine/test_program.py.
"""

from __future__ import annotations

from meshwise import process
from meshwise.parallel.fits import check_fits, check_for_scripts
from meshwise.spec.plan import Plan
from meshwise.spec.world import World


def check_for_script(plan: Plan, world: World) -> None:
    """Check that these devices, and a loop that is not ours, support the plan; raises PlanError if not."""
    check_fits(plan, world)
    check_for_scripts(plan)


def tell_if_unused(script: str) -> None:
    """In a worker, when its script has ended: say that the plan changed nothing, if no model was distributed."""
    engine = process.session.process_engine()
    if not engine.has_applied:
        engine.notify(
            f"{script} never passed a model to mw.distribute, so the plan changed nothing: every worker ran alone."
        )
