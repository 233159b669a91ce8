# SPDX-License-Identifier: Apache-2.0
"""The ranks that move tensors together: their process group, and the cluster they plan for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...cluster import Cluster, Link, Node
from ...errors import InvalidInput
from ...process_state import STATE, ProcessPart
from ...programs.lowered import Lowered
from ...runtime.executor.executor import Executor, LoadedProgram
from ...runtime.executor.forks import check_world
from ...runtime.torch_backend.backend import StrettoGroup
from ...runtime.torch_backend.cuda_clock import cuda
from ...runtime.torch_backend.gpu_options import gpu_options
from ...runtime.torch_backend.job_store import start_store
from .agree import ReshardAgreement
from .world import SyncWorld

MESSAGE_BYTES = 256 << 10
"""Chunks of a plan are sent whole up to this many bytes, larger chunks in slices, one after the other."""


GPU_GB_PER_S, GPU_ALPHA_US = 400.0, 2.0
"""Assumed of GPUs of one host where no cluster says better; only the size of chunks follows from them."""


class ReshardGroups(ProcessPart):
    """What resharding keeps for the current default process group; a new default group starts afresh."""

    def __init__(self) -> None:
        self.group: Any = None
        self.world: SyncWorld | None = None


RESHARDING = STATE.part(ReshardGroups)


def default_world() -> SyncWorld:
    """The ranks of the default process group."""
    if not dist.is_initialized():
        raise InvalidInput("torch.distributed: call init_process_group first")
    check_world()
    group: Any = dist.group.WORLD
    if RESHARDING.group is not group or RESHARDING.world is None:
        cards = group.cards if isinstance(group, StrettoGroup) else ()
        RESHARDING.world = SyncWorld(
            start_store("stretto/world"), dist.get_rank(), size=dist.get_world_size(), cards=cards
        )
        RESHARDING.group = group
    return RESHARDING.world


def agreement() -> ReshardAgreement:
    """This rank's side of the job's agreements."""
    return default_world().agreement


def gpu_state() -> str:
    """What the environment says about programs on GPU memory, which must be the same on all ranks."""
    return "on" if gpu_options().enabled else "off"


class ReshardGroup:
    """A process group of its own over some ranks of the job; all of these ranks construct it together."""

    def __init__(self, ranks: Sequence[int], world: SyncWorld | None = None) -> None:
        self.world = world or default_world()
        self.ranks = tuple(ranks)
        self.rank = self.world.rank
        # PyTorch names a group by the number of groups that a rank has, which may differ between ranks: this group is
        # made without PyTorch's new_group.
        name = f"resharding {','.join(map(str, ranks))}"
        number = self.world.number(name)
        store = self.world.store
        self.group: Any = StrettoGroup(
            store=c10d.PrefixStore(f"stretto/{name}/{number}", store), rank=self.ranks.index(self.rank),
            size=len(self.ranks), timeout=store.timeout, name=name, devices=self.ranks, apart=self.world.apart,
        )  # fmt: skip
        engine = self.group.engine
        known: Cluster | None = engine.selector.cluster
        self.cluster: Cluster = known or engine.selector.network
        self.device = {rank: rank if known else at for at, rank in enumerate(self.ranks)}
        """The cluster's device of each rank; devices rise with ranks."""
        why = engine.job.why
        if not why and engine.communicator >= engine.job.max_communicators:
            why = f"more than {engine.job.max_communicators} groups"
        self.executor: Executor | None = None if why else engine.job.executor
        self.why = why
        """The reason why the executor does not move the bytes; empty if it does."""
        self.gpu_why = ""
        """The reason why tensors on GPUs go through the hosts' memory; empty if they do not, or nobody has asked."""
        self._symmetric: torch.Tensor | None = None
        self._lanes: list[Any] = []

    @classmethod
    def shared(cls, ranks: Sequence[int]) -> ReshardGroup:
        """The group of these ranks, made when it is first needed; all of these ranks call this together."""
        groups, key = default_world().groups, tuple(ranks)
        if key not in groups:
            groups[key] = cls(key)
        found = groups[key]
        assert isinstance(found, cls)
        return found

    @property
    def me(self) -> int:
        """The device number of this rank."""
        return self.device[self.rank]

    def load(self, program: Lowered) -> LoadedProgram:
        """Load a program of all ranks of this group into the executor."""
        assert self.executor is not None
        engine = self.group.engine
        ranks = [engine.job.rank_of[r] for r in engine.selector.devices]
        return self.executor.load(program, ranks=ranks, communicator=engine.communicator, message_bytes=MESSAGE_BYTES)

    def gpu(self) -> torch.device | None:
        """The GPU of this rank, if programs can run on the memory of the group's GPUs; all ranks of the group ask."""
        device = torch.device("cuda", cuda.current_device())
        self.gpu_why = "one rank alone" if len(self.ranks) < 2 else str(self.group.gpu.join(device))
        return None if self.gpu_why else device

    @property
    def one_gpu(self) -> bool:
        """Whether all ranks are on the same GPU; after `gpu`."""
        site = self.group.gpu.site
        return site is not None and bool(getattr(site.communicator, "one_gpu", False))

    def gpu_cluster(self) -> Cluster:
        """What programs on GPU memory are planned for: the known cluster, or GPUs behind one switch."""
        known: Cluster | None = self.group.engine.selector.cluster
        return known or _gpu_switch(len(self.ranks))

    def lanes(self, device: torch.device) -> list[Any]:
        """The streams on which all transfers of this group pack, move and unpack."""
        if not self._lanes:
            self._lanes = [cuda.Stream(device, priority=-1) for _ in range(3)]
        return self._lanes

    def symmetric(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of this rank's GPU that all ranks of the group write to; all of them ask for as much.

        What was given before may be used again by now: programs of one group run one behind the other.
        """
        if self._symmetric is None or len(self._symmetric) < nbytes:
            if self._symmetric is not None:
                cuda.synchronize(device)
            self._symmetric = self.group.gpu.empty(nbytes, torch.uint8, device)
        return self._symmetric[:nbytes]

    def close(self) -> None:
        """End the process group; a second call does nothing."""
        if self.group is not None:
            self.group.shutdown()
            self.group = self.executor = None


def _gpu_switch(count: int) -> Cluster:
    """GPUs of one host, each with a port at a switch: enough to know that a holder's port is shared by its readers."""
    nodes = [Node(name=f"g{at}") for at in range(count)] + [Node(name="switch", kind="switch")]
    links = [
        Link(src=src, dst=dst, alpha_us=GPU_ALPHA_US / 2, gb_per_s=GPU_GB_PER_S)
        for at in range(count)
        for src, dst in ((at, count), (count, at))
    ]
    return Cluster.build("assumed GPUs", nodes=nodes, links=links)
