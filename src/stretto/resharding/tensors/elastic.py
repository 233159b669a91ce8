# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.ElasticSync`: a `WeightSync` whose servers come, go and are lost while trainers go on."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import InvalidInput, PeerLost
from ...files import typed
from .weights import STAGING_BYTES, Weights, WeightSync

if TYPE_CHECKING:
    from .describe import AnyTensor
    from .world import SyncWorld

PAUSE_S = 0.02
MAX_ATTEMPTS = 16
"""Updates that are tried anew, each without the ranks that were lost in the one before, before one is given up."""
MAX_DOUBTS = 2
"""How often one is tried anew with all ranks, where whoever did not come in time has come by now."""


class SyncTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the first trainer announces: the ranks of the next attempt at an update; none of them ends the sync."""

    ranks: tuple[int, ...]
    failed: str = ""
    """Why the first trainer gives up, where it does."""


class ElasticSync:
    """Versions from a fixed set of trainers to whichever servers are there.

    ::

        sync = stretto.torch.ElasticSync(world, trainers=range(4), source=model.state_dict())    # a trainer
        version = sync.update()                                                                  # all trainers

        sync = stretto.torch.ElasticSync(world, trainers=range(4), target=model.state_dict())    # a server, at any time
        while sync.follow() is not None:                                                         # or in a thread
            ...
        with sync.read() as weights: ...

    The first trainer announces each attempt at an update with its ranks: all trainers, and the servers that have come
    and neither left nor died. A server that dies in the middle, or does not go on within the world's timeout, is left
    out, and the others get the version in the next attempt; one that comes late, or goes on later, gets the newest
    version with the next update. A lost trainer is an error for all, and servers keep the version that they have:
    whole, old or new. Without the first trainer nothing is announced, and `follow` says so.
    """

    def __init__(
        self, world: SyncWorld, *, trainers: Collection[int], source: Mapping[str, AnyTensor] | None = None,
        target: Mapping[str, AnyTensor] | None = None, staging_bytes: int = STAGING_BYTES,
    ) -> None:  # fmt: skip
        """Come to the world's sync; returns at once.

        Args:
            world: the ranks; every process that takes part has joined it.
            trainers: the ranks that send, the same set for everybody.
            source: what a trainer sends.
            target: where a server receives.
            staging_bytes: as for `WeightSync`, the same for everybody.

        Raises:
            InvalidInput: a trainer gives no source, or a server no target.
        """
        self.world, self.trainers = world, tuple(sorted(trainers))
        if not self.trainers:
            raise InvalidInput("trainers: at least one is needed")
        self.trains = world.rank in self.trainers
        if (source if self.trains else target) is None or (target if self.trains else source) is not None:
            raise InvalidInput(f"{'source' if self.trains else 'target'}: rank {world.rank} must give it, and only it")
        self._given, self._staging_bytes = source if self.trains else target, staging_bytes
        self._store: Any = world.store
        self._turn = int(self._store.add("elastic/turn", 0))
        self._sync: WeightSync | None = None
        self._ranks: tuple[int, ...] = ()
        self._lost: set[int] = set()
        """Where servers stand that were lost; one that comes again stands elsewhere."""
        self._there = False
        """Whether this server has been announced since it came."""
        if not self.trains:
            self._come()

    @property
    def version(self) -> int:
        """The version that readers get now; 0 before the first."""
        return self._sync.version if self._sync is not None else 0

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers that have come, and have neither left nor been lost, as far as the store says."""
        found = {rank for place, rank in self._places() if place not in self._lost}
        return tuple(r for r in sorted(found) if not self._left(r) and not self.world.agreement.gone(r))

    def update(self, **how: Any) -> int:
        """The next version to all servers that are there; all trainers call this, with what `WeightSync.update` takes.

        Returns:
            The number of the version; the version before, if there is no server.

        Raises:
            PeerLost: a trainer is lost; servers keep the version that they have.
            StrettoError: the update failed for another reason than a lost server.
        """
        if not self.trains:
            raise InvalidInput("update: only trainers call it; servers call follow")
        leads, deadline, doubts = self.world.rank == self.trainers[0], None, 0
        for _ in range(MAX_ATTEMPTS):
            if leads:
                self._announce((*self.trainers, *self.servers))
            turn = self._next(deadline)
            if turn is None or len(turn.ranks) == len(self.trainers):
                return self.version
            try:
                return self._sync_of(turn.ranks).update(**how)
            except PeerLost as error:
                self._ranks = ()
                if leads:
                    doubts += not self._leave_out(turn.ranks, error, doubts < MAX_DOUBTS)
                else:
                    deadline = self._patience(error)
        raise PeerLost(f"update: servers were lost in each of {MAX_ATTEMPTS} attempts")

    def follow(self, timeout_s: float | None = None) -> int | None:
        """Take part in the next update that reaches this server; servers call this, again and again.

        Args:
            timeout_s: seconds to wait for an update; None for as long as the first trainer lives.

        Returns:
            The version that readers get now; None if the trainers have ended the sync or nothing came in time.

        Raises:
            PeerLost: a trainer is gone; the version that is here stays readable.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            turn = self._next(deadline)
            if turn is None or not turn.ranks:
                return None
            if self.world.rank not in turn.ranks:
                # The first trainer has not heard of this server yet, or went on without it.
                if self._there:
                    self._ranks = ()
                    self._come()
                continue
            self._there = True
            if int(self._store.add("elastic/turn", 0)) > self._turn:
                # It has ended without this server, which was not here.
                self._ranks = ()
                continue
            try:
                return self._sync_of(turn.ranks).update()
            except PeerLost as error:
                # The first trainer decides who was lost: it announces another attempt, or gives up.
                self._ranks = ()
                self._patience(error)

    @contextmanager
    def read(self) -> Iterator[Weights]:
        """The tensors of the version that is current here; see `WeightSync.read`."""
        if self._sync is None:
            raise InvalidInput("read: no version has come yet")
        with self._sync.read() as weights:
            yield weights

    def leave(self) -> None:
        """A server takes part in no further update; it may go on reading, and end."""
        self._store.set(f"elastic/left/{self.world.rank}", "1")

    def close(self) -> None:
        """End the sync: the first trainer tells the servers, everybody lets go of the process group."""
        if self.trains and self.world.rank == self.trainers[0]:
            self._announce(())
        if self._sync is not None:
            self._sync.close()

    def _left(self, rank: int) -> bool:
        return bool(self._store.check([f"elastic/left/{rank}"]))

    def _come(self) -> None:
        self._there = False
        place = int(self._store.add("elastic/servers", 1))
        self._store.set(f"elastic/server/{place}", str(self.world.rank))

    def _places(self) -> list[tuple[int, int]]:
        """Where each server stands, in the order in which they came."""
        count = int(self._store.add("elastic/servers", 0))
        return [(at, int(self._store.get(f"elastic/server/{at}"))) for at in range(1, count + 1)]

    def _leave_out(self, ranks: Sequence[int], error: PeerLost, doubt: bool) -> bool:
        """The first trainer goes on without the servers that were lost; raises if a trainer was.

        Where nobody is lost any more, it goes on with all of them if it is in `doubt`, and raises otherwise.
        """
        places = self._places()
        lost = self._gone(ranks) or self.world.agreement.silent(ranks)
        if lost & set(self.trainers) or not (lost or doubt):
            self._announce((), str(error))
            self._turn += 1
            raise error
        self._lost |= {place for place, rank in places if rank in lost}
        return bool(lost)

    def _patience(self, error: PeerLost) -> float:
        """Until when the first trainer must have announced what comes next; it is there first, if it lives."""
        key = f"elastic/turn/{self._turn + 1}"
        deadline: float = time.monotonic() + self._store.timeout.total_seconds()
        while not self._store.check([key]):
            self.world.agreement.beat()
            if time.monotonic() > deadline:
                raise error
            if self.world.agreement.gone(self.trainers[0]) and not self._store.check([key]):
                raise error
            time.sleep(PAUSE_S)
        return deadline

    def _gone(self, ranks: Sequence[int]) -> set[int]:
        """The ranks whose processes have ended; a process that has just been killed may still be ending."""
        for _ in range(50):
            found = {rank for rank in ranks if self.world.agreement.gone(rank)}
            if found:
                return found
            time.sleep(PAUSE_S)
        return set()

    def _announce(self, ranks: Sequence[int], failed: str = "") -> None:
        text = msgspec.json.encode(SyncTurn(ranks=tuple(sorted(ranks)), failed=failed))
        self._store.set(f"elastic/turn/{self._turn + 1}", text)
        self._store.add("elastic/turn", 1)

    def _next(self, deadline: float | None) -> SyncTurn | None:
        """The next announcement; None if nothing comes in time."""
        key, leader = f"elastic/turn/{self._turn + 1}", self.trainers[0]
        pause_s = PAUSE_S / 8
        while not self._store.check([key]):
            self.world.agreement.beat()
            if deadline is not None and time.monotonic() > deadline:
                return None
            if leader != self.world.rank and self.world.agreement.gone(leader) and not self._store.check([key]):
                raise PeerLost(f"rank {leader}, the first trainer, is gone: nobody announces updates")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S)
        self._turn += 1
        turn = msgspec.json.decode(self._store.get(key), type=typed(SyncTurn))
        if turn.failed:
            raise PeerLost(turn.failed)
        return turn

    def _sync_of(self, ranks: tuple[int, ...]) -> WeightSync:
        if self._sync is not None and ranks == self._ranks and self._sync.usable:
            return self._sync
        self._ranks = ranks
        # What a rank has left unfinished in another attempt must not be taken for this one.
        world = self.world.part(f"elastic/attempt/{self._turn}")
        if self._sync is not None:
            self._sync = self._sync.reform(ranks, _world=world)
        else:
            given: Any = self._given
            self._sync = WeightSync(
                given if self.trains else None, None if self.trains else given, ranks=ranks,
                staging_bytes=self._staging_bytes, world=world,
            )  # fmt: skip
        return self._sync
