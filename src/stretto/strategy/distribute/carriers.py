# SPDX-License-Identifier: Apache-2.0
"""Carriers: each synchronizes the gradients of one message, and distributes its parameters, by the exchanges of its
kernels.

A push or a pull is a generator: it yields when an exchange has been started, and is resumed when that exchange has
arrived. Every rank yields at the same places, also where it has no part in an exchange, so that communicators see one
order of calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ..kernels import Message, StepExchange, VariablePiece
from .groups import Groups
from .regions import EVERYONE, VariableRegion, block_of, sparse_of


class PendingExchange(NamedTuple):
    """An exchange that was started: its work (None if this rank takes no part), and whether another exchange depends on
    it.
    """

    work: Any
    more: bool


Flow = Iterator[PendingExchange]


class RankExchange(NamedTuple):
    """An exchange as this rank takes part in it.

    `group` is the communicator, `root` the root's position in it, `is_root` whether this rank is the root, `size` the
    number of members, `direct` whether a root sums what all others send it.
    """

    kind: str
    group: Any
    root: int
    is_root: bool
    size: int
    direct: bool = False


class VariableCarrier(ABC):
    """The contract of a carrier: it synchronizes one message of a strategy on a running job.

    `wrap` constructs the same carriers in the same order on all ranks of the group; the constructor may therefore make
    communicators, which is collective. `wrap._carrier` chooses the class by synchronizer and encoder: a new carrier
    gets a line there. After that `GradientSynchronizer` and `DistributedOptimizer` call, on every rank and in this
    order:

    1. `watch`, once, before the first backward pass;
    2. `accept`, during a backward pass, each time a gradient of the message has been computed, in any order;
    3. `push`, once per backward pass, when all gradients of the message exist, or at the end of the pass if some do
    not; and
       before an update if gradients were only accumulated. All ranks start the pushes of all messages in the same
       order;
    4. the optimizer then reads `results`, or the parameters' gradients where every rank updates, and updates the
    regions that
       this rank owns;
    5. `pull`, once per optimizer step, in the same order on all ranks;
    6. `forget`, after every optimizer step and every `zero_grad`;
    7. `close`, once, at the end.

    A push clears `results` and then, on the ranks that update, calls `give` for every piece, with the average of the
    gradients over ranks, or with None if no rank has one. Between two yields a carrier may compute, but must not start
    collectives that other ranks do not start.

    `variables` are the names of the parameters whose gradients the push waits for. `pushes` and `pulls` are the
    message's exchanges as this rank takes part in them (None: it does not). `shares` is 1 / number of ranks that train.
    """

    stateful = False
    """Whether a second push before the optimizer's step would count a gradient twice; such a push is refused."""

    def __init__(self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups) -> None:
        self.message = message
        self.pieces = self.arranged(message.pieces)
        self.groups = groups
        self.parameters = parameters
        self.variables = tuple(dict.fromkeys(piece.variable.name for piece in self.pieces))
        self.pushes = [self._link(exchange) for exchange in message.exchanges if exchange.push]
        self.pulls = [self._link(exchange) for exchange in message.exchanges if not exchange.push]
        self.owner = message.updaters[0] if message.updaters else EVERYONE
        self.shares = 1.0 / len(groups.replicas)
        first = parameters[self.variables[0]]
        self.dtype, self.device = first.dtype, first.device
        self.spans = spans(self.pieces)
        self.elements = self.spans[-1][1]
        self.back: torch.Tensor | None = None
        self.results: list[tuple[VariableRegion, torch.Tensor | None]] = []
        """The averaged gradients of the regions that this rank updates, after a push."""

    def arranged(self, pieces: tuple[VariablePiece, ...]) -> tuple[VariablePiece, ...]:
        """The order in which pieces are sent; the same on all ranks."""
        return pieces

    @property
    def updates(self) -> bool:
        """Whether this rank updates the message's parameters as a whole."""
        return self.owner in (EVERYONE, self.groups.rank)

    @cached_property
    def regions(self) -> list[VariableRegion]:
        """All regions, of all owners, in the same order on every rank; every call returns the same objects."""
        return [
            VariableRegion(variable=piece.variable.name, part=piece.part, owner=self.owner) for piece in self.pieces
        ]

    def accept(self, name: str) -> None:  # noqa: B027
        """Take a gradient that was just computed and is still in the cache; other gradients of the message may not
        exist
        yet.
        """

    def watch(self) -> None:  # noqa: B027
        """Register the hooks on the model that this carrier needs beside those on gradients."""

    def forget(self) -> None:  # noqa: B027
        """Discard state of the last backward pass: its gradients have been used or dropped."""

    def close(self) -> None:  # noqa: B027
        """Remove the hooks that `watch` has registered."""

    @abstractmethod
    def push(self) -> Flow:
        """Average the gradients of the message over ranks; a generator that yields after starting each exchange."""

    def pull(self) -> Flow:
        """Distribute updated parameters from the server to all ranks; yields nothing if every rank updates."""
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
        """Copy the parameters of all pieces into a flat buffer."""
        torch._foreach_copy_(self._in(buffer), self._held)

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copy the parameters of all pieces out of a flat buffer."""
        torch._foreach_copy_(self._held, self._in(buffer))

    def _in(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [
            buffer[begin:end].view(piece.part.shape)
            for piece, (begin, end) in zip(self.pieces, self.spans, strict=True)
        ]

    @property
    def _held(self) -> list[torch.Tensor]:
        return [block_of(self.parameters[piece.variable.name].detach(), piece.part) for piece in self.pieces]

    def _link(self, exchange: StepExchange) -> RankExchange | None:
        if not exchange.groups:
            return None
        (mine,) = exchange.groups
        root, members = mine[exchange.root], self.groups.members(mine, exchange.kind)
        return RankExchange(
            exchange.kind, self.groups.get(members, self.message.lane), members.index(root), self.groups.rank == root,
            len(mine), exchange.direct,
        )  # fmt: skip

    def gradient(self, piece: VariablePiece) -> torch.Tensor | None:
        """This rank's gradient of a piece as a dense tensor; None if there is none."""
        whole = self.parameters[piece.variable.name].grad
        if whole is None:
            return None
        return block_of(whole.to_dense() if whole.is_sparse else whole, piece.part)

    def give(self, at: int, mean: torch.Tensor | None) -> None:
        """Put the averaged gradient of piece number `at` where the optimizer reads it; None means that no rank has a
        gradient.
        """
        piece = self.pieces[at]
        if self.owner != EVERYONE:
            if self.updates:
                if mean is not None and piece.variable.sparse and not mean.is_sparse:
                    mean = rows_kept(mean)
                if mean is not None and mean.is_sparse and mean.is_cuda and not self._held[at].is_contiguous():
                    # CUDA adds a sparse tensor to the wrong elements of a dense one that is not contiguous.
                    mean = mean.to_dense()
                self.results.append((self.regions[at], mean))
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

    def flow(self, links: Sequence[RankExchange | None], buffer: torch.Tensor, *, more: bool = False) -> Flow:
        """Send a flat buffer through exchanges that sum or copy, in place.

        Args:
            links: the exchanges; None where this rank takes no part.
            buffer: the flat buffer.
            more: whether a further exchange of the caller depends on these.

        Returns:
            A generator that yields after starting each exchange.
        """
        for at, link in enumerate(links):
            yield PendingExchange(None if link is None else send(link, buffer), more or at + 1 < len(links))


