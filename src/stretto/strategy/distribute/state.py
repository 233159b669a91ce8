# SPDX-License-Identifier: Apache-2.0
"""Converts an optimizer's state between the regions that ranks hold and the whole that is saved."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from .groups import Groups
from .regions import EVERYONE, VariableRegion, replicated

STEPS = "step"
"""The key of the step count in the state of PyTorch's optimizers; it is equal for every region of a variable."""


def gathered_state(
    states: dict[VariableRegion, dict[str, Any]], regions: list[VariableRegion], parameter: torch.Tensor, groups: Groups
) -> dict[str, Any]:
    """The whole state of a variable; each region's owner broadcasts its state, and all ranks call this together.

    Args:
        states: the states of the regions that this rank updates.
        regions: all regions of the variable, in the same order on all ranks.
        parameter: the variable.
        groups: the communicators.

    Returns:
        The state, equal on all ranks.
    """
    if replicated(regions):
        return {key: _dense(value) for key, value in states[regions[0]].items()}
    whole: dict[str, Any] = {}
    for region in regions:
        owner = groups.lead if region.owner == EVERYONE else region.owner
        mine = {key: _dense(value) for key, value in states.get(region, {}).items()}
        told = _told({key: _form(value) for key, value in mine.items()}, owner, parameter.device, groups)
        shape = tuple(region.of(parameter.detach()).shape)
        for key, (kind, dtype, size, plain) in told.items():
            if kind == "plain":
                whole[key] = plain
                continue
            here = groups.rank == owner
            value = mine[key].detach().clone() if here else torch.empty(size, dtype=getattr(torch, dtype))
            value = value.contiguous().to(parameter.device)
            dist.broadcast(value, group_src=owner, group=groups.main)
            if tuple(size) != shape or not size:
                whole[key] = value.cpu() if key == STEPS else value
                continue
            if key not in whole:
                whole[key] = torch.zeros_like(parameter, dtype=value.dtype)
            region.write(whole[key], value)
    return whole


def spread_state(saved: dict[str, Any], parameter: torch.Tensor, region: VariableRegion | None) -> dict[str, Any]:
    """A saved state, or the part of it that belongs to a region.

    Args:
        saved: the saved state of a variable.
        parameter: the variable.
        region: the region; None takes the whole.

    Returns:
        Copies of the values, on the parameter's device.
    """
    found: dict[str, Any] = {}
    for key, given in saved.items():
        value = _dense(given)
        if not isinstance(value, torch.Tensor):
            found[key] = value
        elif value.shape == parameter.shape and key != STEPS:
            part = value if region is None else region.of(value)
            found[key] = part.to(parameter.device).clone(memory_format=torch.preserve_format)
        else:
            found[key] = value.clone()
    return found


def _dense(value: Any) -> Any:
    """A dense tensor for a sparse one: momentum of a sparse gradient is sparse, and only a dense one can be cut."""
    return value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value


def _form(value: Any) -> tuple[str, str, list[int], Any]:
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype).removeprefix("torch."), list(value.shape), None
    return "plain", "", [], value


def _told(form: dict[str, Any], owner: int, device: torch.device, groups: Groups) -> dict[str, Any]:
    """The owner's description of its state, on every rank."""
    text = torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(size, group_src=owner, group=groups.main)
    if groups.rank != owner:
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, group_src=owner, group=groups.main)
    told: dict[str, Any] = json.loads(bytes(text.tolist()))
    return told
