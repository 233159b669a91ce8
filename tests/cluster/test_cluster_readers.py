# SPDX-License-Identifier: Apache-2.0
"""Readers of other people's files, on golden inputs and on broken ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stretto import Cluster, InvalidInput
from stretto.cluster.files import load, loads
from stretto.cluster.presets.ndv2 import DOUBLE, SINGLE

DATA = Path(__file__).parent / "data"
HOSTS = ["nccl_dgx1.xml", "nccl_hgx_h100.xml", "smi_dgx1.txt", "smi_dgx_a100.txt", "taccl_ndv2.json"]


def rates(cluster: Cluster, channel: str | None = None) -> dict[tuple[str, str], float]:
    names = cluster.node_names
    return {(names[x.src], names[x.dst]): x.gb_per_s for x in cluster.links() if channel in (None, x.channel)}


def neighbors(cluster: Cluster, name: str) -> set[str]:
    return {b for a, b in rates(cluster) if a == name}


@pytest.mark.parametrize("name", [*HOSTS, "smi_pcie.txt", "taccl_custom.json", "astra_fc_ring_switch.yml"])
def test_a_file_says_what_was_assumed_and_reaches_everything(name: str) -> None:
    cluster = load(DATA / name)
    assert cluster.unreachable() is None
    assert cluster.notes
    assert cluster.name == name.split(".")[0]


@pytest.mark.parametrize("name", [*HOSTS, "taccl_dgx2_32KB.json"])
def test_a_file_of_one_host_is_repeated_behind_a_switch(name: str) -> None:
    one, four = load(DATA / name), load(f"{DATA / name}:4")
    assert four.num_hosts == 4
    assert four.num_devices == 4 * one.num_devices
    assert four.unreachable() is None
    assert four.node_names[: one.num_devices] == tuple(f"h0.{n}" for n in one.node_names[: one.num_devices])
    inside = {(a.removeprefix("h2."), b.removeprefix("h2.")): r for (a, b), r in rates(four).items() if "h2." in a + b}
    assert rates(one).items() <= inside.items()
    up = [x for x in four.links() if four.node_names[x.dst] == "fabric"]
    assert len(up) % 4 == 0
    assert all(x.alpha_us > 0 for x in up)


def test_nccl_xml_gives_the_pcie_tree_and_nvlinks_of_a_cube_mesh() -> None:
    cluster = load(DATA / "nccl_dgx1.xml")
    nvlink = rates(cluster, "nvlink")
    expected = {
        (f"gpu{x}", f"gpu{y}"): width * 20.0
        for pairs, width in ((DOUBLE, 2), (SINGLE, 1))
        for a, b in pairs
        for x, y in ((a, b), (b, a))
    }
    assert nvlink == expected
    assert neighbors(cluster, "pci@08:00.0") == {"cpu0", "gpu2", "gpu3", "mlx5_1"}
    pcie = rates(cluster, "pcie")
    assert pcie["gpu0", "pci@02:00.0"] == 12.0
    assert pcie["cpu0", "cpu1"] == 6.0
    assert [cluster.node_names[i] for i in range(8)] == [f"gpu{i}" for i in range(8)]


def test_nccl_xml_joins_all_nvswitches_and_uses_speed_and_latency_of_the_nics() -> None:
    cluster = load(f"{DATA / 'nccl_hgx_h100.xml'}:2")
    names = cluster.node_names
    nvlink = rates(cluster, "nvlink")
    assert nvlink["h0.gpu0", "h0.nvswitch"] == pytest.approx(18 * 20.6)
    fabric = {names[x.src]: x for x in cluster.links() if names[x.dst] == "fabric"}
    assert (fabric["h0.mlx5_3"].gb_per_s, fabric["h0.mlx5_3"].alpha_us) == (50.0, 1.5)
    assert fabric["h0.mlx5_3"].channel == "rdma"
    assert (fabric["h1.eth1"].gb_per_s, fabric["h1.eth1"].channel) == (3.125, "ethernet")
    assert neighbors(cluster, "h0.nic@5a:00.0") == {"h0.cpu0", "h0.eth0", "h0.eth1"}
    assert rates(cluster)["h0.gpu0", "h0.pci@15:00.0"] == 48.0
    assert rates(cluster)["h0.cpu0", "h0.cpu1"] == 22.0


XML = '<system version="1"><cpu numaid="0" arch="arm64">{}</cpu></system>'
GPU = (
    '<pci busid="{0}" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">'
    '<gpu dev="{1}" sm="80">{2}</gpu></pci>'
)


def test_nccl_xml_reads_c2c_and_leaves_out_nvlinks_to_gpus_it_does_not_hold() -> None:
    body = GPU.format("0000:01:00.0", 1, '<c2c bw="25000" count="10"/>') + GPU.format(
        "0000:02:00.0", 0, '<nvlink target="0000:99:00.0" count="3" tclass="0x030200"/>'
    )
    cluster = loads(XML.format(body))
    assert rates(cluster, "c2c") == {("gpu1", "cpu0"): 250.0, ("cpu0", "gpu1"): 250.0}
    assert cluster.node_names[:2] == ("gpu0", "gpu1")
    assert any(note.startswith("3 NVLinks lead to GPUs that the file does not hold") for note in cluster.notes)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "system: no <gpu> in the file"),
        (GPU.format("", 0, ""), "system.cpu[0].pci[0].busid: is missing"),
        (GPU.format("1", 0, "").replace('"16"', '"wide"'), "link_width: must be a whole number, not 'wide'"),
        (GPU.format("1", 0, "").replace('"16"', '"1000000"'), "link_width: must be 0..64, not 1000000"),
        (GPU.format("1", 0, '<nvlink target="2" count="1000000000"/>'), "count: must be 1..1024, not 1000000000"),
        (GPU.format("1", 0, "").replace('sm="80"', 'sm="x"'), "system.cpu[0].pci[0].gpu.sm: must be a whole number"),
        (GPU.format("1", 0, "") + GPU.format("2", 0, ""), "names must differ; 'gpu0' is used twice"),
        (
            GPU.format("1", 0, "") + '<nic><net name="eth0" dev="0" speed="-1" latency="soon"/></nic>',
            "latency: must be a number >= 0, not 'soon'",
        ),
    ],
)
def test_broken_nccl_xml_is_refused_by_element(body: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        loads(XML.format(body))


def test_nccl_xml_bounds_its_parts() -> None:
    bridges = "".join(f'<pci busid="{i}" class="0x060400"/>' for i in range(20_000))
    with pytest.raises(InvalidInput, match="system: more than 16384 processors, bridges, GPUs and NICs"):
        loads(XML.format(bridges))
    cpus = "".join(f'<cpu numaid="{i}"/>' for i in range(300))
    with pytest.raises(InvalidInput, match="system: a host has at most 256 <cpu>, not 301"):
        loads(XML.format(GPU.format("1", 0, "")).replace("</system>", f"{cpus}</system>"))


def test_hosts_without_nics_cannot_be_joined() -> None:
    with pytest.raises(InvalidInput, match="nodes: the file names no NIC, so 2 hosts cannot be joined"):
        loads(XML.format(GPU.format("1", 0, "")), nodes=2)
    with pytest.raises(InvalidInput, match=r"nodes: .* takes 1 to 65536 nodes, not 1000000000"):
        loads(XML.format(GPU.format("1", 0, "")), nodes=10**9)


def test_nvidia_smi_gives_nvlinks_and_a_pcie_tree() -> None:
    cluster = load(DATA / "smi_dgx1.txt")
    nvlink = rates(cluster, "nvlink")
    assert nvlink["gpu0", "gpu1"] == 50.0
    assert nvlink["gpu3", "gpu7"] == 25.0
    assert len(nvlink) == 32
    assert neighbors(cluster, "mlx5_0") == {"pcie0.0"}
    assert neighbors(cluster, "pcie0.0") == {"gpu0", "gpu1", "mlx5_0", "cpu0"}
    assert neighbors(cluster, "cpu1") == {"pcie0.2", "pcie0.3", "cpu0"}


def test_nvidia_smi_sees_an_nvswitch_where_direct_links_are_impossible() -> None:
    cluster = load(f"{DATA / 'smi_dgx_a100.txt'}:2,nic_gb_per_s=25,nvlink_gb_per_s=20")
    assert rates(cluster, "nvlink")["h1.gpu7", "h1.nvswitch"] == 240.0
    assert rates(cluster, "rdma")["h0.mlx5_6", "fabric"] == 25.0
    assert any("an NVSwitch" in note for note in cluster.notes)


def test_nvidia_smi_joins_gpus_by_cpu_affinity_where_nvlink_hides_their_pcie() -> None:
    text = (
        "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV4\tNV4\tNV4\t0-15\t0\nGPU1\tNV4\t X \tNV4\tNV4\t0-15\t0\n"
        "GPU2\tNV4\tNV4\t X \tNV4\t16-31\t1\nGPU3\tNV4\tNV4\tNV4\t X \t16-31\t1\n"
    )
    cluster = loads(text)
    assert neighbors(cluster, "cpu0") == {"gpu0", "gpu1", "cpu1"}
    assert rates(cluster, "nvlink")["gpu0", "gpu3"] == 100.0


SMI = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-3\nGPU1\tNV2\t X \t0-3\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GPU1\tNV2\t X \t0-3\n", "", "row GPU1: is missing (the text is cut off)"),
        ("GPU1\tNV2\t X \t0-3\n", "GPU1\tNV2", "row GPU1: has 1 of 2 columns"),
        ("GPU0\t X \tNV2", "GPU0\t X \tWIFI", "row GPU0, column GPU1: unknown class 'WIFI'; choose from: NV#, X, PIX"),
        ("GPU0\t X \tNV2", "GPU0\t X \tNV4", "row GPU0, column GPU1: says NV4, but the other way round NV2"),
        ("\tGPU0\tGPU1", "\tGPU0\tGPU0", "columns: a GPU or NIC is named twice"),
        ("GPU1\tNV2\t X \t0-3\n", "GPU0\t X \tNV2\t0-3\n", "row GPU0: stands there twice"),
    ],
)
def test_broken_nvidia_smi_text_is_refused_by_row(old: str, new: str, message: str) -> None:
    loads(SMI)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        loads(SMI.replace(old, new))


def test_nvidia_smi_bounds_its_columns() -> None:
    with pytest.raises(InvalidInput, match="columns: at most 512"):
        loads("\t" + "\t".join(f"GPU{i}" for i in range(600)) + "\nGPU0\t X\n")


def test_astra_sim_rates_and_latencies_are_per_link() -> None:
    cluster = load(DATA / "astra_fc_ring_switch.yml")
    assert [(d.kind, d.size, d.gb_per_s, d.alpha_us) for d in cluster.dimensions] == [
        ("fully_connected", 4, 600.0, 0.05),
        ("ring", 8, 200.0, 0.5),
        ("switch", 2, 50.0, 4.0),
    ]
    assert {x.gb_per_s for x in cluster.links() if x.channel == "dim0"} == {200.0}
    assert {(x.gb_per_s, x.alpha_us) for x in cluster.links() if x.channel == "dim2"} == {(50.0, 2.0)}


ASTRA = {"topology": ["Ring"], "npus_count": [4], "bandwidth": [50.0], "latency": [500.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": ["Blob"]}, "$.topology[0]: unknown topology 'Blob'; choose from: Ring, FullyConnected, Switch"),
        ({"npus_count": [4, 4]}, "$.npus_count: has 2 entries, topology has 1"),
        ({"npus_count": [10**9]}, "$.npus_count[0]: must be 2..65536, not 1000000000"),
        ({"npus_count": ["four"]}, "$.npus_count[0]: must be a whole number, not "),
        ({"bandwidth": [-1.0]}, "$.bandwidth[0]: must be > 0, not -1"),
        ({"bandwidth": [float("nan")]}, "$.bandwidth[0]: must be > 0, not nan"),
        ({"latency": [float("inf")]}, "$.latency[0]: must be >= 0, not inf"),
        (
            {"topology": ["Ring"] * 3, "npus_count": [60000] * 3, "bandwidth": [1.0] * 3, "latency": [1.0] * 3},
            "dimensions: sizes multiply to 216000000000000 devices, more than 65536",
        ),
        (
            {"topology": ["FullyConnected"], "npus_count": [60000]},
            "dimensions: they make 3599940000 links, more than",
        ),
    ],
)
def test_broken_astra_sim_files_are_refused_by_field(changes: dict[str, Any], message: str) -> None:
    text = json.dumps(ASTRA | changes).replace("NaN", ".nan").replace("Infinity", ".inf")
    with pytest.raises(InvalidInput, match=re.escape(message)):
        loads("# yaml\n" + text)


def test_taccl_known_topologies_become_presets_with_the_files_costs() -> None:
    cluster = load(f"{DATA / 'taccl_ndv2.json'}:2")
    nvlink = rates(cluster, "nvlink")
    assert nvlink["h0.gpu0", "h0.gpu1"] == pytest.approx(1000 / 23)
    assert nvlink["h1.gpu0", "h1.gpu2"] == pytest.approx(1000 / 46)
    assert rates(cluster, "rdma")["h0.nic0", "fabric"] == pytest.approx(1000 / 105)
    small = load(f"{DATA / 'taccl_dgx2_32KB.json'}:2")
    assert rates(small, "nvlink")["h0.gpu0", "h0.nvswitch"] == pytest.approx(32_000 / 0.25 / 1000)
    assert neighbors(small, "h0.nic3") == {"h0.gpu6", "h0.gpu7", "fabric"}
    other = load(f"{DATA / 'taccl_dgx2_32KB.json'}:1,chunk_bytes=64000")
    assert rates(other, "nvlink")["gpu0", "nvswitch"] == pytest.approx(256.0)


def test_taccl_matrices_are_destination_first_and_count_parallel_links() -> None:
    cluster = load(DATA / "taccl_custom.json")
    found = rates(cluster)
    assert found["gpu3", "gpu2"] == pytest.approx(2 * 1000 / 40)
    assert found["gpu2", "gpu3"] == pytest.approx(1000 / 40)
    assert ("gpu0", "gpu2") not in found
    assert cluster.devices_forward


TACCL = {"name": "x", "gpus_per_node": 2, "alpha": 1.0, "links": [[0, 1], [1, 0]], "betas": [[0, 9], [9, 0]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 10**9}, "$.gpus_per_node: must be a whole number <= 1024"),
        ({"gpus_per_node": 3}, "$.links: must be 3 rows of 3 numbers"),
        ({"links": [[0, 1], [1]]}, "$.links: must be 2 rows of 2 numbers"),
        ({"links": [[1, 1], [1, 0]]}, "$.links[0][0]: a GPU is not linked with itself"),
        ({"links": [[0, -1], [1, 0]]}, "$.links[0][1]: must be > 0, not -1"),
        ({"betas": [[0, 0], [9, 0]]}, "$.betas[0][1]: must be > 0, not 0"),
        ({"betas": None}, "$.betas: is missing beside links"),
        ({"alpha": -1}, "$.alpha: must be >= 0, not -1"),
        ({"alpha": "slow"}, "$.alpha: must be a number, not "),
        ({"links": None}, "$.node_betas_list: is missing"),
        ({"links": None, "node_betas_list": [1, 2, 3]}, "$.node_betas_list: must be one beta (a switch) or two"),
        ({"links": None, "node_betas_list": [-3]}, "$.node_betas_list[0]: must be > 0, not -3"),
    ],
)
def test_broken_taccl_files_are_refused_by_field(changes: dict[str, Any], message: str) -> None:
    loads(json.dumps(TACCL))
    with pytest.raises(InvalidInput, match=re.escape(message)):
        loads(json.dumps(TACCL | changes))


def test_taccl_needs_the_remote_costs_only_for_several_hosts() -> None:
    text = json.dumps(TACCL | {"nics_per_node": 1})
    assert loads(text).num_hosts == 1
    with pytest.raises(InvalidInput, match=r"\$.remote_alpha: must be >= 0, not -1"):
        loads(text, nodes=2)
