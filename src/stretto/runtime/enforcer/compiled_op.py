# SPDX-License-Identifier: Apache-2.0
"""An op for one size: its motifs as a carrier has loaded them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .binding import OpBinding
from .memory import RowLayout


class CompiledMotif(Protocol):
    """A motif made ready for one carrier, which may keep in it whatever it needs."""

    @property
    def layout(self) -> RowLayout:
        """The pieces of the op's memory that it reads and writes."""


@dataclass(frozen=True, kw_only=True)
class CompiledOp:
    """An op for one number of elements: what runs for each of its motifs."""

    motifs: Mapping[int, CompiledMotif | None]
    """By their numbers; None where a small payload leaves nothing to do."""
    room: int
    """The elements of memory that motifs need for what is only passed on."""
    averages: bool
    """Whether every reduction is one over all ranks, which can be an average; else sums are divided at the end."""
    only: CompiledMotif | None
    """The op's only motif, where that works in place on the op's own memory, in one piece."""

    @classmethod
    def of(cls, binding: OpBinding, motifs: Mapping[int, CompiledMotif | None]) -> CompiledOp:
        """With `only` worked out once, as it is asked for in every call."""
        found = next(iter(motifs.values())) if len(motifs) == 1 and not binding.room else None
        in_one_piece = found is not None and found.layout.place is not None
        only = found if in_one_piece else None
        return cls(motifs=motifs, room=binding.room, averages=binding.averages, only=only)
