# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.workload import chakra, kineto
from stretto.workload import files as workload_files
from stretto.workload.chakra_proto import RECV, SEND, decode, encode
from stretto.workload.dag import COMM_KINDS, WHYS, Dep, Op, Workload
from stretto.workload.trace_files import rank_files

DATA = Path(__file__).parent / "data"


def _same(a: Workload, b: Workload) -> None:
    assert (a.name, a.num_ranks, a.samples, a.unit) == (b.name, b.num_ranks, b.samples, b.unit)
    assert a.ops == b.ops
    assert a.digest == b.digest


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
    """Every field of an op, in any order that a workload allows; dependencies join ops that share a rank."""
    world = draw(st.sampled_from([2, 3, 4, 6]))
    numbers = st.one_of(st.just(0.0), st.floats(0, 1e6), st.integers(0, 1000).map(float))
    ops: list[Op] = []
    for at in range(draw(st.integers(1, 8))):
        same: dict[str, Any] = {
            "name": f"op{at}", "stream": draw(st.sampled_from(["compute", "copy"])), "duration_us": draw(numbers),
            "phase": draw(st.sampled_from(["", "forward"])), "wait_us": draw(numbers),
        }  # fmt: skip
        ranks = draw(st.permutations(range(world)))
        if draw(st.booleans()):
            kind = draw(st.sampled_from([kind for kind in COMM_KINDS if kind != "collective_permute"]))
            size = 2 if kind == "send" else draw(st.integers(2, world))
            groups = [tuple(ranks[start : start + size]) for start in range(0, world - size + 1, size)]
            named = kind == "send" or draw(st.booleans())
            nbytes, bound = draw(st.floats(1, 1e12)), draw(st.booleans())
            sized = kind == "all_to_all" and bound and draw(st.booleans())
            ops.append(Op(
                **same, kind=kind, nbytes=nbytes, groups=tuple(groups) if named else (),
                at_most=bound, encoding=draw(st.sampled_from(["", "fp16"])),
                rank_nbytes=tuple(
                    draw(st.floats(0, nbytes)) for _ in range((len(groups) * size if named else world) * sized)
                ),
                root=draw(st.integers(0, size - 1 if named else world - 1)),
            ))  # fmt: skip
        else:
            here = tuple(ranks[: draw(st.integers(0, world))])
            times = draw(st.lists(numbers, min_size=len(here) or world, max_size=len(here) or world))
            ops.append(Op(**same, ranks=here, durations_us=tuple(times) if draw(st.booleans()) else ()))
    first = Workload(name="random", num_ranks=world, ops=tuple(ops), samples=draw(numbers), unit="words")
    return replace(first, ops=tuple(replace(op, after=_some_deps(draw, first, op)) for op in ops))


def _some_deps(draw: st.DrawFn, workload: Workload, op: Op) -> tuple[Dep, ...]:
    at = workload.index[op.name]
    near = [other for other in workload.ops if not workload.ranks_of(op).isdisjoint(workload.ranks_of(other))]
    chosen = draw(st.lists(st.sampled_from(near), max_size=4))
    why = st.sampled_from(WHYS)
    return tuple(
        Dep(op=one.name, lag=draw(st.integers(0 if workload.index[one.name] < at else 1, 2)), why=draw(why))
        for one in chosen
    )


@settings(max_examples=150, deadline=None)
@given(_workloads())
def test_random_workloads_survive_the_round_trip(tmp_path_factory: pytest.TempPathFactory, workload: Workload) -> None:
    folder = tmp_path_factory.mktemp("et")
    chakra.write(workload, folder)
    _same(workload, chakra.read(folder))


@settings(max_examples=60, deadline=None)
@given(_workloads())
def test_every_number_is_in_the_field_that_chakra_reads(
    tmp_path_factory: pytest.TempPathFactory, workload: Workload
) -> None:
    wanted = {"comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val", "comm_size": "int64_val",
              "comm_type": "int64_val", "pg_name": "string_val", "is_cpu_op": "bool_val"}  # fmt: skip
    for rank, file in enumerate(chakra.write(workload, tmp_path_factory.mktemp("et"))):
        for node in decode(file)[1]:
            held = {attr.name: attr for attr in node.attr if not attr.name.startswith("stretto_")}
            assert all(attr.WhichOneof("value") == wanted[name] for name, attr in held.items())
            if node.type in (SEND, RECV):
                ends = (held["comm_src"].int32_val, held["comm_dst"].int32_val)
                assert ends in workload.ops[node.id].groups
                assert ends[node.type == RECV] == rank
                assert held["comm_tag"].int32_val == node.id


