# SPDX-License-Identifier: Apache-2.0
"""`ImplicitCollective`: a collective of the library over so many ranks that its buffers are written out only when asked
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidInput
from .conditions import MAX_ENTRIES, Collective

MAX_WRITTEN = 1 << 22
"""The most entries of all buffers for which a collective is written out at once."""
MAX_NUMBERED = 1 << 29
"""The most chunks of a collective that is not written out."""
SUMS = ("reduce_scatter", "all_reduce")
"""The collectives that add."""


class ImplicitCollective(Collective):
    """A collective that is known by its name, its ranks and its chunks; its conditions are made when they are read.

    What works with a part of the ranks (`SymmetricProgram`) never reads them. Where all buffers together hold more
    than `MAX_ENTRIES` chunks, reading them is an error.
    """

    @classmethod
    def of(
        cls, kind: str, ranks: tuple[int, ...], *, chunks: int, num_chunks: int, entries: int, in_place: bool,
        write: Callable[[], Collective],
    ) -> Collective:  # fmt: skip
        """Make the collective: written out if it is small.

        Args:
            kind: The name of the collective.
            ranks: The device of each rank.
            chunks: How many chunks one shard (or the whole tensor) is cut into.
            num_chunks: How many chunks there are in all.
            entries: How many chunks the larger buffers of all ranks hold together.
            in_place: Whether input and output share memory.
            write: Makes the collective with its conditions; can be pickled.

        Returns:
            The collective.
        """
        if (
            entries <= MAX_WRITTEN
            or num_chunks > MAX_NUMBERED
            or chunks < 1
            or len(set(ranks)) < len(ranks)
            or min(ranks) < 0
        ):
            return write()
        import hashlib

        made = object.__new__(cls)
        known = {"kind": kind, "ranks": ranks, "chunks": chunks, "num_chunks": num_chunks, "in_place": in_place}
        vars(made).update(known, part_sets=(), root=-1, _write=write, _entries=entries)
        state = hashlib.sha256(repr(sorted(known.items())).encode())
        vars(made).update(digest=state.hexdigest()[:16], num_parts=len(ranks), combining=kind in SUMS)
        return made

    @property
    def implicit(self) -> bool:
        """Whether the conditions follow from the name alone, and have not been changed."""
        return "_write" in vars(self)

    def __getattr__(self, name: str) -> Any:
        if name not in Collective.__dataclass_fields__ or not self.implicit:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if vars(self)["_entries"] > MAX_ENTRIES:
            raise InvalidInput(
                f"ranks, chunks: the buffers of {self.kind} over {self.num_ranks} ranks hold over {MAX_ENTRIES} "
                f"chunks; only symmetric programs serve so many"
            )
        written = vars(self)["_write"]()
        for key in Collective.__dataclass_fields__:
            vars(self).setdefault(key, getattr(written, key))
        return vars(self)[name]
