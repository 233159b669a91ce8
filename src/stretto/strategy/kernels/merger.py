"""Merger: pieces of one merge group become one message."""

from __future__ import annotations

from dataclasses import replace

from .step import LocalStep, Message, StrategyStep, VariablePiece

LANES = 8
"""Parts of a cut variable are all-reduced beside each other, on so many communicators."""


class Merger:
    """Joins pieces of equal group numbers, as far as everything else about them is equal too."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Messages in the order in which the backward pass completes them."""
        position = {v.name: at for at, v in enumerate(step.model.variables)}
        joined: dict[object, list[VariablePiece]] = {}
        for piece in step.pieces:
            key: object = (piece.sync, piece.variable.dtype, piece.variable.sparse)
            joined.setdefault(key if piece.sync.group >= 0 else piece.name, []).append(piece)
        # A message is complete with the gradient of the first of its variables in the forward pass.
        ready = sorted(joined.values(), key=lambda pieces: -min(position[p.variable.name] for p in pieces))
        messages = []
        for number, pieces in enumerate(ready):
            first = pieces[0]
            name = first.name if len(pieces) == 1 else f"group{first.sync.group}.{number}"
            lane = 0 if first.whole else first.part.index % LANES
            messages.append(Message(name=name, pieces=tuple(pieces), lane=lane))
        return replace(step, messages=tuple(messages))

    def localize(self, local: LocalStep) -> LocalStep:
        """Messages are the same everywhere."""
        return local
