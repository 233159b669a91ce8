# SPDX-License-Identifier: Apache-2.0
"""Carriers of dense gradients: one flat buffer per message, filled while the backward pass runs.

Memory traffic takes most of the time here, so each gradient is read once: a large one right after the operation that
made it, while it is still in the cache; small ones together. If every rank updates, large gradients then live in the
buffer.
"""

from __future__ import annotations

from functools import cached_property

import torch

from ...runtime.torch_backend.torch_versions import all_gather_single, reduce_scatter_single
from ..kernels import Message, VariablePiece
from .carriers import Flow, PendingExchange, VariableCarrier
from .groups import Groups
from .regions import EVERYONE, VariableRegion, block_of

CASTS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LARGE_BYTES = 32 << 10
"""Size from which moving the bytes takes longer than a call."""


class FlatCarrier(VariableCarrier):
    """A flat buffer with this rank's shares of the averages; small pieces come first."""

    def __init__(self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups) -> None:
        super().__init__(message, parameters, groups)
        cast = CASTS.get(message.sync.encoding[0], self.dtype)
        self.buffer = torch.zeros(self.room(), dtype=cast, device=self.device)
        self.exact = self.buffer.dtype == self.dtype
        self.rooms = self._in(self.buffer)
        self._large: dict[str, list[int]] = {}
        self._small = [at for at, piece in enumerate(self.pieces) if not is_large(piece)]
        for at in range(len(self._small), len(self.pieces)):
            self._large.setdefault(self.pieces[at].variable.name, []).append(at)
        small = [self.pieces[at] for at in self._small]
        self._plain = all(piece.whole and not piece.variable.sparse for piece in small)
        self._owners = [parameters[piece.variable.name] for piece in small]
        self._packed: set[int] = set()

    def arranged(self, pieces: tuple[VariablePiece, ...]) -> tuple[VariablePiece, ...]:
        """Small pieces first, so that they can be scaled together."""
        return tuple(sorted(pieces, key=is_large))

    def room(self) -> int:
        """The number of elements of the buffer."""
        return self.elements

    def accept(self, name: str) -> None:
        """Copy a large gradient into the buffer; small ones are copied later, together."""
        if name in self._large:
            gradient = self.parameters[name].grad
            if gradient is not None:
                for at in self._large[name]:
                    self.put(at, gradient)

    def put(self, at: int, gradient: torch.Tensor) -> None:
        """Write this rank's share of the average of piece number `at` into the buffer."""
        gradient = gradient.detach()
        share = block_of(gradient.to_dense() if gradient.is_sparse else gradient, self.pieces[at].part)
        if self.exact:
            torch.mul(share, self.shares, out=self.rooms[at])
        else:
            # The gradient is divided before it is summed, because a sum in half precision could overflow.
            self.rooms[at].copy_(share * self.shares)
        self._packed.add(at)

    def fill(self) -> list[int]:
        """Copy the gradients that `accept` has not copied; return the pieces that have no gradient on this rank."""
        missing = []
        for name, pieces in self._large.items() if len(self._packed) < len(self.pieces) - len(self._small) else ():
            for at in pieces:
                gradient = self.parameters[name].grad
                if gradient is None:
                    missing.append(at)
                elif at not in self._packed:
                    self.put(at, gradient)
        self._packed.clear()
        if self._plain:
            given = [parameter.grad for parameter in self._owners]
            given = [g.to_dense() if g is not None and g.is_sparse else g for g in given]
        else:
            given = [self.gradient(self.pieces[at]) for at in self._small]
        missing += [at for at in self._small if given[at] is None]
        rooms = [room for room, share in zip(self.rooms, given, strict=False) if share is not None]
        shares = [share.detach() for share in given if share is not None]
        if rooms and self.exact:
            torch._foreach_copy_(rooms, shares)
            self.buffer[: self.spans[len(self._small) - 1][1]].mul_(self.shares)
        elif rooms:
            torch._foreach_copy_(rooms, torch._foreach_mul(shares, self.shares))
        for at in missing:
            begin, end = self.spans[at]
            self.buffer[begin:end].zero_()
        return missing


