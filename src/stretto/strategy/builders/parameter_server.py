# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: all on one device, balanced, and with large variables distributed over hosts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...errors import unknown
from ...units import MB
from ..model import ModelSpec, Variable
from ..representation import NodeConfig, Sync
from ..resources import Resources
from .common import PART_MB, Balance, check_number, cut_along, stations

SERVERS = ("hosts", "devices")


def ps(model: ModelSpec, there: Resources, device: str = "") -> tuple[NodeConfig, ...]:
    """One parameter server for everything: by default on the first device.

    Args:
        model: the model.
        there: the devices.
        device: name of the server's device; empty takes the first.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: the device is unknown.
    """
    server = device or there.servers[0]
    if server not in there.devices:
        raise unknown("device", server, there.devices)
    return tuple(
        NodeConfig(variable=v.name, sync=Sync(kind="parameter_server", placement=(server,))) for v in model.variables
    )


def ps_balanced(
    model: ModelSpec, there: Resources, servers: str = "hosts", two_level: bool = False
) -> tuple[NodeConfig, ...]:
    """Each variable whole on the server with the least to do; one server per host, or on every device.

    Args:
        model: the model.
        there: the devices.
        servers: "hosts" for one server per host, "devices" for one per device.
        two_level: whether dense gradients are summed per host before they are sent.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: `servers` is unknown.
    """
    balance = _servers(there, servers)
    return tuple(
        NodeConfig(variable=v.name, sync=_server(there, balance.place(v.gradient_bytes), _in_two(v, two_level)))
        for v in model.variables
    )


def partitioned_ps(
    model: ModelSpec, there: Resources, part_mb: float = PART_MB, parts: int = 0, servers: str = "hosts",
    two_level: bool = True,
) -> tuple[NodeConfig, ...]:  # fmt: skip
    """Large variables cut evenly, one part for each host (or `parts`), and distributed; gradients summed per host.

    Args:
        model: the model.
        there: the devices.
        part_mb: size in MB from which a variable is cut, 0..1e9.
        parts: number of parts, 0..4096; 0 takes the number of hosts.
        servers: "hosts" for one server per host, "devices" for one per device.
        two_level: whether dense gradients are summed per host before they are sent.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: an option is unknown or out of range.
    """
    check_number("part_mb", part_mb, 0, 1e9)
    check_number("parts", parts, 0, 4096)
    count = parts or len(there.servers)
    balance = _servers(there, servers)
    nodes = []
    for v in model.variables:
        cut = cut_along(v, 0, count) if v.shape and v.nbytes >= part_mb * MB and count > 1 else ()
        nodes.append(_shared_out(v, cut, there, balance, two_level))
    return tuple(nodes)


def uneven_partitioned_ps(
    model: ModelSpec, there: Resources, part_mb: float = PART_MB, two_level: bool = True
) -> tuple[NodeConfig, ...]:
    """Parts as large as each host's uplink is fast; between equal hosts a number of parts that does not divide.

    Args:
        model: the model.
        there: the devices with the rates of their hosts.
        part_mb: size in MB from which a variable is cut, 0..1e9.
        two_level: whether dense gradients are summed per host before they are sent.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: `part_mb` is out of range.
    """
    check_number("part_mb", part_mb, 0, 1e9)
    rates = there.server_rates
    balance = Balance(there.servers, rates)
    nodes = []
    for v in model.variables:
        if not v.shape or v.nbytes < part_mb * MB or v.shape[0] <= len(rates) or len(rates) == 1:
            nodes.append(_shared_out(v, (), there, balance, two_level))
        elif len(set(rates)) == 1:
            cut = cut_along(v, 0, _not_a_divisor(v.shape[0], len(rates)))
            nodes.append(_shared_out(v, cut, there, balance, two_level))
        else:
            sizes = _proportional(v.shape[0], rates)
            syncs = tuple(_server(there, server, _in_two(v, two_level)) for server in there.servers)
            nodes.append(NodeConfig(variable=v.name, partition=(sizes, *(1,) * (len(v.shape) - 1)), parts=syncs))
    return tuple(nodes)


def _not_a_divisor(size: int, least: int) -> int:
    """The smallest number of parts from `least` on that gives parts of different sizes."""
    return next((count for count in range(least, size) if size % count), least)


def _servers(there: Resources, servers: str) -> Balance:
    if servers not in SERVERS:
        raise unknown("servers", servers, SERVERS)
    if servers == "hosts" or there.serving:
        return Balance(there.servers, there.server_rates)
    each = {rank: rate / len(ranks) for ranks, rate in zip(there.by_host, there.rates, strict=True) for rank in ranks}
    return Balance(there.devices, [each[rank] for rank in range(len(there.devices))])


def _server(there: Resources, server: str, two_level: bool) -> Sync:
    return Sync(kind="parameter_server", placement=(server,), transfer=stations(there, server) if two_level else ())


def _in_two(v: Variable, two_level: bool) -> bool:
    """Whether a station is used: sparse gradients of different ranks have different rows, so
    there is nothing to sum.
    """
    return two_level and not v.sparse


def _shared_out(v: Variable, cut: tuple[int, ...], there: Resources, balance: Balance, two_level: bool) -> NodeConfig:
    node = NodeConfig(variable=v.name, partition=cut)
    shares = [part.elements / v.elements for part in node.cut(v)]
    through = _in_two(v, two_level)
    syncs = [_server(there, balance.place(v.gradient_bytes * share), through) for share in shares]
    if len(syncs) == 1:
        return NodeConfig(variable=v.name, sync=syncs[0])
    return NodeConfig(variable=v.name, partition=cut, parts=tuple(syncs))


def _proportional(size: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers > 0 that add up to `size`, as near to the rates as possible.

    >>> _proportional(10, [1.0, 1.0, 3.0])
    (2, 2, 6)
    """
    total = sum(rates)

    def ends() -> Iterator[int]:
        reached = 0.0
        for at, rate in enumerate(rates):
            reached += rate
            yield min(max(math.floor(size * reached / total + 0.5), at + 1), size - (len(rates) - 1 - at))

    last, out = 0, []
    for end in ends():
        end = max(end, last + 1)
        out.append(end - last)
        last = end
    return tuple(out)
