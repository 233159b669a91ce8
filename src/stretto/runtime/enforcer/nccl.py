# SPDX-License-Identifier: Apache-2.0
"""Motifs above NCCL: a communicator with a stream of its own for each lane of a plan, on CUDA tensors.

Nobody waits here: a stream runs what it is given in order, and waits by itself for what another has recorded. So a
motif has ended, for the enforcer, as soon as the GPU's queue holds it. What is started when then depends on nothing
but the application's calls and the plan, and all ranks launch NCCL's kernels in the same order: several communicators
on one GPU need that, since a kernel that waits for its peers may keep others from running.

NCCL reads which interface to use once for the whole process. A channel is therefore not bound to a network, as it is
above gloo: it is a communicator with its own connections, and whatever NCCL chooses carries them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...errors import InvalidInput, PlanMismatch
from ...planner.algebra.motif import Motif
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.cuda_clock import FIRST, Clock, Event, cuda, event_of
from ..torch_backend.engine import Engine, channels_of
from ..torch_backend.job_store import job_store
from ..torch_backend.torch_versions import set_sequence_number
from ..torch_backend.work import GroupWork
from .binding import MotifBinding
from .calls import run
from .carrier import CarrierSite, PendingMaximum
from .compiled_op import CompiledMotif, CompiledOp
from .gloo import GlooMaximum, communicator
from .memory import RowLayout, StagedBuffers
from .rank_plan import RankMotif
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp
from .stream_work import OpMemory, StreamSubmission, StreamWork

REDUCED = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64,
    }
)  # fmt: skip
OPERATIONS = ("sum", "prod", "min", "max", "avg")
SIDES = 8
SETTLE_S = 5.0
TICK_S = 0.001
LOOK_S, STALLED_S = 0.5, 1.0


class NcclCall:
    """A call that a stream holds; nobody has to wait for it."""

    done = True
    error: Exception | None = None
    elapsed_us = 0.0

    def wait(self, timeout_s: float | None = None) -> bool:
        """True at once: a motif of NCCL is ordered by streams, and the host waits for none."""
        return True


QUEUED = NcclCall()


class NcclLane:
    """One communicator and its stream."""

    def __init__(self, group: Any, stream: torch.cuda.Stream) -> None:
        self.group, self.stream = group, stream


class NcclMotif:
    """A binding and the communicator that runs it."""

    __slots__ = ("lane", "layout", "leaf")

    def __init__(self, lane: NcclLane, leaf: Motif, layout: RowLayout) -> None:
        self.lane, self.leaf, self.layout = lane, leaf, layout


class NcclCarrier:
    """NCCL with one communicator per lane. Making one needs all its ranks, so they prepare a plan together.

    Plans share communicators: what follows on one is behind what was there before, on every rank.
    """

    programs = False
    averages = one_launch_order = True

    def __init__(self, site: CarrierSite) -> None:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise InvalidInput("carrier: nccl needs a GPU, and a PyTorch with NCCL")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.site = site
        self._rank, self._timeout = site.rank, timedelta(seconds=site.engine.timeout_s)
        # All ranks make carriers in the same order, so that each has keys of its own in the job's store.
        self._store = job_store("stretto/nccl", apart=True)
        interface = next(iter(channels_of(os.environ).values())).devices
        control = c10d.PrefixStore("control/", self._store)
        # What ranks agree on is a few numbers on the host: over NCCL a stream would have to be waited for.
        self._control = communicator(control, site.rank, site.size, interface, self._timeout)
        self._nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._lanes: dict[tuple[tuple[str, ...], tuple[int, ...]], NcclLane] = {}
        self._last: dict[str, dict[tuple[NcclLane, bool], Event]] = {}
        self._sides: list[torch.cuda.Stream] = [cuda.Stream(self.device, priority=FIRST) for _ in range(SIDES)]
        self._side = 0
        self._held: deque[OpMemory] = deque()
        self.clock: Clock[QueuedOp] = Clock(self.device)
        self._broken: Exception | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="stretto-nccl", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the job still runs that it was made for."""
        return dist.is_initialized()

    def refusal(self, call: CollectiveCall, engine: Engine) -> str:
        """Why a call is left to the wrapped backend; only of what is the same on all ranks."""
        if call.device != self.device:
            return f"{call.device} tensors"
        if engine.size == 1:
            return "a group of one rank"
        if call.splits is not None:
            # An empty tensor is no reason to refuse, since those of other ranks may hold data.
            return "sparse tensors" if any(tensor.layout != torch.strided for tensor in call.inputs) else ""
        tensor = call.tensor
        if tensor.layout != torch.strided or tensor.numel() == 0:
            return "nothing to move"
        if call.reduce and (tensor.dtype not in REDUCED or call.reduce not in OPERATIONS):
            return f"no {call.reduce} of {tensor.dtype}"
        return f"no avg of {tensor.dtype}" if call.reduce == "avg" and not tensor.is_floating_point() else ""

    def load(self, number: int, rank_motif: RankMotif, binding: MotifBinding) -> NcclMotif:
        """See `Carrier.load`; a new communicator connects here, so that no iteration stands still for it."""
        key = (rank_motif.channels, rank_motif.leaf.ranks)
        if key not in self._lanes:
            self._lanes[key] = self._made(
                f"{'+'.join(rank_motif.channels)}/{','.join(map(str, rank_motif.leaf.ranks))}/", key[1]
            )
        return NcclMotif(self._lanes[key], binding.leaf, RowLayout.of(binding))

    def _made(self, name: str, ranks: tuple[int, ...]) -> NcclLane:
        library: Any = dist.ProcessGroupNCCL
        options = library.Options()
        options._timeout = self._timeout
        group = library(c10d.PrefixStore(name, self._store), ranks.index(self._rank), len(ranks), options)
        set_sequence_number(group)
        group.eager_connect_single_device(self.device)
        return NcclLane(group, cuda.Stream(self.device, priority=FIRST))

    def submit(self, queued: QueuedOp, compiled: CompiledOp) -> GroupWork:
        """Put an op in line whose motifs are queued on streams in their turn."""
        self.read()
        site, tensors = self.site, queued.tensors
        submission = StreamSubmission(site.owner, self, queued, compiled)
        site.sequencer.submit(queued, submission)
        return StreamWork(site.owner, site.sequencer, queued, submission, tensors, self)

    @contextlib.contextmanager
    def turn(self, loaded: CompiledMotif, motif: QueuedMotif, after: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
        """See `StreamCarrier.turn`; a motif also runs behind what its channels hold, unless both are brief."""
        assert isinstance(loaded, NcclMotif)
        lane, brief = loaded.lane, motif.rank_motif.brief
        begin, end = event_of(timing=True), event_of(timing=True)
        with torch.cuda.stream(lane.stream):
            for event in after:
                lane.stream.wait_event(event)
            for channel in motif.rank_motif.channels:
                held = self._last.setdefault(channel, {})
                for (other, light), event in held.items():
                    if other is not lane and not (brief and light):
                        lane.stream.wait_event(event)
                if not brief:
                    held.clear()
            begin.record(lane.stream)
            yield begin, end
            end.record(lane.stream)
        for channel in motif.rank_motif.channels:
            self._last[channel][lane, brief] = end

    def start(
        self, loaded: CompiledMotif, staged: StagedBuffers, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """See `HostCarrier.start`; inside `turn`, on the current stream."""
        assert isinstance(loaded, NcclMotif)
        me = loaded.leaf.ranks.index(self._rank)
        run(loaded.lane.group, loaded.leaf, me, staged, op, nothing=self._nothing, in_place=True)
        return QUEUED

    def side(self) -> torch.cuda.Stream:
        """A stream for what comes behind the motifs of an op; others may be on their way on those before."""
        self._side = (self._side + 1) % SIDES
        return self._sides[self._side]

    def hold(self, held: OpMemory) -> None:
        """Keep the memory of an op as long as it is needed."""
        self._held.append(held)

    def read(self) -> None:
        """Note what the GPU has done meanwhile."""
        self.clock.read()
        while self._held and not self._held[0].kept:
            with contextlib.suppress(IndexError):
                self._held.popleft()

    def watch(self, motif: QueuedMotif) -> None:
        """Do nothing: for the host a motif has ended as soon as it is started."""

    def agree(self, values: Sequence[int]) -> PendingMaximum:
        """The maximum over all ranks, computed on the host."""
        return GlooMaximum(self._control, values)

    def unload(self, number: int) -> None:
        """The next plan uses the same communicators."""

    def check(self) -> None:
        """Raise what has ended the plan: where the host does not wait, nobody else tells."""
        if self._broken is not None:
            raise self._broken

    def _look(self) -> None:
        """The host may stand in a call of CUDA's for a motif that a rank will never join: only a thread can tell."""
        while not self._closed.wait(LOOK_S):
            queued = self.clock.overdue(STALLED_S)
            why = ""
            with contextlib.suppress(Exception):
                # The store may be gone, with the rank that kept it.
                why = self.site.hopeless(queued) if queued is not None else ""
            if why:
                self._broken = PlanMismatch(why)
                self.site.sequencer.fail(self._broken)
                # All at once: to free the memory of one, CUDA waits for the kernels of the others.
                for lane in list(self._lanes.values()):
                    threading.Thread(target=lane.group.abort, name="stretto-nccl-abort", daemon=True).start()
                return

    def close(self) -> None:
        """Let the streams run out, then leave the communicators; what a lost peer keeps from ending is aborted."""
        self._closed.set()
        if self._broken is not None:
            return
        deadline = time.monotonic() + SETTLE_S
        lanes = list(self._lanes.values())
        while not all(lane.stream.query() for lane in lanes) and time.monotonic() < deadline:
            time.sleep(TICK_S)
        for lane in lanes:
            (lane.group.shutdown if lane.stream.query() else lane.group.abort)()
        self._lanes.clear()
        self._last.clear()
