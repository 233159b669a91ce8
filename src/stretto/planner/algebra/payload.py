# SPDX-License-Identifier: Apache-2.0
"""The common refinement of all payloads of an expression: the chunks of the one program that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ...collectives import COLLECTIVES, Collective, Permute
from ...collectives.conditions import from_buffers
from ...errors import InvalidInput, VerificationError
from ...programs.ir import take_rows
from .motif import ROOTED, SHARDED, Groups, Motif
from .shapes import Ints, ProgramShape
from .spans import Span, Spans, cut, cut_sizes, measure

Rows = tuple[Ints, NDArray[np.int32]]
"""For each chunk of an algorithm the refined chunks that it consists of, as a CSR table."""
MAX_CHUNKS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """The chunks into which the original's payload falls when it is cut wherever a motif or an algorithm cuts it."""

    original: Motif
    edges: Ints
    """All cuts, in order; chunk ``number[k]`` is ``edges[k]:edges[k+1]``; -1 marks an interval outside the payload."""
    number: Ints
    pairs: NDArray[np.int32]
    """For an all-to-all the number of each (source, destination) pair, -1 if there is no such pair; else empty."""
    processes: tuple[Ints, Ints]
    """The processes of the rows and of the columns of `pairs`, in order."""

    @classmethod
    def of(cls, original: Motif, leaves: Sequence[Motif], shapes: Sequence[ProgramShape]) -> Refinement:
        """The refinement of a motif by the leaves that carry it out.

        Args:
            original: the motif.
            leaves: the leaves, all of which use only ranks of the original.
            shapes: the algorithm of each leaf.

        Returns:
            The refinement.

        Raises:
            InvalidInput: there would be too many chunks.
        """
        spans: list[Span] = [*original.spans, *chain.from_iterable(original.shards)]
        for leaf, shape in zip(leaves, shapes, strict=True):
            spans += chain.from_iterable(_pieces(leaf, shape)[0])
        edges = np.unique(np.array(spans, np.int64))
        own = np.zeros(len(edges) - 1, np.bool_)
        for lo, hi in original.spans:
            own[np.searchsorted(edges, lo) : np.searchsorted(edges, hi)] = True
        number = np.where(own, np.cumsum(own) - 1, -1)
        table, processes = _pairs(original) if original.kind == "AA" else (np.zeros((0, 0), np.int32), (edges, edges))
        found = cls(original=original, edges=edges, number=number, pairs=table, processes=processes)
        if found.num_chunks > MAX_CHUNKS:
            raise InvalidInput(f"{original}: falls into {found.num_chunks} chunks; at most {MAX_CHUNKS}")
        return found

    @property
    def per_pair(self) -> int:
        """The number of chunks of one pair's block, or of the whole buffer."""
        return int(self.number.max()) + 1

    @property
    def num_chunks(self) -> int:
        """The number of chunks over all pairs."""
        return self.per_pair * (int(self.pairs.max()) + 1 if self.pairs.size else 1)

    @property
    def sizes(self) -> Ints:
        """The size of each chunk (of one pair's block)."""
        return np.asarray(np.diff(self.edges)[self.number >= 0])

    def chunks(self, sets: Sequence[Spans]) -> Rows:
        """The chunks of each of these sets of intervals."""
        flat = np.array([*chain.from_iterable(sets)], np.int64).reshape(-1, 2)
        low, high = np.searchsorted(self.edges, flat).T
        end = np.concatenate([[0], np.cumsum(high - low)])
        chunk = self.number[np.repeat(low - end[:-1], high - low) + np.arange(end[-1])]
        return end[np.cumsum([0, *map(len, sets)])], chunk.astype(np.int32)

    def rows(self, leaf: Motif, shape: ProgramShape) -> Rows:
        """The refined chunks that each chunk of a leaf's algorithm consists of."""
        pieces, which = _pieces(leaf, shape)
        ptr, chunk = self.chunks(pieces)
        if len(chunk) and chunk.min() < 0:
            raise VerificationError(f"{leaf}: works on more than the payload of {self.original}")
        ptr, chunk = take_rows(ptr, chunk, which)
        return self._block_rows(leaf, shape, ptr, chunk) if leaf.kind == "AA" else (ptr, chunk)

    def _block_rows(self, leaf: Motif, shape: ProgramShape, ptr: Ints, chunk: NDArray[np.int32]) -> Rows:
        """The same as `rows` for an all-to-all: the chunks of every block from a holder's processes to a receiver's."""
        n = len(leaf.ranks)
        src, dst = np.divmod(shape.share_of, n)
        inside = (dst - src - leaf.window[0]) % n < leaf.window[1] - leaf.window[0]
        held, bound = self._index(leaf, leaf.held, 0), self._index(leaf, leaf.bound, 1)
        # Each chunk of the algorithm becomes holders x destinations x pieces of the block, in that order.
        extent = [np.diff(held[0])[src] * inside, np.diff(bound[0])[dst], np.diff(ptr)]
        total = extent[0] * extent[1] * extent[2]
        new_ptr = np.concatenate([[0], np.cumsum(total)])
        if new_ptr[-1] > MAX_CHUNKS:
            raise InvalidInput(f"{leaf}: moves {new_ptr[-1]} chunks; at most {MAX_CHUNKS}")
        which = np.repeat(np.arange(len(total)), total)
        at = np.arange(new_ptr[-1]) - new_ptr[:-1][which]
        at, piece = np.divmod(at, extent[2][which])
        at, target = np.divmod(at, extent[1][which])
        pair = self.pairs[held[1][held[0][src[which]] + at], bound[1][bound[0][dst[which]] + target]]
        if len(pair) and pair.min() < 0:
            raise VerificationError(f"{leaf}: moves a block that {self.original} does not have")
        return new_ptr, (pair * self.per_pair + chunk[ptr[:-1][which] + piece]).astype(np.int32)

    def _index(self, leaf: Motif, groups: Groups, side: int) -> tuple[Ints, Ints]:
        """Sets of processes as a CSR table of rows (or columns) of `pairs`."""
        flat = np.array([*chain.from_iterable(groups)], np.int64)
        known = self.processes[side]
        at = np.minimum(np.searchsorted(known, flat), len(known) - 1)
        if np.any(known[at] != flat):
            wrong = flat[known[at] != flat][0]
            raise VerificationError(f"{leaf}: process {wrong} takes no part in {self.original}")
        return np.cumsum([0, *map(len, groups)]), at

    def collective(self) -> Collective:
        """The original as a collective of these chunks; the library's own collective if all chunks are equal and in its
        order.
        """
        m = self.original
        count, total = len(m.ranks), self.num_chunks
        even = len(set(self.sizes.tolist())) == 1
        if m.kind == "AA":
            return self._all_to_all(even)
        kind = "permute" if m.kind == "SD" else m.collective_kind
        root = m.ranks.index(m.root) if m.kind in ROOTED else -1
        ptr, chunk = self.chunks(m.shards)
        shards = np.split(chunk.astype(np.int64), ptr[1:-1])
        in_order = m.kind not in SHARDED or (
            len(set(np.diff(ptr).tolist())) == 1 and np.array_equal(chunk, np.arange(total))
        )
        if even and in_order:
            if m.kind == "SD":
                return Permute(m.ranks, [(0, 1)], chunks=total)
            options = {"root": root} if m.kind in ROOTED else {}
            return COLLECTIVES[kind](m.ranks, chunks=total // count if m.kind in SHARDED else total, **options)
        everything, nothing = np.arange(total), np.zeros(0, np.int64)
        at_root = [everything if rank == m.root else nothing for rank in m.ranks]
        whole, some = [everything] * count, shards
        before, behind = {
            "AR": (whole, whole), "RS": (whole, some), "AG": (some, whole), "BC": (at_root, whole),
            "RE": (whole, at_root), "GA": (some, at_root), "SC": (at_root, some),
            "SD": ([everything, nothing], [nothing, everything]),
        }[m.kind]  # fmt: skip
        return from_buffers(
            kind,
            m.ranks,
            chunks=1 if m.kind in SHARDED else total,
            num_chunks=total,
            share=self.sizes / m.nbytes,
            inputs=lambda r: before[r],
            outputs=lambda r: behind[r],
            root=root,
        )

    def _all_to_all(self, even: bool) -> Collective:
        m = self.original
        if even and m.whole and not m.relays:
            return COLLECTIVES["all_to_all"](m.ranks, chunks=self.per_pair)
        owner = []
        places = np.nonzero(self.pairs >= 0)
        for side, groups in enumerate((m.held, m.bound)):
            ptr, at = self._index(m, groups, side)
            rank = np.empty(len(self.processes[side]), np.int64)
            rank[at] = np.repeat(np.arange(len(groups)), np.diff(ptr))
            of_pair = np.empty(len(places[0]), np.int64)
            of_pair[self.pairs[places]] = rank[places[side]]
            owner.append(of_pair)
        ends = [np.argsort(rank, kind="stable") for rank in owner]
        bounds = [
            np.searchsorted(rank[order], np.arange(len(m.ranks) + 1)) for rank, order in zip(owner, ends, strict=True)
        ]

        def chunks_at(side: int, rank: int) -> Ints:
            pairs = ends[side][bounds[side][rank] : bounds[side][rank + 1]]
            return np.asarray((pairs[:, None] * self.per_pair + np.arange(self.per_pair)).ravel())

        return from_buffers(
            "all_to_all_v",
            m.ranks,
            chunks=1,
            num_chunks=self.num_chunks,
            share=np.tile(self.sizes / m.nbytes, self.num_chunks // self.per_pair),
            inputs=lambda r: chunks_at(0, r),
            outputs=lambda r: chunks_at(1, r),
        )


def moved(shape: ProgramShape, rows: Rows) -> tuple[Ints, NDArray[np.int32], Ints]:
    """The transfers of a leaf in refined chunks: their chunks as a CSR table, and the transfers that move anything."""
    program = shape.program
    entry_ptr, chunk = take_rows(rows[0], rows[1], program.chunk.astype(np.intp))
    width = np.diff(entry_ptr[program.chunk_ptr])
    kept = np.flatnonzero(width)
    return np.concatenate([[0], np.cumsum(width[kept])]), chunk, kept


def _pieces(leaf: Motif, shape: ProgramShape) -> tuple[list[Spans], NDArray[np.intp]]:
    """The pieces of a leaf's payload, and the piece of each chunk of its algorithm.

    Shares (shards, blocks, or the whole) are cut as the algorithm cuts its own; all blocks of an all-to-all are cut
    alike.
    """
    order = np.argsort(shape.share_of, kind="stable")
    share = shape.share_of[order]
    which = np.empty(len(order), np.intp)
    if leaf.kind == "AA":
        count = np.bincount(share)[share]
        turn = np.arange(len(order)) - np.searchsorted(share, share)
        blocks: list[Spans] = []
        for parts in np.unique(count).tolist():
            alike = count == parts
            which[order[alike]] = len(blocks) + turn[alike]
            blocks += cut(leaf.spans, parts)
        return blocks, which
    which[order] = np.arange(len(order))
    size = shape.program.collective.chunk_share[order]
    shares = leaf.shards if leaf.kind in SHARDED else (leaf.spans,)
    ends = np.searchsorted(share, np.arange(len(shares) + 1)).tolist()
    cuts = (_cut_like(spans, size[ends[at] : ends[at + 1]]) for at, spans in enumerate(shares))
    return [*chain.from_iterable(cuts)], which


def _cut_like(spans: Spans, shares: NDArray[np.float64]) -> Sequence[Spans]:
    """A set cut evenly if the shares are equal, else as near to the shares as whole numbers allow."""
    if not len(shares):
        return ()
    if np.ptp(shares) <= 1e-12:
        return cut(spans, len(shares))
    total = measure(spans)
    ends = [round(float(part) * total) for part in np.cumsum(shares) / shares.sum()]
    ends[-1] = total
    return cut_sizes(spans, np.diff([0, *ends]).tolist())


def _pairs(original: Motif) -> tuple[NDArray[np.int32], tuple[Ints, Ints]]:
    """Numbers for the (source, destination) pairs of an all-to-all, in order."""
    n = len(original.ranks)
    flat, rank = (
        [np.array([*chain.from_iterable(groups)], np.int64) for groups in (original.held, original.bound)],
        [np.repeat(np.arange(n), [*map(len, groups)]) for groups in (original.held, original.bound)],
    )
    blocks = len(flat[0]) * len(flat[1])
    if blocks > MAX_CHUNKS:
        raise InvalidInput(f"{original}: has {blocks} blocks; at most {MAX_CHUNKS}")
    first, last = original.window
    present = (rank[1][None, :] - rank[0][:, None] - first) % n < last - first
    number = np.where(present, np.cumsum(present.ravel()).reshape(present.shape) - 1, -1)
    order = [np.argsort(processes) for processes in flat]
    return number[np.ix_(*order)].astype(np.int32), (flat[0][order[0]], flat[1][order[1]])
