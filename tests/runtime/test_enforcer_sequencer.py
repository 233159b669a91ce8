# SPDX-License-Identifier: Apache-2.0
"""Who is woken when: motifs that nobody reports must still be noticed by whoever needs their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.planner.algebra.motif import motif_of
from stretto.runtime.enforcer import planned_work
from stretto.runtime.enforcer import sequencer as sequencer_module
from stretto.runtime.enforcer.messages import MessageLines
from stretto.runtime.enforcer.planned_work import PlannedWork
from stretto.runtime.enforcer.rank_plan import RankMotif, RankOp
from stretto.runtime.enforcer.sequencer import QueuedMotif, QueuedOp, Sequencer
from stretto.runtime.torch_backend.work import GroupWork
from stretto.workload import Op

LONG_S = 3600.0
JOIN_S = 60.0


class _Motif:
    """A motif under way that ends when the test says so; without a report, unless it is watched."""

    elapsed_us = 1.0
    error: Exception | None = None

    def __init__(self) -> None:
        self._event = threading.Event()
        self.looked = threading.Event()

    @property
    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        self.looked.set()
        return self._event.wait(timeout_s)

    def end(self) -> None:
        self._event.set()


class _Submission:
    """Stands for the application's memory, and for the carrier."""

    instead = None

    def __init__(self) -> None:
        self.started: dict[int, _Motif] = {}
        self.watched: list[QueuedMotif] = []

    def start(self, motif: QueuedMotif) -> _Motif:
        return self.started.setdefault(motif.rank_motif.number, _Motif())

    def watch(self, motif: QueuedMotif) -> None:
        self.watched.append(motif)

    def moved(self, motif: QueuedMotif) -> None: ...

    def over(self) -> None: ...


class _Owner:
    def stalled(self, queued: QueuedOp) -> None: ...

    def waited(self, queued: QueuedOp, begin_us: float, end_us: float) -> None: ...

    def spent(self, queued: QueuedOp, motif: int, start_us: float, end_us: float) -> None: ...

    def explain(self, queued: QueuedOp, error: Exception) -> Exception:
        return error


def _op(number: int, *channels: str) -> QueuedOp:
    """An op with a motif on each of some channels."""
    whole = motif_of("all_reduce", (0, 1), 8.0, 0)
    motifs = tuple(
        RankMotif(number=at, leaf=whole, algorithm="ring", channels=(channel,), lane=at, after=(), brief=False)
        for at, channel in enumerate(channels)
    )
    op = Op(name=f"op{number}", kind="all_reduce", nbytes=8.0)
    return QueuedOp(1, RankOp(number=number, op=op, whole=whole, motifs=motifs, option="whole"), 0)


def _submitted(sequencer: Sequencer, queued: QueuedOp) -> tuple[_Submission, PlannedWork]:
    submission: Any = _Submission()
    sequencer.submit(queued, submission)
    return submission, PlannedWork(_Owner(), sequencer, queued, submission, [])


