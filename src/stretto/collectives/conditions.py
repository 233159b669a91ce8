# SPDX-License-Identifier: Apache-2.0
"""`Collective`: the chunks that every rank holds before a collective, and those that it must hold afterwards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .distinct import all_differ

ALL_PARTS = -1
MAX_RANKS = 1 << 17
MAX_ENTRIES = 1 << 26

Csr = tuple[NDArray[np.int64], NDArray[np.int32]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Collective:
    """Pre- and postcondition over (rank, chunk, parts), with the buffers' layout.

    A *chunk* is a piece of the result; a *part* is one rank's contribution to it. Rank r starts with one
    part of each chunk in its input buffer (``in_chunk[in_ptr[r]:in_ptr[r+1]]`` in buffer order, ``in_part``
    beside it) and must end with the chunks of its output buffer, each made of the parts of ``out_set``:
    ``ALL_PARTS`` (every part the chunk has anywhere) or an index into `part_sets`.
    In place, input position j of rank r *is* output position ``j + place[r]``.

    Ranks are numbered 0..num_ranks-1; ``ranks[r]`` is the cluster's device that rank r runs on.

    A collective that `library` does not have is made with `from_buffers`, or written as a file (`load_collective`).
    It needs no registration: to the verifier, the simulator, the lower bounds and the lowering `kind` is only a name.
    Algorithms and most synthesis makers serve the kinds of `library` only and decline others with an error.
    """

    kind: str
    ranks: tuple[int, ...]
    num_chunks: int
    chunks: int
    """How many chunks one shard (or the whole tensor, where there are no shards) is cut into."""
    in_ptr: NDArray[np.int64]
    in_chunk: NDArray[np.int32]
    in_part: NDArray[np.int32]
    out_ptr: NDArray[np.int64]
    out_chunk: NDArray[np.int32]
    out_set: NDArray[np.int32]
    chunk_share: NDArray[np.float64]
    """Chunk bytes = share x nbytes, where nbytes is the larger of one rank's send and receive buffer."""
    place: NDArray[np.int64]
    part_sets: tuple[tuple[int, ...], ...] = ()
    in_place: bool = False
    root: int = -1
    helpers: int = 0
    """How many of the last ranks are helpers, which hold nothing before and afterwards: they forward and add."""

    def __post_init__(self) -> None:
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        _validate(self)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that take part, helpers among them."""
        return len(self.ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The devices of the group: of all ranks but the helpers."""
        return self.ranks[: len(self.ranks) - self.helpers]

    def with_helpers(self, devices: Sequence[int]) -> Collective:
        """The same collective with other helpers: devices outside the group that may forward and add for it.

        >>> from stretto import AllGather
        >>> AllGather([0, 4]).with_helpers([1, 5])
        <Collective all_gather over 2 ranks and 2 helpers, 2 chunks, out of place>
        """
        extra, count = tuple(int(device) for device in devices), len(self.members)

        def rows(ptr: NDArray[np.int64], add: int) -> NDArray[np.int64]:
            return np.concatenate([ptr[: count + add], np.full(len(extra), ptr[-1] if add else 0, ptr.dtype)])

        return replace(
            self,
            ranks=self.members + extra,
            in_ptr=rows(self.in_ptr, 1),
            out_ptr=rows(self.out_ptr, 1),
            place=rows(self.place, 0),
            helpers=len(extra),
        )

    def without_helpers(self) -> Collective:
        """The collective of the group alone."""
        return self.with_helpers(()) if self.helpers else self

    @cached_property
    def num_parts(self) -> int:
        """One more than the largest part number: parts are numbered 0..num_parts-1 over all chunks."""
        in_sets = (max(s, default=-1) for s in self.part_sets)
        return 1 + max(int(self.in_part.max(initial=-1)), max(in_sets, default=-1))

    @cached_property
    def combining(self) -> bool:
        """Whether any result is made of more than one part (so a reduction is needed)."""
        if any(len(s) > 1 for s in self.part_sets):
            return True
        lowest = np.full(self.num_chunks, self.num_parts, np.int64)
        highest = np.full(self.num_chunks, -1, np.int64)
        np.minimum.at(lowest, self.in_chunk, self.in_part)
        np.maximum.at(highest, self.in_chunk, self.in_part)
        wanted = self.out_chunk[self.out_set == ALL_PARTS]
        return bool(np.any(lowest[wanted] < highest[wanted]))

    def inputs(self, rank: int) -> NDArray[np.int32]:
        """The chunks of a rank's input buffer, in order."""
        return self.in_chunk[self.in_ptr[rank] : self.in_ptr[rank + 1]]

    def outputs(self, rank: int) -> NDArray[np.int32]:
        """The chunks of a rank's output buffer, in order."""
        return self.out_chunk[self.out_ptr[rank] : self.out_ptr[rank + 1]]

    def parts_of(self, output: int) -> tuple[int, ...]:
        """The parts that entry `output` of the postcondition (an index into `out_chunk`) is made of."""
        which = int(self.out_set[output])
        if which != ALL_PARTS:
            return self.part_sets[which]
        return self._parts_by_chunk[int(self.out_chunk[output])]

    @cached_property
    def _parts_by_chunk(self) -> list[tuple[int, ...]]:
        parts: list[set[int]] = [set() for _ in range(self.num_chunks)]
        for chunk, part in zip(self.in_chunk.tolist(), self.in_part.tolist(), strict=True):
            parts[chunk].add(part)
        return [tuple(sorted(p)) for p in parts]

    def chunk_bytes(self, nbytes: float) -> NDArray[np.float64]:
        """The size of each chunk when the collective moves `nbytes`."""
        return self.chunk_share * float(nbytes)

    @cached_property
    def digest(self) -> str:
        """A short hash of the content: equal digests mean equal collectives."""
        import hashlib

        state = hashlib.sha256()
        for key in sorted(self.__dataclass_fields__):
            value = getattr(self, key)
            if key == "helpers" and not value:
                continue  # Collectives without helpers keep the digest of versions that did not know them.
            state.update(key.encode() + b"=")
            state.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return state.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collective) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        root = f", root {self.root}" if self.root >= 0 else ""
        helpers = f" and {self.helpers} helper{'s' * (self.helpers > 1)}" if self.helpers else ""
        return (
            f"<Collective {self.kind} over {len(self.members)} ranks{helpers}{root}, {self.num_chunks} chunks, "
            f"{'in place' if self.in_place else 'out of place'}>"
        )


