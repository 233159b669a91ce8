"""Carriers: each brings one message's gradients together, and the parameters back, by the exchanges of its kernels.

A push or a pull is a generator: it yields whenever something is on its way, and goes on once that has arrived. Every
rank yields at the same places, also where it has no part in an exchange, so that communicators see one order of calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ...strategy.kernels import Exchange, Message, Piece
from .groups import Groups
from .regions import EVERYONE, Region, block_of, sparse_of

ROOTED = ("reduce", "broadcast", "gather", "scatter")
CASTS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Wait(NamedTuple):
    """What is on its way (None: nothing on this rank), and whether another exchange depends on it."""

    work: Any
    more: bool


Flow = Iterator[Wait]


class Both:
    """Two things on their way at once."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self) -> None:
        """For both."""
        for work in self._works:
            work.wait()


class Link(NamedTuple):
    """An exchange as this rank takes part in it."""

    kind: str
    group: Any
    root: int
    is_root: bool
    size: int


class Carrier(ABC):
    """What all carriers share; `variables` are the names that a push waits for."""

    stateful = False
    """Whether a second push before the optimizer's step would count a gradient twice."""

    def __init__(self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups) -> None:
        self.message = message
        self.pieces = message.pieces
        self.groups = groups
        self.parameters = parameters
        self.variables = tuple(dict.fromkeys(piece.variable.name for piece in self.pieces))
        self.pushes = [self._link(exchange) for exchange in message.exchanges if exchange.push]
        self.pulls = [self._link(exchange) for exchange in message.exchanges if not exchange.push]
        self.owner = message.updaters[0] if message.updaters else EVERYONE
        self.shares = 1.0 / groups.size
        first = parameters[self.variables[0]]
        self.dtype, self.device = first.dtype, first.device
        self.spans = spans(self.pieces)
        self.elements = self.spans[-1][1]
        self.back: torch.Tensor | None = None
        self.results: list[tuple[Region, torch.Tensor | None]] = []
        """What the regions that this rank updates are updated with, after a push."""

    @property
    def updates(self) -> bool:
        """Whether this rank updates the message's parameters as a whole."""
        return self.owner in (EVERYONE, self.groups.rank)

    def regions(self) -> list[Region]:
        """All regions, of all owners, in the same order on every rank."""
        return [Region(variable=piece.variable.name, part=piece.part, owner=self.owner) for piece in self.pieces]

    @abstractmethod
    def push(self) -> Flow:
        """Bring gradients together."""

    def pull(self) -> Flow:
        """Bring updated parameters from the server to everyone; nothing where everyone updates."""
        if not self.pulls:
            return
        if self.back is None:
            self.back = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        if self.updates:
            self.pack(self.back)
        yield from self.flow(self.pulls, self.back)
        if not self.updates:
            self.unpack(self.back)

    def pack(self, buffer: torch.Tensor) -> None:
        """Parameters into a flat buffer."""
        for piece, (begin, end) in zip(self.pieces, self.spans, strict=True):
            data = self.parameters[piece.variable.name].detach()
            buffer[begin:end].view(piece.part.shape).copy_(block_of(data, piece.part))

    def unpack(self, buffer: torch.Tensor) -> None:
        """Parameters out of a flat buffer."""
        for piece, (begin, end) in zip(self.pieces, self.spans, strict=True):
            data = self.parameters[piece.variable.name].detach()
            block_of(data, piece.part).copy_(buffer[begin:end].view(piece.part.shape))

    def _link(self, exchange: Exchange) -> Link | None:
        everyone = tuple(range(self.groups.size))

        def key(members: tuple[int, ...]) -> tuple[int, ...]:
            # Any order of all ranks is served by the one communicator of all, unless the order itself matters.
            return everyone if len(members) == self.groups.size and exchange.kind in ROOTED else members

        for members in exchange.groups:
            self.groups.make(key(members), self.message.lane)
        mine = next((members for members in exchange.groups if self.groups.rank in members), None)
        if mine is None:
            return None
        root = mine[exchange.root]
        return Link(
            exchange.kind, self.groups.get(key(mine), self.message.lane), key(mine).index(root),
            self.groups.rank == root, len(mine),
        )  # fmt: skip

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """This rank's gradient of a piece, dense."""
        whole = self.parameters[piece.variable.name].grad
        if whole is None:
            return None
        return block_of(whole.to_dense() if whole.is_sparse else whole, piece.part)

    def give(self, piece: Piece, mean: torch.Tensor | None) -> None:
        """The averaged gradient of a piece to where the optimizer looks for it."""
        if self.owner != EVERYONE:
            if self.updates:
                if mean is not None and piece.variable.sparse and not mean.is_sparse:
                    mean = rows_kept(mean)
                region = Region(variable=piece.variable.name, part=piece.part, owner=self.owner)
                self.results.append((region, mean))
            return
        parameter = self.parameters[piece.variable.name]
        if mean is None:
            return
        if piece.variable.sparse and piece.whole:
            parameter.grad = mean if mean.is_sparse else rows_kept(mean)
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        block_of(parameter.grad, piece.part).copy_(mean.to_dense() if mean.is_sparse else mean)

    def flow(self, links: Sequence[Link | None], buffer: torch.Tensor, *, more: bool = False) -> Flow:
        """A flat buffer through exchanges that add up or copy."""
        for at, link in enumerate(links):
            yield Wait(None if link is None else send(link, buffer), more or at + 1 < len(links))


