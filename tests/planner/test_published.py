"""Published runs, bench/published_*.py: names that nobody knows, schedules of pipelines, replicas counted as two."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from published_pieces import Pipeline, Replicas, Times, _staged
from published_rows import Case, Unusable, case_of, machine_of
from published_score import plan_of, scoreboard, table

ROW = {
    "dataset": "somebody's", "framework": "Megatron-LM", "model": "GPT", "precision": "bf16", "step_time_s": "1.5",
    "gpu": "A100-80GB-SXM", "gpu_family": "A100-SXM", "gpu_mem_GB": "80", "n_gpus": "16", "gpus_per_node": "8",
    "inter_link": "8x HDR IB 200 Gb/s per node", "layers": "8", "hidden": "256", "heads": "4", "kv_heads": "4",
    "ffn": "1024", "vocab": "1000", "seq_len": "128", "dp": "4", "tp": "2", "pp": "2", "cp": "1", "ep": "", "vpp": "",
    "micro_batch": "2", "global_batch": "64", "fsdp_or_zero": "none", "activation_ckpt": "full", "compile": "no",
    "notes": "", "n_params": "7e6", "quality": "A", "peak_mem_GiB": "", "mem_stat": "",
}  # fmt: skip


def test_a_name_that_nobody_knows_is_the_nearest_known_one() -> None:
    assert machine_of(ROW) == "2x8xA100-SXM-80GB@1600Gb"
    assert machine_of(ROW | {"inter_link": "a fabric of our own"}) == "2x8xA100-SXM-80GB@1600Gb"
    assert machine_of(ROW | {"gpu": "H100 of tomorrow", "inter_link": "?"}).startswith("2x8xA100")  # by its family
    unknown = {"gpu": "Z9", "gpu_family": "Z9", "gpu_mem_GB": "141"}
    assert machine_of(ROW | unknown).startswith("2x8xH200-SXM")


def test_what_cannot_be_built_says_why() -> None:
    for changed, why in (
        ({"precision": "float8 rowwise"}, "no float8"),
        ({"step_time_s": ""}, "no step time"),
        ({"framework": "a loop of our own"}, "no builder for a loop of our own"),
        ({"ep": "8"}, "experts"),
    ):
        with pytest.raises(Unusable, match=why):
            case_of(ROW | changed)


def test_stages_take_turns_by_their_schedule() -> None:
    def step(**changed: object) -> float:
        pipe = Pipeline(4, **changed)  # type: ignore[arg-type]
        case = Case(lambda *_: None, lambda _: None, "8xA100-SXM-80GB", 8, 12, pipeline=pipe, replicas=Replicas())
        times = {1: Times(0.01, 0, 0, (0.01,)), 2: Times(0.02, 0, 0, (0.02,))}
        return _staged(case, lambda get, layers: get(times[1]) + (get(times[2]) - get(times[1])) * (layers - 1))

    own = 0.01 * 8 / 4
    assert step() == pytest.approx((12 + 3) * own, rel=0.02)
    assert step(chunks=2) == pytest.approx((12 + 1.5) * own, rel=0.02)
    assert step(schedule="zb-1p") == pytest.approx((12 + 1) * own, rel=0.02)
    assert step(schedule="zb-2p") == pytest.approx(12 * own, rel=0.02)


def test_rows_are_counted_beside_one_utilisation_and_refusals_by_reason() -> None:
    found = {"seconds": 1.2, "low": 1.0, "high": 1.6, "ideal": 0.6, "family": "GPT", "differs": ()}
    rows = [ROW, ROW | {"step_time_s": "1.0"}, ROW | {"model": "other"}]
    given = iter([found, found, {"unusable": "no builder"}])
    result = scoreboard(rows, lambda row: next(given))
    time = result["data set"]["somebody's"]["step time"]
    assert (time["median"], time["in the interval"], result["scored"]) == (0.2, 1.0, 2)
    assert time["utilisation median"] == 0.2
    assert result["not scored"] == {"somebody's": {"no builder": 1}}
    assert plan_of(ROW) == "pipeline x tensor x data" and "1 no builder" in table(result)
