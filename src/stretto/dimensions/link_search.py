# SPDX-License-Identifier: Apache-2.0
"""The schedule of a collective that is fastest on the links of a cluster, with single messages counted.

The model with single messages takes a tenth of a millisecond, so that many schedules, orders of stages and windows are
compared in it; the best few are then written as programs and simulated on every link. Baseline and Themis are among
them: the result is never slower on the links than theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cluster import Cluster
from ..programs.ir import Program
from ..simulator import Timeline
from ..simulator import simulate as simulate_links
from .balance import PATIENCE, balanced_schedules, stretto
from .messages import message_us
from .model import AG, RS, dims_of
from .program import UNITS, backwards, half, joined, mirrored_schedule, program, quantized
from .schedule import DimSchedule
from .schedulers import CHUNKS, baseline, themis
from .simulation import MAX_IN_FLIGHT, simulate

WINDOWS = (1, 2, 3, 4, 8, None)
IN_FLIGHT = (1, 2, 3, 4, 8, 16, MAX_IN_FLIGHT)
"""The windows, and the numbers of stages in flight whose orders are compared with single messages."""
FINALISTS = 2
"""How many of the best orders of a schedule are simulated on the links."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkProgram:
    """A schedule as a program: what the model with single messages promises, and what the links do."""

    schedule: DimSchedule
    promise_us: float
    program: Program
    timeline: Timeline

    @property
    def total_us(self) -> float:
        """The time on the links."""
        return self.timeline.total_us


@dataclass(frozen=True, kw_only=True, eq=False)
class StageOrder:
    """A schedule with its order of stages fixed, and a window; `promise_us` is its time with single messages."""

    schedule: DimSchedule
    window: int | None
    promise_us: float


def fastest_program(
    cluster: Cluster, collective: str, nbytes: float, *, chunks: int = CHUNKS, units: int = UNITS, seed: int = 0
) -> LinkProgram:
    """The fastest program over a cluster's dimensions: ours, Themis or the baseline, whichever the links like best.

    Args:
        cluster: A cluster with dimensions.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: The most chunks, 1..65536.
        units: As in `program`.
        seed: The seed of the search.

    Returns:
        The program, its promise and its run.

    Raises:
        InvalidInput: An argument is out of range, or the schedule cannot be written as a program (see `program`).
    """
    found = link_programs(cluster, collective, nbytes, chunks=chunks, units=units, seed=seed)
    return min(found.values(), key=_total_us)


def link_programs(
    cluster: Cluster, collective: str, nbytes: float, *, chunks: int = CHUNKS, units: int = UNITS, seed: int = 0
) -> dict[str, LinkProgram]:
    """The best program of every scheduler on the links of a cluster: what `fastest_program` chooses among.

    Args:
        cluster: A cluster with dimensions.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: The most chunks, 1..65536.
        units: As in `program`.
        seed: The seed of the search.

    Returns:
        By name: "stretto" (balanced for whole stages), "stretto_messages" (for single messages, where that is another
        schedule), "baseline", "themis_fifo", "themis_scf", and for an all-reduce "themis_literal" (with the tracker of
        Algorithm 1 as printed, and smallest chunk first).

    Raises:
        InvalidInput: An argument is out of range, or the schedule cannot be written as a program (see `program`).
    """
    tried = _schedules(cluster, collective, nbytes, chunks, units, seed)
    return {name: best_program(schedule, cluster, units=units) for name, schedule in tried.items()}


def promised_program(
    cluster: Cluster, collective: str, nbytes: float, *, chunks: int = CHUNKS, units: int = UNITS, seed: int = 0
) -> LinkProgram:
    """As `fastest_program`, in a third of its time: what the model with single messages promises decides.

    Our schedule is run on the links, and another one only if it promises to be faster than that. The promise is off by
    less than 1 % on nearly all networks, and so is what may be lost.

    Args:
        cluster: A cluster with dimensions.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: The most chunks, 1..65536.
        units: As in `program`.
        seed: The seed of the search.

    Returns:
        The program, its promise and its run.

    Raises:
        InvalidInput: An argument is out of range, or the schedule cannot be written as a program (see `program`).
    """
    tried = _schedules(cluster, collective, nbytes, chunks, units, seed)
    ours = best_program(tried.pop("stretto"), cluster, units=units)
    promises = [(best_orders(quantized(one, units=units), count=1)[0].promise_us, one) for one in tried.values()]
    promise_us, best = min(promises, key=lambda pair: pair[0])
    if promise_us >= ours.total_us:
        return ours
    return min(ours, best_program(best, cluster, units=units), key=_total_us)


