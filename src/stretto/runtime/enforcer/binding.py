# SPDX-License-Identifier: Apache-2.0
"""What a motif reads and writes of a comm-op's memory, and the program that moves it.

A comm-op has up to three regions of memory on a rank: what the application gives (`IN`), what it gets (`OUT`, both
in one where the op works in place), and room for what is only passed on (`ROOM`). A motif's program sees its
input and its output as one piece each; the lists here say where their parts really lie.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

from ...algorithms import algorithm, defined_for
from ...cluster import Cluster
from ...errors import Infeasible, InvalidInput, PlanMismatch
from ...planner.algebra.lowering import lower
from ...planner.algebra.motif import ROOTED, SHARDED, Motif
from ...planner.algebra.recipes import MotifRequest, build
from ...planner.algebra.shapes import default_algorithm
from ...planner.algebra.spans import Span, Spans, measure
from ...planner.costs.channels import restrict
from ...planner.costs.measured import NCCL
from ...planner.costs.providers import BALANCED, SYNTHESIZED
from ...process_state import STATE, ProcessPart
from ...programs import Program
from ...programs.lower import lower as lower_program
from ..torch_backend.buffers import is_rigid
from .rank_plan import RankMotif, RankOp

IN, OUT, ROOM = 0, 1, 2
MAX_PROGRAMS = 1024
PROVIDED = (SYNTHESIZED, BALANCED, NCCL)
WHOLE = ("AR", "BC", "RE", "AG")
"""Ops with one buffer, in which all motifs work."""
ONE_BUFFER = ("AR", "BC", "RE", "AG", "RS")
"""Motifs whose programs work in place."""

Piece = tuple[int, int, int]
"""(region, first element, behind the last)"""
Pieces = tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class PeerRanges:
    """What goes to, and comes from, each rank of a motif: (first byte, behind the last), none outside its window."""

    gives: tuple[Span, ...]
    takes: tuple[Span, ...]
    data_dependent: bool
    """Whether sizes were recorded as following the data; the same on all ranks."""

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """The bytes that go to, and come from, each rank."""
        return [hi - lo for lo, hi in self.gives], [hi - lo for lo, hi in self.takes]


@dataclass(frozen=True, kw_only=True)
class MotifBinding:
    """One motif on one rank for one size of the op, in elements. A piece of no region is filled and thrown away.

    Attributes:
        motif: The motif's number in its op.
        leaf: The motif itself: its kind (`AR`, `RS`, ...), ranks and root.
        program: None where a library's own algorithm runs.
        count: The elements of the whole motif, as its collective counts its size, and what was padded.
        in_place: Whether the program's input and output are one buffer.
        gives: The pieces of the op's memory that the motif reads, in the order of the program's input.
        takes: The pieces that it writes, in the order of the program's output.
        at: In place: where the smaller of the two begins in the larger.
        exchange: Of an all-to-all with splits: what goes to, and comes from, each rank of the motif.
    """

    motif: int
    leaf: Motif
    program: Program | None
    count: int
    in_place: bool
    gives: Pieces
    takes: Pieces
    at: int
    exchange: PeerRanges | None = None


@dataclass(frozen=True, kw_only=True)
class OpBinding:
    """A comm-op on one rank: its motifs (None where a small payload leaves nothing), and the elements of `ROOM`."""

    motifs: tuple[MotifBinding | None, ...]
    room: int
    averages: bool
    """Whether every reduction is one over all ranks, which can be an average; else sums are divided at the end."""


class Programs:
    """What was built before: many motifs of a plan run the same program. The latest are kept.

    Uneven shards have programs of their own, and where sizes follow the data there is no end of them.
    """

    def __init__(self, most: int = MAX_PROGRAMS) -> None:
        self._most = most
        # The control plane's thread prepares while training meets a new size.
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[object, ...], tuple[Program | None, Program]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: tuple[object, ...], brought: Program | None, make: Callable[[], Program]) -> Program:
        """The program of a `key` where the plan has `brought` this one along; made where it is not known.

        Args:
            key: What the program depends on.
            brought: The program that the plan brings along, if it does.
            make: Makes the program.

        Returns:
            The program.
        """
        full = (id(brought), *key)
        with self._lock:
            found = self._known.pop(full, None)
        # Only what is kept here has its id for itself.
        if found is None or found[0] is not brought:
            found = (brought, make())
        with self._lock:
            self._known[full] = found
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return found[1]


def bind_op(rank_op: RankOp, rank: int, elements: int, cluster: Cluster | None, programs: Programs | None) -> OpBinding:
    """The tasks of an op whose larger buffer has so many elements; raises `PlanMismatch` where a program is missing.

    Args:
        rank_op: The op as this rank takes part in it.
        rank: This rank.
        elements: Elements of the op's larger buffer.
        cluster: The cluster that programs are made for; None: the library's own order of ranks.
        programs: The programs that are known, to be found again; None where no programs are run.

    Returns:
        What each motif reads and writes.

    Raises:
        PlanMismatch: A program is missing.
    """
    whole = rank_op.whole
    blocks = len(whole.ranks) if whole.kind == "AA" else 1
    scale = (elements // blocks, whole.size)
    mine = _scaled(whole, scale)
    if mine is None:
        return OpBinding(motifs=(None,) * len(rank_op.motifs), room=0, averages=True)
    places = _Places(mine, rank)
    made: list[MotifBinding | None] = []
    for rank_motif in rank_op.motifs:
        leaf = _scaled(rank_motif.leaf, scale)
        made.append(None if leaf is None else _bind_motif(rank_motif, leaf, mine, places, cluster, programs))
    reducing = [rank_motif.leaf for rank_motif in rank_op.motifs if rank_motif.leaf.kind in ("AR", "RS", "RE")]
    averages = all(set(leaf.ranks) == set(whole.ranks) for leaf in reducing)
    return OpBinding(motifs=tuple(made), room=places.room, averages=averages)


def _bind_motif(
    rank_motif: RankMotif,
    leaf: Motif,
    whole: Motif,
    places: _Places,
    cluster: Cluster | None,
    programs: Programs | None,
) -> MotifBinding:
    even = _is_even(leaf)
    in_place = even and whole.kind in WHOLE and leaf.kind in ONE_BUFFER
    brought = _given(rank_motif, leaf, in_place=in_place)
    in_place = in_place and (brought is None or brought.collective.in_place)
    key = (rank_motif.algorithm, rank_motif.channels, in_place, leaf.kind, leaf.ranks, leaf.root, even or leaf)
    program: Program | None = None
    if programs is not None:
        program = programs.find(
            key, brought, lambda: program_of(rank_motif, leaf, cluster, in_place=in_place, even=even)
        )
    share = gap = 0
    if program is not None and leaf.nbytes % program.collective.num_chunks and _rigid(program):
        share, gap = _padding(leaf, program.collective.num_chunks)
        if not even:
            # Shares of different sizes cannot be padded alike: straight on, chunks lie where they belong.
            usual = replace(rank_motif, algorithm="direct", program=None)
            program, gap = program_of(usual, leaf, cluster, in_place=in_place, even=even), 0
    ordered = even or program is None
    if leaf.kind == "AA":
        gives, takes = places.blocks(leaf, even=ordered)
    else:
        given, taken = _spans(leaf, places.rank, even=ordered)
        gives = places.give(given, first=not rank_motif.after)
        takes = places.take(taken)
    shards = in_place and leaf.kind in SHARDED
    count = leaf.nbytes
    if gap:
        gives, takes = _padded(gives, share, gap), _padded(takes, share, gap)
        count += leaf.nbytes // share * gap
    at = leaf.ranks.index(places.rank) * (leaf.size // len(leaf.ranks) + gap) if shards else 0
    return MotifBinding(
        motif=rank_motif.number, leaf=leaf, program=program, count=count, in_place=in_place, gives=joined(gives),
        takes=joined(takes), at=at,
    )  # fmt: skip


def _given(rank_motif: RankMotif, leaf: Motif, *, in_place: bool) -> Program | None:
    """The program that the plan brings along, where it fits: a root may lie elsewhere than where it was made for.

    One that works in place needs memory where that is possible.
    """
    if rank_motif.program is None or (leaf.kind == "AA" and not leaf.whole):
        return None
    c = rank_motif.program.collective
    if c.helpers:
        raise PlanMismatch(
            f"{rank_motif.program.name}: needs {c.helpers} helpers outside the group, which take no part in its calls"
        )
    root = leaf.ranks.index(leaf.root) if leaf.kind in ROOTED else None
    fits = c.kind == leaf.collective_kind and c.num_ranks == len(leaf.ranks) and (root is None or c.root == root)
    return rank_motif.program if fits and (in_place or not c.in_place) else None


class RigidPrograms(ProcessPart):
    """Whether programs need chunks of one size, by identity; each is kept, so that its id is its own."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Program, bool]] = {}

    def rigid(self, program: Program) -> bool:
        """Whether a program needs chunks of one size."""
        found = self._known.get(id(program))
        if found is None:
            if len(self._known) >= MAX_PROGRAMS:
                self._known.clear()
            found = self._known[id(program)] = (program, is_rigid(lower_program(program)))
        return found[1]


