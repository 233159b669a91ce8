# SPDX-License-Identifier: Apache-2.0
"""The time of fused steps: what the steps, signals and blocks of the GPU executor cost beside what the links take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cluster import Cluster
from ..errors import InvalidInput
from ..programs import Program
from ..programs.fused import PACKET, Fused, FusedStep, fuse
from ..programs.lowered import Lowered
from .price_graph import EventCost, PacketArrivals, PricedStep, PriceGraph
from .runtimes import Runtime, runtime_of

MEET = EventCost("meet_us")
NAMES = {"simple": "Simple", "ll": "LL"}
MOST_ROUNDS = 8
"""The most rounds that are simulated; more of them are taken to be as many, each longer."""
SLOT_BYTES, PACKET_BYTES, SLOT_BLOCKS = 64 << 20, 8 << 20, 32
"""What a communicator has by default: memory for slots and for packets, divided among so many blocks."""
PIPELINED_FROM, PIPELINE_BYTES = 4, 128 << 10
"""From so many levels on, a block moves no more of a slice in one round."""
PACKETS_UP_TO = 2 << 20
"""The bytes of all ranks together up to which a communicator sends packets."""
LEAST_BLOCK_BYTES = {"simple": 128 * 16, "ll": 128 * 8}
"""What a block moves at least in a step before a call gets another one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedCall:
    """How the GPU executor carries out a call on memory of any kind, and the events of that."""

    fused: Fused
    blocks: int
    graph: PriceGraph

    @property
    def form(self) -> str:
        """The protocol and the blocks, as one line."""
        return f"protocol={NAMES[self.fused.protocol]},blocks={self.blocks}"


