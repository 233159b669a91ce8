"""From a model, an optimizer and a strategy to what trains: the local stage of the kernels, carried out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InvalidInput
from ...strategy import ModelSpec, Strategy
from ...strategy.builders import build
from ...strategy.files import load_strategy, strategy_text
from ...strategy.kernels import Message, Piece, Step, global_step
from ...strategy.representation import Part
from ...strategy.requests import Arm, Reference
from ...strategy.resources import Resources, resources
from . import STRATEGY_VARIABLE
from .carriers import Carrier
from .dense import DenseCarrier, ShardedCarrier
from .depot import Depot
from .factors import FactorsCarrier, PowerSgdCarrier, layers_of
from .gradients import Synchroniser
from .groups import Groups
from .meter import Meter, variables_of
from .optimizer import DistributedOptimizer, check_optimizer, only_touched_rows
from .regions import Region
from .rows import OneBitCarrier, SparseCarrier, TopKCarrier
from .session import Live, Session, groups_for, trial_from_environment
from .trial import Trial


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Strategy | str | os.PathLike[str] | None, group: Any
) -> tuple[nn.Module, DistributedOptimizer]:
    """What `stretto.distribute` does."""
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
    meter = Meter(model)
    try:
        trial = trial_from_environment(groups, meter.spec, meter.close)
        made = _assembled(model, optimizer, given, groups, trial)
    except BaseException:
        meter.close()
        raise
    if isinstance(trial, Session):
        trial.switch = Live(model, made, group, lambda arm: _assembled(model, optimizer, arm, groups, trial))
    return model, made


def _assembled(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Arm | str | os.PathLike[str] | None, groups: Groups,
    trial: Trial | None,
) -> DistributedOptimizer:  # fmt: skip
    """What trains a model as a strategy says; for a `Reference` what brings nothing together, since DDP does."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = layers_of(model)
    # How many rows a batch has is not known yet; here it only has to be known which variables have factors.
    variables = tuple(replace(v, factors=1) if v.name in layers else v for v in variables_of(model))
    spec = ModelSpec(name=type(model).__name__, variables=variables, runtime="torch")
    strategy, step = _strategy(None if isinstance(given, Reference) else given, spec, groups)
    _agree(strategy, spec, groups)
    if not isinstance(trial, Session) or trial.switch is None:
        _same_weights(model, groups)
    if trial is not None:
        trial.name = strategy.name
    carriers, stale = [], []
    for message in () if isinstance(given, Reference) else step.messages:
        if message.sync.staleness:
            stale.append(message)
        else:
            carriers.append(_carrier(message, parameters, groups, layers, optimizer))
    depots = _depots(stale, parameters, groups)
    regions = _regions(carriers, depots)
    check_optimizer(optimizer, regions)
    names = _names(model, optimizer)
    for name, p in model.named_parameters():
        # What is not trained is nobody's to bring; the optimizer may still know it.
        whole = Part(index=0, start=(0,) * p.dim(), shape=tuple(p.shape))
        regions.setdefault(name, [Region(variable=name, part=whole)])
        parameters.setdefault(name, p)
    sync = Synchroniser(carriers, parameters, groups)
    try:
        made = DistributedOptimizer(optimizer, strategy, names, parameters, regions, sync, depots, groups, trial)
    except BaseException:
        sync.close()  # a session goes on with another strategy
        raise
    if depots:
        made.follow(model)
    return made


def _strategy(
    given: Strategy | str | os.PathLike[str] | None, spec: ModelSpec, groups: Groups
) -> tuple[Strategy, Step]:
    if given is None:
        given = os.environ.get(STRATEGY_VARIABLE) or None
    plain = resources(groups.size).devices
    hosts = groups.hosts()
    if given is None:
        there = Resources(devices=plain, hosts=hosts)
        strategy = build("all_reduce", spec, there)
        return strategy, global_step(strategy, spec, there)
    strategy = given if isinstance(given, Strategy) else load_strategy(Path(given))
    if len(strategy.devices) != groups.size:
        raise InvalidInput(
            f"strategy {strategy.name}: is for {len(strategy.devices)} devices, this job has {groups.size} ranks"
        )
    for node in strategy.nodes:
        for one in (node.sync, *node.parts):
            if one.kind != "parameter_server" and one.placement and set(one.placement) != set(strategy.devices):
                raise InvalidInput(f"{node.variable}.placement: every rank has a replica: name all devices, or none")
    # Names that tell a host are believed; others run where they run.
    named = resources(strategy.devices)
    there = Resources(devices=strategy.devices, hosts=hosts) if len(named.by_host) == groups.size else named
    return strategy, global_step(strategy, spec, there)


def _agree(strategy: Strategy, spec: ModelSpec, groups: Groups) -> None:
    """All ranks must carry out the same strategy on the same model, or they would wait for each other for ever."""
    mine = hashlib.sha256(f"{strategy_text(strategy, as_json=True)}{spec.digest}".encode()).hexdigest()
    found: list[Any] = [None] * groups.size
    dist.all_gather_object(found, mine, group=groups.main)
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        raise InvalidInput(f"strategy: rank {other} has another strategy or another model than rank 0")


@torch.no_grad()
def _same_weights(model: nn.Module, groups: Groups) -> None:
    if groups.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            data = tensor.detach()
            sent = data.contiguous()
            dist.broadcast(sent, group_src=0, group=groups.main)
            if sent.data_ptr() != data.data_ptr():
                data.copy_(sent)


def _carrier(
    message: Message, parameters: dict[str, nn.Parameter], groups: Groups, layers: dict[str, nn.Linear],
    optimizer: torch.optim.Optimizer,
) -> Carrier:  # fmt: skip
    sync, sparse = message.sync, message.pieces[0].variable.sparse
    if sync.kind == "sharded":
        return ShardedCarrier(message, parameters, groups)
    if sync.kind == "sparse_all_gather" or (sparse and sync.kind == "parameter_server"):
        return SparseCarrier(message, parameters, groups, rows_only=only_touched_rows(optimizer))
    name = sync.encoding[0]
    if name == "sufficient_factors":
        return FactorsCarrier(message, parameters, groups, layers=layers)
    dense: dict[str, Callable[..., Carrier]] = {
        "powersgd": PowerSgdCarrier, "topk": TopKCarrier, "onebit": OneBitCarrier,
    }  # fmt: skip
    return dense.get(name, DenseCarrier)(message, parameters, groups)


def _depots(stale: list[Message], parameters: dict[str, nn.Parameter], groups: Groups) -> list[Depot]:
    together: dict[tuple[Any, ...], list[Piece]] = {}
    for message in stale:
        for piece in message.pieces:
            key = (message.updaters[0], piece.sync.staleness, piece.sync.encoder, piece.variable.dtype)
            together.setdefault(key, []).append(piece)
    communicator = groups.separate() if together else None
    return [
        Depot(number, pieces, parameters, groups, communicator, key[0])
        for number, (key, pieces) in enumerate(together.items())
    ]


def _regions(carriers: list[Carrier], depots: list[Depot]) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = {}
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
