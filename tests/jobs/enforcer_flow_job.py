# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the enforcer's tests of order, agreement and mismatches run; outcomes reported as JSON."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from capture_scenarios import chosen, compute, fork
from enforcer_plans import arguments, cluster_of, enforced, join, numbers, simple_plan, step_of, whole

import stretto.torch
from stretto.errors import StrettoError
from stretto.runtime.enforcer.carrier import SLOTS
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.runtime.torch_backend.current import CURRENT
from stretto.workload import Dep, Op, Workload

CLUSTER = cluster_of(1)
COUNT = 500
TWO = step_of([("all_to_all", 4.0 * COUNT, 0), ("all_reduce", 4.0 * COUNT, 0)], 2)
ONE_CHANNEL = simple_plan(TWO, CLUSTER, [whole(["rdma"], seq=0), whole(["rdma"], seq=1)])
REVERSED = simple_plan(TWO, CLUSTER, [whole(["rdma"], seq=1), whole(["rdma"], seq=0)])
BESIDE = simple_plan(TWO, CLUSTER, [whole(["rdma"], seq=0), whole(["eth"], seq=0)])


class Model:
    """A step of two ops, and ways in which an iteration may differ from the others."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.lonely: Any = None
        """A group of this rank alone."""
        self.strange: Callable[[int], str] = lambda number: ""
        self.before: Callable[[], object] = lambda: None
        self.between: Callable[[], object] = lambda: None

    def step(self, number: int) -> list[int]:
        """Submit both, wait for both."""
        how = self.strange(number)
        count = COUNT + 2 * (how == "size")
        x, g = numbers(count, self.rank, number), numbers(COUNT, self.rank, number)
        y = torch.zeros_like(x)
        self.before()
        works: list[Any] = []
        if how == "order":
            works.append(dist.all_reduce(g, async_op=True))
        works.append(dist.all_to_all_single(y, x, async_op=True))
        if how == "waits":
            works[-1].wait()
        if how == "lonely":
            dist.all_reduce(numbers(3, self.rank, number), group=self.lonely)
        if how == "middle":
            works.append(dist.all_reduce(torch.cat([g, g[:3]]), async_op=True))
        if how not in ("order", "missing"):
            works.append(dist.all_reduce(g, async_op=True))
        self.between()
        more = numbers(7, self.rank, number)
        if how in ("extra", "both"):
            dist.all_reduce(more)
        if how == "both":
            dist.barrier()
        for work in works:
            work.wait()
        g += int(more.sum())
        return [int((y * torch.arange(count)).sum()), int((g * torch.arange(COUNT)).sum())]


def named(recording: Any, *, every: bool = False) -> list[str]:
    """What ran on this rank, in the order of its starts."""
    timeline = recording.timeline
    order = sorted(range(len(timeline.name)), key=lambda at: timeline.start_us[at])
    return [timeline.names[timeline.name[at]] for at in order]


def spans(recording: Any) -> dict[str, tuple[float, float]]:
    timeline = recording.timeline
    return {
        timeline.names[timeline.name[at]]: (float(timeline.start_us[at]), float(timeline.end_us[at]))
        for at in range(len(timeline.name))
    }


def recorded(plan: Any, *, apart: str = "") -> Any:
    """One iteration under a plan; with a name the second rank begins when the first has submitted everything."""
    model, store = Model(), dist.distributed_c10d._get_default_store()
    with stretto.torch.enforce(plan, TWO, every=1, cluster=CLUSTER):
        for number in range(3):
            model.step(number)
            stretto.torch.step()
        if apart and model.rank == 1:
            model.before = lambda: store.wait([apart])
        elif apart:
            model.between = lambda: store.set(apart, "")
        with stretto.torch.record() as recording:
            model.step(3)
        stretto.torch.step()
    return recording


def order() -> Any:
    """The plan's order, not the application's."""
    return [named(recorded(plan)) for plan in (ONE_CHANNEL, REVERSED)]


def overlap() -> Any:
    """On two channels the second op does not wait for the first, on one it does."""
    found = []
    for name, plan in (("beside", BESIDE), ("one", ONE_CHANNEL)):
        at = spans(recorded(plan, apart=name))
        (_, first_end), (second_begin, _) = (at[name] for name in ("all_to_all.0#0 direct", "all_reduce.1#0 ring"))
        found.append(second_begin < first_end)
    return found


def prefetch() -> Any:
    """The next iteration's exchange goes before this one's sum, which is held back until then."""
    step = Workload(
        name="prefetch",
        num_ranks=2,
        ops=(
            Op(name="exchange", kind="all_to_all", nbytes=4.0 * COUNT, after=(Dep(op="end", lag=1, why="submit"),)),
            Op(
                name="begin",
                duration_us=50.0,
                after=(Dep(op="sum", lag=1, why="wait"), Dep(op="exchange", why="wait")),
            ),
            Op(name="sum", kind="all_reduce", nbytes=4.0 * COUNT, after=(Dep(op="begin", why="submit"),)),
            Op(name="end", duration_us=20.0, after=(Dep(op="begin"),)),
        ),
    )
    plan = simple_plan(step, CLUSTER, [whole(["rdma"], seq=0, ahead=1), whole(["rdma"], seq=1)])
    rank = dist.get_rank()
    held: list[Any] = []

    def iteration(number: int) -> tuple[int, int]:
        x, g = numbers(COUNT, rank, number), numbers(COUNT, rank, number)
        y = torch.zeros_like(x)
        work = dist.all_to_all_single(y, x, async_op=True)
        total = 0
        if held:
            held[0].wait()
            total = int((held[1] * torch.arange(COUNT)).sum())
        assert work is not None
        work.wait()
        compute(32)
        held[:] = [dist.all_reduce(g, async_op=True), g]
        return int((y * torch.arange(COUNT)).sum()), total

    def evaluation(number: int) -> list[int]:
        """Waits for everything first, as an evaluation of finished weights does."""
        held[0].wait()
        metric = numbers(5, rank, number)
        dist.all_reduce(metric)
        return metric.tolist()

    want = [iteration(number) for number in range(6)]
    held[0].wait()
    held.clear()
    evaluated = [[iteration(number), evaluation(number)] for number in range(4)]
    held.clear()
    with stretto.torch.enforce(plan, step, every=1, cluster=CLUSTER) as enforcer:
        ran = []
        for number in range(4):
            found = iteration(number)
            stretto.torch.step()
            # The evaluation begins with a barrier: from there on nothing is held back.
            dist.barrier()
            ran.append([found, evaluation(number)])
        kept_on = [ran == evaluated, enforcer.report().number, enforcer.report().fell_back]
    held.clear()
    with stretto.torch.enforce(plan, step, every=1, cluster=CLUSTER) as enforcer:
        got = []
        for number in range(6):
            if number == 3:
                recording = stretto.torch.record()
                kept = recording.__enter__()
            got.append(iteration(number))
            stretto.torch.step()
        # The last sum waits for an exchange that never comes, until the enforcer ends.
        active = enforcer.report().number
    held[0].wait()
    recording.__exit__(None, None, None)
    refused = ""
    try:
        backward = simple_plan(TWO, CLUSTER, [whole(["rdma"], seq=0, ahead=1), whole(["rdma"], seq=1)])
        stretto.torch.enforce(backward, TWO, cluster=CLUSTER)
    except StrettoError as error:
        refused = f"{type(error).__name__}: {error}"
    return {"same": got == want, "active": active, "order": named(kept), "refused": refused, "evaluated": kept_on}


def mismatches() -> Any:
    """Each kind of surprise in iteration 5, on all ranks: results stay right, and all are back in plain order."""
    found = {}
    for how in ("order", "missing", "middle", "size", "extra"):
        found[how] = _surprised(how, lambda number, how=how: how if number == 5 else "")  # type: ignore[misc]
    found["waits"] = _surprised("waits", lambda number: "waits" if number == 5 else "", plan=REVERSED)
    return found


def _surprised(how: str, strange: Callable[[int], str], plan: Any = BESIDE) -> Any:
    model = Model()
    model.strange = strange
    want = [model.step(number) for number in range(8)]
    seen: list[int] = []

    def step(number: int) -> list[int]:
        assert isinstance(CURRENT.enforcer, Enforcer)
        seen.append(CURRENT.enforcer.report().number)
        return model.step(number)

    got, enforcer = enforced(TWO, plan, step, 8, cluster=CLUSTER)
    return {"same": got == want, "number": seen[6], "why": enforcer.report().fell_back}


def evaluated() -> Any:
    """An evaluation that communicates, every other iteration, with and without marks: the plan goes on."""
    found = []
    for marked in (True, False):
        model, rank = Model(), dist.get_rank()
        seen, sums = [], []
        with Enforcer(TWO, every=1, cluster=CLUSTER) as enforcer:
            enforcer.prepare(BESIDE, TWO, 1)
            enforcer.commit(1, BESIDE.hash)
            for number in range(8):
                # Before the mark, too.
                model.strange = lambda number, marked=marked: "both" if marked and number == 6 else ""  # type: ignore[misc]
                got = model.step(number)
                if marked:
                    stretto.torch.step()
                seen.append(enforcer.report().number)
                if number % 2:
                    metric = numbers(9, rank, number)
                    dist.all_reduce(metric)
                    dist.barrier()
                    got += metric.tolist()
                sums.append(got)
            report = enforcer.report()
        want = []
        for number in range(8):
            got = model.step(number)
            if number % 2:
                metric = numbers(9, rank, number)
                dist.all_reduce(metric)
                got += metric.tolist()
            want.append(got)
        found.append({"same": sums == want, "seen": seen, "why": report.fell_back, "iteration": report.iteration})
    return found


def returns() -> Any:
    """A step that is another one now and then: the plan comes back after each, but not for ever."""
    found = []
    for strange in ((5,), (5, 10, 15, 20)):
        model = Model()
        model.strange = lambda number, strange=strange: "missing" if number in strange else ""  # type: ignore[misc]
        want = [model.step(number) for number in range(30)]
        seen: list[int] = []
        enforcer = stretto.torch.enforce(BESIDE, TWO, every=1, cluster=CLUSTER)
        with enforcer:
            got = []
            for number in range(30):
                seen.append(enforcer.report().number)
                got.append(model.step(number))
                stretto.torch.step()
            report = enforcer.report()
        found.append({"same": got == want, "seen": seen, "why": report.fell_back, "resting": report.resting})
    return found


def offered() -> Any:
    """All ranks offer a plan that rested; then one alone does something else, which no other can see."""
    model = Model()
    model.lonely = [dist.new_group([rank]) for rank in range(2)][model.rank]
    model.strange = lambda number: "missing" if number == 5 else "lonely" if number == 8 and model.rank else ""
    want = [model.step(number) for number in range(14)]
    seen: list[int] = []
    enforcer = stretto.torch.enforce(BESIDE, TWO, every=1, cluster=CLUSTER)
    try:
        with enforcer:
            got = []
            for number in range(14):
                seen.append(enforcer.report().number)
                got.append(model.step(number))
                stretto.torch.step()
    except StrettoError as error:
        return f"{seen}: {error}"
    return {"same": got == want, "seen": seen}


def leaves() -> Any:
    """A step that never comes back: the plan is given up after a while."""
    model = Model()
    model.strange = lambda number: "missing" if number >= 5 else ""
    enforcer = stretto.torch.enforce(BESIDE, TWO, every=1, cluster=CLUSTER)
    resting = []
    with enforcer:
        for number in range(32):
            model.step(number)
            stretto.torch.step()
            resting.append(enforcer.report().resting)
        why = enforcer.report().fell_back
    return {"resting": [resting[4], resting[10], resting[-1]], "why": why}


def counted() -> Any:
    """Without marks iterations are counted; a change of the model is noticed at the next call."""
    model = Model()
    with Enforcer(TWO, every=2, cluster=CLUSTER) as enforcer:
        enforcer.prepare(BESIDE, TWO, 1)
        enforcer.commit(1, BESIDE.hash)
        seen = []
        for number in range(6):
            model.step(number)
            seen.append(enforcer.report().number)
        model.strange = lambda number: "missing"
        model.step(6)
        model.step(7)
        after = enforcer.report()
    return {"seen": seen, "number": after.number, "why": after.fell_back, "iteration": after.iteration}


def switching() -> Any:
    """Ranks hear of a plan at different times, and change to it at the same; without agreement none does."""
    model, rank = Model(), dist.get_rank()
    seen: list[int] = []
    apart: list[int] = []
    with Enforcer(TWO, every=3, cluster=CLUSTER) as enforcer:
        for plan_number, plan in ((1, BESIDE), (2, REVERSED)):
            enforcer.prepare(plan, TWO, plan_number)
        for number in range(24):
            if number == 2 + 4 * rank:
                enforcer.commit(1, BESIDE.hash)
            if number == 14 and rank == 0:
                enforcer.commit(2, REVERSED.hash)
            if number == 19 and rank == 1:
                enforcer.commit(2, REVERSED.hash)
            model.step(number)
            (seen if number < 14 else apart).append(enforcer.report().number)
            stretto.torch.step()
        waits = enforcer.report().waits_us
    return {"seen": seen, "apart": apart, "waits": waits > 0}


def runs_out() -> Any:
    """The enforcer ends while gloo moves one op and holds the next back: both still run, and no thread stays."""
    rank, count = dist.get_rank(), 3
    x, g = numbers(COUNT, rank, count), numbers(COUNT, rank, count)
    y = torch.zeros_like(x)
    want = Model().step(count)
    with stretto.torch.enforce(ONE_CHANNEL, TWO, every=1, cluster=CLUSTER, carrier="gloo") as enforcer:
        model = Model()
        for number in range(count):
            model.step(number)
            stretto.torch.step()
        active = enforcer.report().number
        # The first rank is at the end when the second one begins.
        time.sleep(rank)
        works = [dist.all_to_all_single(y, x, async_op=True), dist.all_reduce(g, async_op=True)]
    try:
        for work in works:
            work.wait(timedelta(seconds=200))
    except TimeoutError as error:
        return str(error)
    g += int(numbers(7, rank, count).sum())
    got = [int((y * torch.arange(COUNT)).sum()), int((g * torch.arange(COUNT)).sum())]
    lanes = [one for one in threading.enumerate() if one.name == "stretto-lane"]
    for lane in lanes:
        lane.join(300)
    return {"same": got == want, "active": active, "lanes": sum(lane.is_alive() for lane in lanes)}


def refusals() -> Any:
    """Plans for something else, and orders nobody has prepared."""
    said = []

    def attempt(what: Callable[[], object]) -> None:
        try:
            what()
        except StrettoError as error:
            said.append(f"{type(error).__name__}: {error}")

    other = step_of([("all_to_all", 4.0 * COUNT, 0), ("all_reduce", 8.0 * COUNT, 0)], 2)
    foreign = simple_plan(other, CLUSTER, [whole(["rdma"], seq=0), whole(["rdma"], seq=1)])
    unknown = simple_plan(TWO, CLUSTER, [whole(["rdma"], seq=0, algorithm="magic"), whole(["rdma"], seq=1)])
    with Enforcer(TWO, cluster=CLUSTER) as enforcer:
        attempt(lambda: enforcer.prepare(foreign, TWO, 1))
        attempt(lambda: enforcer.prepare(foreign, other, 1))
        attempt(lambda: enforcer.prepare(unknown, TWO, 1))
        enforcer.prepare(BESIDE, TWO, 1)
        attempt(lambda: enforcer.prepare(REVERSED, TWO, 1))
        attempt(lambda: enforcer.commit(1, "0" * 16))
        attempt(lambda: enforcer.commit(2, BESIDE.hash))
        attempt(lambda: Enforcer(TWO))
        attempt(lambda: enforcer.prepare(REVERSED, TWO, 1 + SLOTS))
        enforcer.discard(1)
        attempt(lambda: enforcer.commit(1, BESIDE.hash))
    return said


def _alone(how: str) -> Any:
    """The second rank alone does something else: nobody hangs, and both name the rank and the op, soon."""
    model, rank = Model(), dist.get_rank()
    model.strange = lambda number: how if number == 5 and rank == 1 else ""
    try:
        enforced(TWO, BESIDE, model.step, 8, cluster=CLUSTER)
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def alone_inside() -> Any:
    """It submits another sum."""
    return _alone("middle")


def alone_between() -> Any:
    """It sums up a metric."""
    return _alone("extra")


def alone_without() -> Any:
    """It leaves a sum out."""
    return _alone("missing")


def killed() -> Any:
    """A rank dies in the middle of an iteration under a plan."""
    model, rank = Model(), dist.get_rank()

    def strange(number: int) -> str:
        if number == 5 and rank == 1:
            raise SystemExit
        return ""

    model.strange = strange
    try:
        enforced(TWO, BESIDE, model.step, 6, cluster=CLUSTER)
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    except SystemExit:
        return "died"
    return ""


SCENARIOS: Sequence[Callable[[], Any]] = (
    order, overlap, prefetch, mismatches, evaluated, returns, offered, leaves, counted, switching, runs_out, refusals,
    alone_inside, alone_between, alone_without, killed,
)  # fmt: skip


def main() -> None:
    folder, ranks = arguments()

    def rank_main(rank: int) -> None:
        logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
        join(folder, rank, ranks)
        outcomes: dict[str, Any] = {}
        for at, scenario in enumerate(chosen(SCENARIOS).values()):
            if scenario in SCENARIOS[-3:]:
                # The scenario before has broken the group.
                dist.destroy_process_group()
                join(folder, rank, ranks, name=f"store-{at}")
            outcomes[scenario.__name__] = scenario()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
