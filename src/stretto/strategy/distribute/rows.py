# SPDX-License-Identifier: Apache-2.0
"""Carriers of data that cannot be summed on the way: rows of sparse gradients, the largest elements, signs, factors.

Each rank's message is a run of bytes that contains its own length, so that runs can be joined at a station and taken
apart at the end.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InvalidInput
from ...runtime.torch_backend.torch_versions import all_gather_single
from ..kernels import Message, VariablePiece
from .carriers import Flow, PendingExchange, RankExchange, VariableCarrier, rows_kept
from .groups import Groups
from .regions import block_of, rows_of, sparse_of

Joined = Generator[PendingExchange, None, torch.Tensor]
NO_GRADIENT = -1
"""A count that means that there is no gradient at all, which optimizers treat unlike a gradient without rows."""


class RunsCarrier(VariableCarrier):
    """A carrier that gathers runs of bytes; parameters that a server updates come back whole.

    A subclass implements `encode`, which every rank calls in `push`, and `decode`, which only the ranks that update
    call.
    """

    same_length = False
    """Whether the runs of all ranks have the same length, so that lengths need not be exchanged."""

    @abstractmethod
    def encode(self) -> torch.Tensor:
        """This rank's run of bytes; runs of several ranks may be joined in any order."""

    @abstractmethod
    def decode(self, run: ByteReader) -> list[torch.Tensor | None]:
        """The average over all ranks, piece by piece, from their joined runs; None for a piece without a gradient on
        any
        rank.
        """

    def _count_bytes(self, count: int) -> torch.Tensor:
        return as_bytes(torch.tensor([count], dtype=torch.int64, device=self.device))

    def push(self) -> Flow:
        """Encode, gather, decode."""
        run = self.encode()
        known = self.same_length and len(self.pushes) == 1
        for at, link in enumerate(self.pushes):
            run = yield from joined(link, run, known=known, more=at + 1 < len(self.pushes))
        self.results.clear()
        if self.updates:
            for at, mean in enumerate(self.decode(ByteReader(run))):
                self.give(at, mean)


class SparseCarrier(RunsCarrier):
    """Rows of sparse gradients: sent to all ranks, or to a server that sends back the rows that have changed."""

    def __init__(
        self,
        message: Message,
        parameters: dict[str, nn.Parameter],
        groups: Groups,
        *,
        rows_only: Callable[[], bool],
    ) -> None:
        super().__init__(message, parameters, groups)
        self.rows_only = rows_only
        self.touched: list[torch.Tensor] = []

    def encode(self) -> torch.Tensor:
        """For each piece: the number of rows, their numbers, their values."""
        found = []
        for piece in self.pieces:
            gradient = self.parameters[piece.variable.name].grad
            if gradient is None:
                found.append(self._count_bytes(NO_GRADIENT))
                continue
            if not gradient.is_sparse and not piece.whole:
                # After an earlier backward pass the averages of other parts have made the whole gradient dense.
                gradient = rows_kept(gradient)
            if not gradient.is_sparse:
                raise InvalidInput(f"{piece.variable.name}: its gradient is dense, but the strategy has it as sparse")
            numbers, values = rows_of(gradient, piece.part)
            found += self._rows(numbers, values * self.shares)
        return torch.cat(found)

    def _rows(self, numbers: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        return [self._count_bytes(len(numbers)), as_bytes(numbers), as_bytes(values)]

    def _read(self, run: ByteReader, piece: VariablePiece) -> tuple[torch.Tensor, torch.Tensor] | None:
        count = int(run.take(1, torch.int64))
        if count == NO_GRADIENT:
            return None
        shape = (count, *piece.part.shape[1:])
        return run.take(count, torch.int64), run.take(math.prod(shape), self.dtype).view(shape)

    def decode(self, run: ByteReader) -> list[torch.Tensor | None]:
        """Sum rows with equal numbers; None for a table that no rank has used."""
        rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.pieces]
        while run.left:
            for at, piece in enumerate(self.pieces):
                if (read := self._read(run, piece)) is not None:
                    rows[at].append(read)
        means: list[torch.Tensor | None] = []
        self.touched = []
        for piece, found in zip(self.pieces, rows, strict=True):
            if not found:
                self.touched.append(torch.empty(0, dtype=torch.int64, device=self.device))
                means.append(None)
                continue
            numbers, values = torch.cat([n for n, _ in found]), torch.cat([v for _, v in found])
            mean = sparse_of(numbers, values, piece.part.shape)
            self.touched.append(mean.indices()[0])
            means.append(mean)
        return means

    def pull(self) -> Flow:
        """Send back the changed rows, or all rows if the optimizer also changes rows without a gradient."""
        if not self.pulls:
            return
        run = torch.empty(0, dtype=torch.uint8, device=self.device)
        blocks = [block_of(self.parameters[p.variable.name].detach(), p.part) for p in self.pieces]
        if self.updates:
            found = []
            rows_only = self.rows_only()
            for block, touched in zip(blocks, self.touched, strict=True):
                numbers = touched if rows_only else torch.arange(len(block), device=block.device)
                found += self._rows(numbers, block[numbers])
            run = torch.cat(found) if found else run
        for at, link in enumerate(self.pulls):
            told = None if link is None else link._replace(kind="broadcast")
            run = yield from joined(told, run, known=False, more=at + 1 < len(self.pulls))
        if self.updates:
            return
        reading = ByteReader(run)
        for block, piece in zip(blocks, self.pieces, strict=True):
            if reading.left and (read := self._read(reading, piece)) is not None:
                block[read[0]] = read[1]


