# SPDX-License-Identifier: Apache-2.0
"""What motifs of a step hold while they run: ends of channels, and links that other places use as well.

A link has two directions, and so has a channel at a place: an *end* is a place and a direction. A collective holds its
channels at both ends of all its places, a ``send`` only outward where it comes from and inward where it goes. So sends
in opposite directions, or from one stage of a pipeline to the next, run beside each other.

Motifs that hold no common end may still meet on a link (a NIC of several ranks, a spine). Such links are further
resources. A motif takes one of them for as long as its own bytes need there, which may be shorter than the motif.
"""

from __future__ import annotations

from ...workload import PAIRWISE, Op, Workload

OUT, IN = 0, 1

Ends = tuple[int, ...]
"""Ends of places, as numbers: ``2 * place + direction``."""


def op_ends(workload: Workload) -> tuple[Ends, ...]:
    """For each op the ends of the places that its motifs hold; a compute-op holds none.

    >>> from stretto.workload import Op
    >>> ops = (Op(name="send", kind="send", nbytes=1.0, groups=((0, 1),)), Op(name="ar", kind="all_reduce", nbytes=1.0))
    >>> op_ends(Workload(name="step", num_ranks=2, ops=ops))
    ((0, 3), (0, 2, 1, 3))
    """
    place_of = {rank: at for at, place in enumerate(workload.places) for rank in place.ranks}
    # Without sends both directions are always held together, so one stands for both.
    both = any(op.kind in PAIRWISE for op in workload.ops)
    known: dict[tuple[object, ...], Ends] = {}

    def ends(op: Op, places: tuple[int, ...]) -> Ends:
        key = (op.kind in PAIRWISE, op.groups)
        if key not in known and op.kind in PAIRWISE:
            outward = sorted({place_of[source] for source, _ in op.groups})
            inward = sorted({place_of[target] for _, target in op.groups})
            known[key] = (*(2 * at + OUT for at in outward), *(2 * at + IN for at in inward))
        elif key not in known:
            known[key] = tuple(2 * at + way for way in ((OUT, IN) if both else (OUT,)) for at in places)
        return known[key]

    return tuple(
        ends(op, places) if op.is_comm else () for op, places in zip(workload.ops, workload.op_places, strict=True)
    )
