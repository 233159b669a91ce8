# SPDX-License-Identifier: Apache-2.0
"""`SymmetricProgram`: a program given by what a few ranks send, the same for all others up to translation.

Ranks are numbered ``l + local * t``: l is a rank's number in its group (a host, say), t the group's point of a torus
``sizes`` (t = c0 + size0 * (c1 + ...)). Translation by g takes the rank (l, t) to (l, t + g), coordinate by coordinate,
and the chunk that belongs to rank h to the one that belongs to h's image. With ``local`` 1 all ranks are alike, and
rank 0 stands for all. XOR algorithms are translations of a torus of twos. Only one transfer of each orbit is stored,
so a 4096-rank program takes no more room than one group's part of it, and it is verified and simulated as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _native
from ..collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from ..collectives.conditions import MAX_ENTRIES, MAX_RANKS
from ..collectives.implicit import MAX_NUMBERED
from ..errors import InvalidInput, VerificationError, unknown
from .ir import Program, check_table, column
from .symmetry_views import chunk_numbers, expanded, seen_by, translate
from .verify import VerificationReport, fifo_depth

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SymmetricProgram:
    """A program that is stored once per orbit: transfer t stands for one transfer of every group of ranks.

    In every group, the rank with the number ``src[t]`` sends to ``dst[t]`` the chunks (home, piece) that are listed for
    t; `dst` and `home` are ranks as seen from the group at the torus' point 0, and are translated for the others.

    Each rank's shard has `pieces` chunks; chunk (h, j) is number ``h * pieces + j`` of the collective (an all-reduce
    has ``num_ranks * pieces`` chunks). In an all-to-all the shard of a rank is all that it sends: with c chunks for
    each taker it has ``num_ranks * c`` pieces, and piece ``q * c + j`` of rank h goes to rank q as seen from h's group,
    so
    that translations leave pieces as they are. `after` and `gate` name orbits, with the meaning they have in `Program`:
    a transfer waits for the members of the orbit that touch the same slots.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    pieces: int
    dst: NDArray[np.int32]
    reduce: NDArray[np.bool_]
    chunk_ptr: NDArray[np.int64]
    home: NDArray[np.int32]
    piece: NDArray[np.int32]
    after_ptr: NDArray[np.int64]
    after: NDArray[np.int32]
    gate_ptr: NDArray[np.int64]
    gate: NDArray[np.int32]
    gate_reads: NDArray[np.bool_]
    lane: NDArray[np.int16]
    local: int = 1
    """The number of ranks in a group: those that are not images of one another."""
    src: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """The sender's number in its group, 0..local-1; all 0 when not given."""

    def __post_init__(self) -> None:
        if len(self.src) == 0:
            object.__setattr__(self, "src", np.zeros(len(self.dst), np.int32))
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        check_torus(self.kind, self.sizes, self.local, self.pieces)
        _check_columns(
            self.num_ranks, self.local, self.pieces, self.src, self.dst, self.chunk_ptr, self.home, self.piece
        )
        count = len(self.dst)
        check_table("after", self.after_ptr, self.after, count)
        check_table("gate", self.gate_ptr, self.gate, count)
        if not len(self.reduce) == len(self.lane) == count or len(self.gate_reads) != len(self.gate):
            raise InvalidInput("transfers: reduce, lane and gate_reads differ in length from what they belong to")
        if self.lane.min(initial=0) < 0:
            raise InvalidInput("transfers: lane must be >= 0")
        _check_meetings(self)

    @classmethod
    def from_steps(
        cls,
        name: str,
        kind: str,
        sizes: tuple[int, ...],
        *,
        pieces: int,
        dst: ArrayLike,
        home: ArrayLike,
        piece: ArrayLike,
        step: ArrayLike,
        reduce: ArrayLike = False,
        chunk_ptr: ArrayLike | None = None,
        lane: ArrayLike = 0,
        src: ArrayLike = 0,
        local: int = 1,
    ) -> SymmetricProgram:
        """Make a symmetric program from synchronous steps, as `Program.from_steps` does; describe one group's sends.

        Args:
            name: The program's name.
            kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
            sizes: The sides of the torus of groups, the fastest varying first.
            pieces: How many chunks a rank's shard has, >= 1.
            dst: The rank that each transfer of the group at point 0 goes to, another one than its sender.
            home: The rank whose shard each chunk belongs to, for all transfers one after the other.
            piece: The piece 0..pieces-1 of that shard, beside `home`.
            step: The step of each transfer; steps must not fall.
            reduce: Whether the receiver adds the chunks to its own; one truth value for all, or one per transfer.
            chunk_ptr: Transfer t moves entries ``chunk_ptr[t]:chunk_ptr[t+1]`` of `home`; one each when not given.
            lane: The connection of each transfer, >= 0; one number for all, or one per transfer.
            src: The sender's number in the group, 0..local-1; one number for all, or one per transfer.
            local: The number of ranks in a group; with 1, all ranks are images of rank 0.

        Returns:
            The program; it is checked for form, not verified.

        Raises:
            InvalidInput: A number is out of range, or steps fall.

        >>> ring = SymmetricProgram.from_steps("ring", "all_gather", (4,), pieces=1, dst=[1, 1, 1],
        ...                                    home=[0, 3, 2], piece=[0, 0, 0], step=[0, 1, 2])
        >>> ring, ring.verify().fifo_depth, ring.expand().verify().fifo_depth
        (<SymmetricProgram ring: all_gather over 4 ranks (4), 3 orbits = 12 transfers>, 1, 1)
        """
        to = column("dst", dst, np.int32)
        count = len(to)
        steps = column("step", step, np.int64, count)
        if np.any(np.diff(steps) < 0):
            raise InvalidInput("step: transfers must be in order of step")
        homes, which = column("home", home, np.int32), column("piece", piece, np.int32)
        ptr = np.arange(count + 1) if chunk_ptr is None else column("chunk_ptr", chunk_ptr, np.int64)
        reduces, sender = column("reduce", reduce, np.bool_, count), column("src", src, np.int32, count)
        check_torus(kind, sizes, local, pieces)
        ranks = local * prod(sizes)
        _check_columns(ranks, local, pieces, sender, to, ptr, homes, which)
        # A slot of the quotient is a chunk whose home is counted from the group of the rank that holds it.
        rows = np.diff(ptr)
        holder, receiver = np.repeat(sender, rows).astype(np.int64), np.repeat(to, rows).astype(np.int64)
        there = translate(homes, receiver // local, sizes, sign=-1, local=local)
        slots = [
            ((at % local) * ranks + h) * pieces + which
            for at, h in ((holder, homes.astype(np.int64)), (receiver, there))
        ]
        number, count_slots = np.concatenate(slots), local * ranks * pieces
        if kind == "all_to_all":
            # Only those that are used are numbered: most ranks never hold most chunks.
            used, number = np.unique(number, return_inverse=True)
            count_slots = len(used)
        number = number.astype(np.int32)
        after_ptr, after, gate_ptr, gate, reads = _native.derive_dependencies(
            count_slots, reduces, ptr, number[: len(homes)], number[len(homes) :], steps
        )
        return cls(
            name=name, kind=kind, sizes=tuple(sizes), pieces=pieces, dst=to, reduce=reduces, chunk_ptr=ptr,
            home=homes, piece=which, after_ptr=after_ptr, after=after, gate_ptr=gate_ptr, gate=gate,
            gate_reads=reads.astype(np.bool_), lane=column("lane", lane, np.int16, count), local=local, src=sender,
        )  # fmt: skip

    @property
    def copies(self) -> int:
        """The number of groups, which is the number of transfers that each orbit stands for."""
        return prod(self.sizes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all groups."""
        return self.local * self.copies

    @property
    def num_transfers(self) -> int:
        """The number of transfers of all ranks together."""
        return len(self.dst) * self.copies

    @property
    def chunk(self) -> NDArray[np.int32]:
        """The chunks that the group at point 0 sends, as chunk numbers of the collective."""
        return chunk_numbers(self, self.home, self.piece).astype(np.int32)

    @cached_property
    def collective(self) -> Collective:
        """The collective that the whole program performs, cut no finer than it has to be (for bounds)."""
        if self.kind == "all_reduce":
            return AllReduce(self.num_ranks, chunks=1)
        if self.kind == "all_to_all":
            return AllToAll(self.num_ranks)
        return (AllGather if self.kind == "all_gather" else ReduceScatter)(self.num_ranks)

    def transfer_bytes(self, nbytes: float) -> NDArray[np.float64]:
        """The bytes of each orbit's message when the collective moves `nbytes`."""
        cut = self.pieces if self.kind == "all_to_all" else self.num_ranks * self.pieces
        return np.diff(self.chunk_ptr) * (float(nbytes) / cut)

    def expand(self) -> Program:
        """The plain `Program` with the transfers of all ranks, those of one orbit next to each other."""
        return expanded(self)

    def verify(self) -> VerificationReport:
        """Prove the program by one group's chunks, of which all others are translations, and by the order of orbits.

        An all-gather is right when the shard of each rank of the group is broadcast, a reduce-scatter when it is
        reduced to that rank, an all-to-all when it is scattered from there. A circle of
        waiting ranks would be a circle of waiting orbits, so their order proves that
        nothing deadlocks.
        """
        return self._report

    @cached_property
    def _report(self) -> VerificationReport:
        lanes = int(self.lane.max(initial=0)) + 1
        connection = (self.src.astype(np.int64) * self.num_ranks + self.dst) * lanes + self.lane
        depth = fifo_depth(self.after_ptr, self.after, self.gate_ptr, self.gate, self.gate_reads, connection)
        if depth == 0:
            raise VerificationError(f"{self.name}: deadlock: its orbits of transfers wait for one another in a circle")
        warnings = dict.fromkeys(note for rank in range(self.local) for note in self.seen_by(rank).verify().warnings)
        return VerificationReport(subject=self.name, fifo_depth=depth, warnings=tuple(warnings))

    def seen_by(self, rank: int) -> Program:
        """The transfers that touch the chunks of a rank 0..local-1, as a program in which each moves one chunk."""
        return seen_by(self, rank)

    def __repr__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        groups = f"{sizes}" if self.local == 1 else f"{sizes} groups of {self.local}"
        return (
            f"<SymmetricProgram {self.name}: {self.kind} over {self.num_ranks} ranks ({groups}), "
            f"{len(self.dst)} orbits = {self.num_transfers} transfers>"
        )


def check_torus(kind: str, sizes: tuple[int, ...], local: int, pieces: int) -> None:
    """Refuse an unknown collective, an empty torus or group, and numbers of pieces that are out of range.

    Args:
        kind: The collective.
        sizes: The torus of groups.
        local: Ranks of a group.
        pieces: Pieces that a rank begins with.

    Raises:
        InvalidInput: One of them is out of range.
    """
    if kind not in KINDS:
        raise unknown("symmetric collective", kind, KINDS)
    if local < 1:
        raise InvalidInput(f"local: must be >= 1, not {local}")
    ranks = local * prod(sizes)
    if min(sizes, default=1) < 1 or ranks > MAX_RANKS:
        raise InvalidInput(f"sizes: must be >= 1 and multiply, with local, to at most {MAX_RANKS}, not {sizes}")
    most = MAX_NUMBERED // ranks if kind == "all_to_all" else MAX_ENTRIES // (ranks * local)
    if not 1 <= pieces <= most:
        raise InvalidInput(f"pieces: must be 1..{most} for {ranks} ranks, not {pieces}")
    if kind == "all_to_all" and pieces % ranks:
        raise InvalidInput(f"pieces: must be a multiple of the {ranks} ranks of an all_to_all, not {pieces}")


def _check_columns(
    ranks: int,
    local: int,
    pieces: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    ptr: Ints,
    home: NDArray[np.int32],
    piece: NDArray[np.int32],
) -> None:
    if not len(ptr) == len(dst) + 1 == len(src) + 1 or len(home) != len(piece) or ptr[0] != 0 or ptr[-1] != len(home):
        raise InvalidInput("transfers: src, dst, chunk_ptr, home and piece differ in length")
    if np.any(np.diff(ptr) <= 0):
        raise InvalidInput("transfers: each must move at least one chunk")
    if np.any((src < 0) | (src >= local)):
        raise InvalidInput(f"src: must be 0..{local - 1}, the sender's number in its group")
    if np.any((dst < 0) | (dst >= ranks) | (dst == src)):
        raise InvalidInput(f"dst: must be 0..{ranks - 1}, and another rank than the sender")
    if np.any((home < 0) | (home >= ranks)) or np.any((piece < 0) | (piece >= pieces)):
        raise InvalidInput(f"chunks: home must be 0..{ranks - 1} and piece 0..{pieces - 1}")
    owner = np.repeat(np.arange(len(dst)), np.diff(ptr))
    slots = np.sort((owner * ranks + home) * pieces + piece)
    again = np.flatnonzero(slots[1:] == slots[:-1])
    if len(again):
        raise InvalidInput(f"transfers[{slots[again[0]] // (ranks * pieces)}]: moves a chunk twice")


def _check_meetings(p: SymmetricProgram) -> None:
    """Refuse a dependency between orbits that never touch the same rank, whose meaning would be open."""
    waits = np.repeat(np.arange(len(p.dst)), np.diff(p.after_ptr))
    apart = np.flatnonzero(p.dst[p.after] % p.local != p.src[waits])
    if len(apart):
        raise InvalidInput(f"transfers[{waits[apart[0]]}].after: {p.after[apart[0]]} does not deliver to its sender")
    waits = np.repeat(np.arange(len(p.dst)), np.diff(p.gate_ptr))
    at = np.where(p.gate_reads, p.src[p.gate], p.dst[p.gate] % p.local)
    apart = np.flatnonzero(at != p.dst[waits] % p.local)
    if len(apart):
        raise InvalidInput(f"transfers[{waits[apart[0]]}].gate: {p.gate[apart[0]]} does not touch its destination")