class DenseCarrier(FlatCarrier):
    """All-reduce and parameter servers, in full or half precision.

    After the gradients the buffer has a flag for each piece: the number of ranks that have a gradient. If no rank has
    one, the optimizer must not get zeros instead. A rank that has a gradient itself need not read the flag.
    """

    def __init__(self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups) -> None:
        super().__init__(message, parameters, groups)
        self._views = {
            at: torch.empty_like(parameters[piece.variable.name]).stride() for at, piece in enumerate(self.pieces)
            if self.owner == EVERYONE and self.exact and is_large(piece) and piece.whole and not piece.variable.sparse
        }  # fmt: skip
        self._usual = self.owner == EVERYONE and self._plain and len(self._views) == len(self.pieces) - len(self._small)
        self._take(self.buffer)

    def room(self) -> int:
        """The number of elements of the buffer, with one flag per piece."""
        return self.elements + len(self.pieces)

    def _take(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.rooms = [buffer[:0] if at in self._views else room for at, room in enumerate(self._in(buffer))]
        self.flags = buffer[self.elements :]
        self.back = buffer[: self.elements] if self.exact else None
        self._uses = _uses(buffer)

    def _own(self) -> None:
        """Before the first gradient of a step, make sure that no tensor outside uses the buffer's memory.

        A script may have kept the gradients of an earlier step, which are views of the buffer.
        """
        if self._packed or (uses := _uses(self.buffer)) == self._uses:
            return
        here = self.buffer.untyped_storage().data_ptr()
        gradients = (self.parameters[self.pieces[at].variable.name].grad for at in self._views)
        if uses > self._uses + sum(g is not None and g.untyped_storage().data_ptr() == here for g in gradients):
            self._take(torch.zeros_like(self.buffer))

    def _view(self, at: int) -> torch.Tensor:
        return self.buffer.as_strided(self.pieces[at].part.shape, self._views[at], self.spans[at][0])

    def put(self, at: int, gradient: torch.Tensor) -> None:
        """Write a gradient into the buffer; a gradient that every rank wants whole stays there as a view."""
        self._own()
        if at not in self._views:
            super().put(at, gradient)
            return
        view = self._view(at)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if gradient.data_ptr() == view.data_ptr():
            view.mul_(self.shares)
        else:
            torch.mul(gradient.detach(), self.shares, out=view)
            self.parameters[self.pieces[at].variable.name].grad = view
        self._packed.add(at)

    def push(self) -> Flow:
        """Fill the buffer, exchange it, and give out the averages."""
        if self.groups.size == 1 and self.owner == EVERYONE:
            return
        self._own()
        missing = self.fill()
        self.flags.fill_(1.0)
        for at in missing:
            self.flags[at] = 0.0
        yield from self.flow(self.pushes, self.buffer)
        self.results.clear()
        if not self.updates:
            return
        if self._usual and not missing:
            gradients = [p.grad.detach() for p in self._owners if p.grad is not None and not p.grad.is_sparse]
            if len(gradients) == len(self._owners):
                if gradients:
                    torch._foreach_copy_(gradients, self.rooms[: len(gradients)])
                return
        nobody = {at for at in missing if not float(self.flags[at])}
        for at, piece in enumerate(self.pieces):
            parameter = self.parameters[piece.variable.name]
            if at in nobody:
                self.give(at, None)
            elif at in self._views:
                if parameter.grad is None:
                    parameter.grad = self._view(at)
            else:
                self.give(at, self.rooms[at].to(self.dtype))


class ShardedCarrier(FlatCarrier):
    """Reduce-scatter and all-gather: every rank updates its share of the flat buffer.

    The communicator has the ranks in the strategy's `sequence`: the first one in it gets the first share. The flags of
    all pieces are sent after each share: one more collective for them would take longer than a copy.
    """

    def __init__(
        self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups, *, order: tuple[int, ...]
    ) -> None:
        self.count = len(groups.replicas)
        self.share = -(-sum(piece.part.elements for piece in message.pieces) // self.count)
        self.order = order
        super().__init__(message, parameters, groups)
        self.wire = self.buffer.new_ones(self.count, self.share + len(self.pieces))
        self.arrived = self.wire[0].clone()
        self.mine, self.flags = self.arrived[: self.share], self.arrived[self.share :]
        numbers = {(piece.variable.name, piece.part.index): at for at, piece in enumerate(self.pieces)}
        self._places: list[tuple[VariableRegion, int, torch.Tensor]] = []
        at = 0
        for region in self.regions:
            if region.owner == groups.rank and region.flat is not None:
                size = region.flat[1] - region.flat[0]
                number = numbers[region.variable, region.part.index]
                self._places.append((region, number, self.mine[at : at + size]))
                at += size

    def room(self) -> int:
        """The number of elements of the buffer: a whole number of shares."""
        return self.share * self.count

    @cached_property
    def regions(self) -> list[VariableRegion]:
        """The regions of all ranks' shares."""
        found = []
        for place, rank in enumerate(self.order):
            for piece, (begin, end) in zip(self.pieces, self.spans, strict=True):
                low, high = max(begin, place * self.share), min(end, (place + 1) * self.share)
                if low < high:
                    flat = (low - begin, high - begin)
                    found.append(VariableRegion(variable=piece.variable.name, part=piece.part, owner=rank, flat=flat))
        return found

    def push(self) -> Flow:
        """Sum the gradients and give each rank its share; flags tell every rank which pieces some rank has."""
        missing = self.fill()
        self.wire[:, : self.share].copy_(self.buffer.view(self.count, self.share))
        self.wire[:, self.share :].fill_(1.0)
        for at in missing:
            self.wire[:, self.share + at] = 0.0
        if self.pushes:
            link = self.pushes[0]
            if link is None:
                return  # this rank only serves
            wire = self.wire.view(-1)
            yield PendingExchange(reduce_scatter_single(self.arrived, wire, group=link.group, async_op=True), False)
        else:
            self.arrived.copy_(self.wire[0])
        nobody = {at for at in missing if not float(self.flags[at])}
        self.results = [(region, None if number in nobody else mean) for region, number, mean in self._places]

    def pull(self) -> Flow:
        """Send every rank's share of the parameters to all ranks."""
        if not self.pulls:
            return
        link = self.pulls[0]
        if link is None:
            return
        held = [region.of(self.parameters[region.variable].detach()) for region, _, _ in self._places]
        if held:
            torch._foreach_copy_([mine for _, _, mine in self._places], held)
        yield PendingExchange(all_gather_single(self.buffer, self.mine, group=link.group, async_op=True), False)
        self.unpack(self.buffer)


def is_large(piece: VariablePiece) -> bool:
    """Whether a piece is large enough for a call of its own."""
    return piece.nbytes >= LARGE_BYTES


def _uses(buffer: torch.Tensor) -> int:
    """The number of tensors that share the buffer's memory."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))
