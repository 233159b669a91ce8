# SPDX-License-Identifier: Apache-2.0
"""The JSON of a PyTorch profiler (Kineto) trace, decoded once into the few fields that are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..errors import InvalidInput, unknown
from ..field_errors import explain
from ..files import typed
from .dag import MAX_RANKS
from .trace_files import read_bytes

MAX_BRACES = 16_000_000
"""Limit on the opening braces of a file. Every event has at least one, so it bounds the events before any is built."""

ELEMENT_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16, "ComplexHalf": 4, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
    "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "UInt16": 2, "UInt32": 4, "UInt64": 8,
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "int": 4, "long": 8, "long int": 8, "short": 2,
    "short int": 2, "signed char": 1, "unsigned char": 1, "char": 1, "bool": 1, "unsigned short": 2, "unsigned int": 4,
    "unsigned long": 8, "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
"""Bytes of one element, by the type names of NCCL kernels (``Float``) and of recorded shapes (``float``)."""


class EventArgs(msgspec.Struct, gc=False):
    """The fields of an event's ``args`` that are read; all others are skipped."""

    external_id: int | str | None = msgspec.field(name="External id", default=None)
    correlation: int | str | None = None
    stream: int | str | None = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    group_name: int | str | None = msgspec.field(name="Process Group Name", default=None)
    seq: int | str | None = msgspec.field(name="Seq", default=None)
    rank: Any = msgspec.field(name="Rank", default=None)
    src_rank: Any = msgspec.field(name="Src Rank", default=None)
    dst_rank: Any = msgspec.field(name="Dst Rank", default=None)
    wait_on_stream: int | str | None = None
    wait_on_record: int | str | None = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"null"))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"null"))
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b"null"))


class Event(msgspec.Struct, gc=False):
    """One event of ``traceEvents``; only complete events (``ph`` X) are used."""

    ph: str
    cat: str = ""
    name: Any = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    args: EventArgs | None = None

    @property
    def end(self) -> float:
        """The end of the event, in us."""
        return self.ts + self.dur


class _Group(msgspec.Struct):
    pg_name: Any = None
    ranks: list[int] = []


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    pg_config: list[_Group] | str = []


class _File(msgspec.Struct):
    trace_events: list[Event] = msgspec.field(name="traceEvents")
    distributed: _Distributed = msgspec.field(name="distributedInfo", default_factory=_Distributed)
    host: str = msgspec.field(name="host_name", default="")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)


_NO_ARGS = EventArgs()


@dataclass(frozen=True, kw_only=True)
class Events:
    """The complete events of one file, and the file's description of the job."""

    where: str
    events: list[Event]
    rank: int | None
    world: int | None
    host: str
    base_ns: int
    groups: dict[str, tuple[int, ...]]


class CallPayload(NamedTuple):
    """The data that one communication call moves, in the terms of `Op`."""

    kind: str
    nbytes: float
    group: tuple[int, ...]
    root: int
    splits: bool = False
    """Whether this is an all-to-all whose pieces may have different sizes."""


def args_of(event: Event) -> EventArgs:
    """The args of an event; empty ones if the event has none."""
    return event.args or _NO_ARGS


def decode(path: Path) -> Events:
    """Read one file; a file that is no profiler trace raises `InvalidInput` with one line."""
    data = read_bytes(path)
    if data.count(b"{") > MAX_BRACES:
        raise InvalidInput(f"{path}: more than {MAX_BRACES} objects; record fewer steps")
    try:
        file = msgspec.json.decode(data, type=typed(_File))
    except msgspec.ValidationError as error:
        said = explain(error)
        raise InvalidInput(f"{path}: {said if said.startswith('$') else f'not a profiler trace: {said}'}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    del data
    events = []
    for number, event in enumerate(file.trace_events):
        if event.ph != "X":
            continue
        if not 0 <= event.dur < 1e15:
            raise InvalidInput(f"{path}: traceEvents[{number}].dur: must be a number of us >= 0, not {event.dur:g}")
        if not abs(event.ts) < 1e17:
            raise InvalidInput(f"{path}: traceEvents[{number}].ts: must be a number of us, not {event.ts:g}")
        if not isinstance(event.name, str):
            event.name = str(event.name)
        events.append(event)
    about = file.distributed
    world = about.world_size
    if world is not None and not 1 <= world <= MAX_RANKS:
        raise InvalidInput(f"{path}: distributedInfo.world_size: must be 1..{MAX_RANKS}, not {world}")
    if about.rank is not None and not 0 <= about.rank < (world or MAX_RANKS):
        raise InvalidInput(f"{path}: distributedInfo.rank: must be 0..{(world or MAX_RANKS) - 1}, not {about.rank}")
    config = about.pg_config
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config, type=typed(list[_Group]))
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"{path}: distributedInfo.pg_config: {error}") from None
    return Events(
        where=str(path), events=events, rank=about.rank, world=world, host=file.host, base_ns=file.base_ns,
        groups={str(group.pg_name): tuple(group.ranks) for group in config},
    )  # fmt: skip


def count(value: Any, where: str) -> int:
    """A whole number >= 0 from a trace; a string or a fraction raises `InvalidInput`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise InvalidInput(f"{where}: must be a whole number >= 0, not {value!r}")
    return value


def element_bytes(dtype: Any, where: str) -> int:
    """The size of one element of a named type."""
    if dtype not in ELEMENT_BYTES:
        raise InvalidInput(f"{where}: {unknown('dtype', dtype, ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def sized(elements: int, each: int, where: str) -> float:
    """The bytes of a message, at least 1, because a call without elements (a barrier) still sends something.

    Args:
        elements: number of elements, >= 0.
        each: bytes of one element.
        where: the place in the trace, for errors.

    Returns:
        The number of bytes.

    Raises:
        InvalidInput: the size is 2^59 bytes or more.
    """
    if not elements * each < 1 << 59:
        raise InvalidInput(f"{where}: moves more bytes than any machine has")
    return float(max(elements * each, 1))


def group_of(args: EventArgs, about: Events, where: str) -> tuple[int, ...]:
    """The global ranks of a collective's group: from its own list, by its name, or all ranks if the group is that
    large.

    Args:
        args: the fields of the collective's event.
        about: the file, with its groups by name and its number of ranks.
        where: the place in the trace, for errors.

    Returns:
        The ranks in the order of the group.

    Raises:
        InvalidInput: no source gives a group of the recorded size.
    """
    ranks = args.group_ranks
    cut = isinstance(ranks, str) and "..." in ranks
    listed = [int(part) for part in re.findall(r"-?[0-9]{1,9}", ranks)] if isinstance(ranks, str) else ranks or []
    if not isinstance(listed, list) or not all(isinstance(rank, int) for rank in listed):
        raise InvalidInput(f"{where}.Process Group Ranks: must be a list of ranks, not {ranks!r}")
    size = None if args.group_size is None else count(args.group_size, f"{where}.Group size")
    named = about.groups.get(str(args.group_name), ())
    if named and (cut or not listed):
        listed = list(named)
    elif cut and size is not None and len(listed) > 1 and size <= MAX_RANKS:
        # The profiler lists only the first members of a long group; in a mesh the others follow with the same stride.
        listed = [listed[0] + at * (listed[1] - listed[0]) for at in range(size)]
    elif not listed and size is not None and size == about.world:
        listed = list(range(size))
    if not listed or (size is not None and size != len(listed)):
        raise InvalidInput(
            f"{where}: its group is missing: Process Group Ranks is {ranks!r}, Group size {size}, and "
            f"distributedInfo.pg_config has no group {args.group_name!r} of that size"
        )
    return tuple(listed)
