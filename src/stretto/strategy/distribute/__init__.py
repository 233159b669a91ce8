"""Strategies carried out on PyTorch: `distribute` makes a model and its optimizer train as a strategy says.

Loads no torch until something is called.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from .. import ModelSpec, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .optimizer import DistributedOptimizer

STRATEGY_VARIABLE = "STRETTO_STRATEGY"
"""Names the file of the strategy where a script gives none."""

__all__ = ["STRATEGY_VARIABLE", "distribute", "model_spec"]


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str | os.PathLike[str] | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[nn.Module, DistributedOptimizer]:
    """Train `model` on all ranks of `group` (default: all of the job) as a strategy says; all of them call it together.

    ::

        torch.distributed.init_process_group("gloo")      # or "stretto"
        model, optimizer = stretto.distribute(model, optimizer, "strategy.yaml")
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()

    Without a strategy it is the file that the environment variable STRETTO_STRATEGY names, else all-reduce as DDP
    does it. The model is the same object, with rank 0's weights on every rank; gradients are averaged over ranks.
    """
    from .wrap import wrap

    return wrap(model, optimizer, strategy, group)


def model_spec(model: nn.Module, sample: Any = None, *, name: str = "") -> ModelSpec:
    """What a strategy needs to know of a PyTorch model.

    With a `sample` (what the model is called with: a tensor, or a tuple of arguments) one step is run, and the spec
    has the order of use, compute times, the rows that sparse gradients touch and the rows of linear layers' factors.
    Without, variables are in the order of ``named_parameters`` and nothing is known about time.
    """
    from .meter import described

    try:
        return described(model, sample, name=name)
    except RuntimeError as error:
        raise InvalidInput(f"sample: the model does not run on it: {str(error).splitlines()[0]}") from None