class FeedbackCarrier(RunsCarrier):
    """Lossy encodings with error feedback: the part that was not sent is added to the next gradient.

    One byte per piece tells whether the rank has a gradient. A rank without one sends zeros, and keeps its residual
    until it has a gradient again: no optimizer changes a layer that no rank has used.
    """

    stateful = True
    same_length = True

    def __init__(self, message: Message, parameters: dict[str, nn.Parameter], groups: Groups) -> None:
        super().__init__(message, parameters, groups)
        self.left = [torch.zeros(p.part.elements, dtype=self.dtype, device=self.device) for p in self.pieces]

    @abstractmethod
    def shorten(self, at: int, wanted: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The bytes that are sent of piece number `at`, always equally many, and the residual."""

    @abstractmethod
    def add(self, at: int, run: ByteReader, total: torch.Tensor) -> None:
        """Read the bytes that one rank has sent of a piece, and add the values to a sum.

        Args:
            at: number of the piece.
            run: the bytes, positioned at this piece; exactly the bytes of `shorten` are taken.
            total: the flat sum, changed in place.
        """

    def encode(self) -> torch.Tensor:
        """Flags, then for each piece the shortened sum of the gradient's share and the residual."""
        given = [self.gradient(piece) for piece in self.pieces]
        found = [torch.tensor([one is not None for one in given], dtype=torch.uint8, device=self.device)]
        for at, (gradient, left) in enumerate(zip(given, self.left, strict=True)):
            if gradient is None:
                found += self.shorten(at, torch.zeros_like(left))[0]
            else:
                sent, self.left[at] = self.shorten(at, torch.add(left, gradient.reshape(-1), alpha=self.shares))
                found += sent
        return torch.cat(found)

    def decode(self, run: ByteReader) -> list[torch.Tensor | None]:
        """The sum over all ranks; None for a layer that no rank has used."""
        used = torch.zeros(len(self.pieces), dtype=torch.bool, device=self.device)
        sums = [torch.zeros_like(left) for left in self.left]
        while run.left:
            used |= run.take(len(self.pieces), torch.uint8).bool()
            for at, total in enumerate(sums):
                self.add(at, run, total)
        return [
            total.view(piece.part.shape) if one else None
            for total, piece, one in zip(sums, self.pieces, used.tolist(), strict=True)
        ]


class TopKCarrier(FeedbackCarrier):
    """The largest elements of each piece, with their indices (4 bytes each)."""

    def _count(self, at: int) -> int:
        elements = self.pieces[at].part.elements
        return min(elements, math.ceil(self.message.sync.encoding[1] * elements))

    def shorten(self, at: int, wanted: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Indices and values of the largest elements; the others are the residual."""
        places = wanted.abs().topk(self._count(at), sorted=False).indices
        return [as_bytes(places.int()), as_bytes(wanted[places])], wanted.index_fill(0, places, 0.0)

    def add(self, at: int, run: ByteReader, total: torch.Tensor) -> None:
        """Add values at their indices.

        Args:
            at: number of the piece.
            run: the bytes, positioned at this piece.
            total: the flat sum, changed in place.
        """
        count = self._count(at)
        places = run.take(count, torch.int32).long()
        total.index_add_(0, places, run.take(count, self.dtype))


class OneBitCarrier(FeedbackCarrier):
    """The sign of each element, and the averages of the non-negative and of the negative ones."""

    def shorten(self, at: int, wanted: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Two averages, then eight signs to a byte; the differences to the averages are the residual."""
        above = wanted >= 0
        counts = above.sum(), (~above).sum()
        means = torch.stack([
            wanted[above].sum() / counts[0].clamp(min=1), wanted[~above].sum() / counts[1].clamp(min=1)
        ])  # fmt: skip
        return [as_bytes(means), packed_bits(above)], wanted - torch.where(above, means[0], means[1])

    def add(self, at: int, run: ByteReader, total: torch.Tensor) -> None:
        """Add to each element the average of its sign.

        Args:
            at: number of the piece.
            run: the bytes, positioned at this piece.
            total: the flat sum, changed in place.
        """
        means = run.take(2, self.dtype)
        above = unpacked_bits(run.take(-(-len(total) // 8), torch.uint8), len(total))
        total += torch.where(above, means[0], means[1])


class ByteReader:
    """Reads typed elements from a run of bytes, one after the other."""

    def __init__(self, run: torch.Tensor) -> None:
        self._run = run
        self._at = 0

    @property
    def left(self) -> bool:
        """Whether bytes are left to read."""
        return self._at < len(self._run)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `count` elements of a type."""
        size = count * dtype.itemsize
        found = self._run[self._at : self._at + size].clone()
        self._at += size
        return found.view(dtype)


def joined(link: RankExchange | None, run: torch.Tensor, *, known: bool, more: bool) -> Joined:
    """Gather runs of bytes and join them, or broadcast one run.

    Args:
        link: the exchange; None if this rank takes no part.
        run: this rank's run.
        known: whether all runs are as long as this one, so that lengths need not be exchanged.
        more: whether another exchange depends on this one.

    Returns:
        A generator that yields after starting each exchange and returns the joined run.
    """
    if link is None:
        if not known:
            yield PendingExchange(None, True)
        yield PendingExchange(None, more)
        return run
    lengths = [len(run)] * link.size
    if not known:
        mine = torch.tensor([len(run)], dtype=torch.int64, device=run.device)
        if link.kind == "broadcast":
            yield PendingExchange(dist.broadcast(mine, group_src=link.root, group=link.group, async_op=True), True)
            lengths = [int(mine)]
        else:
            all_ = torch.zeros(link.size, dtype=torch.int64, device=run.device)
            yield PendingExchange(all_gather_single(all_, mine, group=link.group, async_op=True), True)
            lengths = all_.tolist()
    longest = max(lengths)
    if link.kind == "broadcast":
        out = run if link.is_root else torch.empty(longest, dtype=torch.uint8, device=run.device)
        yield PendingExchange(
            dist.broadcast(out, group_src=link.root, group=link.group, async_op=True) if longest else None, more
        )
        return out
    padded = run if len(run) == longest else torch.cat([run, run.new_zeros(longest - len(run))])
    if link.kind == "gather":
        rows = [torch.empty_like(padded) for _ in range(link.size)] if link.is_root else None
        work = dist.gather(padded, rows, group_dst=link.root, group=link.group, async_op=True) if longest else None
        yield PendingExchange(work, more)
        return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)]) if rows is not None else run
    everything = torch.empty(link.size * longest, dtype=torch.uint8, device=run.device)
    yield PendingExchange(
        all_gather_single(everything, padded, group=link.group, async_op=True) if longest else None, more
    )
    return torch.cat([row[:n] for row, n in zip(everything.view(link.size, longest), lengths, strict=True)])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as a flat tensor of bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def packed_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack booleans into bytes, eight to a byte, the first in the lowest bit."""
    padded = torch.zeros(-(-len(bits) // 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: len(bits)] = bits
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpacked_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack the first `count` booleans that `packed_bits` packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return packed[:, None].bitwise_right_shift(shifts).bitwise_and(1).reshape(-1)[:count].bool()
