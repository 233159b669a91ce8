# SPDX-License-Identifier: Apache-2.0
"""At which moments of a script iterations end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stretto.control.marks import LOOK, MOST, USER, Marks, common, period_of


def _ends(marks: Marks, keys: Sequence[str]) -> list[int]:
    return [at for at, key in enumerate(keys) if marks.end(key)]


def test_one_optimizer_ends_an_iteration_with_every_step() -> None:
    assert _ends(Marks(), "aaa") == [0, 1, 2]


def test_of_two_that_take_turns_the_first_marks() -> None:
    assert _ends(Marks(), "ababab") == [0, 2, 4]


def test_an_optimizer_that_is_gone_is_replaced() -> None:
    assert _ends(Marks(), "aabbb") == [0, 1, 3, 4]


def test_what_comes_once_in_a_period_marks_iterations_even_after_a_shorter_one() -> None:
    marks = Marks()
    _ends(marks, "ddg")
    marks.learn([marks.number(key) for key in "ddgddgddg"], 3)
    assert _ends(marks, "ddgddgdgddg") == [2, 5, 7, 10]


def test_where_nothing_comes_once_so_many_moments_are_an_iteration() -> None:
    marks = Marks()
    marks.learn([marks.number(key) for key in "aaaaaa"], 3)
    assert _ends(marks, "aaaaaaa") == [2, 5]


def test_a_period_of_one_changes_nothing() -> None:
    marks = Marks()
    _ends(marks, "aa")
    marks.learn([marks.number(key) for key in "aaaa"], 1)
    assert _ends(marks, "aabbb") == [0, 1, 3, 4]


def test_what_was_learnt_is_forgotten_when_the_marker_is_gone() -> None:
    marks = Marks()
    marks.learn([marks.number(key) for key in "ddgddg"], 3)
    assert _ends(marks, "ddgddg") == [2, 5]
    after = _ends(marks, "e" * 12)
    assert after and after == list(range(after[0], 12))


def test_a_script_that_marks_iterations_itself_is_believed() -> None:
    marks = Marks()
    assert _ends(marks, "aa") == [0, 1]
    assert [marks.end(key) for key in ("a", USER, "a", "a", USER)] == [True, True, False, False, True]


@pytest.mark.parametrize("period", [1, 2, 5, MOST])
def test_periods_are_found_in_what_was_looked_at(period: int) -> None:
    once = [(0, at) for at in range(period)]
    assert period_of((once * LOOK)[:LOOK]) == period


def test_what_does_not_repeat_has_no_period() -> None:
    assert period_of(list(range(LOOK))) == 0
    assert period_of([*[0] * (LOOK - 1), 1]) == 0


def test_ranks_with_different_periods_have_one_together() -> None:
    assert common([2, 3]) == 6 and common([1, 0]) == 0 and common([7, 5]) == 0
