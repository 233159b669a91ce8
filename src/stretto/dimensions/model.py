# SPDX-License-Identifier: Apache-2.0
"""The dimensions of a network, and the cost of one stage of a hierarchical collective in each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cluster import Cluster
from ..errors import InvalidInput, unknown

RS, AG = "reduce_scatter", "all_gather"
COLLECTIVES = ("all_reduce", RS, AG)
ALGORITHMS = {"ring": "ring", "fully_connected": "direct", "switch": "halving_doubling"}
"""The algorithm inside a dimension by its kind: each uses every link of the dimension without contention."""
MAX_SIZE = 1 << 20
MAX_PACKET = 1e9
MAX_DIMS = 8
STEADY_CHUNKS = 8
"""The fewest chunks of an all-reduce over switches that reduce: both directions have to be in use on average."""
LEAST_RATE, MOST_RATE = 1e-6, 1e9
MOST_US = 1e9
MOST_BYTES = 1e18
"""The limits of rates, times and sizes: beyond them a clock of 53 bits no longer tells stages apart."""


@dataclass(frozen=True, kw_only=True)
class Dim:
    """One dimension: `size` devices, each with `gb_per_s` into it, and `step_us` for the smallest message.

    With `in_network` its switch reduces and multicasts: there is one step, in which all of the data goes up for a
    reduce-scatter and comes down for an all-gather. In an all-reduce the two passes use different directions, so that
    each pass counts half of its bytes. That is an average over many chunks, of which some go up while others come
    down: the up-pass of one chunk alone takes twice as long. All-reduces in fewer than `STEADY_CHUNKS` chunks are
    therefore refused. Every packet of up to `packet_bytes` carries `header_bytes` more, which count like payload.
    """

    kind: str
    size: int
    gb_per_s: float
    step_us: float
    in_network: bool = False
    header_bytes: float = 0.0
    packet_bytes: float = 4096.0

    def __post_init__(self) -> None:
        if self.kind not in ALGORITHMS:
            raise InvalidInput(f"dimension: {unknown('kind', self.kind, ALGORITHMS)}")
        if not 2 <= self.size <= MAX_SIZE:
            raise InvalidInput(f"dimension.size: must be 2..{MAX_SIZE}, not {self.size}")
        if not LEAST_RATE <= self.gb_per_s <= MOST_RATE:
            raise InvalidInput(f"dimension.gb_per_s: must be {LEAST_RATE:g}..{MOST_RATE:g}, not {self.gb_per_s:g}")
        if not 0 <= self.step_us <= MOST_US:
            raise InvalidInput(f"dimension.step_us: must be 0..{MOST_US:g}, not {self.step_us:g}")
        if self.in_network and self.kind != "switch":
            raise InvalidInput(f"dimension.in_network: only a switch can, not {self.kind}")
        if not 0 <= self.header_bytes <= MAX_PACKET or not 1 <= self.packet_bytes <= MAX_PACKET:
            raise InvalidInput(f"dimension: header_bytes must be 0..{MAX_PACKET:g} and packet_bytes 1..{MAX_PACKET:g}")

    @property
    def algorithm(self) -> str:
        """The name of the algorithm that a stage runs in this dimension."""
        return ALGORITHMS[self.kind]

    @property
    def bytes_per_us(self) -> float:
        """The rate in the simulator's units, bytes per microsecond."""
        return self.gb_per_s * 1e3

    @property
    def steps(self) -> int:
        """The number of steps of one reduce-scatter or all-gather."""
        if self.in_network or self.kind == "fully_connected":
            return 1
        return self.size - 1 if self.kind == "ring" else math.ceil(math.log2(self.size))

    @property
    def latency_us(self) -> float:
        """The time of one stage beside that of its bytes (A_K of the paper)."""
        return self.steps * self.step_us

    def wire_bytes(self, stage: str, before: float, *, alone: bool = False) -> float:
        """The bytes that each device sends in a stage, headers included.

        Args:
            stage: "reduce_scatter" or "all_gather".
            before: The bytes on each device when the stage begins, >= 0.
            alone: Whether the collective is only a reduce-scatter or only an all-gather, so that nothing goes the other
                way.

        Returns:
            The bytes per device.

        >>> Dim(kind="ring", size=4, gb_per_s=100, step_us=1).wire_bytes("all_gather", 8.0)
        24.0
        """
        payload = self.payload_bytes(stage, before, alone=alone)
        if not self.header_bytes:
            return payload
        whole = before if stage == RS else before * self.size
        packets = sum(math.ceil(message / self.packet_bytes) for message in self._messages(whole))
        return payload + self.header_bytes * packets * (0.5 if self.in_network and not alone else 1.0)

    def payload_bytes(self, stage: str, before: float, *, alone: bool = False) -> float:
        """The bytes that each device sends in a stage without headers; they are proportional to `before`.

        Args:
            stage: "reduce_scatter" or "all_gather".
            before: The bytes on each device when the stage begins, >= 0.
            alone: Whether the collective is only a reduce-scatter or only an all-gather.

        Returns:
            The bytes per device.
        """
        whole = before if stage == RS else before * self.size
        if self.in_network:
            return whole * (1.0 if alone else 0.5)
        return whole * (self.size - 1) / self.size

    def _messages(self, whole: float) -> list[float]:
        if self.in_network:
            return [whole]
        if self.kind == "switch" and self.size & (self.size - 1) == 0:
            return [whole / 2**step for step in range(1, self.steps + 1)]
        return [whole / self.size] * (self.size - 1)

    def after(self, stage: str, before: float) -> float:
        """The bytes that each device holds when a stage that began with `before` bytes is over."""
        return before / self.size if stage == RS else before * self.size

    def all_to_all_bytes(self, nbytes: float) -> float:
        """The bytes that each device sends for its part of an all-to-all; in a ring, including what it forwards."""
        hops = self.size**2 // 4 if self.kind == "ring" else self.size - 1
        return nbytes * hops / self.size


