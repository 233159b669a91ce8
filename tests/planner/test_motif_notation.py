# SPDX-License-Identifier: Apache-2.0
"""The notation: what is printed reads back as the same, and whatever else is refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import InvalidInput
from stretto.planner.algebra.motif import Expr, Motif, Par, Seq, motif
from stretto.planner.algebra.notation import parse, show
from stretto.planner.algebra.notation_read import MAX_TEXT
from stretto.planner.algebra.rules import apply, rewrite_all

WRITTEN = [
    "AR(T[0:1024], PG[0:8])",
    "RS(T[0:512], PG[0:8]) -> AG(T[0:512], PG[0:8])",
    "AR(T[0:512], PG[0:8]) || AR(T[512:1024], PG[0:8])",
    "||_{s=0}^{3} AR(T[256*s:256*s+256], PG[0:8])",
    "AA(T[0:8, 0:64], PG[0:8])",
    "AA(T[4:8, 0:64], PG[4:8])",
    "AA(T[(i+0)%8:(i+4)%8, 0:64], PG[0:8])",
    "||_{s=0}^{3} AA(T[(i+2*s)%8:(i+2*s+2)%8, 0:64], PG[0:8])",
    "AA(T[(i+1)%2:(i+2)%2 of 0:3|3, 0:64], PG[0,3])",
    "AA(T_{0:2|2:4}[0,2, 0:64], PG[0,2])",
    "AA(T_{0:2|-}[-|0:2, 5:64], PG[3,1])",
    "RE_0(T[0:64], PG[0:4]) -> BC_0(T[0:64], PG[0:4])",
    "||_{s=0}^{2} RE_{4*s}(T[0:64], PG[4*s:4*s+4])",
    "RE_4(T[0:64], PG[0:16:4])",
    "AR(T[0:4,8:12], PG[0,3,5])",
    "RS(T[0:8|16:24|32:36], PG[2:5])",
    "RS(T[0:8|-|32:36], PG[2:5])",
    "GA_7(T[|_{s=0}^{3} {16*s:16*s+4}|100:104|-], PG[2:8])",
    "SC_2(T[0:9], PG[2:5]) -> SD(T[0:9], PG[2,9])",
    "AR(T[,_{s=0}^{4} 10*s:10*s+5], PG[0:2])",
    "(AR(T[0:1], PG[0:2]) || AR(T[1:2], PG[0:2])) || AR(T[2:3], PG[0:2])",
    "(AR(T[0:1], PG[0:2]) -> AR(T[0:1], PG[0:2])) || AR(T[2:3], PG[0:2])",
    "AR(T[0:5], PG[0:2]) ||_{s=0}^{2} AR(T[3*s+5:3*s+8], PG[0:2])",
    "->_{s=0}^{2} (AR(T[2*s:2*s+1], PG[0:2]) || AR(T[2*s+1:2*s+2], PG[0:2]))",
    "||_{t=0}^{2} (||_{s=0}^{2} AR(T[s+10*t:s+10*t+1], PG[5-2*t,6-2*t:9-2*t]))",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_canonical_texts_print_as_they_are_written(text: str) -> None:
    expr = parse(text)
    if not text.startswith("||_{t"):
        assert show(expr) == text
    assert parse(show(expr)) == parse(show(expr, expand=True)) == parse(show(expr, unicode=True)) == expr


@pytest.mark.parametrize(
    ("loose", "exact"),
    [
        (" AR ( T_i [ 0 : 8 ] ,PG[0 :2 ] ) ", "AR(T[0:8], PG[0:2])"),
        ("AR(T[0:4],PG[0:2])∥AR(T[4:8],PG[0:2])→AR(T[0:8],PG[0:2])",
         "AR(T[0:4], PG[0:2]) || AR(T[4:8], PG[0:2]) -> AR(T[0:8], PG[0:2])"),
        ("||_{s=0}^{1} AR(T[s*4:(s+1)*4], PG[0:2])", "AR(T[0:4], PG[0:2]) || AR(T[4:8], PG[0:2])"),
        ("||_{s=2}^{2} AR(T[s*4:(s+1)*4], PG[0:2])", "AR(T[8:12], PG[0:2])"),
        ("((AR(T[0:8], PG[0:2])))", "AR(T[0:8], PG[0:2])"),
        ("AR(T[0:8], PG[0:13:4])", "AR(T[0:8], PG[0:16:4])"),
        ("RS(T[0:4|4:8], PG[0:2])", "RS(T[0:8], PG[0:2])"),
        ("BC_{1+1}(T[0:4], PG[2:4])", "BC_2(T[0:4], PG[2:4])"),
    ],
)  # fmt: skip
def test_other_ways_to_write_the_same_are_read(loose: str, exact: str) -> None:
    assert show(parse(loose)) == exact


@st.composite
def motifs(draw: st.DrawFn) -> Motif:
    """Any motif at all, not only those that rules make."""
    kind = draw(st.sampled_from(["AR", "RS", "AG", "GA", "SC", "BC", "RE", "AA", "SD"]))
    count = 2 if kind == "SD" else draw(st.integers(1, 6))
    ranks = tuple(draw(st.lists(st.integers(0, 20), min_size=count, max_size=count, unique=True)))
    root = draw(st.sampled_from(ranks)) if kind in ("GA", "SC", "BC", "RE") else -1
    ends = sorted(draw(st.lists(st.integers(0, 99), min_size=2, max_size=12, unique=True)))
    spans = list(zip(ends[::2], ends[1::2], strict=False))
    if kind == "AA":
        deal = st.lists(st.integers(0, count - 1), min_size=8, max_size=8)
        held, bound = (
            tuple(tuple(p for p, to in enumerate(dealt) if to == at) for at in range(count))
            for dealt in (draw(deal), draw(deal))
        )
        first = draw(st.integers(0, count - 1))
        window = (first, draw(st.integers(first + 1, count)))
        return Motif(kind=kind, ranks=ranks, spans=(spans[0],), window=window, held=held, bound=bound)
    if kind in ("RS", "AG", "GA", "SC") and draw(st.booleans()):
        owner = draw(st.lists(st.integers(0, count - 1), min_size=len(spans), max_size=len(spans)))
        shards = tuple(tuple(s for s, to in zip(spans, owner, strict=True) if to == at) for at in range(count))
        return Motif(kind=kind, ranks=ranks, root=root, shards=shards)
    return Motif(kind=kind, ranks=ranks, root=root, spans=tuple(spans))


@settings(max_examples=150, deadline=None)
@given(st.recursive(motifs(), lambda kids: st.builds(
    lambda joint, parts: joint(tuple(parts)), st.sampled_from([Par, Seq]),
    st.lists(kids, min_size=2, max_size=4)), max_leaves=12))  # fmt: skip
def test_any_expression_prints_and_reads_back(expr: Expr) -> None:
    for text in (show(expr), show(expr, expand=True), show(expr, unicode=True)):
        assert parse(text) == expr


def test_regular_expressions_of_many_ranks_stay_short() -> None:
    whole = motif("AR", 128, 1 << 30)
    expr = rewrite_all(apply(whole, "segment", parts=16), "hierarchical", local=8)
    assert len(expr.leaves) == 16 * 40
    assert len(show(expr)) < 400
    assert parse(show(expr)) == expr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: expected a motif (AR, AA, AG, RS, BC, RE, GA, SC, SD) or '(', not the end"),
        ("AR", "column 3: expected '(', not the end"),
        ("AR(T[0:8], PG[0:2]", "column 19: expected ')', not the end"),
        ("AR(T[0:8], PG[0:2])) ", "column 20: expected the end, not ')'"),
        ("AR(T[0:8], PG[0:2]) || ", "column 24: expected a motif"),
        ("AR(T[8:8], PG[0:2])", "column 1: a payload is first:last with first < last, not 8:8"),
        ("AR(T[0:8:2], PG[0:2])", "a payload is first:last"),
        ("AR(T[0:8], PG[0:2:0])", "a step must be >= 1"),
        ("AR(T[0:8], PG[])", "column 15: expected a number, not ']'"),
        ("AR(T[0:8], PG[5:5])", "AR: ranks: must be 1.."),
        ("AR(T[0:8], PG[0:99999999999])", "processes must be 0..1048575"),
        ("AR(T[0:99999999999999999999], PG[0:2])", "numbers must be 0.."),
        ("AR(T[0:999999999*999999999*99], PG[0:2])", "numbers must be 0.."),
        ("AR(T[0-1:8], PG[0:2])", "numbers must be 0.."),
        ("AR(T[0:4|4:8], PG[0:2])", "AR: has no shards; those with shards are RS, AG, GA, SC"),
        ("AR(T_{0|1}[0:4], PG[0:2])", "AR: only AA holds blocks of other processes"),
        ("BC(T[0:4], PG[0:2])", "column 3: expected '_', not '('"),
        ("BC_x(T[0:4], PG[0:2])", "column 4: expected the root of BC, not 'x'"),
        ("BC_7(T[0:4], PG[0:2])", "BC: its root must be one of its ranks, not 7"),
        ("AA(T[(i+0)%8:(i+4)%7, 0:64], PG[0:8])", "a window counts modulo one number"),
        ("AA(T[(i+0)%4:(i+2)%4, 0:64], PG[0:8])", "AA: its window counts modulo 4, but it has 8 ranks"),
        ("AA(T[(i+6)%8:(i+9)%8, 0:64], PG[0:8])", "AA: its window must lie within"),
        ("AA(T[0:4, 0:64], PG[0:8])", "AA: 4 processes for 8 ranks"),
        ("||_{q=0}^{3} AR(T[0:8], PG[0:2])", "column 5: expected a free variable of s, t, u"),
        ("||_{s=0}^{3} ||_{s=0}^{3} AR(T[0:8], PG[0:2])", "expected a motif"),
        ("||_{s=3}^{0} AR(T[0:8], PG[0:2])", "s runs from 3 to 0: nothing"),
        ("||_{s=0}^{999999999} AR(T[s:s+1], PG[0:2])", "s runs over 1000000000 values; at most 65536"),
        ("||_{s=0}^{9999} AR(T[s:s+1], PG[0:1000])", "the text stands for over 4194304 processes"),
        ("||_{t=0}^{9999} AR(T[,_{s=0}^{9999} 2*s:2*s+1], PG[0:2])", "the text stands for over 1048576 words"),
        ("(" * 100 + "AR(T[0:8], PG[0:2])" + ")" * 100, "nested more than 40 deep"),
        ("AR(T[" + "(" * 100 + "0:8], PG[0:2])", "nested more than 40 deep"),
        ("AR(T[0:8], PG[0:2]) & x", "column 21: '&' has no meaning here"),
        ("AR(T[0:٣], PG[0:2])", "expected a number"),
        ("x" * (MAX_TEXT + 1), "motif text: at most"),
    ],
)
def test_broken_texts_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse(text)
    assert message in str(refused.value)
    assert str(refused.value).startswith("motif text")
    assert "\n" not in str(refused.value)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mangled_texts_never_do_anything_else_than_parse_or_refuse(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(WRITTEN))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        new = data.draw(st.sampled_from(["", "(", ")", "|", "||", "_{s=0}^{9}", "99", "-", ",", ":", "T", "AA", "é"]))
        text = text[:at] + new + text[at + data.draw(st.integers(0, 3)) :]
    try:
        expr = parse(text)
    except InvalidInput as refused:
        assert "\n" not in str(refused)
    else:
        assert parse(show(expr)) == expr