def _schedules(
    cluster: Cluster, collective: str, nbytes: float, chunks: int, units: int, seed: int
) -> dict[str, DimSchedule]:
    """What every scheduler says, ours first."""
    asked = (dims_of(cluster), collective, nbytes)
    ours = stretto(*asked, chunks=chunks, seed=seed)
    tried = {"stretto": ours, "baseline": baseline(*asked, chunks=chunks)}
    tried |= {f"themis_{how}": themis(*asked, chunks=chunks, discipline=how) for how in ("fifo", "scf")}
    if collective == "all_reduce":
        tried["themis_literal"] = themis(*asked, chunks=chunks, discipline="scf", tracker="literal")
    searched = _searched(ours, chunks, units, seed)
    if searched is not ours:
        tried["stretto_messages"] = searched
    return tried


def best_program(schedule: DimSchedule, cluster: Cluster, *, units: int = UNITS) -> LinkProgram:
    """The program with the order of stages that does best on the links of a cluster, and its run there.

    A link serves messages in the order in which they ask and knows no priorities; so the orders in which stages begin
    with different numbers of them in flight, and different windows, are tried. For an all-gather the best
    reduce-scatter with time running backwards is tried, too (and the other way round), and for an all-reduce the best
    of both one after the other.

    Args:
        schedule: The schedule; its own `order` is ignored.
        cluster: The cluster, whose dimensions are those of the schedule.
        units: As in `program`.

    Returns:
        The program, its promise and its run.

    Raises:
        InvalidInput: See `program`.
    """
    schedule = quantized(replace(schedule, order=()), units=units)
    if schedule.collective != "all_reduce":
        return _either(schedule, cluster, units)
    forwards = _forwards(schedule, cluster, units)
    halves = [_either(half(schedule, kind), cluster, units) for kind in (RS, AG)]
    both = joined(halves[0].program, halves[1].program, units)
    promise_us = sum(one.promise_us for one in halves)
    return min(forwards, _run(forwards, both, cluster, promise_us), key=_total_us)


def best_orders(schedule: DimSchedule, *, count: int = FINALISTS) -> list[StageOrder]:
    """The orders of stages and windows that do best in the model with single messages, the best first.

    Args:
        schedule: The schedule; its own `order` is ignored.
        count: How many to return at most, >= 1.

    Returns:
        The orders.
    """
    free = replace(schedule, order=())
    orders = {simulate(free, in_flight=k).enforced(): None for k in IN_FLIGHT}
    windows = WINDOWS if any(dim.steps > 1 for dim in schedule.dims) else (None,)
    found = [
        StageOrder(schedule=each, window=window, promise_us=message_us(each, window=window))
        for each in orders
        for window in windows
    ]
    return sorted(found, key=lambda entry: entry.promise_us)[:count]


def _searched(start: DimSchedule, chunks: int, units: int, seed: int) -> DimSchedule:
    """Our schedule that does best with single messages; it may be the one that does best with whole stages."""

    def promise_us(schedule: DimSchedule) -> float:
        return best_orders(quantized(schedule, units=units), count=1)[0].promise_us

    best, least = start, promise_us(start)
    for count in (chunks, chunks // 4):
        in_vain = 0
        for tried in balanced_schedules(start.dims, start.collective, start.nbytes, count, seed) if count else ():
            in_vain += 1
            for each in tried:
                if (found := promise_us(each)) < least * (1 - 1e-4):
                    best, least, in_vain = each, found, 0
            if in_vain >= PATIENCE:
                break
    return best


def _total_us(found: LinkProgram) -> float:
    return found.total_us


def _forwards(schedule: DimSchedule, cluster: Cluster, units: int) -> LinkProgram:
    def run(order: StageOrder) -> LinkProgram:
        made = program(order.schedule, units=units, window=order.window)
        timeline = simulate_links(made, cluster, nbytes=schedule.nbytes)
        return LinkProgram(schedule=schedule, promise_us=order.promise_us, program=made, timeline=timeline)

    return min(map(run, best_orders(schedule)), key=_total_us)


def _either(schedule: DimSchedule, cluster: Cluster, units: int) -> LinkProgram:
    """The schedule itself, or the opposite half with time running backwards."""
    forwards = _forwards(schedule, cluster, units)
    other = _forwards(mirrored_schedule(schedule), cluster, units)
    made = backwards(other.program, other.timeline)
    return min(forwards, _run(forwards, made, cluster, other.promise_us), key=_total_us)


def _run(like: LinkProgram, made: Program, cluster: Cluster, promise_us: float) -> LinkProgram:
    """Another program of the same schedule, with a promise of its own."""
    timeline = simulate_links(made, cluster, nbytes=like.schedule.nbytes)
    return replace(like, promise_us=promise_us, program=made, timeline=timeline)
