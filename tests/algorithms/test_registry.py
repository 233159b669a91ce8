# SPDX-License-Identifier: Apache-2.0
"""Names, options and errors of the registry, and what it takes from a cluster."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from stretto import MB, Cluster, InvalidInput, Link, Node, Program, algorithm, simulate
from stretto.algorithms import NAMES, Algorithm, algorithms, collective_kind, defined_for
from stretto.algorithms.base import MAX_NAME
from stretto.algorithms.orders import direct_speed


def test_every_entry_describes_itself() -> None:
    assert [entry.name for entry in algorithms()] == list(NAMES)
    for entry in algorithms():
        assert entry.summary and entry.where and entry.collectives
        assert entry.chunks >= 1
        module = import_module(f"stretto.algorithms.{entry.name}")
        assert isinstance(module.ALGORITHM, Algorithm)
        assert "Cost" in (module.__doc__ or "")


def test_collectives_may_be_spelled_in_several_ways() -> None:
    for text in ("all_gather", "allgather", "AllGather", "all-gather"):
        assert collective_kind(text) == "all_gather"
    assert algorithm("ring", "allreduce", 4) == algorithm("ring", "all_reduce", 4)


def test_options_may_be_text_as_from_a_command_line() -> None:
    typed = algorithm("hierarchical", "all_reduce", 16, dims=(8, 2), inside=("ring", "direct"))
    assert algorithm("hierarchical", "all_reduce", 16, dims="8x2", inside="ring,direct") == typed
    assert algorithm("hierarchical", "all_reduce", 4, dims=4) == algorithm("hierarchical", "all_reduce", 4, dims=(4,))
    order = algorithm("ring", "all_gather", 4, order=(0, 2, 1, 3))
    assert algorithm("ring", "all_gather", 4, order="0,2,1,3") == order
    assert algorithm("ring", "all_gather", 4, order=np.array([0, 2, 1, 3])) == order


def test_only_algorithms_that_are_defined_are_offered() -> None:
    assert "recursive_doubling" in defined_for("all_gather", 8)
    assert "recursive_doubling" not in defined_for("all_gather", 6)
    assert "hierarchical" not in defined_for("all_reduce", 7)
    assert defined_for("permute", 3) == ["direct"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "rings"}, "unknown algorithm 'rings'; choose from: ring, recursive_doubling"),
        ({"collective": "all_sum"}, "unknown collective 'all_sum'; choose from: all_gather"),
        ({"collective": "broadcast"}, "ring does not do broadcast; it does all_gather, reduce_scatter, all_reduce"),
        ({"ring": 2}, "unknown option of ring 'ring'; choose from: directions, rings, strides, order"),
        ({"directions": 3}, "unknown directions '3'; choose from: 1, 2"),
        ({"chunks": 0}, "chunks: must be 1"),
        ({"rings": "two"}, "rings: must be a whole number, not 'two'"),
        ({"rings": True}, "rings: must be a whole number, not True"),
        ({"order": "a,b"}, "order: must be whole numbers such as 4,2, not 'a,b'"),
        ({"order": 1.5}, "order: must be whole numbers"),
        ({"rings": 0}, "rings: must be >= 1, not 0"),
        ({"strides": (2,)}, r"strides\[0\]: 2 and 8 ranks share a factor"),
        ({"strides": (1, 3), "rings": 3}, "strides: gives 2 rings"),
        ({"order": (0, 1, 2)}, "order: must name each rank 0..7 once"),
        ({"order": (0, 1, 2, 3, 4, 5, 6, 6)}, "order: must name each rank 0..7 once"),
        ({"ranks": 0}, "ranks: must be 1"),
        ({"ranks": (0, 1, 1)}, "ranks: must be distinct"),
        ({"root": 3}, "root: all_reduce has no root"),
        ({"name": "hierarchical", "dims": (3, 2)}, "dims: 3x2 does not make 8 ranks"),
        ({"name": "hierarchical", "ranks": 7}, "ranks: hierarchical needs ranks = local x hosts"),
        ({"name": "hierarchical", "inside": ("ring",)}, "inside: needs one name, or one per dimension"),
        ({"name": "hierarchical", "inside": "tree"}, "unknown inside 'tree'; choose from: ring, direct"),
        ({"name": "hierarchical", "ranks": 6, "dims": (3, 2), "inside": "halving_doubling"}, r"inside\[0\]: "),
        ({"name": "halving_doubling", "largest": "middle"}, "unknown largest 'middle'; choose from: near, far"),
        ({"name": "direct", "steps": 3}, "unknown steps '3'; choose from: 1, 2"),
        ({"name": "direct", "ranks": 513}, "ranks: direct all_reduce takes at most 512 ranks"),
        ({"name": "chain", "collective": "broadcast", "root": 8}, "root: must be a rank 0..7, not 8"),
        ({"name": "pairwise", "collective": "all_to_all", "ranks": 6, "pattern": "xor"}, "pattern: xor needs"),
        ({"name": "two_step", "collective": "all_to_all", "local": 3}, "local: 8 ranks cannot be cut"),
        ({"name": "two_step", "collective": "all_to_all", "ranks": 5}, "ranks: two_step needs ranks"),
        ({"name": "recursive_doubling", "collective": "all_gather", "ranks": 6}, "needs a power of two, not 6"),
        ({"name": "direct", "collective": "permute", "pairs": [(0, 9)]}, "pairs: ranks must be 0..7"),
        ({"name": "direct", "collective": "permute", "pairs": [3]}, "pairs: must be pairs of ranks"),
        ({"name": "direct", "collective": "all_to_all_v", "counts": 3}, "counts: must be rows of numbers"),
        ({"name": "direct", "collective": "all_to_all_v", "counts": [[1]]}, "counts: must be 8 rows"),
        ({"ranks": 100_000}, "ranks, chunks: 20000000000 chunks would be moved"),
        ({"rings": 1 << 40}, "ranks, chunks: .* chunks would be moved"),
        ({"chunks": 1 << 40}, "chunks: must be 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named_with_the_valid_choices(arguments: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"name": "ring", "collective": "all_reduce", "ranks": 8} | arguments
    with pytest.raises(InvalidInput, match=message) as caught:
        algorithm(call.pop("name"), call.pop("collective"), call.pop("ranks"), **call)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_programs_that_no_memory_holds_are_refused_before_anything_is_allocated(name: str) -> None:
    kind = next(entry for entry in algorithms() if entry.name == name).collectives[0]
    with pytest.raises(InvalidInput, match=r"would be moved|takes at most"):
        algorithm(name, kind, 1 << 16, chunks=1 << 20)


def test_a_subset_of_devices_runs_the_same_program_elsewhere() -> None:
    here = algorithm("halving_doubling", "all_reduce", 4)
    there = algorithm("halving_doubling", "all_reduce", (1, 3, 5, 7))
    assert there.collective.ranks == (1, 3, 5, 7)
    assert there.num_transfers == here.num_transfers
    np.testing.assert_array_equal(there.src, here.src)
    cluster = Cluster.preset("fully_connected", nodes=8)
    assert simulate(there, cluster, nbytes=MB).total_us == simulate(here, cluster, nbytes=MB).total_us


def slowest_link(program: Program, cluster: Cluster) -> float:
    """GB/s of the slowest direct link in use; 0 where a message has none."""
    speed = direct_speed(cluster, program.collective.ranks)
    return float(speed[program.src, program.dst].min())


def test_on_ndv2_the_ring_follows_the_double_nvlinks() -> None:
    cluster = Cluster.preset("ndv2", nodes=1)
    program = algorithm("ring", "all_reduce", 8, cluster=cluster)
    plain = algorithm("ring", "all_reduce", 8)
    assert slowest_link(program, cluster) == direct_speed(cluster, tuple(range(8))).max()
    assert "order=" in program.name
    fast, slow = (simulate(p, cluster, nbytes=64 * MB).total_us for p in (program, plain))
    assert fast < 0.6 * slow


def test_on_two_hosts_the_order_stays_inside_a_host_as_long_as_it_can() -> None:
    cluster = Cluster.preset("ndv2", nodes=2)
    for name, kind in (("ring", "all_gather"), ("chain", "broadcast")):
        program = algorithm(name, kind, 16, cluster=cluster)
        outside = program.src // 8 != program.dst // 8
        pairs = set(zip(program.src[outside].tolist(), program.dst[outside].tolist(), strict=True))
        assert len(pairs) == (2 if name == "ring" else 1)


def test_several_rings_leave_a_host_from_different_devices() -> None:
    cluster = Cluster.preset("dgx2", nodes=2)
    program = algorithm("ring", "all_reduce", 32, cluster=cluster, rings=8)
    outside = program.src // 16 != program.dst // 16
    assert len(set(program.src[outside].tolist())) == 16
    one = algorithm("ring", "all_reduce", 32, cluster=cluster)
    fast, slow = (simulate(p, cluster, nbytes=256 * MB).total_us for p in (program, one))
    assert fast < slow / 5


def test_two_rings_on_one_box_share_no_more_links_than_they_must() -> None:
    cluster = Cluster.preset("fully_connected", nodes=8)
    program = algorithm("ring", "all_gather", 8, cluster=cluster, rings=3)
    used = [
        set(zip(program.src[lane].tolist(), program.dst[lane].tolist(), strict=True))
        for lane in (program.lane == i for i in range(3))
    ]
    assert len(used[0] | used[1] | used[2]) == 24


def test_dimensions_come_from_the_cluster() -> None:
    torus = Cluster.preset("torus", nodes=16)
    assert "dims=4x4" in algorithm("hierarchical", "all_reduce", 16, cluster=torus).name
    hosts = Cluster.preset("dgx2", nodes=3)
    assert "dims=16x3" in algorithm("hierarchical", "all_reduce", 48, cluster=hosts).name
    for name in ("two_step", "three_step"):
        assert "local=16" in algorithm(name, "all_to_all", 48, cluster=hosts).name
    explicit = algorithm("hierarchical", "all_reduce", 48, cluster=hosts, dims=(6, 8))
    assert "dims=6x8" in explicit.name


def test_ranks_that_are_not_in_host_order_are_still_grouped_by_host() -> None:
    cluster = Cluster.preset("dgx2", nodes=2)
    devices = tuple(device for pair in zip(range(4), range(16, 20), strict=True) for device in pair)
    program = algorithm("two_step", "all_to_all", devices, cluster=cluster)
    program.verify()
    host = cluster.node_host[np.array(devices)]
    outside = host[program.src] != host[program.dst]
    assert np.count_nonzero(outside) == 8


def test_uneven_hosts_leave_the_choice_to_the_algorithm() -> None:
    nodes = [Node(name=f"d{i}", host=min(i, 1)) for i in range(4)]
    links = [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=1.0) for a in range(4) for b in range(4) if a != b]
    cluster = Cluster.build("uneven", nodes=nodes, links=links)
    program = algorithm("hierarchical", "all_reduce", 4, cluster=cluster)
    assert "dims=2x2" in program.name
    program.verify()


def test_devices_that_the_cluster_lacks_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"has only devices 0\.\.3"):
        algorithm("ring", "all_reduce", 5, cluster=Cluster.preset("ring", nodes=4))


@pytest.mark.parametrize("shape", ["mesh", "torus", "hypercube", "ring"])
def test_on_regular_networks_the_ring_uses_direct_links_only(shape: str) -> None:
    cluster = Cluster.preset(shape, nodes=16)
    assert slowest_link(algorithm("ring", "all_reduce", 16, cluster=cluster), cluster) > 0


def test_names_fit_the_file_formats() -> None:
    cluster = Cluster.preset("ndv2", nodes=4)
    for name, kind in (("ring", "all_reduce"), ("hierarchical", "all_reduce"), ("two_step", "all_to_all")):
        assert len(algorithm(name, kind, 32, cluster=cluster, chunks=16).name) <= MAX_NAME