def usual_call(program: Program | Lowered, cluster: Cluster, *, nbytes: float, runtime: Runtime) -> FusedCall:
    """A call as a communicator carries it out by default: packets for few bytes, as many blocks as have work.

    Args:
        program: The program.
        cluster: The cluster; all ranks are taken to reach each other's memory.
        nbytes: The bytes that the collective moves, > 0.
        runtime: The runtime.

    Returns:
        The call.

    Raises:
        InvalidInput: There are too many ranks.
        VerificationError: The program is wrong.
    """
    c = program.collective
    packets = "LL" in runtime.protocols and nbytes * c.num_ranks <= PACKETS_UP_TO
    fused = fuse(program, protocol="ll" if packets else "simple")
    work = max(
        (sum(float(c.chunk_share[i.chunk]) for i in s.items) for steps in fused.steps for s in steps), default=0.0
    )
    most = min(SLOT_BLOCKS, runtime.blocks_on(cluster) or SLOT_BLOCKS)
    blocks = min(most, max(1, -int(-work * nbytes // LEAST_BLOCK_BYTES[fused.protocol])))
    graph = fused_graph(fused, cluster, nbytes=nbytes, blocks=blocks, runtime=runtime)
    return FusedCall(fused=fused, blocks=blocks, graph=graph)


def fused_time_us(
    fused: Fused, cluster: Cluster, *, nbytes: float, blocks: int = 1, runtime: Runtime | str | Path
) -> float:
    """Simulate fused steps as a runtime runs them.

    Block b of every rank runs the whole stream on its slice of every chunk, so that one block with all of the bytes'
    rate stands for all. A step waits for the one before it and for signals; packets are read while they come.

    Args:
        fused: The steps of all ranks.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        blocks: The blocks of a rank.
        runtime: The runtime, its name or its file.

    Returns:
        The time until the last rank is done, in microseconds.

    Raises:
        InvalidInput: The runtime lacks the protocol, or runs fewer blocks.

    >>> from stretto.algorithms import algorithm
    >>> from stretto.programs.fused import fuse
    >>> direct, cluster = algorithm("direct", "all_reduce", 8), Cluster.preset("shared_gpu")
    >>> small, large = (fused_time_us(fuse(direct, symmetric=True), cluster, nbytes=nbytes, blocks=16,
    ...     runtime="mscclpp:h200") for nbytes in (1024, 1 << 26))
    >>> small < 20 < large
    True
    """
    return fused_graph(fused, cluster, nbytes=nbytes, blocks=blocks, runtime=runtime_of(runtime)).total_us()


def fused_graph(fused: Fused, cluster: Cluster, *, nbytes: float, blocks: int, runtime: Runtime) -> PriceGraph:
    """The events of fused steps, whose time can be asked for with several prices.

    Args:
        fused: The steps of all ranks.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        blocks: The blocks of a rank.
        runtime: The runtime.

    Returns:
        The graph.

    Raises:
        InvalidInput: The runtime lacks the protocol, or runs fewer blocks.
    """
    prices = runtime
    prices.protocol(NAMES[fused.protocol])
    if blocks < 1:
        raise InvalidInput(f"blocks: must be >= 1, not {blocks}")
    most = prices.blocks_on(cluster)
    if most and blocks > most:
        raise InvalidInput(f"blocks: {blocks} are more than the {most} that {prices.name} runs")
    graph = PriceGraph(
        collective=fused.collective, cluster=cluster, nbytes=nbytes, prices=prices, protocol=NAMES[fused.protocol],
        blocks=blocks, slices=blocks,
    )  # fmt: skip
    _Streams(fused, graph, min(rounds_of(fused, nbytes, blocks), MOST_ROUNDS)).add()
    return graph


def rounds_of(fused: Fused, nbytes: float, blocks: int) -> int:
    """In how many rounds a call goes through the slots of a communicator, as it is by default.

    Args:
        fused: The steps.
        nbytes: The bytes that the collective moves.
        blocks: The blocks of a rank.

    Returns:
        The rounds, >= 1.
    """
    largest = float(fused.collective.chunk_share.max(initial=0.0)) * nbytes
    room = part = max(largest / blocks, 1.0)
    for slots, memory in ((fused.slots, SLOT_BYTES), (2 * fused.packets, PACKET_BYTES)):
        if slots:
            room = min(room, memory / SLOT_BLOCKS / 2 / slots)
    if fused.depth >= PIPELINED_FROM:
        room = min(room, PIPELINE_BYTES)
    return -int(-part // room)


class _Streams:
    """Adds the streams of all ranks to a graph, level by level, round behind round."""

    def __init__(self, fused: Fused, graph: PriceGraph, rounds: int) -> None:
        self._fused, self._graph, self._rounds = fused, graph, rounds
        self._share = fused.collective.chunk_share * graph.nbytes / rounds
        self._last: list[tuple[int, ...]] = [(event,) for event in graph.launch]
        self._told: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def add(self) -> None:
        fused, graph = self._fused, self._graph
        for rank, peers in enumerate(fused.ready):
            if peers:
                heard = [graph.event(MEET, [graph.launch[q]]) for q in peers]
                self._last[rank] = (graph.event(EventCost("wait", len(peers)), [graph.launch[rank], *heard]),)
        order = sorted(
            ((step.level, rank, step) for rank, stream in enumerate(fused.steps) for step in stream),
            key=lambda entry: entry[:2],
        )
        for _ in range(self._rounds):
            self._told = defaultdict(list)
            for rank, peers in enumerate(fused.starts):
                for q in peers:
                    self._told[rank, q].append(self._last[rank])
            arrivals = PacketArrivals(graph)
            for _, rank, step in order:
                self._step(rank, step, arrivals)
        for rank, peers in enumerate(fused.done):
            if peers:
                heard = [graph.event(MEET, self._last[q]) for q in peers]
                graph.event(EventCost("wait", len(peers)), [*heard, *self._last[rank]])

    def _step(self, rank: int, step: FusedStep, arrivals: PacketArrivals) -> None:
        graph = self._graph
        after = list(self._last[rank])
        for q, number in step.waits:
            after.append(graph.event(MEET, self._told[q, rank][number - 1]))
        places = {
            place for item in step.items for place in item.sources if place.space == PACKET and place.rank == rank
        }
        found = arrivals.take(self._priced(rank, step), after, [(place, rank) for place in sorted(places)])
        # Whoever sends packets does not wait until they have arrived.
        self._last[rank] = found.done if graph.protocol == "Simple" else found.done[:1]
        for item in step.items:
            for place in item.targets:
                if place.space == PACKET:
                    arrivals.sent(place, found)
        for q in step.signals:
            self._told[rank, q].append(found.done)

    def _priced(self, rank: int, step: FusedStep) -> PricedStep:
        """A step with the places of all of its items, each of their mean size."""
        sizes = [float(self._share[item.chunk]) for item in step.items]
        mean = sum(sizes) / len(sizes)
        count = {(side, packet): 0.0 for side in (0, 1) for packet in (False, True)}
        moves: tuple[dict[int, float], dict[int, float]] = (defaultdict(float), defaultdict(float))
        for item, size in zip(step.items, sizes, strict=True):
            for side, places in enumerate((item.sources, item.targets)):
                for place in places:
                    count[side, place.space == PACKET] += size / mean if mean else 1.0
                    if place.rank != rank:
                        moves[side][place.rank] += size
        return PricedStep(
            rank=rank, nbytes=mean, waits=len(step.waits), adds=len(step.items[0].sources) > 1,
            plain_reads=count[0, False], packet_reads=count[0, True],
            plain_writes=count[1, False], packet_writes=count[1, True],
            inward=_sorted(moves[0]), outward=_sorted(moves[1]),
        )  # fmt: skip


def _sorted(moves: dict[int, float]) -> tuple[tuple[int, float], ...]:
    found: Sequence[tuple[int, float]] = sorted(moves.items())
    return tuple(found)
