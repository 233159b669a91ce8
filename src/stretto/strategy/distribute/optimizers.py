# SPDX-License-Identifier: Apache-2.0
"""Which optimizers a strategy allows, and which of an optimizer's settings must be equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InvalidInput, unknown
from .. import ModelSpec, Strategy
from .regions import VariableRegion, replicated
from .state import STEPS

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "SparseAdam", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers that update each element by itself, so that a part of a variable can be updated without the rest."""


def check_optimizer(optimizer: torch.optim.Optimizer, regions: dict[str, list[VariableRegion]]) -> None:
    """Refuse optimizers that need more than the strategy gives to the rank that runs them.

    Args:
        optimizer: the user's optimizer.
        regions: for every synchronized variable the regions that are updated by themselves.

    Raises:
        InvalidInput: the optimizer needs whole variables and one is cut; or it is not one of PyTorch's, so that its
            update of one variable may depend on the others, and not every rank updates them all.
    """
    name = type(optimizer).__name__
    if name == "LBFGS":
        raise InvalidInput("optimizer: LBFGS evaluates the model several times in a step; take another one")
    known = getattr(torch.optim, name, None) is type(optimizer)
    if known and name in ELEMENTWISE:
        return
    apart = [variable for variable, found in regions.items() if not replicated(found)]
    cut = next((v for v in apart if len(regions[v]) > 1 or regions[v][0].flat is not None), None)
    if cut is not None:
        raise InvalidInput(
            f"optimizer: the strategy updates {cut} in parts, which needs an optimizer that updates each element by "
            f"itself; {unknown('one', name, ELEMENTWISE)}"
        )
    if apart and not known:
        raise InvalidInput(
            f"optimizer: the strategy has not every rank update {apart[0]}, which needs an optimizer that updates each "
            f"variable by itself, as PyTorch's do, not {name}: all-reduce every variable"
        )


def check_rows(optimizer: torch.optim.Optimizer, strategy: Strategy, model: ModelSpec) -> None:
    """Refuse strategies that sum rows of a sparse gradient into a dense one for an optimizer that needs the rows.

    Args:
        optimizer: the user's optimizer; only SparseAdam distinguishes a row without a gradient from a row of zeros.
        strategy: the strategy.
        model: the model that it is for.

    Raises:
        InvalidInput: the optimizer is SparseAdam, and a sparse variable is not gathered or served as rows.
    """
    if type(optimizer).__name__ != "SparseAdam":
        return
    for variable in model.variables:
        syncs = [sync for _, sync in strategy.node(variable.name).syncs(variable)] if variable.sparse else []
        for sync in syncs:
            rows = sync.kind == "parameter_server" or (sync.kind == "sparse_all_gather" and len(syncs) == 1)
            if not rows or sync.staleness:
                raise InvalidInput(
                    f"{variable.name}.kind: SparseAdam needs rows: sparse_all_gather without a cut, or a "
                    f"parameter_server without staleness, not {sync.kind}"
                )


def only_touched_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer, with its present options, changes only the rows that a sparse gradient touches."""
    if type(optimizer).__name__ == "SparseAdam":
        return True
    rest = all(not g.get("momentum", 0) and not g.get("weight_decay", 0) for g in optimizer.param_groups)
    return type(optimizer).__name__ in ("SGD", "Adagrad") and rest


def described_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[Any]:
    """The properties of an optimizer that decide its updates: its class, its groups with their options, its state's
    keys.
    """
    state = {
        names[id(p)]: {key: _plain(value) if key == STEPS else "" for key, value in kept.items()}
        for p, kept in optimizer.state.items()
        if id(p) in names
    }
    return [
        type(optimizer).__qualname__,
        [
            {key: [names[id(p)] for p in value] if key == "params" else _plain(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ],
        sorted((name, sorted(kept.items())) for name, kept in state.items()),
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | tuple | None) else type(value).__name__
