# SPDX-License-Identifier: Apache-2.0
"""Training in one process as a strategy's words define it: an implementation of its own, for the generated test.

Of `stretto` it uses the strategy (what is cut, by which encoder, how late), and no kernel, carrier or region. Every
encoder's rule is written here a second time. A mean of three shares in less than 64 bits depends on who is added first:
there all three orders are candidates, and every element has to be one of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from distribute_draw import Case
from distribute_everything import Everything, batch, optimizer_of

from stretto.strategy import Strategy, Sync, Variable

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
Part = tuple[slice, ...]
Key = tuple[str, int]
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""How far a weight may be off, relative to itself or 1: float64 exact, the others some units in the last place."""
LOOSE = 1e-6
"""PowerSGD divides by what may be small."""


def cut(variable: Variable, node: Any) -> list[tuple[int, Part, Sync]]:
    """The parts of a variable as slices, in row-major order, each with its sync."""
    axes: list[list[slice]] = []
    for axis, size in enumerate(variable.shape):
        given = node.partition[axis] if node.partition else 1
        sizes = [size // given + (at < size % given) for at in range(given)] if isinstance(given, int) else list(given)
        begins = [sum(sizes[:at]) for at in range(len(sizes))]
        axes.append([slice(begin, begin + length) for begin, length in zip(begins, sizes, strict=True)])
    parts: list[Part] = [()]
    for choices in axes:
        parts = [(*part, one) for part in parts for one in choices]
    syncs = node.parts or (node.sync,) * len(parts)
    return [(at, part, sync) for at, (part, sync) in enumerate(zip(parts, syncs, strict=True))]


def clip(gradients: Sequence[torch.Tensor], max_norm: float) -> None:
    """What PyTorch's `clip_grad_norm_` does, which does not know sparse gradients."""
    norm = math.sqrt(sum(float(_dense(g).square().sum()) for g in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))


class Memory:
    """What every rank keeps back of one part, and PowerSGD's second matrix."""

    def __init__(self, ranks: int) -> None:
        self.left: list[torch.Tensor | float] = [0.0] * ranks
        self.q: torch.Tensor | None = None


def orders(shares: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of up to three shares, whoever is added first."""
    if len(shares) < 3 or shares[0].dtype == torch.float64:
        return [sum(shares[1:], shares[0])]
    a, b, c = shares
    return [(a + b) + c, (a + c) + b, (b + c) + a]


def mean_of(
    sync: Sync, gradients: Sequence[torch.Tensor | None], memory: Memory, given_q: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """The averaged gradient of a part as its encoder leaves it: the candidates; None where no rank has a gradient."""
    ranks = len(gradients)
    some = next((g for g in gradients if g is not None), None)
    if some is None:
        return None
    name, _, amount = sync.encoder.partition(":")
    if name in HALF or name in ("none", "sufficient_factors"):
        wire = HALF.get(name, some.dtype)
        shares = [torch.zeros_like(some, dtype=wire) if g is None else (g * (1 / ranks)).to(wire) for g in gradients]
        if sync.staleness:
            # A server adds up what has come, in a wider type; without a limit every message is an update by itself.
            total = torch.stack([one.double() for one in shares]).sum(0)
            return [(total if sync.staleness == -1 else total.to(wire)).to(some.dtype)]
        return [one.to(some.dtype) for one in orders(shares)]
    wanted = [
        torch.zeros_like(some) if g is None else left + g / ranks
        for g, left in zip(gradients, memory.left, strict=True)
    ]
    if name == "powersgd":
        sent = _low_rank(wanted, int(amount), sync.kind != "parameter_server", memory, given_q)
    else:
        rule = _largest(float(amount)) if name == "topk" else _signs
        sent = [rule(one) for one in wanted]
    for rank, g in enumerate(gradients):
        if g is not None:
            memory.left[rank] = wanted[rank] - sent[rank]
    return [sum(sent[1:], sent[0])]


def _largest(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def kept(wanted: torch.Tensor) -> torch.Tensor:
        flat = wanted.flatten()
        count = min(len(flat), math.ceil(share * len(flat)))
        order = sorted(range(len(flat)), key=lambda at: -abs(float(flat[at])))[:count]
        out = torch.zeros_like(flat)
        out[order] = flat[order]
        return out.view(wanted.shape)

    return kept


def _signs(wanted: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(wanted)
    for side in (wanted >= 0, wanted < 0):
        if side.any():
            out[side] = wanted[side].mean()
    return out


def _low_rank(
    wanted: list[torch.Tensor], rank: int, everyone: bool, memory: Memory, given: torch.Tensor | None
) -> list[torch.Tensor]:
    """What each rank sends: its matrix projected on the columns of the sum times Q; whole where that is no smaller."""
    shape = wanted[0].shape
    rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    rank = min(rank, rows, columns)
    if rank * (rows + columns) >= rows * columns:
        return wanted
    if memory.q is None or not everyone:
        assert given is not None, "PowerSGD begins with random numbers"
        memory.q = given.double()
    matrices = [one.reshape(rows, columns).double() for one in wanted]
    total = sum(matrices[1:], matrices[0])
    basis = torch.linalg.svd(total @ memory.q, full_matrices=False)[0]
    memory.q = total.T @ basis
    return [(basis @ (basis.T @ one)).view(shape).to(wanted[0].dtype) for one in matrices]


class Reference:
    """One process with all ranks' batches, beside which the weights of a distributed run are put."""

    def __init__(self, case: Case, strategy: Strategy, variables: Sequence[Variable], ranks: int) -> None:
        self.case, self.ranks = case, ranks
        self.model = Everything(sparse=case.sparse, mixed=case.mixed, linear=case.linear)
        self.optimizer = optimizer_of(self.model, case.optimizer)
        self.parts = {v.name: cut(v, strategy.node(v.name)) for v in variables}
        self.memory: dict[Key, Memory] = {}
        self.touched: dict[str, torch.Tensor] = {}
        """The rows of sparse gradients that any rank has in this step."""
        self.worst = 0.0
        """The largest difference so far, in units of what is allowed."""
        self.where = ""
        self.steps = 0

    def step(self, observed: dict[str, torch.Tensor], q: dict[Key, torch.Tensor]) -> None:
        """Train a step, and compare with the weights that the ranks have after it."""
        found = self._means(q)
        several = max((len(one) for means in found.values() for _, _, one in means if one), default=1)
        made = [self._trained(found, number, copied=several > 1) for number in range(several)]
        if several > 1:
            # The gradients of whichever order each element was added in, now for good.
            best = self._nearest(found, made, observed)
            made = [self._trained(best, 0, copied=False)]
        self.steps += 1
        self._compare(observed, stale=False)

    def _gradients(self, rank: int) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.model.zero_grad()
        data = batch(self.steps, rank)
        parts = data.halves() if self.case.loop in ("no_sync", "twice") else [data]
        for one in parts:
            (self.model(one) / len(parts)).backward()
        return {name: p.grad for name, p in self.model.named_parameters()}

    def _means(self, q: dict[Key, torch.Tensor]) -> dict[str, list[tuple[Part, Sync, list[torch.Tensor] | None]]]:
        by_rank = [self._gradients(rank) for rank in range(self.ranks)]
        self.touched = {}
        for name in self.parts:
            rows = [g[name].coalesce().indices()[0] for g in by_rank if g[name] is not None and g[name].is_sparse]
            if rows:
                self.touched[name] = torch.unique(torch.cat(rows))
        found: dict[str, list[tuple[Part, Sync, list[torch.Tensor] | None]]] = {}
        for name, parts in self.parts.items():
            whole = [None if g[name] is None else g[name].to_dense() for g in by_rank]
            for at, part, sync in parts:
                memory = self.memory.setdefault((name, at), Memory(self.ranks))
                blocks = [None if one is None else one[part] for one in whole]
                found.setdefault(name, []).append((part, sync, mean_of(sync, blocks, memory, q.get((name, at)))))
        return found

    def _trained(self, found: dict[str, Any], number: int, *, copied: bool) -> dict[str, torch.Tensor]:
        """The weights after an update with one of the candidates."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer)) if copied else (self.model, self.optimizer)
        for name, p in model.named_parameters():
            p.grad = None
            if name not in found or any(one is None for *_, one in found[name]):
                continue
            gradient = torch.zeros_like(p)
            for part, _, one in found[name]:
                gradient[part] = one[min(number, len(one) - 1)]
            if name in self.touched:
                rows = self.touched[name]
                gradient = torch.sparse_coo_tensor(rows[None], gradient[rows], p.shape).coalesce()
            p.grad = gradient
        if self.case.loop == "clip":
            clip([p.grad for p in model.parameters() if p.grad is not None], 0.2)
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def _nearest(self, found: Any, made: list[dict[str, torch.Tensor]], observed: dict[str, torch.Tensor]) -> Any:
        best: dict[str, Any] = {}
        for name, parts in found.items():
            best[name] = []
            for part, sync, one in parts:
                if one is None or len(one) == 1:
                    best[name].append((part, sync, one))
                    continue
                apart = torch.stack([(after[name] - observed[name])[part].abs() for after in made])
                gradient = torch.stack(one).gather(0, apart.argmin(0, keepdim=True))[0]
                best[name].append((part, sync, [gradient]))
        return best

    @torch.no_grad()
    def _compare(self, observed: dict[str, torch.Tensor], *, stale: bool) -> None:
        for name, p in self.model.named_parameters():
            apart = (p - observed[name]).abs().double() / p.abs().double().clamp(min=1.0)
            for _, part, sync in self.parts.get(name, [(0, (), Sync())]):
                if bool(sync.staleness) != stale:
                    continue
                limit = max(LIMITS[p.dtype], LOOSE if sync.encoder.startswith("powersgd") else 0.0)
                block = apart[part]
                off = float(block.max()) / limit if block.numel() and not block.isnan().any() else math.inf
                if block.numel() and off > self.worst:
                    self.worst, self.where = off, f"step {self.steps}, {name} {sync}"
            if p.dtype != torch.float64 and not stale:
                p.copy_(observed[name])  # rounding of this step is not to be felt in the next

    def finish(self, masters: dict[str, torch.Tensor], state: dict[str, Any] | None) -> None:
        """Compare what servers of stale parameters hold in the end, and the optimizer's state."""
        self._compare(masters, stale=True)
        if state is None:
            return
        mine = self.optimizer.state_dict()
        if set(mine["state"]) != set(state["state"]):
            self.worst, self.where = math.inf, f"state of {sorted(set(mine['state']) ^ set(state['state']))}"
            return
        exact = [p.dtype == torch.float64 for group in self.optimizer.param_groups for p in group["params"]]
        for at, kept in mine["state"].items():
            for key, value in kept.items() if exact[at] else ():
                both = (_dense(value), state["state"][at][key])
                want, got = (torch.as_tensor(one, dtype=torch.float64) for one in both)
                off = float(((want - got).abs() / want.abs().clamp(min=1.0)).max() if want.numel() else 0.0) / LOOSE
                if not off <= self.worst:
                    self.worst, self.where = off, f"state {key} of parameter {at}"


def _dense(value: Any) -> Any:
    return value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value
