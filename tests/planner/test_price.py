"""Seconds of an operator: measured before modelled, limits of the roofline, tiles, no guess where a figure lacks.

Of planner/operators.py and planner/constants.py too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwise.hardware.words import machine_from_words
from meshwise.planner.constants import FIGURES, digest
from meshwise.planner.operators import Product, product_of, sort_of
from meshwise.planner.price import (
    CATALOG,
    COMPUTE,
    MEASURED,
    MEMORY,
    MODEL,
    Priced,
    copy_seconds,
    kernel_seconds,
    launch_seconds,
    tile_share,
)
from meshwise.planner.prices import Prices
from meshwise.planner.work import Copy, Operation
from meshwise.spec.machine import HOST, Device, Link, Machine, Matmul
from meshwise.spec.timings import fitted

H100 = machine_from_words("H100-SXM").devices[0]
WIDTH = {"bf16": 2, "fp32": 4, "fp16": 2}


def matmul(m: int, n: int, k: int, dtype: str = "bf16") -> Operation:
    width = WIDTH[dtype]
    return Operation("aten.mm", ((m, k), (k, n)), (dtype, dtype), 2 * m * n * k, width * (m * k + k * n), width * m * n)


def add(count: int, dtype: str = "bf16") -> Operation:
    size = WIDTH[dtype] * count
    return Operation("aten.add", ((count,), (count,)), (dtype, dtype), 0, 2 * size, size)


def of(operation: Operation, device: Device = H100) -> Priced:
    found = kernel_seconds(operation, device)
    assert found is not None and found.low <= found.seconds <= found.high
    return found


def test_a_large_matmul_runs_near_what_was_reached_of_the_peak() -> None:
    price = of(matmul(8192, 8192, 8192))
    rate = 2 * 8192**3 / price.seconds
    assert 0.7 * 0.803 * 989.5e12 < rate <= 0.803 * 989.5e12
    assert (price.origin, price.factor) == (CATALOG, COMPUTE)


def test_no_matmul_is_faster_than_its_peak_or_its_bytes() -> None:
    for m in (1, 7, 64, 129, 1000, 4096, 33000):
        for n in (8, 100, 768, 50257):
            for k in (1, 64, 768, 12288):
                operation = matmul(m, n, k)
                price = of(operation)
                assert price.seconds >= operation.flops / 989.5e12
                assert price.seconds >= (operation.read + operation.written) / 3.35e12


def test_a_last_wave_of_few_tiles_costs_a_whole_wave() -> None:
    # 132 multiprocessors: 11 x 12 tiles of 128 x 128 fill one wave; one row of tiles more begins a second.
    full, over = (tile_share(Product(1, rows * 128, 12 * 128, 4096), 132) for rows in (11, 12))
    assert full > 0.9 and over < 0.75
    assert tile_share(Product(1, 64, 64, 64), None) == 1.0


@pytest.mark.parametrize("k", [64, 512, 8192, 131072])
def test_the_share_of_tiles_is_a_share(k: int) -> None:
    for side in (1, 16, 100, 128, 1000, 5000):
        assert 0 < tile_share(Product(1, side, side, k), 132) <= 1


def test_a_small_matmul_with_a_long_k_is_divided_over_idle_multiprocessors() -> None:
    assert tile_share(Product(1, 256, 256, 65536), 132) > 5 * 4 / 132


def test_a_side_that_is_not_aligned_is_slower() -> None:
    assert of(matmul(8192, 50257, 4096)).seconds > 1.3 * of(matmul(8192, 50304, 4096)).seconds


def test_what_computes_little_takes_the_time_of_its_bytes() -> None:
    price = of(add(1 << 28))
    assert price.factor == MEMORY
    assert 3 * 2 * (1 << 28) / price.seconds == pytest.approx(
        0.89 * FIGURES["memory.elementwise"].value * 3.35e12, rel=0.01
    )
    assert of(add(1)).seconds == pytest.approx(FIGURES["kernel"].value, rel=0.01)


def test_embeddings_reach_less_of_the_bandwidth_than_sums_and_those_less_than_additions() -> None:
    size = 1 << 26
    names = ("aten.add", "aten._softmax", "aten.embedding_dense_backward")
    fast, middle, slow = (of(Operation(name, ((size,),), ("fp32",), 0, 4 * size, 4 * size)).seconds for name in names)
    assert fast < middle < slow


@pytest.mark.parametrize(
    ("name", "sort"),
    [
        ("aten.addmm", "matmul"),
        ("aten.linear", "matmul"),
        ("aten.convolution_backward", "convolution"),
        ("aten._scaled_dot_product_flash_attention_backward", "attention"),
        ("aten._scaled_dot_product_efficient_attention", "attention"),
        ("aten.native_layer_norm", "reduction"),
        ("aten.native_batch_norm_backward", "batch-norm"),
        ("aten.native_dropout", "dropout"),
        ("aten.max_pool2d_with_indices", "reduction"),
        ("aten.embedding", "gather"),
        ("aten.index_put_", "gather"),
        ("aten._fused_adamw_", "optimizer"),
        ("aten._foreach_addcdiv_", "optimizer"),
        ("aten._cudnn_rnn", "recurrent"),
        ("aten.gelu", "elementwise"),
        ("mine::anything", "elementwise"),
    ],
)
def test_the_sort_of_an_operator_is_read_from_its_name(name: str, sort: str) -> None:
    assert sort_of(Operation(name, ((4, 4), (4, 4)), ("fp32",), 0, 64, 64)) == sort


def test_an_operator_of_no_known_name_that_computes_much_is_a_matmul() -> None:
    operation = Operation("mine::fused", ((4096, 4096),), ("bf16",), 2 * 4096**3, 2 * 4096**2, 2 * 4096**2)
    assert sort_of(operation) == "matmul" and of(operation).factor == COMPUTE


def test_products_are_read_from_shapes() -> None:
    batched = Operation("aten.bmm", ((8, 16, 32), (8, 32, 64)), ("bf16",), 2 * 8 * 16 * 32 * 64, 1, 1)
    assert product_of(batched) == Product(8, 16, 64, 32)
    bias = Operation("aten.addmm", ((64,), (16, 32), (32, 64)), ("fp32",), 2 * 16 * 32 * 64, 1, 1)
    assert product_of(bias) == Product(1, 16, 64, 32)
    three = Operation("aten.linear", ((2, 8, 32), (64, 32)), ("fp32",), 2 * 16 * 32 * 64, 1, 1)
    assert product_of(three) == Product(1, 16, 64, 32)
    flops = 2 * 4 * 14 * 14 * 64 * 32 * 9
    convolved = Operation("aten.convolution", ((4, 32, 14, 14), (64, 32, 3, 3)), ("fp16",), flops, 1, 1)
    assert product_of(convolved) == Product(1, 4 * 14 * 14, 64, 288)
    other = Operation("aten.mm", ((16, 32), (32, 64)), ("bf16",), 1, 1, 1)
    assert product_of(other) is None  # its FLOPs say that the shapes are not those of the product


def test_depthwise_convolutions_are_limited_by_memory() -> None:
    size = 4 * 32 * 56 * 56
    flops = 2 * size * 9
    narrow = Operation("aten.convolution", ((4, 32, 56, 56), (32, 1, 3, 3)), ("fp16",), flops, 2 * size, 2 * size)
    assert sort_of(narrow) == "depthwise" and of(narrow).factor == MEMORY


def test_convolutions_in_fp32_run_on_tensor_cores_and_matmuls_do_not() -> None:
    flops = 2 * 64 * 56 * 56 * 256 * 256 * 9
    size = 4 * 64 * 256 * 56 * 56
    convolved = Operation("aten.convolution", ((64, 256, 56, 56), (256, 256, 3, 3)), ("fp32",), flops, size, size)
    assert flops / of(convolved).seconds > 67e12
    assert 2 * 8192**3 / of(matmul(8192, 8192, 8192, "fp32")).seconds < 67e12


def test_convolutions_transpose_images_that_are_not_channels_last() -> None:
    size = 2 * 256 * 64 * 56 * 56
    flops = 2 * 256 * 56 * 56 * 64 * 64 * 9
    plain = Operation("aten.convolution", ((256, 64, 56, 56), (64, 64, 3, 3)), ("bf16",), flops, size, size)
    last = replace(plain, layout="channels_last")
    more = of(plain).seconds - of(last).seconds
    assert more == pytest.approx(4 * size / (FIGURES["memory.transpose"].value * 0.89 * 3.35e12))
    full = [replace(one, dtypes=("fp64",)) for one in (plain, last)]
    device = replace(H100, part="a part without tensor cores", peak={"fp64": 60e12})
    assert of(full[0], device).seconds == of(full[1], device).seconds


def test_attention_backward_is_slower_than_forward_a_flop() -> None:
    shape = (4, 32, 4096, 128)
    flops = 4 * 4 * 32 * 4096 * 4096 * 128
    ways = (("", 1.0), ("_backward", 2.5))
    rates = []
    for way, factor in ways:
        operation = Operation(
            f"aten._scaled_dot_product_flash_attention{way}", (shape,) * 3, ("bf16",), int(flops * factor), 1, 1
        )
        rates.append(operation.flops / of(operation).seconds)
    assert 0.2 * 989e12 < rates[1] < rates[0] < 0.5 * 989e12


def test_measured_figures_come_before_those_of_the_part() -> None:
    slow = tuple(Matmul("bf16", size, size, size, 2 * size**3 / 400e12) for size in (2048, 4096, 8192))
    measured = replace(H100, matmuls=slow, memory_rate=2e12, launch=5e-6)
    price = of(matmul(4096, 4096, 4096), measured)
    assert price.seconds == pytest.approx(2 * 4096**3 / 400e12, rel=0.02) and price.origin == MEASURED
    assert of(add(1 << 28), measured).origin == MEASURED
    assert of(add(1 << 28), measured).seconds > of(add(1 << 28)).seconds
    assert launch_seconds(measured).seconds == 5e-6 and launch_seconds(measured).origin == MEASURED
    assert launch_seconds(measured, "forward").seconds > launch_seconds(measured, "backward").seconds > 5e-6
    operation = add(1 << 20)
    known = kernel_seconds(operation, H100, {operation: 0.5}.get)
    assert known is not None and (known.seconds, known.origin) == (0.5, MEASURED)


def test_what_is_not_known_has_no_time() -> None:
    assert kernel_seconds(matmul(64, 64, 64), Device("cuda:0", "a new part")) is None
    assert kernel_seconds(add(64), Device("cuda:0", "a new part")) is None
    assert kernel_seconds(matmul(64, 64, 64), Device("cpu:0", "cpu")) is None
    v100 = machine_from_words("V100-SXM2-32GB").devices[0]
    assert kernel_seconds(matmul(4096, 4096, 4096, "bf16"), v100) is None  # it has no bf16
    assert kernel_seconds(add(4096), v100) is not None
    fp16 = replace(H100, part="a new part", peak={"fp16": 100e12}, achievable={})
    assert of(matmul(4096, 4096, 4096, "fp16"), fp16).origin == MODEL


def test_a_processor_has_what_it_measured() -> None:
    device = Device(
        "cpu:0",
        "some processor",
        memory_rate=10e9,
        matmuls=(
            Matmul("fp32", 256, 256, 256, 2 * 256**3 / 20e9),
            Matmul("fp32", 1024, 1024, 1024, 2 * 1024**3 / 40e9),
        ),
        launch=3e-6,
    )
    between = of(matmul(512, 512, 512, "fp32"), device)
    assert 2 * 512**3 / 40e9 < between.seconds < 2 * 512**3 / 20e9
    assert of(add(1 << 20, "fp32"), device).seconds == pytest.approx(12 * (1 << 20) / 10e9 + 3e-6)
    assert kernel_seconds(matmul(512, 512, 512, "bf16"), device) is None  # never measured
    assert launch_seconds(device).seconds == 0.0  # its operators hold it


def test_copies_to_the_host_take_the_time_of_their_link() -> None:
    machine = machine_from_words("2xH100")
    found = copy_seconds(Copy(1 << 30, "host"), machine.devices[1], machine)
    assert found is not None and (1 << 30) / found.seconds == pytest.approx(0.88 * 63e9, rel=0.01)
    table = fitted((1 << 20, 1 << 30), ((1 << 20) / 20e9, (1 << 30) / 20e9))
    measured = replace(machine, links=(Link(HOST, "cuda:1", "pcie", 63e9, timings={"pinned": table}),))
    found = copy_seconds(Copy(1 << 30, "device"), machine.devices[1], measured)
    assert found is not None and found.seconds == pytest.approx((1 << 30) / 20e9) and found.origin == MEASURED
    assert copy_seconds(Copy(1, "host"), machine.devices[0], Machine("bare", machine.devices)) is None


def test_a_host_takes_as_long_to_launch_on_each_kind_of_device() -> None:
    found = {launch_seconds(machine_from_words(name).devices[0]).seconds for name in ("A100", "H100", "MI300X")}
    assert found == {FIGURES["launch"].value}


def test_compiled_blocks_fuse_what_waits_for_memory_and_launch_less() -> None:
    machine, many = machine_from_words("H100-SXM"), add(1 << 26)
    plain, compiled = Prices(machine), Prices(machine, compiled=True)
    product = matmul(4096, 4096, 4096)
    ratio = compiled.of(many, 0).seconds / plain.of(many, 0).seconds  # type: ignore[union-attr]
    assert ratio == pytest.approx(FIGURES["compile.memory"].value) and ratio < 1
    assert compiled.of(product, 0) == plain.of(product, 0)
    assert compiled.host(many, 0, "forward").seconds < plain.host(many, 0, "forward").seconds
    assert compiled.host(many, 0, "optimizer") == plain.host(many, 0, "optimizer")


def test_the_first_flash_attention_is_slower_than_the_second() -> None:
    shape = (4, 16, 2048, 128)
    second = Operation("aten._scaled_dot_product_flash_attention", (shape,) * 3, ("bf16",) * 3, 10**12, 1, 1)
    first = replace(second, name="aten.flash1_scaled_dot_product_flash_attention")
    a100 = machine_from_words("A100-SXM-80GB").devices[0]
    assert of(first, a100).seconds == pytest.approx(
        of(second, a100).seconds / FIGURES["attention.flash1"].value, rel=0.01
    )


def test_the_digest_changes_with_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    assert before == digest() and len(before) == 12
    monkeypatch.setitem(FIGURES, "kernel", replace(FIGURES["kernel"], value=math.pi))  # type: ignore[arg-type]
    assert digest() != before


def test_every_constant_has_a_source_and_names_no_data_set() -> None:
    for name, figure in FIGURES.items():
        assert len(figure.source) > 10 and figure.value > 0 and figure.spread >= 1, name
        text = f"{name} {figure.source}".lower()
        assert not any(word in text for word in ("llama", "gpt", "resnet", "bert", "mpt-", "llm-foundry")), name
