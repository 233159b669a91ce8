# SPDX-License-Identifier: Apache-2.0
"""Collectives by name: the few words that rebuild a collective of the library exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...collectives import COLLECTIVES, ROOTED, Collective
from ...collectives.implicit import ImplicitCollective
from ...errors import InvalidInput, StrettoError, unknown

MAX_ENTRIES = 1 << 24
"""The most buffer positions (over all ranks) that a file may ask for."""
LEAST_ENTRIES = 1 << 16
ENTRIES_PER_CHARACTER = 64
MAX_COUNT_UNIT = 4096


def entries_for(text: str) -> int:
    """The most buffer positions that a program of this text may have.

    A program names every chunk that it moves. Ranges make that short, but not without limit: a few words that ask for
    millions of positions are refused before memory is taken for them.
    """
    return min(MAX_ENTRIES, max(LEAST_ENTRIES, ENTRIES_PER_CHARACTER * len(text)))


@dataclass(frozen=True, kw_only=True)
class NamedCollective:
    """The arguments from which the library makes a collective."""

    kind: str
    ranks: tuple[int, ...]
    chunks: int
    root: int = -1
    in_place: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    counts: tuple[tuple[float, ...], ...] = ()
    helpers: tuple[int, ...] = ()

    def build(self, entries: int = MAX_ENTRIES) -> Collective:
        """Build the collective, unless it has more than `entries` buffer positions, which is checked beforehand."""
        if self.kind not in COLLECTIVES:
            raise unknown("collective", self.kind, COLLECTIVES)
        n = len(self.ranks)
        if not 1 <= self.chunks <= entries:
            raise InvalidInput(f"chunks: must be 1..{entries}, not {self.chunks}")
        shards = {"all_to_all": n * n, "all_to_all_v": n * n}.get(self.kind, 1)
        if self.kind in ("all_gather", "reduce_scatter", "gather", "scatter"):
            shards = n
        per_rank = self.chunks * (n if shards > n else shards)
        if n * per_rank > entries:
            what = f"{n} ranks with {per_rank} chunks each is more than {entries}"
            raise InvalidInput(f"chunks: {what}{'' if entries == MAX_ENTRIES else ' in a program of this size'}")
        options: dict[str, Any] = {"chunks": self.chunks, "in_place": self.in_place}
        if self.kind in ROOTED:
            options["root"] = self.root
        if self.kind == "permute":
            options["pairs"] = self.pairs
        if self.kind == "all_to_all_v":
            options["counts"] = self.counts
        built = COLLECTIVES[self.kind](self.ranks, **options)
        return built.with_helpers(self.helpers) if self.helpers else built


def name_of(collective: Collective) -> NamedCollective | None:
    """The arguments from which the library makes exactly this collective, or None if there are none."""
    c = collective.without_helpers()
    if isinstance(c, ImplicitCollective) and c.implicit:
        return NamedCollective(kind=c.kind, ranks=c.ranks, chunks=c.chunks, in_place=c.in_place)
    if c.kind not in COLLECTIVES:
        return None
    first = c.num_chunks // c.chunks
    pairs: list[tuple[int, int]] = []
    counts: list[list[float]] = []
    if c.kind in ("all_to_all_v", "permute"):
        sender = _holders(c, c.in_ptr, c.in_chunk)
        receiver = _holders(c, c.out_ptr, c.out_chunk)
        pairs = [(sender.get(i * c.chunks, 0), receiver.get(i * c.chunks, 0)) for i in range(first)]
        if c.kind == "all_to_all_v":
            counts = [[0.0] * c.num_ranks for _ in range(c.num_ranks)]
            size = _whole_numbers(c.chunk_share[:: c.chunks] * c.chunks).tolist()
            for (a, b), share in zip(pairs, size, strict=True):
                counts[a][b] = share
            pairs = []
    named = NamedCollective(
        kind=c.kind,
        ranks=c.ranks,
        chunks=c.chunks,
        root=c.root,
        in_place=c.in_place,
        pairs=tuple(pairs),
        counts=tuple(map(tuple, counts)),
        helpers=collective.ranks[c.num_ranks :],
    )
    try:
        return named if named.build() == collective else None
    except StrettoError:
        return None


def refuse_helpers(collective: Collective, runtime: str) -> None:
    """Refuse a program with helpers for a runtime in which every rank has the buffers of the collective."""
    if collective.helpers:
        devices = ", ".join(map(str, collective.ranks[-collective.helpers :][:8]))
        raise InvalidInput(
            f"helpers: devices {devices}{', ...' * (collective.helpers > 8)} are outside the group, and {runtime} has "
            "no ranks without buffers; write a .txt file, or search with helpers 'none'"
        )


def _holders(c: Collective, ptr: np.ndarray[Any, Any], chunk: np.ndarray[Any, Any]) -> dict[int, int]:
    rank = np.repeat(np.arange(c.num_ranks), np.diff(ptr))
    return dict(zip(chunk.tolist(), rank.tolist(), strict=True))


def _whole_numbers(shares: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same proportions in small whole numbers, which can be written exactly, or unchanged if there are none."""
    for unit in range(1, MAX_COUNT_UNIT + 1):
        scaled = shares * unit
        if np.all(np.abs(scaled - np.round(scaled)) < 1e-9):
            return np.round(scaled)
    return shares
