# SPDX-License-Identifier: Apache-2.0
"""Draws a cluster: `picture` for the terminal, `to_text` as plain text, `to_svg` as an SVG drawing."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..cluster.grid import links_per_device
from ..cluster.model import DEVICE, Cluster, Dimension
from ..cluster.shape import (
    HostGroup,
    LinkClass,
    capped,
    coordinates,
    host_groups,
    levels,
    link_classes,
    local_name,
    ranges,
    size_of,
)
from .cluster_svg import to_svg

__all__ = ["picture", "to_svg", "to_text"]

MAX_MATRIX = 16
MAX_ROWS = 24
MAX_GRID, CORNER = 12, 5
STYLES = {"nvlink": "green", "xgmi": "green", "pcie": "yellow", "rdma": "cyan", "ethernet": "magenta"}


def to_text(cluster: Cluster, *, width: int = 100) -> str:
    """The picture as plain text, without colors.

    >>> print(to_text(Cluster.preset("ring", nodes=4)).splitlines()[2])
    ╭─ 0 ── 1 ── 2 ── 3 ─╮
    """
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(picture(cluster))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def picture(cluster: Cluster) -> RenderableType:
    """A terminal picture of which nodes are linked, at what rate and latency; equal hosts are drawn once."""
    parts: list[RenderableType] = [_title(cluster), ""]
    if np.any(cluster.node_host[: cluster.num_devices] >= 0):
        parts += _hosts(cluster)
    elif cluster.dimensions or coordinates(cluster) is not None:
        parts += _regular(cluster)
    else:
        parts += _levels(cluster)
    parts += ["", _classes(cluster)]
    if cluster.notes:
        parts += ["", *(Text(f"note: {note}", style="dim") for note in cluster.notes)]
    return Group(*parts)


def _title(cluster: Cluster) -> Text:
    via = "devices pass traffic on" if cluster.devices_forward else "devices do not pass traffic on"
    return Text.assemble((cluster.name, "bold"), f": {size_of(cluster)}; {via}")


def _classes(cluster: Cluster) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, justify in (("channel", "left"), ("rate", "right"), ("latency", "left"), ("links", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for kind in link_classes(cluster)[0]:
        table.add_row(_channel(kind), kind.rate + capped(kind), kind.latency, str(kind.count))
    return table


def _channel(kind: LinkClass) -> Text:
    return Text(kind.channel, style=STYLES.get(kind.channel, "blue"))


def _hosts(cluster: Cluster) -> list[RenderableType]:
    groups = host_groups(cluster)
    fabric = [n for n in range(cluster.num_devices, cluster.num_nodes) if cluster.node_host[n] < 0]
    parts: list[RenderableType] = []
    shown = groups[:MAX_ROWS]
    for group in shown:
        numbers = ranges(str(h) for h in group.hosts)
        title = f"hosts {numbers} ({len(group.hosts)} alike)" if len(group.hosts) > 1 else f"host {numbers}"
        parts.append(Panel(_host(cluster, group), title=title, title_align="left", expand=False))
    if len(groups) > len(shown):
        parts.append(Text(f"... and {len(groups) - len(shown)} more kinds of hosts", style="dim"))
    if fabric:
        table = _rows(cluster, fabric, {node: 1 << 20 for node in fabric}, whole=True)
        parts.append(Panel(table, title="between the hosts", title_align="left", expand=False))
    else:
        parts += list(_across(cluster))
    return parts


def _host(cluster: Cluster, group: HostGroup) -> RenderableType:
    devices = [n for n in group.nodes if cluster.node_kind[n] == DEVICE]
    rest = [n for n in group.nodes if cluster.node_kind[n] != DEVICE]
    parts: list[RenderableType] = [Text(" ".join(local_name(cluster, n) for n in devices), style="bold")]
    matrix = _matrix(cluster, devices)
    if matrix is not None:
        parts += ["", matrix]
    if rest:
        depth = levels(cluster, group.nodes)
        rest.sort(key=lambda n: (depth[n], n))
        parts += ["", _rows(cluster, rest, depth)]
    return Group(*parts)


def _rows(cluster: Cluster, nodes: list[int], depth: dict[int, int], *, whole: bool = False) -> Table:
    """Each of these switches and NICs with the nodes linked below it; a link is listed once, at its upper end."""
    table = Table.grid(padding=(0, 2))
    for node in nodes[:MAX_ROWS]:
        for at, line in enumerate(_attached(cluster, node, depth, whole=whole)):
            name = cluster.node_names[node] if whole else local_name(cluster, node)
            table.add_row(Text(name if at == 0 else "", style="bold"), line)
    if len(nodes) > MAX_ROWS:
        table.add_row("...", f"and {len(nodes) - MAX_ROWS} more")
    return table


def _matrix(cluster: Cluster, devices: list[int]) -> RenderableType | None:
    """Direct links between the devices of a host, in GB/s."""
    place = {node: at for at, node in enumerate(devices)}
    rate = np.zeros((len(devices), len(devices)))
    for src, dst, each in zip(
        cluster.link_src.tolist(), cluster.link_dst.tolist(), cluster.link_gb_per_s.tolist(), strict=True
    ):
        if src in place and dst in place:
            rate[place[src], place[dst]] += each
    if not rate.any():
        return None
    if len(devices) > MAX_MATRIX:
        return Text(f"{np.count_nonzero(rate)} direct links between the devices", style="dim")
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("GB/s", style="dim")
    names = [local_name(cluster, node) for node in devices]
    stem = re.sub(r"\d.*", "", names[0])
    for name in names:
        table.add_column(name.removeprefix(stem), justify="right", min_width=3)
    for at, node in enumerate(devices):
        cells = ["-" if at == to else f"{rate[at, to]:.3g}" if rate[at, to] else "." for to in range(len(devices))]
        table.add_row(local_name(cluster, node), *cells)
    return table


def _attached(cluster: Cluster, node: int, depth: dict[int, int], *, whole: bool) -> Iterator[Text]:
    """The nodes linked below a switch or NIC, one line per link class; `whole` counts nodes instead of naming them."""
    classes, of_link = link_classes(cluster)
    outgoing = set(cluster.link_dst[cluster.link_src == node].tolist())
    incoming = set(cluster.link_src[cluster.link_dst == node].tolist())
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for at in np.flatnonzero((cluster.link_src == node) | (cluster.link_dst == node)).tolist():
        src, dst = int(cluster.link_src[at]), int(cluster.link_dst[at])
        other = dst if src == node else src
        way = "" if other in outgoing and other in incoming else "to " if src == node else "from "
        if (src == node or way) and depth.get(other, -1) <= depth[node]:
            found[int(of_link[at]), way].append(other)
    for (kind, way), others in found.items():
        text = _count(cluster, others) if whole else ranges(local_name(cluster, n) for n in others)
        yield Text.assemble(f"{way}{text}  ", _channel(classes[kind]), f" {classes[kind].rate}", capped(classes[kind]))


def _count(cluster: Cluster, nodes: list[int]) -> str:
    hosts = {int(cluster.node_host[n]) for n in nodes}
    kinds = {"device": 0, "switch": 0, "nic": 0}
    for node in nodes:
        kinds[cluster.node(node).kind] += 1
    words = {"device": ("device", "devices"), "switch": ("switch", "switches"), "nic": ("NIC", "NICs")}
    text = " and ".join(f"{count} {words[kind][count > 1]}" for kind, count in kinds.items() if count)
    if hosts == {-1}:
        return ranges(cluster.node_names[n] for n in nodes)
    first = [local_name(cluster, n) for n in nodes if cluster.node_host[n] == min(hosts)]
    if len(hosts) == 1:
        return f"{text} of host {min(hosts)}: {ranges(first)}"
    return f"{text} of {len(hosts)} hosts: {ranges(first)} of each"


def _across(cluster: Cluster) -> Iterator[RenderableType]:
    """Links that lead directly from one host to another."""
    classes, of_link = link_classes(cluster)
    hosts = cluster.node_host
    at = np.flatnonzero(hosts[cluster.link_src] != hosts[cluster.link_dst])
    if not len(at):
        return
    table = Table.grid(padding=(0, 2))
    for link in at[:MAX_ROWS].tolist():
        a, b = (cluster.node_names[int(x[link])] for x in (cluster.link_src, cluster.link_dst))
        kind = classes[int(of_link[link])]
        table.add_row(f"{a} > {b}", Text.assemble(_channel(kind), f" {kind.rate}"))
    if len(at) > MAX_ROWS:
        table.add_row("...", f"and {len(at) - MAX_ROWS} more")
    yield Panel(table, title="between the hosts", title_align="left", expand=False)


def _regular(cluster: Cluster) -> list[RenderableType]:
    where = coordinates(cluster)
    assert where is not None
    sizes = (where.max(axis=0) + 1).tolist()
    parts: list[RenderableType] = []
    if len(sizes) == 1 and cluster.dimensions[:1] and cluster.dimensions[0].kind == "ring":
        parts += [_ring(sizes[0])]
    elif len(sizes) == 2 and cluster.num_nodes == cluster.num_devices:
        wrap = [bool(cluster.dimensions) and size > 2 for size in sizes]
        if not cluster.dimensions or all(d.kind == "ring" for d in cluster.dimensions):
            parts += [_grid(sizes, wrap)]
    if cluster.dimensions:
        parts += [*([""] if parts else []), _dimensions(cluster)]
        stride = np.cumprod([1, *sizes[:-1]]).tolist()
        formula = " + ".join(f"{s}*c{k}" if s > 1 else f"c{k}" for k, s in enumerate(stride))
        parts += ["", Text(f"device at (c0, c1, ...): {formula}", style="dim")]
    elif not parts:
        parts.append(Text(f"a mesh of {'x'.join(map(str, sizes))} devices"))
    return parts


def _dimensions(cluster: Cluster) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("dim", "kind", "size", "per device", "per link", "latency", "one line of it"):
        table.add_column(column, justify="right" if column in ("size", "per device", "per link") else "left")
    for at, dim in enumerate(cluster.dimensions):
        each = dim.gb_per_s / max(1, links_per_device(dim.kind, dim.size))
        table.add_row(
            f"dim{at}",
            dim.kind.replace("_", " "),
            str(dim.size),
            f"{dim.gb_per_s:.4g} GB/s",
            f"{each:.4g} GB/s",
            f"{dim.alpha_us:.4g} us",
            _line(dim),
        )
    return table


def _line(dim: Dimension) -> str:
    shown = [str(i) for i in range(dim.size)] if dim.size <= 5 else ["0", "1", "2", "..", str(dim.size - 1)]
    if dim.kind == "ring":
        return " - ".join(shown) + (" - back to 0" if dim.size > 2 else "")
    if dim.kind == "switch":
        return "switch < " + " ".join(shown)
    return " ".join(shown) + ", each with each"


def _ring(size: int) -> Text:
    names = [str(i) for i in range(size)] if size <= MAX_GRID else ["0", "1", "2", "..", str(size - 1)]
    inner = " ── ".join(names)
    if size <= 2:
        return Text(inner)
    return Text(f"╭─ {inner} ─╮\n╰{'─' * (len(inner) + 4)}╯")


def _grid(sizes: list[int], wrap: list[bool]) -> Text:
    """A grid with dimension 0 to the right and dimension 1 downwards; dots at the edge are links that wrap around."""
    columns, rows = (size if size <= MAX_GRID else CORNER for size in sizes)
    width = len(str(sizes[0] * sizes[1] - 1))
    side = ".." if wrap[0] else "  "
    rim = "  " + "".join(":".rjust(width) + "    " for _ in range(columns)) if wrap[1] else ""
    out = [rim] if rim.strip() else []
    for row in range(rows):
        if row:
            out.append("  " + "".join("│".rjust(width) + "    " for _ in range(columns)))
        names = [str(row * sizes[0] + column).rjust(width) for column in range(columns)]
        cut = " .." if columns < sizes[0] else side
        out.append(side + " ── ".join(names) + cut)
    if rows < sizes[1]:
        out.append("  ...")
    elif rim.strip():
        out.append(rim)
    return Text("\n".join(out))


def _levels(cluster: Cluster) -> list[RenderableType]:
    """Devices without hosts, under switches or without any: one row per level of switches."""
    depth = levels(cluster, range(cluster.num_nodes))
    rank = np.array([depth[n] for n in range(cluster.num_nodes)])
    matrix = _matrix(cluster, list(range(cluster.num_devices)))
    table = Table.grid(padding=(0, 2))
    for level in sorted(set(depth.values()), reverse=True):
        nodes = [n for n in range(cluster.num_nodes) if depth[n] == level]
        down = (rank[cluster.link_src] == level) & (rank[cluster.link_dst] < level)
        per = np.unique(np.bincount(cluster.link_src[down], minlength=cluster.num_nodes)[nodes])
        each = f"{per[0]}" if len(per) == 1 else f"{per[0]} to {per[-1]}"
        below = f"{each} links down each" if level else ""
        table.add_row(Text(ranges(cluster.node_names[n] for n in nodes), style="bold"), str(len(nodes)), below)
    parts: list[RenderableType] = [table]
    switches = sorted(range(cluster.num_devices, cluster.num_nodes), key=lambda n: (-depth[n], n))
    if 0 < len(switches) <= MAX_ROWS:
        parts += ["", _rows(cluster, switches, depth)]
    return parts if matrix is None else [*parts, "", matrix]
