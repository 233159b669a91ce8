# SPDX-License-Identifier: Apache-2.0
"""Turns a rewritten step into a `Workload` for the planner and the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InvalidInput
from ...workload import Dep, Op, Workload
from ..model import ModelSpec
from .compressor import MEMORY_GB_PER_S
from .step import Message, StrategyStep

UPDATE_PASSES = 5.0
"""Passes of an update over memory: parameter, gradient and momentum are read, parameter and momentum written."""


def workload_of(step: StrategyStep, *, slowdown: Sequence[float] = ()) -> Workload:
    """One iteration: forward, backward, each message's exchanges and update.

    `slowdown` has for each rank the factor on the model's compute times; empty means 1 for all.
    """
    if slowdown and (len(slowdown) != step.num_ranks or not all(0 < factor < 1e6 for factor in slowdown)):
        raise InvalidInput(f"slowdown: must be {step.num_ranks} numbers > 0, one per rank")
    units = _units(step.model)
    unit_of = {name: at for at, names in enumerate(units) for name in names}
    waits: dict[int, list[Dep]] = {}
    comm: dict[int, list[Op]] = {}
    updates: list[Op] = []
    for message in step.messages:
        needed = {unit_of[piece.variable.name] for piece in message.pieces}
        pushes, update, pulls = _message_ops(message, step, [Dep(op=f"bwd-{at}") for at in sorted(needed)])
        comm.setdefault(min(needed), []).extend(pushes)
        updates += [update, *pulls]
        # In PyTorch a step ends when every rank has all parameters, so the first forward op waits for all messages.
        for at in [0] if step.model.runtime == "torch" and not message.sync.staleness else needed:
            waits.setdefault(at, []).append(Dep(op=(pulls or [update])[-1].name, lag=message.lag))
    ops = []
    for at, names in enumerate(units):
        us = sum(step.model.variable(name).forward_us for name in names)
        ops.append(_compute(f"fwd-{at}", us, waits.get(at, []), "forward", step, slowdown))
    for at in reversed(range(len(units))):
        us = sum(step.model.variable(name).backward_us for name in units[at])
        ops.append(_compute(f"bwd-{at}", us, [], "backward", step, slowdown))
        ops += comm.get(at, [])
    return Workload(
        name=f"{step.model.name}:{step.strategy.name}", num_ranks=step.num_ranks, ops=(*ops, *updates),
        samples=float(step.model.batch * len(step.replicas)),
        notes=(f"strategy {step.strategy.name} for {step.model.name}",),
    )  # fmt: skip


def _compute(
    name: str, us: float, after: Sequence[Dep], phase: str, step: StrategyStep, slowdown: Sequence[float]
) -> Op:
    waits, ranks = tuple(dict.fromkeys(after)), _training(step)
    factors = [slowdown[rank] for rank in step.replicas] if slowdown else [1.0]
    if len(set(factors)) > 1:
        each = tuple(us * factor for factor in factors)
        return Op(name=name, after=waits, phase=phase, ranks=ranks, durations_us=each)
    return Op(name=name, after=waits, phase=phase, ranks=ranks, duration_us=us * factors[0])


def _training(step: StrategyStep) -> tuple[int, ...]:
    """The ranks of an op that all replicas do: empty where every rank is one."""
    return step.replicas if step.strategy.servers else ()


def exchange_name(message: Message, number: int) -> str:
    """The name of the comm-op of a message's exchange."""
    return f"{message.exchanges[number].kind}{number}-{message.name}"


def _message_ops(message: Message, step: StrategyStep, ready: list[Dep]) -> tuple[list[Op], Op, list[Op]]:
    after = tuple(ready)
    pushes: list[Op] = []
    pulls: list[Op] = []
    update = Op(name=f"update-{message.name}")
    for number, exchange in enumerate(message.exchanges):
        if not exchange.push and not pulls:
            update = _update(message, step, after)
            after = (Dep(op=update.name),)
        if exchange.at_work_us:
            encode = Op(
                name=f"encode-{message.name}", after=after, stream="encode", phase="backward", ranks=_training(step),
                duration_us=exchange.at_work_us,
            )  # fmt: skip
            pushes.append(encode)
            after = (Dep(op=encode.name),)
        groups = exchange.groups
        everyone = len(groups) == 1 and groups[0] == tuple(range(step.num_ranks))
        op = Op(
            name=exchange_name(message, number), kind=exchange.kind, after=after,
            phase="backward" if exchange.push else "optimizer", nbytes=float(exchange.nbytes),
            groups=() if everyone else groups, root=exchange.root, encoding=exchange.encoding,
        )  # fmt: skip
        (pushes if exchange.push else pulls).append(op)
        after = (Dep(op=op.name),)
    return pushes, update if pulls else _update(message, step, after), pulls


def _update(message: Message, step: StrategyStep, after: tuple[Dep, ...]) -> Op:
    nbytes = message.nbytes * message.update_share
    if message.pieces[0].variable.sparse:
        nbytes = sum(piece.rows_bytes for piece in message.pieces)
    return Op(
        name=f"update-{message.name}", after=after, phase="optimizer",
        ranks=tuple(sorted(message.updaters)) or _training(step),
        duration_us=UPDATE_PASSES * nbytes / (MEMORY_GB_PER_S * 1e3),
    )  # fmt: skip


def _units(model: ModelSpec) -> list[list[str]]:
    """Variables that are computed together: each that takes time, with the following ones that take none."""
    units: list[list[str]] = []
    for variable in model.variables:
        if not units or variable.forward_us > 0 or variable.backward_us > 0:
            units.append([])
        units[-1].append(variable.name)
    return units
