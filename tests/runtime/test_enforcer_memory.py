# SPDX-License-Identifier: Apache-2.0
"""What the enforcer holds on to, and where a motif's memory lies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stretto.planner.algebra.motif import motif_of
from stretto.runtime.enforcer.binding import MotifBinding, Pieces
from stretto.runtime.enforcer.memory import Pool, RowLayout, stage
from stretto.runtime.enforcer.planned_work import PlannedWork
from stretto.runtime.enforcer.rank_plan import RankMotif, RankOp
from stretto.runtime.enforcer.sequencer import QueuedMotif, QueuedOp, Sequencer
from stretto.runtime.enforcer.submission import PlaceSubmission
from stretto.workload import Op

WHOLE = motif_of("all_reduce", (0, 1), 8.0, 0)


class _Done:
    """A motif that has ended by the time somebody waits."""

    done, error, elapsed_us = True, None, 1.0

    def wait(self, timeout_s: float | None = None) -> bool:
        return True


class _Submission:
    instead = None

    def __init__(self, queued: QueuedOp) -> None:
        self.queued = queued

    def start(self, motif: QueuedMotif) -> _Done:
        return _Done()

    def watch(self, motif: QueuedMotif) -> None: ...

    def moved(self, motif: QueuedMotif) -> None: ...

    def over(self) -> None: ...


class _Owner:
    def stalled(self, queued: QueuedOp) -> None: ...

    def waited(self, queued: QueuedOp, begin_us: float, end_us: float) -> None: ...

    def spent(self, queued: QueuedOp, motif: int, start_us: float, end_us: float) -> None: ...

    def explain(self, queued: QueuedOp, error: Exception) -> Exception:
        return error


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_an_op_that_was_waited_for_goes_at_once_though_its_work_is_remembered(no_collector: None) -> None:
    part = RankMotif(number=0, leaf=WHOLE, algorithm="ring", channels=("a",), lane=0, after=(), brief=False)
    op = Op(name="op", kind="all_reduce", nbytes=8.0)
    queued = QueuedOp(1, RankOp(number=0, op=op, whole=WHOLE, motifs=(part,), option="whole"), 0)
    sequencer = Sequencer()
    sequencer.add(queued.motifs.values())
    submission: Any = _Submission(queued)
    sequencer.submit(queued, submission)
    work = PlannedWork(_Owner(), sequencer, queued, submission, [])
    held = weakref.ref(submission)
    del submission
    assert held() is not None
    work.wait()
    queued.forget()
    del queued
    assert held() is None
    assert work.is_completed() and work.is_success()
    assert work.get_future().wait() == []


def _task(gives: Pieces, takes: Pieces, at: int = 0, *, in_place: bool = True) -> RowLayout:
    return RowLayout.of(
        MotifBinding(motif=0, leaf=WHOLE, program=None, count=8, in_place=in_place, gives=gives, takes=takes, at=at)
    )


@pytest.mark.parametrize(
    ("gives", "takes", "at", "read", "written"),
    [
        (((0, 2, 10),), ((0, 2, 10),), 0, (2, 10), (2, 10)),
        (((0, 0, 8),), ((0, 4, 8),), 4, (0, 8), (4, 8)),
        (((0, 4, 8),), ((0, 0, 8),), 4, (4, 8), (0, 8)),
    ],
)
def test_in_place_and_in_one_piece_a_motif_works_on_the_tensor_itself(
    gives: Pieces, takes: Pieces, at: int, read: tuple[int, int], written: tuple[int, int]
) -> None:
    layout = _task(gives, takes, at)
    assert layout.place == (0, *read, *written)
    tensor = torch.arange(12)
    staged = stage(layout, (tensor, tensor, None), tensor.dtype, Pool())
    assert staged.source is not None and staged.target is not None
    assert staged.source[0] is tensor and staged.target[0] is tensor
    assert (staged.source[1:], staged.target[1:]) == (read, written) and not staged.scratch


def test_what_lies_in_several_pieces_is_staged_and_brought_back() -> None:
    pieces: Pieces = ((0, 0, 2), (0, 6, 8))
    layout, pool = _task(pieces, pieces), Pool()
    assert layout.place is None
    tensor = torch.arange(12)
    staged = stage(layout, (tensor, tensor, None), tensor.dtype, pool)
    assert staged.target is not None
    assert staged.target[0].tolist() == [0, 1, 6, 7]
    staged.target[0].neg_()
    staged.back((tensor, tensor, None), pool)
    assert tensor.tolist() == [0, -1, 2, 3, 4, 5, -6, -7, 8, 9, 10, 11]


def test_a_motif_that_does_not_work_in_place_has_no_place() -> None:
    assert _task(((0, 0, 8),), ((1, 0, 8),), in_place=False).place is None


def test_memory_of_ever_new_sizes_is_not_kept_for_ever() -> None:
    pool = Pool(max_bytes=1000)
    for size in range(1, 100):
        pool.give(torch.empty(size))
        assert pool.kept_bytes <= 1000
    assert pool.take(torch.float32, 99).numel() == 99
    kept = pool.kept_bytes
    pool.take(torch.float32, 98)
    assert pool.kept_bytes == kept - 98 * 4
    pool.give(torch.empty(1000))
    assert pool.kept_bytes == 0


def test_what_runs_in_plain_order_already_is_not_run_again_when_a_plan_is_left() -> None:
    op = Op(name="op", kind="all_to_all", nbytes=8.0)
    queued = QueuedOp(1, RankOp(number=0, op=op, whole=WHOLE, motifs=(), option="whole"), 0)
    submission = PlaceSubmission(_Owner(), queued)
    submission.run_plainly()
    assert submission.instead is None and queued.done and queued.error is None
