# SPDX-License-Identifier: Apache-2.0
"""The verifier: what it proves, what it refuses, and that nothing wrong slips through."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import AllGather, AllReduce, Broadcast, InvalidInput, Program, Reduce, VerificationError

Make = Callable[[int], Program]
Run = Callable[[Program, random.Random, int], str | None]


def with_dependencies(
    program: Program, after: list[list[int]] | None = None, gate: list[list[int]] | None = None
) -> Program:
    changes: dict[str, object] = {}
    for key, rows in (("after", after), ("gate", gate)):
        if rows is not None:
            changes[f"{key}_ptr"] = np.cumsum([0, *map(len, rows)]).astype(np.int64)
            changes[key] = np.array([x for row in rows for x in row], np.int32)
    return program.replace(**changes)


def rows(program: Program, key: str) -> list[list[int]]:
    of = program.after_of if key == "after" else program.gate_of
    return [of(t).tolist() for t in range(program.num_transfers)]


def chain_broadcast() -> Program:
    return Program.from_steps("chain", Broadcast(3), src=[0, 1], dst=[1, 2], chunk=[0, 0], step=[0, 1])


def exchange() -> Program:
    """Both ranks send the same chunk to each other and add it: reads must come before writes."""
    return Program.from_steps(
        "exchange", AllReduce(2, chunks=1), src=[0, 1], dst=[1, 0], chunk=[0, 0], step=[0, 0], reduce=True
    )


def refused(program: Program) -> str:
    with pytest.raises(VerificationError) as caught:
        program.verify()
    return str(caught.value)


def test_a_correct_chain_and_a_correct_exchange_verify() -> None:
    assert chain_broadcast().verify().fifo_depth == 1
    assert exchange().verify().warnings == ()


def test_reading_before_arrival_names_rank_chunk_and_transfer() -> None:
    message = refused(with_dependencies(chain_broadcast(), after=[[], []]))
    assert message.startswith("chain: transfer 1 (1>2 c0) reads chunk 0 on rank 1 before it arrives")


def test_a_missing_transfer_is_a_missing_chunk() -> None:
    lost = Program.from_steps("lost", Broadcast(3), src=[0], dst=[1], chunk=[0], step=[0])
    assert refused(lost) == "lost: rank 2 ends without chunk 0"


def test_a_missing_part_is_named() -> None:
    partial = Program.from_steps("partial", Reduce(3), src=[1], dst=[0], chunk=[0], step=[0], reduce=True)
    assert refused(partial) == "partial: rank 0 ends without rank 2's part of chunk 0"


def test_reducing_twice_is_refused() -> None:
    twice = Program.from_steps("twice", Reduce(2), src=[1, 1], dst=[0, 0], chunk=[0, 0], step=[0, 1], reduce=True)
    assert refused(twice) == "twice: transfer 1 (1>0 +c0) adds rank 1's part of chunk 0 on rank 0 a second time"


def test_adding_to_a_rank_that_has_nothing_is_refused() -> None:
    nothing = Program.from_steps("n", AllGather(2), src=[0], dst=[1], chunk=[0], step=[0], reduce=True)
    assert "reads chunk 0 on rank 1 before it arrives" in refused(nothing)


def test_overwriting_what_is_still_to_be_read_is_refused() -> None:
    message = refused(with_dependencies(exchange(), gate=[[], []]))
    assert message.startswith("exchange: transfer") and "overwrites chunk 0 on rank" in message


def test_a_result_with_too_many_parts_is_wrong() -> None:
    wants_own_part = dataclasses.replace(AllReduce(2, chunks=1), out_set=np.zeros(2, np.int32), part_sets=((0,),))
    mixed = Program.from_steps("m", wants_own_part, src=[1], dst=[0], chunk=[0], step=[0], reduce=True)
    assert refused(mixed).startswith("m: rank 0 ends with rank 1's part in chunk 0, where it does not belong")


def test_dependencies_in_a_circle_are_a_deadlock() -> None:
    ring = with_dependencies(exchange(), after=[[1], [0]])
    message = refused(ring)
    assert "deadlock" in message and "transfer 0" in message and "transfer 1" in message


def test_fifo_order_against_the_dependencies_is_a_deadlock() -> None:
    # Transfer 0 waits (through rank 1) for transfer 2, which stands behind it on the connection 0>1.
    backwards = Program.from_steps(
        "backwards", AllGather(2, chunks=2), src=[0, 1, 0, 1], dst=[1, 0, 1, 0], chunk=[0, 2, 1, 3], step=[0, 0, 0, 0]
    )
    assert backwards.verify().fifo_depth == 1
    assert "deadlock" in refused(with_dependencies(backwards, after=[[1], [2], [], []]))


def test_depth_one_is_only_a_warning() -> None:
    # The second message of each connection may leave only after the other connection's first was received, and
    # the first is received only after the second has been sent: two must fit.
    p = Program.from_steps(
        "two", AllGather(2, chunks=2), src=[0, 0, 1, 1], dst=[1, 1, 0, 0], chunk=[0, 1, 2, 3], step=[0, 0, 0, 0]
    )
    tight = with_dependencies(p, gate=[[3], [], [1], []])
    report = tight.verify()
    assert report.fifo_depth == 2 and report.warnings == ("deadlocks with FIFO depth 1; needs 2",)


def test_a_useless_copy_is_only_a_warning() -> None:
    again = Program.from_steps("again", Broadcast(2), src=[0, 0], dst=[1, 1], chunk=[0, 0], step=[0, 1])
    assert again.verify().warnings == ("1 copies bring what is already there, the last one transfer 1 (0>1 c0)",)


def test_multi_chunk_messages_are_checked_chunk_by_chunk() -> None:

    def wide(chunk: list[int], ptr: list[int]) -> Program:
        c = AllGather(2, chunks=2)
        return Program.from_steps("wide", c, src=[0, 1], dst=[1, 0], step=[0, 0], chunk=chunk, chunk_ptr=ptr)

    assert wide([0, 1, 2, 3], [0, 2, 4]).verify().fifo_depth == 1
    assert refused(wide([0, 1, 2], [0, 2, 3])) == "wide: rank 0 ends without chunk 3"
    with pytest.raises(InvalidInput, match=r"transfers\[1\]: moves chunk 2 twice"):
        wide([0, 1, 2, 2], [0, 2, 4])


def test_a_rank_subset_is_verified_by_position() -> None:
    assert Program.from_steps("s", Broadcast([5, 9]), src=[0], dst=[1], chunk=[0], step=[0]).verify().fifo_depth == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": [0, 1, 2]}, "step: must be a list of 2 numbers"),
        ({"lane": 1 << 20}, "lane: must be numbers of type int16"),
        ({"src": [1 << 40, 1]}, "src: must be numbers of type int32"),
        ({"dst": [1]}, "transfers: src, dst and chunks differ in length"),
        ({"route": [0]}, "route: must be a list of 2 numbers"),
        ({"chunk_ptr": [0, 5, 2], "step": [1, 0]}, "transfers: each must move at least one chunk"),
        ({"chunk_ptr": [0, 1], "step": [1, 0]}, "transfers: src, dst and chunks differ in length"),
        ({"chunk": [0, 2]}, "transfers: chunk 2 does not exist; there are 2"),
    ],
)
def test_columns_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    columns: dict[str, Any] = {"src": [0, 1], "dst": [1, 0], "chunk": [0, 1], "step": [0, 0]}
    with pytest.raises(InvalidInput, match=message):
        Program.from_steps("bad", AllGather(2), **(columns | changes))


def test_a_lone_rank_needs_no_transfers() -> None:
    alone = Program.from_steps("alone", AllReduce(1, chunks=2), src=[], dst=[], chunk=[], step=[])
    assert alone.verify().fifo_depth == 1 and alone.lower().verify().fifo_depth == 1


@given(st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_random_correct_programs_verify_and_run(
    make_random_program: Make, make_wide_program: Make, run_in_random_order: Run, seed: int
) -> None:
    for make in (make_random_program, make_wide_program):
        program = make(seed)
        report = program.verify()
        for order in range(3):
            assert run_in_random_order(program, random.Random(order), report.fifo_depth) is None


def mutate(program: Program, rng: random.Random) -> Program | None:
    """One random injury: a transfer or a dependency dropped, duplicated, moved or redirected."""
    p, count = program, program.num_transfers
    after, gate = rows(p, "after"), rows(p, "gate")
    t = rng.randrange(count)
    kind = rng.choice(["drop", "duplicate", "reorder", "redirect", "flip", "chunk", "drop_dep", "redirect_dep", "lane"])
    keep = list(range(count))
    changes: dict[str, object] = {}
    if kind == "drop":
        keep.remove(t)
    elif kind == "duplicate":
        keep.insert(rng.randrange(count + 1), t)
    elif kind == "reorder":
        keep.insert(rng.randrange(count), keep.pop(t))
    elif kind == "redirect":
        ends = rng.choice(["src", "dst"])
        array = getattr(p, ends).copy()
        array[t] = rng.randrange(p.collective.num_ranks)
        if p.collective.num_ranks < 2 or (array == getattr(p, "dst" if ends == "src" else "src")).any():
            return None
        changes[ends] = array
        here = changes.get("dst", p.dst)
        there = changes.get("src", p.src)
        assert isinstance(here, np.ndarray) and isinstance(there, np.ndarray)
        gate = [[g for g in gate[x] if here[x] in (there[g], here[g])] for x in range(count)]
    elif kind == "flip":
        changes["reduce"] = np.where(np.arange(count) == t, ~p.reduce, p.reduce)
    elif kind == "chunk":
        chunk = p.chunk.copy()
        chunk[rng.randrange(len(chunk))] = rng.randrange(p.collective.num_chunks)
        changes["chunk"] = chunk
    elif kind == "lane":
        changes["lane"] = np.where(np.arange(count) == t, 1 - p.lane, p.lane).astype(np.int16)
    else:
        table = rng.choice([after, gate])
        filled = [x for x in range(count) if table[x]]
        if not filled:
            return None
        x = rng.choice(filled)
        at = rng.randrange(len(table[x]))
        if kind == "drop_dep":
            table[x].pop(at)
        elif table is after:
            table[x][at] = rng.randrange(count)
        else:
            candidates = [g for g in range(count) if p.dst[x] in (p.src[g], p.dst[g])]
            table[x][at] = rng.choice(candidates)
    new_at = {old: new for new, old in enumerate(keep)}

    def renumber(table: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        moved = [[new_at[d] for d in table[old] if d in new_at] for old in keep]
        return np.cumsum([0, *map(len, moved)]).astype(np.int64), np.array([d for row in moved for d in row], np.int32)

    pick = np.array(keep, np.intp)
    wide = {key: changes.get(key, getattr(p, key)) for key in ("src", "dst", "reduce", "lane", "route", "chunk")}
    after_ptr, after_list = renumber(after)
    gate_ptr, gate_list = renumber(gate)
    taken = {key: np.asarray(value)[pick] for key, value in wide.items()}
    return p.replace(
        **taken,
        chunk_ptr=np.arange(len(keep) + 1),
        after_ptr=after_ptr,
        after=after_list,
        gate_ptr=gate_ptr,
        gate=gate_list,
    )


@given(st.integers(0, 10**9))
@settings(max_examples=400, deadline=None)
def test_a_mutation_is_caught_or_harmless(make_random_program: Make, run_in_random_order: Run, seed: int) -> None:
    """What the verifier lets pass gives the right result in every order we can find."""
    rng = random.Random(seed)
    mutant = mutate(make_random_program(seed % 1000), rng)
    if mutant is None:
        return
    try:
        report = mutant.verify()
    except VerificationError:
        return
    for order in range(12):
        assert run_in_random_order(mutant, random.Random(order), report.fifo_depth) is None


def test_most_mutations_are_really_caught(make_random_program: Make, run_in_random_order: Run) -> None:
    """The test above has teeth: wrong mutants exist in numbers, and every one that shows is refused."""
    shown = caught = 0
    for seed in range(400):
        mutant = mutate(make_random_program(seed), random.Random(seed))
        if mutant is None or mutant.num_transfers == 0:
            continue
        wrong = any(run_in_random_order(mutant, random.Random(order), 2) for order in range(6))
        shown += wrong
        if wrong:
            with pytest.raises(VerificationError):
                mutant.verify()
            caught += 1
    assert shown == caught and shown > 100
