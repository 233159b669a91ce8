# SPDX-License-Identifier: Apache-2.0
"""Partitioner: cuts variables into pieces, each of which is synchronized by itself."""

from __future__ import annotations

from dataclasses import replace

from .step import LocalStep, StrategyStep, VariablePiece


class Partitioner:
    """Cuts variables, their gradients and their updates; ops that read a variable read all its pieces."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Make the pieces, in the order of the forward pass."""
        pieces = []
        for variable in step.model.variables:
            found = list(step.strategy.node(variable.name).syncs(variable))
            pieces += [
                VariablePiece(variable=variable, part=part, sync=sync, whole=len(found) == 1) for part, sync in found
            ]
        return replace(step, pieces=tuple(pieces))

    def localize(self, local: LocalStep) -> LocalStep:
        """Return the step unchanged: every rank reads every variable."""
        return local
