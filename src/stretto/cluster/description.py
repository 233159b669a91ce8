# SPDX-License-Identifier: Apache-2.0
"""Clusters in three lines, as a person says them: hosts, GPUs of a host, network of a host.

.. code-block:: yaml

    hosts: 2
    gpus: 8 x h100
    network: 8 x 400gbit

The same fits on one line, with commas. Rates inside a host are those of the GPU's data sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidInput, unknown
from ..units import counted, parse_rate
from .model import Cluster
from .wiring import (
    ETHERNET_ALPHA_US,
    MAX_DEVICES,
    NVLINK_ALPHA_US,
    PCIE3_GB_PER_S,
    PCIE4_GB_PER_S,
    PCIE5_GB_PER_S,
    PCIE_ALPHA_US,
    RDMA_ALPHA_US,
    Wiring,
    host_names,
    numbered,
)

KEYS = ("hosts", "gpus", "network")
MAX_PER_HOST = 1024
RDMA_FROM_GB_PER_S = 12.5
"""Assumed: a NIC of 100 Gbit/s or more is RDMA, a slower one TCP over Ethernet."""


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """A kind of GPU: one-way rates of its NVLinks together (0: it has none) and of its PCIe slot, in GB/s."""

    nvlink_gb_per_s: float
    pcie_gb_per_s: float


GPUS = {
    "v100": GpuKind(nvlink_gb_per_s=150.0, pcie_gb_per_s=PCIE3_GB_PER_S),
    "a100": GpuKind(nvlink_gb_per_s=300.0, pcie_gb_per_s=PCIE4_GB_PER_S),
    "a800": GpuKind(nvlink_gb_per_s=200.0, pcie_gb_per_s=PCIE4_GB_PER_S),
    "h800": GpuKind(nvlink_gb_per_s=200.0, pcie_gb_per_s=PCIE5_GB_PER_S),
    "h100": GpuKind(nvlink_gb_per_s=450.0, pcie_gb_per_s=PCIE5_GB_PER_S),
    "h200": GpuKind(nvlink_gb_per_s=450.0, pcie_gb_per_s=PCIE5_GB_PER_S),
    "b200": GpuKind(nvlink_gb_per_s=900.0, pcie_gb_per_s=PCIE5_GB_PER_S),
    "t4": GpuKind(nvlink_gb_per_s=0.0, pcie_gb_per_s=PCIE3_GB_PER_S),
    "a10": GpuKind(nvlink_gb_per_s=0.0, pcie_gb_per_s=PCIE4_GB_PER_S),
    "a40": GpuKind(nvlink_gb_per_s=0.0, pcie_gb_per_s=PCIE4_GB_PER_S),
    "l4": GpuKind(nvlink_gb_per_s=0.0, pcie_gb_per_s=PCIE4_GB_PER_S / 2),
    "l40s": GpuKind(nvlink_gb_per_s=0.0, pcie_gb_per_s=PCIE4_GB_PER_S),
    "rtx4090": GpuKind(nvlink_gb_per_s=0.0, pcie_gb_per_s=PCIE4_GB_PER_S),
}
"""From data sheets; SXM boards where there are several (a PCIe card has no NVSwitch)."""

_COUNTED = re.compile(r"(?:([0-9]{1,6})\s*[xX×*]\s*)?(\S.*)")


def looks_like(text: str) -> bool:
    """Whether a text, in lines or on one line, is a description rather than a path or a preset.

    On one line one known key is enough, so that an error can name a misspelled one.

    >>> looks_like("hosts: 2, gpu: 8 x h100, network: 8 x 400gbit"), looks_like("dgx2:2")
    (True, False)
    """
    if "\n" not in text.strip():
        return bool(re.search(r"(?:^|,)\s*(hosts|gpus|network)\s*:", text))
    return bool(re.match(r"\s*(hosts|gpus|network)\s*:\s*\S", text)) and bool(re.search(r"\bgpus\s*:", text))


def parse(text: str) -> dict[str, Any]:
    """The keys and values of a description on one line or several.

    >>> parse("hosts: 2, gpus: 8 x h100")
    {'hosts': '2', 'gpus': '8 x h100'}
    """
    found: dict[str, Any] = {}
    for part in re.split(r"[,\n]", text):
        if not part.strip() or part.lstrip().startswith("#"):
            continue
        key, colon, value = part.partition(":")
        if not colon:
            raise InvalidInput(f"{part.strip()[:60]!r}: expected 'key: value', with a key of {', '.join(KEYS)}")
        if key.strip() in found:
            raise InvalidInput(f"{key.strip()}: is given twice")
        found[key.strip()] = value = value.partition("#")[0].strip()
        if more := re.search(rf"\s({'|'.join(KEYS)})\s*:", value):
            raise InvalidInput(f"a comma is missing after '{key.strip()}: {value[: more.start()].strip()[:60]}'")
    return found


def read(data: dict[str, Any], name: str = "") -> Cluster:
    """The cluster of a description.

    Args:
        data: Its keys and values.
        name: The cluster's name; empty: what its hosts are, as in ``2 hosts of 8 x h100``.

    Returns:
        The cluster; its notes say what was assumed.

    Raises:
        InvalidInput: A key or a value is not known.

    >>> read({"hosts": 2, "gpus": "8 x h100", "network": "8 x 400gbit"}, "mine")
    <Cluster mine: 16 devices on 2 hosts, 96 links over nvlink, pcie, rdma>
    """
    for key in data:
        if key not in KEYS:
            raise unknown("key of a cluster description", key, KEYS)
    if "gpus" not in data:
        raise InvalidInput("gpus: is missing; write for example 'gpus: 8 x h100'")
    hosts = _whole(data.get("hosts", 1), "hosts", MAX_DEVICES)
    gpus, kind_name = _counted(data["gpus"], "gpus")
    kind_name = kind_name.lower()
    if kind_name.isdecimal():
        raise InvalidInput(f"gpus: {kind_name[:60]}: write which GPU, too, such as {kind_name[:60]} x a100")
    if (short := re.fullmatch(r"(\d+)\s+(\S+)", kind_name)) and short[2] in GPUS:
        raise InvalidInput(f"gpus: an x is missing: write {short[1]} x {short[2]}")
    if kind_name not in GPUS:
        raise InvalidInput(
            f"gpus: {unknown('GPU', kind_name, GPUS)} (other machines: 'stretto cluster list', or a file)"
        )
    if hosts * gpus > MAX_DEVICES:
        raise InvalidInput(f"hosts: {hosts} x {gpus} GPUs are more than {MAX_DEVICES}")
    if hosts > 1 and "network" not in data:
        raise InvalidInput(f"network: is missing for {hosts} hosts; write for example 'network: 8 x 400gbit'")
    nics, rate = (0, 0.0) if hosts == 1 else _network(data["network"], gpus)
    name = name or f"{counted(hosts, 'host')} of {gpus} x {kind_name}"
    return _wired(name, hosts, gpus, GPUS[kind_name], nics, rate)


def _network(value: object, gpus: int) -> tuple[int, float]:
    nics, text = _counted(value, "network")
    try:
        rate = parse_rate(text) / 8e9
    except InvalidInput as error:
        raise InvalidInput(f"network: {error}") from None
    if not 0 < rate <= 1e6:
        raise InvalidInput(f"network: {text}: must be more than 0 and at most a million GB/s")
    if gpus % nics and nics % gpus:
        raise InvalidInput(f"network: {nics} NICs are not shared evenly by {gpus} GPUs")
    # Several NICs of one GPU are one of their joint rate.
    return (nics, rate) if nics <= gpus else (gpus, rate * (nics // gpus))


def _wired(name: str, hosts: int, gpus: int, kind: GpuKind, nics: int, nic_gb_per_s: float) -> Cluster:
    numbers = np.arange(hosts)
    wiring = Wiring(host_names(hosts, numbered("gpu", gpus)), hosts=np.repeat(numbers, gpus))
    devices = wiring.devices.reshape(hosts, gpus)
    hub_name = "nvswitch" if kind.nvlink_gb_per_s else "pcie"
    hubs = wiring.add(host_names(hosts, [hub_name]), kind="switch", hosts=numbers)
    rate = kind.nvlink_gb_per_s or kind.pcie_gb_per_s
    alpha, channel = (NVLINK_ALPHA_US, "nvlink") if kind.nvlink_gb_per_s else (PCIE_ALPHA_US, "pcie")
    wiring.duplex(devices, hubs[:, None], gb_per_s=rate, alpha_us=alpha, back_us=0.0, channel=channel)
    inside = "NVSwitch" if kind.nvlink_gb_per_s else "one PCIe switch"
    notes = [f"assumed: {inside} inside a host, {rate:g} GB/s one way per GPU, {alpha:g} us"]
    if nics:
        rdma = nic_gb_per_s >= RDMA_FROM_GB_PER_S
        outside, far = ("rdma", RDMA_ALPHA_US) if rdma else ("ethernet", ETHERNET_ALPHA_US)
        cards = wiring.add(host_names(hosts, numbered("nic", nics)), kind="nic", hosts=np.repeat(numbers, nics))
        fabric = wiring.add(["fabric"], kind="switch")
        if kind.nvlink_gb_per_s:
            near = cards.reshape(hosts, nics)[:, np.arange(gpus) * nics // gpus]
            wiring.duplex(devices, near, gb_per_s=kind.pcie_gb_per_s, alpha_us=0.0, channel="pcie")
        else:
            # A GPU has one slot, for its neighbours and for its NIC.
            wiring.duplex(cards, np.repeat(hubs, nics), gb_per_s=kind.pcie_gb_per_s, alpha_us=0.0, channel="pcie")
        wiring.duplex(cards, fabric, gb_per_s=nic_gb_per_s, alpha_us=far, back_us=0.0, channel=outside)
        notes.append(
            f"assumed: {kind.pcie_gb_per_s:g} GB/s PCIe between a GPU and its NIC; {nic_gb_per_s:g} GB/s and {far:g} "
            f"us per NIC; one switch that never blocks joins the hosts"
        )
    return wiring.cluster(name, notes=notes)


def _counted(value: object, key: str) -> tuple[int, str]:
    match = _COUNTED.fullmatch(str(value).strip())
    if match is None:
        raise InvalidInput(f"{key}: must not be empty")
    return (_whole(match[1], key, MAX_PER_HOST) if match[1] else 1), match[2].strip()


def _whole(value: object, key: str, most: int) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise InvalidInput(f"{key}: must be a whole number 1..{most}, not {text[:60]!r}")
    return int(text)
