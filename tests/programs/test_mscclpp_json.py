# SPDX-License-Identifier: Apache-2.0
"""MSCCL++ plans: what is exported runs right in an independent machine, and what is broken is caught there."""

from __future__ import annotations

import ast
import copy
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto import AllGather, AllReduce, AllToAll, Broadcast, Collective, Program, Reduce, ReduceScatter
from stretto.algorithms.registry import algorithm, algorithms
from stretto.errors import InvalidInput, StrettoError, VerificationError
from stretto.programs.formats import mscclpp_json, mscclpp_machine, mscclpp_reader
from stretto.programs.formats.mscclpp_json import dumps
from stretto.programs.formats.mscclpp_reader import check, check_plan, collective_of, execute, loads
from stretto.programs.lowered import BUFFERS, OPS, Lowered

DATA = Path(__file__).parent / "data" / "mscclpp"

Place = tuple[str, int] | None
Line = tuple[str, Place, Place, int, tuple[int, int] | None]
Stream = tuple[int, int, int, list[Line]]


def streams(name: str, collective: Collective, blocks: list[Stream], scratch: int = 0) -> Lowered:
    """Streams written by hand: (rank, send to, receive from, [(op, src, dst, count, dependency)])."""
    lines = [line for _, _, _, block in blocks for line in block]
    nowhere = ("i", 0)

    def column(values: list[int], kind: type = np.int32) -> np.ndarray[Any, Any]:
        return np.array(values, kind)

    return Lowered(
        name=name,
        collective=collective,
        scratch=column([scratch] * collective.num_ranks),
        tb_rank=column([b[0] for b in blocks]),
        tb_send=column([b[1] for b in blocks]),
        tb_recv=column([b[2] for b in blocks]),
        tb_channel=column([0] * len(blocks)),
        tb_ptr=np.cumsum([0, *(len(b[3]) for b in blocks)]),
        op=column([OPS.index(line[0]) for line in lines], np.uint8),
        src_buf=column([BUFFERS.index((line[1] or nowhere)[0]) for line in lines], np.int8),
        src_off=column([(line[1] or nowhere)[1] for line in lines]),
        dst_buf=column([BUFFERS.index((line[2] or nowhere)[0]) for line in lines], np.int8),
        dst_off=column([(line[2] or nowhere)[1] for line in lines]),
        count=column([line[3] for line in lines]),
        dep_tb=column([line[4][0] if line[4] else -1 for line in lines]),
        dep_step=column([line[4][1] if line[4] else -1 for line in lines]),
    )


def ring_all_gather(n: int, *, in_place: bool = True, chunks: int = 1) -> Lowered:
    """Each rank forwards what it gets in one fused instruction."""
    k = chunks
    blocks: list[Stream] = []
    for r in range(n):
        own: list[Line] = [("cpy", ("i", 0), ("o", r * k), k, None)] * (not in_place)
        own.append(("s", ("i", 0), None, k, None))
        own += [("rcs", None, ("o", (r - t) % n * k), k, None) for t in range(1, n - 1)]
        own.append(("r", None, ("o", (r + 1) % n * k), k, None))
        blocks.append((r, (r + 1) % n, (r - 1) % n, own))
    return streams(f"ring all-gather {n}", AllGather(n, chunks=k, in_place=in_place), blocks)


def ring_all_reduce(n: int, *, in_place: bool = True) -> Lowered:
    """One stream per rank with every fused reduction there is."""
    blocks: list[Stream] = []
    for r in range(n):
        last = ("i", (r + 1) % n), ("o", (r + 1) % n)
        own: list[Line] = [("s", ("i", r), None, 1, None)]
        own += [("rrs", ("i", (r - t) % n), None, 1, None) for t in range(1, n - 1)]
        own.append(("rrcs", *last, 1, None))
        own += [("rcs", None, ("o", (r + 1 - t) % n), 1, None) for t in range(1, n - 1)]
        own.append(("r", None, ("o", (r + 2) % n), 1, None))
        blocks.append((r, (r + 1) % n, (r - 1) % n, own))
    return streams(f"ring all-reduce {n}", AllReduce(n, in_place=in_place), blocks)


