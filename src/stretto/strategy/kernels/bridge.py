# SPDX-License-Identifier: Apache-2.0
"""Bridge: how many iterations late parameters may arrive."""

from __future__ import annotations

from dataclasses import replace

from ...workload.dag import MAX_LAG
from ..representation import ASYNCHRONOUS
from .step import LocalStep, StrategyStep


class Bridge:
    """Sets the lag of messages: the next forward pass waits for a synchronous message, a later
    one for a stale message.
    """

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Set each message's lag to 1 + staleness; no pass waits for asynchronous messages,
        which get the largest lag.
        """
        messages = []
        for message in step.messages:
            late = message.sync.staleness
            lag = MAX_LAG if late == ASYNCHRONOUS else min(1 + late, MAX_LAG)
            messages.append(replace(message, lag=lag))
        return replace(step, messages=tuple(messages))

    def localize(self, local: LocalStep) -> LocalStep:
        """Return the step unchanged: the lag is the same on every rank."""
        return local
