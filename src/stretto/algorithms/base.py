"""What all algorithms share: a builder of synchronous steps, rank placement, and the registry's entry."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..collectives import COLLECTIVES, Collective
from ..collectives.conditions import as_ranks
from ..errors import InvalidInput, unknown
from ..programs.ir import Program

if TYPE_CHECKING:
    from ..cluster import Cluster

Ranks = int | Sequence[int]
Ints = NDArray[np.int64]

MAX_MOVES = 1 << 27
"""Chunks moved by one program: what an ordinary machine's memory holds."""
MAX_NAME = 63
"""What the oldest of the file formats has room for."""
SHARDED = ("all_gather", "reduce_scatter", "gather", "scatter")


def collective_kind(text: str) -> str:
    """The collective a person means.

    >>> collective_kind("AllReduce"), collective_kind("all-to-all"), collective_kind("reduce_scatter")
    ('all_reduce', 'all_to_all', 'reduce_scatter')
    """
    plain = text.lower().replace("_", "").replace("-", "").replace(" ", "")
    for kind in COLLECTIVES:
        if kind.replace("_", "") == plain:
            return kind
    raise unknown("collective", text, COLLECTIVES)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One entry of the registry: what an algorithm serves, and how it is built."""

    name: str
    collectives: tuple[str, ...]
    summary: str
    where: str
    """For which rank counts it is defined, in words."""
    build: Callable[..., Program]
    refusal: Callable[[str, int], str | None] = lambda kind, count: None
    """Why it is not defined for a collective over that many ranks with default options, or None."""
    from_cluster: Callable[[Cluster, tuple[int, ...], Mapping[str, Any]], dict[str, Any]] | None = None
    """Options that a cluster suggests, given the devices and the options already chosen."""

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of this algorithm alone, with their defaults."""
        common = ("chunks", "root", "in_place")
        return {name: default for name, default in self._defaults.items() if name not in common}

    @property
    def chunks(self) -> int:
        """How many pieces it cuts its data into unless told otherwise."""
        return int(self._defaults["chunks"])

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        keywords = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in keywords if p.kind is inspect.Parameter.KEYWORD_ONLY}


class Steps:
    """Collects messages of synchronous steps, block by block, each block one NumPy expression."""

    def __init__(self) -> None:
        self._columns: dict[str, list[NDArray[Any]]] = {
            key: [] for key in ("src", "dst", "step", "reduce", "lane", "chunk", "width")
        }

    def add(
        self,
        *,
        src: ArrayLike,
        dst: ArrayLike,
        step: ArrayLike,
        chunk: ArrayLike,
        reduce: bool = False,
        lane: ArrayLike = 0,
    ) -> None:
        """Add messages: everything broadcasts together; the last axis of `chunk` lists one message's chunks.

        A chunk of -1 stands for none, so that messages of one block may differ in length.
        """
        chunk = np.asarray(chunk, np.int32)
        ends: dict[str, NDArray[Any]] = {
            "src": np.asarray(src, np.int32),
            "dst": np.asarray(dst, np.int32),
            "step": np.asarray(step, np.int64),
            "lane": np.asarray(lane, np.int16),
        }
        shape = np.broadcast_shapes(chunk.shape[:-1], *(end.shape for end in ends.values()))
        width = chunk.shape[-1]
        table = np.broadcast_to(chunk, (*shape, width)).reshape(-1, width)
        present = table >= 0
        widths = np.count_nonzero(present, axis=1)
        flat = table.ravel() if present.all() else table[present]
        sent = widths > 0
        for key, end in ends.items():
            column = np.broadcast_to(end, shape).ravel()
            self._columns[key].append(column if sent.all() else column[sent])
        self._columns["chunk"].append(flat)
        self._columns["width"].append(widths[sent])
        self._columns["reduce"].append(np.full(int(np.count_nonzero(sent)), reduce))

    def program(self, name: str, collective: Collective, order: Ints | None = None) -> Program:
        """The program; with `order`, what was written for position v happens on rank ``order[v]``."""
        nothing = [np.zeros(0, np.int64)]
        column = {key: np.concatenate(blocks or nothing) for key, blocks in self._columns.items()}
        src, dst, chunk = column["src"], column["dst"], column["chunk"]
        if order is not None and not np.array_equal(order, np.arange(len(order))):
            src, dst, chunk = order[src], order[dst], _placed(collective, chunk, order)
        return Program.from_steps(
            name,
            collective,
            src=src,
            dst=dst,
            chunk=chunk,
            step=column["step"],
            reduce=column["reduce"],
            chunk_ptr=np.concatenate([[0], np.cumsum(column["width"])]),
            lane=column["lane"],
        )


