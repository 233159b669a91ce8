# SPDX-License-Identifier: Apache-2.0
"""The time of a plan of wide steps: what its steps, signals and threadblocks cost beside what the links take."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput
from ..programs import Program
from ..programs.formats.mscclpp_wide import PlanForm, widen_in
from ..programs.formats.mscclpp_wide_ops import switched
from ..programs.formats.mscclpp_wide_sync import StreamSync
from ..programs.wide import PACKET, WideProgram, WideStep
from .price_graph import MOST_PULLED, MOST_TURNS, EventCost, PacketArrivals, PricedStep, PriceGraph
from .runtimes import Runtime, runtime_of
from .switch_links import SwitchLinks, switch_links


def wide_time_us(
    program: Program | WideProgram,
    cluster: Cluster,
    *,
    nbytes: float,
    form: PlanForm | None = None,
    runtime: Runtime | str | Path,
) -> float:
    """Simulate a plan of wide steps as a runtime runs it.

    A step is ready when the one before it in its stream is done and the signals that it waits for have come. Its
    threadblocks then read and write, each its slice, while the data of peers travels over the links. Packets are read
    while they come: their reader begins with the first and ends after the last.

    Args:
        program: The program, or the wide steps that were made of it in the same form.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        form: How the plan is carried out; by default in one threadblock.
        runtime: The runtime, its name or its file.

    Returns:
        The time until the last rank is done, in microseconds.

    Raises:
        InvalidInput: The runtime lacks the protocol, or runs fewer threadblocks, or no switch of the cluster can do
            what the form leaves to switches.

    >>> from stretto.algorithms import algorithm
    >>> direct, cluster = algorithm("direct", "all_reduce", 8), Cluster.preset("dgx_h200")
    >>> small = {p: wide_time_us(direct, cluster, nbytes=1024, form=PlanForm(protocol=p, streams=8),
    ...     runtime="mscclpp:h200") for p in ("Simple", "LL")}
    >>> small["LL"] < small["Simple"]
    True
    """
    return wide_graph(program, cluster, nbytes=nbytes, form=form or PlanForm(), runtime=runtime_of(runtime)).total_us()


def wide_graph(
    program: Program | WideProgram, cluster: Cluster, *, nbytes: float, form: PlanForm, runtime: Runtime
) -> PriceGraph:
    """The events of a plan of wide steps, whose time can be asked for with several prices.

    Args:
        program: The program, or the wide steps that were made of it in the same form.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        form: How the plan is carried out.
        runtime: The runtime.

    Returns:
        The graph.

    Raises:
        InvalidInput: The runtime lacks the protocol, or runs fewer threadblocks, or no switch of the cluster can do
            what the form leaves to switches.
    """
    prices = runtime
    prices.protocol(form.protocol)
    wide = program if isinstance(program, WideProgram) else widen_in(program, form)
    blocks = wide.streams * form.slices
    most = prices.blocks_on(cluster)
    if most and blocks > most:
        raise InvalidInput(f"form: {blocks} threadblocks are more than the {most} that {prices.name} runs")
    switch = switch_links(cluster, wide.program.collective.ranks) if form.multicast else None
    if form.multicast and switch is None:
        raise InvalidInput(f"form: multicast: no switch of {cluster.name} that joins all ranks adds up and copies")
    graph = PriceGraph(
        collective=wide.program.collective, cluster=cluster, nbytes=nbytes, prices=prices, protocol=form.protocol,
        blocks=blocks, slices=form.slices, threads=form.threads, beside=_beside(wide),
    )  # fmt: skip
    if any(wide.slots):
        _packets(graph, wide)
    else:
        for stream in range(wide.streams):
            last: list[tuple[int, ...]] = [(event,) for event in graph.launch]
            for steps in wide.phases(stream):
                last = _signals(graph, steps, form, last, switch)
    return graph


def _beside(wide: WideProgram) -> int:
    """The most streams in which one rank does something."""
    busy = {(step.rank, wide.stream[step.piece]) for step in wide.steps}
    return max(Counter(rank for rank, _ in busy).values(), default=1)


def _priced(graph: PriceGraph, step: WideStep, turns: int = 1, waits: int = 0, joined: bool = False) -> PricedStep:
    share = _share(graph, step, turns)
    sides = [
        (sum(cell[1] != PACKET for cell in cells), sum(cell[1] == PACKET for cell in cells))
        for cells in (step.sources, step.targets)
    ]
    return PricedStep(
        rank=step.rank, nbytes=share, waits=waits, joined=joined, adds=len(step.sources) > 1,
        plain_reads=sides[0][0], packet_reads=sides[0][1], plain_writes=sides[1][0], packet_writes=sides[1][1],
        inward=tuple((cell[0], share) for cell in step.sources if cell[0] != step.rank),
        outward=tuple((cell[0], share) for cell in step.targets if cell[0] != step.rank),
    )  # fmt: skip


def _share(graph: PriceGraph, step: WideStep, turns: int) -> float:
    """The bytes of each place of a step in one turn."""
    return float(graph.collective.chunk_share[0]) * graph.nbytes * step.count / turns


def _by_switch(graph: PriceGraph, step: WideStep, turns: int, waits: int, switch: SwitchLinks) -> PricedStep | None:
    """A step that a switch carries out: one read and one write, and what all ranks' links carry; None where it cannot.

    What one rank stores the switch copies to all, and what one reads it adds up of all.
    """
    ranks = graph.collective.num_ranks
    found = switched(step, ranks)
    if found is None:
        return None
    share = _share(graph, step, turns)
    links = [switch.up[step.rank], *switch.down]
    links += [*switch.up, switch.down[step.rank]] if found[0] is not None else []
    return PricedStep(
        rank=step.rank, nbytes=share, waits=waits, plain_reads=1, plain_writes=1, memories=ranks,
        through=tuple((link, share) for link in links),
    )  # fmt: skip


def _packets(graph: PriceGraph, wide: WideProgram) -> None:
    arrivals = PacketArrivals(graph)
    last: dict[tuple[int, int], tuple[int, ...]] = {}
    sending: set[tuple[int, int]] = set()
    for step in wide.steps:
        block = step.rank, wide.stream[step.piece]
        sends = all(cell[1] != PACKET for cell in step.sources) and all(cell[1] == PACKET for cell in step.targets)
        joined = sends and block in sending  # What is sent one after the other is one operation.
        sending = sending | {block} if sends else sending - {block}
        places = [(cell, step.rank) for cell in step.sources if cell[1] == PACKET]
        found = arrivals.take(_priced(graph, step, joined=joined), last.get(block, (graph.launch[step.rank],)), places)
        last[block] = found.done[:1]
        for cell in step.targets:
            if cell[1] == PACKET:
                arrivals.sent(cell, found)


def _signals(
    graph: PriceGraph, steps: list[WideStep], form: PlanForm, last: list[tuple[int, ...]], switch: SwitchLinks | None
) -> list[tuple[int, ...]]:
    """Add steps behind the events before them of each rank, and return those after which each rank is done."""
    ranks = graph.collective.num_ranks
    sync = StreamSync(steps, ranks)
    meet = EventCost("meet_us")
    turns = _turns(graph, steps, form)
    last = list(last)
    begun = {(q, r): graph.event(meet, last[q]) for q in range(ranks) for r in sync.signals(q, 0)}
    plan = [list(sync.schedule(r)) for r in range(ranks)]
    began: list[tuple[int, int, int, int]] = []
    for _ in range(min(turns, 2)):
        began.append(graph.mark())
        done: dict[tuple[int, int], tuple[int, ...]] = {}
        at = [0] * ranks
        for step in steps:
            r = step.rank
            _, waits, _ = plan[r][at[r]]
            at[r] += 1
            after = list(last[r])
            for q, number in waits:
                after.append(begun[q, r] if number == 0 else graph.event(meet, done[q, number]))
            priced = _by_switch(graph, step, turns, len(waits), switch) if switch is not None else None
            done[r, at[r]] = last[r] = graph.step(priced or _priced(graph, step, turns, len(waits)), after).done
    if turns > 2:
        shift = graph.repeat(began[0][0], began[1], turns - 2)
        last = [tuple(e + shift if e >= began[1][0] else e for e in events) for events in last]
    ended = list(last)
    for r in range(ranks):
        heard = [graph.event(meet, last[q]) for q in sync.last_waits(r)]
        if heard:
            ended[r] = (graph.event(EventCost("wait", len(heard)), [*heard, *last[r]]),)
    return ended


def _turns(graph: PriceGraph, steps: list[WideStep], form: PlanForm) -> int:
    if not form.loop_bytes or not steps:
        return 1
    share = float(graph.collective.chunk_share[0]) * graph.nbytes * steps[0].count / form.slices
    most = MOST_PULLED if form.pull else MOST_TURNS
    return int(np.clip(np.ceil(share / form.loop_bytes), 1, most))