def as_ranks(ranks: int | Sequence[int]) -> tuple[int, ...]:
    """The devices of a collective from a rank count (devices 0..count-1) or from the devices themselves."""
    if isinstance(ranks, int):
        if not 1 <= ranks <= MAX_RANKS:
            raise InvalidInput(f"ranks: must be 1..{MAX_RANKS}, not {ranks}")
        return tuple(range(ranks))
    try:
        devices = tuple(operator.index(r) for r in ranks)
    except TypeError:
        raise InvalidInput(f"ranks: must be a number of ranks or a list of devices, not {ranks!r}") from None
    if not devices:
        raise InvalidInput("ranks: at least one device must take part")
    return devices


def from_buffers(
    kind: str,
    ranks: tuple[int, ...],
    *,
    chunks: int,
    inputs: Callable[[int], NDArray[np.int64]],
    outputs: Callable[[int], NDArray[np.int64]],
    share: float | NDArray[np.float64],
    num_chunks: int,
    place: Callable[[int], int] = lambda rank: 0,
    part: Callable[[int], int] = lambda rank: rank,
    in_place: bool = False,
    root: int = -1,
) -> Collective:
    """Make a collective from each rank's input and output chunks; every rank contributes one part of each input chunk.

    The four callables are called once per rank, with ranks 0..len(ranks)-1 in order, before this function returns.

    Args:
        kind: The name of the collective, such as "all_gather".
        ranks: The device of each rank; distinct, >= 0.
        chunks: How many chunks one shard (or the whole tensor) is cut into, >= 1.
        inputs: Maps a rank to the distinct chunks 0..num_chunks-1 of its input buffer, in buffer order.
        outputs: Maps a rank to the distinct chunks of its output buffer, in buffer order; each is some rank's input.
        share: The size of a chunk, or of each, as a share of the largest buffer of a rank, > 0.
        num_chunks: How many chunks there are in all, >= 1.
        place: Maps a rank to what is added to an input position to get its output position when run in place.
        part: Maps a rank to the number of the part that it contributes to the chunks of its input.
        in_place: Whether input and output share memory, as `place` says.
        root: The root's rank, -1 where there is none.

    Returns:
        The collective, whose outputs are each made of all parts of their chunk.

    Raises:
        InvalidInput: The numbers do not fit together, or the buffers hold too many chunks.
    """
    count = len(ranks)
    if not 1 <= chunks <= MAX_ENTRIES:
        raise InvalidInput(f"chunks: must be >= 1, not {chunks}")
    if not 1 <= num_chunks <= MAX_ENTRIES:
        raise InvalidInput(f"chunks: {kind} over {count} ranks would have {num_chunks} chunks; at most {MAX_ENTRIES}")
    in_ptr, in_chunk = _csr(f"{kind} over {count} ranks", (inputs(r) for r in range(count)))
    out_ptr, out_chunk = _csr(f"{kind} over {count} ranks", (outputs(r) for r in range(count)))
    return Collective(
        kind=kind,
        ranks=ranks,
        num_chunks=int(num_chunks),  # a NumPy integer would print, and so hash, differently
        chunks=int(chunks),
        in_ptr=in_ptr,
        in_chunk=in_chunk,
        in_part=np.repeat(np.array([part(r) for r in range(count)], np.int32), np.diff(in_ptr)),
        out_ptr=out_ptr,
        out_chunk=out_chunk,
        out_set=np.full(len(out_chunk), ALL_PARTS, np.int32),
        chunk_share=np.broadcast_to(np.asarray(share, np.float64), (num_chunks,)).copy(),
        place=np.array([place(r) for r in range(count)], np.int64),
        in_place=in_place,
        root=root,
    )


