"""Bridge: how many iterations late parameters may come."""

from __future__ import annotations

from dataclasses import replace

from ...workload.dag import MAX_LAG
from ..representation import ASYNCHRONOUS
from .step import LocalStep, StrategyStep


class Bridge:
    """The next forward pass waits for a synchronous message, the one `staleness` later for a stale one."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Nobody waits for what is asynchronous; a workload says so with the longest lag that it has."""
        messages = []
        for message in step.messages:
            late = message.sync.staleness
            lag = MAX_LAG if late == ASYNCHRONOUS else min(1 + late, MAX_LAG)
            messages.append(replace(message, lag=lag))
        return replace(step, messages=tuple(messages))

    def localize(self, local: LocalStep) -> LocalStep:
        """The limit is the same on every rank."""
        return local
