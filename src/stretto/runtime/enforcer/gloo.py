# SPDX-License-Identifier: Apache-2.0
"""Motifs above gloo: a communicator for each lane of a plan, bound to the interface of its channel.

Algorithms are gloo's own; what the plan still decides is the pieces, the channels and the order.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...errors import PeerLost
from ...planner.algebra.motif import Motif
from ...process_state import STATE
from ..executor.executor import ProgramMismatch
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.engine import Engine, channels_of
from ..torch_backend.gloo_errors import GlooFailure, gloo_failure
from ..torch_backend.job_store import job_store
from ..torch_backend.roll_call import GlooRollCall
from .background import BackgroundMotif
from .binding import MotifBinding, PeerRanges
from .calls import run
from .carrier import CarrierSite, HostCarrier, PendingMaximum
from .compiled_op import CompiledMotif
from .memory import RowLayout, StagedBuffers
from .rank_plan import RankMotif
from .sequencer import ActiveMotif, QueuedMotif

Gloo: Any = dist.ProcessGroupGloo
"""PyTorch's gloo backend as `Any`, because its stubs lack half of the methods."""
NOTHING = torch.empty(0, dtype=torch.uint8)
PAUSE_S = 0.0005
Explain = Callable[[Exception], Exception]
"""An error with the name of the rank that is gone, where that is known."""


class GlooMotif:
    """A binding and the communicator that runs it."""

    __slots__ = ("lane", "layout", "leaf")

    def __init__(self, lane: GlooLane, leaf: Motif, layout: RowLayout) -> None:
        self.lane, self.leaf, self.layout = lane, leaf, layout


Calls = SimpleQueue[Callable[[], None] | None]


class GlooLane:
    """One communicator, and the thread that makes its calls one after the other until the lane is freed."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: Calls = SimpleQueue()
        threading.Thread(target=_make_calls, args=(self.calls,), name="stretto-lane", daemon=True).start()
        weakref.finalize(self, self.calls.put, None)


def _make_calls(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        # A call refers to the lane, which would not be freed while this thread waits for the next call.
        del call


class GlooCarrier(HostCarrier):
    """gloo with one communicator per lane. Making one needs all its ranks, so they prepare a plan together."""

    def __init__(self, site: CarrierSite) -> None:
        super().__init__(site)
        # All ranks make carriers in the same order, so that each has keys of its own in the job's store.
        self._prefix = f"stretto/lane/{STATE.number('gloo carrier')}"
        self._ended, self._rank = site.sequencer.ended, site.rank
        self._timeout = timedelta(seconds=site.engine.timeout_s)
        self._store = job_store("stretto/gloo", apart=True)
        self._explain = site.explain
        store: Any = c10d.PrefixStore(f"{self._prefix}/lost", self._store)
        self._roll_call = GlooRollCall(store, site.rank, site.size, failed="a call of gloo's on the plan's channels")
        self._interfaces = {name: config.devices for name, config in channels_of(os.environ).items()}
        self._lanes: dict[tuple[int, tuple[str, ...], tuple[int, ...]], GlooLane] = {}
        self._alive: weakref.WeakSet[GlooLane] = weakref.WeakSet()
        """All lanes, including those of unloaded plans whose calls still run."""
        self._control = self._group("control", tuple(range(site.size)), ())

    def refusal(self, call: CollectiveCall, engine: Engine) -> str:
        """Refuse what the executor would refuse, where there is one, so that calls do not depend on the carrier."""
        return engine.refusal(call) if engine.job.executor is not None else super().refusal(call, engine)

    def load(self, number: int, rank_motif: RankMotif, binding: MotifBinding) -> GlooMotif:
        """See `Carrier.load`; motifs of the same ranks and channels share a lane."""
        key = (number, rank_motif.channels, rank_motif.leaf.ranks)
        if key not in self._lanes:
            name = f"{number}/{'+'.join(rank_motif.channels)}/{','.join(map(str, rank_motif.leaf.ranks))}"
            self._lanes[key] = GlooLane(self._group(name, rank_motif.leaf.ranks, rank_motif.channels))
            self._alive.add(self._lanes[key])
        return GlooMotif(self._lanes[key], binding.leaf, RowLayout.of(binding))

    def start(
        self, loaded: CompiledMotif, staged: StagedBuffers, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """See `HostCarrier.start`; the thread of the lane runs it."""
        assert isinstance(loaded, GlooMotif)

        def move() -> None:
            me = loaded.leaf.ranks.index(self._rank)
            exchange = loaded.layout.binding.exchange
            if exchange is not None and exchange.data_dependent:
                compare_sizes(loaded.lane.group, loaded.leaf.ranks, exchange)
            run(loaded.lane.group, loaded.leaf, me, staged, op, nothing=NOTHING, in_place=False)

        started = BackgroundMotif(move, lambda: self._ended(motif), self.explained)
        loaded.lane.calls.put(started.run)
        return started

    def watch(self, motif: QueuedMotif) -> None:
        """The lane's thread reports every end."""

    def agree(self, values: Sequence[int]) -> PendingMaximum:
        """A maximum over all ranks, found on a communicator that is used for nothing else; see `Carrier.agree`."""
        return GlooMaximum(self._control, values, self.explained)

    def explained(self, error: Exception) -> Exception:
        """A failure of gloo's as `PeerLost` with the names of the lost ranks, where these can be found out."""
        if gloo_failure(error) is GlooFailure.OTHER:
            return error
        found = error if self._roll_call.told() else self._explain(error)
        # A rank that has found the lost one says so and leaves, so that it may look like a lost rank itself by now.
        lost = self._roll_call.told()
        if not lost and isinstance(found, PeerLost):
            self._roll_call.tell(str(found))
            return found
        lost = lost or self._roll_call.lost()
        if not lost:
            return error
        named = PeerLost(lost)
        named.__cause__ = error
        return named

    def unload(self, number: int) -> None:
        """Forget the lanes of a plan; ops that were submitted and are held back keep theirs until they have run."""
        for key in list(self._lanes):
            if key[0] == number:
                self._lanes.pop(key, None)

    def close(self) -> None:
        """End all threads."""
        for lane in self._alive:
            lane.calls.put(None)
        self._lanes.clear()

    def _group(self, name: str, ranks: tuple[int, ...], channels: Sequence[str]) -> Any:
        found = next((self._interfaces[channel] for channel in channels if channel in self._interfaces), None)
        interface = found or next(iter(self._interfaces.values()))
        store = c10d.PrefixStore(f"{self._prefix}/{name}/", self._store)
        return communicator(store, ranks.index(self._rank), len(ranks), interface, self._timeout)


