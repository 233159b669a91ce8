# SPDX-License-Identifier: Apache-2.0
"""`Program`: an algorithm as transfers in arrays, independent of how ranks execute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _native
from ..collectives import Collective
from ..collectives.distinct import all_differ
from ..errors import InvalidInput
from ..late import LateFunction

if TYPE_CHECKING:
    from .lowered import Lowered
    from .verify import VerificationReport

MAX_TRANSFERS = 1 << 28

VERIFY: LateFunction[[Program], VerificationReport] = LateFunction("programs.verify.verify")
LOWER: LateFunction[..., Lowered] = LateFunction("programs.lower.lower")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Program:
    """The transfers that carry out a collective, with what each waits for.

    Every rank has one slot per chunk. Transfer t sends the chunks ``chunk[chunk_ptr[t]:chunk_ptr[t+1]]``
    in one message from rank ``src[t]`` to ``dst[t]``, where they replace what the slots hold, or with
    ``reduce[t]`` are added to it. It starts (reads its source) once every transfer of ``after`` has finished;
    it finishes (writes its destination) once it has arrived and every transfer of ``gate`` is done with the
    destination rank: has read from it, if it sends from there, or has written to it, if it delivers there.
    Transfers between the same two ranks on the same `lane` stay in program order (a FIFO connection).
    ``route[t]`` is an index into `routes` (link indices of the cluster with `routes_digest`), or -1: the
    cluster's own route. Array order is priority where two transfers could start at the same moment.
    Transfers with the same ``cast[t] >= 0`` are one multicast message: the same chunks from the same rank after the
    same transfers, copied to different ranks. They start together and travel once over the links that their routes
    begin with in common, until a switch that multicasts parts them.
    """

    name: str
    collective: Collective
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    reduce: NDArray[np.bool_]
    chunk_ptr: NDArray[np.int64]
    chunk: NDArray[np.int32]
    after_ptr: NDArray[np.int64]
    after: NDArray[np.int32]
    gate_ptr: NDArray[np.int64]
    gate: NDArray[np.int32]
    lane: NDArray[np.int16]
    route: NDArray[np.int32]
    routes: tuple[tuple[int, ...], ...] = ()
    routes_digest: str = ""
    cast: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if len(self.cast) == 0:
            object.__setattr__(self, "cast", np.broadcast_to(np.int32(-1), len(self.src)))
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        _validate(self)

    @classmethod
    def from_steps(
        cls,
        name: str,
        collective: Collective,
        *,
        src: ArrayLike,
        dst: ArrayLike,
        chunk: ArrayLike,
        step: ArrayLike,
        reduce: ArrayLike = False,
        chunk_ptr: ArrayLike | None = None,
        lane: ArrayLike = 0,
        route: ArrayLike | None = None,
        routes: Sequence[tuple[int, ...]] = (),
        routes_digest: str = "",
        cast: ArrayLike | None = None,
    ) -> Program:
        """Make a program from synchronous steps: all transfers of a step read before any of them writes.

        The steps only define meaning; the dependencies derived from them are the least that keep it, so nothing waits
        for a step to end. Transfers are sorted by step (the order inside a step is kept). Columns have one entry per
        transfer; `step`, `reduce`, `lane`, `route` and `cast` also take one number for all.

        Args:
            name: The program's name.
            collective: The collective that the program is to carry out.
            src: The rank that sends each transfer.
            dst: The rank that receives it; another one than `src`.
            chunk: The chunks of all transfers, one after the other.
            step: The step of each transfer.
            reduce: Whether the receiver adds the chunks to its own.
            chunk_ptr: Transfer t moves ``chunk[chunk_ptr[t]:chunk_ptr[t+1]]``; one chunk each when not given.
            lane: The connection between the two ranks, >= 0; one connection keeps the order of its messages.
            route: An index into `routes`, or -1 for the cluster's own route.
            routes: Routes as link indices of a cluster.
            routes_digest: The `digest` of the cluster that `routes` belong to.
            cast: Transfers with the same number >= 0 are one multicast; -1, or not given, for none.

        Returns:
            The program; it is checked for form, not verified.

        Raises:
            InvalidInput: A rank, a chunk or a length is not valid.

        >>> from stretto import AllGather
        >>> p = Program.from_steps("pair", AllGather(2), src=[0, 1], dst=[1, 0], chunk=[0, 1], step=[0, 0])
        >>> p
        <Program pair: all_gather over 2 ranks, 2 transfers, 0 dependencies, 1 lane>
        """
        sources = column("src", src, np.int32)
        count = len(sources)
        chunks = column("chunk", chunk, np.int32)
        ptr = np.arange(count + 1) if chunk_ptr is None else column("chunk_ptr", chunk_ptr, np.int64)
        steps = column("step", step, np.int64, count)
        columns: dict[str, NDArray[Any]] = {
            "src": sources,
            "dst": column("dst", dst, np.int32),
            "reduce": column("reduce", reduce, np.bool_, count),
            "lane": column("lane", lane, np.int16, count),
            "route": column("route", -1 if route is None else route, np.int32, count),
        }
        if cast is not None:
            columns["cast"] = column("cast", cast, np.int32, count)
        _check_columns(collective, columns["src"], columns["dst"], ptr, chunks)
        if np.any(np.diff(steps) < 0):
            order = np.argsort(steps, kind="stable")
            columns = {key: value[order] for key, value in columns.items()}
            ptr, chunks = take_rows(ptr, chunks, order)
            steps = steps[order]
        rows = np.diff(ptr)
        ranks_and_chunks = [(np.repeat(columns[end], rows), chunks) for end in ("src", "dst")]
        number, (src_slot, dst_slot) = slot_numbers(collective.num_ranks, collective.num_chunks, ranks_and_chunks)
        after_ptr, after, gate_ptr, gate, _ = _native.derive_dependencies(
            collective.num_ranks * collective.num_chunks if number is None else len(number),
            columns["reduce"],
            ptr,
            src_slot,
            dst_slot,
            steps,
        )
        return cls(
            name=name,
            collective=collective,
            chunk_ptr=ptr,
            chunk=chunks,
            after_ptr=after_ptr,
            after=after,
            gate_ptr=gate_ptr,
            gate=gate,
            routes=tuple(routes),
            routes_digest=routes_digest,
            **columns,
        )

    @property
    def num_transfers(self) -> int:
        """The number of transfers, which is the number of messages."""
        return len(self.src)

    @cached_property
    def num_lanes(self) -> int:
        """One more than the largest lane: lanes are numbered 0..num_lanes-1."""
        return int(self.lane.max(initial=0)) + 1

    @cached_property
    def multicasts(self) -> bool:
        """Whether any transfers belong to a multicast."""
        return bool(np.any(self.cast >= 0))

    def chunks_of(self, transfer: int) -> NDArray[np.int32]:
        """The chunks that one transfer moves."""
        return self.chunk[self.chunk_ptr[transfer] : self.chunk_ptr[transfer + 1]]

    def after_of(self, transfer: int) -> NDArray[np.int32]:
        """The transfers that must have finished before this transfer starts."""
        return self.after[self.after_ptr[transfer] : self.after_ptr[transfer + 1]]

    def gate_of(self, transfer: int) -> NDArray[np.int32]:
        """The transfers that must be done with the destination before this transfer writes to it."""
        return self.gate[self.gate_ptr[transfer] : self.gate_ptr[transfer + 1]]

    @property
    def gate_reads(self) -> NDArray[np.bool_]:
        """For each entry of `gate`: whether that transfer sends from the destination (and must have read its slots)
        rather than delivers there."""
        reads: NDArray[np.bool_] = self.src[self.gate] == np.repeat(self.dst, np.diff(self.gate_ptr))
        return reads

    def transfer_bytes(self, nbytes: float) -> NDArray[np.float64]:
        """The size of each transfer when the collective moves `nbytes`."""
        sizes = self.collective.chunk_bytes(nbytes)[self.chunk]
        if len(sizes) == self.num_transfers:
            return sizes
        summed: NDArray[np.float64] = np.add.reduceat(sizes, self.chunk_ptr[:-1])
        return summed

    def verify(self) -> VerificationReport:
        """Prove that the program does what its collective asks; raises `VerificationError` if not."""
        return self._report

    @cached_property
    def _report(self) -> VerificationReport:
        return VERIFY(self)

    def lower(self, **options: Any) -> Lowered:
        """Per-rank instruction streams; see `stretto.programs.lower.lower`."""
        return LOWER(self, **options)

    def replace(self, **changes: Any) -> Program:
        """A copy with some fields changed, validated anew."""
        fields = {key: getattr(self, key) for key in self.__dataclass_fields__}
        if not self.multicasts:
            del fields["cast"]  # The default fits, also where the copy has another number of transfers.
        return Program(**(fields | changes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return all(_same(getattr(self, key), getattr(other, key)) for key in self.__dataclass_fields__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lanes = f"{self.num_lanes} lane{'s' * (self.num_lanes > 1)}"
        c = self.collective
        ranks = f"{len(c.members)} ranks" + (f" and {c.helpers} helper{'s' * (c.helpers > 1)}" if c.helpers else "")
        return (
            f"<Program {self.name}: {c.kind} over {ranks}, "
            f"{self.num_transfers} transfers, {len(self.after) + len(self.gate)} dependencies, {lanes}>"
        )


def column(name: str, values: ArrayLike, dtype: Any, count: int | None = None) -> NDArray[Any]:
    """Convert numbers to an array.

    Args:
        name: The column, for messages.
        values: A list, or one number that stands for all where `count` is given.
        dtype: The NumPy type of the result.
        count: How many numbers there must be; any number of them when not given.

    Returns:
        A contiguous one-dimensional array.

    Raises:
        InvalidInput: The values are not numbers of that type, or not `count` of them.
    """
    try:
        array = np.asarray(values, dtype)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInput(f"{name}: must be numbers of type {np.dtype(dtype).name}") from None
    if array.ndim == 0 and count is not None:
        return np.full(count, array)
    if array.ndim != 1 or (count is not None and len(array) != count):
        raise InvalidInput(f"{name}: must be a list of {'' if count is None else f'{count} '}numbers")
    return np.ascontiguousarray(array)


def slot_numbers(
    num_ranks: int, num_chunks: int, uses: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]]
) -> tuple[NDArray[np.int64] | None, list[NDArray[np.int32]]]:
    """Number the (rank, chunk) slots that are used, densely where only a few of all slots are.

    Args:
        num_ranks: How many ranks there are.
        num_chunks: How many chunks there are.
        uses: Arrays (rank, chunk) of slots, of equal length each.

    Returns:
        The table from slot number to rank * num_chunks + chunk, or None where the number is just that; and for each of
        `uses` the slot numbers.
    """
    keys = [rank.astype(np.int64) * num_chunks + chunk for rank, chunk in uses]
    if num_ranks * num_chunks <= 4 * sum(len(key) for key in keys) + 1024:
        return None, [key.astype(np.int32) for key in keys]
    table, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    return table, np.split(inverse.astype(np.int32), np.cumsum([len(key) for key in keys])[:-1])


def take_rows(
    ptr: NDArray[np.int64], values: NDArray[np.int32], rows: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The CSR table that holds the given rows of another, in that order.

    Args:
        ptr: The pointers of the table, one more than rows.
        values: The entries of the table.
        rows: The rows to take; a row may be taken several times.

    Returns:
        The pointers and the entries of the new table.
    """
    _, index = row_index(ptr, rows)
    return np.concatenate([[0], np.cumsum(np.diff(ptr)[rows])]), values[index]


