# SPDX-License-Identifier: Apache-2.0
"""Synchronizer: the collectives of a message, their groups, and the ranks that update the parameters."""

from __future__ import annotations

from dataclasses import replace

from .step import LocalStep, Message, StepExchange, StrategyStep

Groups = tuple[tuple[int, ...], ...]


class Synchronizer:
    """Gives each message (AllReduce), (Reduce, Broadcast), (ReduceScatter, AllGather), or a sparse AllGather."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Set the exchanges and updaters of every message."""
        made = {
            "all_reduce": _all_reduce, "sparse_all_gather": _gathered, "sharded": _sharded,
            "parameter_server": _served,
        }  # fmt: skip
        messages = tuple(made[message.sync.kind](message, step) for message in step.messages)
        if step.model.runtime == "torch" and _evenly_served(messages, step.num_ranks):
            messages = tuple(_direct(message) for message in messages)
        return replace(step, messages=messages)

    def localize(self, local: LocalStep) -> LocalStep:
        """Keep only this rank's groups, and the messages that it updates."""
        messages = []
        for message in local.messages:
            mine = tuple(
                replace(exchange, groups=tuple(group for group in exchange.groups if local.rank in group))
                for exchange in message.exchanges
            )
            messages.append(replace(message, exchanges=mine))
        updates = tuple(m for m in messages if local.rank in (m.updaters or local.step.replicas))
        return replace(local, messages=tuple(messages), updates=updates)


def _everyone(message: Message, step: StrategyStep) -> Groups:
    order = tuple(step.strategy.rank(name) for name in message.sync.sequence)
    return (order or step.replicas,)


def _all_reduce(message: Message, step: StrategyStep) -> Message:
    groups = _everyone(message, step)
    if not message.sync.transfer:
        one = StepExchange(kind="all_reduce", groups=groups, nbytes=message.nbytes, push=True)
        return replace(message, exchanges=_used(one))
    # With stations, gradients are summed inside hosts, all-reduced between them, and copied back inside.
    inner, outer = _levels(message, step, None)
    return replace(message, exchanges=_used(
        StepExchange(kind="reduce", groups=inner, nbytes=message.nbytes, push=True),
        StepExchange(kind="all_reduce", groups=outer, nbytes=message.nbytes, push=True),
        StepExchange(kind="broadcast", groups=inner, nbytes=message.nbytes, push=True),
    ))  # fmt: skip


def _gathered(message: Message, step: StrategyStep) -> Message:
    total = len(step.replicas) * sum(piece.rows_bytes for piece in message.pieces)
    one = StepExchange(kind="all_gather", groups=_everyone(message, step), nbytes=total, push=True)
    return replace(message, exchanges=_used(one))


def _sharded(message: Message, step: StrategyStep) -> Message:
    groups = _everyone(message, step)
    exchanges = _used(
        StepExchange(kind="reduce_scatter", groups=groups, nbytes=message.nbytes, push=True),
        StepExchange(kind="all_gather", groups=groups, nbytes=message.nbytes, push=False),
    )
    return replace(message, exchanges=exchanges, update_share=1 / len(step.replicas))


def _served(message: Message, step: StrategyStep) -> Message:
    """Exchanges with a server; a sparse gradient goes to it as rows, and each rank gets back the rows that it looks up.

    If ranks have copies of a table (runtime ``torch``), all of them get all changed rows.
    """
    (server,) = (step.strategy.rank(name) for name in message.sync.placement)
    sparse, copied = message.pieces[0].variable.sparse, step.model.runtime == "torch"
    up, down = ("gather", "broadcast" if copied else "scatter") if sparse else ("reduce", "broadcast")
    each = sum(piece.rows_bytes for piece in message.pieces)
    changed = sum(min(piece.rows_bytes * len(step.replicas), piece.table_bytes) for piece in message.pieces)

    def exchange(kind: str, groups: Groups, push: bool, below: int = 1) -> StepExchange:
        # A station passes on the rows of all ranks below it.
        widest = max(map(len, groups), default=0)
        nbytes = float(message.nbytes)
        if sparse:
            nbytes = changed if kind == "broadcast" else each * min(widest * below, step.num_ranks)
        return StepExchange(kind=kind, groups=groups, nbytes=nbytes, push=push)

    if message.sync.transfer:
        inner, outer = _levels(message, step, server)
        below = max(map(len, inner), default=1)
        exchanges = _used(
            exchange(up, inner, True), exchange(up, outer, True, below),
            exchange(down, outer, False, below), exchange(down, inner, False),
        )  # fmt: skip
    else:
        rest = tuple(rank for rank in step.replicas if rank != server)
        exchanges = _used(exchange(up, ((server, *rest),), True), exchange(down, ((server, *rest),), False))
    return replace(message, exchanges=exchanges, updaters=(server,))


def _pushes(message: Message) -> list[StepExchange]:
    """The exchanges by which dense gradients get to a server."""
    served = message.sync.kind == "parameter_server"
    return [one for one in message.exchanges if served and one.push and one.kind == "reduce"]


def _evenly_served(messages: tuple[Message, ...], ranks: int) -> bool:
    """Whether servers share the gradients so evenly that sending them straight there loads no link more than a reduce.

    A library's reduce goes round a ring and then to the root, so that the root gets less and everyone else more. With
    one server for all that is better; where every rank serves its share it is up to a quarter more on every link, and
    the steps of rings that run beside each other wait for one another.
    """
    straight, rings = ([[0.0] * ranks, [0.0] * ranks] for _ in range(2))  # bytes out of each rank, and into it
    for exchange in (one for message in messages for one in _pushes(message)):
        for group in exchange.groups:
            count = len(group)
            for at, rank in enumerate(group):
                root = at == exchange.root
                straight[root][rank] += exchange.nbytes * (count - 1 if root else 1)
                rings[0][rank] += exchange.nbytes * ((count - 1) / count if root else 1)
                rings[1][rank] += exchange.nbytes * (2 if root else 1) * (count - 1) / count
    most = max(map(max, straight))
    return 0 < most <= max(map(max, rings))


def _direct(message: Message) -> Message:
    pushes = _pushes(message)
    exchanges = tuple(replace(one, direct=True) if one in pushes else one for one in message.exchanges)
    return replace(message, exchanges=exchanges)


def _levels(message: Message, step: StrategyStep, server: int | None) -> tuple[Groups, Groups]:
    """Groups around stations, each station first, and the group of all stations and other ranks.

    The server is the station of its own host.
    """
    stations = {step.strategy.rank(name) for name in message.sync.transfer}
    inner: list[tuple[int, ...]] = []
    outer: list[int] = [] if server is None else [server]
    for all_ranks in step.hosts:
        ranks = [rank for rank in all_ranks if rank in (server, *step.replicas)]
        here = [rank for rank in ranks if rank in stations]
        center = server if server in ranks else here[0] if here else None
        if center is None:
            outer += ranks
            continue
        inner += [(center, *(rank for rank in ranks if rank != center))] if len(ranks) > 1 else []
        outer += [center] if center != server else []
    return tuple(inner), (tuple(outer),)


def _used(*exchanges: StepExchange) -> tuple[StepExchange, ...]:
    """The exchanges without groups of one rank, and without exchanges that have no other groups."""
    kept = (
        replace(exchange, groups=tuple(group for group in exchange.groups if len(group) > 1)) for exchange in exchanges
    )
    return tuple(exchange for exchange in kept if exchange.groups and exchange.nbytes > 0)
