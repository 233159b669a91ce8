# SPDX-License-Identifier: Apache-2.0
"""The bound against plans over several options: the best that a search finds, timed by code of its own, rank by rank.

The search is the attack, and the judge unrolls its order over many iterations with nothing but waits written out by
hand. ``PYTHONPATH=benchmarks python tests/planner/test_bounds_exhaustive.py --count 2000`` judges as many drawn steps
as one likes, by this judge and by that of `test_bounds_on_links`.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from random import Random

import pytest
from judges.drawn_steps import random_problem

from stretto.planner.schedule.bounds import lower_bound
from stretto.planner.schedule.problem import PlanProblem
from stretto.planner.schedule.schedule import Scheduler, StepSchedule
from stretto.planner.schedule.search import search

FROM, TO, AFTER = 16, 40, 4
"""Iterations between which the judge takes the mean, and more that keep channels busy; later by the longest shift."""
LATEST = 2
Part = tuple[str, int, int]
"""An op, a rank of a compute-op or a task of a comm-op, and an iteration."""


def drawn(seed: int) -> PlanProblem:
    draw = Random(seed)
    return random_problem(
        seed, num_comm=draw.randint(2, 5), num_options=4, num_tasks=3, longest_us=draw.choice((2.0, 4.0, 8.0)),
        two_places=draw.random() < 0.5,
    )  # fmt: skip


class Unrolled:
    """A plan over many iterations, with the waits of every rank written out."""

    def __init__(self, problem: PlanProblem, plan: StepSchedule) -> None:
        self.step, self.problem = problem.workload, problem
        self.tasks = {
            op.name: problem.options[op.name][chosen].tasks
            for op, chosen in zip(self.step.comm_ops, plan.choice, strict=True)
        }
        self.ranks = {op.name: sorted(self.step.ranks_of(op)) for op in self.step.ops}
        self.waits: dict[Part, list[Part]] = {}
        self.us: dict[Part, float] = {}
        self.far = max(map(abs, plan.shift))
        self.count = TO + AFTER + 3 * self.far
        for i in range(self.count):
            self.iteration(i)
        self.in_order(plan)

    def ends(self, name: str, i: int, rank: int | None) -> list[Part]:
        """What has to have ended before something that waits for an op, at a rank of its own if there is one."""
        if name in self.tasks:
            return [(name, at, i) for at in range(len(self.tasks[name]))]
        here = [rank] if rank in self.ranks[name] else self.ranks[name]
        return [(name, one, i) for one in here if one is not None]

    def awaited(self) -> set[str]:
        """Ops for which some compute-op waits, perhaps by way of others."""
        found: set[str] = set()
        stack = [dep.op for op in self.step.ops if not op.is_comm for dep in op.after]
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack += [dep.op for dep in self.step.op(name).after]
        return found

    def iteration(self, i: int) -> None:
        last: dict[int, Part] = {}
        computes = [op for op in self.step.ops if not op.is_comm]
        awaited = self.awaited()
        for op in self.step.ops:
            needs = [(dep.op, i - dep.lag) for dep in op.after if i >= dep.lag]
            if op.is_comm:
                for at, task in enumerate(self.tasks[op.name]):
                    part = (op.name, at, i)
                    self.us[part] = task.duration_us
                    self.waits[part] = [(op.name, before, i) for before in task.after]
                    for rank in self.ranks[op.name]:
                        self.waits[part] += [one for name, k in needs for one in self.ends(name, k, rank)]
                continue
            for rank in self.ranks[op.name]:
                part = (op.name, rank, i)
                self.us[part] = op.duration_us
                self.waits[part] = [one for name, k in needs for one in self.ends(name, k, rank)]
                mine = [other.name for other in computes if rank in self.ranks[other.name]]
                if rank in last:
                    self.waits[part].append(last[rank])
                else:
                    self.waits[part] += [(mine[-1], rank, i - 1)] if i else []
                    late = [c.name for c in self.step.comm_ops if c.name not in awaited and rank in self.ranks[c.name]]
                    self.waits[part] += [one for c in late if i >= LATEST for one in self.ends(c, i - LATEST, None)]
                last[rank] = part

    def in_order(self, plan: StepSchedule) -> None:
        """Tasks take turns on each channel of each rank, window after window."""
        held: dict[tuple[int, str], Part] = {}
        for window in range(-self.far, self.count + self.far):
            for (op, at), ahead in zip(plan.order, plan.shift, strict=True):
                name, i = self.step.ops[op].name, window + ahead
                if not 0 <= i < self.count:
                    continue
                for rank in self.ranks[name]:
                    for channel in self.tasks[name][at].channels:
                        if (rank, channel) in held:
                            self.waits[name, at, i].append(held[rank, channel])
                        held[rank, channel] = (name, at, i)

    def period_us(self) -> float:
        end: dict[Part, float] = {}

        def ended(part: Part) -> float:
            stack = [part]
            while stack:
                now = stack[-1]
                missing = [one for one in self.waits[now] if one not in end]
                if now in end or not missing:
                    end[now] = self.us[now] + max((end[one] for one in self.waits[now]), default=0.0)
                    stack.pop()
                else:
                    stack += missing
            return end[part]

        finish = [0.0] * self.count
        for part in self.waits:
            finish[part[2]] = max(finish[part[2]], ended(part))
        return (finish[TO + self.far] - finish[FROM + self.far]) / (TO - FROM)


def judged(seed: int) -> tuple[float, float, float]:
    """The bound, what the search says of its best plan, and the judge's time of that plan."""
    problem = drawn(seed)
    found = search(Scheduler(problem), steps=1500, seed=seed, threads=1)
    return lower_bound(problem).us, found.schedule.period_us, Unrolled(problem, found.schedule).period_us()


@pytest.mark.parametrize("block", range(4))
def test_no_plan_over_any_options_beats_the_bound(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        bound, said, took = judged(seed)
        assert took == pytest.approx(said, rel=0.02), seed
        assert bound <= said * (1 + 1e-9), seed


def main() -> None:
    judged_on_links = import_module("test_bounds_on_links").judged
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1000)
    args = parser.parse_args()
    wrong = tight = differ = links = 0
    for seed in range(args.first, args.first + args.count):
        bound, said, took = judged(seed)
        wrong += bound > min(said, took) * (1 + 1e-3) or bound > said * (1 + 1e-9)
        tight += bound >= said * (1 - 1e-9)
        differ += abs(took / said - 1) > 0.02
    print(f"{args.count} steps over options: bound above a plan {wrong}, equal to one {tight}, judge differs {differ}")
    for seed in range(args.first, args.first + args.count):
        bound, best, promised = judged_on_links(seed)
        links += bound > best * (1 + 1e-3) or bound > promised * (1 + 1e-9)
    print(f"{args.count} pipelines and strided groups on links, all orders: bound above one {links}")


if __name__ == "__main__":
    main()
