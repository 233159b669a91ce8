# SPDX-License-Identifier: Apache-2.0
"""The versioned file form of a `Cluster`, written for people and read back exactly.

Nodes and links stand in groups that share everything but their names and ends; ``between`` is a link each way
(``alpha_us: [there, back]`` where the two differ), ``one_way`` a link from the first to the second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import yaml
from msgspec import Meta
from numpy.typing import NDArray

from ..errors import InvalidInput
from ..files import convert, plain
from .model import DEVICE, GB_PER_S, KINDS, MAX_ALPHA_US, MAX_LINKS, MAX_NODES, NO_CAP, Cluster, Dimension

VERSION = 1

Ends = list[tuple[str, str]]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class _Nodes(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    kind: Literal["device", "switch", "nic"]
    host: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = -1
    multicast: bool = False
    names: Name | list[Name]


class _Links(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    channel: Name = "link"
    gb_per_s: float
    alpha_us: float | tuple[float, float]
    flow_gb_per_s: float | None = None
    incast: Annotated[int, Meta(ge=0)] | None = None
    between: Ends | None = None
    one_way: Ends | None = None


class _Dimension(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    kind: str
    size: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    gb_per_s: float
    alpha_us: float


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["cluster"]
    version: int
    name: Name
    channels: list[Name] = []
    devices_forward: bool = False
    reduce_us_per_mb: float | None = None
    dimensions: list[_Dimension] = []
    notes: list[str] = []
    incast_curves: list[list[tuple[int, float]]] = []
    nodes: list[_Nodes]
    links: list[_Links]


def dumps(cluster: Cluster, *, json: bool = False) -> str:
    """The text of a cluster's file, as JSON or as YAML."""
    form = _File(
        stretto="cluster",
        version=VERSION,
        name=cluster.name,
        channels=list(cluster.channels),
        devices_forward=cluster.devices_forward,
        reduce_us_per_mb=cluster.reduce_us_per_mb or None,
        dimensions=[
            _Dimension(kind=d.kind, size=d.size, gb_per_s=d.gb_per_s, alpha_us=d.alpha_us) for d in cluster.dimensions
        ],
        notes=list(cluster.notes),
        incast_curves=[list(curve) for curve in cluster.incast_curves],
        nodes=list(_node_groups(cluster)),
        links=list(_link_groups(cluster)),
    )
    data = plain(form)
    if json:
        return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return "".join(
        yaml.dump(
            {key: value},
            Dumper=dumper,
            default_flow_style=None if isinstance(value, list) and key != "notes" else False,
            sort_keys=False,
            width=100,
            allow_unicode=True,
        )
        for key, value in data.items()
    )


def read(data: Any, name: str) -> Cluster:
    """Make a cluster from the plain data of its file, which holds its name; errors carry the path of the bad field."""
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise InvalidInput(f"$.version: must be {VERSION}, not {version!r}")
    form = convert(data, _File, where="")
    names: list[str] = []
    kinds: list[int] = []
    hosts: list[int] = []
    copies: list[bool] = []
    for at, group in enumerate(form.nodes):
        found = _expand(group.names, f"$.nodes[{at}].names") if isinstance(group.names, str) else group.names
        names += found
        kinds += [KINDS.index(group.kind)] * len(found)
        hosts += [group.host] * len(found)
        copies += [group.multicast] * len(found)
        if group.multicast and group.kind == "device":
            raise InvalidInput(f"$.nodes[{at}].multicast: only switches and NICs multicast, not devices")
        if len(names) > MAX_NODES:
            raise InvalidInput(f"$.nodes: more than {MAX_NODES} nodes")
    order = sorted(range(len(names)), key=lambda i: kinds[i] != DEVICE)
    ids = {names[old]: new for new, old in enumerate(order)}
    if len(ids) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise InvalidInput(f"$.nodes: names must differ; {twice!r} is used twice")
    channels = list(dict.fromkeys((*form.channels, *(group.channel for group in form.links))))
    parts = [_links_of(group, ids, channels, len(form.incast_curves), at) for at, group in enumerate(form.links)]
    ends = np.concatenate([np.zeros((0, 2), np.int32), *(part[0] for part in parts)])
    table = np.concatenate([np.zeros((0, 5)), *(part[1] for part in parts)])
    return Cluster(
        name=form.name,
        node_names=tuple(names[i] for i in order),
        node_kind=np.array([kinds[i] for i in order], np.int8),
        node_host=np.array([hosts[i] for i in order], np.int32),
        link_src=ends[:, 0].copy(),
        link_dst=ends[:, 1].copy(),
        link_alpha_us=table[:, 0].copy(),
        link_gb_per_s=table[:, 1].copy(),
        link_channel=table[:, 2].astype(np.int16),
        channels=tuple(channels),
        link_flow_gb_per_s=table[:, 3].copy(),
        link_incast=table[:, 4].astype(np.int16),
        incast_curves=tuple(tuple((int(n), float(s)) for n, s in curve) for curve in form.incast_curves),
        dimensions=tuple(
            Dimension(kind=d.kind, size=d.size, gb_per_s=d.gb_per_s, alpha_us=d.alpha_us) for d in form.dimensions
        ),
        devices_forward=form.devices_forward,
        reduce_us_per_mb=form.reduce_us_per_mb or 0.0,
        notes=tuple(form.notes),
        node_multicast=np.array([copies[i] for i in order], np.bool_),
    )


