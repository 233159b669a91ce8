"""Partitioner: variables cut into pieces, each of which is synchronised by itself."""

from __future__ import annotations

from dataclasses import replace

from .step import LocalStep, StrategyStep, VariablePiece


class Partitioner:
    """Cuts variables, their gradients and their updates; what reads a variable reads it stitched together."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Pieces in the order of the forward pass."""
        pieces = []
        for variable in step.model.variables:
            found = list(step.strategy.node(variable.name).syncs(variable))
            pieces += [
                VariablePiece(variable=variable, part=part, sync=sync, whole=len(found) == 1) for part, sync in found
            ]
        return replace(step, pieces=tuple(pieces))

    def localize(self, local: LocalStep) -> LocalStep:
        """Every rank stitches every variable together."""
        return local
