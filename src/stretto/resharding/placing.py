# SPDX-License-Identifier: Apache-2.0
"""Places meshes on a cluster: from texts such as ``(2,4) S0RR`` to layouts on devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput
from .spec import Layout, Mesh, Spec, check_shape

_SIDE = re.compile(r"\(\s*([0-9]{1,6}(?:\s*,\s*[0-9]{1,6}){0,15})\s*,?\s*\)\s*(?:@\s*([0-9,\-\s]+?))?\s+(\S+)")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a resharding as written: a mesh shape, its devices (if given), a spec."""

    shape: tuple[int, ...]
    devices: tuple[int, ...] | None
    spec: Spec

    @classmethod
    def parse(cls, text: str) -> Side:
        """Read ``(2,4) S0RR`` or, with the devices in row-major order, ``(2,2)@0-1,4-5 S0RR``."""
        match = _SIDE.fullmatch(text.strip())
        if match is None:
            raise InvalidInput(
                f"{text[:80]!r}: expected a mesh and a spec such as '(2,4) S0RR' or '(2,2)@0-1,4-5 S0RR'"
            )
        shape = tuple(int(size) for size in match[1].split(","))
        check_shape("mesh", shape)
        return cls(shape=shape, devices=device_list(match[2]) if match[2] else None, spec=Spec.parse(match[3]))


def place(src: Side | str, dst: Side | str, cluster: Cluster, *, rounding: str = "chunk") -> tuple[Layout, Layout]:
    """Place both sides of a resharding on a cluster; a side without devices takes the next free ones.

    A mesh with several axes takes one host for each row of its last axis if there are enough hosts, as the literature
    does: ``(3,2)`` is two devices on each of three hosts. Otherwise devices are taken one after the other.

    >>> [str(side) for side in place("(2,3) RRR", "(3,2) RRR", Cluster.preset("p3_8xlarge", nodes=5))]
    ['(2,3)@0-2,4-6 RRR', '(3,2)@8-9,12-13,16-17 RRR']

    Args:
        src: the source side, parsed or as text.
        dst: the destination side, parsed or as text.
        cluster: the cluster.
        rounding: one of `ROUNDINGS`, for sizes that do not divide.

    Returns:
        The source and the destination layout.

    Raises:
        InvalidInput: a text cannot be read, a device does not exist, or there are too few devices.
    """
    sides: dict[str, Side] = {}
    for name, side in (("src", src), ("dst", dst)):
        with _named(name):
            sides[name] = Side.parse(side) if isinstance(side, str) else side
    used: set[int] = {d for side in sides.values() for d in side.devices or ()}
    layouts: list[Layout] = []
    for name, side in sides.items():
        with _named(name):
            mesh = _mesh(side, cluster, used, same=layouts[0].mesh.devices if layouts else sides["dst"].devices or ())
            layouts.append(Layout(mesh=mesh, spec=side.spec, rounding=rounding))
    return layouts[0], layouts[1]


@contextmanager
def _named(side: str) -> Iterator[None]:
    """Put the name of the side before the text of an error about it."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{side}: {error}") from None


def _mesh(side: Side, cluster: Cluster, used: set[int], same: Sequence[int]) -> Mesh:
    """A mesh of the side's own devices, or of the next free ones, which are then added to `used`.

    Where too few are free, the error says how to take those of the other side, `same`.
    """
    devices = side.devices
    if devices is None:
        devices = _rows_on_hosts(side.shape, cluster, used) or _dense(side.shape, cluster, used, same)
        used |= set(devices)
    bad = [d for d in devices if d >= cluster.num_devices]
    if bad:
        raise InvalidInput(f"device {bad[0]} does not exist; {cluster.name} has {cluster.num_devices}")
    return Mesh(shape=side.shape, devices=devices)


def host_of(cluster: Cluster) -> list[int]:
    """The host of each device; a device without a host is a host of its own."""
    hosts = cluster.node_host[: cluster.num_devices].tolist()
    lone = max(hosts, default=0) + 1
    return [h if h >= 0 else lone + d for d, h in enumerate(hosts)]


def _rows_on_hosts(shape: Sequence[int], cluster: Cluster, used: set[int]) -> tuple[int, ...] | None:
    if len(shape) < 2:
        return None
    rows, width = int(np.prod(shape[:-1])), shape[-1]
    hosts: dict[int, list[int]] = {}
    for device, host in enumerate(host_of(cluster)):
        hosts.setdefault(host, []).append(device)
    free = [devices for devices in hosts.values() if not used & set(devices) and len(devices) >= width]
    return tuple(d for devices in free[:rows] for d in devices[:width]) if len(free) >= rows else None


def _dense(shape: Sequence[int], cluster: Cluster, used: set[int], same: Sequence[int]) -> tuple[int, ...]:
    size = int(np.prod(shape))
    free = [d for d in range(cluster.num_devices) if d not in used]
    if len(free) < size:
        left = f"{cluster.name} has {cluster.num_devices} devices, {len(free)} of them free"
        mesh = f"({','.join(map(str, shape))})"
        fits = len(same) == size
        again = f"; to use the same devices write {Mesh(shape=tuple(shape), devices=tuple(same))}" if fits else ""
        raise InvalidInput(f"mesh {mesh}: needs {size} devices; {left}{again}")
    return tuple(free[:size])


def device_list(text: str) -> tuple[int, ...]:
    """The devices of a text such as ``0-3,8``."""
    devices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise InvalidInput(f"devices {text!r}: expected a list such as 0-3,8")
        devices += range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(devices) > 1 << 17:
            raise InvalidInput(f"devices {text!r}: too many")
    return tuple(devices)