def _csr(what: str, rows: Iterable[NDArray[np.int64]]) -> Csr:
    ptr, kept = [0], []
    for row in rows:
        ptr.append(ptr[-1] + len(row))
        if ptr[-1] > MAX_ENTRIES:
            raise InvalidInput(f"ranks, chunks: the buffers of {what} hold over {MAX_ENTRIES} chunks")
        kept.append(row)
    return np.array(ptr, np.int64), np.concatenate(kept).astype(np.int32)


def _validate(collective: Collective) -> None:
    c = collective
    if not 1 <= c.num_ranks <= MAX_RANKS:
        raise InvalidInput(f"ranks: must be 1..{MAX_RANKS} of them, not {c.num_ranks}")
    if min(c.ranks) < 0 or len(set(c.ranks)) != c.num_ranks:
        raise InvalidInput("ranks: must be distinct devices >= 0")
    for side, ptr, chunk, beside in (
        ("inputs", c.in_ptr, c.in_chunk, c.in_part),
        ("outputs", c.out_ptr, c.out_chunk, c.out_set),
    ):
        fits = len(ptr) == c.num_ranks + 1 and ptr[0] == 0 and ptr[-1] == len(chunk) == len(beside)
        if not fits or np.any(np.diff(ptr) < 0):
            raise InvalidInput(f"{side}: pointers, chunks and parts differ in length")
        if np.any((chunk < 0) | (chunk >= c.num_chunks)):
            raise InvalidInput(f"{side}: chunks must be 0..{c.num_chunks - 1}")
        slots = np.repeat(np.arange(c.num_ranks), np.diff(ptr)) * c.num_chunks + chunk
        if not all_differ(slots, c.num_ranks * c.num_chunks):
            raise InvalidInput(f"{side}: a rank holds one chunk twice")
    if not 0 <= c.helpers < c.num_ranks:
        raise InvalidInput(f"helpers: must be 0..{c.num_ranks - 1}, not {c.helpers}")
    if c.helpers and (c.in_ptr[-1 - c.helpers] < c.in_ptr[-1] or c.out_ptr[-1 - c.helpers] < c.out_ptr[-1]):
        raise InvalidInput("helpers: must hold nothing before and afterwards")
    if len(c.chunk_share) != c.num_chunks or not np.all(np.isfinite(c.chunk_share) & (c.chunk_share > 0)):
        raise InvalidInput(f"chunk_share: must be {c.num_chunks} shares > 0")
    if len(c.place) != c.num_ranks:
        raise InvalidInput(f"place: must be {c.num_ranks} offsets, one per rank")
    held = np.zeros(c.num_chunks, np.bool_)
    held[c.in_chunk] = True
    missing = c.out_chunk[~held[c.out_chunk]]
    if len(missing):
        raise InvalidInput(f"outputs: chunk {missing[0]} is wanted but no rank has it at the start")
    if np.any((c.out_set < ALL_PARTS) | (c.out_set >= len(c.part_sets))) or c.in_part.min(initial=0) < 0:
        raise InvalidInput("parts: must be >= 0, and sets must be listed")
    for at, parts in enumerate(c.part_sets):
        if not parts or min(parts) < 0 or max(parts) >= MAX_RANKS or len(set(parts)) != len(parts):
            raise InvalidInput(f"part_sets[{at}]: must be distinct parts 0..{MAX_RANKS - 1}")
