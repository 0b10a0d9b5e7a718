"""Every figure of the catalog has a source, none is a sparse one, and names mean one part or none."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

import pytest

from meshwise.hardware.catalog import (
    ARCHITECTURES,
    NOT_CONFIRMED,
    CatalogPart,
    achievable,
    networks,
    nominal_rate,
    part,
    part_of_driver_name,
    parts,
    reached,
)

TEXT = tomllib.loads(resources.files("meshwise.hardware").joinpath("catalog.toml").read_text(encoding="utf-8"))
GIB = 2**30


def figures(known: CatalogPart) -> set[str]:
    plain = ("memory", "memory_bandwidth", "multiprocessors", "link", "bridge")
    found = {name for name in plain if getattr(known, name) is not None}
    found |= {"host"} if known.host_link is not None else set()
    found |= {"peer"} if known.peer is not None else set()
    return found | {f"{table}.{dtype}" for table in ("peak", "achievable") for dtype in getattr(known, table)}


@pytest.mark.parametrize("known", parts(), ids=lambda known: known.name)
def test_every_figure_of_a_part_has_a_source(known: CatalogPart) -> None:
    assert set(known.origins) == figures(known)
    sources = set(TEXT["sources"].values())
    for figure, origin in known.origins.items():
        assert origin.removesuffix(NOT_CONFIRMED) in sources and len(origin) > 10, figure


def test_every_figure_of_a_link_has_a_source() -> None:
    for kind in ("pcie", "nvlink", "network"):
        assert TEXT[kind]["source"] in TEXT["sources"], kind
    for entry in TEXT["reached"]:
        assert entry["source"] in TEXT["sources"] and entry["part"], entry


def test_every_source_is_used_and_every_unconfirmed_figure_is_there() -> None:
    used = {TEXT[kind]["source"] for kind in ("pcie", "nvlink", "network")} | {e["source"] for e in TEXT["reached"]}
    for name, entry in TEXT["part"].items():
        used |= set(entry.get("sources", {}).values())
        known = part(name)
        assert known is not None and set(entry.get("unconfirmed", ())) <= figures(known), name
        assert set(entry.get("sources", {})) <= figures(known) | {f.split(".")[0] for f in figures(known)}, name
    assert used == set(TEXT["sources"])


def test_a_figure_without_a_source_is_not_read() -> None:
    from meshwise.hardware.catalog import _part

    with pytest.raises(KeyError):
        _part("bare", {"architecture": "ada", "memory": "1 GB", "sources": {}})


def test_the_table_of_known_parts_is_whole() -> None:
    names = {known.name for known in parts()}
    assert {
        *("V100-SXM2-16GB", "V100-SXM2-32GB", "V100-PCIe-16GB", "V100-PCIe-32GB", "A100-SXM-40GB", "A100-SXM-80GB"),
        *("A100-PCIe-40GB", "A100-PCIe-80GB", "H100-SXM", "H100-SXM-96GB", "H100-PCIe", "H100-NVL", "H200-SXM"),
        *("GH200-96GB", "GH200-141GB", "B200", "GB200", "B300", "GB300", "L4", "L40S", "A10", "RTX-3090", "RTX-4090"),
        *("RTX-A6000", "Quadro-RTX-8000", "RTX-6000-Ada", "MI250X-GCD", "MI250", "MI300X", "MI325X", "MI355X", "cpu"),
    } <= names


@pytest.mark.parametrize("known", parts(), ids=lambda known: known.name)
def test_figures_of_a_part_agree_with_each_other(known: CatalogPart) -> None:
    assert any(known.architecture in line for line in ARCHITECTURES) or known.name == "cpu"
    peak = known.peak
    assert set(peak) <= {"bf16", "fp16", "tf32", "fp32", "fp8"}
    if "bf16" in peak:  # tensor units double their rate with each halving of the width
        assert peak["bf16"] == peak["fp16"]
        assert peak.get("fp8", 2 * peak["bf16"]) == pytest.approx(2 * peak["bf16"], rel=0.02)
        assert peak.get("tf32", peak["bf16"] / 2) == pytest.approx(peak["bf16"] / 2, rel=0.02)
    assert all(0.4 < share < 1 for share in known.achievable.values())
    for link in (known.link, known.bridge, known.host_link):
        if link is not None and link.kind == "pcie":
            assert link.bandwidth == nominal_rate("pcie", link.generation, link.width)
        elif link is not None and link.kind == "nvlink" and "RTX-" not in known.name:
            assert link.bandwidth == nominal_rate("nvlink", link.generation, link.width)


# Sparse peaks as the vendors print them, TFLOP/s: none of them may stand here.
SPARSE = {"H100-SXM": 1979, "H200-SXM": 1979, "A100-SXM-80GB": 624, "L4": 242, "L40S": 733, "RTX-A6000": 309.7}
SPARSE |= {"RTX-6000-Ada": 728.5, "RTX-4090": 330, "B200": 4500, "MI300X": 2614}


@pytest.mark.parametrize("name", SPARSE)
def test_peaks_are_dense(name: str) -> None:
    known = part(name)
    assert known is not None and known.peak["bf16"] < 0.6e12 * SPARSE[name]


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "dtype", "peak"),
    [
        ("H100-SXM", 80, 3.35e12, "bf16", 989.5e12),
        ("A100-PCIe-40GB", 40, 1.555e12, "tf32", 156e12),
        ("MI300X", 192, 5.3e12, "fp8", 2614e12),
        ("RTX-A6000", 48, 768e9, "bf16", 154.8e12),
        ("Quadro-RTX-8000", 48, 672e9, "fp16", 130.5e12),
        ("RTX-6000-Ada", 48, 960e9, "fp8", 728.5e12),
        ("B200", 180, 8e12, "fp32", 80e12),
    ],
)
def test_some_figures_as_the_vendors_print_them(
    name: str, memory: int, bandwidth: float, dtype: str, peak: float
) -> None:
    known = part(name)
    assert known is not None
    assert (known.memory, known.memory_bandwidth, known.peak[dtype]) == (memory * GIB, bandwidth, peak)


def test_figures_from_memory_are_marked() -> None:
    unsure = {f"{p.name} {figure}" for p in parts() for figure, o in p.origins.items() if o.endswith(NOT_CONFIRMED)}
    assert {"H100-NVL peak.bf16", "A10 memory_bandwidth", "GB200 peak.fp32", "MI355X peak.fp32"} <= unsure
    assert not any(name.startswith(("H100-SXM ", "A100", "B200 ")) for name in unsure)


@pytest.mark.parametrize(
    ("driver", "memory", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 81559 * 2**20, "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", None, "H100-SXM"),
        ("NVIDIA H100 PCIe", 81559 * 2**20, "H100-PCIe"),
        ("NVIDIA H100 NVL", 95830 * 2**20, "H100-NVL"),
        ("NVIDIA H200", 143771 * 2**20, "H200-SXM"),
        ("NVIDIA A100-PCIE-40GB", 40536 * 2**20, "A100-PCIe-40GB"),
        ("NVIDIA A100-SXM4-80GB", 81920 * 2**20, "A100-SXM-80GB"),
        ("A100-SXM-80GB", None, "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", None, "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-32GB", 32510 * 2**20, "V100-SXM2-32GB"),
        ("Tesla V100-PCIE-16GB", 16160 * 2**20, "V100-PCIe-16GB"),
        ("NVIDIA GH200 480GB", 97871 * 2**20, "GH200-96GB"),
        ("NVIDIA B200", 183359 * 2**20, "B200"),
        ("NVIDIA GeForce RTX 4090", 24564 * 2**20, "RTX-4090"),
        ("NVIDIA RTX A6000", 49140 * 2**20, "RTX-A6000"),
        ("NVIDIA RTX A6000", 46068 * 2**20, "RTX-A6000"),  # with ECC
        ("NVIDIA RTX 6000 Ada Generation", None, "RTX-6000-Ada"),
        ("Quadro RTX 8000", None, "Quadro-RTX-8000"),
        ("NVIDIA L4", 23034 * 2**20, "L4"),
        ("AMD Instinct MI300X", 192 * GIB, "MI300X"),
        ("AMD Instinct MI300X OAM", 196592 * 2**20, "MI300X"),
        ("AMD Instinct MI250X", 64 * GIB, "MI250X-GCD"),
        ("nvidia  geforce rtx 4090", None, "RTX-4090"),
    ],
)
def test_a_drivers_name_means_a_part(driver: str, memory: int | None, name: str) -> None:
    found = part_of_driver_name(driver, memory)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    ("driver", "memory"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H800", None),
        ("NVIDIA RTX 6000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3", 10 * GIB),  # a slice
        ("NVIDIA H100", 80 * GIB),  # only the one with 96 GB has this name
        ("", None),
        ("cpu", None),
    ],
)
def test_a_name_that_only_looks_alike_means_none(driver: str, memory: int | None) -> None:
    assert part_of_driver_name(driver, memory) is None


def test_lanes_and_links_by_generation() -> None:
    assert nominal_rate("pcie", 3, 16) == 15.8e9 and nominal_rate("pcie", 5, 8) == 31.5e9
    assert nominal_rate("nvlink", 4, 18) == 450e9 and nominal_rate("nvlink", 5, 18) == 900e9
    assert all(
        nominal_rate(*link) is None for link in [("pcie", 9, 16), ("pcie", 4, None), ("nvlink", 7, 1), ("c2c", 1, 1)]
    )
    assert networks()["InfiniBand-NDR"] == 50e9 and networks()["EFA-P4d"] == 50e9


def test_what_was_reached_is_borrowed_from_the_nearest() -> None:
    assert reached("pcie", 5, "to") == 0.88 and reached("pcie", 3, "to") == 0.83
    assert reached("nvlink", 5, "pair") == 0.88 and reached("nvlink", 2, "pair") == 0.92
    assert reached("c2c", None, "to") is None and reached("pcie", 5, "all-reduce") is None


def test_what_a_matmul_reached_is_borrowed() -> None:
    def of(name: str, dtype: str) -> float:
        known = part(name)
        assert known is not None
        found = achievable(known, dtype)
        assert found is not None
        return found

    assert of("H100-SXM", "bf16") == of("H100-SXM", "fp16") == 0.803
    assert of("H100-SXM", "fp8") == 0.709
    assert of("L40S", "bf16") in (0.869, 0.811, 0.803) and of("H100-SXM", "fp32")
    cpu = part("cpu")
    assert cpu is not None and achievable(cpu, "bf16") is None


def test_the_catalog_is_in_the_package() -> None:
    assert re.match(r"# Known parts", resources.files("meshwise.hardware").joinpath("catalog.toml").read_text("utf-8"))
