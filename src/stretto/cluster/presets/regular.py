# SPDX-License-Identifier: Apache-2.0
"""Ring, clique, mesh, torus and hypercube, every link alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import InvalidInput
from ..grid import factor, lines, links_per_device
from ..grid import regular as build_regular
from ..model import Cluster, Dimension
from ..wiring import MAX_DEVICES, Wiring, numbered
from .registry import register

GB_PER_S, ALPHA_US = 50.0, 0.5


def _dimension(kind: str, size: int, gb_per_s: float, alpha_us: float) -> Dimension:
    rate = gb_per_s * max(1, links_per_device(kind, size))
    return Dimension(kind=kind, size=size, gb_per_s=rate, alpha_us=alpha_us)


@register("ring", "a two-way ring of devices", default_nodes=8)
def ring(name: str, nodes: int, *, gb_per_s: float = GB_PER_S, alpha_us: float = ALPHA_US) -> Cluster:
    """A ring: each device is linked with the next and the previous one.

    Args:
        name: The name of the preset.
        nodes: How many devices, >= 1.
        gb_per_s: The rate of each link and direction, > 0.
        alpha_us: The latency of each link, >= 0.

    Returns:
        The cluster.
    """
    return build_regular(f"{name}:{nodes}", [_dimension("ring", nodes, gb_per_s, alpha_us)])


@register("fully_connected", "every device linked with every other", default_nodes=8, max_nodes=2048)
def fully_connected(name: str, nodes: int, *, gb_per_s: float = GB_PER_S, alpha_us: float = ALPHA_US) -> Cluster:
    """A clique: each device is linked with each other one.

    Args:
        name: The name of the preset.
        nodes: How many devices, 1..2048.
        gb_per_s: The rate of each link and direction, > 0.
        alpha_us: The latency of each link, >= 0.

    Returns:
        The cluster.
    """
    return build_regular(f"{name}:{nodes}", [_dimension("fully_connected", nodes, gb_per_s, alpha_us)])


@register("mesh", "a 2D or 3D grid without wrap-around links", default_nodes=16)
def mesh(
    name: str,
    nodes: int,
    *,
    gb_per_s: float = GB_PER_S,
    alpha_us: float = ALPHA_US,
    dims: Sequence[int] | None = None,
) -> Cluster:
    """A grid without wrap-around links.

    Args:
        name: The name of the preset.
        nodes: How many devices; ignored where `dims` is given.
        gb_per_s: The rate of each link and direction, > 0.
        alpha_us: The latency of each link, >= 0.
        dims: Two or three sides >= 1; two sides, as square as `nodes` allows, when not given.

    Returns:
        The cluster.

    Raises:
        InvalidInput: `nodes` has no two factors >= 2, or `dims` has another number of sides or too many devices.
    """
    sides = _sides(nodes, dims)
    wiring = Wiring(numbered("npu", math.prod(sides)))
    for axis in range(len(sides)):
        rows = lines(sides, axis)
        wiring.duplex(rows[:, :-1], rows[:, 1:], gb_per_s=gb_per_s, alpha_us=alpha_us, channel=f"dim{axis}")
    return wiring.cluster(_named(name, nodes, dims), devices_forward=True)


@register("torus", "a 2D or 3D grid with wrap-around links", default_nodes=16)
def torus(
    name: str,
    nodes: int,
    *,
    gb_per_s: float = GB_PER_S,
    alpha_us: float = ALPHA_US,
    dims: Sequence[int] | None = None,
) -> Cluster:
    """A grid whose lines are rings.

    Args:
        name: The name of the preset.
        nodes: How many devices; ignored where `dims` is given.
        gb_per_s: The rate of each link and direction, > 0.
        alpha_us: The latency of each link, >= 0.
        dims: Two or three sides >= 1; two sides, as square as `nodes` allows, when not given.

    Returns:
        The cluster.

    Raises:
        InvalidInput: `nodes` has no two factors >= 2, or `dims` has another number of sides or too many devices.
    """
    sides = _sides(nodes, dims)
    return build_regular(_named(name, nodes, dims), [_dimension("ring", side, gb_per_s, alpha_us) for side in sides])


@register("hypercube", "2^d devices, each linked with d neighbours", default_nodes=16)
def hypercube(name: str, nodes: int, *, gb_per_s: float = GB_PER_S, alpha_us: float = ALPHA_US) -> Cluster:
    """A hypercube: devices whose numbers differ in one bit are linked.

    Args:
        name: The name of the preset.
        nodes: How many devices, a power of two >= 2.
        gb_per_s: The rate of each link and direction, > 0.
        alpha_us: The latency of each link, >= 0.

    Returns:
        The cluster.

    Raises:
        InvalidInput: `nodes` is not a power of two >= 2.
    """
    bits = nodes.bit_length() - 1
    if nodes != 1 << bits or bits < 1:
        near = ", ".join(str(1 << b) for b in range(max(1, bits - 1), min(16, bits + 2) + 1))
        raise InvalidInput(f"nodes: a hypercube needs a power of two such as {near}, not {nodes}")
    dimensions = [_dimension("fully_connected", 2, gb_per_s, alpha_us)] * bits
    return build_regular(f"{name}:{nodes}", dimensions)


def _sides(nodes: int, dims: Sequence[int] | None) -> tuple[int, ...]:
    if dims is not None:
        if len(dims) not in (2, 3):
            raise InvalidInput(f"dims: must be two or three sides such as 4x4 or 4x4x4, not {len(dims)}")
        if math.prod(dims) > MAX_DEVICES:
            raise InvalidInput(f"dims: {'x'.join(map(str, dims))} is more than {MAX_DEVICES} devices")
        return tuple(dims)
    sides = factor(nodes)
    if sides is None:
        raise InvalidInput(
            f"nodes: {nodes} devices do not make a grid with sides >= 2; "
            f"give a count that factors (such as {max(4, nodes + nodes % 2)}) or dims=(a, b) or (a, b, c)"
        )
    return sides


def _named(name: str, nodes: int, dims: Sequence[int] | None) -> str:
    return f"{name}:{'x'.join(map(str, dims)) if dims is not None else nodes}"
