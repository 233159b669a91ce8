# SPDX-License-Identifier: Apache-2.0
"""Runs strategies on PyTorch: `distribute` makes a model and its optimizer train as a strategy says.

Importing this module does not load torch; calling its functions does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from .. import ModelSpec, Strategy
from ..files import STRATEGY_VARIABLE

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .optimizer import DistributedOptimizer

__all__ = ["STRATEGY_VARIABLE", "distribute", "model_spec", "serve"]


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str | os.PathLike[str] | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[nn.Module, DistributedOptimizer]:
    """Train `model` on all ranks of a group as a strategy says; all ranks of the group call this together.

    ::

        torch.distributed.init_process_group("gloo")      # or "stretto"
        model, optimizer = stretto.torch.distribute(model, optimizer, "strategy.yaml")
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()

    Ranks first compare their arguments, so that a difference is an error on all of them. Gradients are averaged over
    ranks.

    Args:
        model: the model, already on its device; rank 0's weights are copied to all ranks.
        optimizer: the optimizer of the model's parameters.
        strategy: a strategy or the path of its file; None takes the file in STRETTO_STRATEGY, else all-reduce as in
            DDP.
        group: the process group; None takes all ranks of the job.

    Returns:
        The same model object, and the optimizer that replaces `optimizer`.

    Raises:
        InvalidInput: on all ranks, if an argument is invalid or differs between ranks.
    """
    from .wrap import wrap

    return wrap(model, optimizer, strategy, group)


def serve(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str | os.PathLike[str] | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
) -> int:
    """Serve the variables that a strategy places on this rank, which does not train; returns when training has ended.

    A rank that the strategy names in `servers` calls this where the others call `distribute`, with a model and an
    optimizer made alike. Options of the optimizer (the rate of a scheduler) come from the first rank that trains; its
    ``optimizer.close()`` ends this.

    Args:
        model: the model; it is not called.
        optimizer: the optimizer of the model's parameters.
        strategy: a strategy or the path of its file; None takes the file in STRETTO_STRATEGY.
        group: the process group; None takes all ranks of the job.

    Returns:
        The number of updates that were made.

    Raises:
        InvalidInput: on all ranks, if an argument is invalid or differs between ranks, or this rank is to train.
    """
    from .serving import serve_until_end
    from .wrap import wrap

    return serve_until_end(wrap(model, optimizer, strategy, group, serving=True)[1])


def model_spec(model: nn.Module, sample: Any = None, *, name: str = "") -> ModelSpec:
    """The description of a PyTorch model that strategies need.

    With a sample, a few steps are run, and the spec has the order of use, compute times, the rows that sparse gradients
    touch and the rows of linear layers' factors. Without, variables are in the order of ``named_parameters`` and no
    times are known.

    Args:
        model: the model.
        sample: what the model is called with: a tensor, or a tuple of arguments; None runs nothing.
        name: name of the model; empty takes its class's.

    Returns:
        The description.

    Raises:
        InvalidInput: the model does not run on the sample, or a parameter has an unknown dtype.
    """
    from .meter import described

    try:
        return described(model, sample, name=name)
    except RuntimeError as error:
        raise InvalidInput(f"sample: the model does not run on it: {str(error).splitlines()[0]}") from None