_rigid = STATE.part(RigidPrograms).rigid


def _padding(leaf: Motif, chunks: int) -> tuple[int, int]:
    """The size of a share, and how much is to be added to each so that all chunks are of one size."""
    shares = len(leaf.ranks) if leaf.kind in SHARDED else leaf.nbytes // leaf.size if leaf.kind == "AA" else 1
    share, step = leaf.nbytes // shares, chunks // gcd(chunks, shares)
    return share, -share % step


def _padded(pieces: Sequence[Piece], share: int, gap: int) -> list[Piece]:
    """With a gap, which belongs to no region, behind every share.

    >>> _padded([(0, 0, 2), (0, 5, 7), (1, 0, 4)], 4, 1)
    [(0, 0, 2), (0, 5, 7), (-1, 0, 1), (1, 0, 4), (-1, 0, 1)]
    """
    found: list[Piece] = []
    filled = 0
    for region, lo, hi in pieces:
        found.append((region, lo, hi))
        filled += hi - lo
        if filled % share == 0:
            found.append((-1, 0, gap))
    return found


def program_of(rank_motif: RankMotif, leaf: Motif, cluster: Cluster | None, *, in_place: bool, even: bool) -> Program:
    """The program of a motif's algorithm over its ranks, by position; cut as the motif is where shares are uneven.

    Args:
        rank_motif: The motif as this rank takes part in it.
        leaf: The motif, scaled to the call.
        cluster: The cluster that the program is made for; None: the library's own order of ranks.
        in_place: Whether input and output are one buffer.
        even: Whether all ranks have equal shares.

    Returns:
        The program, not yet lowered.

    Raises:
        PlanMismatch: There is no such program.
    """
    kind = leaf.collective_kind
    root = leaf.ranks.index(leaf.root) if leaf.kind in ROOTED else 0
    given = _given(rank_motif, leaf, in_place=in_place)
    # What a plan does not bring along, and no name stands for, the library does as it usually would.
    recipe = default_algorithm(leaf) if rank_motif.algorithm in PROVIDED else rank_motif.algorithm
    name, _, pieces = recipe.partition(":")
    try:
        if given is not None:
            made = given
        elif cluster is not None:
            links = restrict(cluster, [channel for channel in rank_motif.channels if channel in cluster.channels])
            window = (leaf.window[0], leaf.window[1] - leaf.window[0])
            ask = MotifRequest(
                kind=kind, group=leaf.ranks, root=root, window=None if leaf.kind != "AA" or leaf.whole else window
            )
            made = build(recipe, ask, links, in_place=in_place)
        else:
            made = algorithm(
                name if leaf.kind != "AA" or leaf.whole else "direct", kind, len(leaf.ranks), in_place=in_place,
                root=root if leaf.kind in ROOTED else None, chunks=int(pieces) if pieces else None,
            )  # fmt: skip
        if not even:
            by_name = name if name in defined_for(kind, len(leaf.ranks)) else "direct"
            made = lower(leaf, algorithms={0: made if made.collective.kind == kind else by_name})
    except (InvalidInput, Infeasible) as error:
        raise PlanMismatch(
            f"algorithm {rank_motif.algorithm!r} of {str(leaf)[:80]} cannot be made here: {error}"
        ) from None
    return made