def communicator(store: Any, rank: int, size: int, interface: str, timeout: timedelta) -> Any:
    """Make a communicator of gloo that is bound to an interface; all its ranks make it together.

    Args:
        store: Where the ranks find each other; nobody else may use its keys.
        rank: This rank's position.
        size: The number of ranks.
        interface: The network interface.
        timeout: After which a call fails.

    Returns:
        The communicator.
    """
    options = Gloo._Options()
    options._devices = [Gloo.create_device(interface=interface)]
    # With two threads, gloo may free the name of the operation that it ended last twice (see `gloo_options`).
    options._threads = 1
    options._timeout = timeout
    return Gloo(store, rank, size, options)


def compare_sizes(group: Any, ranks: Sequence[int], exchange: PeerRanges) -> None:
    """Raise `ProgramMismatch` on all ranks where two count on different sizes for what one of them sends to the other.

    gloo itself would end the receiver's process where it gets more than it expects, and say nothing where it gets less.

    Args:
        group: The communicator.
        ranks: The job's ranks, by position.
        exchange: What this rank sends to, and expects from, each rank.

    Raises:
        ProgramMismatch: Two ranks differ.
    """
    mine = torch.tensor([exchange.splits], dtype=torch.int64)
    everyone = torch.empty((len(ranks), *mine.shape[1:]), dtype=torch.int64)
    group._allgather_base(everyone, mine, c10d.AllgatherOptions()).wait()
    sent, expected = everyone[:, 0], everyone[:, 1].T
    wrong = (sent != expected).nonzero().tolist()
    if wrong:
        source, target = wrong[0]
        raise ProgramMismatch(
            f"all_to_all with splits: rank {ranks[source]} sends {int(sent[source, target])} bytes to rank "
            f"{ranks[target]}, which expects {int(expected[source, target])}"
        )


class GlooMaximum:
    """A maximum that gloo finds."""

    def __init__(self, group: Any, values: Sequence[int], explained: Explain = lambda error: error) -> None:
        self._explained = explained
        self._values = torch.tensor(list(values), dtype=torch.int64)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._work = group.allreduce([self._values], options)

    def over(self, timeout_s: float) -> bool:
        """Whether gloo's call has ended, with or without an error, within a time."""
        deadline = time.monotonic() + timeout_s
        # gloo would give the call up after a wait with a limit, so its end is polled.
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True

    def wait(self) -> list[int]:
        """The values, once all ranks have given theirs."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._explained(error) from error
        return [int(value) for value in self._values]
