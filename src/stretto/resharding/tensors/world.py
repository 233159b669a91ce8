# SPDX-License-Identifier: Apache-2.0
"""The ranks among which tensors move: those of the job, or others that meet in a store of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from ...errors import InvalidInput, PeerLost
from ...runtime.torch_backend.meeting import Card
from .agree import ReshardAgreement


class SyncWorld:
    """Ranks that find each other in a store, independent of the default process group of any of them.

    ::

        world = stretto.torch.SyncWorld.join("10.0.0.1:29700", rank=3)        # a server, in a job of its own
        sync = stretto.torch.WeightSync(target=..., ranks=range(4), world=world)

    Trainers and servers are often different jobs, each with a process group of its own. Here each process has a number
    that no other has; there is no fixed size, so ranks can come later.
    """

    def __init__(self, store: Any, rank: int, *, size: int | None = None, cards: Sequence[Card] = ()) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.apart = size is None
        """Whether these are other ranks than those of the default process group."""
        self.agreement = ReshardAgreement(c10d.PrefixStore("stretto/resharding", store), rank, cards)
        self.port = 0
        """The port of the store, where this world has one of its own."""
        self.groups: dict[tuple[int, ...], Any] = {}
        """The groups that are shared by all transfers between the same ranks."""
        self._made: dict[str, int] = {}

    @classmethod
    def join(
        cls, address: str, rank: int, *, serve: bool = False, timeout_s: float = 300.0, name: str = ""
    ) -> SyncWorld:
        """Meet at an address; one rank serves the store, and should be one that outlives the others.

        Args:
            address: host and port, such as "10.0.0.1:29700".
            rank: this process's number, 0 or more, that no other process has.
            serve: whether this process serves the store; exactly one does.
            timeout_s: seconds to wait for the store, and later for other ranks.
            name: several worlds at one address have different names.

        Returns:
            The world.

        Raises:
            InvalidInput: the address or rank is none.
            PeerLost: the store cannot be reached.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) < 1 << 16:
            raise InvalidInput(f"address: must be HOST:PORT, not {address[:80]!r}")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise InvalidInput(f"rank: must be >= 0, not {rank!r}")
        try:
            store = c10d.TCPStore(
                host.strip("[]"), int(port), is_master=serve, timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            what = "be served" if serve else "be reached"
            raise PeerLost(f"{address}: the store cannot {what}: {str(error).splitlines()[0][:200]}") from None
        named: Any = c10d.PrefixStore(f"stretto/{name}", store)
        if named.add(f"world/{rank}", 1) > 1:
            raise InvalidInput(f"rank: {rank} has been taken at {address}")
        found = cls(named, rank)
        found.port = store.port
        return found

    def part(self, name: str) -> SyncWorld:
        """The same ranks with agreements and groups of their own: what was left unfinished here does not reach them."""
        found = SyncWorld(c10d.PrefixStore(f"{name}/", self.store), self.rank, size=self.size)
        inside = c10d.PrefixStore("stretto/resharding", found.store)
        found.agreement = ReshardAgreement(inside, self.rank, outer=self.agreement)
        found.port = self.port
        return found

    def number(self, name: str) -> int:
        """Count what is made under one name: ranks that make things in the same order get the same numbers."""
        number = self._made[name] = self._made.get(name, 0) + 1
        return number
