# SPDX-License-Identifier: Apache-2.0
"""`SymmetricProgram`: a program given by what rank 0 sends, the same for every rank up to translation.

Ranks are the points of a torus ``sizes`` (rank = c0 + size0 * (c1 + ...)); translation by g takes rank r to r + g,
coordinate by coordinate, and the chunk that belongs to rank h to the one that belongs to h + g. XOR algorithms
are translations of a torus of twos. Only one transfer of each orbit is stored, so a 4096-rank program takes no
more room than one rank's part of it, and it is verified and simulated as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _native
from ..collectives import AllGather, AllReduce, Broadcast, Collective, Reduce, ReduceScatter
from ..collectives.conditions import MAX_ENTRIES, MAX_RANKS
from ..errors import InvalidInput, VerificationError, unknown
from .ir import Program, check_table, column
from .verify import VerificationReport, fifo_depth

KINDS = ("all_gather", "reduce_scatter", "all_reduce")

Ints = NDArray[np.int64]


def translate(rank: ArrayLike, by: ArrayLike, sizes: tuple[int, ...], *, sign: int = 1) -> Ints:
    """``rank + sign * by`` on the torus, coordinate by coordinate; `rank` and `by` broadcast.

    Args:
        rank: Ranks, >= 0.
        by: Translations, as ranks.
        sizes: The sides of the torus, the fastest varying first.
        sign: 1, or -1 to translate back.

    Returns:
        The translated ranks.

    >>> int(translate(5, 3, (4, 2))), int(translate(0, 1, (4, 2), sign=-1))
    (4, 3)
    """
    a, b = np.asarray(rank, np.int64), np.asarray(by, np.int64)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.int64)
    stride = 1
    for size in sizes:
        result = result + (a // stride % size + sign * (b // stride % size)) % size * stride
        stride *= size
    return result


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SymmetricProgram:
    """A program that is stored once per orbit: transfer t stands for one transfer of every rank.

    Every rank r sends to ``r + dst[t]`` the chunks ``(r + home, piece)`` that are listed for t.

    Each rank's shard has `pieces` chunks; chunk (h, j) is number ``h * pieces + j`` of the collective (an all-reduce
    has ``num_ranks * pieces`` chunks). `after` and `gate` name orbits, with the meaning they have in `Program`:
    a transfer of rank r waits for the members of the orbit that touch the same slots.
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

    def __post_init__(self) -> None:
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        _check(self.kind, self.sizes, self.pieces, self.dst, self.chunk_ptr, self.home, self.piece)
        count = len(self.dst)
        check_table("after", self.after_ptr, self.after, count)
        check_table("gate", self.gate_ptr, self.gate, count)
        if not len(self.reduce) == len(self.lane) == count or len(self.gate_reads) != len(self.gate):
            raise InvalidInput("transfers: reduce, lane and gate_reads differ in length from what they belong to")
        if self.lane.min(initial=0) < 0:
            raise InvalidInput("transfers: lane must be >= 0")

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
    ) -> SymmetricProgram:
        """Make a symmetric program from synchronous steps, as `Program.from_steps` does; describe what rank 0 sends.

        Args:
            name: The program's name.
            kind: "all_gather", "reduce_scatter" or "all_reduce".
            sizes: The sides of the torus of ranks, the fastest varying first.
            pieces: How many chunks a rank's shard has, >= 1.
            dst: The rank that each transfer of rank 0 goes to, 1..num_ranks-1.
            home: The rank whose shard each chunk belongs to, for all transfers one after the other.
            piece: The piece 0..pieces-1 of that shard, beside `home`.
            step: The step of each transfer; steps must not fall.
            reduce: Whether the receiver adds the chunks to its own; one truth value for all, or one per transfer.
            chunk_ptr: Transfer t moves entries ``chunk_ptr[t]:chunk_ptr[t+1]`` of `home`; one each when not given.
            lane: The connection of each transfer, >= 0; one number for all, or one per transfer.

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
        reduces = column("reduce", reduce, np.bool_, count)
        _check(kind, sizes, pieces, to, ptr, homes, which)
        # A slot of the quotient is a chunk whose home is counted from the rank that holds it.
        there = translate(homes, np.repeat(to, np.diff(ptr)), sizes, sign=-1)
        slots = [np.ascontiguousarray((h * pieces + which).astype(np.int32)) for h in (homes.astype(np.int64), there)]
        after_ptr, after, gate_ptr, gate, reads = _native.derive_dependencies(
            prod(sizes) * pieces, reduces, ptr, slots[0], slots[1], steps
        )
        return cls(
            name=name, kind=kind, sizes=tuple(sizes), pieces=pieces, dst=to, reduce=reduces, chunk_ptr=ptr,
            home=homes, piece=which, after_ptr=after_ptr, after=after, gate_ptr=gate_ptr, gate=gate,
            gate_reads=reads.astype(np.bool_),
            lane=column("lane", lane, np.int16, count),
        )  # fmt: skip

    @property
    def num_ranks(self) -> int:
        """The number of ranks: the points of the torus."""
        return prod(self.sizes)

    @property
    def num_transfers(self) -> int:
        """The number of transfers of all ranks together."""
        return len(self.dst) * self.num_ranks

    @property
    def chunk(self) -> NDArray[np.int32]:
        """The chunks that rank 0 sends, as chunk numbers of the collective."""
        return self.home * np.int32(self.pieces) + self.piece

    @cached_property
    def collective(self) -> Collective:
        """The collective that the whole program performs, cut no finer than it has to be (for bounds)."""
        if self.kind == "all_reduce":
            return AllReduce(self.num_ranks, chunks=1)
        return (AllGather if self.kind == "all_gather" else ReduceScatter)(self.num_ranks)

    def _in_chunks(self) -> Collective:
        if self.kind == "all_reduce":
            return AllReduce(self.num_ranks, chunks=self.num_ranks * self.pieces)
        return (AllGather if self.kind == "all_gather" else ReduceScatter)(self.num_ranks, chunks=self.pieces)

    def transfer_bytes(self, nbytes: float) -> NDArray[np.float64]:
        """The bytes of each orbit's message when the collective moves `nbytes`."""
        return np.diff(self.chunk_ptr) * (float(nbytes) / (self.num_ranks * self.pieces))

    def expand(self) -> Program:
        """The plain `Program` with the transfers of all ranks, those of one orbit next to each other."""
        ranks, orbits = self.num_ranks, len(self.dst)
        all_ranks = np.arange(ranks)
        sizes = np.repeat(np.diff(self.chunk_ptr), ranks)
        # In each dependency, the transfer that rank r sends waits for the transfer that rank r + shift sends.
        after_shift = translate(0, self.dst[self.after], self.sizes, sign=-1)
        gate_shift = np.repeat(self.dst, np.diff(self.gate_ptr)).astype(np.int64)
        written = translate(gate_shift, self.dst[self.gate], self.sizes, sign=-1)
        gate_shift = np.where(self.gate_reads, gate_shift, written)
        after_ptr, after = self._spread(self.after_ptr, self.after, after_shift)
        gate_ptr, gate = self._spread(self.gate_ptr, self.gate, gate_shift)
        rows = [slice(*self.chunk_ptr[t : t + 2]) for t in range(orbits)]
        chunk = [
            translate(all_ranks[:, None], self.home[row], self.sizes) * self.pieces + self.piece[row] for row in rows
        ]
        return Program(
            name=self.name,
            collective=self._in_chunks(),
            src=np.tile(all_ranks, orbits).astype(np.int32),
            dst=translate(all_ranks, self.dst[:, None], self.sizes).ravel().astype(np.int32),
            reduce=np.repeat(self.reduce, ranks),
            chunk_ptr=np.concatenate([[0], np.cumsum(sizes)]),
            chunk=np.concatenate([np.zeros(0), *(c.ravel() for c in chunk)]).astype(np.int32),
            after_ptr=after_ptr,
            after=after,
            gate_ptr=gate_ptr,
            gate=gate,
            lane=np.repeat(self.lane, ranks),
            route=np.full(orbits * ranks, -1, np.int32),
        )

    def _spread(self, ptr: Ints, orbit: NDArray[np.int32], shift: Ints) -> tuple[Ints, NDArray[np.int32]]:
        """Turn dependencies between orbits into dependencies between transfers, numbered as in `expand`."""
        ranks = self.num_ranks
        members = orbit[:, None].astype(np.int64) * ranks + translate(shift[:, None], np.arange(ranks), self.sizes)
        lengths = np.diff(ptr)
        new_ptr = np.concatenate([[0], np.cumsum(np.repeat(lengths, ranks))])
        flat = np.empty(new_ptr[-1], np.int32)
        waiting = np.repeat(np.arange(len(lengths)), lengths)
        at = np.arange(len(orbit)) - ptr[waiting]
        flat[new_ptr[waiting[:, None] * ranks + np.arange(ranks)] + at[:, None]] = members
        return new_ptr, flat

    def verify(self) -> VerificationReport:
        """Prove the program by rank 0's chunks, of which all others are translations, and by the order of orbits.

        An all-gather is right when rank 0's shard is broadcast, a reduce-scatter when it is reduced to rank 0. A
        circle of waiting ranks would be a circle of waiting orbits, so their order proves that nothing deadlocks.
        """
        return self._report

    @cached_property
    def _report(self) -> VerificationReport:
        depth = fifo_depth(self.after_ptr, self.after, self.gate_ptr, self.gate, self.gate_reads,
                           self.dst.astype(np.int64) * (int(self.lane.max(initial=0)) + 1) + self.lane)  # fmt: skip
        if depth == 0:
            raise VerificationError(f"{self.name}: deadlock: its orbits of transfers wait for one another in a circle")
        report = self.seen_by_rank_zero().verify()
        return VerificationReport(subject=self.name, fifo_depth=depth, warnings=report.warnings)

    def seen_by_rank_zero(self) -> Program:
        """The transfers that touch rank 0's chunks, as a program of their own (each moves one chunk)."""
        ranks, pieces, entries = self.num_ranks, self.pieces, len(self.home)
        make = {
            "all_gather": lambda: Broadcast(ranks, root=0, chunks=pieces),
            "reduce_scatter": lambda: Reduce(ranks, root=0, chunks=pieces),
            "all_reduce": lambda: AllReduce(ranks, chunks=pieces),
        }
        orbit = np.repeat(np.arange(len(self.dst)), np.diff(self.chunk_ptr))
        src = translate(0, self.home, self.sizes, sign=-1)
        dst = translate(src, self.dst[orbit], self.sizes)
        key = (orbit * pieces + self.piece) * ranks + src  # unique: an orbit moves each piece from a rank once
        order = np.argsort(key, kind="stable")

        def find(orbits: Ints, piece: NDArray[np.int32], sources: Ints) -> Ints:
            wanted = (orbits * pieces + piece) * ranks + sources
            at = np.searchsorted(key[order], wanted)
            hit = (at < entries) & (key[order][np.minimum(at, entries - 1)] == wanted)
            found: Ints = np.where(hit, order[np.minimum(at, entries - 1)], -1)
            return found

        def rows(ptr: Ints, values: NDArray[np.int32]) -> tuple[Ints, Ints, Ints]:
            lengths = np.diff(ptr)[orbit]
            entry = np.repeat(np.arange(entries), lengths)
            starts = np.cumsum(lengths) - lengths
            index = np.repeat(ptr[orbit] - starts, lengths) + np.arange(lengths.sum())
            return entry, index, values[index].astype(np.int64)

        def table(entry: Ints, other: Ints) -> tuple[Ints, NDArray[np.int32]]:
            # A dependency that another chunk of the same message caused is dropped: it does not concern this chunk.
            entry, other = entry[other >= 0], other[other >= 0]
            return np.searchsorted(entry, np.arange(entries + 1)), other.astype(np.int32)

        entry, _, other = rows(self.after_ptr, self.after)
        came_from = translate(src[entry], self.dst[other], self.sizes, sign=-1)
        after_ptr, after = table(entry, find(other, self.piece[entry], came_from))
        entry, index, other = rows(self.gate_ptr, self.gate)
        writer = translate(dst[entry], self.dst[other], self.sizes, sign=-1)
        where = np.where(self.gate_reads[index], dst[entry], writer)
        gate_ptr, gate = table(entry, find(other, self.piece[entry], where))
        return Program(
            name=self.name,
            collective=make[self.kind](),
            src=src.astype(np.int32),
            dst=dst.astype(np.int32),
            reduce=self.reduce[orbit],
            chunk_ptr=np.arange(entries + 1),
            chunk=self.piece,
            after_ptr=after_ptr,
            after=after,
            gate_ptr=gate_ptr,
            gate=gate,
            lane=self.lane[orbit],
            route=np.full(entries, -1, np.int32),
        )

    def __repr__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        return (
            f"<SymmetricProgram {self.name}: {self.kind} over {self.num_ranks} ranks ({sizes}), "
            f"{len(self.dst)} orbits = {self.num_transfers} transfers>"
        )


