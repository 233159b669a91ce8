# SPDX-License-Identifier: Apache-2.0
"""A carrier of one's own, written from docs/enforcer.md alone: it moves all-reduces through the store of the job.

Slow, and no match for ours; but all that a plan decides holds for it: the cuts, the channels and the order.

    stretto.torch.enforce(plan, workload, carrier=StoreCarrier)    # or STRETTO_CARRIER=own_carrier:StoreCarrier
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stretto.errors import PlanMismatch
from stretto.torch import BackgroundMotif, CarrierSite, CollectiveCall, Engine, HostCarrier, QueuedMotif, RowLayout


@dataclass(frozen=True, kw_only=True)
class StoreMotif:
    """A loaded motif: who takes part, and the name of its lane, which is the same on all of them."""

    lane: str
    ranks: tuple[int, ...]
    layout: RowLayout


class StoreCarrier(HostCarrier):
    """Sums through the job's store: every rank writes what it has, and reads what the others have."""

    def __init__(self, site: CarrierSite) -> None:
        super().__init__(site)
        self._store, self._ran = dist.distributed_c10d._get_default_store(), dict[str, int]()

    def refusal(self, call: CollectiveCall, engine: Engine) -> str:
        """What is not a sum stays with the wrapped backend."""
        return super().refusal(call, engine) or ("" if call.reduce == "sum" else "only sums")

    def load(self, number: int, rank_motif: Any, binding: Any) -> StoreMotif:
        """Nothing has to be connected; a motif that is no all-reduce cannot be carried out here."""
        if binding.leaf.kind != "AR":
            raise PlanMismatch(f"{binding.leaf}: only all-reduces go through the store")
        lane = f"own {self.site.generation} {number} {'+'.join(rank_motif.channels)} {binding.leaf.ranks}"
        return StoreMotif(lane=lane, ranks=binding.leaf.ranks, layout=RowLayout.of(binding))

    def start(self, loaded: Any, staged: Any, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool) -> Any:
        """Begin to move a motif. All its ranks count the motifs of a lane alike, as they start in one order."""
        nth = self._ran[loaded.lane] = self._ran.get(loaded.lane, 0) + 1
        active = BackgroundMotif(lambda: self._sum(loaded, nth, staged), lambda: self.site.sequencer.ended(motif))
        threading.Thread(target=active.run, daemon=True).start()
        return active

    def _sum(self, loaded: StoreMotif, nth: int, staged: Any) -> None:
        (given, lo, hi), (taken, at, until) = staged.source, staged.target
        mine = given[lo:hi].contiguous()
        self._store.set(f"{loaded.lane} {nth} {self.site.rank}", mine.numpy().tobytes().hex())
        parts = [bytes.fromhex(self._store.get(f"{loaded.lane} {nth} {rank}").decode()) for rank in loaded.ranks]
        taken[at:until] = sum(torch.frombuffer(bytearray(part), dtype=mine.dtype) for part in parts)