class DenseCarrier(Carrier):
    """All-reduce and parameter servers, whole or in half precision: one flat buffer, with a flag for each piece.

    A flag says how many ranks have a gradient at all: where nobody has, the optimizer must not see zeros instead.
    """

    def __init__(self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups) -> None:
        super().__init__(message, parameters, groups)
        cast = CASTS.get(message.sync.encoding[0], self.dtype)
        self.buffer = torch.zeros(self.elements + len(self.pieces), dtype=cast, device=self.device)
        if cast == self.dtype:
            self.back = self.buffer[: self.elements]

    def push(self) -> Flow:
        """Pack, exchange, unpack."""
        for number, (piece, (begin, end)) in enumerate(zip(self.pieces, self.spans, strict=True)):
            gradient = self.gradient(piece)
            room = self.buffer[begin:end]
            if gradient is None:
                room.zero_()
            elif self.buffer.dtype == self.dtype:
                torch.mul(gradient, self.shares, out=room.view(piece.part.shape))
            else:
                room.view(piece.part.shape).copy_(gradient * self.shares)
            self.buffer[self.elements + number] = 0.0 if gradient is None else 1.0
        yield from self.flow(self.pushes, self.buffer)
        self.results.clear()
        used = self.buffer[self.elements :].tolist()
        for number, (piece, (begin, end)) in enumerate(zip(self.pieces, self.spans, strict=True)):
            if self.updates:
                mean = self.buffer[begin:end].view(piece.part.shape).to(self.dtype)
                self.give(piece, mean if used[number] > 0 else None)


class ShardedCarrier(Carrier):
    """Reduce-scatter and all-gather: every rank updates its share of the flat buffer."""

    def __init__(self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups) -> None:
        super().__init__(message, parameters, groups)
        self.share = -(-self.elements // groups.size)
        self.buffer = torch.zeros(self.share * groups.size, dtype=self.dtype, device=self.device)
        self.used = torch.zeros(len(self.pieces), dtype=torch.int32, device=self.device)
        self.mine = torch.zeros(self.share, dtype=self.dtype, device=self.device)

    def regions(self) -> list[Region]:
        """The shares of all ranks."""
        found = []
        for rank in range(self.groups.size):
            for piece, (begin, end) in zip(self.pieces, self.spans, strict=True):
                low, high = max(begin, rank * self.share), min(end, (rank + 1) * self.share)
                if low < high:
                    flat = (low - begin, high - begin)
                    found.append(Region(variable=piece.variable.name, part=piece.part, owner=rank, flat=flat))
        return found

    def push(self) -> Flow:
        """Gradients added up, this rank's share of them to it; who has a gradient at all is told to everyone."""
        for number, (piece, (begin, end)) in enumerate(zip(self.pieces, self.spans, strict=True)):
            gradient = self.gradient(piece)
            self.used[number] = gradient is not None
            room = self.buffer[begin:end].view(piece.part.shape)
            if gradient is None:
                room.zero_()
            else:
                torch.mul(gradient, self.shares, out=room)
        if self.pushes:
            link = self.pushes[0]
            assert link is not None
            yield Wait(Both(
                dist.all_reduce(self.used, group=link.group, async_op=True),
                dist.reduce_scatter_single(self.mine, self.buffer, group=link.group, async_op=True),
            ), False)  # fmt: skip
        else:
            self.mine.copy_(self.buffer)
        self.results.clear()
        used = {
            (piece.variable.name, piece.part.index): number > 0
            for piece, number in zip(self.pieces, self.used.tolist(), strict=True)
        }
        at = 0
        for region in self.regions():
            if region.owner == self.groups.rank and region.flat is not None:
                size = region.flat[1] - region.flat[0]
                mean = self.mine[at : at + size]
                self.results.append((region, mean if used[region.variable, region.part.index] else None))
                at += size

    def pull(self) -> Flow:
        """Everybody's share to everybody."""
        if not self.pulls:
            return
        link = self.pulls[0]
        assert link is not None
        at = 0
        for region in self.regions():
            if region.owner == self.groups.rank and region.flat is not None:
                size = region.flat[1] - region.flat[0]
                self.mine[at : at + size].copy_(region.of(self.parameters[region.variable].detach()))
                at += size
        yield Wait(dist.all_gather_single(self.buffer, self.mine, group=link.group, async_op=True), False)
        self.unpack(self.buffer)


def send(link: Link, buffer: torch.Tensor) -> Any:
    """Begin an exchange of a flat buffer in place."""
    if link.kind == "all_reduce":
        return dist.all_reduce(buffer, group=link.group, async_op=True)
    if link.kind == "reduce":
        return dist.reduce(buffer, group_dst=link.root, group=link.group, async_op=True)
    if link.kind in ("broadcast", "scatter"):
        return dist.broadcast(buffer, group_src=link.root, group=link.group, async_op=True)
    raise InvalidInput(f"exchange {link.kind} of a dense gradient is not known here")


def spans(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Where each piece lies in a flat buffer."""
    found, at = [], 0
    for piece in pieces:
        found.append((at, at + piece.part.elements))
        at += piece.part.elements
    return found


def rows_kept(dense: torch.Tensor) -> torch.Tensor:
    """A dense sum of sparse gradients as a sparse one: optimizers treat rows that nobody touched differently."""
    touched = dense.reshape(dense.shape[0], -1).ne(0).any(1).nonzero()[:, 0]
    return sparse_of(touched, dense[touched], tuple(dense.shape))
