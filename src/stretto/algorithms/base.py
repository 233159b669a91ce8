# SPDX-License-Identifier: Apache-2.0
"""Parts that all algorithms share: a builder of synchronous steps, the order of ranks, and the registry's entry."""

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
"""The most chunk moves of one program: about as many as fit into an ordinary machine's memory."""
MAX_NAME = 63
"""The longest name of a program in bytes: the original MSCCL runtime has room for no more."""
SHARDED = ("all_gather", "reduce_scatter", "gather", "scatter")


def collective_kind(text: str) -> str:
    """The kind of collective that a person's spelling stands for; `InvalidInput` lists the kinds where there is none.

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
    """One entry of the registry: the collectives that an algorithm serves, and the function that builds its programs.

    To add an algorithm, write a module of this package that defines ``ALGORITHM = Algorithm(...)`` and add the module's
    name to `registry.NAMES`; one of somebody else's is made known by `register_algorithm`. The module is imported when
    the name is first asked for; everything runs in one process, on no particular rank, and returns the same program for
    the same arguments.

    `build(kind, ranks, *, chunks=..., in_place=False, ...) -> Program` is called by `registry.algorithm` once per
    program, after `from_cluster`. It may assume that `kind` is one of `collectives` and that options have the types of
    its annotations (texts of the command line have been read). It must check the values itself (`choose`, `devices_of`,
    `placement` do most of it) and raise `InvalidInput` that names the option. All keyword arguments need defaults;
    those for rooted collectives include ``root=0``, and any other keyword is an option of this algorithm. `ranks` is
    a count or the device of each rank; `chunks` is how many pieces flow through one behind the other. `build` returns
    a program for the collective of that kind over exactly these ranks, usually `Steps.program`, named by `label`. The
    program is not trusted: it is verified before it is simulated, exported or run.

    `refusal(kind, count)` is called without building anything, to list what serves a collective: it returns None, or
    the reason why the algorithm is not defined for so many ranks with its default options. `build` must refuse the same
    calls, with the same words behind the name of the argument: ``raise InvalidInput(f"ranks: {reason}")``. The
    conformance suite asks for both. `from_cluster(cluster, devices, chosen)` is called only where a cluster is given;
    `chosen` are the options of the user, which it must not return again.

    >>> def one_by_one(kind, ranks, *, chunks=1, root=0, in_place=False):
    ...     devices = devices_of(ranks, chunks, moves=lambda count: count)
    ...     steps = Steps()
    ...     for at in range(1, len(devices)):  # positions: 0 is the root
    ...         steps.add(src=0, dst=at, step=at, chunk=np.arange(chunks))
    ...     collective = COLLECTIVES[kind](devices, root=root, chunks=chunks, in_place=in_place)
    ...     return steps.program("one_by_one", collective, placement(len(devices), None, root))
    >>> entry = Algorithm(
    ...     name="one_by_one", collectives=("broadcast",), build=one_by_one,
    ...     summary="the root sends to one rank after the other", where="any number of ranks",
    ... )
    >>> program = entry.build("broadcast", 4, root=2)
    >>> report = program.verify()  # raises VerificationError where the program is wrong
    >>> program.num_transfers
    3

    One that is for even numbers of ranks alone begins so:

    >>> def odd(kind, count):
    ...     return None if count % 2 == 0 else f"must be even, not {count}"
    >>> def only_even(kind, ranks, *, chunks=1, root=0, in_place=False):
    ...     devices = devices_of(ranks, chunks, moves=lambda count: count)
    ...     if reason := odd(kind, len(devices)):
    ...         raise InvalidInput(f"ranks: {reason}")
    ...     return one_by_one(kind, ranks, chunks=chunks, root=root, in_place=in_place)
    >>> even = Algorithm(
    ...     name="only_even", collectives=("broadcast",), build=only_even, refusal=odd,
    ...     summary="as one_by_one", where="an even number of ranks",
    ... )
    >>> even.refusal("broadcast", 5)
    'must be even, not 5'

    Attributes:
        name: The name that users write; the program's name begins with it.
        collectives: The kinds of `COLLECTIVES` that it serves.
        summary: What it does in a few words, for ``stretto algorithms``.
        where: The rank counts that the algorithm is defined for, in words.
        build: Builds the program; see above.
        refusal: Maps a kind and a rank count to the reason why the algorithm is not defined for them with default
            options, or to None where it is defined.
        from_cluster: Maps a cluster, the devices and the options that the user chose to further options that suit the
            cluster.
    """

    name: str
    collectives: tuple[str, ...]
    summary: str
    where: str
    build: Callable[..., Program]
    refusal: Callable[[str, int], str | None] = lambda kind, count: None
    from_cluster: Callable[[Cluster, tuple[int, ...], Mapping[str, Any]], dict[str, Any]] | None = None

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of this algorithm alone (without chunks, root and in_place), with their defaults."""
        common = ("chunks", "root", "in_place")
        return {name: default for name, default in self._defaults.items() if name not in common}

    @property
    def chunks(self) -> int:
        """The number of pieces that the algorithm cuts its data into unless told otherwise."""
        return int(self._defaults["chunks"])

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        keywords = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in keywords if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _spread(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """As `np.broadcast_to`, which takes ten times as long where there is little or nothing to do."""
    if values.shape == shape:
        return values
    return np.full(shape, values) if values.ndim == 0 else np.broadcast_to(values, shape)


class Steps:
    """A collector of the messages of synchronous steps, added block by block, each block as one NumPy expression.

    Within a step all reads come before all writes; what a message really waits for is derived from that by
    `Program.from_steps`, so that an algorithm never writes dependencies.
    """

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
        """Add a block of messages. All arguments broadcast together, `chunk` without its last axis.

        Args:
            src: The position (0..n-1, a rank where `program` gets no order) that sends each message.
            dst: The position that receives it.
            step: The synchronous step, >= 0, in which it is sent.
            chunk: The chunks of a message along the last axis; -1 stands for none where messages differ in length.
            reduce: Whether the receiver adds the chunks to its own instead of replacing them.
            lane: The number of the connection between the two ranks; one connection keeps the order of its messages.
        """
        chunk = np.asarray(chunk, np.int32)
        ends: dict[str, NDArray[Any]] = {
            "src": np.asarray(src, np.int32),
            "dst": np.asarray(dst, np.int32),
            "step": np.asarray(step, np.int64),
            "lane": np.asarray(lane, np.int16),
        }
        shapes = {chunk.shape[:-1], *(end.shape for end in ends.values())} - {()}
        shape = shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)
        width = chunk.shape[-1]
        table = _spread(chunk, (*shape, width)).reshape(-1, width)
        present = table >= 0
        if width and present.all():
            # The usual case, in which nothing has to be picked out.
            sent, flat, widths = None, table.ravel(), np.full(len(table), width)
        else:
            widths = np.count_nonzero(present, axis=1)
            sent, flat = widths > 0, table[present]
            widths = widths[sent]
        for key, end in ends.items():
            column = _spread(end, shape).ravel()
            self._columns[key].append(column if sent is None else column[sent])
        self._columns["chunk"].append(flat)
        self._columns["width"].append(widths)
        self._columns["reduce"].append(np.full(len(widths), reduce))

    def program(self, name: str, collective: Collective, order: Ints | None = None) -> Program:
        """Make the program from all messages that were added.

        Args:
            name: The program's name, usually from `label`.
            collective: The collective that the program is to fulfil.
            order: The rank at each position: a message of position v is sent by rank ``order[v]``, and chunks of shards
                are renumbered alike. Positions are ranks when not given.

        Returns:
            The program with the least dependencies that keep the meaning of the steps; not verified yet.
        """
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
    """Check that a program fits into memory, and return the devices that take part.

    Args:
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces flow through the algorithm, >= 1.
        moves: Maps a rank count to about how many chunk moves the program has where `chunks` is 1.

    Returns:
        The device of each rank.

    Raises:
        InvalidInput: `chunks` is out of range, or there would be more than `MAX_MOVES` moves.
    """
    devices = as_ranks(ranks)
    if not 1 <= chunks <= MAX_MOVES:
        raise InvalidInput(f"chunks: must be 1..{MAX_MOVES}, not {chunks}")
    total = chunks * moves(len(devices))
    if total > MAX_MOVES:
        raise InvalidInput(f"ranks, chunks: {total} chunks would be moved; at most {MAX_MOVES}")
    return devices


