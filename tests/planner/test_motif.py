# SPDX-License-Identifier: Apache-2.0
"""Motifs and expressions as values: what they are made of, what they refuse, what they say about themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto import InvalidInput
from stretto.planner.algebra.motif import Motif, Par, Seq, motif, motif_of, par, seq
from stretto.planner.algebra.notation import parse
from stretto.planner.algebra.spans import cut, cut_sizes, even_sizes, joined, measure


def test_shards_are_even_pieces_in_rank_order_unless_given() -> None:
    assert motif("RS", 3, 7).shards == (((0, 3),), ((3, 5),), ((5, 7),))
    assert motif("RS", 3, 2).shards == (((0, 1),), ((1, 2),), ())
    given = Motif(kind="AG", ranks=(0, 1), shards=(((4, 6), (0, 2)), ((2, 4),)))
    assert given.shards == (((0, 2), (4, 6)), ((2, 4),))
    assert given.spans == ((0, 6),)


def test_equal_motifs_are_equal_however_they_were_written() -> None:
    assert Motif(kind="AR", ranks=(0, 1), spans=((4, 8), (0, 4))) == motif("AR", 2, 8)
    assert Motif(kind="RS", ranks=(0, 1), shards=(((0, 4),), ((4, 8),))) == motif("RS", 2, 8)
    whole = motif("AA", 3, 8)
    assert whole == Motif(kind="AA", ranks=(0, 1, 2), spans=((0, 8),), window=(0, 3), held=((0,), (1,), (2,)))
    assert len({whole, replace(whole)}) == 1


def test_nbytes_is_the_larger_buffer_of_one_rank() -> None:
    assert motif("AR", 8, 1000).nbytes == motif("AG", 8, 1000).nbytes == 1000
    assert motif("AA", 8, 10).nbytes == 80
    assert replace(motif("AA", 8, 10), window=(2, 5)).nbytes == 30
    relayed = Motif(kind="AA", ranks=(0, 2), spans=((0, 10),), held=((0, 1), (2,)), bound=((0,), (1, 2, 3)))
    assert relayed.nbytes == max(2 * 4, 1 * 4, 1 * 3, 3 * 3) * 10
    lopsided = replace(relayed, window=(1, 2))
    assert lopsided.nbytes == max(2 * 3, 1 * 1) * 10


def test_a_comm_op_of_a_workload_becomes_a_motif() -> None:
    assert motif_of("all_to_all", (3, 5, 7), 10.0) == motif("AA", (3, 5, 7), 3)
    assert motif_of("broadcast", (3, 5, 7), 64.0, root=2) == motif("BC", (3, 5, 7), 64, root=7)
    assert motif_of("send", (4, 2), 9.0).ranks == (4, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: motif("XX", 4, 8), "unknown motif 'XX'; choose from: AR (all_reduce)"),
        (lambda: motif("AR", 4, 0), "AR: its payload is empty"),
        (lambda: motif("AR", 0, 8), "ranks: must be 1.."),
        (lambda: motif("AR", (), 8), "AR: ranks: must be 1.."),
        (lambda: motif("AR", (1, 2, 1), 8), "AR: ranks: names 1 twice"),
        (lambda: motif("BC", (1, 2), 8, root=0), "BC: its root must be one of its ranks, not 0"),
        (lambda: Motif(kind="BC", ranks=(1, 2), spans=((0, 8),)), "BC: its root must be one of its ranks, not missing"),
        (lambda: motif("AR", 2, 8, root=0), "AR: its root must be none, not 0"),
        (lambda: motif("SD", 3, 8), "SD: needs 2 ranks"),
        (lambda: Motif(kind="AR", ranks=(0, 1), spans=((0, 6), (4, 8))), "AR: its payload holds 4:6 twice"),
        (lambda: Motif(kind="RS", ranks=(0, 1), shards=(((0, 6),), ((4, 8),))), "RS: its payload holds 4:6 twice"),
        (lambda: Motif(kind="RS", ranks=(0, 1), shards=(((0, 6),),)), "RS: needs 2 shards, one per rank, not 1"),
        (lambda: Motif(kind="AR", ranks=(0,), shards=(((0, 6),),)), "AR: needs no shards, not 1"),
        (lambda: Motif(kind="AR", ranks=(0, 1), spans=((0, 6),), window=(0, 1)), "AR: window, held and bound"),
        (lambda: replace(motif("AA", 4, 8), window=(3, 5)), "AA: its window must lie within (i+0):(i+4)"),
        (lambda: replace(motif("AA", 2, 8), held=((0, 1), (1,))), "AA: held: names 1 twice"),
        (lambda: motif("AR", 2, 1 << 62), "AR: its payload must lie within"),
        (lambda: Par((motif("AR", 2, 8),)), "Par: needs at least 2 children, not 1"),
        (lambda: seq([]), "expression: has no motifs"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make: object, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        make()  # type: ignore[operator]
    assert message in str(refused.value)


def test_leaves_paths_depth_and_changes_at_a_path() -> None:
    a, b, c = (Motif(kind="AR", ranks=(0, 1), spans=((k, k + 1),)) for k in range(3))
    expr = seq([a, par([b, c])])
    assert expr.leaves == (a, b, c)
    assert [path for path, _ in expr.walk()] == [(0,), (1, 0), (1, 1)]
    assert expr.depth == 2
    assert expr.at((1, 1)) == c
    assert expr.map(lambda here: Seq((here, a)), at=(1, 0)) == Seq((a, Par((Seq((b, a)), c))))
    with pytest.raises(InvalidInput, match=r"path 1\.7: there is no child 7 at 1, which has 2"):
        expr.at((1, 7))


def test_flatten_draws_nested_joints_together_and_nothing_else() -> None:
    nested = parse("(AR(T[0:1], PG[0:2]) || AR(T[1:2], PG[0:2])) || (AR(T[2:3], PG[0:2]) -> AR(T[2:3], PG[0:2]))")
    assert str(nested.flatten()) == (
        "AR(T[0:1], PG[0:2]) || AR(T[1:2], PG[0:2]) || (AR(T[2:3], PG[0:2]) -> AR(T[2:3], PG[0:2]))"
    )
    assert nested.flatten().leaves == nested.leaves


def test_what_moves_nothing_is_left_out() -> None:
    moving, still = motif("AR", 2, 8), motif("AR", (5,), 8)
    assert par([still, moving]) == seq([moving, None]) == moving
    assert par([still, still]) == still


def test_a_motif_waits_for_the_last_ones_that_use_its_ranks() -> None:
    expr = parse(
        "RE_0(T[0:8], PG[0:2]) || RE_2(T[0:8], PG[2:4]) -> AR(T[0:8], PG[0,2]) -> "
        "BC_0(T[0:8], PG[0:2]) || BC_2(T[0:8], PG[2:4])"
    )
    assert expr.after == ((), (), (0, 1), (0, 2), (1, 2))
    apart = parse("AR(T[0:8], PG[0:2]) || AR(T[0:8], PG[2:4]) -> AR(T[0:8], PG[0:2]) || AR(T[0:8], PG[2:4])")
    assert apart.after == ((), (), (0,), (1,))


def test_sets_of_intervals_are_cut_by_what_they_cover() -> None:
    spans = ((0, 3), (10, 14), (20, 21))
    assert measure(spans) == 8
    assert cut(spans, 3) == (((0, 3),), ((10, 13),), ((13, 14), (20, 21)))
    assert cut_sizes(spans, [5, 3]) == (((0, 3), (10, 12)), ((12, 14), (20, 21)))
    assert joined([span for piece in cut(spans, 5) for span in piece]) == spans
    assert cut((), 2) == ((), ())
    assert sum(even_sizes(17, 5)) == 17


def test_a_huge_payload_costs_nothing() -> None:
    assert cut(((0, 1 << 40),), 3)[2] == ((733007751851, 1 << 40),)
