# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.WeightSync`: updates replicas with the trainers' state dict, version by version; each on all ranks or
none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput, PeerLost, StrettoError, unknown

if TYPE_CHECKING:
    import torch

    from .deltas import Changed, ChangeLog
    from .describe import AnyTensor
    from .pending import PendingUpdate, SourceGuard
    from .state import Dict, ReshardState
    from .world import SyncWorld

STAGING_BYTES = 256 << 20
READERS_S = 60.0
"""Seconds that an update waits for readers of the version before the last."""


class Weights(Mapping[str, "torch.Tensor"]):
    """The tensors of one version, by name; valid inside the ``with`` block that returned them."""

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version = version
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Weights version {self.version}: {len(self)} tensors>"


class WeightSync:
    """Copies the tensors of `source` (trainers) into those of `target` (replicas), version by version.

    ::

        sync = stretto.torch.WeightSync(source=trainer.state_dict() if training else None,
                                  target=server.state_dict() if serving else None)
        version = sync.update()                    # all ranks
        with sync.read() as weights:               # on replicas, in any thread
            torch.func.functional_call(server, dict(weights), batch)

    All ranks of `ranks` (default: all of the job) construct it together, with dicts of DTensors or plain tensors; a
    rank that only relays data gives neither. The transfer of all tensors together is planned once. A source that has
    another dtype than its target is cast before it is sent.

    A version is committed on all ranks or on none, after everything has arrived everywhere. The tensors of `target` are
    the memory of version 0, 2, 4, ..., and a second set that of the others: an update writes to the set that is not
    current, after its readers have left. With `copies` 1 there is no second set: an update writes where the version
    before was, for those who keep it elsewhere. `staging_bytes` limits the bytes that any rank packs at a time; with
    `deltas` rounds are small, so that an update of few tensors sends little. `world` has the ranks, where they are not
    those of the default process group.
    """

    def __init__(
        self,
        source: Mapping[str, AnyTensor] | None = None,
        target: Mapping[str, AnyTensor] | None = None,
        *,
        ranks: Any = None,
        staging_bytes: int = STAGING_BYTES,
        world: SyncWorld | None = None,
        copies: int = 2,
        deltas: bool = False,
        _version: int = 0,
        _strategy: str = "",
    ) -> None:
        from .deltas import ChangeLog
        from .state import ReshardState

        if copies not in (1, 2):
            raise InvalidInput(f"copies: must be 1 or 2, not {copies}")
        self._copies = copies

        self._lock = threading.Condition()
        self._updating = threading.Lock()
        self._current = 0
        self._versions: list[int | None] = [_version, None]
        self._readers = [0, 0]
        self._broken: StrettoError | None = None
        self._read_ends: list[list[Any]] = [[], []]
        """Where readers on a GPU have left each set, whose streams may not have come there yet."""
        self._log: ChangeLog = ChangeLog()
        self._deltas = deltas
        self._state: ReshardState = ReshardState(
            source, target, ranks, staging_bytes, world=world, copies=copies, deltas=deltas, strategy=_strategy
        )
        self._number = self._state.newest(_version)
        """The number of the last version of all ranks; a rank that has come later does not have it yet."""

    @property
    def version(self) -> int:
        """The version that readers get now; 0 is the initial content of the target."""
        with self._lock:
            return self._versions[self._current] or 0

    @property
    def number(self) -> int:
        """The number of the newest version of all ranks; a rank that has come later may not have it yet."""
        return self._number

    @property
    def usable(self) -> bool:
        """Whether a further update is possible: none has failed while bytes moved."""
        return self._broken is None

    @property
    def num_rounds(self) -> int:
        """The number of rounds, one after the other, in which an update moves the tensors."""
        return len(self._state.transfer.rounds)

    @property
    def route(self) -> str:
        """How bytes move: "executor", "gpu", "pull", "pinned" or "messages"; see docs/weight_sync.md."""
        return self._state.transfer.route

    @property
    def staging_bytes(self) -> int:
        """The most bytes that this rank packs at a time."""
        return self._state.transfer.staging_bytes

    @property
    def predicted_us(self) -> float:
        """Predicted microseconds of moving the bytes of one update."""
        return sum(each.mover.predicted_us() for each in self._state.transfer.rounds)

    @property
    def bound_us(self) -> float:
        """A lower bound in microseconds on moving the bytes in these rounds."""
        return sum(plan.bound_us for plan in self._state.transfer.plans)

    @contextmanager
    def read(self, version: int | None = None) -> Iterator[Weights]:
        """The tensors of the current version, which no update changes before the block is left.

        The ranks of one replica commit within moments of each other, not at the same instant. Ranks that must use the
        same version at the same time agree on its number and pass it as `version`. The version before the current one
        is available until the next update begins.
        """
        with self._lock:
            there = [v for v in self._versions if v is not None]
            at = self._current if version is None else next((k for k in (0, 1) if self._versions[k] == version), None)
            if at is not None and self._versions[at] is None:
                raise InvalidInput("version: none is here: an update writes, or has failed to write, the only copy")
            if at is None:
                raise InvalidInput(f"version: {version} is not here; there are: {', '.join(map(str, sorted(there)))}")
            self._readers[at] += 1
            found = Weights(self._versions[at] or 0, self._state.sets[at])
        try:
            yield found
        finally:
            with self._lock:
                self._readers[at] -= 1
                self._read_ends[at] += self._state.moments()
                self._lock.notify_all()

    def update(self, source: Dict | None = None, *, checksums: bool = False, changed: Changed = None) -> int:
        """Copy the present values of `source` to all replicas as the next version; return its number. All ranks call
        this.

        If anything fails, every rank raises, and the current version stays. After a failure while bytes moved
        (`PeerLost`) no further update is possible; readers go on.

        Args:
            source: other tensors than the first, with the same names, shapes, dtypes and layouts.
            checksums: whether every rank compares what has arrived with what the trainers hold, before it votes.
            changed: names of tensors that have changed since the last update; any rank may name any. "auto"
                lets trainers compare with copies of what they sent; None sends everything. All ranks give it, or none.

        Returns:
            The number of the version.

        Raises:
            InvalidInput: on all ranks, if an argument is wrong or differs between ranks.
            PeerLost: a rank has died or does not come.
        """
        with self._updating:
            return self._update(source, checksums, changed, None)

    def update_async(
        self, source: Dict | None = None, *, checksums: bool = False, snapshot: str = "on_write",
        snapshot_bytes: int | None = None, max_blocks: int | None = None,
    ) -> PendingUpdate:  # fmt: skip
        """Begin an update in another thread, so that trainers compute their next step meanwhile; all ranks call this.

        The source may be read at any time, but before it changes ``before_write()`` of the result must return
        (``protect(optimizer)`` has the optimizer call it). Nothing else may be done with this sync before ``wait()``.

        Args:
            source: as for `update`.
            checksums: as for `update`; the trainers' are computed before this returns.
            snapshot: "on_write" copies or waits when the weights change, whichever takes less time; "now" copies
                everything before this returns; "wait" never copies.
            snapshot_bytes: the most bytes that are copied; None for no limit. With "now" it must be enough for all that
                this rank sends.
            max_blocks: the most thread blocks (of 512 threads) that copies of this rank take on its GPU at a time, so
                that the others compute; None for all. Only where `route` is "pull".

        Returns:
            The update under way; its ``wait()`` returns the version.

        Raises:
            InvalidInput: an argument is wrong here; where `snapshot_bytes` is too small on another rank, ``wait()``
                raises it.
        """
        from .pending import SNAPSHOTS, PendingUpdate, SourceGuard

        if snapshot not in SNAPSHOTS:
            raise unknown("snapshot", snapshot, SNAPSHOTS)
        if max_blocks is not None and (max_blocks < 1 or self.route != "pull"):
            raise InvalidInput(f"max_blocks: must be >= 1, where the route is pull; is {max_blocks}, by {self.route}")
        sources, why = self._state.checked_sources(source)
        if why:
            raise InvalidInput(why)
        transfer = self._state.transfer
        most = 0 if snapshot == "wait" else snapshot_bytes
        guard = SourceGuard(transfer, transfer.rounds, sources, most_bytes=most)
        guard.checksums = transfer.checksums(0, sources) if checksums else None
        asked = guard.price().nbytes if snapshot == "now" else 0
        if snapshot_bytes is not None and asked > snapshot_bytes:
            guard.refused = f"snapshot_bytes: {snapshot_bytes} is less than the {asked} that snapshot 'now' copies here"
        if snapshot == "now" and not guard.refused:
            guard.before_write("copy")
        self._updating.acquire()

        def run() -> int:
            try:
                return self._update(source, checksums, None, guard, max_blocks)
            finally:
                self._updating.release()

        pending = PendingUpdate(run, guard)
        if guard.refused:
            pending.wait()  # Raises: the other ranks are told first, so that none waits for this one.
        if snapshot == "now":
            pending.before_write("wait")
        return pending

    def _update(
        self, source: Dict | None, checksums: bool, changed: Changed, guard: SourceGuard | None,
        blocks: int | None = None,
    ) -> int:  # fmt: skip
        from .deltas import union

        state, back = self._state, (1 - self._current) * (self._copies > 1)
        number = self._number + 1
        sources, why = state.checked_sources(source)
        why = why or (guard.refused if guard is not None else "")
        why = why or (f"this sync has failed before: {self._broken}" if self._broken else "") or self._vacate(back)
        said = None
        if not why and changed is not None:
            try:
                given = state.source if source is None else source
                said = self._log.said(changed, given, behind=self.version != self._number)
            except InvalidInput as error:
                why = str(error)
        state.begin(number, why, checksums, changed is not None)
        names = union(state.told(said)) if said is not None else None
        key = f"{state.name}/{number}"
        failed: StrettoError | None = None
        try:
            self._log.refreshed(state.sets, back, names, number)
            state.move(sources, back, key, names=names, guard=guard, blocks=blocks)
        except StrettoError as error:
            failed = error
        except Exception as error:
            failed = StrettoError(f"rank {state.rank}: {type(error).__name__}: {error}")
        try:
            decided = state.vote(key, failed)
            if checksums and decided is None:
                held = guard.checksums if guard is not None else None
                decided = state.vote(f"{key}/checksums", state.compared(sources, back, held))
        except PeerLost as error:
            # The store is gone with the rank that served it: nobody can commit, and the old version stays.
            decided = error
        if decided is not None:
            self._broken = failed or decided
            raise self._broken
        with self._lock:
            self._versions[back] = number
            self._current = back
        self._number = number
        self._log.whole = self._log.whole or names is None
        return number

    def reform(self, ranks: Any, source: Dict | None = None, *, _world: SyncWorld | None = None) -> WeightSync:
        """A sync of other ranks, after one was lost or for one that has come: all of `ranks` call this or make one.

        The new sync has the tensors of this one (or another `source`, where a lost trainer's parts come from
        elsewhere), begins with the version that is current here, and goes on counting from the newest of all its ranks.
        This one ends; its readers may go on.

        Args:
            ranks: the ranks of the new sync, this one among them.
            source: what this rank sends from now on; None for what it has sent.
            _world: the world of the new sync, for `ElasticSync`; that of this one when not given.

        Returns:
            The new sync.

        Raises:
            InvalidInput: names, shapes or layouts no longer fit together; as for a new sync.
            PeerLost: a rank does not come.
        """
        with self._updating:
            self.close()
            with self._lock:
                now, version = self._state.target(self._current), self._versions[self._current] or 0
            given = self._state.source if source is None else source
            limit, world = self._state.staging_limit, _world or self._state.world
        return WeightSync(
            given or None, now or None, ranks=ranks, staging_bytes=limit, world=world, copies=self._copies,
            deltas=self._deltas, _version=version,
        )  # fmt: skip

    def _vacate(self, at: int) -> str:
        """Wait until no reader uses the set that is to be written, and admit none; return an error
        text if that fails.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._readers[at] == 0, READERS_S):
                return f"version {self._versions[at]} still has {self._readers[at]} readers after {READERS_S:g} s"
            self._versions[at] = None
            ends, self._read_ends[at] = self._read_ends[at], []
        for end in ends:
            end.synchronize()
        return ""

    def close(self) -> None:
        """End the process group; readers may go on."""
        self._state.close()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
