# SPDX-License-Identifier: Apache-2.0
"""Replicator: the devices that hold a replica, and which of them share a host."""

from __future__ import annotations

from dataclasses import replace

from .step import LocalStep, StrategyStep


class Replicator:
    """Gives every device of the strategy a replica, which computes the whole step on its part of the batch."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Find the device of each rank, and the ranks of each host."""
        place = {name: at for at, name in enumerate(step.there.devices)}
        ranks = tuple(place[name] for name in step.strategy.devices)
        hosts: dict[int, list[int]] = {}
        for rank, device in enumerate(ranks):
            hosts.setdefault(step.there.hosts[device], []).append(rank)
        return replace(step, ranks=ranks, hosts=tuple(map(tuple, hosts.values())))

    def localize(self, local: LocalStep) -> LocalStep:
        """Return the step unchanged: every rank has a replica."""
        return local
