# SPDX-License-Identifier: Apache-2.0
"""Turns on links between ranks of one host: who waits for whom, and who gives up waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from stretto import Cluster
from stretto.planner.algebra.motif import motif_of
from stretto.planner.algebra.rewrites import rewrites
from stretto.planner.plan import MotifPlan, OpPlan, Plan, TurnPlan
from stretto.runtime.enforcer import link_turns as module
from stretto.runtime.enforcer.link_turns import TurnBoard
from stretto.runtime.enforcer.rank_plan import LinkTurnOf, RankMotif, RankOp, share_of
from stretto.runtime.enforcer.sequencer import QueuedOp, Sequencer
from stretto.workload import Dep, Op, Workload

JOIN_S = 60.0
PLAN = 3


class _Store(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> Any:  # type: ignore[override]
        return self[key].encode()


class _Submission:
    """Starts motifs that have nothing to do, so that they end at once."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def start(self, motif: Any) -> None:
        self.started.set()

    def watch(self, motif: Any) -> None: ...

    def moved(self, motif: Any) -> None: ...

    def over(self) -> None: ...


Made = tuple[TurnBoard, Sequencer]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Made, Made]]:
    """Rank 0, which tells rank 1 of its motifs, and rank 1."""
    store = _Store()
    monkeypatch.setattr(module, "start_store", lambda name, apart: store)
    made = []
    for rank, peers in ((0, [1]), (1, [])):
        sequencer = Sequencer()
        board = TurnBoard(rank, sequencer, 1)
        sequencer.link_turns = board
        board.begin(PLAN, 0, 1.0, peers)
        made.append((board, sequencer))
    yield made[0], made[1]
    for board, _ in made:
        board.close()


def _queued(number: int, iteration: int, **rest: Any) -> QueuedOp:
    whole = motif_of("all_reduce", (number, 9), 8.0, 0)
    motif = RankMotif(
        number=0, leaf=whole, algorithm="ring", channels=("a",), lane=0, after=(), brief=False, **rest
    )  # fmt: skip
    op = Op(name=f"op{number}", kind="all_reduce", nbytes=8.0)
    return QueuedOp(PLAN, RankOp(number=number, op=op, whole=whole, motifs=(motif,), option="whole"), iteration)


def _run(sequencer: Sequencer, queued: QueuedOp) -> _Submission:
    submission = _Submission()
    sequencer.add(queued.motifs.values())
    sequencer.submit(queued, cast(Any, submission))
    return submission


def _first(made: Made, iteration: int) -> None:
    """Rank 0 runs its motif of an iteration."""
    _run(made[1], _queued(0, iteration, tells=(1,)))


def _then(made: Made, iteration: int, lag: int = 0) -> _Submission:
    """Rank 1 asks for its motif of an iteration, which waits for rank 0's of `lag` iterations before."""
    return _run(made[1], _queued(1, iteration, link_turns=(LinkTurnOf(op=0, motif=0, lag=lag, peers=(0,)),)))


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + JOIN_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def _heard(ranks: tuple[Made, Made]) -> None:
    """Rank 1 has heard of rank 0's first iteration."""
    _until(lambda: 1 in ranks[0][0]._addresses)
    _first(ranks[0], 0)
    _until(lambda: 0 in ranks[1][0]._heard)


def test_a_rank_that_has_said_nothing_is_not_waited_for(ranks: tuple[Made, Made]) -> None:
    assert _then(ranks[1], 0).started.is_set()


def test_a_motif_waits_until_the_other_one_of_its_iteration_has_ended(ranks: tuple[Made, Made]) -> None:
    _heard(ranks)
    assert _then(ranks[1], 0).started.is_set()
    waiting = _then(ranks[1], 1)
    assert not waiting.started.is_set()
    assert ranks[1][1]._holds_back(), "its channel lies idle for a turn"
    _first(ranks[0], 1)
    assert waiting.started.wait(JOIN_S)


def test_the_turn_may_be_one_of_another_iteration(ranks: tuple[Made, Made]) -> None:
    _heard(ranks)
    assert _then(ranks[1], 0, lag=1).started.is_set(), "there was none before the first"
    assert _then(ranks[1], 1, lag=1).started.is_set()
    assert not _then(ranks[1], 1, lag=0).started.is_set()


def test_a_turn_that_does_not_come_ends_all_turns_of_the_plan(
    ranks: tuple[Made, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    _heard(ranks)
    ranks[1][0]._patience_s = 0.0
    assert _then(ranks[1], 1).started.wait(JOIN_S)
    assert _then(ranks[1], 2).started.is_set()


def test_another_plan_knows_nothing_of_the_last_one(ranks: tuple[Made, Made]) -> None:
    _heard(ranks)
    ranks[1][0].begin(PLAN + 1, 5, 1.0, [])
    assert _then(ranks[1], 6).started.is_set(), "what runs out of the old plan waits for nobody"


RING = Cluster.preset("ring", nodes=4)
HOSTS = ["x", "x", "y", "y"]


def _plan(*turns: TurnPlan) -> tuple[Plan, Workload]:
    """Two groups of two hosts, the second's sum behind the first's."""
    ops = [Op(name="work", duration_us=1.0)]
    ops += [
        Op(name=name, kind="all_reduce", nbytes=8.0, groups=(ranks,), after=(Dep(op="work"),))
        for name, ranks in (("a", (0, 2)), ("b", (1, 3)))
    ]
    step = Workload(name="two", num_ranks=4, ops=tuple(ops))
    made = [
        OpPlan(
            op=op.name, kind=op.kind, nbytes=8.0, option="whole", expression=next(rewrites(op, op.groups, RING)).text,
            motifs=(MotifPlan(motif="AR", algorithm="ring", channels=("rdma",), seq=seq),),
        )
        for seq, op in enumerate(step.comm_ops)
    ]  # fmt: skip
    return Plan(
        name="by hand", workload=step.name, workload_digest=step.digest, cluster="c", cluster_digest="d",
        iteration_us=1.0, ops=tuple(made), link_turns=turns,
    ), step  # fmt: skip


def test_each_rank_waits_for_the_ranks_of_its_own_host() -> None:
    plan, step = _plan(TurnPlan(op="b", motif=0, behind="a", behind_motif=0))
    shares = [share_of(plan, step, rank, HOSTS, link_turns=True) for rank in range(4)]
    motifs = [next(iter(share.ops.values())).motifs[0] for share in shares]
    assert [motif.tells for motif in motifs] == [(1,), (), (3,), ()]
    assert [[turn.peers for turn in motif.link_turns] for motif in motifs] == [[], [(0,)], [], [(2,)]]
    assert not any(share_of(plan, step, rank, HOSTS).takes_turns for rank in range(4)), "not where nobody can wait"
