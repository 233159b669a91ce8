# SPDX-License-Identifier: Apache-2.0
"""Multicast messages in programs: what makes them well formed, and what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stretto as st
from stretto.errors import InvalidInput, VerificationError
from stretto.programs import Program
from stretto.programs.formats import text
from stretto.programs.interpret import check as interpret_and_check


def broadcast(**changes: Any) -> Program:
    columns: dict[str, Any] = {
        "src": [0, 0, 1], "dst": [1, 2, 3], "chunk": [0, 0, 0], "step": [0, 0, 1], "cast": [7, 7, -1],
    }  # fmt: skip
    return Program.from_steps("b", st.Broadcast(4), **(columns | changes))


def test_a_cast_verifies_and_survives_text_and_replace() -> None:
    program = broadcast()
    assert program.verify().fifo_depth == 1
    assert program.multicasts and not broadcast(cast=None).multicasts
    assert "0: 0>1 c0 cast 7\n" in text.dumps(program)
    assert text.loads(text.dumps(program)) == program
    assert program.replace(name="b") == program
    assert program != broadcast(cast=None)
    assert broadcast(cast=None).cast.tolist() == [-1, -1, -1]


def test_casts_are_sorted_along_with_their_steps() -> None:
    program = broadcast(src=[1, 0, 0], dst=[3, 1, 2], step=[1, 0, 0], cast=[-1, 7, 7])
    assert program == broadcast()


def test_lowering_sends_each_member_by_itself() -> None:
    lowered = broadcast().lower()
    lowered.verify()
    interpret_and_check(lowered)
    plain = broadcast(cast=None).lower()
    assert lowered.num_instructions == plain.num_instructions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": [0, 1, 1], "step": [0, 1, 2]}, r"transfers\[1\].cast: has another source than transfer 0"),
        ({"cast": [-1, 7, 7]}, r"transfers\[2\].cast: has another source than transfer 1"),
        ({"cast": [7, 7]}, "cast: must be a list of 3 numbers"),
        ({"cast": [-2, 7, 7]}, "cast must be >= -1"),
    ],
)
def test_malformed_casts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        broadcast(**changes)


def test_members_move_the_same_chunks_once_to_each_and_do_not_add() -> None:
    def two(**changes: Any) -> Program:
        columns: dict[str, Any] = {"src": [0, 0], "dst": [1, 2], "chunk": [0, 0], "step": [0, 0], "cast": 0}
        return Program.from_steps("t", st.AllGather(3, chunks=2), **(columns | changes))

    two()
    with pytest.raises(InvalidInput, match=r"transfers\[1\].cast: moves other chunks than transfer 0"):
        two(chunk=[0, 1])
    with pytest.raises(InvalidInput, match="cast 0 goes to rank 1 twice"):
        two(dst=[1, 1])
    with pytest.raises(InvalidInput, match=r"transfers\[0\].cast: adds up"):
        two(reduce=True)
    with pytest.raises(InvalidInput, match=r"transfers\[1\].cast: waits for others than transfer 0"):
        two().replace(after_ptr=np.array([0, 0, 1]), after=np.array([0], np.int32))


def test_casts_that_cross_on_two_connections_deadlock() -> None:
    """Each would have to start before the other: rank 1 receives c0 first, rank 2 c1."""
    columns: dict[str, Any] = {"src": [0] * 4, "dst": [1, 1, 2, 2], "chunk": [0, 1, 1, 0], "step": [0] * 4}
    crossed = Program.from_steps("x", st.Broadcast(3, chunks=2), **columns, cast=[0, 1, 1, 0])
    with pytest.raises(VerificationError, match=r"deadlock: .*cast 1.*cast 0"):
        crossed.verify()
    Program.from_steps("x", st.Broadcast(3, chunks=2), **columns).verify()


def test_a_cast_that_leaves_before_its_data_arrives_is_a_race_as_ever() -> None:
    program = broadcast(src=[1, 1, 0], dst=[2, 3, 1], step=[0, 0, 1])
    with pytest.raises(VerificationError, match="before it arrives"):
        program.verify()
