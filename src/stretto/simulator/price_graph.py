# SPDX-License-Identifier: Apache-2.0
"""`PriceGraph`: steps that read and write the memory of several ranks, with what a runtime asks for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..collectives import Collective
from .network import Times, routes_between, simulate_transfers
from .runtimes import Runtime, sharing

SOFT = 4.0
"""Close to what memory can do, blocks already hinder each other: the power of a soft maximum."""
MOST_THREADS = 1024
WRITES_BY_THREADS = 0.25
"""Writes do not wait for an answer, so that few threads write nearly as fast as many: the power of that."""
MOST_TURNS = 32
"""The most turns of a loop that are simulated; more of them are taken to be as many, each longer."""
MOST_PULLED = 64
"""The same where every step has one peer: the pipelines of trees, whose filling counts."""


@dataclass(frozen=True, kw_only=True)
class PricedStep:
    """What one rank does at once: read several places, add them up, write several places."""

    rank: int
    plain_reads: float = 0.0
    packet_reads: float = 0.0
    plain_writes: float = 0.0
    packet_writes: float = 0.0
    nbytes: float
    """The bytes of each place."""
    inward: tuple[tuple[int, float], ...] = ()
    """The bytes that come from the memory of each peer."""
    outward: tuple[tuple[int, float], ...] = ()
    through: tuple[tuple[int, float], ...] = ()
    """The bytes on each link of a switch that adds up or copies for it."""
    memories: int = 1
    """How many times over a switch touches the memory of a GPU for it."""
    waits: int = 0
    """The signals that it waits for."""
    joined: bool = False
    """Whether it is a part of the operation before it, so that only its places cost something."""
    adds: bool = False
    """Whether it adds up what it reads."""


@dataclass(frozen=True)
class EventCost:
    """What happens before an event and takes time: so many times a price of the runtime, or a step's work.

    `what` is the name of a price, ``launch``, ``wait`` (for `count` signals), ``step`` or ``work`` (of `step`), or
    empty for what costs nothing.
    """

    what: str = ""
    count: int = 1
    step: PricedStep | None = None


FREE = EventCost()


@dataclass(frozen=True)
class StepEvents:
    """The events of a step: where its work begins, those that end it, and what brings its data to each peer."""

    begun: int
    done: tuple[int, ...]
    sent: dict[int, int]

    def later(self, shift: int) -> StepEvents:
        """The same events of the same step that much later."""
        sent = {peer: event + shift for peer, event in self.sent.items()}
        return StepEvents(self.begun + shift, tuple(event + shift for event in self.done), sent)


@dataclass
class PriceGraph:
    """Events that wait for each other: those without links (launch, step, signal), and messages."""

    collective: Collective
    cluster: Cluster
    nbytes: float
    prices: Runtime
    protocol: str
    blocks: int
    """The threadblocks of a rank."""
    slices: int
    """The threadblocks that share each step."""
    threads: int = MOST_THREADS
    beside: int = 1
    """The streams in which a rank does something, so that they share the memory of its GPU."""
    cost: list[EventCost] = field(default_factory=list)
    after: list[Sequence[int]] = field(default_factory=list)
    message: list[tuple[int, int, int, float]] = field(default_factory=list)
    """The event, the ranks and the bytes of each message."""
    on_link: list[tuple[int, int, float]] = field(default_factory=list)
    """The event, the link and the bytes of what a switch adds up or copies."""
    sharing: int = 1
    """How many ranks share one GPU, whose memory then is all of their links."""
    launch: list[int] = field(default_factory=list)
    """The event at which each rank begins."""
    steps: list[tuple[PricedStep, StepEvents]] = field(default_factory=list)
    """Every step with its events."""

    def __post_init__(self) -> None:
        if self.prices.memory_gb_per_s and sharing(self.cluster) > 1:
            self.sharing = self.collective.num_ranks
        self.launch = [self.event(EventCost("launch"), []) for _ in range(self.collective.num_ranks)]

    def event(self, cost: EventCost, after: Sequence[int]) -> int:
        """A new event, so long after the last of others."""
        self.cost.append(cost)
        self.after.append(after)
        return len(self.cost) - 1

    def step(self, step: PricedStep, after: Sequence[int], packets: Sequence[int] = ()) -> StepEvents:
        """Add a step, whose blocks read and write while its messages travel.

        Args:
            step: What is read and written.
            after: The events before it.
            packets: The arrivals of the first packets that it reads: what it costs is paid while it waits for them.

        Returns:
            Its events.
        """
        shape = replace(step, rank=0, inward=(), outward=(), through=())
        begun = self.event(EventCost("step", step=shape), after)
        if packets:
            begun = self.event(FREE, [begun, *packets])
        done, sent = [self.event(EventCost("work", step=shape), [begun])], {}
        for moves, inward in ((step.inward, True), (step.outward, False)):
            for peer, nbytes in moves:
                if self.sharing > 1:
                    sent[peer] = done[0]
                    continue
                event = self.event(FREE, [begun])
                ends = (peer, step.rank) if inward else (step.rank, peer)
                factor = self.prices.protocol(self.protocol).bytes_factor
                self.message.append((event, *ends, nbytes * factor))
                done.append(event)
                if not inward:
                    sent[peer] = event
        for link, nbytes in step.through:
            self.on_link.append((self.event(FREE, [begun]), link, nbytes))
            done.append(self.on_link[-1][0])
        self.steps.append((step, StepEvents(begun, tuple(done), sent)))
        return self.steps[-1][1]

    def mark(self) -> tuple[int, int, int, int]:
        """How much there is by now: events, messages, what switches do, and steps."""
        return len(self.cost), len(self.message), len(self.on_link), len(self.steps)

    def repeat(self, first: int, mark: tuple[int, int, int, int], times: int) -> int:
        """Add what was added since a mark again, each time behind the time before.

        Args:
            first: The event with which the time before last began, of as many events.
            mark: Where the last time began.
            times: How often it is added.

        Returns:
            By how much the numbers of the last events are above those of the events that were repeated.
        """
        begun, events = mark[0], len(self.cost)
        length = events - begun
        messages, on_link, made = self.message[mark[1] :], self.on_link[mark[2] :], self.steps[mark[3] :]
        costs, after = self.cost[begun:], self.after[begun:]
        for shift in range(length, length * times + 1, length):
            self.cost += costs
            self.after += [[a + shift if a >= first else a for a in row] for row in after]
            self.message += [(event + shift, a, b, nbytes) for event, a, b, nbytes in messages]
            self.on_link += [(event + shift, link, nbytes) for event, link, nbytes in on_link]
            self.steps += [(step, found.later(shift)) for step, found in made]
        return length * times

    def delay_us(self, cost: EventCost, p: Runtime) -> float:
        """What a runtime asks for something."""
        if not cost.what:
            return 0.0
        protocol = p.protocol(self.protocol)
        if cost.what == "launch":
            begun_us = p.launch_us + self.blocks * self.sharing * p.block_us + p.thread_us * self.threads / MOST_THREADS
            return begun_us + p.rank_us * log2(self.sharing)
        if cost.what == "wait":
            # The last of many signals is later than any one.
            return p.peer_us * log2(1 + cost.count)
        step = cost.step
        if step is None:
            return float(getattr(p if cost.what == "meet_us" else protocol, cost.what))
        if cost.what == "work":
            return self._work_us(step, protocol.bytes_factor, p)
        price_us = p.step_us if self.protocol == "Simple" else 0.0 if step.joined else protocol.step_us
        price_us += (step.plain_reads + step.plain_writes) * p.place_us + p.peer_us * log2(1 + step.waits)
        return price_us + step.packet_reads * protocol.poll_us + step.packet_writes * protocol.send_us

    def _work_us(self, step: PricedStep, factor: float, p: Runtime) -> float:
        """The time of a step's blocks for its bytes, and of the memory that all blocks share."""
        poll = "add" if step.adds and "add" in p.block_gb_per_s else "read"
        reads = step.plain_reads * p.us_per_byte("read") + factor * step.packet_reads * p.us_per_byte(poll)
        writes = (step.plain_writes + factor * step.packet_writes) * p.us_per_byte("write")
        fewer = MOST_THREADS / self.threads
        work = float(step.nbytes * (reads * fewer + writes * fewer**WRITES_BY_THREADS) / self.slices)
        if not p.memory_gb_per_s:
            return work
        touched = step.plain_reads + step.plain_writes + factor * (step.packet_reads + step.packet_writes)
        cached = 0.0
        if p.cache_gb_per_s:
            held = self.nbytes * self.sharing * (1 if self.collective.in_place else 2) * factor
            cached = min(1.0, p.cache_mb * 1e6 / held)
        per_byte = (1 - cached) / p.memory_gb_per_s + (cached / p.cache_gb_per_s if cached else 0.0)
        memory = step.nbytes * touched * step.memories * self.sharing * self.beside * per_byte / 1e3
        return float((work**SOFT + memory**SOFT) ** (1 / SOFT))

    def total_us(self, prices: Runtime | None = None) -> float:
        """Run all events, and return when the last has happened.

        Other prices than those that the graph was made with may differ in figures, not in what is limited at all.
        """
        prices = prices or self.prices
        return float(self.times(prices, contention=prices.contention)[0].end_us.max(initial=0.0))

    def times(self, prices: Runtime, **modes: Any) -> tuple[Times, np.ndarray]:
        """Run all events.

        Args:
            prices: The prices.
            **modes: Options of `simulate_transfers`, such as `contention`.

        Returns:
            The times, and the place of each event in them.
        """
        run, costs, index, number = self._run
        delays = np.array([self.delay_us(cost, prices) for cost in costs])
        return simulate_transfers(self.cluster, delay_us=delays[index], **modes, **run), number

    @cached_property
    def _run(self) -> tuple[dict[str, Any], list[EventCost], np.ndarray, np.ndarray]:
        """What is simulated, the different costs, that of each event, and the place of each.

        Messages come behind what has no links.
        """
        travels = [event for event, *_ in (*self.message, *self.on_link)]
        events, moved = len(self.cost), set(travels)
        quiet = [e for e in range(events) if e not in moved]
        number = {e: k for k, e in enumerate([*quiet, *travels])}
        device = np.array(self.collective.ranks, np.int32)
        src, dst = (np.array([m[k] for m in self.message], np.int32) for k in (1, 2))
        nbytes = np.array([m[3] for m in self.message], np.float64)
        _, route, ptr, links = routes_between(device[src], device[dst], nbytes, self.cluster)
        # What a switch does for a rank takes one link at a time.
        lone = np.arange(len(self.on_link))
        route = np.concatenate([route, len(ptr) - 1 + lone])
        ptr = np.concatenate([ptr, ptr[-1] + 1 + lone])
        links = np.concatenate([links, np.array([m[1] for m in self.on_link], links.dtype)])
        nbytes = np.concatenate([nbytes, np.array([m[2] for m in self.on_link], np.float64)])
        order = np.argsort([number[e] for e in range(events)])
        rows = [[number[a] for a in self.after[e]] for e in order.tolist()]
        after = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        first = len(quiet)
        run = {
            "routes": (np.append(ptr, ptr[-1]), links),
            "route": np.concatenate([np.full(first, len(ptr) - 1), route]).astype(np.int32),
            # Peers' slices travel side by side: every message has a connection of its own.
            "connection": np.arange(events, dtype=np.int32),
            "nbytes": np.concatenate([np.zeros(first), nbytes]),
            "after": (after, np.array([a for row in rows for a in row], np.int32)),
        }
        costs = {cost: at for at, cost in enumerate(dict.fromkeys(self.cost))}
        place = np.array([number[e] for e in range(events)])
        return run, list(costs), np.array([costs[cost] for cost in self.cost])[order], place


class PacketArrivals:
    """Which packets have been sent: whoever reads one may begin with the first of them, and ends after the last."""

    def __init__(self, graph: PriceGraph) -> None:
        self._graph = graph
        self._from: dict[object, StepEvents] = {}

    def sent(self, place: object, events: StepEvents) -> None:
        """A step has sent packets to a place."""
        self._from[place] = events

    def take(self, step: PricedStep, after: Sequence[int], places: Sequence[tuple[object, int]]) -> StepEvents:
        """Add a step that reads packets while they come.

        Args:
            step: What is read and written.
            after: The events before it.
            places: The places whose packets it reads, each with the rank where they are.

        Returns:
            Its events.
        """
        graph = self._graph
        signal = EventCost("signal_us")
        senders = [(self._from[place], reader) for place, reader in places]
        first = [graph.event(signal, [events.begun]) for events, _ in senders]
        found = graph.step(step, after, first)
        if not senders:
            return found
        last = [
            graph.event(signal, [events.done[0], events.sent.get(reader, events.done[0])]) for events, reader in senders
        ]
        ended = StepEvents(found.begun, (graph.event(FREE, [*found.done, *last]),), found.sent)
        graph.steps[-1] = step, ended
        return ended
