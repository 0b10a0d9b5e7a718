"""Which plans are searched: every mesh that divides the batch, and what saves memory of one."""

from meshwise.planner.candidates import Space, candidates, savers
from meshwise.spec.plan import Plan


def test_plans_of_each_mesh_sharded_ones_that_recompute_first_and_one_device_last():
    found = candidates(Space([1, 4], 4, batch=8))
    assert found[0] == Plan(shard=4, recompute="full")
    assert found[-1].devices == 1
    assert {(plan.data, plan.shard, plan.tensor, plan.pipeline) for plan in found if plan.devices == 4} == {
        (4, 1, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 4, 1), (1, 1, 2, 2), (1, 1, 1, 4),
        (2, 1, 1, 2), (1, 2, 1, 2),
    }  # fmt: skip


def test_what_saves_memory_belongs_to_every_mesh():
    found = candidates(Space([4], 4, batch=8))
    for recompute in ("none", "selective", "full"):
        assert Plan(shard=4, recompute=recompute, accumulate=2) in found
        assert Plan(shard=4, recompute=recompute, accumulate=2, reduce_each=True) in found
        assert Plan(data=4, recompute=recompute, zero1=True) in found
        assert Plan(shard=2, tensor=2, recompute=recompute, sequence=True) in found


def test_a_script_is_not_cut():
    found = candidates(Space([4], 4, batch=8, cut=False))
    assert {(plan.pipeline, plan.accumulate) for plan in found} == {(1, 1)}


def test_hosts_are_replicas_of_shards_inside_a_host():
    assert Plan(data=2, shard=8) in candidates(Space([16], 8, batch=16))


def test_a_pipeline_has_microbatches_for_its_stages():
    for batch, cut in ((32, {2, 4, 8, 16, 32}), (6, {2})):
        assert {plan.accumulate for plan in candidates(Space([2], 2, batch)) if plan.pipeline == 2} == cut
    normed = candidates(Space([2], 2, batch=32, batch_norms=True))
    assert {plan.accumulate for plan in normed if plan.pipeline == 2} == {8}


def test_what_is_given_stays():
    found = candidates(Space([4], 4, batch=8, settings=("precision=bf16", "tensor=2")))
    assert found and all(plan.precision == "bf16" and plan.tensor == 2 and plan.devices == 4 for plan in found)


def test_a_batch_that_nothing_divides_has_the_axes_that_share_samples_alone():
    assert {plan.data * plan.shard for plan in candidates(Space([4], 4, batch=7))} == {1}


def test_savers_change_no_numbers_unless_they_are_allowed_to():
    space = Space([2], 2, batch=8, batch_norms=True)
    assert {plan.accumulate for plan in savers(Plan(data=2), space)} == {1}
    assert {plan.precision for plan in savers(Plan(data=2), space)} == {"fp32"}
    allowed = Space([2], 2, batch=8, batch_norms=True, allow=("microbatch", "precision"))
    assert {plan.accumulate for plan in savers(Plan(data=2), allowed)} == {1, 2, 4}
    assert {plan.precision for plan in savers(Plan(data=2), allowed)} == {"fp32", "bf16"}
    assert Plan(data=2, zero1=True) in savers(Plan(data=2), space)
