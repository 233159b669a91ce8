"""Which program is chosen: by hosts, by a cluster, from a table; the same for equal input, and with reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import AllReduce, Cluster, InvalidInput
from stretto.runtime.select import Selector, rules
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


def crossing(kind: str, hosts: str) -> int:
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


def test_hosts_of_different_sizes_fall_back_with_a_reason() -> None:
    pick = Selector(range(4), "aaab").pick("all_reduce", 1 << 20)
    assert pick.program.name.startswith("ring")
    assert ("hierarchical", "needs as many ranks on every host") in pick.rejected


def test_a_short_broadcast_takes_few_steps_and_a_long_one_a_pipeline() -> None:
    selector = Selector(range(8), "abababab")
    assert selector.pick("broadcast", 100).program.name.startswith("binomial")
    assert selector.pick("broadcast", 1 << 24).program.name.startswith("chain")


def test_on_a_cluster_the_fastest_of_the_library_is_taken() -> None:
    cluster = Cluster.preset("ring", nodes=8)
    selector = Selector(range(8), "a" * 8, cluster=cluster)
    small, large = selector.pick("all_gather", 256), selector.pick("all_gather", 64 << 20)
    assert "predicted" in small.why and cluster.name in small.why
    assert large.program.name.startswith("ring")
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
