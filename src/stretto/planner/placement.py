# SPDX-License-Identifier: Apache-2.0
"""Says on which devices the ranks of a step are placed, where a cluster has more devices than the step has ranks."""

from __future__ import annotations

from ..cluster import Cluster


def placement(ranks: int, cluster: Cluster) -> str:
    """Which devices the ranks of a step take; empty where the step has as many ranks as the cluster has devices.

    >>> placement(4, Cluster.preset("dgx_h100", nodes=2))
    '4 ranks are placed on the first 4 of 16 devices, all on one of 2 hosts'
    >>> placement(16, Cluster.preset("dgx_h100", nodes=2))
    ''
    """
    if ranks >= cluster.num_devices:
        return ""
    text = f"{ranks} rank{'s are' if ranks > 1 else ' is'} placed on the first {ranks} of {cluster.num_devices} devices"
    taken = hosts_taken(ranks, cluster)
    if cluster.num_hosts == 1:
        return text
    return f"{text}, {'all on one' if taken == 1 else f'on {taken}'} of {cluster.num_hosts} hosts"


def hosts_taken(ranks: int, cluster: Cluster) -> int:
    """The number of hosts that the first devices of a cluster are on.

    >>> hosts_taken(9, Cluster.preset("dgx_h100", nodes=2))
    2
    """
    return len(set(cluster.hosts_of(range(min(ranks, cluster.num_devices))).tolist()))