def split_all_gather(n: int) -> Lowered:
    """Sending and receiving in threadblocks of their own, ordered by dependencies."""
    blocks: list[Stream] = []
    for r in range(n):
        sends: list[Line] = [("s", ("o", r), None, 1, None)]
        sends += [("s", ("o", (r - t) % n), None, 1, (1, t - 1)) for t in range(1, n - 1)]
        gets: list[Line] = [("r", None, ("o", (r - t) % n), 1, None) for t in range(1, n)]
        blocks += [(r, (r + 1) % n, -1, sends), (r, -1, (r - 1) % n, gets)]
    return streams(f"split all-gather {n}", AllGather(n, in_place=True), blocks)


def direct_reduce_scatter(n: int, *, in_place: bool) -> Lowered:
    """Everybody sends to everybody; one threadblock waits for all others (in nops) and adds up."""
    blocks: list[Stream] = []
    for r in range(n):
        peers = [p for p in range(n) if p != r]
        for j, p in enumerate(peers):
            blocks.append((r, p, p, [("s", ("i", p), None, 1, None), ("r", None, ("s", j), 1, None)]))
        adds: list[Line] = [("nop", None, None, 0, (j, 1)) for j in range(n - 2)]
        adds.append(("cpy", ("i", r), ("o", 0), 1, (n - 2, 1)))
        adds += [("re", ("s", j), ("o", 0), 1, None) for j in range(n - 1)]
        blocks.append((r, -1, -1, adds))
    return streams(f"direct reduce-scatter {n}", ReduceScatter(n, in_place=in_place), blocks, n - 1)


def direct_all_to_all(n: int, *, chunks: int = 1) -> Lowered:
    """One stream for each peer and direction, and a copy of the own shard."""
    k = chunks
    blocks: list[Stream] = []
    for r in range(n):
        blocks.append((r, -1, -1, [("cpy", ("i", r * k), ("o", r * k), k, None)]))
        for p in range(n):
            if p != r:
                blocks.append((r, p, -1, [("s", ("i", p * k), None, k, None)]))
                blocks.append((r, -1, p, [("r", None, ("o", p * k), k, None)]))
    return streams(f"direct all-to-all {n}", AllToAll(n, chunks=k), blocks)


def trickle(chunks: int, root: int) -> Lowered:
    """A broadcast to one rank chunk by chunk: streams longer than one threadblock may be."""
    sends: list[Line] = [("s", ("i", j), None, 1, None) for j in range(chunks)]
    gets: list[Line] = [("r", None, ("o", j), 1, None) for j in range(chunks)]
    blocks: list[Stream] = [(root, 1 - root, -1, sends), (1 - root, -1, root, gets)]
    blocks.append((root, -1, -1, [("cpy", ("i", 0), ("o", 0), chunks, None)]))
    return streams("trickle", Broadcast(2, root=root, chunks=chunks), sorted(blocks, key=lambda b: b[0]))


def swap() -> Lowered:
    """Both ranks send a place and then receive into it: only a slot can take the message meanwhile."""
    blocks: list[Stream] = [
        (r, 1 - r, 1 - r, [("s", ("o", 1 - r), None, 1, None), ("r", None, ("o", 1 - r), 1, None)]) for r in range(2)
    ]
    return streams("swap", AllToAll(2, in_place=True), blocks)


