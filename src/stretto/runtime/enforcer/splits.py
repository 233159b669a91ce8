# SPDX-License-Identifier: Apache-2.0
"""All-to-alls with splits under a plan: its motifs, cut for the sizes that a call brings.

A rank knows only what it sends and receives itself. So every motif goes straight from rank to rank, and what a motif
moves of a pair follows from the pair's size alone, which both its ends know: the same share of each pair's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ...planner.algebra.recipes import windowed
from ...planner.algebra.spans import Span
from .parts import RankMotif, RankOp
from .pieces import IN, OUT, MotifBinding, OpBinding, PeerRanges, Piece, Programs, joined

NOTHING = (0, 0)


def carries_splits(planned: RankOp) -> bool:
    """Whether a plan moves an all-to-all straight from rank to rank, so that pieces may have any size.

    Who passes on what is between others would have to know the others' sizes.
    """
    return planned.whole.kind == "AA" and not any(part.leaf.relays for part in planned.parts)


def split_tasks(
    planned: RankOp, rank: int, gives: Sequence[int], takes: Sequence[int], programs: Programs | None
) -> OpBinding:
    """The tasks of an all-to-all with splits on one rank.

    No task is left out because it moves nothing here: another rank may have something for it.

    Args:
        planned: The op; `carries_splits` holds for it.
        rank: This rank.
        gives: Bytes that go to each rank of the op.
        takes: Bytes that come from each.
        programs: Programs that are known; None where a library's own all-to-all runs.

    Returns:
        A task for each of the op's motifs.
    """
    whole = planned.whole
    places = {peer: at for at, peer in enumerate(whole.ranks)}
    given, taken = (list(pairwise(accumulate(sizes, initial=0))) for sizes in (gives, takes))
    made = tuple(_task(part, rank, planned, places, given, taken, programs) for part in planned.parts)
    return OpBinding(tasks=made, room=0, averages=True)


def _task(
    part: RankMotif, rank: int, planned: RankOp, places: dict[int, int], given: Sequence[Span], taken: Sequence[Span],
    programs: Programs | None,
) -> MotifBinding:  # fmt: skip
    leaf, count = part.leaf, len(part.leaf.ranks)
    me = leaf.ranks.index(rank)
    (share,) = leaf.spans
    first, last = leaf.window

    def cut(pieces: Sequence[Span], peer: int, distance: int) -> Span:
        inside = (distance - first) % count < last - first
        return _share(pieces[places[peer]], share, planned.whole.size) if inside else NOTHING

    exchange = PeerRanges(
        gives=tuple(cut(given, peer, at - me) for at, peer in enumerate(leaf.ranks)),
        takes=tuple(cut(taken, peer, me - at) for at, peer in enumerate(leaf.ranks)),
        data_dependent=planned.op.at_most,
    )
    program = None
    if programs is not None:
        window = (first, last - first)
        program = programs.find(("splits", count, window), None, lambda: windowed(range(count), window))
    sent, received = exchange.splits
    return MotifBinding(
        motif=part.motif, leaf=leaf, program=program, count=max(sum(sent), sum(received)), in_place=False,
        gives=joined(_pieces(IN, exchange.gives)), takes=joined(_pieces(OUT, exchange.takes)), at=0, exchange=exchange,
    )  # fmt: skip


def _share(piece: Span, share: Span, whole: int) -> Span:
    """The part of a piece that a motif moves, as large a share of it as the motif's is of a block.

    >>> _share((100, 110), (0, 5), 10), _share((100, 103), (5, 10), 10)
    ((100, 105), (101, 103))
    """
    begin, end = piece
    size = end - begin
    return begin + share[0] * size // whole, begin + share[1] * size // whole


def _pieces(region: int, spans: Sequence[Span]) -> list[Piece]:
    return [(region, lo, hi) for lo, hi in spans if lo < hi]
