# SPDX-License-Identifier: Apache-2.0
"""Streams from steps: steps of one level and shape become one, and ranks that wait for each other get signals."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from ..collectives import Collective
from .fused_steps import IN, OUT, PACKET, FusedStep, ValueSteps

Pairs = tuple[tuple[int, ...], ...]


class Streams(NamedTuple):
    """The parts of a `Fused` that say when ranks meet."""

    steps: tuple[tuple[FusedStep, ...], ...]
    ready: Pairs
    done: Pairs
    starts: Pairs


def connect(collective: Collective, made: ValueSteps, level: list[int]) -> Streams:
    """Merge steps and add what ranks must wait for.

    Args:
        collective: The collective.
        made: The step of each value.
        level: The level of each step; a step of one level waits only for steps of lower levels.

    Returns:
        The streams of all ranks.
    """
    n = collective.num_ranks
    groups: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in range(n)]
    for at, item in enumerate(made.items):
        shape = (level[at], len(item.sources), len(item.targets), int(made.finish[at]))
        groups[made.rank[at]][shape].append(at)
    merged = [[sorted(g[key], key=lambda at: made.items[at].chunk) for key in sorted(g)] for g in groups]
    place = {at: index for stream in merged for index, members in enumerate(stream) for at in members}
    waits, told = _signals(made, merged, place)
    starts = _starts(n, made)
    steps = []
    for rank, stream in enumerate(merged):
        syncs = _syncs(made, stream, place, [bool(w) for w in waits[rank]], [bool(t) for t in told[rank]])
        rows = []
        for index, members in enumerate(stream):
            # A signal at the beginning of the round is a pair's first.
            number = [(q, k + (rank in starts[q])) for q, k in waits[rank][index]]
            rows.append(
                FusedStep(
                    level=level[members[0]],
                    items=tuple(made.items[at] for at in members),
                    waits=tuple(number),
                    signals=tuple(sorted(told[rank][index])),
                    sync=syncs[index],
                    finish=made.finish[members[0]],
                )
            )
        steps.append(tuple(rows))
    touched = _touched(n, made)
    ready = tuple(tuple(sorted(q for r, q in touched if r == rank)) for rank in range(n))
    done = tuple(tuple(sorted(r for r, q in touched if q == rank)) for rank in range(n))
    return Streams(steps=tuple(steps), ready=ready, done=done, starts=starts)


def _signals(
    made: ValueSteps, merged: list[list[list[int]]], place: dict[int, int]
) -> tuple[list[list[list[tuple[int, int]]]], list[list[set[int]]]]:
    """Per rank and step: the (peer, number) that it waits for, and the peers that it tells.

    Whoever has heard of a later step of a peer waits for no earlier one; steps that nobody waits for tell nobody.
    Packets tell of themselves.
    """
    heard: dict[tuple[int, int], int] = {}
    wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
    need: list[list[list[tuple[int, int]]]] = [[[] for _ in stream] for stream in merged]
    for rank, stream in enumerate(merged):
        for index, members in enumerate(stream):
            last: dict[int, int] = {}
            for at in members:
                flow = {before for before in made.flow[at] if not _packets_only(made, before, at)}
                for before in flow | made.behind[at]:
                    q = made.rank[before]
                    if q != rank:
                        last[q] = max(last.get(q, -1), place[before])
            for q, step in sorted(last.items()):
                if heard.get((rank, q), -1) < step:
                    heard[rank, q] = step
                    wanted[q, rank].append(step)
                    need[rank][index].append((q, len(wanted[q, rank])))
    told: list[list[set[int]]] = [[set() for _ in stream] for stream in merged]
    for (q, rank), steps in wanted.items():
        for step in steps:
            told[q][step].add(rank)
    return need, told


def _packets_only(made: ValueSteps, before: int, at: int) -> bool:
    """Whether all that one step brings to another comes in packets."""
    brought = set(made.items[before].targets) & set(made.items[at].sources)
    return all(place.space == PACKET for place in brought)


def _starts(n: int, made: ValueSteps) -> Pairs:
    """Per rank the peers that hear nothing of it, not even by way of others, when data alone is followed."""
    hears: list[set[int]] = [set() for _ in made.rank]
    knows: list[set[int]] = [set() for _ in range(n)]
    # Steps were made in an order in which each is behind what it needs data from.
    for at, rank in enumerate(made.rank):
        for before in made.flow[at]:
            hears[at] |= hears[before] | {made.rank[before]}
        knows[rank] |= hears[at]
    if not (made.slots or made.packets):
        return ((),) * n
    return tuple(tuple(r for r in range(n) if r != rank and rank not in knows[r]) for rank in range(n))


def _syncs(
    made: ValueSteps, stream: list[list[int]], place: dict[int, int], waits: list[bool], tells: list[bool]
) -> list[bool]:
    """Whether the threads of a block must meet before each step: others of them wrote, or still read, what it uses.

    They meet anyway where a step waits for a peer or the one before it tells one.
    """
    met, syncs = 0, []  # Steps before `met` are done in all threads.
    for index, members in enumerate(stream):
        if waits[index] or (index and tells[index - 1]):
            met = index
        rank = made.rank[members[0]]
        mine = {place[b] for at in members for b in made.flow[at] | made.behind[at] if made.rank[b] == rank}
        syncs.append(any(b >= met for b in mine))
        met = index if syncs[-1] else met
    return syncs


def _touched(n: int, made: ValueSteps) -> set[tuple[int, int]]:
    """Pairs (rank, other): the rank reads or writes user memory of the other."""
    return {
        (rank, place.rank)
        for rank, item in zip(made.rank, made.items, strict=True)
        for place in (*item.sources, *item.targets)
        if place.rank != rank and place.space in (IN, OUT)
    }
