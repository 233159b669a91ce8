# SPDX-License-Identifier: Apache-2.0
"""Which program is chosen: by hosts, by a cluster, from a table; the same for equal input, and with reasons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto import AllReduce, Cluster, InvalidInput
from stretto.lab.layout import LabLayout
from stretto.programs.formats import save_program
from stretto.runtime.torch_backend.selection import Selector, rules
from stretto.synthesis import steiner
from stretto.synthesis.table import select

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab", "aaab", "abcd", "aaa"])
def test_every_collective_has_a_verified_program_on_any_hosts(kind: str, hosts: str) -> None:
    pick = Selector(range(len(hosts)), hosts).pick(kind, 1 << 20, root=1)
    assert pick.program.collective.kind == kind
    assert pick.program.collective.num_ranks == len(hosts)
    assert pick.why
    pick.program.verify()


def test_one_host_goes_straight_and_several_go_by_dimension() -> None:
    near = Selector(range(8), "aaaaaaaa").pick("all_reduce", 1 << 20)
    far = Selector(range(8), "aaaabbbb").pick("all_reduce", 1 << 20)
    assert near.program.name.startswith("direct")
    assert far.program.name.startswith("hierarchical")


def crossing(kind: str, hosts: Sequence[str]) -> int:
    """Chunks that go from one host to another."""
    program = Selector(range(len(hosts)), hosts).pick(kind, 1 << 20).program
    crossing = 0
    for transfer, (src, dst) in enumerate(zip(program.src.tolist(), program.dst.tolist(), strict=True)):  # type: ignore[union-attr]
        if hosts[src] != hosts[dst]:
            crossing += int(program.chunk_ptr[transfer + 1] - program.chunk_ptr[transfer])  # type: ignore[union-attr]
    return crossing


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_interleaved_ranks_send_no_more_between_hosts_than_ranks_in_order(kind: str) -> None:
    assert crossing(kind, "abababab") == crossing(kind, "aaaabbbb")


def test_sizes_between_two_powers_of_two_share_a_program() -> None:
    selector = Selector(range(4), "aabb")
    assert selector.pick("all_reduce", 1025) is selector.pick("all_reduce", 2048)
    assert selector.pick("all_reduce", 1024) is not selector.pick("all_reduce", 2048)
    assert selector.pick("all_reduce", 1) is selector.pick("all_reduce", 256)


def test_hosts_of_different_sizes_still_send_each_byte_between_them_once() -> None:
    pick = Selector(range(4), "aaab").pick("all_reduce", 1 << 20)
    # The sum of one host goes one way and the result the other: the tensor once in each direction.
    assert crossing("all_reduce", "aaab") == 2 * pick.program.collective.num_chunks
    assert any(name == "ring" and reason.startswith("predicted") for name, reason in pick.rejected)


def test_between_four_hosts_a_ring_of_hosts_keeps_every_uplink_to_one_flow_in_each_direction() -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        pick = Selector(range(8), "abcdabcd").pick(kind, 4 << 20)
        assert "inside=direct.ring" in pick.program.name
        assert any("direct.direct" in name and "asks more of the links" in reason for name, reason in pick.rejected)


def test_what_waits_for_slices_of_others_is_seen_to_be_slower() -> None:
    """In one piece halving and doubling looks as fast as a ring; its stages hold each other up on a shared uplink."""
    rejected = dict(Selector(range(8), "aabbccdd").pick("reduce_scatter", 4 << 20).rejected)
    (reason,) = {why for name, why in rejected.items() if "inside=halving_doubling" in name}
    assert reason.startswith("predicted") and "asks more" not in reason


def test_equal_input_gives_equal_choices() -> None:
    one, two = Selector(range(6), "aabbcc"), Selector(range(6), "aabbcc")
    for kind in KINDS:
        for nbytes in (1 << 10, 1 << 22):
            assert one.pick(kind, nbytes) == two.pick(kind, nbytes)


def test_more_ranks_than_are_simulated_go_by_a_rule() -> None:
    many = Selector(range(72), [str(rank // 8) for rank in range(72)])
    pick = many.pick("all_reduce", 1 << 20)
    assert pick.program.name.startswith("hierarchical(dims=8x9") and "too many to simulate" in pick.why
    uneven = Selector(range(72), ["a"] * 70 + ["b", "b"]).pick("all_reduce", 1 << 20)
    assert uneven.program.name.startswith("ring")
    assert ("hierarchical", "needs as many ranks on every host") in uneven.rejected


def test_a_short_broadcast_takes_few_steps_and_a_long_one_a_pipeline() -> None:
    selector = Selector(range(8), "aaaabbbb")
    assert selector.pick("broadcast", 100).program.name.startswith("binomial")
    assert selector.pick("broadcast", 1 << 24).program.name.startswith("chain")


def test_a_group_inside_one_host_of_a_cluster_goes_straight() -> None:
    cluster = LabLayout.of(hosts=2, ranks_per_host=4).cluster()
    pick = Selector([4, 5, 6, 7], "bbbb", cluster=cluster).pick("all_gather", 1 << 20)
    assert pick.program.name == "direct" and pick.why == "all ranks on one host"
    assert Selector(range(8), "aaaabbbb", cluster=cluster).pick("all_gather", 1 << 20).why.endswith("on lab-2x4")


def test_on_a_cluster_the_fastest_of_the_library_is_taken() -> None:
    cluster = Cluster.preset("ring", nodes=8)
    selector = Selector(range(8), "a" * 8, cluster=cluster)
    small, large = selector.pick("all_gather", 256), selector.pick("all_gather", 64 << 20)
    assert "predicted" in small.why and cluster.name in small.why
    assert large.program.name.startswith("swing")  # both directions at once, and short ways
    assert all(reason.startswith("predicted") for _, reason in large.rejected)
    assert len(large.rejected) >= 2


def test_a_group_of_a_cluster_uses_its_own_devices() -> None:
    selector = Selector([1, 3, 5, 7], "aaaa", cluster=Cluster.preset("ring", nodes=8))
    assert selector.pick("all_reduce", 1 << 20).program.collective.ranks == (1, 3, 5, 7)


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidInput, match="STRETTO_CLUSTER: ring:4 has 4 devices, too few for rank 5"):
        Selector([4, 5], "aa", cluster=Cluster.preset("ring", nodes=4))


def test_a_table_comes_first(tmp_path: Path) -> None:
    cluster = Cluster.preset("ring", nodes=4)
    table = select(AllReduce(4, in_place=True), cluster, [1 << 10, 1 << 20], makers=["library"], cache=False)
    table.save(tmp_path / "all_reduce", suffix=".txt")
    selector = Selector(range(4), "aaaa", table=tmp_path)
    pick = selector.pick("all_reduce", 1 << 20, in_place=True)
    assert "STRETTO_TABLE" in pick.why
    assert pick.program == table.best(1 << 20)
    other = Selector(range(3), "aaa", table=tmp_path).pick("all_reduce", 1 << 20, in_place=True)
    assert any("is for 4 ranks, not 3" in reason for _, reason in other.rejected)
    assert "one host" in other.why


def test_a_program_that_needs_outsiders_is_not_run_by_a_group_alone(tmp_path: Path) -> None:
    """Two opposite devices of a ring pass through the two between them, which take no part in the group's calls."""
    ring = Cluster.preset("ring", nodes=4)
    made = steiner.synthesize(AllReduce((0, 2), in_place=True), ring, helpers=(1, 3), nbytes=1 << 20, budget_s=1.0)
    assert made.collective.helpers
    folder = tmp_path / "all_reduce"
    folder.mkdir()
    save_program(made, folder / "x.txt")
    rows = [{"file": "x.txt", "min_bytes": 0, "max_bytes": 0}]
    (folder / "index.json").write_text(json.dumps({"collective": "all_reduce", "rows": rows}))
    for ranks in (2, made.collective.num_ranks):
        pick = Selector(range(ranks), "a" * ranks, table=tmp_path).pick("all_reduce", 1 << 20, in_place=True)
        assert not pick.from_table
        assert any("helpers outside the group" in reason for _, reason in pick.rejected)


def test_rules_say_what_decides(tmp_path: Path) -> None:
    assert rules({}).text.startswith("stretto ")
    named = rules({"STRETTO_CLUSTER": "ring:4"})
    assert named.cluster is not None and named.cluster.digest in named.text
    with pytest.raises(InvalidInput, match="has no index"):
        rules({"STRETTO_TABLE": str(tmp_path)})
    (tmp_path / "index.json").write_text('{"collective": "all_reduce", "rows": [{"file": "../x", "min_bytes": 0}]}')
    with pytest.raises(InvalidInput, match="max_bytes"):
        rules({"STRETTO_TABLE": str(tmp_path)})
    (tmp_path / "index.json").write_text(
        '{"collective": "all_reduce", "rows": [{"file": "../x", "min_bytes": 0, "max_bytes": 0}]}'
    )
    with pytest.raises(InvalidInput, match="must be a name in the same folder"):
        rules({"STRETTO_TABLE": str(tmp_path)})
