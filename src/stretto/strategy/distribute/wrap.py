# SPDX-License-Identifier: Apache-2.0
"""Makes a distributed optimizer from a model, an optimizer and a strategy: a carrier for each
message of the kernels.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InvalidInput
from .. import ModelSpec, Strategy
from ..builders import build
from ..files import STRATEGY_VARIABLE, load_strategy, strategy_text
from ..kernels import Message, StrategyStep, VariablePiece, global_step, local_step
from ..representation import VariablePart
from ..requests import Arm, Reference
from ..resources import Resources, resources
from .carriers import VariableCarrier
from .dense import DenseCarrier, ShardedCarrier
from .depot import Depot
from .factors import FactorsCarrier, PowerSgdCarrier, layers_of
from .gradients import GradientSynchronizer, check_free
from .groups import Groups
from .meter import ModuleMeter, variables_of
from .optimizer import DistributedOptimizer
from .optimizers import check_optimizer, check_rows, described_optimizer, only_touched_rows
from .regions import VariableRegion, check_memory
from .rows import OneBitCarrier, SparseCarrier, TopKCarrier, as_bytes
from .session import LiveTraining, Session, groups_for, trial_from_environment
from .trial import TRIAL_VARIABLE, StepCounter


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Strategy | str | os.PathLike[str] | None, group: Any,
    *, serving: bool = False,
) -> tuple[nn.Module, DistributedOptimizer]:  # fmt: skip
    """Make a model and its optimizer train as a strategy says; `stretto.torch.distribute` calls this on all ranks.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters.
        given: a strategy or the path of its file; None takes STRETTO_STRATEGY or all-reduce.
        group: the process group; None takes all ranks of the job.
        serving: whether this rank is to serve, and not to train.

    Returns:
        The same model, and the distributed optimizer.

    Raises:
        InvalidInput: on all ranks, if an argument is invalid or differs between ranks.
    """
    if isinstance(optimizer, DistributedOptimizer):
        raise InvalidInput("optimizer: is distributed already")
    for name, value, kind, words in (
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer"),
        ("strategy", given, Strategy | str | os.PathLike | None, "a Strategy, a file's path or None"),
    ):
        if not isinstance(value, kind):
            raise InvalidInput(f"{name}: must be {words}, not {type(value).__name__}")
    groups = groups_for(group)
    meter = ModuleMeter(model)
    try:
        trial = trial_from_environment(groups, meter.spec, meter.close)
        made = _assembled(model, optimizer, given, groups, trial, serving=serving)
    except BaseException:
        meter.close()
        raise
    if isinstance(trial, Session):
        trial.switch = LiveTraining(model, made, group, lambda arm: _assembled(model, optimizer, arm, groups, trial))
    return model, made


def _assembled(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Arm | str | os.PathLike[str] | None, groups: Groups,
    trial: StepCounter | None, *, serving: bool = False,
) -> DistributedOptimizer:  # fmt: skip
    """The optimizer that trains a model as a strategy says; for a `Reference` one without carriers, since DDP
    synchronizes.
    """
    layers = layers_of(model)
    role = (groups.rank, serving)
    asked = _Asked(model, optimizer, None if isinstance(given, Reference) else given, layers, groups.hosts(), role)
    strategy, step, names = agreed(asked, groups)
    if strategy.servers and trial is not None:
        raise InvalidInput(f"servers: {TRIAL_VARIABLE} is for strategies in which every rank trains")
    groups.divide(step.replicas)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not isinstance(trial, Session) or trial.switch is None:
        _same_weights(model, groups)
    if trial is not None:
        trial.name = strategy.name
    carriers, stale = [], []
    if not isinstance(given, Reference):
        _communicators(step, groups)
        for message, mine in zip(step.messages, local_step(step, groups.rank).messages, strict=True):
            if mine.sync.staleness:
                stale.append(mine)
            else:
                carriers.append(_carrier(mine, message, parameters, groups, layers, optimizer))
    depots = _depots(stale, parameters, groups)
    regions = _regions(carriers, depots)
    check_optimizer(optimizer, regions)
    check_memory(parameters, regions)
    for name, p in model.named_parameters():
        # Parameters without gradients have no carrier; the optimizer may still know them.
        whole = VariablePart(index=0, start=(0,) * p.dim(), shape=tuple(p.shape))
        regions.setdefault(name, [VariableRegion(variable=name, part=whole)])
        parameters.setdefault(name, p)
    sync = GradientSynchronizer(carriers, parameters, groups)
    try:
        made = DistributedOptimizer(optimizer, strategy, names, parameters, regions, sync, depots, groups, trial)
    except BaseException:
        sync.close()  # a session goes on with another strategy
        raise
    if depots or strategy.servers:
        made.follow(model)
    return made


def _communicators(step: StrategyStep, groups: Groups) -> None:
    """Make the communicators of all messages; all ranks make all of them together, in the order of the step."""
    for message in step.messages:
        for exchange in () if message.sync.staleness else message.exchanges:
            for members in exchange.groups:
                groups.make(groups.members(members, exchange.kind), message.lane)


class _Asked(NamedTuple):
    """The arguments with which a rank has called `distribute`, and the hosts of all ranks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    given: Strategy | str | os.PathLike[str] | None
    layers: dict[str, nn.Linear]
    hosts: tuple[int, ...]
    role: tuple[int, bool]
    """This rank, and whether it was called to serve."""

    def read(self) -> tuple[Strategy, StrategyStep, dict[int, str], dict[str, str]]:
        """The strategy and its step, the parameters' names, and texts that must be equal on all ranks."""
        # The rows of a batch are not known yet; 1 only marks the variables that have factors.
        variables = tuple(replace(v, factors=1) if v.name in self.layers else v for v in variables_of(self.model))
        spec = ModelSpec(name=type(self.model).__name__, variables=variables, runtime="torch")
        names = _names(self.model, self.optimizer)
        check_free(self.model)
        strategy, step = self._step(spec)
        self._check_role(strategy)
        check_rows(self.optimizer, strategy, spec)
        return strategy, step, names, {
            "model": repr([_described(name, tensor) for name, tensor in _named_tensors(self.model)]),
            "optimizer": repr(described_optimizer(self.optimizer, names)),
            "strategy": strategy_text(strategy, as_json=True),
        }  # fmt: skip

    def _check_role(self, strategy: Strategy) -> None:
        rank, serving = self.role
        if serving != (rank not in strategy.replicas):
            does, call = ("trains", "distribute") if serving else ("only serves", "serve")
            raise InvalidInput(f"servers: rank {rank} {does} in strategy {strategy.name}: call stretto.torch.{call}")

    def _step(self, spec: ModelSpec) -> tuple[Strategy, StrategyStep]:
        given = os.environ.get(STRATEGY_VARIABLE) or None if self.given is None else self.given
        ranks = len(self.hosts)
        if given is None:
            there = Resources(devices=resources(ranks).devices, hosts=self.hosts)
            strategy = build("all_reduce", spec, there)
            return strategy, global_step(strategy, spec, there)
        strategy = given if isinstance(given, Strategy) else load_strategy(Path(given))
        if len(strategy.devices) != ranks:
            raise InvalidInput(
                f"strategy {strategy.name}: is for {len(strategy.devices)} devices, this job has {ranks} ranks"
            )
        # Device names that contain a host decide the hosts; otherwise the ranks' real hosts are used.
        named = resources(strategy.devices)
        there = Resources(devices=strategy.devices, hosts=self.hosts) if len(named.by_host) == ranks else named
        return strategy, global_step(strategy, spec, there)


