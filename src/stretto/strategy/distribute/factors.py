# SPDX-License-Identifier: Apache-2.0
"""Encodings by matrices: PowerSGD's low rank, and the sufficient factors of linear layers, which lose nothing."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ...errors import InvalidInput
from ..kernels import Message, VariablePiece
from .carriers import Flow, VariableCarrier
from .groups import Groups
from .regions import EVERYONE
from .rows import ByteReader, RunsCarrier, as_bytes

NEAR = 1e-2
"""The largest difference of a gradient and the product of its factors, relative to the gradient (Frobenius norms).

Under autocast inputs are rounded to half precision inside a layer, which is 0.002 at most."""


class PowerSgdCarrier(VariableCarrier):
    """Two thin matrices P and Q with P Qᵀ near the gradient (one power iteration), and error feedback.

    Both are summed over ranks, one after the other; pieces that would not become smaller are sent whole with P. The
    next step begins with Q. If a server updates, the other ranks do not know its Q: then each step begins with new
    random numbers, equal on all ranks, so that every component of the residual is sent sooner or later.
    """

    stateful = True

    def __init__(self, message: Message, parameters: dict[str, nn.Parameter], groups: Groups) -> None:
        super().__init__(message, parameters, groups)
        self.left = [torch.zeros(piece.part.shape, dtype=self.dtype, device=self.device) for piece in self.pieces]
        self._generator = torch.Generator().manual_seed(0)
        self.q = [self._start(piece) for piece in self.pieces]

    def _start(self, piece: VariablePiece) -> torch.Tensor | None:
        rows, columns, rank = self._sizes(piece)
        if rank * (rows + columns) >= rows * columns:
            return None
        return torch.randn(columns, rank, generator=self._generator).to(self.device, self.dtype)

    def _sizes(self, piece: VariablePiece) -> tuple[int, int, int]:
        shape = piece.part.shape or (1,)
        rows, columns = shape[0], math.prod(shape[1:])
        return rows, columns, min(int(self.message.sync.encoding[1]) or 1, rows, columns)

    def push(self) -> Flow:
        """Send P to all ranks, orthogonalized, and Q to the ranks that update.

        After P there is a flag for each piece: the number of ranks that have a gradient. A rank without one sends
        zeros, and keeps its residual until it has a gradient again.
        """
        given = [self.gradient(piece) for piece in self.pieces]
        wanted = [
            torch.zeros_like(left) if one is None else left.add(one, alpha=self.shares)
            for left, one in zip(self.left, given, strict=True)
        ]
        matrices = [w.reshape(self._sizes(p)[:2]) for w, p in zip(wanted, self.pieces, strict=True)]
        flags = torch.tensor([float(one is not None) for one in given], dtype=self.dtype, device=self.device)
        first = [*(m if q is None else m @ q for m, q in zip(matrices, self.q, strict=True)), flags]
        low = [at for at, q in enumerate(self.q) if q is not None]
        # P is sent by the exchanges that reach every rank, then Q by those that reach the ranks that update.
        halfway = (len(self.pushes) + len(self.pulls)) // 2 if low else len(self.pushes)
        flat = torch.cat([one.reshape(-1) for one in first])
        yield from self.flow(self.pushes[:halfway], flat, more=bool(low))
        *sums, flags = _cut(flat, first)
        used = flags.tolist()
        bases = [s if q is None else _orthogonal(s) for s, q in zip(sums, self.q, strict=True)]
        second = [matrices[at].T @ bases[at] for at in low]
        if second:
            flat = torch.cat([one.reshape(-1) for one in second])
            own = flat.clone()
            yield from self.flow(self.pushes[halfway:], flat)
            for at, mine, total in zip(low, _cut(own, second), _cut(flat, second), strict=True):
                if given[at] is not None:
                    self.left[at] = (matrices[at] - bases[at] @ mine.T).view(self.pieces[at].part.shape)
                if self.owner != EVERYONE:
                    self.q[at] = self._start(self.pieces[at])
                elif used[at]:
                    self.q[at] = total
                sums[at] = bases[at] @ total.T
        self.results.clear()
        if self.updates:
            for at, total in enumerate(sums):
                self.give(at, total.view(self.pieces[at].part.shape) if used[at] else None)


class FactorsCarrier(RunsCarrier):
    """For a linear layer's weight: its inputs and the gradients of its outputs, whose product is the gradient."""

    stateful = True

    def __init__(
        self, message: Message, parameters: dict[str, nn.Parameter], groups: Groups, *, layers: dict[str, nn.Linear]
    ) -> None:
        super().__init__(message, parameters, groups)
        self.seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in self.variables}
        self._layers = layers
        generator = torch.Generator().manual_seed(0)
        self._probes = {
            piece.variable.name: torch.randn(piece.part.shape[-1], generator=generator).to(self.device, self.dtype)
            for piece in self.pieces
        }  # fmt: skip
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Register hooks that record the layers' inputs and the gradients of their outputs."""
        self._handles += [self._layers[name].register_forward_hook(self._watcher(name)) for name in self.variables]

    def forget(self) -> None:
        """Discard recorded factors of gradients that were not sent."""
        for seen in self.seen.values():
            seen.clear()

    def close(self) -> None:
        """Remove the hooks from the layers."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def _watcher(self, name: str) -> Any:
        def saw(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            if output.requires_grad and self.parameters[name].requires_grad:
                rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
                output.register_hook(lambda g: self.seen[name].append((rows, g.detach().reshape(-1, g.shape[-1]))))

        return saw

    def encode(self) -> torch.Tensor:
        """For each layer the number of rows, the inputs, and the gradients of the outputs, as bytes."""
        found = []
        for name in self.variables:
            seen = self.seen[name]
            found.append(self._count_bytes(sum(len(rows) for rows, _ in seen)))
            if not seen:
                self._check(name, None)
                continue
            inputs, outputs = (torch.cat(parts).to(self.dtype) for parts in zip(*seen, strict=True))
            self._check(name, (inputs, outputs))
            found += [as_bytes(inputs), as_bytes(outputs)]
            seen.clear()
        return torch.cat(found)

    def _check(self, name: str, factors: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Raise `InvalidInput` if the product of the factors is not this rank's gradient, by multiplying both with a
        random vector.

        This is Freivalds' check: it is much cheaper than the product, so it is done in every step.
        """
        gradient = self.parameters[name].grad
        if gradient is not None and gradient.dtype not in (torch.float32, torch.float64):
            return
        probe = self._probes[name]
        apart = torch.zeros((), device=self.device) if gradient is None else gradient.detach() @ probe
        allowed = torch.zeros((), device=self.device) if gradient is None else NEAR * gradient.detach().norm()
        if factors is not None:
            inputs, outputs = factors
            apart = apart - outputs.T @ (inputs @ probe)
            # Allow for the rounding of the product where its terms cancel each other.
            allowed = allowed + 64 * torch.finfo(self.dtype).eps * inputs.norm() * outputs.norm()
        # A gradient that is NaN passes this check: the script has to handle it, as on one process.
        if bool(apart.norm() > allowed):
            raise InvalidInput(
                f"{name}.encoder: sufficient_factors does not fit: the gradient is not what calls of the layer give"
            )

    def decode(self, run: ByteReader) -> list[torch.Tensor | None]:
        """The sum of the products; None for a layer that no rank has used."""
        counts = [0] * len(self.pieces)
        sums = [torch.zeros(piece.part.shape, dtype=self.dtype, device=self.device) for piece in self.pieces]
        while run.left:
            for at, (total, piece) in enumerate(zip(sums, self.pieces, strict=True)):
                count = int(run.take(1, torch.int64))
                counts[at] += count
                wide, long = piece.part.shape
                inputs = run.take(count * long, self.dtype).view(count, long)
                outputs = run.take(count * wide, self.dtype).view(count, wide)
                total.addmm_(outputs.T, inputs, alpha=self.shares)
        return [total if count else None for total, count in zip(sums, counts, strict=True)]


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by the names of their weights; weights that other modules use as well are left out."""
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and users[id(module.weight)] == 1
    }


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    basis: torch.Tensor = torch.linalg.qr(wide)[0]
    return basis.to(matrix.dtype)


def _cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    ends = list(accumulate(one.numel() for one in like))
    return [flat[end - one.numel() : end].view(one.shape) for end, one in zip(ends, like, strict=True)]
