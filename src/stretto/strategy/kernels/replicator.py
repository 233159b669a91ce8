"""Replicator: which devices hold a replica, and which of them share a host."""

from __future__ import annotations

from dataclasses import replace

from .step import LocalStep, StrategyStep


class Replicator:
    """Every device of the strategy computes the whole step on its part of the batch."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Ranks by host, in the strategy's numbers."""
        place = {name: at for at, name in enumerate(step.there.devices)}
        ranks = tuple(place[name] for name in step.strategy.devices)
        hosts: dict[int, list[int]] = {}
        for rank, device in enumerate(ranks):
            hosts.setdefault(step.there.hosts[device], []).append(rank)
        return replace(step, ranks=ranks, hosts=tuple(map(tuple, hosts.values())))

    def localize(self, local: LocalStep) -> LocalStep:
        """Every rank has a replica."""
        return local
