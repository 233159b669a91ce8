# SPDX-License-Identifier: Apache-2.0
"""TACCL topology JSON (``taccl/examples/topo``): one host by its profile, or by matrices of links.

All costs in such a file are microseconds for one chunk, whose size the file does not hold except, by habit,
at the end of its name (``NDv2_1MB``). Matrices are indexed [destination][source].
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ..errors import InvalidInput
from ..files import convert
from ..units import MB, parse_bytes
from .model import Cluster
from .presets.ndv2 import cube_mesh
from .replicate import NicPort, replicate
from .wiring import PCIE3_GB_PER_S, Wiring, numbered

MAX_GPUS = 1024

Matrix = list[list[float]]


class _File(msgspec.Struct):
    name: str
    gpus_per_node: Annotated[int, Meta(ge=1, le=MAX_GPUS)]
    alpha: float
    nics_per_node: Annotated[int, Meta(ge=-1, le=MAX_GPUS)] = -1
    remote_alpha: float = -1.0
    remote_beta: float = -1.0
    node_betas_list: list[float] | None = None
    links: Matrix | None = None
    betas: Matrix | None = None


def read(data: Any, name: str, nodes: int = 1, chunk_bytes: float = 0.0) -> Cluster:
    """Read the host of the file, or join several copies of it by one switch.

    Args:
        data: The parsed JSON.
        name: The cluster's name.
        nodes: How many hosts, >= 1.
        chunk_bytes: The bytes that the file's costs are meant for; taken from the file's name, else 1 MB, when 0.

    Returns:
        The cluster; its notes say what was assumed.

    Raises:
        InvalidInput: A field is missing or out of range.
    """
    form = convert(data, _File, where="")
    size, notes = _chunk_bytes(form.name, chunk_bytes)
    _check(form.alpha, "$.alpha", least=0.0)
    wiring = Wiring(numbered("gpu", form.gpus_per_node), hosts=0)
    if form.links is not None:
        _custom(wiring, form, size)
    elif form.node_betas_list is not None:
        notes += _known(wiring, form, size)
    else:
        raise InvalidInput("$.node_betas_list: is missing (or give links and betas)")
    ports: dict[int, NicPort] = {}
    if nodes > 1 and form.nics_per_node > 0:
        ports = _nics(wiring, form, size)
        notes.append("assumed: GPUs share NICs evenly, over PCIe that is no bottleneck; one switch joins the hosts")
    # A custom topology need not link every pair, and TACCL's own routes pass through GPUs.
    box = wiring.cluster(name, notes=notes, devices_forward=form.links is not None)
    return replicate(box, nodes, ports, name=name if nodes == 1 else f"{name}:{nodes}")


def _chunk_bytes(name: str, given: float) -> tuple[float, list[str]]:
    note = "if the file's costs were scaled up (TACCL's guide advises it for small chunks), so are ours"
    if given:
        return float(given), [f"costs are taken per chunk of {given:g} bytes; {note}"]
    match = re.search(r"_([0-9]{1,6}[KMG]B)$", name)
    size = parse_bytes(match[1]) if match else MB
    source = f"by its name {name!r}" if match else "assumed"
    return float(size), [f"costs are taken per chunk of {size} bytes ({source}); {note}"]


def _nics(wiring: Wiring, form: _File, size: float) -> dict[int, NicPort]:
    _check(form.remote_alpha, "$.remote_alpha", least=0.0)
    _check(form.remote_beta, "$.remote_beta")
    rate = size / form.remote_beta / 1000
    gpus, count = form.gpus_per_node, form.nics_per_node
    nics = wiring.add(numbered("nic", count), kind="nic", hosts=0)
    pcie = max(PCIE3_GB_PER_S, rate)
    sharing = nics[np.arange(gpus) * count // gpus]
    wiring.duplex(wiring.devices, sharing, gb_per_s=pcie, alpha_us=0.0, channel="pcie")
    return {int(nic): NicPort(gb_per_s=rate, alpha_us=form.remote_alpha, channel="rdma") for nic in nics}


def _known(wiring: Wiring, form: _File, size: float) -> list[str]:
    betas = form.node_betas_list or []
    for at, beta in enumerate(betas):
        _check(beta, f"$.node_betas_list[{at}]")
    rates = [size / beta / 1000 for beta in betas]
    if len(rates) == 1:
        hub = wiring.add(["nvswitch"], kind="switch", hosts=0)
        wiring.duplex(wiring.devices, hub, gb_per_s=rates[0], alpha_us=form.alpha, back_us=0.0, channel="nvlink")
        return ["one beta: every GPU has one port on a switch"]
    if len(rates) == 2 and form.gpus_per_node == 8:
        gpus = wiring.devices.reshape(1, 8)
        cube_mesh(wiring, gpus, double=rates[0], single=rates[1], alpha_us=form.alpha)
        sockets = wiring.add(["pcie"], kind="switch", hosts=0)
        wiring.duplex(wiring.devices, sockets, gb_per_s=PCIE3_GB_PER_S, alpha_us=0.0, channel="pcie")
        return [
            "two betas and 8 GPUs: the NVLink cube-mesh of NDv2",
            f"assumed: pairs without NVLink meet over PCIe at {PCIE3_GB_PER_S:g} GB/s",
        ]
    raise InvalidInput(
        f"$.node_betas_list: must be one beta (a switch) or two with 8 GPUs (NDv2), not {len(rates)} "
        f"with {form.gpus_per_node} GPUs"
    )


def _custom(wiring: Wiring, form: _File, size: float) -> None:
    gpus = form.gpus_per_node
    if form.betas is None:
        raise InvalidInput("$.betas: is missing beside links")
    for key, matrix in (("links", form.links or []), ("betas", form.betas)):
        if len(matrix) != gpus or any(len(row) != gpus for row in matrix):
            raise InvalidInput(f"$.{key}: must be {gpus} rows of {gpus} numbers")
    count = np.array(form.links, np.float64)
    beta = np.array(form.betas, np.float64)
    linked = np.argwhere(count != 0)
    dst, src = linked.T
    for key, good in (
        ("links", (dst != src) & (count[dst, src] > 0) & np.isfinite(count[dst, src])),
        ("betas", (beta[dst, src] > 0) & np.isfinite(beta[dst, src])),
    ):
        bad = np.flatnonzero(~good)
        if len(bad):
            row, column = linked[bad[0]].tolist()
            if row == column:
                raise InvalidInput(f"$.links[{row}][{column}]: a GPU is not linked with itself")
            value = {"links": count, "betas": beta}[key][row, column]
            raise InvalidInput(f"$.{key}[{row}][{column}]: must be > 0, not {value:g}")
    rate = count[dst, src] * size / beta[dst, src] / 1000
    wiring.link(src, dst, gb_per_s=rate, alpha_us=form.alpha, channel="nvlink")


def _check(value: float, path: str, *, least: float | None = None) -> None:
    good = value < 1e12 and (value > 0 if least is None else value >= least)
    if not good:
        raise InvalidInput(f"{path}: must be {'> 0' if least is None else f'>= {least:g}'}, not {value:g}")
