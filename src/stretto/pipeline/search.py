# SPDX-License-Identifier: Apache-2.0
"""Searches the warm-up and delay of every stage that give the least time under a memory cap.

The search is exact where there are few choices: it tries every combination, or stops when one meets the lower bound.
Else it is a local search, which starts from the known schedules and from the deepest one, shrunk until it fits. One
move makes one stage, or all stages up to one, a step deeper or shallower. Of equally fast schedules the one with least
memory wins, so delays are only as large as hiding the communication needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, product

from ..errors import Infeasible, InvalidInput
from ..units import check_seed
from .makers import FULL, eager_warmup, paced
from .memory import StageMemory, peak_bytes
from .schedule import Schedule, check_counts
from .simulation import StageCosts, lower_bound_us, simulate

EXACT_CHOICES = 3000
EVALUATIONS = 1000
LEAST_EVALUATIONS = 50
WORK = 200_000
"""Limit of stages x micro-batches x evaluations of a local search, so that it takes half a minute at most."""
MOST_DELAY = 4
SLACK = 1e-9
Choice = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """The schedule that the search chose, with its time, memory and bound."""

    schedule: Schedule
    total_us: float
    bound_us: float
    """A lower bound on the time of any schedule under this cap."""
    warmup: tuple[int, ...]
    delay: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    evaluations: int
    exhaustive: bool
    """Whether no other warm-ups and delays (up to the largest delay tried) are faster."""

    @property
    def gap(self) -> float:
        """The relative distance of the time to the bound; 0 is optimal."""
        return self.total_us / self.bound_us - 1.0 if self.bound_us else 0.0


def search(
    costs: StageCosts,
    microbatches: int,
    *,
    memory: Sequence[StageMemory] | None = None,
    cap_bytes: float = float("inf"),
    transport: str = "async",
    most_delay: int = MOST_DELAY,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> PipelineResult:
    """Choose warm-ups and delays for the least time under a memory cap per device.

    >>> found = search(StageCosts.even(2, forward_us=10.0, transfer_us=6.0), 8)
    >>> found.total_us, found.bound_us, found.warmup, found.exhaustive
    (256.0, 256.0, (3, 1), True)

    Args:
        costs: times of every stage and transfer; they also set the number of stages.
        microbatches: micro-batches of an iteration, 1..65536.
        memory: bytes per stage; None means that stages need none.
        cap_bytes: memory of a device in bytes.
        transport: one of `TRANSPORTS`, with which schedules are simulated.
        most_delay: largest delay that is tried, 0..64.
        evaluations: most schedules that a local search simulates.
        seed: seed of the local search; the same arguments give the same schedule.
        on_step: called with the number of schedules simulated so far.

    Returns:
        The fastest schedule found, with its lower bound.

    Raises:
        InvalidInput: a number is out of range.
        Infeasible: a stage does not fit under the cap with one micro-batch in flight.
    """
    check_seed(seed)
    stages = costs.num_stages
    check_counts(stages, microbatches)
    if not 0 <= most_delay <= 64:
        raise InvalidInput(f"most_delay: must be 0..64, not {most_delay}")
    held = tuple(memory) if memory is not None else (StageMemory(),) * stages
    if len(held) != stages:
        raise InvalidInput(f"memory: is of {len(held)} stages, the costs of {stages}")
    room = [each.room(cap_bytes, microbatches) for each in held]
    short = next((at for at, count in enumerate(room) if not count), None)
    if short is not None:
        each = held[short]
        least = each.fixed_bytes + each.working_bytes + each.activation_bytes
        raise Infeasible(
            f"cap_bytes: stage {short} needs {least / 1e9:.3g} GB for one micro-batch, of {cap_bytes / 1e9:.3g} GB"
        )
    state = _State(costs, microbatches, held, cap_bytes, transport, room, on_step)
    for start in _starts(stages, microbatches, room):
        state.try_one(start)
    ranges = [min(count, microbatches) for count in room]
    few = _count(ranges, stages, most_delay) <= EXACT_CHOICES
    if few:
        for choice in _every(ranges, stages, most_delay):
            if state.optimal:
                break
            state.try_one(choice)
    else:
        evaluations = min(evaluations, max(LEAST_EVALUATIONS, WORK // (stages * microbatches)))
        state.descend(stages, evaluations)
        state.climb(evaluations, most_delay, seed)
    state.shrink(len(state.seen) + evaluations)
    if state.best is None:
        raise Infeasible("cap_bytes: no schedule fits")
    (warmup, delay), total = state.best, state.time
    schedule = paced(stages, microbatches, warmup=warmup, delay=delay, name="searched")
    return PipelineResult(
        schedule=schedule,
        total_us=total,
        bound_us=state.bound,
        warmup=warmup,
        delay=delay,
        peak_bytes=peak_bytes(schedule, held),
        evaluations=len(state.seen),
        exhaustive=few or state.optimal,
    )


class _State:
    def __init__(
        self,
        costs: StageCosts,
        microbatches: int,
        memory: tuple[StageMemory, ...],
        cap: float,
        transport: str,
        room: list[int],
        on_step: Callable[[int], None] | None,
    ) -> None:
        self.costs, self.microbatches, self.memory, self.cap = costs, microbatches, memory, cap
        self.transport, self.room, self.on_step = transport, room, on_step
        self.bound = lower_bound_us(costs, microbatches, in_flight=room)
        self.best: Choice | None = None
        self.time, self.weight = float("inf"), float("inf")
        self.seen: dict[Choice, float] = {}

    @property
    def optimal(self) -> bool:
        """Whether the best choice meets the lower bound."""
        return self.time <= self.bound * (1 + SLACK)

    def try_one(self, choice: Choice) -> float:
        """The time of a choice; infinite if the choice does not fit into memory or deadlocks."""
        if choice not in self.seen:
            time, peaks = self.measure(choice, self.cap)
            weight = sum(peaks) + sum(choice[0]) + sum(late + 1 for late in choice[1])
            if time < self.time * (1 - SLACK) or (time <= self.time * (1 + SLACK) and weight < self.weight):
                self.best, self.time, self.weight = choice, time, weight
            self.seen[choice] = time
            if self.on_step is not None:
                self.on_step(len(self.seen))
        return self.seen[choice]

    def measure(self, choice: Choice, cap: float) -> tuple[float, tuple[float, ...]]:
        """Time and memory of a choice; the time is infinite if the choice does not fit under `cap` or deadlocks."""
        warmup, delay = choice
        schedule = paced(len(warmup), self.microbatches, warmup=warmup, delay=delay)
        peaks = peak_bytes(schedule, self.memory)
        if max(peaks) > cap * (1 + SLACK) or any(deep < after for deep, after in pairwise(warmup)):
            return float("inf"), peaks
        return simulate(schedule, self.costs, transport=self.transport).total_us, peaks

    def descend(self, stages: int, evaluations: int) -> None:
        """Shrink the deepest known schedule until it fits, each time by the step that costs the least time."""
        deep = [min(count, self.microbatches) for count in eager_warmup(stages)]
        choice: Choice = tuple(deep), tuple(2 * at for at in range(stages))
        _, peaks = self.measure(choice, float("inf"))
        spent = 0
        while max(peaks) > self.cap * (1 + SLACK) and spent < evaluations:
            excess = [peak > self.cap * (1 + SLACK) for peak in peaks]
            options = []
            for smaller in self._smaller(choice):
                changed = next(at for at in range(stages) if _at(smaller, at) != _at(choice, at))
                if excess[changed]:
                    time, held = self.measure(smaller, float("inf"))
                    spent += 1
                    if time < float("inf"):
                        options.append((time, sum(held), smaller))
            if not options:
                return
            choice = min(options)[2]
            _, peaks = self.measure(choice, float("inf"))
        self.try_one(choice)

    def climb(self, evaluations: int, most_delay: int, seed: int) -> None:
        dice = random.Random(seed)
        current = self.best
        while current is not None and len(self.seen) < evaluations and not self.optimal:
            before = self.time
            for choice in self._near(current, most_delay):
                self.try_one(choice)
                if len(self.seen) >= evaluations or self.optimal:
                    return
            if self.time < before * (1 - SLACK):
                current = self.best
                continue
            # No move from here is better: restart some random moves away from the best choice.
            assert self.best is not None
            current = self.best
            known = len(self.seen)
            for _ in range(3):
                current = dice.choice(list(self._near(current, most_delay)))
            self.try_one(current)
            if len(self.seen) == known and not any(near not in self.seen for near in self._near(current, most_delay)):
                return

    def shrink(self, most: int) -> None:
        """Reduce warm-ups and delays one step at a time as long as that costs no time."""
        before = None
        while self.best is not None and self.best != before:
            before = self.best
            for choice in self._smaller(self.best):
                if len(self.seen) >= most:
                    return
                self.try_one(choice)

    def _smaller(self, choice: Choice) -> Iterator[Choice]:
        warmup, delay = choice
        for stage in range(len(warmup)):
            if warmup[stage] > 1:
                yield (*warmup[:stage], warmup[stage] - 1, *warmup[stage + 1 :]), delay
            if delay[stage] > FULL:
                yield warmup, (*delay[:stage], delay[stage] - 1, *delay[stage + 1 :])

    def _near(self, choice: Choice, most_delay: int) -> Iterator[Choice]:
        warmup, delay = choice
        for stage in range(len(warmup)):
            for step in (1, -1):
                for first in {0, stage}:
                    deeper = tuple(
                        max(1, min(self.room[at], deep + step)) if first <= at <= stage else deep
                        for at, deep in enumerate(warmup)
                    )
                    yield deeper, delay
                    later = tuple(
                        max(FULL, min(most_delay, late + step)) if first <= at <= stage else late
                        for at, late in enumerate(delay)
                    )
                    yield warmup, later
                    yield deeper, later


def _at(choice: Choice, stage: int) -> tuple[int, int]:
    return choice[0][stage], choice[1][stage]


def _starts(stages: int, microbatches: int, room: Sequence[int]) -> Iterator[Choice]:
    """1F1B, eager-1F1B and both zero-bubble schedules, with warm-ups cut to the room of each stage."""
    plain = [stages - at for at in range(stages)]
    for warmup, delay in (
        (plain, [FULL] * stages),
        (eager_warmup(stages), [FULL] * stages),
        (eager_warmup(stages), [1] * stages),
        (plain, list(range(stages))),
        (eager_warmup(stages), [2 * at for at in range(stages)]),
    ):
        fitted = [min(deep, count, microbatches) for deep, count in zip(warmup, room, strict=True)]
        # A stage with a smaller warm-up than the next would wait for gradients of forwards that it has not sent.
        yield tuple(min(fitted[: at + 1]) for at in range(stages)), tuple(delay)


def _count(ranges: Sequence[int], stages: int, most_delay: int) -> int:
    deep, ways = max(ranges), 1
    for at in range(stages):
        ways = ways * (deep + at) // (at + 1)
        if ways > EXACT_CHOICES:
            return ways
    return ways * int((most_delay + 2) ** stages)


def _every(ranges: Sequence[int], stages: int, most_delay: int) -> Iterator[Choice]:
    for rising in combinations_with_replacement(range(1, max(ranges) + 1), stages):
        warmup = rising[::-1]
        if all(deep <= count for deep, count in zip(warmup, ranges, strict=True)):
            for delay in product(range(FULL, most_delay + 1), repeat=stages):
                yield warmup, delay
