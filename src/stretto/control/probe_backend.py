# SPDX-License-Identifier: Apache-2.0
"""A probe by the job's own collectives: the cluster that NCCL or gloo makes of the links, and a table of costs.

On GPUs the executor, which moves the host's memory, cannot tell what the links between devices carry; NCCL's own
collectives can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ..cluster import Cluster
from ..errors import InvalidInput, PeerLost
from ..planner.costs.channels import bindings_for
from ..planner.costs.measured import Measurement
from .own_costs import Library, OwnTime
from .own_times import LARGEST, PARTS, own_cluster, own_times, scopes_of

KINDS = tuple(PARTS)
JOIN_S = 60.0


def probe_backend(library: Library) -> tuple[Cluster, tuple[Measurement, ...]]:
    """Time the collectives of a backend among all ranks of its default group; all ranks call this together.

    Args:
        library: "nccl", on this rank's current GPU, or "gloo".

    Returns:
        The cluster whose links make rings take as long as was measured, and every time, as `stretto plan --costs`
        reads it.
    """
    import torch.distributed as dist

    from ..runtime.executor.join import host_key

    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_key())
    times = own_times(hosts, KINDS, LARGEST, library)
    cluster = own_cluster(hosts, times)
    return cluster, rows_of(cluster, hosts, times)


def rows_of(cluster: Cluster, hosts: list[str], times: tuple[OwnTime, ...]) -> tuple[Measurement, ...]:
    """Times as a table of costs.

    Args:
        cluster: The cluster that was made of the times.
        hosts: The host of each rank.
        times: What was timed.

    Returns:
        A row for each size of each of them.
    """
    groups = {(scope, len(each)): each for scope, each in scopes_of(hosts)}
    return tuple(
        Measurement(
            collective=time.kind, algorithm=time.library, nranks=time.ranks, nbytes=nbytes, time_us=us,
            channels=bindings_for(cluster, groups[time.scope, time.groups])[0].channels, groups=time.groups,
        )
        for time in times for nbytes, us in time.times
    )  # fmt: skip


@contextmanager
def joined_by(library: Library, local_rank: int) -> Iterator[None]:
    """A process group of torchrun's environment on a backend; left again at the end."""
    import torch
    import torch.distributed as dist

    if library == "nccl":
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise InvalidInput("--backend: nccl needs a GPU, and a PyTorch with NCCL")
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    try:
        dist.init_process_group(library, timeout=timedelta(seconds=JOIN_S))
    except (RuntimeError, ValueError, OSError) as error:
        raise PeerLost(f"the ranks did not meet: {str(error).splitlines()[0]}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()
