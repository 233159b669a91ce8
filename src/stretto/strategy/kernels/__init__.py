# SPDX-License-Identifier: Apache-2.0
"""Kernels: each rewrites the training step by one aspect of a strategy.

There are two stages, so that nothing grows with ranks times variables: `global_step` applies a strategy once for all
ranks, and `local_step` keeps the part of one rank. `to_workload` turns the global step into the workload that planner
and simulator use.

>>> from stretto.strategy import zoo
>>> from stretto.strategy.builders import build
>>> model = zoo.model("vgg16", scale=0.05)
>>> step = global_step(build("ps_balanced", model, 4), model, 4)
>>> len(step.messages), step.messages[0].exchanges[0].kind
(32, 'reduce')
>>> len(local_step(step, 1).updates)
8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from ...errors import InvalidInput, unknown
from ...workload import Workload
from ..model import ModelSpec
from ..representation import Strategy
from ..resources import Where, resources
from .bridge import Bridge
from .compressor import Compressor
from .merger import Merger
from .partitioner import Partitioner
from .replicator import Replicator
from .step import Kernel, LocalStep, Message, StepExchange, StrategyStep, VariablePiece
from .synchronizer import Synchronizer
from .workload import workload_of

KERNELS: tuple[Kernel, ...] = (Replicator(), Partitioner(), Merger(), Synchronizer(), Compressor(), Bridge())
"""The kernels in the order in which they are applied; each relies on those before it (see `Kernel`)."""


def global_step(strategy: Strategy, model: ModelSpec, where: Where) -> StrategyStep:
    """The step of all ranks: its messages, the exchanges of each, and the ranks that update each.

    Args:
        strategy: the strategy.
        model: the model that it is for.
        where: a cluster, resources, names of devices, or a number of ranks; it must contain the strategy's devices.

    Returns:
        The step after all kernels.

    Raises:
        InvalidInput: the strategy is for another model, or a device is unknown.
    """
    strategy.check(model)
    there = resources(where)
    if strategy.devices == resources(len(strategy.devices)).devices and len(strategy.devices) <= len(there.devices):
        there = replace(there, devices=(*strategy.devices, *there.devices[len(strategy.devices) :]))
    for name in strategy.devices:
        if name not in there.devices:
            raise InvalidInput(f"strategy {strategy.name}: {unknown('device', name, there.devices)}")
    step = StrategyStep(strategy=strategy, model=model, there=there)
    return reduce(lambda made, kernel: kernel.rewrite(made), KERNELS, step)


def to_workload(strategy: Strategy, model: ModelSpec, where: Where, *, slowdown: Sequence[float] = ()) -> Workload:
    """A strategy as a workload on a cluster whose first devices are the strategy's; rank r runs on device r.

    Args:
        strategy: the strategy.
        model: the model that it is for.
        where: a cluster, resources, names of devices, or a number of ranks.
        slowdown: for each rank the factor on the model's compute times, > 0; empty means 1 for all.

    Returns:
        One training step.

    Raises:
        InvalidInput: strategy, model and devices do not fit, or a factor is invalid.
    """
    step = global_step(strategy, model, where)
    if step.ranks != tuple(range(step.num_ranks)):
        at = next(at for at, device in enumerate(step.ranks) if at != device)
        wanted = step.there.devices[at]
        raise InvalidInput(f"devices[{at}]: must be {wanted!r}, the cluster's, not {strategy.devices[at]!r}")
    return workload_of(step, slowdown=slowdown)


def local_step(step: StrategyStep, rank: int) -> LocalStep:
    """The part of a step that one rank does."""
    if not 0 <= rank < step.num_ranks:
        raise InvalidInput(f"rank: must be 0..{step.num_ranks - 1}, not {rank}")
    return reduce(lambda made, kernel: kernel.localize(made), KERNELS, LocalStep.of(step, rank))


__all__ = [
    "KERNELS",
    "StepExchange",
    "Kernel",
    "LocalStep",
    "Message",
    "VariablePiece",
    "StrategyStep",
    "global_step",
    "local_step",
    "to_workload",
    "workload_of",
]