def _placed(collective: Collective, chunk: NDArray[Any], order: Ints) -> NDArray[Any]:
    if collective.kind in SHARDED:
        shard, piece = np.divmod(chunk, collective.chunks)
        return order[shard] * collective.chunks + piece
    if collective.kind == "all_to_all":
        pair, piece = np.divmod(chunk, collective.chunks)
        source, target = np.divmod(pair, collective.num_ranks)
        return (order[source] * collective.num_ranks + order[target]) * collective.chunks + piece
    return chunk


def devices_of(ranks: Ranks, chunks: int, moves: Callable[[int], int]) -> tuple[int, ...]:
    """The devices that take part, once it is clear that the program fits into memory.

    ``moves(n)`` is about how often a chunk is moved over n ranks where `chunks` is 1.
    """
    devices = as_ranks(ranks)
    if not 1 <= chunks <= MAX_MOVES:
        raise InvalidInput(f"chunks: must be 1..{MAX_MOVES}, not {chunks}")
    total = chunks * moves(len(devices))
    if total > MAX_MOVES:
        raise InvalidInput(f"ranks, chunks: {total} chunks would be moved; at most {MAX_MOVES}")
    return devices


def each_to_each(count: int) -> int:
    """Moves of an algorithm that brings something from every rank to every other."""
    return count * count


def placement(count: int, order: Sequence[int] | None, root: int | None = None) -> Ints:
    """Which rank stands at each position: `order`, turned so that the root (if there is one) comes first.

    >>> placement(4, None, root=1).tolist(), placement(4, [3, 1, 0, 2], root=1).tolist()
    ([1, 2, 3, 0], [1, 0, 2, 3])
    """
    places = np.arange(count, dtype=np.int64) if order is None else np.asarray(order, np.int64)
    if places.shape != (count,) or not np.array_equal(np.sort(places), np.arange(count)):
        raise InvalidInput(f"order: must name each rank 0..{count - 1} once")
    if root is None:
        return places
    if not 0 <= root < count:
        raise InvalidInput(f"root: must be a rank 0..{count - 1}, not {root}")
    return np.roll(places, -int(np.flatnonzero(places == root)[0]))


def label(name: str, **options: object) -> str:
    """The name of a program: the algorithm and the options that are not None; long lists are cut short.

    >>> label("ring", chunks=2, order=(0, 2, 1), rings=None)
    'ring(chunks=2,order=0.2.1)'
    """

    def text(value: object, shown: int) -> str:
        if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str):
            items = [text(v, shown) for v in value]
            return ".".join(items if len(items) <= shown else [*items[: shown - 1], ".."])
        return str(value)

    given = {key: value for key, value in options.items() if value is not None}
    for shown in (16, 8, 4, 2):
        inside = ",".join(f"{key}={text(value, shown)}" for key, value in given.items())
        whole = f"{name}({inside})" if inside else name
        if len(whole) <= MAX_NAME:
            break
    return whole[:MAX_NAME]


def unless(default: object, value: object) -> object:
    """The value, or None where it is the default (for `label`)."""
    return None if value == default else value


def choose(what: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        raise unknown(what, value, choices)


def is_power_of_two(count: int) -> bool:
    """Whether count is 1, 2, 4, 8, ..."""
    return count > 0 and count & (count - 1) == 0


def near_square(count: int) -> int:
    """The largest divisor of count that is at most its square root: how ranks are cut when nobody says.

    >>> near_square(16), near_square(12), near_square(7)
    (4, 3, 1)
    """
    return next(d for d in range(math.isqrt(count), 0, -1) if count % d == 0)
