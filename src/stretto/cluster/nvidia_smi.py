# SPDX-License-Identifier: Apache-2.0
"""``nvidia-smi topo -m``: link classes between the GPUs and NICs of one host.

The matrix says how two parts meet (NV# NVLinks, PIX/PXB a PCIe switch, PHB/NODE a NUMA node, SYS the
sockets), so the PCIe tree is rebuilt from it: parts that meet at one level hang on one switch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput, unknown
from .model import Cluster
from .replicate import NicPort, replicate
from .wiring import (
    NVLINK_ALPHA_US,
    PCIE3_GB_PER_S,
    PCIE_ALPHA_US,
    RDMA_ALPHA_US,
    SOCKET_GB_PER_S,
    Wiring,
)

MAX_PARTS = 512
MOST_NVLINKS = 18
_CLASSES = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
_LEVELS = (("PIX",), ("PXB",), ("PHB", "NODE"))
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_HEADER = re.compile(r"^\s*GPU\d+(\s+\S+)*\s*$")


def looks_like(text: str) -> bool:
    """Whether a text holds the matrix: its first line of columns starts with a GPU."""
    lines = _ANSI.sub("", text[:20_000]).splitlines()
    return any(_HEADER.match(line[:2000]) and not re.search(r"\sX\s", line) for line in lines)


def read(
    text: str,
    name: str,
    nodes: int = 1,
    nvlink_gb_per_s: float = 25.0,
    pcie_gb_per_s: float = PCIE3_GB_PER_S,
    nic_gb_per_s: float = 12.5,
) -> Cluster:
    """Read the host of the matrix, or join several copies of it by one switch; the matrix holds no rates.

    Args:
        text: The output of ``nvidia-smi topo -m``.
        name: The cluster's name.
        nodes: How many hosts, >= 1.
        nvlink_gb_per_s: The one-way rate of one NVLink, > 0.
        pcie_gb_per_s: The one-way rate of a PCIe slot, > 0.
        nic_gb_per_s: The one-way rate of a NIC, > 0; used for several hosts only.

    Returns:
        The cluster; its notes say what was assumed.

    Raises:
        InvalidInput: The matrix is incomplete or contradicts itself.
    """
    columns, rows, affinity = _matrix(text)
    gpus = [part for part in columns if part.startswith("GPU")]
    nics = [part for part in columns if not part.startswith("GPU")]
    parts = [*gpus, *nics]
    classes = [[_between(a, b, columns, rows) for b in parts] for a in parts]
    near = [[a in affinity and affinity[a] == affinity.get(b) for b in parts] for a in parts]
    wiring = Wiring([part.lower() for part in gpus], hosts=0)
    labels = _nic_names(text)
    nic_ids = wiring.add([labels.get(nic, nic) for nic in nics], kind="nic", hosts=0)
    notes = _nvlinks(wiring, classes, len(gpus), nvlink_gb_per_s)
    _pcie_tree(wiring, classes, near, len(gpus), pcie_gb_per_s)
    notes += [
        f"assumed: {nvlink_gb_per_s:g} GB/s one way per NVLink, {pcie_gb_per_s:g} per PCIe slot, "
        f"{SOCKET_GB_PER_S:g} between sockets; {NVLINK_ALPHA_US:g} us NVLink, {PCIE_ALPHA_US:g} us PCIe",
    ]
    if nodes > 1:
        notes.append(f"assumed: {nic_gb_per_s:g} GB/s and {RDMA_ALPHA_US:g} us per NIC; one switch joins the hosts")
    port = NicPort(gb_per_s=nic_gb_per_s, alpha_us=RDMA_ALPHA_US, channel="rdma")
    return replicate(
        wiring.cluster(name, notes=notes),
        nodes,
        {int(nic): port for nic in nic_ids},
        name=name if nodes == 1 else f"{name}:{nodes}",
    )


def _matrix(text: str) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    lines = _ANSI.sub("", text).splitlines()
    start = next(at for at, line in enumerate(lines) if _HEADER.match(line[:20_000]))
    columns: list[str] = []
    for word in lines[start].split():
        if word in ("CPU", "NUMA"):
            break
        columns.append(word)
    if len(columns) > MAX_PARTS:
        raise InvalidInput(f"columns: at most {MAX_PARTS} GPUs and NICs, not {len(columns)}")
    if len(set(columns)) != len(columns):
        raise InvalidInput("columns: a GPU or NIC is named twice")
    rows: dict[str, list[str]] = {}
    affinity: dict[str, str] = {}
    for line in lines[start + 1 :]:
        words = line.split()
        if not words or words[0] not in columns:
            if rows:
                break
            continue
        if len(words) <= len(columns):
            raise InvalidInput(f"row {words[0]}: has {len(words) - 1} of {len(columns)} columns")
        if words[0] in rows:
            raise InvalidInput(f"row {words[0]}: stands there twice")
        rows[words[0]] = words[1 : len(columns) + 1]
        if words[len(columns) + 1 :]:
            affinity[words[0]] = words[len(columns) + 1]
    for part in columns:
        if part.startswith("GPU") and part not in rows:
            raise InvalidInput(f"row {part}: is missing (the text is cut off)")
    return columns, rows, affinity


def _between(a: str, b: str, columns: Sequence[str], rows: dict[str, list[str]]) -> str:
    found = [rows[x][columns.index(y)] for x, y in ((a, b), (b, a)) if x in rows]
    for word in found:
        if word not in _CLASSES and not re.fullmatch(r"NV[1-9][0-9]?", word):
            raise InvalidInput(f"row {a}, column {b}: {unknown('class', word, ('NV#', *_CLASSES))}")
    if len(set(found)) > 1:
        raise InvalidInput(f"row {a}, column {b}: says {found[0]}, but the other way round {found[1]}")
    return found[0] if found else "SYS"


def _nic_names(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\s*(NIC\d+):\s*(\S{1,100})\s*$", text, re.MULTILINE))


def _nvlinks(wiring: Wiring, classes: list[list[str]], gpus: int, each: float) -> list[str]:
    """Add direct links, or one NVSwitch where all pairs have equally many links and together more than a GPU has."""
    count = np.array([[int(c[2:]) if c.startswith("NV") else 0 for c in row[:gpus]] for row in classes[:gpus]])
    first, second = np.nonzero(np.triu(count))
    widths = set(count[first, second].tolist())
    if len(first) == gpus * (gpus - 1) // 2 and len(widths) == 1 and count[0].sum() > MOST_NVLINKS:
        hub = wiring.add(["nvswitch"], kind="switch", hosts=0)
        rate = widths.pop() * each
        wiring.duplex(wiring.devices, hub, gb_per_s=rate, alpha_us=NVLINK_ALPHA_US, back_us=0.0, channel="nvlink")
        return [f"assumed: an NVSwitch, as {count[0].sum()} NVLinks per GPU are more than any GPU has"]
    for width in sorted(widths, reverse=True):
        pick = count[first, second] == width
        wiring.duplex(first[pick], second[pick], gb_per_s=width * each, alpha_us=NVLINK_ALPHA_US, channel="nvlink")
    return []


def _pcie_tree(wiring: Wiring, classes: list[list[str]], near: list[list[bool]], gpus: int, rate: float) -> None:
    """Join parts level by level. The matrix hides the PCIe path of NVLinked pairs, so NICs and CPU affinity decide."""
    groups = [[part] for part in range(len(classes))]
    tops = list(range(len(classes)))
    for level, names in enumerate(_LEVELS):
        last = level == len(_LEVELS) - 1
        meet = np.isin(classes, names)
        merged = _merge(groups, meet | np.array(near) if last else meet)
        new_groups, new_tops, made = [], [], 0
        for members in merged:
            if len(members) == 1 and not last:
                top = tops[members[0]]
            else:
                label = f"cpu{made}" if last else f"pcie{level}.{made}"
                made += 1
                top = int(wiring.add([label], kind="switch", hosts=0)[0])
                for member in members:
                    up = PCIE_ALPHA_US if tops[member] < gpus else 0.0
                    wiring.duplex(tops[member], top, gb_per_s=rate, alpha_us=up, back_us=0.0, channel="pcie")
            new_tops.append(top)
            new_groups.append([part for member in members for part in groups[member]])
        groups, tops = new_groups, new_tops
    first, second = np.triu_indices(len(tops), 1)
    sockets = np.array(tops)
    wiring.duplex(sockets[first], sockets[second], gb_per_s=SOCKET_GB_PER_S, alpha_us=0.0, channel="pcie")


def _merge(groups: list[list[int]], meet: NDArray[np.bool_]) -> list[list[int]]:
    """Which groups meet at a level, as lists of group numbers; the order of the first member is kept."""
    home = list(range(len(groups)))
    for a, b in zip(*np.tril_indices(len(groups), -1), strict=True):
        if home[a] != home[b] and meet[np.ix_(groups[a], groups[b])].any():
            low, high = sorted((home[a], home[b]))
            home = [low if h == high else h for h in home]
    return [[at for at, h in enumerate(home) if h == root] for root in dict.fromkeys(home)]
