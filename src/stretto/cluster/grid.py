# SPDX-License-Identifier: Apache-2.0
"""Regular networks: devices on a grid, each dimension a ring, a clique or a switch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput, unknown
from .model import DIMENSION_KINDS, Cluster, Dimension
from .wiring import MAX_DEVICES, Wiring, numbered

MAX_LINKS = 1 << 22


def links_per_device(kind: str, size: int) -> int:
    """The number of links that a device's rate in a dimension is divided into.

    >>> links_per_device("ring", 4), links_per_device("ring", 2), links_per_device("fully_connected", 8)
    (2, 1, 7)
    """
    if kind == "ring":
        return min(2, size - 1)
    return size - 1 if kind == "fully_connected" else 1


def regular(
    name: str,
    dimensions: Sequence[Dimension],
    *,
    notes: Iterable[str] = (),
    both_sides: bool = False,
) -> Cluster:
    """Make a cluster from its dimensions; channel ``dimK`` holds the links of dimension K.

    A device of a ring has a link to each neighbour with half the dimension's rate (all of it where there is one
    neighbour), a device of a clique one link to each other device, a device of a switch one port.

    Args:
        name: The cluster's name.
        dimensions: 1 to 16 dimensions; the first coordinate of a device moves fastest.
        notes: Sentences about what was assumed.
        both_sides: Whether a step over a switch pays half of the latency on each side, instead of all of it going up.

    Returns:
        The cluster, whose devices forward.

    Raises:
        InvalidInput: A kind or a size is not valid, or there are too many devices or links.
    """
    _check(dimensions)
    sizes = [d.size for d in dimensions]
    count = math.prod(sizes)
    wiring = Wiring(numbered("npu", count))
    for at, dim in enumerate(dimensions):
        if dim.size == 1:
            continue
        rows = lines(sizes, at)
        channel = f"dim{at}"
        share = dim.gb_per_s / links_per_device(dim.kind, dim.size)
        if dim.kind == "switch":
            hubs = wiring.add(numbered(f"dim{at}.sw", len(rows)), kind="switch")
            up, down = (dim.alpha_us / 2, dim.alpha_us / 2) if both_sides else (dim.alpha_us, 0.0)
            wiring.duplex(rows, hubs[:, None], gb_per_s=share, alpha_us=up, back_us=down, channel=channel)
            continue
        if dim.kind == "ring":
            after = np.roll(rows, -1, axis=1)
            a, b = (rows[:, :1], rows[:, 1:]) if dim.size == 2 else (rows, after)
        else:
            first, second = np.triu_indices(dim.size, 1)
            a, b = rows[:, first], rows[:, second]
        wiring.duplex(a, b, gb_per_s=share, alpha_us=dim.alpha_us, channel=channel)
    return wiring.cluster(name, dimensions=tuple(dimensions), devices_forward=True, notes=notes)


def lines(sizes: Sequence[int], axis: int) -> NDArray[np.int64]:
    """The devices of every line along one axis, one row per line; the first coordinate moves fastest.

    >>> lines([2, 3], 1).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    grid = np.arange(math.prod(sizes), dtype=np.int64).reshape(list(reversed(sizes)))
    return np.moveaxis(grid, len(sizes) - 1 - axis, -1).reshape(-1, sizes[axis])


def factor(count: int, parts: int = 2) -> tuple[int, ...] | None:
    """The most square way to write a count as a product of sides >= 2, smallest first; None for a prime.

    >>> factor(12), factor(64), factor(7), factor(24, 3)
    ((3, 4), (8, 8), None, (2, 3, 4))
    """
    if parts == 1:
        return (count,) if count >= 2 else None
    for side in range(round(count ** (1 / parts)) + 1, 1, -1):
        if count % side == 0 and side**parts <= count:
            rest = factor(count // side, parts - 1)
            if rest is not None and rest[0] >= side:
                return (side, *rest)
    return None


def _check(dimensions: Sequence[Dimension]) -> None:
    if not 1 <= len(dimensions) <= 16:
        raise InvalidInput(f"dimensions: must be 1 to 16 of them, not {len(dimensions)}")
    links = 0.0
    for at, dim in enumerate(dimensions):
        if dim.kind not in DIMENSION_KINDS:
            raise InvalidInput(f"dimensions[{at}].kind: {unknown('kind', dim.kind, DIMENSION_KINDS)}")
        if dim.size < 1:
            raise InvalidInput(f"dimensions[{at}].size: must be >= 1, not {dim.size}")
        links += 2 if dim.kind == "switch" else links_per_device(dim.kind, dim.size)
    count = math.prod(d.size for d in dimensions)
    if count > MAX_DEVICES:
        raise InvalidInput(f"dimensions: sizes multiply to {count} devices, more than {MAX_DEVICES}")
    if links * count > MAX_LINKS:
        raise InvalidInput(f"dimensions: they make {links * count:.0f} links, more than {MAX_LINKS}")
