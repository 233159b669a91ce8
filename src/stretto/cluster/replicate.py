# SPDX-License-Identifier: Apache-2.0
"""Several hosts from a file that describes one: copies of it, their NICs joined by a switch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InvalidInput
from .model import SWITCH, Cluster
from .wiring import MAX_DEVICES


@dataclass(frozen=True, kw_only=True)
class NicPort:
    """The link of a NIC to the switch between the hosts; the latency is paid on the way to the switch only."""

    gb_per_s: float
    alpha_us: float
    channel: str


def replicate(
    box: Cluster, nodes: int, ports: Mapping[int, NicPort], *, name: str, notes: Iterable[str] = ()
) -> Cluster:
    """Copy a host and join the copies' NICs by one switch.

    Args:
        box: The cluster of one host.
        nodes: How many copies, >= 1.
        ports: For each NIC of `box` (a node id) its link to the switch; may be empty for one node only.
        name: The name of the result; its nodes are called ``hN.`` and their name in `box` where nodes > 1.
        notes: Notes to add to those of `box`.

    Returns:
        The joined cluster; for one node the box itself, under the new name and without a switch.

    Raises:
        InvalidInput: There would be too many devices, or several hosts without a NIC.
    """
    most = MAX_DEVICES // box.num_devices
    if not 1 <= nodes <= most:
        raise InvalidInput(f"nodes: this file takes 1 to {most} hosts, not {nodes}")
    notes = (*box.notes, *notes)
    if nodes == 1:
        return replace(box, name=name, notes=notes)
    if not ports:
        raise InvalidInput(f"nodes: the file names no NIC, so {nodes} hosts cannot be joined; give nodes=1")
    own, others = box.num_devices, box.num_nodes - box.num_devices
    ids = np.arange(box.num_nodes)
    copies = np.arange(nodes)[:, None]
    where = np.where(ids < own, ids + copies * own, (ids - own) + nodes * own + copies * others)
    fabric = nodes * box.num_nodes
    nic = where[:, list(ports)].ravel()
    up = np.stack([nic, np.full(len(nic), fabric)], 1)
    channels = list(dict.fromkeys((*box.channels, *(p.channel for p in ports.values()))))
    per_nic = [(p.alpha_us, p.gb_per_s, channels.index(p.channel)) for p in ports.values()]
    alpha, rate, channel = (np.repeat(np.tile(column, nodes), 2) for column in zip(*per_nic, strict=True))
    alpha[1::2] = 0.0
    ends = np.concatenate(
        [
            np.stack([where[:, box.link_src], where[:, box.link_dst]], 2).reshape(-1, 2),
            np.stack([up, up[:, ::-1]], 1).reshape(-1, 2),
        ]
    ).astype(np.int32)
    hosts = np.where(box.node_host < 0, 0, box.node_host) + copies * max(1, box.num_hosts)

    def order(per_copy: np.ndarray) -> np.ndarray:
        return np.concatenate([per_copy[:, :own].ravel(), per_copy[:, own:].ravel()])

    names = np.array([[f"h{h}.{node}" for node in box.node_names] for h in range(nodes)], dtype=object)
    return Cluster(
        name=name,
        node_names=(*order(names).tolist(), "fabric"),
        node_kind=np.append(order(np.tile(box.node_kind, (nodes, 1))), SWITCH).astype(np.int8),
        node_host=np.append(order(hosts), -1).astype(np.int32),
        link_src=ends[:, 0].copy(),
        link_dst=ends[:, 1].copy(),
        link_alpha_us=np.concatenate([np.tile(box.link_alpha_us, nodes), alpha]),
        link_gb_per_s=np.concatenate([np.tile(box.link_gb_per_s, nodes), rate]),
        link_channel=np.concatenate([np.tile(box.link_channel, nodes), channel]).astype(np.int16),
        channels=tuple(channels),
        link_flow_gb_per_s=np.concatenate([np.tile(box.link_flow_gb_per_s, nodes), np.full(len(alpha), np.inf)]),
        link_incast=np.concatenate([np.tile(box.link_incast, nodes), np.full(len(alpha), -1)]).astype(np.int16),
        incast_curves=box.incast_curves,
        devices_forward=box.devices_forward,
        reduce_us_per_mb=box.reduce_us_per_mb,
        notes=notes,
        node_multicast=np.append(order(np.tile(box.node_multicast, (nodes, 1))), False).astype(np.bool_),
    )
