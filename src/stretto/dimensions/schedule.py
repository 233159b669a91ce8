# SPDX-License-Identifier: Apache-2.0
"""`DimSchedule`: which dimension each chunk of a collective visits when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput, unknown
from ..late import LateFunction
from .model import AG, COLLECTIVES, MOST_BYTES, RS, STEADY_CHUNKS, Dim, check_dims, ideal_us

DISCIPLINES = ("fifo", "scf", "johnson", "enforced")
MAX_CHUNKS = 1 << 16

LOAD: LateFunction[[str | Path], DimSchedule] = LateFunction("dimensions.files.load")
SAVE: LateFunction[[DimSchedule, str | Path], None] = LateFunction("dimensions.files.save")
DIGEST: LateFunction[[DimSchedule], str] = LateFunction("dimensions.files.digest")


@dataclass(frozen=True, kw_only=True)
class DimChunk:
    """A chunk: its share of the data, and the dimensions of its reduce-scatter and of its all-gather stages."""

    share: float
    reduce_scatter: tuple[int, ...] = ()
    all_gather: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """The dimensions that the chunk visits, in order."""
        return self.reduce_scatter + self.all_gather


@dataclass(frozen=True, kw_only=True)
class DimSchedule:
    """The chunks of one collective of `nbytes`, and how each dimension chooses among the chunks that wait for it.

    The discipline ``fifo`` takes the chunk that came first, ``scf`` the smallest (by its size before the stage, then by
    what it sends), ``johnson`` the chunk whose stage here is shortest compared with its next stage (which then keeps
    the next dimension busy). Where there is an `order`, each dimension begins its (chunk, stage) pairs in that order
    and no other, so that devices can never disagree; the discipline then only says which of the stages in flight sends
    first: with ``enforced`` the one that comes first in the order, as plain links do.
    """

    name: str
    dims: tuple[Dim, ...]
    collective: str
    nbytes: float
    chunks: tuple[DimChunk, ...]
    discipline: str = "fifo"
    order: tuple[tuple[tuple[int, int], ...], ...] = field(default=())

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def load(cls, path: str | Path) -> DimSchedule:
        """Read a schedule from its JSON file; `InvalidInput` names the bad field."""
        return LOAD(path)

    def save(self, path: str | Path) -> None:
        """Write the versioned JSON form, with its digest."""
        SAVE(self, path)

    @cached_property
    def digest(self) -> str:
        """A short hash of everything that devices have to agree about."""
        return DIGEST(self)

    @cached_property
    def stages(self) -> Stages:
        """The stages of all chunks, as arrays."""
        return _stages(self)

    @property
    def ideal_us(self) -> float:
        """A time in microseconds that no schedule of this collective can beat."""
        return ideal_us(self.dims, self.collective, self.nbytes)

    def __repr__(self) -> str:
        from ..units import format_bytes

        sizes = "x".join(str(dim.size) for dim in self.dims)
        ways = len({chunk.stages for chunk in self.chunks})
        return (
            f"<DimSchedule {self.name}: {self.collective} of {format_bytes(self.nbytes)} over {sizes}, "
            f"{len(self.chunks)} chunks on {ways} way{'s' if ways > 1 else ''}, {self.discipline}>"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """All stages of all chunks in arrays: stage k of chunk c is row ``chunk_ptr[c] + k``."""

    chunk_ptr: NDArray[np.int64]
    dim: NDArray[np.int32]
    before_bytes: NDArray[np.float64]
    wire_bytes: NDArray[np.float64]
    latency_us: NDArray[np.float64]

    @cached_property
    def chunk(self) -> NDArray[np.int64]:
        """The chunk of each row."""
        return np.repeat(np.arange(len(self.chunk_ptr) - 1), np.diff(self.chunk_ptr))


def _stages(schedule: DimSchedule) -> Stages:
    known: dict[DimChunk, tuple[list[float], list[float]]] = {}
    dims = schedule.dims
    count = math.prod(d.size for d in dims)
    dim: list[int] = []
    before: list[float] = []
    wire: list[float] = []
    alone = schedule.collective != "all_reduce"
    for chunk in schedule.chunks:
        if chunk not in known:
            size = schedule.nbytes * chunk.share / (1 if chunk.reduce_scatter else count)
            sizes, sent = [], []
            for stage, order in ((RS, chunk.reduce_scatter), (AG, chunk.all_gather)):
                for at in order:
                    sizes.append(size)
                    sent.append(dims[at].wire_bytes(stage, size, alone=alone))
                    size = dims[at].after(stage, size)
            known[chunk] = sizes, sent
        dim += chunk.stages
        before += known[chunk][0]
        wire += known[chunk][1]
    where = np.array(dim, np.int32)
    each = len(dim) // len(schedule.chunks)
    return Stages(
        chunk_ptr=np.arange(0, len(dim) + 1, each, dtype=np.int64), dim=where, before_bytes=np.array(before),
        wire_bytes=np.array(wire), latency_us=np.array([d.latency_us for d in dims])[where],
    )  # fmt: skip


def _validate(s: DimSchedule) -> None:
    if s.collective not in COLLECTIVES:
        raise unknown("collective", s.collective, COLLECTIVES)
    if s.discipline not in DISCIPLINES:
        raise unknown("discipline", s.discipline, DISCIPLINES)
    check_dims(s.dims)
    if not 0 < s.nbytes <= MOST_BYTES:
        raise InvalidInput(f"nbytes: must be > 0 and at most {MOST_BYTES:g}, not {s.nbytes:g}")
    if not 1 <= len(s.chunks) <= MAX_CHUNKS:
        raise InvalidInput(f"chunks: must be 1..{MAX_CHUNKS}, not {len(s.chunks)}")
    if s.collective == "all_reduce" and len(s.chunks) < STEADY_CHUNKS and any(dim.in_network for dim in s.dims):
        raise InvalidInput(f"chunks: must be >= {STEADY_CHUNKS} where switches reduce, not {len(s.chunks)}")
    _check_chunks(s)
    if s.order:
        _check_order(s)
    elif s.discipline == "enforced":
        raise InvalidInput("order: must not be empty with the discipline enforced")


def _check_chunks(s: DimSchedule) -> None:
    everywhere = list(range(len(s.dims)))
    wanted = {RS: s.collective != AG, AG: s.collective != RS}
    good: set[DimChunk] = set()
    for at, chunk in enumerate(s.chunks):
        if chunk in good:
            continue
        if not 0 < chunk.share <= 1 + 1e-9:
            raise InvalidInput(f"chunks[{at}].share: must be > 0 and at most 1, not {chunk.share:g}")
        for key, needed in wanted.items():
            order = getattr(chunk, key)
            if sorted(order) != (everywhere if needed else []):
                what = f"each of the {len(s.dims)} dimensions once" if needed else "empty"
                raise InvalidInput(f"chunks[{at}].{key}: must be {what} for {s.collective}, not {list(order)}")
        good.add(chunk)
    total = math.fsum(chunk.share for chunk in s.chunks)
    if abs(total - 1) > 1e-9:
        raise InvalidInput(f"chunks: their shares must add up to 1, not {total:g}")


def _check_order(s: DimSchedule) -> None:
    """Check that each stage is listed once, in its dimension, and that no stages wait for each other in a circle.

    A runtime that keeps to the order can then never be stuck.
    """
    if len(s.order) != len(s.dims):
        raise InvalidInput(f"order: one list for each of the {len(s.dims)} dimensions, not {len(s.order)}")
    told = {(d, pair) for d, order in enumerate(s.order) for pair in order}
    have = {(d, (c, k)) for c, chunk in enumerate(s.chunks) for k, d in enumerate(chunk.stages)}
    if told != have or sum(map(len, s.order)) != len(have):
        raise InvalidInput("order: must name every stage of every chunk once, in its dimension")
    done = [0] * len(s.chunks)
    at = [0] * len(s.dims)
    turn = list(range(len(s.dims)))
    while turn:
        d = turn.pop()
        while at[d] < len(s.order[d]) and done[s.order[d][at[d]][0]] == s.order[d][at[d]][1]:
            chunk = s.order[d][at[d]][0]
            at[d] += 1
            done[chunk] += 1
            if done[chunk] < len(s.chunks[chunk].stages):
                turn.append(s.chunks[chunk].stages[done[chunk]])
    stuck = next((d for d, order in enumerate(s.order) if at[d] < len(order)), None)
    if stuck is not None:
        chunk, stage = s.order[stuck][at[stuck]]
        raise InvalidInput(f"order[{stuck}][{at[stuck]}]: stage {stage} of chunk {chunk} can never begin (a circle)")
