# SPDX-License-Identifier: Apache-2.0
"""The communicators of a distributed model: one for each set of ranks that exchanges data, made once by all ranks."""

from __future__ import annotations

import atexit
import time
from typing import Any

import torch.distributed as dist

from ...errors import InvalidInput
from ...runtime.executor.forks import Home, check_world
from ...runtime.executor.join import host_key
from ...runtime.torch_backend.torch_versions import new_group_in_order, new_group_of_members
from .serving import Orders

Key = tuple[tuple[int, ...], int]
ROOTED = ("reduce", "broadcast", "gather", "scatter")
"""Kinds of exchanges that have a root."""

# A gloo thread releases the tensors of a call from within backward() shortly after the call has ended, and needs the
# interpreter for that: if the interpreter was already shutting down, the process would crash. So exit waits a moment.
atexit.register(time.sleep, 0.05)


class Groups:
    """Communicators by members (ranks of the strategy, the root first) and lane. All ranks make each communicator
    together.
    """

    def __init__(self, users: Any = None) -> None:
        if not dist.is_initialized():
            raise InvalidInput("distribute: call torch.distributed.init_process_group first")
        check_world()
        self.main: Any = users if users is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.main)
        if self.rank < 0:
            raise InvalidInput("distribute: this rank is not in the group")
        self.world = dist.get_process_group_ranks(self.main)
        self.size = len(self.world)
        self.replicas = tuple(range(self.size))
        """The ranks that train; the others only serve."""
        self.orders: Orders | None = None
        self.home = Home(f"rank {self.rank}")
        self._made: dict[Key, Any] = {}
        self._own: list[Any] = []

    @property
    def lead(self) -> int:
        """The first rank that trains."""
        return self.replicas[0]

    @property
    def trains(self) -> bool:
        """Whether this rank trains."""
        return self.rank in self.replicas

    def divide(self, replicas: tuple[int, ...]) -> None:
        """Let only some ranks train; all ranks call this together, before anything is made for a strategy."""
        self.replicas = replicas
        servers = tuple(rank for rank in range(self.size) if rank not in replicas)
        self.orders = Orders(self, servers) if servers else None

    def tell(self, word: str, given: Any = None) -> None:
        """On the first rank that trains: tell those that serve what comes next; does nothing elsewhere."""
        if self.orders is not None and self.rank == self.lead:
            self.orders.tell(word, given)

    def members(self, group: tuple[int, ...], kind: str) -> tuple[int, ...]:
        """The members of the communicator for an exchange among a group.

        A rooted exchange of all ranks can use the communicator of all ranks, whatever its order.
        """
        return tuple(range(self.size)) if len(group) == self.size and kind in ROOTED else group

    @property
    def whole(self) -> bool:
        """Whether the members are all ranks of the job."""
        return self.size == dist.get_world_size()

    def make(self, members: tuple[int, ...], lane: int = 0) -> None:
        """Make the communicator of some members, in this order; all ranks call this, also those that are no members."""
        key = (members, lane)
        if key in self._made:
            return
        if lane == 0 and members == tuple(range(self.size)):
            self._made[key] = self.main
            return
        mine = self.rank in members
        made = None
        if mine or self.whole:
            made = self._new(members, dist.get_backend(self.main))
        self._made[key] = made if mine else None

    def separate(self) -> Any:
        """A gloo communicator over all members, for messages between two ranks that may come at any time."""
        return self._new(tuple(range(self.size)), "gloo")

    def _new(self, members: tuple[int, ...], backend: str) -> Any:
        ranks = [self.world[member] for member in members]
        made = new_group_in_order(ranks, backend=backend) if self.whole else new_group_of_members(ranks, backend)
        self._own.append(made)
        return made

    def get(self, members: tuple[int, ...], lane: int = 0) -> Any:
        """The communicator that `make` made for these members and this lane."""
        return self._made[members, lane]

    def hosts(self) -> tuple[int, ...]:
        """The number of each rank's host."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, host_key(), group=self.main)
        number: dict[str, int] = {}
        return tuple(number.setdefault(host, len(number)) for host in found)

    def greatest(self, mine: float) -> float:
        """The largest of all ranks' numbers; works with every backend."""
        found: list[Any] = [mine] * self.size
        dist.all_gather_object(found, mine, group=self.main)
        return float(max(found))

    def close(self) -> None:
        """Destroy the communicators that were made here."""
        for made in self._own:
            if made is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(made)
        self._own.clear()
        self._made.clear()
