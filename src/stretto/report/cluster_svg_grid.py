# SPDX-License-Identifier: Apache-2.0
"""Draws regular networks: circles, grids, and one panel per dimension if there are too many devices."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..cluster.grid import links_per_device
from ..cluster.model import Cluster, Dimension
from ..cluster.shape import LinkClass
from .cluster_canvas import FAINT, Canvas

MAX_CIRCLE, MAX_FLAT, MAX_SOLID = 48, 256, 96
PITCH = 64.0
PANEL = 230.0


def fits(cluster: Cluster, where: NDArray[np.int64]) -> bool:
    """Whether every link can be drawn and still be distinguished."""
    if cluster.num_nodes != cluster.num_devices:
        return False
    count, axes = where.shape
    sizes = where.max(axis=0) + 1
    dense = any(d.kind == "fully_connected" and d.size > 2 for d in cluster.dimensions)
    if axes == 1:
        return bool(count <= (24 if dense else MAX_CIRCLE))
    most = MAX_FLAT if axes == 2 else MAX_SOLID
    return not dense and axes <= 4 and count <= most and int(sizes.max()) <= 32


def draw(canvas: Canvas, where: NDArray[np.int64]) -> None:
    """Draw every device and every link."""
    if where.shape[1] == 1:
        _circle(canvas)
    else:
        _lattice(canvas, where)


def _circle(canvas: Canvas) -> None:
    cluster = canvas.cluster
    count = cluster.num_devices
    radius = max(90.0, count * 56 / (2 * math.pi))
    spot = [
        (
            radius + 40 + radius * math.sin(2 * math.pi * i / count),
            radius + 30 - radius * math.cos(2 * math.pi * i / count),
        )
        for i in range(count)
    ]
    for at, (a, b) in _pairs(cluster):
        canvas.line(*spot[a], *spot[b], canvas.classes[canvas.of_link[at]])
    for i, (x, y) in enumerate(spot):
        canvas.box(x, y, 44, 24, "device", str(i))


def _lattice(canvas: Canvas, where: NDArray[np.int64]) -> None:
    """Draw dimension 0 to the right, 1 down, 2 into the depth, 3 beside; links that wrap around are drawn as stubs."""
    cluster = canvas.cluster
    sizes = where.max(axis=0) + 1
    deep = int(sizes[2]) if len(sizes) > 2 else 1
    # Each layer further back is shifted by a fraction of a cell, so that no device hides another.
    back = (0.92 / deep, -0.92 / deep)
    steps = np.array([(1, 0), (0, 1), back, (float(sizes[0]) + 1.3, 0.3)])[: len(sizes)]
    pitch = PITCH if deep == 1 else max(80.0, 27.0 * deep)
    spot = where @ (steps * pitch)
    spot -= spot.min(axis=0) - np.array([56, 44])
    wraps = False
    for at, (a, b) in _pairs(cluster):
        kind = canvas.classes[canvas.of_link[at]]
        move = where[b] - where[a]
        axis = int(np.argmax(np.abs(move)))
        if abs(int(move[axis])) <= 1:
            canvas.line(spot[a, 0], spot[a, 1], spot[b, 0], spot[b, 1], kind)
            continue
        wraps = True
        outward = steps[axis] * pitch * np.sign(-move[axis])
        for end, sign in ((a, 1.0), (b, -1.0)):
            x, y = spot[end] + sign * outward / np.hypot(*outward) * 0.62 * PITCH
            canvas.line(spot[end, 0], spot[end, 1], x, y, kind, dashed=True)
            canvas.reach(x, y)
    size = (38, 22) if cluster.num_devices <= 64 else (30, 20)
    for i, (x, y) in enumerate(spot.tolist()):
        canvas.box(x, y, *size, "device", str(i))
    if wraps:
        canvas.remarks.append("dotted ends wrap around to the other side")


def _pairs(cluster: Cluster) -> list[tuple[int, tuple[int, int]]]:
    """One link of each pair of devices that are linked."""
    ends = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)
    first: dict[tuple[int, int], int] = {}
    for at, (a, b) in enumerate(ends):
        first.setdefault((min(a, b), max(a, b)), at)
    return [(at, pair) for pair, at in first.items()]


def draw_dimensions(canvas: Canvas) -> None:
    """Draw one panel per dimension: one line of its devices, and how often that line repeats."""
    cluster = canvas.cluster
    for at, dim in enumerate(cluster.dimensions):
        x = at * (PANEL + 44)
        kind = next((c for c in canvas.classes if c.channel == f"dim{at}"), None)
        canvas.frame(x, 0, PANEL, PANEL + 88, f"dimension {at}")
        if kind is not None:
            _panel(canvas, dim, kind, x + PANEL / 2, 30 + PANEL / 2)
        each = dim.gb_per_s / max(1, links_per_device(dim.kind, dim.size))
        rates = f"{dim.gb_per_s:.4g} GB/s per device, {dim.alpha_us:.4g} us"
        facts = (
            (f"{dim.kind.replace('_', ' ')} of {dim.size}", 13.0, True),
            (rates if each == dim.gb_per_s else f"{rates}; {each:.4g} per link", 11.0, False),
            (f"{cluster.num_devices // dim.size} such groups", 11.0, False),
        )
        for row, (text, size, bold) in enumerate(facts):
            canvas.text(x + PANEL / 2, PANEL + 42 + 17 * row, text, size=size, bold=bold)
        if at:
            canvas.text(x - 22, PANEL / 2 + 36, "x", size=24, color=FAINT)
    strides = np.cumprod([1, *(d.size for d in cluster.dimensions)])[:-1].tolist()
    formula = " + ".join(f"{s}*c{k}" if s > 1 else f"c{k}" for k, s in enumerate(strides))
    canvas.remarks.append(f"device at (c0, c1, ...): {formula}; every device takes part in one group of each dimension")


def _panel(canvas: Canvas, dim: Dimension, kind: LinkClass, x: float, y: float) -> None:
    last = dim.size - 1
    shown = [str(i) for i in range(dim.size)]
    if dim.size > 9:
        shown = ["0", "1", "2", "3", "4", "...", str(last - 1), str(last)]
    count, radius = len(shown), 82.0
    turn = [2 * math.pi * i / count - (math.pi / 2 if count > 2 else math.pi) for i in range(count)]
    spot = [(x + radius * math.cos(t), y + radius * math.sin(t)) for t in turn]
    if dim.kind == "switch":
        for end in spot:
            canvas.line(x, y, *end, kind)
        canvas.box(x, y, 50, 26, "switch", "switch")
    elif dim.kind == "ring":
        for i in range(count if dim.size > 2 else count - 1):
            ends = (shown[i], shown[(i + 1) % count])
            canvas.line(*spot[i], *spot[(i + 1) % count], kind, dashed="..." in ends)
    else:
        for i in range(count):
            for j in range(i):
                canvas.line(*spot[i], *spot[j], kind)
    for label, (px, py) in zip(shown, spot, strict=True):
        canvas.box(px, py, 36, 22, "device", label)