def _is_even(leaf: Motif) -> bool:
    """Whether a program for equal shares serves."""
    if leaf.kind in SHARDED:
        return len({measure(shard) for shard in leaf.shards}) == 1
    if leaf.kind == "AA":
        return leaf.whole and len({len(held) for held in leaf.held}) == len({len(bound) for bound in leaf.bound}) == 1
    return True


def _spans(leaf: Motif, rank: int, *, even: bool) -> tuple[Spans, Spans]:
    """What a rank gives to a motif's program and takes from it, in the order of the program's buffers.

    A program for equal shares has them in the order of its ranks, one that was cut for this motif as they lie.
    """
    at = leaf.ranks.index(rank)
    nothing: Spans = ()
    if leaf.kind not in SHARDED:
        is_root = leaf.kind not in ROOTED or leaf.root == rank
        return (leaf.spans if leaf.kind != "BC" or is_root else nothing), (
            leaf.spans if leaf.kind != "RE" or is_root else nothing
        )
    everything = tuple(span for shard in leaf.shards for span in shard) if even else leaf.spans
    if leaf.kind == "AG":
        return leaf.shards[at], everything
    if leaf.kind == "RS":
        return everything, leaf.shards[at]
    at_root = everything if leaf.root == rank else nothing
    return (leaf.shards[at], at_root) if leaf.kind == "GA" else (at_root, leaf.shards[at])