def row_index(ptr: NDArray[np.int64], rows: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The entries of the given rows of a CSR table: for each the place of its row in `rows`, and its index."""
    lengths = np.diff(ptr)[rows]
    starts = np.cumsum(lengths) - lengths
    index = np.repeat(ptr[:-1][rows] - starts, lengths) + np.arange(lengths.sum())
    return np.repeat(np.arange(len(rows)), lengths), index


def _same(a: object, b: object) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else a == b


def _check_columns(
    collective: Collective, src: NDArray[Any], dst: NDArray[Any], ptr: NDArray[Any], chunk: NDArray[Any]
) -> None:
    count, ranks = len(src), collective.num_ranks
    if count > MAX_TRANSFERS:
        raise InvalidInput(f"transfers: at most {MAX_TRANSFERS}, not {count}")
    if len(dst) != count or len(ptr) != count + 1:
        raise InvalidInput("transfers: src, dst and chunks differ in length")
    for key, ends in (("src", src), ("dst", dst)):
        bad = np.flatnonzero((ends < 0) | (ends >= ranks))
        if len(bad):
            raise InvalidInput(f"transfers[{bad[0]}].{key}: must be a rank 0..{ranks - 1}, not {ends[bad[0]]}")
    same = np.flatnonzero(src == dst)
    if len(same):
        raise InvalidInput(f"transfers[{same[0]}]: rank {src[same[0]]} cannot send to itself")
    lengths = np.diff(ptr)
    if np.any(lengths <= 0) or ptr[0] != 0 or ptr[-1] != len(chunk):
        raise InvalidInput("transfers: each must move at least one chunk")
    bad = np.flatnonzero((chunk < 0) | (chunk >= collective.num_chunks))
    if len(bad):
        raise InvalidInput(f"transfers: chunk {chunk[bad[0]]} does not exist; there are {collective.num_chunks}")
    if len(chunk) > count:
        owner = np.repeat(np.arange(count, dtype=np.int64), lengths)
        slots = owner * collective.num_chunks + chunk
        if not all_differ(slots, count * collective.num_chunks):
            slots.sort()
            at, twice = divmod(int(slots[np.flatnonzero(slots[1:] == slots[:-1])[0]]), collective.num_chunks)
            raise InvalidInput(f"transfers[{at}]: moves chunk {twice} twice")


def check_table(name: str, ptr: NDArray[Any], other: NDArray[Any], count: int) -> None:
    """Refuse arrays that are not a CSR table of `count` rows whose entries are transfers.

    Args:
        name: The table, for messages.
        ptr: The pointers.
        other: The entries.
        count: How many transfers, and so rows, there are.

    Raises:
        InvalidInput: The pointers do not fit the entries, or an entry is not a transfer 0..count-1.
    """
    if len(ptr) != count + 1 or ptr[0] != 0 or ptr[-1] != len(other) or np.any(np.diff(ptr) < 0):
        raise InvalidInput(f"{name}: pointers do not match the list")
    bad = np.flatnonzero((other < 0) | (other >= count))
    if len(bad):
        raise InvalidInput(f"{name}: transfer {other[bad[0]]} does not exist; there are {count}")


def _validate(program: Program) -> None:
    p = program
    count = p.num_transfers
    _check_columns(p.collective, p.src, p.dst, p.chunk_ptr, p.chunk)
    for key in ("reduce", "lane", "route", "cast"):
        if len(getattr(p, key)) != count:
            raise InvalidInput(f"transfers: {key} has {len(getattr(p, key))} entries, not {count}")
    check_table("after", p.after_ptr, p.after, count)
    check_table("gate", p.gate_ptr, p.gate, count)
    if len(p.gate):
        at = np.repeat(np.arange(count), np.diff(p.gate_ptr))
        bad = np.flatnonzero((p.src[p.gate] != p.dst[at]) & (p.dst[p.gate] != p.dst[at]))
        if len(bad):
            raise InvalidInput(
                f"transfers[{at[bad[0]]}].gate: transfer {p.gate[bad[0]]} does not touch rank {p.dst[at[bad[0]]]}"
            )
    if count and (p.lane.min() < 0 or p.route.min() < -1 or p.route.max() >= len(p.routes)):
        raise InvalidInput(f"transfers: lane must be >= 0 and route -1..{len(p.routes) - 1}")
    if p.multicasts:
        _check_casts(p)


def _check_casts(p: Program) -> None:
    """Refuse a multicast whose members differ in anything but the destination, or have a destination in common."""
    if p.cast.min() < -1:
        raise InvalidInput("transfers: cast must be >= -1")
    member = np.flatnonzero(p.cast >= 0)
    member = member[np.argsort(p.cast[member], kind="stable")]
    number = p.cast[member]
    begins = np.append(True, number[1:] != number[:-1])
    leader = member[begins][np.cumsum(begins) - 1]

    def refuse(bad: NDArray[np.bool_], what: str) -> None:
        if bad.any():
            t, first = int(member[bad][0]), int(leader[bad][0])
            raise InvalidInput(f"transfers[{t}].cast: {what} transfer {first}, with which it is one multicast")

    refuse(p.reduce[member], "adds up, and so does not go with")
    refuse(p.src[member] != p.src[leader], "has another source than")
    refuse(_rows_differ(p.chunk_ptr, p.chunk, member, leader), "moves other chunks than")
    refuse(_rows_differ(p.after_ptr, p.after, member, leader), "waits for others than")
    ends = np.sort(number.astype(np.int64) * p.collective.num_ranks + p.dst[member])
    again = np.flatnonzero(ends[1:] == ends[:-1])
    if len(again):
        which, rank = divmod(int(ends[again[0]]), p.collective.num_ranks)
        raise InvalidInput(f"transfers: cast {which} goes to rank {rank} twice")


def _rows_differ(
    ptr: NDArray[np.int64], values: NDArray[np.int32], a: NDArray[np.intp], b: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Whether rows a[i] and b[i] of a CSR table differ, be it only in order."""
    sizes = np.diff(ptr)
    differ: NDArray[np.bool_] = sizes[a] != sizes[b]
    same = np.flatnonzero(~differ)
    (rows, left), (_, right) = (take_rows(ptr, values, side[same]) for side in (a, b))
    at = np.repeat(same, np.diff(rows))
    differ[at[left != right]] = True
    return differ