def agreed(asked: _Asked, groups: Groups) -> tuple[Strategy, StrategyStep, dict[int, str]]:
    """The strategy, its step and the parameters' names, equal on all ranks; all ranks call this together.

    Raises:
        InvalidInput: on all ranks, if one rank's strategy, model or optimizer is refused or differs from rank 0's;
            otherwise ranks would wait for each other forever, or sum gradients that do not belong together.
    """
    error: InvalidInput | None = None
    mine: dict[str, str] = {}
    try:
        strategy, step, names, texts = asked.read()
        mine = {what: hashlib.sha256(text.encode()).hexdigest() for what, text in texts.items()}
    except InvalidInput as refused:
        error, mine = refused, {"error": str(refused)}
    found: list[Any] = [None] * groups.size
    dist.all_gather_object(found, mine, group=groups.main)
    if error is not None:
        raise error
    for rank, one in enumerate(found):
        if "error" in one:
            raise InvalidInput(f"rank {rank}: {one['error']}")
        other = next((what for what in mine if one[what] != found[0][what]), None)
        if other is not None:
            raise InvalidInput(f"{other}: rank {rank} has another {other} than rank 0")
    return strategy, step, names


def _described(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    layout = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return name, tensor.shape, tensor.dtype, layout, tensor.requires_grad


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def _same_weights(model: nn.Module, groups: Groups) -> None:
    if groups.size > 1:
        for _, tensor in _named_tensors(model):
            data = tensor.detach()
            if data.layout != torch.strided:
                told: list[Any] = [data]
                dist.broadcast_object_list(told, group_src=0, group=groups.main)
                tensor.copy_(told[0])
                continue
            sent = data.contiguous()
            if sent.numel():
                # Tensors are sent as bytes, because not every backend knows every data type.
                dist.broadcast(as_bytes(sent), group_src=0, group=groups.main)
            if sent.data_ptr() != data.data_ptr():
                data.copy_(sent)


def _carrier(
    message: Message, whole: Message, parameters: dict[str, nn.Parameter], groups: Groups, layers: dict[str, nn.Linear],
    optimizer: torch.optim.Optimizer,
) -> VariableCarrier:  # fmt: skip
    sync, sparse = message.sync, message.pieces[0].variable.sparse
    if sync.kind == "sharded":
        # The only group of a sharded message has all ranks that train, in the order of its communicator.
        order = whole.exchanges[0].groups[0] if whole.exchanges else groups.replicas
        return ShardedCarrier(message, parameters, groups, order=order)
    if sync.kind == "sparse_all_gather" or (sparse and sync.kind == "parameter_server"):
        return SparseCarrier(message, parameters, groups, rows_only=lambda: only_touched_rows(optimizer))
    name = sync.encoding[0]
    if name == "sufficient_factors":
        return FactorsCarrier(message, parameters, groups, layers=layers)
    dense: dict[str, Callable[..., VariableCarrier]] = {
        "powersgd": PowerSgdCarrier, "topk": TopKCarrier, "onebit": OneBitCarrier,
    }  # fmt: skip
    return dense.get(name, DenseCarrier)(message, parameters, groups)


def _depots(stale: list[Message], parameters: dict[str, nn.Parameter], groups: Groups) -> list[Depot]:
    together: dict[tuple[Any, ...], list[VariablePiece]] = {}
    for message in stale:
        for piece in message.pieces:
            key = (message.updaters[0], piece.sync.staleness, piece.sync.encoder, piece.variable.dtype)
            together.setdefault(key, []).append(piece)
    communicator = groups.separate() if together else None
    return [
        Depot(number, pieces, parameters, groups, communicator, key[0])
        for number, (key, pieces) in enumerate(together.items())
    ]


def _regions(carriers: list[VariableCarrier], depots: list[Depot]) -> dict[str, list[VariableRegion]]:
    found: dict[str, list[VariableRegion]] = {}
    for region in [r for c in carriers for r in c.regions] + [r for d in depots for r in d.regions]:
        found.setdefault(region.variable, []).append(region)
    return found


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for at, p in enumerate(group["params"]):
            if id(p) not in names:
                raise InvalidInput(f"optimizer.param_groups[{number}].params[{at}]: is no parameter of the model")
    return names
