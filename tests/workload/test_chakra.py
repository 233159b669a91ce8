from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.workload import chakra, kineto
from stretto.workload.chakra_proto import encode
from stretto.workload.dag import Dep, Op, Workload

DATA = Path(__file__).parent / "data"


def _same(a: Workload, b: Workload) -> None:
    assert (a.name, a.num_ranks) == (b.name, b.num_ranks)
    assert [op.name for op in a.ops] == [op.name for op in b.ops]
    for left, right in zip(a.ops, b.ops, strict=True):
        assert set(left.after) == set(right.after)
        for key in ("kind", "stream", "phase", "ranks", "nbytes", "groups", "root", "at_most", "wait_us", "encoding"):
            assert getattr(left, key) == getattr(right, key), (left.name, key)
        assert (left.duration_us, left.durations_us) == (right.duration_us, right.durations_us)


def _node(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "type": 4, "duration_micros": 10, "attr": {}, **fields}


def _files(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    for rank, nodes in enumerate(ranks):
        (folder / f"job.{rank}.et").write_bytes(encode({}, nodes))
    return folder


def _error(path: Path, **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        chakra.read(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_recorded_job_survives_the_round_trip(tmp_path: Path) -> None:
    first, *peers = [DATA / f"gpu_nccl.{rank}.json" for rank in range(4)]
    workload = kineto.read(first, peers=peers)
    files = chakra.write(workload, tmp_path / "et")
    assert [file.name for file in files] == [f"gpu_nccl.{rank}.et" for rank in range(4)]
    _same(workload, chakra.read(tmp_path / "et"))
    groups = json.loads((tmp_path / "et" / "comm_groups.json").read_text())
    assert sorted(groups.values()) == [[0, 1], [0, 2], [1, 3], [2, 3]]


def test_every_kind_survives_the_round_trip(tmp_path: Path) -> None:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
    ops = [Op(name="start", duration_us=3.0, durations_us=(1.0, 2.0, 3.0), after=(Dep(op="start", lag=1),))]
    for kind in kinds:
        root = 1 if kind in ("broadcast", "reduce", "gather", "scatter") else 0
        ops.append(Op(name=kind, kind=kind, nbytes=1000.5, root=root, after=(Dep(op=ops[-1].name, why="submit"),)))
    ops.append(Op(name="left", ranks=(0,), duration_us=3.0, after=(Dep(op="scatter", why="wait"),)))
    ops.append(Op(name="sent", kind="send", nbytes=7, groups=((0, 2),), at_most=True, after=(Dep(op="left"),)))
    ops.append(Op(name="right", ranks=(2,), duration_us=3.0, after=(Dep(op="sent", lag=1, why="wait"),)))
    workload = Workload(name="kinds", num_ranks=3, ops=tuple(ops))
    chakra.write(workload, tmp_path)
    _same(workload, chakra.read(tmp_path))


@st.composite
def _workloads(draw: st.DrawFn) -> Workload:
    world = draw(st.sampled_from([2, 4, 6]))
    halves = (tuple(range(world // 2)), tuple(range(world // 2, world)))
    ops: list[Op] = []
    for at in range(draw(st.integers(1, 8))):
        after = tuple(
            Dep(op=op.name, lag=draw(st.integers(0, 1)), why=draw(st.sampled_from(["data", "submit", "wait"])))
            for op in ops
            if draw(st.booleans())
        )
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["all_reduce", "all_gather", "all_to_all", "broadcast"]))
            groups = halves if world > 2 and draw(st.booleans()) else ()
            ops.append(Op(name=f"c{at}", kind=kind, nbytes=draw(st.floats(1, 1e9)), groups=groups, after=after))
        else:
            stream, time = draw(st.sampled_from(["compute", "copy"])), draw(st.floats(0, 1e6))
            ops.append(Op(name=f"k{at}", stream=stream, duration_us=time, after=after))
    return Workload(name="random", num_ranks=world, ops=tuple(ops))


@settings(max_examples=40, deadline=None)
@given(_workloads())
def test_random_workloads_survive_the_round_trip(tmp_path_factory: pytest.TempPathFactory, workload: Workload) -> None:
    folder = tmp_path_factory.mktemp("et")
    chakra.write(workload, folder)
    _same(workload, chakra.read(folder))


def test_a_foreign_trace_of_ranks_that_do_the_same(tmp_path: Path) -> None:
    comm = {"comm_type": 2, "comm_size": 1000, "is_cpu_op": False}
    nodes = [
        _node(7, name="load", type=2, duration_micros=3),
        _node(8, data_deps=[7], attr={"is_cpu_op": False}),
        _node(9, name="gather", type=7, data_deps=[8], duration_micros=0, attr=comm),
        _node(10, type=1, ctrl_deps=[9]),
        _node(11, ctrl_deps=[10]),
    ]
    workload = chakra.read(_files(tmp_path, nodes, nodes, nodes))
    gather = workload.op("gather")
    # A rank puts 1000 bytes in and gets 3000: the larger counts.
    assert (workload.num_ranks, gather.nbytes, gather.groups) == (3, 3000.0, ())
    assert gather.after == (Dep(op="n8"),)
    assert workload.op("n11").after == (Dep(op="gather", why="wait"),)
    assert [op.stream for op in workload.ops if not op.is_comm] == ["memory", "compute", "compute"]


def test_groups_from_names_and_from_dimensions(tmp_path: Path) -> None:
    named = [[_node(0, type=7, attr={"comm_type": 0, "comm_size": 8, "pg_name": "ab"[rank % 2]})] for rank in range(4)]
    (op,) = chakra.read(_files(tmp_path, *named)).ops
    assert op.groups == ((0, 2), (1, 3))
    nodes = [_node(0, type=7, attr={"comm_type": 6, "comm_size": 8, "involved_dim": [True, False]})]
    folder = tmp_path / "dims"
    folder.mkdir()
    (op,) = chakra.read(_files(folder, nodes, nodes, nodes, nodes), dims=(2, 2)).ops
    assert (op.kind, op.groups) == ("all_to_all", ((0, 1), (2, 3)))
    assert "say how many ranks each has (dims)" in _error(folder)
    assert "dims: 3x2 is not 4 ranks" in _error(folder, dims=(3, 2))


def test_sends_and_receives_of_different_ranks_are_joined(tmp_path: Path) -> None:
    first = [_node(0), _node(1, type=5, data_deps=[0], attr={"comm_dst": 1, "comm_size": 64, "comm_tag": 0})]
    second = [_node(0, type=6, attr={"comm_src": 0, "comm_size": 64, "comm_tag": 0}), _node(1, data_deps=[0])]
    workload = chakra.read(_files(tmp_path, first, second))
    (send,) = workload.comm_ops
    assert (send.nbytes, send.groups) == (64.0, ((0, 1),))
    (before,) = send.after
    assert workload.op(before.op).ranks == (0,)
    (last,) = [op for op in workload.ops if op.ranks == (1,)]
    assert [dep.op for dep in last.after] == [send.name]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([_node(1, data_deps=[2]), _node(2, ctrl_deps=[1])], "wait for each other in a circle: "),
        ([_node(1, data_deps=[1])], "wait for each other in a circle: 1 (n1) -> 1 (n1)"),
        ([_node(1, data_deps=[5])], "node 1 (n1) waits for node 5, which is not there"),
        ([_node(1), _node(1)], "node 1 is there twice"),
        ([_node(1, type=77)], "unknown node type '77'; choose from: 0 INVALID_NODE"),
        ([_node(1, type=7, attr={"comm_type": 44, "comm_size": 1})], "unknown comm_type '44'"),
        ([_node(1, type=7, attr={"comm_size": 1})], "comm_type: must be a whole number >= 0, not None"),
        ([_node(1, type=7, attr={"comm_type": 0, "comm_size": "big"})], "comm_size: must be a whole number"),
        ([_node(1, type=7, attr={"comm_type": 0, "comm_size": -4})], "comm_size: must be a whole number"),
        ([_node(1, type=7, attr={"comm_type": 0, "comm_size": 4, "pg_name": "x"})], "unknown group 'x'"),
        ([_node(1, type=5, attr={"comm_dst": 1 << 40, "comm_size": 4})], "must be of 1..1048576 ranks"),
        ([_node(1, type=5, attr={"comm_size": 4})], "comm_dst: must be a whole number"),
        ([_node(1, attr={"stretto_lag_deps": ["1:why:1"]})], "must be iterations:reason:node"),
        ([_node(1, attr={"stretto_lag_deps": 5})], "stretto_lag_deps: must be a list"),
        ([_node(1, attr={"stretto_duration_us": float("nan")})], "duration_us: must be a number >= 0"),
        ([_node(1, type=1)], "no node computes or communicates"),
        ([], "no nodes in it"),
    ],
)
def test_a_broken_graph_is_one_clear_line(nodes: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    assert message in _error(_files(tmp_path, nodes) / "job.0.et")


def test_broken_files_are_one_clear_line(tmp_path: Path) -> None:
    good = encode({}, [_node(0), _node(1)])
    path = tmp_path / "job.0.et"
    for body, message in [
        (good[:-3], "not a whole Chakra trace: a message of"),
        (good + b"\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a length has no end"),
        (good + b"\x80", "the file ends inside a length"),
        (good + b"\xff\xff\xff\x7f", "a message of 268435455 bytes"),
        (good + b"\x02\x0a\xff", "node 2 (at byte"),
        (b"", "no nodes in it"),
        (b"{}", "not a whole Chakra trace"),
    ]:
        path.write_bytes(body)
        assert message in _error(path)
    path.write_bytes(good)
    (tmp_path / "comm_groups.json").write_text('{"a": [0, "x"]}')
    assert "comm_groups.json: a: must be a list of ranks" in _error(path)
    assert "no file in it ends with .et" in _error(DATA)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_random_damage_never_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    attr = {"comm_type": 0, "comm_size": 8, "pg_name": "a"}
    good = encode({}, [_node(0), _node(1, type=7, data_deps=[0], attr=attr)])
    path = tmp_path_factory.mktemp("noise") / "job.0.et"
    path.write_bytes(good[:at] + noise + good[at + len(noise) :])
    try:
        chakra.read(path)
    except InvalidInput as error:
        assert str(error)


def test_what_chakra_cannot_say_is_refused(tmp_path: Path) -> None:
    ops = (Op(name="a", ranks=(0,), duration_us=1.0), Op(name="b", ranks=(1,), duration_us=1.0, after=(Dep(op="a"),)))
    with pytest.raises(InvalidInput, match="only communication joins ranks"):
        chakra.write(Workload(name="apart", num_ranks=2, ops=ops), tmp_path)
