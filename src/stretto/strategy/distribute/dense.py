"""Carriers of dense gradients: one flat buffer for a message, filled as the backward pass goes on.

What takes time here is memory, so each gradient is read once: a large one right behind the operation that made it,
while it is still in the cache; small ones together. Where every rank updates, large gradients then live in the buffer.
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
"""From here on moving the bytes takes longer than a call."""


class FlatCarrier(VariableCarrier):
    """A flat buffer with this rank's shares of the mean; small pieces stand first."""

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
        """Small ones first, so that they can be scaled as one."""
        return tuple(sorted(pieces, key=is_large))

    def room(self) -> int:
        """Elements of the buffer."""
        return self.elements

    def accept(self, name: str) -> None:
        """A large gradient into the buffer."""
        if name in self._large:
            gradient = self.parameters[name].grad
            if gradient is not None:
                for at in self._large[name]:
                    self.put(at, gradient)

    def put(self, at: int, gradient: torch.Tensor) -> None:
        """This rank's share of the mean of a piece into its room."""
        gradient = gradient.detach()
        share = block_of(gradient.to_dense() if gradient.is_sparse else gradient, self.pieces[at].part)
        if self.exact:
            torch.mul(share, self.shares, out=self.rooms[at])
        else:
            # Divided first: a sum in half precision could leave its range.
            self.rooms[at].copy_(share * self.shares)
        self._packed.add(at)

    def fill(self) -> list[int]:
        """What no `accept` has brought, into the buffer; the pieces that have no gradient on this rank."""
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
    """All-reduce and parameter servers, whole or in half precision.

    Behind the gradients stands a flag for each piece: how many ranks have a gradient at all. Where nobody has, the
    optimizer must not see zeros instead. Who has a gradient itself need not look.
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
        """With the flags."""
        return self.elements + len(self.pieces)

    def _take(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.rooms = [buffer[:0] if at in self._views else room for at, room in enumerate(self._in(buffer))]
        self.flags = buffer[self.elements :]
        self.back = buffer[: self.elements] if self.exact else None
        self._uses = _uses(buffer)

    def _own(self) -> None:
        """Before the first gradient of a step: memory that nobody outside looks at.

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
        """A gradient that every rank wants whole stays in the buffer."""
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
        """Fill, exchange, hand out."""
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

    The communicator has the ranks in the strategy's `sequence`: the first one in it gets the first share.
    Behind each share travel the flags of all pieces: a collective more for them would take longer than a copy.
    """

    def __init__(self, message: Message, parameters: dict[str, torch.nn.Parameter], groups: Groups) -> None:
        self.share = -(-sum(piece.part.elements for piece in message.pieces) // groups.size)
        # The only group of a sharded message is everyone in the order of its communicator.
        self.order = message.exchanges[0].groups[0] if message.exchanges else tuple(range(groups.size))
        super().__init__(message, parameters, groups)
        self.wire = self.buffer.new_ones(groups.size, self.share + len(self.pieces))
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
        """A whole number of shares."""
        return self.share * self.groups.size

    @cached_property
    def regions(self) -> list[VariableRegion]:
        """The shares of all ranks."""
        found = []
        for place, rank in enumerate(self.order):
            for piece, (begin, end) in zip(self.pieces, self.spans, strict=True):
                low, high = max(begin, place * self.share), min(end, (place + 1) * self.share)
                if low < high:
                    flat = (low - begin, high - begin)
                    found.append(VariableRegion(variable=piece.variable.name, part=piece.part, owner=rank, flat=flat))
        return found

    def push(self) -> Flow:
        """Gradients added up, this rank's share of them to it; who has a gradient at all is told to everyone."""
        missing = self.fill()
        self.wire[:, : self.share].copy_(self.buffer.view(self.groups.size, self.share))
        self.wire[:, self.share :].fill_(1.0)
        for at in missing:
            self.wire[:, self.share + at] = 0.0
        if self.pushes:
            link = self.pushes[0]
            assert link is not None
            wire = self.wire.view(-1)
            yield PendingExchange(reduce_scatter_single(self.arrived, wire, group=link.group, async_op=True), False)
        else:
            self.arrived.copy_(self.wire[0])
        nobody = {at for at in missing if not float(self.flags[at])}
        self.results = [(region, None if number in nobody else mean) for region, number, mean in self._places]

    def pull(self) -> Flow:
        """Everybody's share to everybody."""
        if not self.pulls:
            return
        link = self.pulls[0]
        assert link is not None
        held = [region.of(self.parameters[region.variable].detach()) for region, _, _ in self._places]
        if held:
            torch._foreach_copy_([mine for _, _, mine in self._places], held)
        yield PendingExchange(all_gather_single(self.buffer, self.mine, group=link.group, async_op=True), False)
        self.unpack(self.buffer)


def is_large(piece: VariablePiece) -> bool:
    """Whether a piece is worth a call of its own."""
    return piece.nbytes >= LARGE_BYTES


def _uses(buffer: torch.Tensor) -> int:
    """How many tensors share the buffer's memory."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))