HAND_MADE = {
    "ring_ag": ring_all_gather(4),
    "ring_ag_out_of_place": ring_all_gather(4, in_place=False, chunks=3),
    "ring_ar": ring_all_reduce(4),
    "ring_ar_out_of_place": ring_all_reduce(4, in_place=False),
    "split_ag": split_all_gather(4),
    "direct_rs": direct_reduce_scatter(4, in_place=False),
    "direct_rs_in_place": direct_reduce_scatter(4, in_place=True),
    "direct_a2a": direct_all_to_all(4, chunks=2),
    "swap": swap(),
}
TWO_HOSTS = {4: [0, 0, 1, 1], 2: [0, 1], 3: [0, 0, 1]}


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("ports", ["none", "between_hosts", "everywhere"])
@pytest.mark.parametrize("fifo_depth", [2, 3])
@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_streams_run_right(name: str, zero_copy: bool, ports: str, fifo_depth: int) -> None:
    lowered = HAND_MADE[name]
    n = lowered.collective.num_ranks
    hosts = {"none": None, "between_hosts": TWO_HOSTS[n], "everywhere": list(range(n))}[ports]
    plan = loads(dumps(lowered, hosts=hosts, zero_copy=zero_copy, fifo_depth=fifo_depth))
    assert collective_of(plan) == lowered.collective
    assert check(plan, lowered.collective, seeds=range(3)).launches == 2
    kinds = {c.channel_type for gpu in plan.gpus for c in gpu.channels}
    assert ("port" in kinds) == (ports != "none")
    assert ("memory" in kinds) == (hosts is None or len(set(hosts)) < n)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_every_algorithm_of_the_library_runs_right(kind: str, in_place: bool) -> None:
    ran = 0
    for entry in algorithms(kind):
        for n in (3, 4):
            if entry.refusal(kind, n) is not None:
                continue
            lowered = algorithm(entry.name, kind, n, in_place=in_place).lower(fifo_depth=2)
            pairs = [r // 2 for r in range(n)]
            for zero_copy, hosts in ((False, pairs), (True, None), (True, pairs)):
                check_plan(loads(dumps(lowered, zero_copy=zero_copy, hosts=hosts)), seeds=[n])
                ran += 1
    assert ran >= 6


def random_program(pick: random.Random) -> Program:
    """Every chunk is gathered along a random tree and spread along another, over two lanes."""
    n, chunks, in_place = pick.randint(2, 6), pick.randint(1, 2), pick.random() < 0.5
    collective = pick.choice(
        [
            AllGather(n, chunks=chunks, in_place=in_place),
            AllReduce(n, chunks=n * chunks, in_place=in_place),
            ReduceScatter(n, chunks=chunks, in_place=in_place),
            Broadcast(n, root=n - 1, chunks=chunks, in_place=in_place),
        ]
    )
    moves: list[tuple[int, int, int, int, bool, int]] = []
    for chunk in range(collective.num_chunks):
        step = pick.randint(0, 3)
        root = {"all_reduce": pick.randrange(n), "broadcast": n - 1}.get(collective.kind, chunk // chunks)
        for reduces in ((True,) * collective.combining) + ((False,) * (collective.kind != "reduce_scatter")):
            joined, parents = [root], {}
            for rank in pick.sample([r for r in range(n) if r != root], n - 1):
                parents[rank] = pick.choice(joined)
                joined.append(rank)
            for rank in reversed(joined[1:]) if reduces else joined[1:]:
                ends = (rank, parents[rank]) if reduces else (parents[rank], rank)
                moves.append((*ends, chunk, step, reduces, pick.randint(0, 1)))
                step += 1
    src, dst, chunk_of, step_of, reduce, lane = (list(column) for column in zip(*moves, strict=True))
    return Program.from_steps(
        "random", collective, src=src, dst=dst, chunk=chunk_of, step=step_of, reduce=reduce, lane=lane
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_run_right(seed: int) -> None:
    pick = random.Random(seed)
    program = random_program(pick)
    lowered = program.lower(fifo_depth=pick.choice([1, 2]), instances=pick.choice([1, 1, 2]), fuse=pick.random() < 0.8)
    for zero_copy in (False, True):
        hosts = pick.choice([None, [pick.randint(0, 2) for _ in program.collective.ranks]])
        text = dumps(lowered, zero_copy=zero_copy, hosts=hosts, fifo_depth=pick.choice([2, 3, 5]))
        assert check_plan(loads(text), seeds=[seed]).collective == lowered.collective


def test_a_hierarchical_program_on_two_hosts_runs_right() -> None:
    lowered = algorithm("hierarchical", "all_reduce", 8, in_place=True, dims=(4, 2)).lower(fifo_depth=2)
    for zero_copy in (False, True):
        check_plan(loads(dumps(lowered, hosts=[r // 4 for r in range(8)], zero_copy=zero_copy)))


def test_instances_and_roots_survive() -> None:
    lowered = algorithm("binomial", "broadcast", 5, root=3).lower(instances=2)
    plan = loads(dumps(lowered))
    assert collective_of(plan) == lowered.collective == Broadcast(5, root=3, chunks=lowered.collective.chunks)
    assert "right and free of races" in str(check_plan(plan))


def test_without_zero_copy_peers_and_ports_only_touch_scratch() -> None:
    for lowered in HAND_MADE.values():
        plan = loads(dumps(lowered, hosts=TWO_HOSTS[lowered.collective.num_ranks]))
        for gpu in plan.gpus:
            assert {b.type for b in gpu.remote_buffers} <= {"s"}
            for tb in gpu.threadblocks:
                assert {p.type for op in tb.ops if op.name == "pws" for p in op.src_buff} <= {"s"}


def test_zero_copy_needs_no_slots_where_every_place_is_free() -> None:
    for name in ("ring_ag", "split_ag", "direct_a2a"):
        for hosts in (None, TWO_HOSTS[4]):
            assert {g.scratch_chunks for g in loads(dumps(HAND_MADE[name], zero_copy=True, hosts=hosts)).gpus} == {0}
    assert {g.scratch_chunks for g in loads(dumps(HAND_MADE["ring_ag"])).gpus} == {2}


def test_zero_copy_keeps_slots_where_a_direct_put_would_deadlock() -> None:
    plan = loads(dumps(HAND_MADE["swap"], zero_copy=True))
    assert {g.scratch_chunks for g in plan.gpus} == {1}


def test_long_streams_go_on_in_further_threadblocks() -> None:
    lowered = ring_all_reduce(16)
    plan = loads(dumps(lowered))
    assert max(len(tb.ops) for gpu in plan.gpus for tb in gpu.threadblocks) <= mscclpp_json.MAX_OPS
    assert {len(gpu.threadblocks) for gpu in plan.gpus} == {3}
    check_plan(plan, seeds=[0])
    with pytest.raises(InvalidInput, match=r"rank 0: 3 threadblocks are more than max_threadblocks 2"):
        dumps(lowered, max_threadblocks=2)


def test_the_plan_of_a_small_ring_is_the_golden_one() -> None:
    text = dumps(ring_all_gather(3), hosts=[0, 0, 1], min_bytes=1024, max_bytes=1 << 20)
    assert text == (DATA / "ring_allgather_3.json").read_text()
    assert dumps(ring_all_gather(3), hosts=[0, 0, 1], min_bytes=1024, max_bytes=1 << 20) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fifo_depth": 1}, "fifo_depth: with 1 the streams wait for each other for ever, at rank 0 threadblock 0"),
        ({"fifo_depth": 0}, "fifo_depth: must be >= 1, not 0"),
        ({"max_threadblocks": 0}, "max_threadblocks: must be >= 1, not 0"),
        ({"hosts": [0, 1]}, "hosts: must give the host of each of the 4 ranks, not 2 of them"),
        ({"min_bytes": 5, "max_bytes": 4}, "min_bytes 5, max_bytes 4: must be 0"),
        ({"max_bytes": 1 << 64}, "max_bytes 18446744073709551616: must be 0"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dumps(HAND_MADE["ring_ag"], **options)


def test_collectives_the_executor_does_not_know_are_refused() -> None:
    lowered = algorithm("binomial", "reduce", 4).lower()
    with pytest.raises(
        InvalidInput, match=r"unknown collective for MSCCL\+\+ 'reduce'; choose from: all_gather, all_re"
    ):
        dumps(lowered)
    assert lowered.collective == Reduce(4, chunks=lowered.collective.chunks)


def test_chunks_of_different_size_are_refused() -> None:
    uneven = replace(AllGather(2), chunk_share=np.array([0.25, 0.75]))
    blocks: list[Stream] = [
        (
            r,
            1 - r,
            1 - r,
            [("cpy", ("i", 0), ("o", r), 1, None), ("s", ("i", 0), None, 1, None), ("r", None, ("o", 1 - r), 1, None)],
        )
        for r in range(2)
    ]
    with pytest.raises(InvalidInput, match="chunk_share: MSCCL\\+\\+ cuts buffers into equal chunks"):
        dumps(streams("uneven", uneven, blocks))


def test_wrong_streams_are_not_exported() -> None:
    blocks: list[Stream] = [
        (r, 1 - r, 1 - r, [("s", ("i", 0), None, 1, None), ("r", None, ("o", r), 1, None)]) for r in range(2)
    ]
    with pytest.raises(VerificationError):
        dumps(streams("wrong", AllGather(2), blocks))


def test_another_protocol_is_said_to_become_simple(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        text = dumps(replace(HAND_MADE["ring_ag"], protocol="LL128"))
    assert loads(text).protocol == "Simple"
    assert "written for protocol Simple, not LL128" in caplog.text


def test_the_reader_shares_nothing_with_the_exporter() -> None:
    for module in (mscclpp_reader, mscclpp_machine):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not [m for m in imported if "lowered" in m or "mscclpp_json" in m or "mscclpp_streams" in m]


@pytest.mark.parametrize("name", ["allreduce_2_reads", "allgather_2_ports"])
def test_plans_written_by_hand_run_right(name: str) -> None:
    plan = loads((DATA / f"{name}.json").read_text())
    assert check_plan(plan, seeds=range(20), launches=3).interleavings == 20


def test_execute_adds_up_what_it_is_given() -> None:
    plan = loads(dumps(ring_all_reduce(3, in_place=False)))
    inputs = [np.full((3, 5), 10.0**r) for r in range(3)]
    for seed in range(5):
        for output in execute(plan, inputs, seed=seed):
            assert np.array_equal(output, np.full((3, 5), 111.0))
    with pytest.raises(InvalidInput, match=r"inputs\[1\]: must have the shape \(3, 5\), not \(2, 5\)"):
        execute(plan, [inputs[0], inputs[1][:2], inputs[2]])
    with pytest.raises(InvalidInput, match="inputs: must be one array for each of the 3 ranks, not 2"):
        execute(plan, inputs[:2])


def raw(lowered: Lowered, **options: Any) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(dumps(lowered, **options))
    return plan


def runs(plan: dict[str, Any]) -> bool:
    """Whether a plan is accepted and does what it says."""
    try:
        check_plan(loads(json.dumps(plan)), seeds=[1])
    except StrettoError:
        return False
    return True


def every_op(plan: dict[str, Any]) -> Iterator[tuple[list[Any], int, dict[str, Any]]]:
    for tb in plan["gpus"][0]["threadblocks"]:
        for k, op in enumerate(tb["ops"]):
            yield tb["ops"], k, op


MUTATED = {
    "memory": raw(ring_all_gather(3)),
    "memory_zero_copy": raw(ring_all_gather(3, in_place=False), zero_copy=True),
    "ports": raw(ring_all_gather(3), hosts=[0, 1, 2]),
    "ports_zero_copy": raw(split_all_gather(3), hosts=[0, 1, 2], zero_copy=True),
    "reductions": raw(ring_all_reduce(3)),
    "reductions_zero_copy": raw(ring_all_reduce(3, in_place=False), zero_copy=True),
    "semaphores": raw(direct_reduce_scatter(3, in_place=True)),
    "split_streams": raw(split_all_gather(3)),
    "continued_sends": raw(trickle(16, root=0)),
    "continued_receives": raw(trickle(16, root=1)),
}


@pytest.mark.parametrize("name", MUTATED)
def test_no_operation_can_be_left_out(name: str) -> None:
    """Every wait, signal, credit, semaphore, nop and move is needed, and its absence is noticed."""
    plan = MUTATED[name]
    assert runs(plan)
    for ops, k, op in every_op(plan):
        beside = {o["name"] for o in (ops[max(k - 1, 0)], ops[min(k + 1, len(ops) - 1)])}
        if name.startswith("continued") and op["name"] == "nop" and beside & {"sem_acquire", "sem_release"}:
            continue  # where a stream is cut all threads meet, whether the next operation needs it or not
        del ops[k]
        assert not runs(plan), f"without {op} (number {k})"
        ops.insert(k, op)
        for ids in (op.get("channel_ids", []), op.get("semaphore_ids", [])):
            for j in range(len(ids) if len(ids) > 1 else 0):
                dropped = ids.pop(j)
                assert not runs(plan), f"{op} (number {k}) without {dropped}"
                ids.insert(j, dropped)


@pytest.mark.parametrize("name", MUTATED)
def test_no_place_can_be_shifted(name: str) -> None:
    plan = copy.deepcopy(MUTATED[name])
    shifted = 0
    for _, _, op in every_op(plan):
        for part in op.get("src_buff", []) + op.get("dst_buff", []):
            for by in (-1, 1):
                part["index"] += by
                assert not runs(plan), f"{op} by {by}"
                part["index"] -= by
                shifted += 1
    assert shifted > 4


def test_a_credit_left_out_at_both_ends_is_a_race_between_launches() -> None:
    """Signals still match, and one launch alone is right: the next one overwrites a slot too early."""
    plan = raw(split_all_gather(3))
    for gpu in plan["gpus"]:
        sends, gets = (tb["ops"] for tb in gpu["threadblocks"])
        assert sends[-1]["name"] == "wait"
        assert gets[-1]["name"] == "signal"
        del sends[-1], gets[-1]
    loaded = loads(json.dumps(plan))
    check_plan(loaded, launches=1)
    with pytest.raises(VerificationError, match=r"race on s\[\d\] of rank \d: .* are not ordered"):
        check_plan(loaded, launches=2)


def test_a_port_that_still_reads_the_users_memory_is_a_race() -> None:
    plan = raw(HAND_MADE["direct_a2a"], hosts=[0, 1, 2, 3], zero_copy=True)
    for gpu in plan["gpus"]:
        for tb in gpu["threadblocks"]:
            if tb["ops"][-1]["name"] in ("wait", "signal"):
                del tb["ops"][-1]
    with pytest.raises(VerificationError, match="race on i"):
        check_plan(loads(json.dumps(plan)))


def test_a_deadlock_is_named() -> None:
    plan = raw(ring_all_gather(3))
    ops = plan["gpus"][1]["threadblocks"][0]["ops"]
    at = next(k for k, op in enumerate(ops) if op["name"] == "signal")
    del ops[at]
    with pytest.raises(VerificationError, match=r"deadlock: rank \d threadblock 0 waits for ever at op \d+ \(wait\)"):
        check_plan(loads(json.dumps(plan)))


def test_signals_and_semaphores_left_over_are_errors() -> None:
    plan = raw(split_all_gather(3))
    plan["gpus"][2]["threadblocks"][0]["ops"].append({"name": "signal", "channel_ids": [0], "channel_type": "memory"})
    with pytest.raises(VerificationError, match="from rank 2 to rank 0 is left with 1 unused signals"):
        check_plan(loads(json.dumps(plan)), launches=1)
    plan = raw(split_all_gather(3))
    plan["gpus"][0]["threadblocks"][1]["ops"].append({"name": "sem_release", "semaphore_ids": [0]})
    with pytest.raises(VerificationError, match="semaphore 0 ends at 1, not at its initial value 0"):
        check_plan(loads(json.dumps(plan)), launches=1)


def test_a_wrong_result_is_named() -> None:
    plan = loads(dumps(direct_all_to_all(2)))
    with pytest.raises(VerificationError, match=r"o\[0\] of rank 0 is wrong after launch 0, seed 7"):
        check(plan, AllReduce(2), seeds=[7])


def test_two_threads_on_one_counter_are_a_race() -> None:
    plan = raw(ring_all_gather(4))
    ops = plan["gpus"][0]["threadblocks"][0]["ops"]
    at = next(k for k, op in enumerate(ops) if op["name"] == "signal" and len(op["channel_ids"]) == 2)
    ops.insert(at + 1, ops[at] | {"channel_ids": ops[at]["channel_ids"][1:]})
    with pytest.raises(VerificationError, match="race to signal on channel from rank 0 to rank 3: rank 0 thr"):
        check_plan(loads(json.dumps(plan)))


def broken(path: str, value: object) -> dict[str, Any]:
    """A good plan with one field replaced ("a.0.b" walks down; None removes)."""
    plan = raw(direct_reduce_scatter(3, in_place=False), hosts=[0, 0, 1])
    *way, last = path.split(".")
    node: Any = plan
    for key in way:
        node = node[int(key)] if isinstance(node, list) else node[key]
    if value is None:
        del node[last]
    elif isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value
    return plan


TB = "gpus.0.threadblocks"
ADDS = f"{TB}.2.ops"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gpus", [], "gpus: must be a list of length >= 1"),
        ("gpus", {}, "gpus: must be a list, not a mapping"),
        ("collective", None, "the field 'collective' is missing"),
        ("speed", 3, "unknown field 'speed'"),
        ("protocol", "LL128", "unknown protocol 'LL128'; choose from: Simple, LL"),
        ("use_double_scratch_buffer", True, "use_double_scratch_buffer: only packets"),
        ("min_message_size", -1, "min_message_size: must be a whole number >= 0"),
        ("min_message_size", 1 << 64, "not valid JSON|min_message_size"),
        ("root", 1, "root: a reducescatter has none"),
        ("gpus.1.id", 7, r"gpus\[1\].id: must be 1, not 7"),
        ("gpus.0.input_chunks", 0, r"gpus\[0\].input_chunks: must be a whole number >= 1"),
        ("gpus.0.scratch_chunks", 1 << 40, r"gpus\[0\].scratch_chunks: must be a whole number <= 1048576"),
        ("gpus.0.scratch_chunks", "4", r"gpus\[0\].scratch_chunks: must be a whole number, not "),
        ("gpus.0.scratch_chunks", 1, r"s\[\d:\d\] of rank 0 does not exist; it has 1 chunks"),
        ("gpus.0.channels.0.connected_to.0", 3, r"gpus\[0\].channels: must name another rank 0..2, not 3"),
        ("gpus.0.semaphores", [{"init_value": 65536}] * 17, "gpus: semaphores start at 1114112 in all; at most"),
        ("gpus.0.remote_buffers.0.rank", 0, r"gpus\[0\].remote_buffers: must name another rank 0..2, not 0"),
        (f"{TB}.1.id", 0, r"threadblocks\[1\].id: must be 1, not 0"),
        (f"{TB}.0.ops", [{"name": "nop"}] * 65, r"ops: must be a list of length <= 64"),
        (f"{ADDS}.0.name", "add", r"ops\[0\]: unknown operation 'add'; choose from: nop, barrier, signal"),
        (f"{ADDS}.0.name", "gstorepkt", r"'gstorepkt': packets over switch channels cannot be run here; can: nop"),
        (f"{ADDS}.0.name", 7, "name: must be text, not "),
        (f"{ADDS}.2.tbg_info", {"tb_id": 0}, "the field 'tbg_size' is missing"),
        (f"{ADDS}.2.tbg_info", {"tb_id": 2, "tbg_size": 2}, "tbg_info: tb_id must be below tbg_size 2, not 2"),
        (f"{ADDS}.0.semaphore_ids", [9], "semaphore_ids: must be of the 2 there are"),
        (f"{ADDS}.0.semaphore_ids", [], "semaphore_ids: must be of the 2 there are"),
        (
            f"{ADDS}.2.dst_buff",
            [],
            r"dst_buff: copy takes l \(l: own, r: a peer's, m: a switch, \+: or more\), not none",
        ),
        (f"{ADDS}.2.dst_buff.0.size", 2, "does not exist|differ in size"),
        (f"{ADDS}.2.dst_buff.0.index", 1, r"dst_buff\[0\]: o\[1:2\] of rank 0 does not exist; it has 1 chunks"),
        (f"{ADDS}.2.dst_buff.0.type", "x", "unknown value 'x'"),
        (f"{ADDS}.2.dst_buff.0.buffer_id", 0, "needs either type or buffer_id"),
        (f"{ADDS}.2.src_buff.0.size", 0, "size: must be a whole number >= 1"),
        (f"{ADDS}.4.reduce_op", "max", "reduce_op: unknown value 'max'"),
        (f"{TB}.0.ops.0.dst_buff.0.buffer_id", 4, "buffer_id: 4 is no peer's buffer reached by memory"),
        (f"{TB}.0.ops.0.channel_type", "none", "channel_type: put needs memory or port, not none"),
        (f"{TB}.0.ops.2.channel_ids", [5], "channel_ids: memory channel 5 does not exist here"),
        (f"{TB}.0.ops.2.channel_ids", [], "channel_ids: must be one or more different channels"),
        (f"{TB}.0.ops.2.channel_ids", [0, 0], "channel_ids: must be one or more different channels"),
        (f"{TB}.1.ops.2.channel_type", "memory", "channel_type: pws needs port, not memory"),
        (f"{TB}.1.channels.0.channel_ids", [8], "port channel 0 does not exist here"),
    ],
)
def test_broken_plans_are_refused_in_one_line_that_names_the_field(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        loads(json.dumps(broken(path, value)), where="a.json")
    assert str(caught.value).startswith("a.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '{"gpus": 3}', "[" * 100_000, '{"gpus": [[]]}'])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"plan: "):
        loads(text)


def test_nothing_that_may_stand_in_a_file_is_more_than_refused() -> None:
    """Random damage gives a plan that runs, or one of our errors in one line; never a crash."""
    good = (DATA / "allreduce_2_reads.json").read_text()
    junk: list[Any] = [
        None,
        0,
        -1,
        7,
        1 << 40,
        1 << 70,
        1.5,
        "x",
        "",
        [],
        {},
        True,
        [[]],
        "port",
        [0, 1],
        {"name": "put"},
    ]
    seen: set[str] = set()
    for seed in range(600):
        pick = random.Random(seed)
        plan = json.loads(good)
        holder, key = pick.choice(list(fields(plan)))
        if pick.random() < 0.2:
            del holder[key]
        else:
            holder[key] = pick.choice(junk)
        try:
            check_plan(loads(json.dumps(plan)), seeds=[0])
        except StrettoError as error:
            assert "\n" not in str(error)
            seen.add(type(error).__name__)
    assert seen == {"InvalidInput", "VerificationError"}


def fields(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from fields(node[key])


def test_plans_too_large_to_run_are_refused_before_memory_is_taken() -> None:
    plan = raw(direct_all_to_all(2))
    for gpu in plan["gpus"]:
        gpu["scratch_chunks"] = 1 << 20
        gpu["threadblocks"] += [{"id": k, "ops": [], "channels": []} for k in range(3, 1024)]
    loaded = loads(json.dumps(plan))
    check_plan(loaded, seeds=[0], launches=1)
    for gpu in plan["gpus"]:
        for tb in gpu["threadblocks"][3:]:
            tb["ops"] = [{"name": "sem_acquire", "semaphore_ids": list(range(16))}]
        gpu["semaphores"] = [{"init_value": 0}] * 16
    with pytest.raises(InvalidInput, match="too large to run here, with 34728 threads"):
        check_plan(loads(json.dumps(plan)))


def test_chunk_counts_that_fit_no_collective_are_refused() -> None:
    plan = raw(direct_all_to_all(2))
    plan["collective"] = "allgather"
    with pytest.raises(InvalidInput, match="2 input and 2 output chunks are not those of an allgather"):
        check_plan(loads(json.dumps(plan)))
    plan["collective"] = "sendrecv"
    with pytest.raises(InvalidInput, match="unknown collective 'sendrecv'; choose from: allgather, allreduce"):
        check_plan(loads(json.dumps(plan)))
    with pytest.raises(InvalidInput, match="collective: has 3 ranks, the plan 2"):
        check(loads(dumps(direct_all_to_all(2))), AllToAll(3))