@pytest.fixture(autouse=True)
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking again after a while must not be what ends a wait."""
    monkeypatch.setattr(planned_work, "TICK_S", LONG_S)


@pytest.fixture
def wait() -> Iterator[Callable[[PlannedWork], threading.Thread]]:
    threads: list[threading.Thread] = []

    def begin(work: PlannedWork) -> threading.Thread:
        threads.append(threading.Thread(target=work.wait, args=(timedelta(seconds=LONG_S),), daemon=True))
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()


def _lines(*ops: QueuedOp) -> Sequencer:
    sequencer = Sequencer()
    sequencer.add([motif for queued in ops for motif in queued.motifs.values()])
    return sequencer


def test_a_wait_that_began_before_the_motif_did_ends_with_it(wait: Callable[[PlannedWork], threading.Thread]) -> None:
    first, last = _op(0, "a"), _op(1, "a")
    sequencer = _lines(first, last)
    before, _ = _submitted(sequencer, first)
    submission, work = _submitted(sequencer, last)
    assert before.watched, "something stands behind it"
    waiting = wait(work)
    while last._event is None:
        waiting.join(0.001)
    before.started[0].end()
    sequencer.ended(before.watched[0])
    # Nobody reports the last motif of a line: the one who waits has to turn to it.
    assert submission.started[0].looked.wait(JOIN_S)
    submission.started[0].end()
    waiting.join(JOIN_S)
    assert last.done and not submission.watched


def test_whoever_only_asks_sees_the_end_of_a_motif_that_nobody_reports() -> None:
    only = _op(0, "a")
    sequencer = _lines(only)
    submission, work = _submitted(sequencer, only)
    assert not work.is_completed()
    submission.started[0].end()
    assert work.is_completed() and not submission.watched


def test_what_runs_after_its_own_iteration_starts_when_it_is_put_in_line() -> None:
    pushed_back = _op(0, "a")
    sequencer = Sequencer()
    submission, _ = _submitted(sequencer, pushed_back)
    assert not submission.started, "it is in no line yet"
    sequencer.add(pushed_back.motifs.values())
    assert list(submission.started) == [0]


def test_a_motif_that_is_put_behind_one_that_runs_has_its_end_reported() -> None:
    first, pushed_back = _op(0, "a"), _op(1, "a")
    sequencer = _lines(first)
    running, _ = _submitted(sequencer, first)
    _submitted(sequencer, pushed_back)
    assert not running.watched
    sequencer.add(pushed_back.motifs.values())
    assert running.watched == [first.motifs[0]]


def test_who_is_told_of_a_motif_that_could_not_start_may_wait_for_other_threads() -> None:
    first, last = _op(0, "a"), _op(1, "b")
    sequencer = _lines(first, last)
    _, work = _submitted(sequencer, first)
    reached: list[bool] = []

    def told() -> None:
        other = threading.Thread(target=lambda: reached.append(sequencer.idle), daemon=True)
        other.start()
        other.join(JOIN_S)

    work._when_over(told)
    broken: Any = _Submission()
    broken.start = lambda motif: 1 // 0
    sequencer.submit(last, broken)
    assert reached == [True], "the sequencer can be asked while somebody is told"
    assert isinstance(first.error, ZeroDivisionError) and isinstance(last.error, ZeroDivisionError)
    after = _op(2, "a")
    sequencer.submit(after, _Submission())
    assert after.done and after.error is sequencer.failure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time that the sequencer sees."""
    at = [0.0]
    monkeypatch.setattr(sequencer_module, "now_us", lambda: at[0])
    return lambda us: at.__setitem__(0, us)


def test_a_motif_that_could_run_but_for_one_that_was_not_submitted_is_held_back(clock: Callable[[float], None]) -> None:
    first, last = _op(0, "a"), _op(1, "a")
    sequencer = _lines(first, last)
    clock(10.0)
    _submitted(sequencer, last)
    clock(30.0)
    assert sequencer.take_held_us() == 20.0, "an iteration may end meanwhile"
    clock(70.0)
    _submitted(sequencer, first)
    clock(1000.0)
    assert sequencer.take_held_us() == 40.0
    assert last.motifs[0].ready_us == 10.0


def test_nothing_is_held_back_while_the_channel_is_used(clock: Callable[[float], None]) -> None:
    running, first, last = _op(0, "a"), _op(1, "a"), _op(2, "a")
    sequencer = _lines(running, first, last)
    clock(5.0)
    submission, _ = _submitted(sequencer, running)
    clock(10.0)
    _submitted(sequencer, last)
    clock(40.0)
    submission.started[0].elapsed_us = 35.0
    submission.started[0].end()
    clock(100.0)
    _submitted(sequencer, first)
    assert sequencer.take_held_us() == 60.0, "from its end on, though nobody looked before"
    clock(200.0)
    assert sequencer.take_held_us() == 0.0


def test_what_stands_in_line_behind_a_motif_that_runs_is_not_held_back(clock: Callable[[float], None]) -> None:
    first, last = _op(0, "a"), _op(1, "a")
    sequencer = _lines(first, last)
    submission, _ = _submitted(sequencer, first)
    clock(10.0)
    _submitted(sequencer, last)
    clock(50.0)
    submission.started[0].elapsed_us = 50.0
    submission.started[0].end()
    sequencer.reap()
    sequencer.ended(first.motifs[0])
    assert last.motifs[0].ready_us == 10.0 and last.motifs[0].start_us == 50.0
    assert sequencer.take_held_us() == 0.0


