# SPDX-License-Identifier: Apache-2.0
"""A carrier of one's own, written from docs/enforcer.md alone: it moves all-reduces through the store of the job.

Slow, and no match for ours; but all that a plan decides holds for it: the cuts, the channels and the order.

    stretto.torch.enforce(plan, workload, carrier=StoreCarrier)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.errors import PlanMismatch
from stretto.torch import (
    CarrierSite,
    CollectiveCall,
    CompiledMotif,
    Engine,
    HostCarrier,
    MotifBinding,
    QueuedMotif,
    RankMotif,
    RowLayout,
    StagedBuffers,
)


class StoreMotif:
    """A loaded motif: who takes part, and the name of its lane, which is the same on all of them."""

    def __init__(self, lane: str, ranks: tuple[int, ...], layout: RowLayout) -> None:
        self.lane, self.ranks, self.layout = lane, ranks, layout


class StoreCall:
    """A motif under way, which a thread of its own moves."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.elapsed_us = 0.0
        self.ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended; False when the time is up."""
        if not self.ended.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True


class StoreMaximum:
    """A maximum under way: all ranks write their values down."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._keys = store, list(keys)

    def over(self, timeout_s: float) -> bool:
        """Whether all ranks have written within a time."""
        end = time.monotonic() + timeout_s
        while not self._store.check(self._keys):
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def wait(self) -> list[int]:
        """The largest of each value."""
        rows = [map(int, self._store.get(key).decode().split()) for key in self._keys]
        return [max(column) for column in zip(*rows, strict=True)]


class StoreCarrier(HostCarrier):
    """Sums through the job's store: every rank writes what it has, and reads what the others have."""

    def __init__(self, site: CarrierSite) -> None:
        super().__init__(site)
        self._store = PrefixStore(f"own carrier {site.generation}", dist.distributed_c10d._get_default_store())
        self._ran: dict[str, int] = {}
        self._agreed = 0

    def refusal(self, call: CollectiveCall, engine: Engine) -> str:
        """What is not a sum over all ranks stays with the backend."""
        return super().refusal(call, engine) or ("" if call.reduce == "sum" else "only sums")

    def load(self, number: int, motif: RankMotif, binding: MotifBinding) -> StoreMotif:
        """Nothing has to be connected; a motif that is no all-reduce cannot be carried out here."""
        if binding.leaf.kind != "AR":
            raise PlanMismatch(f"{binding.leaf}: only all-reduces go through the store")
        lane = f"{number} {'+'.join(motif.channels)} {binding.leaf.ranks}"
        return StoreMotif(lane, binding.leaf.ranks, RowLayout.of(binding))

    def start(
        self, loaded: CompiledMotif, staged: StagedBuffers, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool
    ) -> StoreCall:
        """Begin to move a motif. All its ranks count the motifs of a lane alike, as they start in one order."""
        assert isinstance(loaded, StoreMotif)
        nth = self._ran[loaded.lane] = self._ran.get(loaded.lane, 0) + 1
        call = StoreCall()

        def move() -> None:
            begin = time.perf_counter()
            try:
                self._sum(f"{loaded.lane} {nth}", loaded.ranks, staged)
            except Exception as error:
                call.error = error
            call.elapsed_us = 1e6 * (time.perf_counter() - begin)
            call.ended.set()
            self.site.sequencer.ended(motif)

        threading.Thread(target=move, daemon=True).start()
        return call

    def _sum(self, name: str, ranks: Sequence[int], staged: StagedBuffers) -> None:
        assert staged.source is not None
        assert staged.target is not None
        (given, lo, hi), (taken, at, until) = staged.source, staged.target
        mine = given[lo:hi].contiguous()
        self._store.set(f"{name} {self.site.rank}", mine.numpy().tobytes().hex())
        parts = [bytes.fromhex(self._store.get(f"{name} {rank}").decode()) for rank in ranks]
        values = [torch.frombuffer(bytearray(part), dtype=mine.dtype) for part in parts]
        taken[at:until] = torch.stack(values).sum(0, dtype=mine.dtype)

    def watch(self, motif: QueuedMotif) -> None:
        """Every end is reported."""

    def agree(self, values: Sequence[int]) -> StoreMaximum:
        """All ranks write their values under the number of this agreement."""
        self._agreed += 1
        keys = [f"agreement {self._agreed} {rank}" for rank in range(self.site.size)]
        self._store.set(keys[self.site.rank], " ".join(map(str, values)))
        return StoreMaximum(self._store, keys)

    def unload(self, number: int) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        """Threads end with their motifs."""
