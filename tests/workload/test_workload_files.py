# SPDX-License-Identifier: Apache-2.0
"""The file form: reversible, strict, bounded; and what `load` takes for what."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput, StrettoError
from stretto.workload import COMM_KINDS, PAIRWISE, Dep, Op, Workload, files
from stretto.workload.dag import WHYS, Why

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
REASONS: st.SearchStrategy[Why] = st.sampled_from(WHYS)
AMOUNTS = st.floats(0, 1e15) | st.integers(0, 10**12).map(float)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    ranks = draw(st.integers(2, 12))
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    ops = []
    for at, name in enumerate(names):
        deps = [
            Dep(op=other, lag=draw(st.integers(0 if before < at else 1, 3)), why=draw(REASONS))
            for before, other in enumerate(names)
            if draw(st.booleans())
        ]
        common: dict[str, Any] = {
            "name": name, "after": tuple(deps), "phase": draw(st.sampled_from(["", "forward"])),
            "stream": draw(st.sampled_from(["compute", "side"])), "duration_us": draw(AMOUNTS),
        }  # fmt: skip
        kind = draw(st.sampled_from(["compute", *COMM_KINDS]))
        order = draw(st.permutations(range(ranks)))
        if kind == "compute":
            some = tuple(order[: draw(st.integers(0, ranks))])
            timed = draw(st.booleans())
            times = tuple(draw(AMOUNTS) for _ in some or order) if timed else ()
            ops.append(Op(**common, ranks=some, durations_us=times))
            continue
        size = 2 if kind in PAIRWISE else draw(st.integers(2, ranks))
        groups = tuple(tuple(order[start : start + size]) for start in range(0, ranks - size + 1, size))
        if kind == "collective_permute" and draw(st.booleans()):
            groups = tuple((order[at], order[(at + 1) % ranks]) for at in range(ranks))
        whole = kind not in PAIRWISE and draw(st.booleans())
        nbytes, bound = draw(st.floats(1, 1e12)), draw(st.booleans())
        sized = kind == "all_to_all" and bound and draw(st.booleans())
        members = ranks if whole else len(groups) * size
        ops.append(
            Op(
                **common,
                kind=kind,
                nbytes=nbytes,
                rank_nbytes=tuple(draw(st.floats(0, nbytes)) for _ in range(members * sized)),
                groups=() if whole else groups,
                root=draw(st.integers(0, size - 1)),
                encoding=draw(st.sampled_from(["", "fp16"])),
                at_most=bound,
                wait_us=draw(AMOUNTS),
            )
        )
    return Workload(name=draw(NAMES), num_ranks=ranks, ops=tuple(ops), samples=draw(AMOUNTS), notes=(draw(NAMES),))


@settings(max_examples=150, deadline=None)
@given(workloads(), st.booleans())
def test_what_is_written_reads_back_the_same(workload: Workload, as_json: bool) -> None:
    again = files.loads(files.dumps(workload, json=as_json))
    assert again == workload
    assert again.digest == workload.digest


@settings(max_examples=100)
@given(st.lists(st.integers(0, 60), max_size=12, unique=True).map(tuple))
def test_runs_of_ranks_keep_their_order(ranks: tuple[int, ...]) -> None:
    assert files._expand(files._pack(ranks), "x", files._Room()) == ranks


def toy(**changes: Any) -> Workload:
    ops = (
        Op(name="a", duration_us=10.0),
        Op(name="b", kind="all_reduce", nbytes=100.0, groups=((0, 1, 2, 3),), after=(Dep(op="a"),)),
    )
    return Workload(**{"name": "toy", "num_ranks": 4, "ops": ops, **changes})


def test_the_digest_is_of_what_a_plan_depends_on() -> None:
    one = toy()
    assert toy(name="other", notes=("x",)).digest == one.digest
    assert toy(ops=(Op(name="a", duration_us=10), *one.ops[1:])).digest == one.digest
    assert toy(num_ranks=5).digest != one.digest
    assert toy(ops=(Op(name="a", duration_us=11.0), *one.ops[1:])).digest != one.digest
    assert toy(ops=(*one.ops, Op(name="c"))).digest != one.digest


def test_saved_files_are_found_again(tmp_path: Path) -> None:
    for ending in ("yaml", "json"):
        path = tmp_path / f"w.{ending}"
        toy().save(path)
        assert Workload.load(path) == Workload.load(str(path)) == toy()
    assert json.loads((tmp_path / "w.json").read_text())["stretto"] == "workload"


BASE: dict[str, Any] = {"stretto": "workload", "version": 1, "name": "x", "ranks": 4, "ops": [{"name": "a"}]}
COMM = {"name": "a", "kind": "all_reduce", "nbytes": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stretto": "cluster"}, "$.stretto: must be 'workload'"),
        ({"version": 2}, "$.version: must be 1, not 2"),
        ({"ranks": 0}, "$.ranks"),
        ({"ranks": 10**9}, "$.ranks"),
        ({"ops": []}, "$.ops"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"samples": -1}, "samples: must be a number >= 0"),
        ({"ops": [{"name": "a", "nbytes": "many"}]}, "$.ops[0].nbytes: must be a number, not "),
        ({"ops": [{"name": ""}]}, "ops[0].name: must not be empty"),
        ({"ops": [{"name": "a"}, {"name": "a"}]}, "ops[1].name: 'a' is there twice"),
        ({"ops": [{"name": "a", "after": ["b"]}]}, "ops[0] (a).after[0].op: there is no op 'b'"),
        ({"ops": [{"name": "a", "after": ["a"]}]}, "circle"),
        (
            {"ops": [{"name": f"o{k}", "stream": f"s{k}", "after": [f"o{(k + 1) % 500}"]} for k in range(500)]},
            " -> ... (495 more) -> ",
        ),
        ({"ops": [{"name": "a", "after": [{"op": "a", "lag": 99}]}]}, "lag: must be 0..16"),
        ({"ops": [{"name": "a", "after": [{"op": "a", "lag": 1, "why": "so"}]}]}, "$.ops[0].after[0]"),
        ({"ops": [{"name": "a", "kind": "all_sing"}]}, "unknown kind 'all_sing'"),
        ({"ops": [{"name": "a", "duration_us": -1}]}, "duration_us: must be a number >= 0"),
        ({"ops": [{"name": "a", "ranks": [4]}]}, "rank 4 does not exist"),
        ({"ops": [{"name": "a", "ranks": "3..1"}]}, "$.ops[0] (a).ranks: 3..1 must rise"),
        ({"ops": [{"name": "a", "ranks": "0..3/0"}]}, "in steps >= 1"),
        ({"ops": [{"name": "a", "ranks": "all"}]}, "must be ranks or a run such as 0..7"),
        ({"ops": [COMM | {"groups": "g"}]}, "unknown set of groups 'g'"),
        ({"ops": [COMM | {"groups": "g"}], "groups": {"g": [[0, 1], [1, 2]]}}, "rank 1 is in two groups"),
        ({"ops": [{"name": "a", "groups": "g"}], "groups": {"g": [[0, 1]]}}, "a compute-op has no nbytes"),
        ({"groups": {"g": ["0..1000000"] * 20}}, "name over"),
    ],
)
def test_a_bad_file_is_refused_with_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        files.loads(json.dumps(BASE | changes), where="f.json")
    assert str(caught.value).startswith("f.json: ")
    assert message in str(caught.value)


def test_many_ops_on_many_ranks_are_refused_before_they_take_long() -> None:
    ranks = 1 << 20
    ops = [{"name": f"o{at}"} | ({"ranks": f"0..{ranks - 1}"} if at % 2 else {}) for at in range(100)]
    with pytest.raises(InvalidInput, match="name over"):
        files.read(BASE | {"ranks": ranks, "ops": ops})
    times = {"name": "t", "ranks": "0..49999", "durations_us": [float(at) for at in range(50_000)]}
    many = [{"name": f"o{at}"} for at in range(1000)]
    with pytest.raises(InvalidInput, match="1001 ops on 50000 kinds of ranks"):
        files.read(BASE | {"ranks": 50_000, "ops": [times, *many]})


def test_damaged_files_are_errors_of_ours(tmp_path: Path) -> None:
    draw = random.Random(7)
    whole = files.dumps(Workload.load("gpt:125m,ranks=8,layers=2,tensor=2,pipeline=2")).encode()
    path = tmp_path / "w.yaml"
    for _ in range(60):
        data = bytearray(whole)
        at = draw.randrange(len(data))
        data[at : at + draw.choice((0, 1, 5, 50))] = draw.choice((b"-1", b"nan", b"[", b"\x00", b"&a *a", b".inf", b""))
        path.write_bytes(data)
        try:
            Workload.load(path)
        except StrettoError as error:
            assert "\n" not in str(error)


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"unknown model 'bert'; choose from: dlrm, gpt, .* .or give the path"):
        Workload.load("bert:large")
    with pytest.raises(InvalidInput, match="No such file"):
        Workload.load(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="UTF-8"):
        (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
        Workload.load(tmp_path / "b.yaml")


def test_traces_are_told_apart_from_our_own_files(tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    Workload(name='"traceEvents": [', num_ranks=1, ops=(Op(name="a"),)).save(odd)
    assert Workload.load(odd).num_ranks == 1
    kineto = tmp_path / "t.json"
    kineto.write_text('{"traceEvents": []}')
    with pytest.raises(InvalidInput) as caught:
        Workload.load(kineto)
    assert "$.stretto" not in str(caught.value)
    chakra = tmp_path / "t.et"
    chakra.write_bytes(b"\x00\x01nonsense")
    with pytest.raises(InvalidInput):
        Workload.load(chakra)
