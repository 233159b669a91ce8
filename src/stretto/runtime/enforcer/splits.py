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
from .binding import IN, OUT, MotifBinding, OpBinding, PeerRanges, Piece, Programs, joined
from .rank_plan import RankMotif, RankOp

NOTHING = (0, 0)


def carries_splits(rank_op: RankOp) -> bool:
    """Whether a plan moves an all-to-all straight from rank to rank, so that pieces may have any size.

    Who passes on what is between others would have to know the others' sizes.
    """
    return rank_op.whole.kind == "AA" and not any(rank_motif.leaf.relays for rank_motif in rank_op.motifs)


def bind_splits(
    rank_op: RankOp, rank: int, gives: Sequence[int], takes: Sequence[int], programs: Programs | None
) -> OpBinding:
    """The tasks of an all-to-all with splits on one rank.

    No binding is left out because it moves nothing here: another rank may have something for it.

    Args:
        rank_op: The op; `carries_splits` holds for it.
        rank: This rank.
        gives: Bytes that go to each rank of the op.
        takes: Bytes that come from each.
        programs: Programs that are known; None where a library's own all-to-all runs.

    Returns:
        A binding for each of the op's motifs.
    """
    whole = rank_op.whole
    places = {peer: at for at, peer in enumerate(whole.ranks)}
    given, taken = (list(pairwise(accumulate(sizes, initial=0))) for sizes in (gives, takes))
    made = tuple(
        _bind_motif(rank_motif, rank, rank_op, places, given, taken, programs) for rank_motif in rank_op.motifs
    )
    return OpBinding(motifs=made, room=0, averages=True)


def _bind_motif(
    motif: RankMotif, rank: int, rank_op: RankOp, places: dict[int, int], given: Sequence[Span], taken: Sequence[Span],
    programs: Programs | None,
) -> MotifBinding:  # fmt: skip
    leaf, count = motif.leaf, len(motif.leaf.ranks)
    me = leaf.ranks.index(rank)
    (share,) = leaf.spans
    first, last = leaf.window

    def cut(pieces: Sequence[Span], peer: int, distance: int) -> Span:
        inside = (distance - first) % count < last - first
        return _share(pieces[places[peer]], share, rank_op.whole.size) if inside else NOTHING

    exchange = PeerRanges(
        gives=tuple(cut(given, peer, at - me) for at, peer in enumerate(leaf.ranks)),
        takes=tuple(cut(taken, peer, me - at) for at, peer in enumerate(leaf.ranks)),
        data_dependent=rank_op.op.at_most,
    )
    program = None
    if programs is not None:
        window = (first, last - first)
        program = programs.find(("splits", count, window), None, lambda: windowed(range(count), window))
    sent, received = exchange.splits
    return MotifBinding(
        motif=motif.number, leaf=leaf, program=program, count=max(sum(sent), sum(received)), in_place=False,
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