def _links_of(
    group: _Links, ids: dict[str, int], channels: list[str], curves: int, at: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    path = f"$.links[{at}]"
    if (group.between is None) == (group.one_way is None):
        raise InvalidInput(f"{path}: needs exactly one of between and one_way")
    key, pairs = ("between", group.between) if group.between is not None else ("one_way", group.one_way)
    assert pairs is not None
    alpha = group.alpha_us if isinstance(group.alpha_us, tuple) else (group.alpha_us,) * 2
    if isinstance(group.alpha_us, tuple) and key == "one_way":
        raise InvalidInput(f"{path}.alpha_us: must be one number for one_way links")
    flow = NO_CAP if group.flow_gb_per_s is None else group.flow_gb_per_s
    for name, value in (("gb_per_s", group.gb_per_s), ("flow_gb_per_s", flow)):
        if not value > 0 or (value == NO_CAP and name == "gb_per_s"):
            raise InvalidInput(f"{path}.{name}: must be > 0, not {value:g}")
        if not GB_PER_S[0] <= value <= GB_PER_S[1] and value != NO_CAP:
            raise InvalidInput(f"{path}.{name}: must be {GB_PER_S[0]:g} to {GB_PER_S[1]:g}, not {value:g}")
    if not all(0 <= a < NO_CAP for a in alpha):
        raise InvalidInput(f"{path}.alpha_us: must be >= 0, not {min(alpha):g}")
    if max(alpha) > MAX_ALPHA_US:
        raise InvalidInput(f"{path}.alpha_us: must be at most {MAX_ALPHA_US:g}, not {max(alpha):g}")
    if group.incast is not None and group.incast >= curves:
        raise InvalidInput(f"{path}.incast: there are {curves} incast_curves, no number {group.incast}")
    if len(pairs) > MAX_LINKS:
        raise InvalidInput(f"{path}: more than {MAX_LINKS} links")
    ends = np.empty((len(pairs), 2), np.int32)
    for row, (a, b) in enumerate(pairs):
        for column, name in enumerate((a, b)):
            if name not in ids:
                raise InvalidInput(f"{path}.{key}[{row}]: no node named {name!r}")
            ends[row, column] = ids[name]
        if a == b:
            raise InvalidInput(f"{path}.{key}[{row}]: a link must not lead to its own source {a!r}")
    if key == "between":
        ends = np.stack([ends, ends[:, ::-1]], 1).reshape(-1, 2)
    table = np.empty((len(ends), 5))
    table[:, 0] = np.resize(np.array(alpha), len(ends)) if len(ends) else 0
    table[:, 1:] = (
        group.gb_per_s,
        channels.index(group.channel),
        flow,
        -1 if group.incast is None else group.incast,
    )
    return ends, table


_RANGE = re.compile(r"(.*)\[([0-9]{1,9})\.\.([0-9]{1,9})\]", re.DOTALL)


def _expand(text: str, path: str) -> list[str]:
    """``gpu[0..3]`` as four names; any other text is one name."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    first, last = int(match[2]), int(match[3])
    if not 0 <= last - first < MAX_NODES:
        raise InvalidInput(f"{path}: a range holds 1 to {MAX_NODES} names, not {text!r}")
    return [f"{match[1]}{i}" for i in range(first, last + 1)]


def _node_groups(cluster: Cluster) -> Iterator[_Nodes]:
    columns = cluster.node_kind.tolist(), cluster.node_host.tolist(), cluster.node_multicast.tolist()
    shared, names = list(zip(*columns, strict=True)), cluster.node_names
    first = 0
    for at in range(1, len(names) + 1):
        if at == len(names) or shared[at] != shared[first]:
            kind, host, copies = shared[first]
            run = _compress(list(names[first:at]))
            yield _Nodes(kind=KINDS[kind], host=host, multicast=copies, names=run)  # type: ignore[arg-type]
            first = at


def _compress(names: list[str]) -> str | list[str]:
    if len(names) == 1 and not _RANGE.fullmatch(names[0]):
        return names[0]
    match = re.fullmatch(r"(.*?)(0|[1-9][0-9]{0,8})", names[0], re.DOTALL)
    if len(names) > 1 and match is not None:
        text = f"{match[1]}[{match[2]}..{int(match[2]) + len(names) - 1}]"
        if _RANGE.fullmatch(text) and _expand(text, "") == names:
            return text
    return names


def _link_groups(cluster: Cluster) -> Iterator[_Links]:
    """Runs of links that share their attributes; a link followed by its reverse becomes a pair."""
    names = cluster.node_names
    src, dst = cluster.link_src.tolist(), cluster.link_dst.tolist()
    alpha = cluster.link_alpha_us.tolist()
    rest = list(
        zip(
            cluster.link_channel.tolist(),
            cluster.link_gb_per_s.tolist(),
            cluster.link_flow_gb_per_s.tolist(),
            cluster.link_incast.tolist(),
            strict=True,
        )
    )
    group: _Links | None = None
    previous: Any = None
    at = 0
    while at < len(src):
        pair = at + 1 < len(src) and (src[at], dst[at]) == (dst[at + 1], src[at + 1]) and rest[at] == rest[at + 1]
        there, back = alpha[at], alpha[at + 1] if pair else alpha[at]
        if group is None or previous != (pair, rest[at], there, back):
            if group is not None:
                yield group
            previous = (pair, rest[at], there, back)
            channel, rate, flow, incast = rest[at]
            group = _Links(
                channel=cluster.channels[channel],
                gb_per_s=rate,
                alpha_us=there if there == back else (there, back),
                flow_gb_per_s=None if flow == NO_CAP else flow,
                incast=None if incast < 0 else incast,
            )
            if pair:
                group.between = []
            else:
                group.one_way = []
        ends = group.between if pair else group.one_way
        assert ends is not None
        ends.append((names[src[at]], names[dst[at]]))
        at += 2 if pair else 1
    if group is not None:
        yield group
