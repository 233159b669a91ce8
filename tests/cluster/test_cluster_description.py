# SPDX-License-Identifier: Apache-2.0
"""Clusters in three lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import AllReduce, Cluster, InvalidInput, lower_bound
from stretto.cluster.description import GPUS

TEXT = "hosts: 2\ngpus: 8 x h100\nnetwork: 8 x 400gbit\n"


def links(cluster: Cluster) -> list[tuple[str, str, float, str]]:
    names = cluster.node_names
    return [(names[x.src], names[x.dst], x.gb_per_s, x.channel) for x in cluster.links()]


def test_three_lines_one_line_and_files_are_the_same_cluster(tmp_path: Path) -> None:
    said = Cluster.load(TEXT)
    (tmp_path / "mine.yaml").write_text(f"# ours\n{TEXT}")
    (tmp_path / "mine.json").write_text('{"hosts": 2, "gpus": "8 x h100", "network": "8 x 400gbit"}')
    others = [Cluster.load("hosts: 2, gpus: 8 x H100, network: 8 x 400 Gbps")]
    others += [Cluster.load(tmp_path / name) for name in ("mine.yaml", "mine.json")]
    assert all(links(other) == links(said) for other in others)
    assert others[1].name == "mine" and said.unreachable() is None and said.notes


def test_it_bounds_an_all_reduce_as_the_preset_of_the_same_machine_does() -> None:
    said, preset = Cluster.load(TEXT), Cluster.preset("dgx_h100", nodes=2)
    times = [lower_bound(AllReduce(16), one, nbytes=1e9).total_us for one in (said, preset)]
    assert times[0] == pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize(("nics", "rate"), [("2 x 100gbit", 12.5), ("25gbit", 3.125), ("16 x 50 GB/s", 100.0)])
def test_nics_are_shared_evenly(kind: str, nics: str, rate: float) -> None:
    made = Cluster.load(f"hosts: 3, gpus: 8 x {kind}, network: {nics}")
    out = [(a, gb_per_s) for a, b, gb_per_s, _ in links(made) if b == "fabric"]
    assert len(out) == 3 * min(8, int(nics.split(" x ")[0]) if " x " in nics else 1)
    assert {gb_per_s for _, gb_per_s in out} == {rate}
    assert made.num_devices == 24 and made.unreachable() is None


def test_gigabits_are_eight_times_less_than_gigabytes() -> None:
    rates = {}
    for unit in ("Gb/s", "GB/s", "gbit", "Gbps", "GbE", "GBps", "G", "Gb", "gbps"):
        made = Cluster.load(f"hosts: 2, gpus: a100, network: 80 {unit}")
        rates[unit] = next(rate for _, b, rate, _ in links(made) if b == "fabric")
    assert rates == {
        "Gb/s": 10.0,
        "GB/s": 80.0,
        "gbit": 10.0,
        "Gbps": 10.0,
        "GbE": 10.0,
        "GBps": 80.0,
        "G": 10.0,
        "Gb": 10.0,
        "gbps": 10.0,
    }


def test_a_description_without_a_file_is_named_by_its_hosts() -> None:
    assert Cluster.load(TEXT).name == "2 hosts of 8 x h100"
    assert Cluster.load("gpus: 4 x l40s").name == "1 host of 4 x l40s"


def test_one_host_needs_no_network() -> None:
    assert Cluster.load("gpus: 4 x l40s").channels == ("pcie",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: 2, gpus: 8 x h101, network: 400gbit", "gpus: unknown GPU 'h101'.* did you mean 'h100'"),
        ("hosts: 2 gpus: 8 x h100, network: 400gbit", "a comma is missing after 'hosts: 2'"),
        ("hosts: 2, gpus: 8 x h100 network: 400gbit", "a comma is missing after 'gpus: 8 x h100'"),
        ("gpus: 4", "gpus: 4: write which GPU, too, such as 4 x a100"),
        ("hosts: 2, gpus: 8 x h100", "network: is missing for 2 hosts"),
        ("gpus: 8 x h100, host: 2", "unknown key.* 'host'.*did you mean 'hosts'"),
        ("hosts: 2, gpu: 8 x h100, network: 400gbit", "unknown key.* 'gpu'.*did you mean 'gpus'"),
        ("hosts: 2, gpus: 8 x mi300x, network: 400gbit", "unknown GPU 'mi300x'.*stretto cluster list"),
        ("2 hosts, 8 h100, 400G", "unknown preset.*or a description such as hosts: 2, gpus: 8 x h100"),
        (
            "hosts: 2, gpus: 8 x h100, network: fast",
            "network: rate 'fast': expected a number with its unit, such as 400mbit",
        ),
        ("hosts: 2, gpus: 8 x h100, network: 25GB", r"network: rate '25GB': .* write 25GB/s \(bytes\) or 25gbit"),
        ("hosts: 2, gpus: 8 x h100, network: 25 gb", r"network: rate '25 gb': .* write 25GB/s \(bytes\) or 25gbit"),
        ("hosts: 2, gpus: 8 x h100, network: 25", "network: rate '25': expected a number with its unit"),
        ("hosts: 2, gpus: 8 x h100, network: 0gbit", "must be more than 0"),
        ("hosts: 0, gpus: h100", "hosts: must be a whole number"),
        ("hosts: 2, gpus: 8 x h100, network: 3 x 400gbit", "not shared evenly"),
        ("hosts: 2, gpus: 8 x h100, network: 8 x 400gbit, hosts: 3", "hosts: is given twice"),
        ("hosts: 2, gpus: 8 x h100, eight", "expected 'key: value'"),
        ("hosts: 60000, gpus: 8 x h100, network: 400gbit", "more than 65536"),
        ("hosts: 2, network: 400gbit, gpus:", "gpus: must not be empty"),
    ],
)
def test_what_is_wrong_is_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Cluster.load(text)