def _check(
    kind: str,
    sizes: tuple[int, ...],
    pieces: int,
    dst: NDArray[np.int32],
    ptr: Ints,
    home: NDArray[np.int32],
    piece: NDArray[np.int32],
) -> None:
    if kind not in KINDS:
        raise unknown("symmetric collective", kind, KINDS)
    ranks = prod(sizes)
    if min(sizes, default=1) < 1 or ranks > MAX_RANKS:
        raise InvalidInput(f"sizes: must be >= 1 and multiply to at most {MAX_RANKS}, not {sizes}")
    if not 1 <= pieces <= MAX_ENTRIES // ranks:
        raise InvalidInput(f"pieces: must be 1..{MAX_ENTRIES // ranks} for {ranks} ranks, not {pieces}")
    if len(ptr) != len(dst) + 1 or len(home) != len(piece) or ptr[0] != 0 or ptr[-1] != len(home):
        raise InvalidInput("transfers: dst, chunk_ptr, home and piece differ in length")
    if np.any(np.diff(ptr) <= 0):
        raise InvalidInput("transfers: each must move at least one chunk")
    if np.any((dst < 1) | (dst >= ranks)):
        raise InvalidInput(f"dst: must be 1..{ranks - 1}, where rank 0 sends to")
    if np.any((home < 0) | (home >= ranks)) or np.any((piece < 0) | (piece >= pieces)):
        raise InvalidInput(f"chunks: home must be 0..{ranks - 1} and piece 0..{pieces - 1}")
    owner = np.repeat(np.arange(len(dst)), np.diff(ptr))
    slots = np.sort((owner * ranks + home) * pieces + piece)
    again = np.flatnonzero(slots[1:] == slots[:-1])
    if len(again):
        raise InvalidInput(f"transfers[{slots[again[0]] // (ranks * pieces)}]: moves a chunk twice")