class _Pipeline:
    """Stands for a prepared plan: ops in the plan's order, each a sum or a message to rank 1."""

    def __init__(self, *kinds: str) -> None:
        self.queued = [self._op(number, kind) for number, kind in enumerate(kinds)]
        messages = tuple(number for number, kind in enumerate(kinds) if kind == "send")
        ops = {number: queued.rank_op for number, queued in enumerate(self.queued)}
        self.share = SimpleNamespace(messages={(0, 1): messages}, ops=ops)
        self.calls: list[str] = []

    @staticmethod
    def _op(number: int, kind: str) -> QueuedOp:
        whole = motif_of(kind, (0, 1), 8.0, 0)
        lines = ("a>",) if kind == "send" else ("a>", "a<")
        part = RankMotif(
            number=0, leaf=whole, algorithm="ring", channels=("a",), lane=0, after=(), brief=False, lines=lines
        )
        op = Op(name=f"{kind}{number}", kind=kind, nbytes=8.0, groups=((0, 1),))
        return QueuedOp(1, RankOp(number=number, op=op, whole=whole, motifs=(part,), option="whole"), 0)

    def queued_op(self, iteration: int, number: int) -> QueuedOp:
        return self.queued[number]

    def send(self, lines: MessageLines, name: str) -> Any:
        def plain() -> Any:
            self.calls.append(name)
            return _Arrived([])

        active: Any = self
        return lines.take(active, 0, (0, 1), 8, follows=True, plain=plain, tensors=[])


class _Arrived(GroupWork):
    """A message that has ended."""

    def _block(self, timeout: timedelta) -> bool:
        return True

    def _poll(self) -> bool:
        return True


@pytest.fixture
def message_lines() -> Iterator[Callable[[_Pipeline, Sequence[int]], MessageLines]]:
    made: list[MessageLines] = []

    def make(pipeline: _Pipeline, order: Sequence[int]) -> MessageLines:
        made.append(MessageLines(_Owner(), _lines(*(pipeline.queued[number] for number in order))))
        return made[-1]

    yield make
    for lines in made:
        lines.close()


MakeLines = Callable[[_Pipeline, Sequence[int]], MessageLines]


def test_a_message_waits_for_the_sum_before_it_and_the_sum_for_the_message(message_lines: MakeLines) -> None:
    pipe = _Pipeline("all_reduce", "send", "all_reduce")
    lines = message_lines(pipe, (0, 1, 2))
    work = pipe.send(lines, "message")
    assert pipe.calls == []
    assert not work.is_completed()
    first, _ = _submitted(lines.sequencer, pipe.queued[0])
    assert pipe.calls == []
    first.started[0].end()
    lines.sequencer.ended(pipe.queued[0].motifs[0])
    assert pipe.calls == ["message"]
    assert work.wait()
    # The thread that waits for messages reports the end of this one.
    second, _ = _submitted(lines.sequencer, pipe.queued[2])
    deadline = time.monotonic() + JOIN_S
    while not second.started and time.monotonic() < deadline:
        time.sleep(0.001)
    assert second.started


def test_messages_of_a_pair_begin_in_the_order_of_the_application(message_lines: MakeLines) -> None:
    pipe = _Pipeline("all_reduce", "send", "send")
    lines = message_lines(pipe, (2, 0, 1))
    first = pipe.send(lines, "first")
    assert pipe.calls == []
    second = pipe.send(lines, "second")
    assert pipe.calls == ["first", "second"]
    assert first.wait()
    assert second.wait()


def test_messages_that_do_not_come_hold_nothing_back_after_their_iteration(message_lines: MakeLines) -> None:
    pipe = _Pipeline("send", "all_reduce")
    lines = message_lines(pipe, (0, 1))
    submission, _ = _submitted(lines.sequencer, pipe.queued[1])
    assert not submission.started
    active: Any = pipe
    lines.boundary(active, 0, marked=True)
    assert submission.started
    assert pipe.send(lines, "late") is None


def test_a_plan_that_ends_lets_go_what_it_holds_back(message_lines: MakeLines) -> None:
    pipe = _Pipeline("all_reduce", "send")
    lines = message_lines(pipe, (0, 1))
    work = pipe.send(lines, "message")
    lines.sequencer.fail(RuntimeError("the end"))
    assert pipe.calls == ["message"]
    assert work.wait()
