# SPDX-License-Identifier: Apache-2.0
"""Every rewriting is right: random rules, parameters, sizes and rank counts, nested, verify as the original."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import InvalidInput, VerificationError
from stretto.algorithms import defined_for
from stretto.planner.algebra.lowering import check, leaf_programs, lower
from stretto.planner.algebra.motif import KINDS, ROOTED, Expr, Motif, Par, Seq, motif, par, seq
from stretto.planner.algebra.notation import parse, show
from stretto.planner.algebra.rules import apply, entry, parse_step, rewrite_all, rule, rules, unregister, variants
from stretto.programs import interpret


@st.composite
def originals(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Motif:
    """A collective over 2..12 processes of any numbers in any order, of any small size."""
    kind = draw(st.sampled_from(kinds))
    count = 2 if kind == "SD" else draw(st.integers(2, 12))
    ranks = tuple(range(count))
    if draw(st.booleans()):
        ranks = tuple(draw(st.permutations(range(0, 3 * count, 3))))
    root = draw(st.sampled_from(ranks)) if kind in ROOTED else None
    return motif(kind, ranks, draw(st.integers(1, 200)), root=root)


@st.composite
def parameters_of(draw: st.DrawFn, name: str, leaf: Motif) -> dict[str, Any]:
    """Parameters for a rule on a motif, dividing or not."""
    count = len(leaf.ranks)
    if name in ("ring", "scatter"):
        return {}
    if name == "tree":
        return {"n": draw(st.integers(1, count + 1))}
    if name == "hierarchical":
        if draw(st.booleans()):
            return {"local": draw(st.integers(1, count + 1))}
        of = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        groups = [[rank for rank, group in zip(leaf.ranks, of, strict=True) if group == g] for g in range(4)]
        return {"groups": [group for group in groups if group]}
    one = draw(st.sampled_from(["parts", "n" if name == "spline" else "size"]))
    most = leaf.size if one == "size" else count if one == "n" else 5
    least = max(1, leaf.size // 6) if one == "size" else 1
    return {one: draw(st.integers(least, max(least, most)))}


@st.composite
def rewritings(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS), depth: int = 3) -> tuple[Motif, Expr]:
    """A collective, and an expression that rules made of it: any rule anywhere, `depth` times at most."""
    original = draw(originals(kinds))
    expr: Expr = original
    for _ in range(draw(st.integers(1, depth))):
        path, leaf = draw(st.sampled_from(list(expr.walk())))
        whole = leaf.kind != "AA" or leaf.whole
        fitting = [r.name for r in rules(leaf.kind) if whole or r.name != "hierarchical"]
        name = draw(st.sampled_from(fitting))
        expr = apply(expr, name, at=path, **draw(parameters_of(name, leaf)))
        if len(expr.leaves) > 60:
            break
    return original, expr


CASES = [(found.name, kind) for found in rules() for kind in found.kinds]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_rule_is_right_for_every_kind_it_serves(name: str, kind: str) -> None:
    for count in (2,) if kind == "SD" else (2, 3, 7, 12):
        whole = motif(kind, count, 50, root=count - 1 if kind in ROOTED else None)
        known: dict[str, list[dict[str, Any]]] = {
            "ring": [{}], "scatter": [{}],
            "segment": [{"parts": 3}, {"parts": 60}, {"size": 17}],
            "tree": [{"n": n} for n in (2, 3, 5, count)],
            "spline": [{"n": 2}, {"n": 5}, {"parts": 3}],
            "hierarchical": [{"local": n} for n in (1, 2, 3, 5, count)] + [{"groups": [range(1, count), [0]]}],
        }  # fmt: skip
        for parameters in known[name]:
            check(apply(whole, name, **parameters), whole)


@pytest.mark.parametrize("kind", list(KINDS))
def test_any_two_rules_may_follow_one_another(kind: str) -> None:
    known: dict[str, list[dict[str, Any]]] = {
        "ring": [{}], "scatter": [{}], "segment": [{"parts": 2}], "tree": [{"n": 2}],
        "spline": [{"n": 1}, {"parts": 2}], "hierarchical": [{"local": 2}],
    }  # fmt: skip
    whole = motif(kind, 2 if kind == "SD" else 5, 13)
    seen: set[Expr] = set()
    for first in rules(kind):
        for given_first in known[first.name]:
            once = apply(whole, first.name, **given_first)
            for path, leaf in once.walk():
                for second in rules(leaf.kind):
                    if leaf.kind == "AA" and not leaf.whole and second.name == "hierarchical":
                        continue
                    for given_second in known[second.name]:
                        twice = apply(once, second.name, at=path, **given_second)
                        if twice not in seen:
                            seen.add(twice)
                            check(twice, whole)
    assert len(seen) >= 2


@settings(max_examples=200, deadline=None)
@given(rewritings())
def test_random_rewritings_verify_as_the_original(made: tuple[Motif, Expr]) -> None:
    original, expr = made
    report = check(expr, original).verify()
    assert report.fifo_depth == 1


@settings(max_examples=80, deadline=None)
@given(rewritings(depth=2), st.randoms(use_true_random=False))
def test_they_do_so_with_any_algorithm_of_the_library(made: tuple[Motif, Expr], random: Any) -> None:
    original, expr = made
    names = {
        at: random.choice(defined_for("permute" if m.kind == "SD" else m.collective_kind, len(m.ranks)))
        for at, m in enumerate(expr.leaves)
    }
    check(expr, original, algorithms=names)


@settings(max_examples=40, deadline=None)
@given(rewritings(depth=2))
def test_they_compute_the_right_data_once_lowered_to_instructions(made: tuple[Motif, Expr]) -> None:
    original, expr = made
    streams = check(expr, original).lower()
    interpret.check(streams, fifo_depth=streams.verify().fifo_depth, seed=1)


@settings(max_examples=80, deadline=None)
@given(rewritings())
def test_each_motif_alone_is_a_collective_of_its_own(made: tuple[Motif, Expr]) -> None:
    _, expr = made
    for leaf in leaf_programs(expr):
        leaf.program.verify()
        c = leaf.program.collective
        assert c.ranks == leaf.motif.ranks
        share = [sum(c.chunk_share[chunks(r)]) for r in range(c.num_ranks) for chunks in (c.inputs, c.outputs)]
        assert max(share) == pytest.approx(1.0)


@settings(max_examples=150, deadline=None)
@given(rewritings())
def test_what_rules_make_prints_and_reads_back(made: tuple[Motif, Expr]) -> None:
    _, expr = made
    for text in (show(expr), show(expr, expand=True), show(expr, unicode=True)):
        assert parse(text) == expr


def without(expr: Expr, path: tuple[int, ...]) -> Expr:
    """The expression with one motif forgotten."""
    *above, last = path
    parent = expr.at(above)
    left = [child for at, child in enumerate(parent.children) if at != last]
    return expr.map(lambda here: (par if isinstance(here, Par) else seq)(left), at=above)


@settings(max_examples=60, deadline=None)
@given(rewritings(), st.data())
def test_a_forgotten_motif_is_noticed(made: tuple[Motif, Expr], data: st.DataObject) -> None:
    original, expr = made
    moving = [path for path, leaf in expr.walk() if path and lower(leaf).num_transfers]
    if moving:
        with pytest.raises(VerificationError):
            check(without(expr, data.draw(st.sampled_from(moving))), original)


@settings(max_examples=100, deadline=None)
@given(rewritings(tuple(kind for kind in KINDS if kind not in ("AA", "SD"))), st.data())
def test_a_forgotten_rank_is_noticed(made: tuple[Motif, Expr], data: st.DataObject) -> None:
    original, expr = made
    path, leaf = data.draw(st.sampled_from(list(expr.walk())))
    needed = [
        at
        for at, rank in enumerate(leaf.ranks)
        if rank != leaf.root and (leaf.kind not in ("GA", "SC") or leaf.shards[at])
    ]
    if not needed or len(leaf.ranks) < 2:
        return
    at = data.draw(st.sampled_from(needed))
    ranks = leaf.ranks[:at] + leaf.ranks[at + 1 :]
    shards = leaf.shards[:at] + leaf.shards[at + 1 :]
    if leaf.shards and not any(shards):
        return
    fewer = replace(leaf, ranks=ranks, shards=shards)
    with pytest.raises(VerificationError):
        check(expr.map(lambda here: fewer, at=path), original)


@settings(max_examples=60, deadline=None)
@given(originals(("AR", "RE", "BC", "AA", "SD")), st.integers(2, 5), st.data())
def test_segments_that_overlap_or_leave_a_gap_are_noticed(whole: Motif, parts: int, data: st.DataObject) -> None:
    expr = apply(whole, "segment", parts=parts)
    if not expr.children:
        return
    at = data.draw(st.integers(0, len(expr.children) - 2))
    leaf = expr.children[at]
    assert isinstance(leaf, Motif)
    ((lo, hi),) = leaf.spans
    longer = replace(leaf, spans=((lo, hi + 1),))
    if len(whole.ranks) > 1:
        with pytest.raises(VerificationError, match="in parallel, but both write"):
            check(expr.map(lambda here: longer, at=(at,)), whole)
    if hi - lo > 1:
        shorter = replace(leaf, spans=((lo, hi - 1),))
        with pytest.raises(VerificationError, match="ends without"):
            check(expr.map(lambda here: shorter, at=(at,)), whole)


def test_the_rules_of_the_paper_read_as_the_paper_writes_them() -> None:
    whole = motif("AR", 8, 1024)
    assert str(apply(whole, "segment", parts=4)) == "||_{s=0}^{3} AR(T[256*s:256*s+256], PG[0:8])"
    assert str(apply(whole, "segment", size=512)) == "AR(T[0:512], PG[0:8]) || AR(T[512:1024], PG[0:8])"
    assert str(apply(whole, "ring")) == "RS(T[0:1024], PG[0:8]) -> AG(T[0:1024], PG[0:8])"
    assert str(apply(whole, "tree", n=2)) == (
        "||_{s=0}^{3} RE_{2*s}(T[0:1024], PG[2*s:2*s+2]) -> AR(T[0:1024], PG[0:8:2]) -> "
        "||_{s=0}^{3} BC_{2*s}(T[0:1024], PG[2*s:2*s+2])"
    )
    exchange = motif("AA", 8, 64)
    assert str(apply(exchange, "segment", parts=4)) == "||_{s=0}^{3} AA(T[0:8, 16*s:16*s+16], PG[0:8])"
    assert str(apply(exchange, "spline", n=2)) == "||_{s=0}^{3} AA(T[(i+2*s)%8:(i+2*s+2)%8, 0:64], PG[0:8])"
    sent = motif("BC", 5, 64, root=1)
    assert str(apply(sent, "spline", n=2)) == "BC_1(T[0:64], PG[0:3]) || BC_1(T[0:64], PG[1,3:5])"


def test_a_rule_applied_again_and_again_gives_a_deep_tree() -> None:
    whole = motif("AR", 16, 100)
    expr = apply(whole, "tree", n=2)
    for path in ((1,), (1, 1), (1, 1, 1)):
        expr = apply(expr, "tree", n=2, at=path)
    kinds = [leaf.kind for leaf in expr.leaves]
    assert kinds.count("RE") == kinds.count("BC") == 8 + 4 + 2 + 1
    assert "AR" not in kinds
    assert check(expr, whole).num_transfers == 30


def test_hosts_of_different_size_share_the_rails() -> None:
    whole = motif("AR", 7, 100)
    expr = apply(whole, "hierarchical", groups=[[0, 1, 2, 3], [4], [5, 6]])
    assert isinstance(expr, Seq)
    assert [leaf.ranks for leaf in expr.children[1].leaves] == [(0, 4, 5), (1, 4, 6), (2, 4, 5), (3, 4, 6)]
    check(expr, whole)


def test_rails_move_only_their_share_across() -> None:
    expr = apply(motif("AR", 16, 1024), "hierarchical", local=8)
    assert [leaf.nbytes for leaf in expr.at((1,)).leaves] == [128] * 8
    gathered = apply(motif("AG", 16, 1024), "hierarchical", local=8)
    assert [leaf.nbytes for leaf in gathered.at((0,)).leaves] == [128] * 8
    exchanged = apply(motif("AA", 16, 10), "hierarchical", local=8)
    assert {leaf.nbytes for leaf in exchanged.leaves} == {160}


def test_segments_never_reach_beyond_what_there_is() -> None:
    assert [leaf.size for leaf in apply(motif("AR", 4, 10), "segment", size=4).leaves] == [4, 4, 2]
    assert [leaf.size for leaf in apply(motif("AR", 4, 3), "segment", parts=8).leaves] == [1, 1, 1]
    assert apply(motif("RS", 4, 3), "segment", parts=8) == motif("RS", 4, 3)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["foo:1"], "unknown rule 'foo'; choose from: segment, ring, tree, hierarchical, spline, scatter"),
        (["spline:2"], "spline does not rewrite AR; it rewrites AA, BC, RE, AG, RS, GA, SC"),
        (["segment"], "segment: give either parts or size"),
        (["segment:2,3"], "segment: give either parts or size"),
        (["segment:2,3,4"], "segment has the parameters parts, size"),
        (["segment:0"], "segment: parts: must be 1..65536, not 0"),
        (["segment:size=0"], "segment: size: must be >= 16777216, not 0"),
        (["segment:99999999"], "segment: parts: must be 1..65536"),
        (["segment:x"], "expected a number, or groups"),
        (["segment:2,parts=2"], "parts is given twice"),
        (["segment:foo=2"], "unknown parameter of segment 'foo'; choose from: parts, size"),
        (["tree:0"], "tree: n: must be >= 1, not 0"),
        (["tree:groups=1 2;3"], "unknown parameter of tree"),
        (["hierarchical:groups=0 1;2 3"], "hierarchical: groups: must hold each of the 8 ranks once"),
        (["hierarchical:groups=0 1;1 2"], "hierarchical: groups: must hold each of the 8 ranks once"),
        (["ring@0"], "path 0: there is no child 0 at the top, which has 0"),
        (["ring", "segment:2@"], "segment: at the top is no single motif but 2"),
        (["ring", "tree:2"], "tree does not rewrite AG, RS; it rewrites AR, BC, RE"),
        (["ring@x"], "a path is positions such as @0.1"),
    ],
)
def test_wrong_steps_are_refused_in_one_line(steps: list[str], message: str) -> None:
    expr: Expr = motif("AR", 8, 1 << 40)
    with pytest.raises(InvalidInput) as refused:
        for step in steps:
            expr = parse_step(step)(expr)
    assert message in str(refused.value)


def test_steps_say_the_same_as_calls() -> None:
    whole = motif("AR", 8, 64)
    assert parse_step("segment:4")(whole) == apply(whole, "segment", parts=4)
    assert parse_step("segment:size=7@")(whole) == apply(whole, "segment", size=7)
    twice = parse_step("ring@1")(parse_step("segment:2")(whole))
    assert twice == apply(apply(whole, "segment", parts=2), "ring", at=(1,))
    both = parse_step("ring")(parse_step("segment:2")(whole))
    assert both == rewrite_all(apply(whole, "segment", parts=2), "ring")
    groups = parse_step("hierarchical:groups=0 1 2;3 4 5 6 7")(whole)
    assert groups == apply(whole, "hierarchical", groups=[[0, 1, 2], [3, 4, 5, 6, 7]])


def test_an_all_to_all_with_a_window_is_not_hierarchical() -> None:
    windows = apply(motif("AA", 8, 64), "spline", n=4)
    with pytest.raises(InvalidInput, match="hierarchical: needs an all-to-all of all ranks with all"):
        rewrite_all(windows, "hierarchical", local=2)


@pytest.mark.parametrize("kind", list(KINDS))
def test_variants_are_right_and_their_names_are_steps(kind: str) -> None:
    whole = motif(kind, 2 if kind == "SD" else 6, 100)
    hosts = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    names = []
    for name, expr in variants(whole, hosts):
        names.append(name)
        assert parse_step(name)(whole) == expr
        check(expr, whole)
    assert len(set(names)) == len(names) >= 4
    assert any(name.startswith("hierarchical") for name in names) == (kind in entry("hierarchical").kinds)


def test_a_registered_rule_takes_part_in_everything() -> None:
    @rule("halves", kinds=["AR"], choices=lambda motif, hosts: [{"first": "RE"}])
    def halves(motif: Motif, *, first: str = "RE") -> Expr:
        """Reduce to the first rank, then broadcast."""
        ends = [Motif(kind=k, ranks=motif.ranks, spans=motif.spans, root=motif.ranks[0]) for k in (first, "BC")]
        return Seq(tuple(ends))

    try:
        whole = motif("AR", 5, 64)
        expr = apply(whole, "halves")
        assert check(expr, whole).num_transfers == 8
        assert parse(str(expr)) == expr
        assert parse_step("halves@1")(apply(whole, "segment", parts=2)).depth == 2
        assert entry("halves").summary == "Reduce to the first rank, then broadcast."
        with pytest.raises(InvalidInput, match="'halves' is the name of another rule"):
            rule("halves")(halves)
        with pytest.raises(InvalidInput, match="unknown motif 'XX'"):
            rule("other", kinds=["XX"])
        with pytest.raises(InvalidInput, match="rule 'No way': a name is"):
            rule("No way")
    finally:
        unregister("halves")
    with pytest.raises(InvalidInput, match="unknown rule 'halves'"):
        entry("halves")