def test_equal_workloads_have_one_digest_however_their_values_came_about() -> None:
    spelled = Op(name="a", stream="".join(["comp", "ute"]), duration_us=float("0"), encoding=str(b"", "ascii"))
    lagging = Dep(op="a", lag=int("1"), why="".join(["da", "ta"]))  # type: ignore[arg-type]
    assert spelled == Op(name="a")
    plain = Workload(name="x", num_ranks=2, ops=(replace(Op(name="a"), after=(Dep(op="a", lag=1),)),))
    other = Workload(name="x", num_ranks=2, ops=(replace(spelled, after=(lagging,)),))
    assert plain.digest == other.digest == workload_files.loads(workload_files.dumps(other)).digest
    assert workload_files.dumps(plain) == workload_files.dumps(other)


def test_files_of_one_job_are_read_together_or_not_at_all(tmp_path: Path) -> None:
    step = Workload(name="one", num_ranks=2, ops=(Op(name="sum", kind="all_reduce", nbytes=8),))
    files = chakra.write(step, tmp_path)
    assert "1 file of a job of 2 ranks; give the directory" in _error(files[0])
    chakra.write(replace(step, name="two"), tmp_path)
    assert "not of the same job as one.0.et" in _error(tmp_path)
    old = tmp_path / "old"
    old.mkdir()
    (old / "job.0.et").write_bytes(encode({"stretto_workload": "x"}, [_node(0)]))
    assert "written by an older version of Stretto; write the trace again" in _error(old)


def test_files_are_sorted_by_their_ascii_numbers_only(tmp_path: Path) -> None:
    names = ["1\u00b23.et", "r9.et", "r10.et", "r\u0663.et"]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in rank_files(tmp_path, (), (".et",))] == names


def test_a_rank_without_ops_survives_the_round_trip(tmp_path: Path) -> None:
    step = Workload(name="idle", num_ranks=3, ops=(Op(name="a", ranks=(2, 0), durations_us=(1.0, 1.0)),))
    chakra.write(step, tmp_path)
    _same(step, chakra.read(tmp_path))


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


def _send(number: int, peer: int, tag: int = 0, **fields: Any) -> dict[str, Any]:
    return _node(number, type=SEND, attr={"comm_dst": peer, "comm_size": 64, "comm_tag": tag}, **fields)


def _receive(number: int, peer: int, tag: int = 0, **fields: Any) -> dict[str, Any]:
    return _node(number, type=RECV, attr={"comm_src": peer, "comm_size": 64, "comm_tag": tag}, **fields)


@pytest.mark.parametrize("size", [2, 5])
def test_every_rank_of_a_ring_may_send_and_then_receive(size: int, tmp_path: Path) -> None:
    ranks = []
    for rank in range(size):
        nodes: list[dict[str, Any]] = [_node(0)]
        for step in range(size - 1):
            last = [len(nodes) - 1]
            nodes.append(_send(len(nodes), (rank + 1) % size, step, data_deps=last))
            nodes.append(_receive(len(nodes), (rank - 1) % size, step, ctrl_deps=[len(nodes) - 1]))
        ranks.append([*nodes, _node(len(nodes), data_deps=[len(nodes) - 1])])
    workload = chakra.read(_files(tmp_path, *ranks))
    assert len(workload.comm_ops) == size * (size - 1)
    sends = {(op.groups[0], number): op for pair in {op.groups for op in workload.comm_ops}
             for number, op in enumerate(op for op in workload.comm_ops if op.groups == pair)}  # fmt: skip
    names = {key: op.name for key, op in sends.items()}
    for ((first, second), step), op in sends.items():
        before = {dep.op for dep in op.after}
        if step:
            # The sender has received in the step before, which it did after it had sent.
            assert before == {names[((first - 1) % size, first), step - 1], names[(first, second), step - 1]}
        else:
            assert [workload.op(name).kind for name in before] == ["compute"]


