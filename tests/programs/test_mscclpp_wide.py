# SPDX-License-Identifier: Apache-2.0
"""MSCCL++ plans of wide steps: right and free of races however they are carried out; faults are noticed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from drawn_programs import random_program

from stretto import Broadcast
from stretto.algorithms import algorithm
from stretto.errors import InvalidInput, StrettoError, VerificationError
from stretto.programs import Program
from stretto.programs.formats.mscclpp_reader import check_plan, loads
from stretto.programs.formats.mscclpp_wide import PlanForm, dumps
from stretto.programs.wide import widen

CASES = [
    ("all_reduce", "direct"),
    ("all_reduce", "ring"),
    ("all_reduce", "recursive_doubling"),
    ("all_reduce", "double_binary_tree"),
    ("all_gather", "direct"),
    ("all_gather", "bruck"),
    ("reduce_scatter", "direct"),
    ("reduce_scatter", "halving_doubling"),
    ("all_to_all", "direct"),
    ("all_to_all", "bruck"),
    ("broadcast", "binary_tree"),
]
FORMS = [
    "", "slices=2", "streams=3", "protocol=LL", "protocol=LL,streams=2,slices=2", "protocol=LL,streams=5,apart=1",
    "loop_bytes=64", "multicast=1", "pull=1", "streams=3,pull=1,longest=1", "loop_bytes=64,halves=1,pull=1",
]  # fmt: skip


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_plans_are_right_in_every_form(kind: str, name: str, in_place: bool) -> None:
    program = algorithm(name, kind, 3, in_place=in_place)
    done = 0
    for seed, form in enumerate(FORMS):
        try:
            text = dumps(program, form=PlanForm.parse(form))
        except InvalidInput as error:
            assert "hears nothing" in str(error) or "in a loop" in str(error)
            continue
        check_plan(loads(text), seeds=[seed])
        done += 1
    assert done >= 4


def test_a_sum_of_all_ranks_is_one_operation() -> None:
    plan = json.loads(dumps(algorithm("direct", "all_reduce", 8)))
    names = [op["name"] for op in plan["gpus"][3]["threadblocks"][0]["ops"]]
    assert names == ["rlxsignal", "rlxwait", "nop", "rres", "nop", "signal", "wait"]
    adds = plan["gpus"][3]["threadblocks"][0]["ops"][3]
    assert len(adds["src_buff"]) == len(adds["dst_buff"]) == 8
    assert plan["gpus"][3]["scratch_chunks"] == 0


def test_packets_need_no_signals() -> None:
    plan = json.loads(dumps(algorithm("direct", "all_reduce", 4), form=PlanForm(protocol="LL", streams=4)))
    names = {op["name"] for gpu in plan["gpus"] for tb in gpu["threadblocks"] for op in tb["ops"]}
    assert names == {"ppkt", "respkt", "upkt"}
    assert plan["use_double_scratch_buffer"] is True
    assert not any(gpu["channels"] for gpu in plan["gpus"])


def test_packets_of_every_peer_have_streams_of_their_own() -> None:
    form = PlanForm(protocol="LL", streams=14, apart=1)
    plan = json.loads(dumps(algorithm("direct", "all_gather", 8, in_place=True), form=form))
    for gpu in plan["gpus"]:
        blocks = [[(op["name"], len(op["dst_buff"])) for op in tb["ops"]] for tb in gpu["threadblocks"]]
        assert sorted(blocks) == [[("ppkt", 1)]] * 7 + [[("upkt", 1)]] * 7
    with pytest.raises(InvalidInput, match="apart: only packets"):
        PlanForm(apart=1)


def test_pieces_that_travel_alike_become_a_loop() -> None:
    program = algorithm("chain", "broadcast", 4, chunks=64)
    plan = json.loads(dumps(program, form=PlanForm(slices=4, loop_bytes=4096)))
    blocks = plan["gpus"][1]["threadblocks"]
    assert len(blocks) == 4
    loop = next(op for op in blocks[0]["ops"] if op["name"] == "pipeline")
    assert loop["iter_context"] == {"unit_size": 4096, "num_chunks": 16}
    check_plan(loads(json.dumps(plan)), seeds=[0])


def test_streams_of_different_pieces_loop_as_often_as_each_needs() -> None:
    src, dst = [0, 1, 0, 1, 0, 2], [1, 2, 1, 2, 2, 1]
    program = Program.from_steps(
        "unlike", Broadcast(3, chunks=3), src=src, dst=dst, chunk=[0, 0, 1, 1, 2, 2], step=[0, 1, 0, 1, 0, 1]
    )
    plan = json.loads(dumps(program, form=PlanForm(streams=2, loop_bytes=64)))
    loops = [op["iter_context"] for tb in plan["gpus"][0]["threadblocks"] for op in tb["ops"] if "iter_context" in op]
    assert sorted(loop["num_chunks"] for loop in loops) == [1, 2]
    check_plan(loads(json.dumps(plan)), seeds=[0, 1])
    with pytest.raises(InvalidInput, match="chunks in one stream cannot be shared"):
        dumps(program, form=PlanForm(loop_bytes=64))


def test_many_ranks_take_several_operations() -> None:
    check_plan(loads(dumps(algorithm("direct", "all_reduce", 12, in_place=True))), seeds=[0], launches=1)


def test_a_switch_adds_up_and_copies() -> None:
    plan = json.loads(dumps(algorithm("direct", "all_reduce", 4, in_place=True), form=PlanForm(multicast=1)))
    ops = [op["name"] for op in plan["gpus"][0]["threadblocks"][0]["ops"]]
    assert "glres" in ops and "rres" not in ops
    gather = json.loads(dumps(algorithm("direct", "all_gather", 4), form=PlanForm(multicast=1)))
    assert "gstore" in [op["name"] for op in gather["gpus"][0]["threadblocks"][0]["ops"]]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_run_right(seed: int) -> None:
    form = random.Random(seed).choice(FORMS)
    program = random_program(seed)
    try:
        text = dumps(program, form=PlanForm.parse(form))
    except InvalidInput as error:
        assert "in a loop" in str(error)
        text = dumps(program)
    check_plan(loads(text), seeds=[seed])


def without(plan: dict[str, Any], rank: int, block: int, op: int) -> str:
    changed = json.loads(json.dumps(plan))
    del changed["gpus"][rank]["threadblocks"][block]["ops"][op]
    return json.dumps(changed)


@pytest.mark.parametrize("form", ["", "protocol=LL", "slices=2", "multicast=1", "pull=1"])
@pytest.mark.parametrize(("kind", "name"), [("all_reduce", "direct"), ("all_gather", "ring")])
def test_every_operation_is_needed(kind: str, name: str, form: str) -> None:
    plan = json.loads(dumps(algorithm(name, kind, 3, in_place=True), form=PlanForm.parse(form)))
    blocks = plan["gpus"][1]["threadblocks"]
    for op in range(len(blocks[0]["ops"])):
        if "LL" in form and blocks[0]["ops"][op]["name"] == "nop":
            continue  # Where packets depend on each other, threads need not meet; the writer does not look that far.
        if "pull" in form and [each["name"] for each in blocks[0]["ops"][op - 1 : op + 1]] == ["rlxwait", "nop"]:
            continue  # Nobody reads scratch from before the launch: the same.
        with pytest.raises(StrettoError):
            check_plan(loads(without(plan, 1, 0, op)), seeds=[0, 1, 2])


def test_a_shifted_place_is_noticed() -> None:
    plan = json.loads(dumps(algorithm("direct", "all_reduce", 3), form=PlanForm(protocol="LL")))
    noticed = 0
    for op in plan["gpus"][0]["threadblocks"][0]["ops"]:
        for part in (*op.get("src_buff", ()), *op.get("dst_buff", ())):
            part["index"] += 1
            with pytest.raises(StrettoError):
                check_plan(loads(json.dumps(plan)), seeds=[0, 1])
            part["index"] -= 1
            noticed += 1
    assert noticed > 8


def test_loops_that_turn_more_often_than_their_peers_are_noticed() -> None:
    plan = json.loads(dumps(algorithm("ring", "all_gather", 3), form=PlanForm(loop_bytes=64)))
    (loop,) = (op for op in plan["gpus"][1]["threadblocks"][0]["ops"] if op["name"] == "pipeline")
    for unit in (32, 128):
        loop["iter_context"]["unit_size"] = unit
        with pytest.raises(VerificationError):
            check_plan(loads(json.dumps(plan)), seeds=[0])


def test_threads_that_serve_no_channel_wait_for_nobody() -> None:
    """With as many threads as channels each of them would wait by itself; a threadblock has more."""
    plan = json.loads(dumps(algorithm("direct", "all_reduce", 3, in_place=True)))
    ops = plan["gpus"][1]["threadblocks"][0]["ops"]
    assert [op["name"] for op in ops[1:4]] == ["rlxwait", "nop", "rres"]
    ops[1:3] = [ops[2], ops[1]]
    with pytest.raises(VerificationError, match="race"):
        check_plan(loads(json.dumps(plan)), seeds=[0])


def test_data_that_threads_pass_on_without_meeting_is_a_race() -> None:
    """However many operations lie between: any thread may have any element."""
    plan = json.loads(dumps(algorithm("direct", "all_to_all", 3, in_place=True), form=PlanForm(protocol="LL")))
    found = 0
    for gpu in plan["gpus"]:
        for ops in (tb["ops"] for tb in gpu["threadblocks"]):
            for k in [k for k, op in enumerate(ops) if op["name"] == "nop"]:
                meeting = ops.pop(k)
                with pytest.raises(VerificationError, match="race"):
                    check_plan(loads(json.dumps(plan)), seeds=[0])
                ops.insert(k, meeting)
                found += 1
    assert found


def test_packets_in_single_scratch_are_overwritten() -> None:
    plan = json.loads(dumps(algorithm("direct", "all_gather", 3), form=PlanForm(protocol="LL")))
    plan["use_double_scratch_buffer"] = False
    with pytest.raises(VerificationError, match=r"race|deadlock"):
        check_plan(loads(json.dumps(plan)), seeds=range(6), launches=4)


def test_slices_of_different_size_clash() -> None:
    """Two threadblocks that cut the same data differently touch each other's part."""
    plan = json.loads(dumps(algorithm("direct", "all_reduce", 3), form=PlanForm(slices=2)))
    plan["gpus"][0]["threadblocks"][1]["ops"][3]["tbg_info"] = {"tb_id": 0, "tbg_size": 1}
    with pytest.raises(VerificationError):
        check_plan(loads(json.dumps(plan)), seeds=[0, 1, 2])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("protocol=LL128", "unknown protocol 'LL128'; choose from: Simple, LL"),
        ("slices=0", "slices: must be 1..1024, not 0"),
        ("threads=100", "threads: must be 32..1024 in steps of 32, not 100"),
        ("loop_bytes=8", "loop_bytes: must be a multiple of 16"),
        ("protocol=LL,loop_bytes=64", "loop_bytes: packets cannot be sent in a loop"),
        ("protocol=LL,pull=1", "pull: packets are sent; choose protocol Simple"),
        ("speed=3", "unknown part of a form 'speed'"),
        ("slices=x", "slices: must be KEY=VALUE with a whole number"),
    ],
)
def test_wrong_forms_are_refused(form: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        PlanForm.parse(form)


def test_limits_are_named() -> None:
    with pytest.raises(InvalidInput, match="hears nothing from it"):
        dumps(algorithm("direct", "broadcast", 3), form=PlanForm(protocol="LL"))
    with pytest.raises(InvalidInput, match="90 threadblocks are more than max_threadblocks 80"):
        dumps(algorithm("direct", "all_reduce", 3), form=PlanForm(slices=90))
    with pytest.raises(InvalidInput, match="streams: must be >= 1"):
        widen(algorithm("direct", "all_reduce", 3), streams=0)


def test_a_form_is_text_and_back() -> None:
    form = PlanForm(protocol="LL", streams=8, slices=2, threads=512)
    assert PlanForm.parse(str(form)) == form
