# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint tensors can be received straight into a vLLM worker's parameters, and in which layout.

A parameter of a worker is a plain tensor: that it is the second half of the rows of some checkpoint tensor, or of three
of them one behind the other, is known only to its loader. So a layout is guessed from shapes and from the model's
`packed_modules_mapping`, and then tried: random numbers go through the model's own ``load_weights``, and what does not
land where the guess says is received whole and loaded by vLLM's loader, as vLLM's own engines do. Nothing depends on a
guess being right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..resharding.tensors.describe import TensorPart
from ..weights.mapping import MappingRule, WeightMapping

TRIED_SEED = 20


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """A tensor as the trainer names and shapes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    """What a worker receives: parameters that are made of pieces, and tensors for its own loader."""

    mapping: WeightMapping
    direct: Mapping[str, TensorPart]
    """Parts of parameters, by their names in the model."""
    loaded: tuple[CheckpointTensor, ...] = ()
    """Checkpoint tensors that arrive whole and go through ``load_weights``."""
    rules: Mapping[str, MappingRule] = field(default_factory=dict)


def guess(
    model: torch.nn.Module, tensors: Sequence[CheckpointTensor], ranks: Sequence[int], *, direct: bool = True
) -> WorkerLayout:
    """The layout that shapes and names suggest.

    Args:
        model: the worker's model.
        tensors: the trainer's tensors.
        ranks: the ranks of this worker's tensor-parallel group, in order.
        direct: whether to guess at all; else all tensors go through the loader.

    Returns:
        The layout, not yet tried.
    """
    known = {t.name: t for t in tensors}
    rules: dict[str, MappingRule] = {}
    parts: dict[str, TensorPart] = {}
    for name, parameter in model.named_parameters() if direct else ():
        pieces = [known[n] for n in _sources(model, name) if n in known]
        if not pieces or any(p.dtype != parameter.dtype for p in pieces):
            continue
        dim = _cut(parameter, pieces, len(ranks))
        if dim is None:
            continue
        parts[name] = TensorPart.of(parameter.data, ranks=ranks, placements=["R" if dim < 0 else f"S({dim})"])
        many = len(pieces) > 1
        rules[name] = MappingRule(
            to=name, sources=tuple(p.name for p in pieces), concat=0 if many else None,
            sizes=tuple(p.shape[0] for p in pieces) if many else (),
        )  # fmt: skip
    return _layout(tensors, parts, rules)


def without(layout: WorkerLayout, names: Sequence[str], tensors: Sequence[CheckpointTensor]) -> WorkerLayout:
    """The layout in which these parameters are left to the loader.

    Args:
        layout: The layout.
        names: Parameters that are not written in place.
        tensors: The tensors of the checkpoint.

    Returns:
        The layout of what is left.
    """
    kept = {name: part for name, part in layout.direct.items() if name not in names}
    return _layout(tensors, kept, {name: layout.rules[name] for name in kept})


def tried(model: Any, layout: WorkerLayout, tensors: Sequence[CheckpointTensor], rank: int) -> list[str]:
    """The parameters that the model's own loader fills otherwise than the layout says; the model stays as it was.

    Args:
        model: the worker's model.
        layout: what to try.
        tensors: the trainer's tensors.
        rank: this rank.

    Returns:
        Names of parameters.
    """
    from ..resharding.tensors.pieces import assembled, pieces_of

    before = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    model.load_weights((t.name, _numbers(at, t)) for at, t in enumerate(tensors))
    number = {t.name: at for at, t in enumerate(tensors)}
    wrong = []
    found = dict(model.named_parameters())
    for one in layout.mapping.resolve({name: part.shape for name, part in layout.direct.items()}):
        pieces = pieces_of([one], layout.direct, rank)
        cut = {
            name: _numbers(number[name], tensors[number[name]])[tuple(slice(*ends) for ends in piece.where.tile(rank))]
            for name, piece in pieces.items()
        }
        where = {name: piece.where for name, piece in pieces.items()}
        ((_, made),) = assembled([one], layout.direct, cut, where, rank)
        if not torch.equal(made.cpu(), found[one.to].detach().cpu()):
            wrong.append(one.to)
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(before[name])
    return wrong


def _layout(
    tensors: Sequence[CheckpointTensor], parts: Mapping[str, TensorPart], rules: Mapping[str, MappingRule]
) -> WorkerLayout:
    used = {name for rule in rules.values() for name in rule.sources}
    loaded = tuple(t for t in tensors if t.name not in used)
    mapping = WeightMapping(rules=tuple(rules.values()))
    return WorkerLayout(mapping=mapping, direct=dict(parts), loaded=loaded, rules=dict(rules))


def _sources(model: Any, name: str) -> Iterator[str]:
    """The names in a checkpoint of what a parameter is made of: `qkv_proj` of `q_proj`, `k_proj` and `v_proj`."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    words = name.split(".")
    at = next((k for k, word in enumerate(words) if word in packed and list(packed[word]) != [word]), None)
    if at is None:
        yield name
        return
    for piece in packed[words[at]]:
        yield ".".join([*words[:at], piece, *words[at + 1 :]])


def _cut(parameter: torch.Tensor, pieces: Sequence[CheckpointTensor], ways: int) -> int | None:
    """The dimension in which a parameter is cut, -1 for none; None where shapes do not fit."""
    local, first = tuple(parameter.shape), pieces[0].shape
    if len(first) != len(local) or not local or any(p.shape[1:] != first[1:] for p in pieces):
        return None
    whole = (sum(p.shape[0] for p in pieces), *first[1:])
    if whole == local:
        return -1
    dims = [dim for dim in range(len(local)) if whole[dim] != local[dim]]
    if len(dims) != 1 or whole[dims[0]] != local[dims[0]] * ways:
        return None
    if dims[0] == 0 and any(p.shape[0] % ways for p in pieces):
        return None
    return dims[0]


def _numbers(at: int, tensor: CheckpointTensor) -> torch.Tensor:
    """Numbers to try a loader with, the same on all ranks."""
    draw = torch.Generator().manual_seed(TRIED_SEED + at)
    return torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