class _Places:
    """Where the payload of an op lies on one rank."""

    def __init__(self, whole: Motif, rank: int) -> None:
        self.whole, self.rank = whole, rank
        self.room = 0
        self._slots: dict[tuple[int, int], int] = {}
        self._position = {rank: at for at, rank in enumerate(whole.ranks)}
        shard = whole.shards[self._position[rank]] if whole.kind in SHARDED else ()
        self._own = shard[0] if shard else (0, 0)

    def give(self, spans: Spans, *, first: bool) -> list[Piece]:
        kind, (low, _) = self.whole.kind, self._own
        if kind in WHOLE:
            return [(OUT, lo, hi) for lo, hi in spans]
        if kind == "GA":
            return [(IN, lo - low, hi - low) for lo, hi in spans]
        if kind == "RS" and not first:
            return self._passed(spans)
        return [(IN, lo, hi) for lo, hi in spans]

    def take(self, spans: Spans) -> list[Piece]:
        kind, (low, high) = self.whole.kind, self._own
        if kind in (*WHOLE, "GA"):
            return [(OUT, lo, hi) for lo, hi in spans]
        if all(low <= lo and hi <= high for lo, hi in spans):
            return [(OUT, lo - low, hi - low) for lo, hi in spans]
        return self._passed(spans)

    def _passed(self, spans: Spans) -> list[Piece]:
        self.room = self.whole.size
        return [(ROOM, lo, hi) for lo, hi in spans]

    def blocks(self, leaf: Motif, *, even: bool) -> tuple[list[Piece], list[Piece]]:
        """The pieces of an all-to-all: blocks (source, destination) in the order of the program's buffers."""
        n = len(leaf.ranks)
        at = leaf.ranks.index(self.rank)
        first, last = leaf.window
        sends = [q for q in range(n) if (q - at - first) % n < last - first]
        hears = [p for p in range(n) if (at - p - first) % n < last - first]
        if even:
            given = [(h, b) for q in sends for h in leaf.held[at] for b in leaf.bound[q]]
            taken = [(h, b) for p in hears for h in leaf.held[p] for b in leaf.bound[at]]
        else:
            given = [(h, b) for h in leaf.held[at] for q in sends for b in leaf.bound[q]]
            taken = [(h, b) for p in hears for h in leaf.held[p] for b in leaf.bound[at]]
        (span,) = leaf.spans
        return [self._block(*pair, span) for pair in given], [self._block(*pair, span, take=True) for pair in taken]

    def _block(self, source: int, target: int, span: tuple[int, int], *, take: bool = False) -> Piece:
        size = self.whole.size
        if target == self.rank and (take or source != self.rank):
            region, slot = OUT, self._position[source]
        elif source == self.rank:
            # What a rank keeps of its own is in the input anyway.
            region, slot = (-1 if take else IN), self._position[target]
        else:
            slot = self._slots.setdefault((source, target), len(self._slots))
            region, self.room = ROOM, max(self.room, (slot + 1) * size)
        return region, slot * size + span[0], slot * size + span[1]


def _scaled(leaf: Motif, scale: tuple[int, int]) -> Motif | None:
    """The same motif where the payload has another number of elements; None where nothing is left of it."""
    new, old = scale

    def scaled(spans: Spans) -> Spans:
        ends = ((lo * new // old, hi * new // old) for lo, hi in spans)
        return tuple((lo, hi) for lo, hi in ends if lo < hi)

    spans = scaled(leaf.spans)
    if not spans:
        return None
    return Motif(
        kind=leaf.kind, ranks=leaf.ranks, spans=spans, shards=tuple(scaled(shard) for shard in leaf.shards),
        root=leaf.root, window=leaf.window, held=leaf.held, bound=leaf.bound,
    )  # fmt: skip


def joined(pieces: Sequence[Piece]) -> Pieces:
    """The pieces with those that lie side by side merged."""
    return tuple(_runs(pieces))


def _runs(pieces: Sequence[Piece]) -> Iterator[Piece]:
    if not pieces:
        return
    begin = pieces[0]
    for a, b in pairwise([*pieces, None]):
        assert a is not None
        if b is None or a[0] != b[0] or a[2] != b[1]:
            yield begin[0], begin[1], a[2]
            begin = b if b is not None else begin
