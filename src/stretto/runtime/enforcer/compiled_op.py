# SPDX-License-Identifier: Apache-2.0
"""An op for one size: its motifs as a carrier has loaded them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .memory import RowLayout
from .pieces import OpBinding


class LoadedMotif(Protocol):
    """A motif made ready for one carrier, which may keep in it whatever it needs."""

    @property
    def layout(self) -> RowLayout:
        """The pieces of the op's memory that it reads and writes."""


@dataclass(frozen=True, kw_only=True)
class CompiledOp:
    """An op for one number of elements: what runs for each of its motifs."""

    tasks: OpBinding
    loaded: Mapping[int, LoadedMotif | None]
    """By the motifs' numbers; None where a small payload leaves nothing to do."""
    only: LoadedMotif | None
    """Its only motif, where that works in place on the op's own memory, in one piece."""

    @classmethod
    def of(cls, tasks: OpBinding, loaded: Mapping[int, LoadedMotif | None]) -> CompiledOp:
        """With `only` worked out once, as it is asked for in every call."""
        found = next(iter(loaded.values())) if len(loaded) == 1 and not tasks.room else None
        in_one_piece = found is not None and found.layout.place is not None
        return cls(tasks=tasks, loaded=loaded, only=found if in_one_piece else None)