def dims_of(cluster: Cluster, *, in_network: Sequence[int] = ()) -> tuple[Dim, ...]:
    """The dimensions of a cluster with more than one device, from the innermost on.

    The dimensions whose numbers (from 0 on) are in `in_network` reduce in their switches.
    """
    if not cluster.dimensions:
        raise InvalidInput(f"cluster {cluster.name}: has no dimensions; themis_2d_sw_sw and torus:8x8 have some")
    some = [dim for dim in cluster.dimensions if dim.size > 1]
    if not some:
        raise InvalidInput(f"cluster {cluster.name}: has only one device, so there is nothing to send")
    for number in in_network:
        if not 0 <= number < len(some):
            raise InvalidInput(f"in_network: must be 0..{len(some) - 1}, not {number}")
    return tuple(
        Dim(kind=d.kind, size=d.size, gb_per_s=d.gb_per_s, step_us=d.alpha_us, in_network=at in in_network)
        for at, d in enumerate(some)
    )


def check_dims(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Refuse an empty list of dimensions, and more than `MAX_DIMS`: the number of their orders is a factorial."""
    if not 1 <= len(dims) <= MAX_DIMS:
        raise InvalidInput(f"dims: must be 1..{MAX_DIMS}, not {len(dims)}")
    return tuple(dims)


Part = tuple[int, Dim]
"""A group's part of a dimension: the dimension's number, and the dimension or a smaller one inside it."""


def split(dims: Sequence[Dim], inner: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The dimensions within groups of `inner` neighbouring devices, and those between the groups.

    A group may end inside a dimension: a switch then serves both parts, at the full rate; other kinds cannot.

    >>> dims = [Dim(kind="switch", size=16, gb_per_s=150, step_us=0.7), Dim(kind="switch", size=64, gb_per_s=100, step_us=2)]
    >>> [[(number, dim.size) for number, dim in part] for part in split(dims, 128)]
    [[(0, 16), (1, 8)], [(1, 8)]]
    """  # noqa: E501
    left, within, between = inner, [], []
    for at, dim in enumerate(dims):
        if left == 1:
            between.append((at, dim))
        elif left % dim.size == 0:
            within.append((at, dim))
            left //= dim.size
        elif dim.size % left == 0 and dim.kind == "switch":
            within.append((at, replace(dim, size=left)))
            between.append((at, replace(dim, size=dim.size // left)))
            left = 1
        else:
            raise InvalidInput(f"group of {inner}: does not fit dimension {at} ({dim.kind} of {dim.size})")
    if left != 1:
        raise InvalidInput(f"group of {inner}: there are only {math.prod(d.size for d in dims)} devices")
    return tuple(within), tuple(between)


def order_loads(dims: Sequence[Dim], order: Sequence[int], nbytes: float, *, alone: bool = False) -> list[float]:
    """The time that each dimension sends for one reduce-scatter in this order (or one all-gather in the reverse order).

    Args:
        dims: The dimensions.
        order: The numbers of the dimensions in the order of the stages.
        nbytes: The bytes on each device before the first stage.
        alone: Whether the collective is only a reduce-scatter or only an all-gather.

    Returns:
        Microseconds per dimension, without latency.
    """
    loads = [0.0] * len(dims)
    size = nbytes
    for at in order:
        loads[at] = dims[at].wire_bytes(RS, size, alone=alone) / dims[at].bytes_per_us
        size = dims[at].after(RS, size)
    return loads


def ideal_us(dims: Sequence[Dim], collective: str, nbytes: float) -> float:
    """The time in which every dimension sends all the time: no schedule can be faster.

    Whatever the order of the dimensions, a device sends ``nbytes (1 - 1/N)`` in each pass. Where switches reduce, the
    order matters, and the order with the least traffic counts. Headers and latencies are left out.

    Args:
        dims: The dimensions, 1..8.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.

    Returns:
        The time in microseconds.

    Raises:
        InvalidInput: The collective is unknown, or there are too many dimensions.
    """
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES)
    dims = [replace(dim, header_bytes=0.0) for dim in check_dims(dims)]
    alone = collective != "all_reduce"
    some = any(dim.in_network for dim in dims)
    orders = itertools.permutations(range(len(dims))) if some else [tuple(range(len(dims)))]
    sent = min(_sent(dims, order, nbytes, alone) for order in orders)
    return (1 if alone else 2) * sent / sum(dim.bytes_per_us for dim in dims)


def _sent(dims: Sequence[Dim], order: Sequence[int], nbytes: float, alone: bool) -> float:
    loads = order_loads(dims, order, nbytes, alone=alone)
    return sum(load * dim.bytes_per_us for load, dim in zip(loads, dims, strict=True))