def test_what_waits_for_a_receive_waits_for_what_the_receive_waits_for(tmp_path: Path) -> None:
    first = [_node(0), _send(1, 1, data_deps=[0])]
    second = [_node(0, name="busy"), _receive(1, 0, ctrl_deps=[0]), _node(2, name="use", data_deps=[1])]
    workload = chakra.read(_files(tmp_path, first, second))
    (send,) = workload.comm_ops
    # The sender does not wait for the receiver, as in Chakra's simulators.
    assert [workload.op(dep.op).ranks for dep in send.after] == [(0,)]
    assert set(workload.op("use").after) == {Dep(op=send.name), Dep(op="busy")}


def test_tags_say_which_send_belongs_to_which_receive(tmp_path: Path) -> None:
    first = [_node(0), _send(1, 1, tag=5, data_deps=[0]), _send(2, 1, tag=6)]
    second = [_receive(0, 0, tag=6), _receive(1, 0, tag=5), _node(2, name="use", data_deps=[0])]
    workload = chakra.read(_files(tmp_path, first, second))
    (dep,) = workload.op("use").after
    assert workload.op(dep.op).after == ()


def test_a_circle_of_receives_is_one_clear_line(tmp_path: Path) -> None:
    first = [_receive(0, 1, ctrl_deps=[1]), _receive(1, 1, ctrl_deps=[0])]
    second = [_send(0, 0), _send(1, 0)]
    assert "wait for each other in a circle" in _error(_files(tmp_path, first, second))
    waits = tmp_path / "waits"
    waits.mkdir()
    ranks = [[_receive(0, 1 - rank), _send(1, 1 - rank, data_deps=[0])] for rank in range(2)]
    assert "wait for each other in a circle" in _error(_files(waits, *ranks))


def test_a_file_alone_asks_for_the_others(tmp_path: Path) -> None:
    path = _files(tmp_path, [_node(0, type=7, attr={"comm_type": 0, "comm_size": 8})]) / "job.0.et"
    assert "give the directory with the files of all ranks" in _error(path)


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
        ([_node(1, type=5, attr={"comm_dst": 1 << 30, "comm_size": 4})], "must be of 1..1048576 ranks"),
        ([_node(1, type=5, attr={"comm_size": 4})], "comm_dst: must be a whole number"),
        ([_node(1, type=7, attr={"comm_type": 0, "comm_size": 4, "pg_name": ["x"]})], "pg_name: must be text"),
        ([_node(1, type=7, attr={"comm_type": 0, "comm_size": 4, "pg_name": 3})], "pg_name: must be text, not 3"),
        ([_node(1, attr={"stream": ["x"]})], "stream: must be a number or a name, not ['x']"),
        ([_node(1, type=5, attr={"comm_dst": 1, "comm_size": 4, "comm_tag": "x"})], "comm_tag: must be a whole number"),
        ([_node(1, type=1)], "no node computes or communicates"),
        ([], "no nodes in it"),
    ],
)
def test_a_broken_graph_is_one_clear_line(nodes: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    assert message in _error(_files(tmp_path, nodes) / "job.0.et")


@pytest.mark.parametrize(
    ("attr", "message"),
    [
        ({"stretto_after": [0, 1, 9, 1]}, "stretto_after: must be numbers in fours"),
        ({"stretto_after": [0, 1]}, "stretto_after: must be numbers in fours"),
        ({"stretto_after": "x"}, "stretto_after: must be numbers in fours"),
        ({"stretto_after": [0, 1, 0, 77]}, "stretto_after: must be numbers in fours"),
        ({"stretto_duration_us": float("nan")}, "duration_us: must be a number >= 0"),
        ({"stretto_duration_us": ["x"]}, "stretto_duration_us: must be a number, not ['x']"),
        ({"stretto_stream": 5}, "stretto_stream: must be text, not 5"),
        ({"stretto_place": "x"}, "stretto_place: must be a whole number"),
    ],
)
def test_a_damaged_file_of_ours_is_one_clear_line(attr: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.0.et"
    path.write_bytes(encode({"stretto_workload": "x", "stretto_ranks": 1}, [_node(1, attr=attr)]))
    assert message in _error(path)


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