def send(link: RankExchange, buffer: torch.Tensor) -> Any:
    """Start an exchange of a flat buffer in place; return its work."""
    if link.kind == "all_reduce":
        return dist.all_reduce(buffer, group=link.group, async_op=True)
    if link.kind == "reduce" and link.direct and not buffer.is_cuda and dist.get_backend(link.group) == "gloo":
        return DirectSum(link, buffer)
    if link.kind == "reduce":
        return dist.reduce(buffer, group_dst=link.root, group=link.group, async_op=True)
    if link.kind in ("broadcast", "scatter"):
        return dist.broadcast(buffer, group_src=link.root, group=link.group, async_op=True)
    raise InvalidInput(f"exchange {link.kind} of a dense gradient is not known here")


class DirectSum:
    """Every other rank's buffer sent straight to the root, which adds them up in the order of ranks: a work.

    gloo's reduce goes round a ring first; see `kernels.synchronizer`.
    """

    def __init__(self, link: RankExchange, buffer: torch.Tensor) -> None:
        ranks = dist.get_process_group_ranks(link.group)
        self._buffer = buffer
        self._others: list[torch.Tensor] = []
        if link.is_root:
            self._others = [torch.empty_like(buffer) for _ in range(link.size - 1)]
            senders = [rank for at, rank in enumerate(ranks) if at != link.root]
            self._works = [dist.irecv(x, rank, group=link.group) for x, rank in zip(self._others, senders, strict=True)]
        else:
            self._works = [dist.isend(buffer, ranks[link.root], group=link.group)]

    def wait(self) -> None:
        """Wait for all messages; the root's buffer then has the sum."""
        for work in self._works:
            if work is not None:
                work.wait()
        for other in self._others:
            self._buffer.add_(other)
        self._others.clear()


def spans(pieces: Sequence[VariablePiece]) -> list[tuple[int, int]]:
    """Begin and end of each piece in a flat buffer."""
    found, at = [], 0
    for piece in pieces:
        found.append((at, at + piece.part.elements))
        at += piece.part.elements
    return found


def rows_kept(dense: torch.Tensor) -> torch.Tensor:
    """A dense sum of sparse gradients as a sparse tensor, because optimizers treat untouched rows differently."""
    touched = dense.reshape(dense.shape[0], -1).ne(0).any(1).nonzero()[:, 0]
    return sparse_of(touched, dense[touched], tuple(dense.shape))
