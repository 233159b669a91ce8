# SPDX-License-Identifier: Apache-2.0
"""Single faults in exported plans: what the reader takes for right, a second interpreter must find right, too."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from drawn_programs import random_program
from plan_interpreter import Case, PlanInterpreter, Values, WrongPlanError

from stretto.algorithms import algorithm
from stretto.errors import InvalidInput, StrettoError
from stretto.programs.formats import mscclpp_json, mscclpp_wide
from stretto.programs.formats.mscclpp_reader import ExecutionPlan, check_plan, collective_of, loads
from stretto.programs.formats.mscclpp_wide import PlanForm

FORMS = (
    "", "slices=2", "streams=3", "protocol=LL", "protocol=LL,streams=5,apart=1", "loop_bytes=64", "multicast=1",
    "pull=1", "loop_bytes=48,halves=1", "loop_bytes=64,halves=1,pull=1", "streams of one host", "streams of two hosts",
)  # fmt: skip
CASES = (("direct", "all_reduce"), ("ring", "all_gather"), ("halving_doubling", "all_reduce"), ("direct", "all_to_all"))
RENAMED = {
    "signal": "rlxsignal", "wait": "rlxwait", "rlxsignal": "signal", "rlxwait": "wait", "put": "res", "rre": "rres",
    "pws": "put",
}  # fmt: skip
FAULTS = (
    "drop", "swap", "double", "channel", "place", "rename", "unit", "source", "peer", "slice", "size", "twice", "type",
    "places",
)  # fmt: skip
Op = dict[str, Any]


def exported(form: str, draw: random.Random) -> str:
    """A plan of a small program in a form; now and then of drawn trees."""
    if not form.startswith("streams of") and draw.random() < 0.3:
        try:
            return mscclpp_wide.dumps(random_program(draw.randrange(1 << 30)), form=PlanForm.parse(form))
        except InvalidInput:
            pass  # Not every program can loop.
    name, kind = draw.choice(CASES)
    ranks = draw.choice((2, 4) if name == "halving_doubling" else (2, 3, 4))
    program = algorithm(name, kind, ranks, in_place=draw.random() < 0.5)
    if form.startswith("streams of"):
        hosts = [rank % 2 if "two" in form else 0 for rank in range(ranks)]
        return mscclpp_json.dumps(program.lower(fifo_depth=2), hosts=hosts, zero_copy=draw.random() < 0.5)
    return mscclpp_wide.dumps(program, form=PlanForm.parse(form))


def case_of(plan: ExecutionPlan, elements: int) -> Case:
    """What goes into a plan and must come out, launch by launch."""
    c, known = collective_of(plan), dict[int, tuple[Values, Values]]()

    def case(launch: int) -> tuple[Values, Values]:
        if launch not in known:
            draw, held = random.Random(launch), dict[tuple[int, int, int], int]()
            inputs: Values = [[] for _ in range(c.num_ranks)]
            for r, values in enumerate(inputs):
                for k in range(int(c.in_ptr[r]), int(c.in_ptr[r + 1])):
                    for at in range(elements):
                        held[int(c.in_chunk[k]), int(c.in_part[k]), at] = draw.randrange(1, 1 << 40)
                        values.append(held[int(c.in_chunk[k]), int(c.in_part[k]), at])
            outputs: Values = [
                [
                    sum(held[int(c.out_chunk[k]), part, at] for part in c.parts_of(k))
                    for k in range(int(c.out_ptr[r]), int(c.out_ptr[r + 1]))
                    for at in range(elements)
                ]
                for r in range(c.num_ranks)
            ]
            known[launch] = inputs, outputs
        return known[launch]

    return case


def found_wrong(plan: dict[str, Any], as_read: ExecutionPlan, orders: int) -> str:
    """Why the second interpreter finds a plan wrong; empty where it is right in so many orders."""
    loops = [op["iter_context"] for ops in op_lists(plan) for op in ops if op["name"] == "pipeline"]
    elements = max([6, *(-(-3 * one["unit_size"] // (16 * one["num_chunks"])) for one in loops)])
    case = case_of(as_read, elements)
    for seed in range(orders):
        try:
            PlanInterpreter(plan, elements, seed).run(case)
        except WrongPlanError as error:
            return str(error)
    return ""


def op_lists(plan: dict[str, Any]) -> Iterator[list[Op]]:
    """The operations of every threadblock, and of every loop."""
    for gpu in plan["gpus"]:
        for block in gpu["threadblocks"]:
            yield block["ops"]
            yield from (op["ops"] for op in block["ops"] if op.get("ops"))


def mutated(plan: dict[str, Any], draw: random.Random) -> tuple[str, dict[str, Any]]:
    """The plan with one fault, and what that is; empty where it does not apply."""
    plan = copy.deepcopy(plan)
    ops = draw.choice([ops for ops in op_lists(plan) if ops])
    k = draw.randrange(len(ops))
    op, what = ops[k], draw.choice((*FAULTS, "move", "blocks"))
    parts = [*op.get("src_buff", []), *op.get("dst_buff", [])]
    ids = op.get("channel_ids") or op.get("semaphore_ids") or []
    done = True
    if what == "drop":
        del ops[k]
    elif what == "swap" and k + 1 < len(ops):
        ops[k : k + 2] = ops[k + 1], op
    elif what == "double":
        ops.insert(draw.randrange(len(ops) + 1), copy.deepcopy(op))
    elif what == "channel" and len(ids) > 1:
        ids.pop(draw.randrange(len(ids)))
    elif what == "place" and parts:
        draw.choice(parts)["index"] += draw.choice((-1, 1))
    elif what == "rename" and op["name"] in RENAMED:
        op["name"] = RENAMED[op["name"]]
    elif what == "unit" and "iter_context" in op:
        op["iter_context"]["unit_size"] = draw.choice((16, 32, 96, 128))
    elif what == "source" and len(op.get("src_buff", [])) > 1:
        op["src_buff"].pop()
    elif what == "peer" and any("buffer_id" in part for part in parts):
        draw.choice([part for part in parts if "buffer_id" in part])["buffer_id"] += draw.choice((-1, 1))
    elif what == "move" and len(ops) > 2:
        ops.insert(draw.randrange(len(ops)), ops.pop(k))
    elif what == "blocks" and len(blocks := draw.choice(plan["gpus"])["threadblocks"]) > 1:
        one, other = draw.sample(blocks, 2)
        one["ops"], other["ops"] = other["ops"], one["ops"]
    else:
        done = misplaced(what, op, parts, draw)
    return (f"{what} {op['name']}" if done else ""), plan


def misplaced(what: str, op: Op, parts: list[dict[str, Any]], draw: random.Random) -> bool:
    """Put a fault into the places or channels of an operation; False where it does not apply."""
    ids = op.get("channel_ids", [])
    if what == "slice" and "tbg_info" in op:
        op["tbg_info"]["tb_id"] = (op["tbg_info"]["tb_id"] + 1) % op["tbg_info"]["tbg_size"]
    elif what == "size" and parts:
        one = draw.choice(parts)
        one["size"] = max(1, one["size"] + draw.choice((-1, 1)))
    elif what == "twice" and len(ids) > 1:
        ids[0] = ids[1]
    elif what == "type" and any("type" in part for part in parts):
        draw.choice([part for part in parts if "type" in part])["type"] = draw.choice("ios")
    elif what == "places" and len(parts) > 1:
        one, other = draw.sample(parts, 2)
        one["index"], other["index"] = other["index"], one["index"]
    else:
        return False
    return True


@pytest.mark.parametrize("form", FORMS)
def test_what_the_reader_takes_for_right_is_right(form: str) -> None:
    caught = harmless = 0
    for seed in range(2):
        draw = random.Random(f"{form} {seed}")
        text = exported(form, draw)
        plan, as_read = json.loads(text), loads(text)
        assert not found_wrong(plan, as_read, 2)
        for _ in range(25):
            what, wrong = mutated(plan, draw)
            if not what or wrong == plan:
                continue
            try:
                check_plan(loads(json.dumps(wrong)), seeds=[0, 1])
            except StrettoError:
                caught += 1
                continue
            harmless += 1
            assert not (why := found_wrong(wrong, as_read, 6)), f"{as_read.name}: {what}: {why}"
    assert caught > harmless