def each_to_each(count: int) -> int:
    """The number of moves of an algorithm that brings something from every rank to every other, for `devices_of`."""
    return count * count


def placement(count: int, order: Sequence[int] | None, root: int | None = None) -> Ints:
    """The rank at each position: `order`, rotated so that the root (if there is one) comes first.

    Args:
        count: How many ranks there are.
        order: Every rank once, or None for 0..count-1.
        root: The rank that shall be at position 0, or None.

    Returns:
        The ranks by position, for `Steps.program`.

    Raises:
        InvalidInput: `order` is not a permutation of the ranks, or `root` is not a rank.

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
    return whole if len(whole) <= MAX_NAME else f"{whole[: MAX_NAME - 3]}..."


def unless(default: object, value: object) -> object:
    """The value, or None where it is the default (for `label`)."""
    return None if value == default else value


def choose(what: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise unless a value is one of the choices.

    Args:
        what: The option, as the message shall call it.
        value: The value that was given.
        choices: The valid values.

    Raises:
        InvalidInput: The value is none of them; the message lists them.
    """
    if value not in choices:
        raise unknown(what, value, choices)


def is_power_of_two(count: int) -> bool:
    """Whether `count` is one of 1, 2, 4, 8, ..."""
    return count > 0 and count & (count - 1) == 0


def near_square(count: int) -> int:
    """The largest divisor of count that is at most its square root: how ranks are cut into hosts by default.

    >>> near_square(16), near_square(12), near_square(7)
    (4, 3, 1)
    """
    return next(d for d in range(math.isqrt(count), 0, -1) if count % d == 0)
