# SPDX-License-Identifier: Apache-2.0
"""Lowering: one program of a whole expression, and what `check` says about expressions that are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from stretto import AllReduce, AllToAll, InvalidInput, Program, VerificationError, algorithm
from stretto.collectives import AllToAllV, Permute, ReduceScatter
from stretto.planner.algebra.lowering import check, default_algorithm, leaf_programs, lower
from stretto.planner.algebra.motif import motif
from stretto.planner.algebra.notation import parse
from stretto.planner.algebra.rules import apply, parse_step, rewrite_all


def test_a_single_motif_is_the_library_algorithm_itself() -> None:
    for kind, name in (("AR", "ring"), ("AA", "direct"), ("RE", "direct")):
        whole = motif(kind, 6, 600)
        assert lower(whole) == algorithm(name, whole.collective_kind, 6, root=0 if kind == "RE" else None)


def test_ring_all_reduce_by_motifs_is_the_ring_all_reduce() -> None:
    whole = motif("AR", 8, 1024)
    made = lower(apply(whole, "ring"), whole)
    assert made.replace(name="ring") == algorithm("ring", "all_reduce", 8)


def test_even_cuts_give_the_library_collective_and_others_give_uneven_shares() -> None:
    whole = motif("AR", 4, 64)
    assert lower(apply(whole, "segment", parts=2), whole).collective == AllReduce(4, chunks=8)
    odd = motif("AR", 4, 65)
    shares = lower(odd).collective.chunk_share * 65
    assert np.allclose(shares, [17, 16, 16, 16])
    assert lower(motif("RS", (3, 1, 2), 12)).collective == ReduceScatter((3, 1, 2))
    assert lower(motif("AA", (3, 1, 2), 12)).collective == AllToAll((3, 1, 2))
    assert lower(motif("SD", (3, 1), 12)).collective == Permute((3, 1), [(0, 1)])


def test_a_window_is_an_all_to_all_of_what_it_sends() -> None:
    first, second = apply(motif("AA", 4, 10), "spline", n=2).leaves
    counts = [[10.0 if (q - r) % 4 in (2, 3) else 0.0 for q in range(4)] for r in range(4)]
    made = lower(second)
    assert made.collective == AllToAllV(4, counts)
    assert made.num_transfers == 8
    assert lower(first).num_transfers == 4


def test_a_rank_without_a_shard_has_nothing_to_send() -> None:
    made = lower(motif("AG", 4, 2))
    assert made.collective.num_chunks == 2
    assert made.num_transfers == 2 * 3


def test_pacing_of_an_algorithm_survives_composing_and_splining() -> None:
    whole = motif("AA", 6, 30)
    paced = lower(whole, algorithms={"AA": "pairwise"})
    assert paced == algorithm("pairwise", "all_to_all", 6)
    windows = apply(whole, "spline", n=3)
    made = check(windows, whole, algorithms={"AA": "pairwise"})
    # Every rank sends in rounds 1, 2 and 3, 4, 5; the first round of each window waits for nothing.
    assert made.num_transfers == 30
    assert len(made.after) == 6 + 12
    skipped = lower(parse("AA(T[(i+4)%8:(i+6)%8, 0:64], PG[0:8])"), algorithms={0: "pairwise"})
    skipped.verify()
    assert len(skipped.after) > 0


def test_programs_and_names_can_be_bound_to_motifs() -> None:
    whole = motif("AR", 8, 640)
    expr = apply(whole, "tree", n=4)
    own = algorithm("recursive_doubling", "all_reduce", 2, chunks=5)
    made = check(expr, whole, algorithms={"RE": "chain", 2: own, 4: "binomial"})
    names = [leaf.program.name for leaf in leaf_programs(expr, algorithms={"RE": "chain", 2: own, 4: "binomial"})]
    assert names == ["chain(chunks=8)", "chain(chunks=8)", own.name, "direct", "binomial"]
    assert made.num_transfers == 2 * 3 * 8 + own.num_transfers + 3 + 3
    with pytest.raises(InvalidInput, match="is of all_reduce over 2 ranks"):
        lower(expr, whole, algorithms={0: own})
    with pytest.raises(InvalidInput, match="pairwise does not do all_reduce"):
        lower(expr, whole, algorithms={"AR": "pairwise"})


def test_uneven_chunks_of_a_bound_program_cut_the_payload_likewise() -> None:
    plain = algorithm("direct", "all_reduce", 2, steps=1, chunks=2)
    share = np.array([0.75, 0.25])
    c = plain.collective
    fields = {key: getattr(c, key) for key in c.__dataclass_fields__}
    uneven = plain.replace(collective=type(c)(**(fields | {"chunk_share": share})))
    made = check(motif("AR", 2, 100), algorithms={0: uneven})
    assert np.allclose(made.collective.chunk_share, share)


def test_leaves_know_their_size_their_ranks_and_what_they_wait_for() -> None:
    expr = apply(motif("AR", (4, 5, 6, 7), 100), "hierarchical", local=2)
    leaves = leaf_programs(expr)
    assert [leaf.nbytes for leaf in leaves] == [100, 100, 50, 50, 100, 100]
    assert [leaf.program.collective.ranks for leaf in leaves][:3] == [(4, 5), (6, 7), (4, 6)]
    assert [leaf.after for leaf in leaves] == [(), (), (0, 1), (0, 1), (2, 3), (2, 3)]
    assert [leaf.path for leaf in leaves][2] == (1, 0)


def test_steps_of_a_sequence_only_wait_for_the_data_they_need() -> None:
    whole = motif("BC", 4, 100)
    expr = parse("BC_0(T[0:100], PG[0:2]) -> BC_0(T[0:100], PG[0,2]) || BC_1(T[0:100], PG[1,3])")
    made = check(expr, whole)
    assert [made.after_of(t).tolist() for t in range(3)] == [[], [], [0]]


def test_an_ordinary_default_is_taken_only_where_it_is_defined() -> None:
    assert default_algorithm(motif("AR", 7, 10)) == "ring"
    assert default_algorithm(motif("SD", 2, 10)) == "direct"


def test_a_terabyte_costs_no_more_than_a_kilobyte() -> None:
    whole = motif("AR", 16, (1 << 40) + 3)
    expr = rewrite_all(apply(whole, "segment", parts=3), "hierarchical", local=4)
    made = check(expr, whole)
    assert made.collective.num_chunks < 100
    assert made.collective.chunk_share.sum() == pytest.approx(1.0)


ALL = "AR(T[0:64], PG[4:8])"


@pytest.mark.parametrize(
    ("text", "original", "message"),
    [
        ("RE_4(T[0:64], PG[4:8]) -> BC_5(T[0:64], PG[4:8])", ALL,
         "after motif 1, BC_5(T[0:64], PG[4:8]): P_4 ends without P_4's part of T[0:64]"),
        ("RE_4(T[0:64], PG[4:8]) -> BC_4(T[0:64], PG[4:7])", ALL,
         "no motif writes there: P_7 ends without P_4's part of T[0:64]"),
        ("RE_4(T[0:64], PG[4:7]) -> BC_4(T[0:64], PG[4:8])", ALL,
         "after motif 0, RE_4(T[0:64], PG[4:7]): P_4 ends without P_7's part of T[0:64] (and 3 more)"),
        ("RE_4(T[0:64], PG[4:8]) || BC_4(T[0:64], PG[4:8])", ALL,
         "motif 1, BC_4(T[0:64], PG[4:8]) and motif 0, RE_4(T[0:64], PG[4:8]) are in parallel, but the second reads"),
        ("AR(T[0:40], PG[4:8]) || AR(T[32:64], PG[4:8])", ALL,
         "motif 0, AR(T[0:40], PG[4:8]) and motif 1, AR(T[32:64], PG[4:8]) are in parallel, but both write T[32:40]"),
        ("AR(T[0:40], PG[4:8]) -> AR(T[32:64], PG[4:8])", ALL,
         "motif 1, AR(T[32:64], PG[4:8]): a transfer of motif 1 adds"),
        ("AR(T[0:32], PG[4:8])", ALL, "no motif writes there: P_4 ends without P_5's part of T[32:64]"),
        ("RS(T[0:64], PG[4:8]) -> AG(T[0:16|32:48|16:32|48:64], PG[4:8])", ALL, "AG(T[0:16|32:48|16:32|48:64]"),
        ("AG(T[0:64], PG[4:8]) -> RS(T[0:64], PG[4:8])", ALL, "motif 1, RS(T[0:64], PG[4:8]): a transfer of motif 1"),
        ("AR(T[0:65], PG[4:8])", ALL, "AR(T[0:65], PG[4:8]): works on more than the payload of AR(T[0:64], PG[4:8])"),
        ("AR(T[0:64], PG[3:8])", ALL, "AR(T[0:64], PG[3:8]): process 3 takes no part in AR(T[0:64], PG[4:8])"),
        ("AA(T[4:8, 0:64], PG[4:8])", ALL, "has no place in AR(T[0:64], PG[4:8]); only an AA is made of AAs"),
        ("BC_0(T[0:8], PG[0:3]) || BC_0(T[0:8], PG[0,2:4])", "BC_0(T[0:8], PG[0:4])",
         "motif 0, BC_0(T[0:8], PG[0:3]) and motif 1, BC_0(T[0:8], PG[0,2:4]) are in parallel, but both write T[0:8]"),
        ("AA(T[(i+0)%4:(i+2)%4, 0:8], PG[0:4])", "AA(T[0:4, 0:8], PG[0:4])",
         "no motif writes there: P_0 ends without T_1[0, 0:8]"),
        ("AA(T[(i+0)%4:(i+3)%4, 0:8], PG[0:4]) || AA(T[(i+2)%4:(i+4)%4, 0:8], PG[0:4])", "AA(T[0:4, 0:8], PG[0:4])",
         "both write T_2[0, 0:8] of P_0"),
        ("AA(T[0:4, 0:9], PG[0:4])", "AA(T[0:4, 0:8], PG[0:4])", "works on more than the payload"),
        ("AA(T[4,1:4, 0:8], PG[0:4])", "AA(T[0:4, 0:8], PG[0:4])", "process 4 takes no part"),
        ("AA(T[0:4, 0:8], PG[0:4])", "AA(T[(i+0)%4:(i+2)%4, 0:8], PG[0:4])", "moves a block that"),
        ("AA(T[1,0, 0:8], PG[0:2])", "AA(T[0:2, 0:8], PG[0:2])", "P_0 ends without T_1[0, 0:8]"),
    ],
)  # fmt: skip
def test_wrong_expressions_are_refused_and_the_motif_is_named(text: str, original: str, message: str) -> None:
    whole = parse(original)
    with pytest.raises(VerificationError) as refused:
        check(parse(text), whole)  # type: ignore[arg-type]
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_several_motifs_need_to_be_told_what_they_are() -> None:
    with pytest.raises(InvalidInput, match="original: several motifs do not say"):
        check(parse("AR(T[0:4], PG[0:2]) || AR(T[4:8], PG[0:2])"))


def test_a_realistic_option_over_128_ranks_is_proved() -> None:
    whole = motif("AR", 128, 1 << 30)
    expr = parse_step("hierarchical:8")(parse_step("segment:2")(whole))
    made: Program = check(expr, whole)
    assert made.num_transfers == 2 * (2 * 128 * 7 + 8 * 2 * 15 * 16)
