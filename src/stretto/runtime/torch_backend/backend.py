# SPDX-License-Identifier: Apache-2.0
"""The process group ``stretto``: every c10d call, run by the executor where it can and by the wrapped backend else.

The dispatcher, functional collectives and FSDP ask a group for its C++ backend, so the wrapped one is registered on the
group itself. What is delegated goes to a second, plain group around the same backend: the methods of this one's base
class would come back here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...errors import PeerLost, StrettoError
from ..executor.forks import Home, abandon_in_children, check_world, keep_forever
from .buffers import CollectiveCall, Splits
from .call_log import CALL_LOG
from .compiled import keep_uncompiled
from .current import CURRENT
from .engine import CURRENT_JOB, Engine, Job, missing
from .gloo_options import gloo_options
from .gpu_options import gpu_options
from .gpu_work import GpuWork, GpuWorks
from .lost_ranks import DelegatedCall, LostRanks, explain_meeting, naming_the_store
from .meeting import Meeting, agree, card, meet
from .own_backend import OWN_BACKEND
from .own_backend import WHY as OWN_WHY
from .queued_work import QueuedWork
from .recording import LEDGER, current
from .selection import Selector, rules
from .torch_versions import group_method, set_sequence_number, with_older_names
from .watch import RECORDING, SubmittedCall
from .work import DelegatedWork, GroupWork, JoinedWork, Tensors

if TYPE_CHECKING:
    from .gpu_engine import GpuEngine

NAME = "stretto"
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
BackendType = dist.ProcessGroup.BackendType
ALL_GATHER_SINGLE = group_method("all_gather_single")
ALL_GATHER_SINGLE_COALESCED = group_method("all_gather_single_coalesced")
REDUCE_SCATTER_SINGLE = group_method("reduce_scatter_single")
REDUCE_SCATTER_SINGLE_COALESCED = group_method("reduce_scatter_single_coalesced")
ALL_TO_ALL_SINGLE = group_method("all_to_all_single")
POINT_TO_POINT = "programs are for collectives, this is a message between two ranks"
Method = Callable[..., dist.Work]
Base: Any = dist.ProcessGroup
"""`ProcessGroup` as `Any`: its stubs list overloads that no override can match, and our methods take all of them."""


def own_first(method: Method) -> Method:
    """Hand a call on untouched while the backend that the job asked for runs it, and nobody here wants to see it.

    Then the job gets what it would have got without us, at the cost of this function.
    """
    name = group_method(method.__name__)

    @functools.wraps(method)
    def first(self: StrettoGroup, *args: Any, **more: Any) -> dist.Work:
        if CALL_LOG.on:
            CALL_LOG.note(self.label, self.engine.selector.devices, method.__name__, args)
        enforcer = CURRENT.enforcer
        if (
            not OWN_BACKEND.runs
            or not self.own_alone
            or RECORDING.current is not None
            or (enforcer is not None and not enforcer.asleep)
        ):
            return method(self, *args, **more)
        self._home.check()
        self.engine.count()
        own: dist.Work = getattr(self._plain, name)(*args, **more)
        return own

    return first


def register() -> None:
    """Make the backend ``stretto`` known to `torch.distributed`."""
    keep_uncompiled()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, _: object = None) -> StrettoGroup:
    """What `torch.distributed` calls for a new group."""
    return StrettoGroup(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        name=options.group_id,
        devices=options.global_ranks_in_group,
    )


@with_older_names
class StrettoGroup(Base):  # type: ignore[misc]
    """One communicator: the process group that `torch.distributed` calls.

    Methods, parameters and results are those of PyTorch's `ProcessGroup`, whichever version calls them.
    """

    def __init__(
        self, *, store: Any, rank: int, size: int, timeout: timedelta, name: str, devices: Sequence[int],
        apart: bool = False,
    ) -> None:  # fmt: skip
        """`apart` says that `devices` are not ranks of the default process group."""
        # A `c10d.Store`, of whose `timeout` PyTorch's stubs do not know.
        if devices:
            check_world()
        super().__init__(rank, size)
        self.label = name
        self._timeout = timeout
        self._gathering: list[GroupWork] | None = None
        self._gpu_works: list[dist.Work] | None = None
        """Calls on GPU tensors that are waited for together, while more of them come."""
        self._nccl_batch = False
        """Whether NCCL collects calls for one launch just now."""
        self._home = Home(f"rank {rank} of group {name}")
        found, options = rules(), gpu_options()
        shared = CURRENT_JOB.job if devices and not apart else None
        places = tuple(devices) or tuple(range(size))
        # Ranks of different jobs ("apart") have launchers that have started them differently often.
        known, start = (lambda: shared.lost(places)) if shared else (lambda: ""), "apart" if apart else None
        taken, generation = (shared.taken(places), shared.generation) if shared else (0, 0)
        mine = card(rank, executor=missing(), rules=found.text, taken=taken, generation=generation)
        try:
            with naming_the_store(known):
                meeting = Meeting(store, rank, size, known, start)
                self.cards = meet(meeting, mine)
                self._wrap(store, rank, size, timeout, meeting)
                job = shared or Job.join(meeting, self.cards, places, timeout)
        except PeerLost as error:
            if shared is not None:
                shared.blame(places, str(error))
            raise
        selector = Selector(places, [c.host for c in self.cards], cluster=found.cluster, table=found.table)
        self.engine = Engine(rank, size, name, selector, job, *agree(self.cards))
        self.engine.set_timeout(timeout)
        job.enter(self.engine, owns=shared is None)
        lost_store: Any = c10d.PrefixStore("stretto/lost", store)
        self._lost_ranks = LostRanks(self.engine, self.cards, lost_store)
        self._store, self._gpu_options = store, options
        if torch.cuda.is_available():
            self.gpu  # noqa: B018  # made here, and not within the first call on a GPU tensor
        if not devices:
            CURRENT_JOB.job = job
        if options.enabled and options.pool and torch.cuda.is_available():
            # This import stands here because the module needs this one and loads CUDA's parts of PyTorch.
            from .symmetric_models import install_reducer

            install_reducer()

    @functools.cached_property
    def gpu(self) -> GpuEngine:
        """What runs programs on GPU memory; processes without a GPU do not load its modules."""
        from .gpu_engine import GpuEngine
        from .gpu_hosts import HostsGpuEngine

        kind = GpuEngine if self.engine.selector.num_hosts == 1 else HostsGpuEngine
        return kind(self, self.engine, self.cards, self._store, self._lost_ranks, self._gpu_options)

    @property
    def _has_gpu(self) -> bool:
        return "gpu" in vars(self)

    def _wrap(self, store: Any, rank: int, size: int, timeout: timedelta, meeting: Meeting) -> None:
        """Make the backends that run what the executor does not."""
        try:
            self._wrapped = _wrapped_backends(store, rank, size, timeout, meeting.start)
        except RuntimeError as error:
            raise explain_meeting(error, meeting, c10d.PrefixStore("stretto/unmade", store)) from error
        self._plain = Base(store, rank, size)
        for group in (self, self._plain):
            for device, kind, backend in self._wrapped:
                group._register_backend(device, kind if group is self._plain else _custom(kind), backend)
        on_nccl = OWN_BACKEND.asked == "nccl" and len(self._wrapped) > 1
        # The default backend runs calls without a tensor: a barrier of NCCL waits for the GPU, too.
        self._plain._set_default_backend(BackendType.NCCL if on_nccl else BackendType.GLOO)
        self._set_default_backend(BackendType.CUSTOM)
        abandon_in_children(self)

    @property
    def timeout(self) -> timedelta:
        """How long a call may take."""
        return self._timeout

    # The collectives, in the order of torch.distributed's own page.

    @own_first
    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> dist.Work:
        """One rank's tensor to all."""
        tensors = _listed(tensors)
        if not isinstance(opts, c10d.BroadcastOptions):
            opts = _with(c10d.BroadcastOptions(), more, rootRank=opts if opts is not None else more.get("root", 0))
        call = CollectiveCall.of("broadcast", tensors, root=opts.rootRank)
        return self._run(call, "broadcast", (tensors, opts), tensors, opts)

    @own_first
    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, **more: Any) -> dist.Work:
        """All-reduce: every rank gets the sum (or another reduction) over all ranks."""
        tensors = _listed(tensors)
        if not isinstance(opts, c10d.AllreduceOptions):
            opts = _with(c10d.AllreduceOptions(), more, *rest, reduceOp=opts or more.get("op", dist.ReduceOp.SUM))
        call = CollectiveCall.of("all_reduce", tensors, reduce=opts.reduceOp)
        return self._run(call, "allreduce", (tensors, opts), tensors, opts)

    @own_first
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Several all-reduces at once."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        calls = [CollectiveCall.of("all_reduce", [tensor], reduce=opts.reduceOp) for tensor in tensors]
        return self._run_all(calls, "allreduce_coalesced", (tensors, opts), tensors, opts)

    @own_first
    def reduce(self, tensors: Any, opts: Any = None, *rest: Any, **more: Any) -> dist.Work:
        """One rank gets the reduction of all."""
        tensors = _listed(tensors)
        if not isinstance(opts, c10d.ReduceOptions):
            root = opts if opts is not None else more.get("root", 0)
            op = rest[0] if rest else more.get("op", dist.ReduceOp.SUM)
            opts = _with(c10d.ReduceOptions(), more, *rest[1:], rootRank=root, reduceOp=op)
        call = CollectiveCall.of("reduce", tensors, reduce=opts.reduceOp, root=opts.rootRank)
        return self._run(call, "reduce", (tensors, opts), tensors, opts)

    @own_first
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **more: Any) -> dist.Work:
        """All-gather: every rank gets the tensors of all ranks, each in a tensor of its own."""
        outputs, inputs = _listed(output_tensors), _listed(input_tensors)
        outputs = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else outputs
        if not isinstance(opts, c10d.AllgatherOptions):
            opts = _with(c10d.AllgatherOptions(), more)
        call = CollectiveCall.of("all_gather", inputs, outputs=outputs[0] if outputs else [])
        return self._run(call, "allgather", (outputs, inputs, opts), _flat(outputs), opts)

    @own_first
    def allgather_coalesced(self, output_lists: Any, input_list: Tensors, opts: Any = None) -> dist.Work:
        """Several all-gathers at once."""
        opts = opts or c10d.AllgatherOptions()
        calls = [
            CollectiveCall.of("all_gather", [tensor], outputs=[row[at] for row in output_lists])
            for at, tensor in enumerate(input_list)
        ]
        args = (output_lists, input_list, opts)
        return self._run_all(calls, "allgather_coalesced", args, _flat(output_lists), opts)

    @own_first
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """All-gather: every rank gets the tensors of all ranks in one tensor."""
        opts = opts or c10d.AllgatherOptions()
        call = CollectiveCall.of("all_gather", [input], outputs=[output])
        return self._run(call, ALL_GATHER_SINGLE, (output, input, opts), [output], opts)

    @own_first
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Several all-gathers at once."""
        opts = opts or c10d.AllgatherOptions()
        calls = [CollectiveCall.of("all_gather", [i], outputs=[o]) for o, i in zip(outputs, inputs, strict=True)]
        return self._run_all(calls, ALL_GATHER_SINGLE_COALESCED, (outputs, inputs, opts), outputs, opts)

    @own_first
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **more: Any) -> dist.Work:
        """One rank gets everybody's tensor."""
        outputs, inputs = _listed(output_tensors), _listed(input_tensors)
        outputs = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else outputs
        if not isinstance(opts, c10d.GatherOptions):
            opts = _with(c10d.GatherOptions(), more, rootRank=opts if opts is not None else more.get("root", 0))
        call = CollectiveCall.of("gather", inputs, outputs=outputs[0] if outputs else [], root=opts.rootRank)
        return self._run(call, "gather", (outputs, inputs, opts), _flat(outputs), opts)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """One rank gets everybody's tensor, in one; `output` of the others is empty. PyTorch calls it from 2.14 on."""
        opts = opts or c10d.GatherOptions()
        outputs = [list(output.view(self.size(), *input.shape))] if self.rank() == opts.rootRank else []
        return self.gather(outputs, [input], opts)

    @own_first
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **more: Any) -> dist.Work:
        """Scatter: each rank gets one of the root's tensors."""
        outputs, inputs = _listed(output_tensors), _listed(input_tensors)
        inputs = [inputs] if inputs and isinstance(inputs[0], torch.Tensor) else inputs
        if not isinstance(opts, c10d.ScatterOptions):
            opts = _with(c10d.ScatterOptions(), more, rootRank=opts if opts is not None else more.get("root", 0))
        call = CollectiveCall.of("scatter", inputs[0] if inputs else [], outputs=outputs, root=opts.rootRank)
        return self._run(call, "scatter", (outputs, inputs, opts), outputs, opts)

    @own_first
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **more: Any) -> dist.Work:
        """Reduce-scatter: each rank gets its shard of the reduction; inputs are a list of shards."""
        outputs, inputs = _listed(output_tensors), _listed(input_tensors)
        inputs = [inputs] if inputs and isinstance(inputs[0], torch.Tensor) else inputs
        if not isinstance(opts, c10d.ReduceScatterOptions):
            op = opts or more.get("op", dist.ReduceOp.SUM)
            opts = _with(c10d.ReduceScatterOptions(), more, reduceOp=op)
        call = CollectiveCall.of("reduce_scatter", inputs[0] if inputs else [], outputs=outputs, reduce=opts.reduceOp)
        return self._run(call, "reduce_scatter", (outputs, inputs, opts), outputs, opts)

    @own_first
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce-scatter: each rank gets its shard of the reduction; the input is one tensor."""
        opts = opts or c10d.ReduceScatterOptions()
        call = CollectiveCall.of("reduce_scatter", [input], outputs=[output], reduce=opts.reduceOp)
        return self._run(call, REDUCE_SCATTER_SINGLE, (output, input, opts), [output], opts)

    @own_first
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Several reduce-scatters at once."""
        opts = opts or c10d.ReduceScatterOptions()
        calls = [
            CollectiveCall.of("reduce_scatter", [i], outputs=[o], reduce=opts.reduceOp)
            for o, i in zip(outputs, inputs, strict=True)
        ]
        return self._run_all(calls, REDUCE_SCATTER_SINGLE_COALESCED, (outputs, inputs, opts), outputs, opts)

    @own_first
    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any = (), input_splits: Any = (),
        opts: Any = None, **more: Any,
    ) -> dist.Work:  # fmt: skip
        """All-to-all: every rank sends a piece of its tensor to every rank; without splits all pieces are equal."""
        opts = opts or _with(c10d.AllToAllOptions(), more)
        splits = (list(output_splits), list(input_splits))
        given = Splits(output=tuple(splits[0]), input=tuple(splits[1])) if splits[0] or splits[1] else None
        call = CollectiveCall.of("all_to_all", [input], outputs=[output], splits=given)
        return self._run(call, ALL_TO_ALL_SINGLE, (output, input, *splits, opts), [output], opts)

    @own_first
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> dist.Work:
        """All-to-all: every rank sends a tensor to every rank."""
        opts = opts or c10d.AllToAllOptions()
        call = CollectiveCall.of("all_to_all", input_tensors, outputs=output_tensors, splits=Splits(listed=True))
        return self._run(call, "alltoall", (output_tensors, input_tensors, opts), output_tensors, opts)

    @own_first
    def barrier(self, opts: Any = None, **more: Any) -> dist.Work:
        """Barrier: no rank leaves before all ranks have come."""
        opts = opts or _with(c10d.BarrierOptions(), more)
        call = CollectiveCall.barrier(opts.device if opts.device is not None else CPU)
        return self._run(call, "barrier", (opts,), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who is missing."""
        self._home.check()
        self._plain.monitored_barrier(timeout or self._timeout, wait_all_ranks)

    # Point to point.

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        """Send tensors to one rank."""
        call, args = CollectiveCall.of("send", tensors), (tensors, dst, tag)
        return self._watched(
            call,
            lambda: self._message(call, "send", args, tensors, peer=dst),
            peers=(self.rank(), dst),
            tag=tag,
        )

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        """Receive tensors from one rank."""
        call, args = CollectiveCall.of("recv", tensors), (tensors, src, tag)
        return self._watched(
            call,
            lambda: self._message(call, "recv", args, tensors, peer=src),
            peers=(src, self.rank()),
            tag=tag,
        )

    def _message(
        self, call: CollectiveCall, method: str, args: tuple[Any, ...], tensors: Tensors, *, peer: int
    ) -> dist.Work:
        """By the wrapped backend: at once, or when the plan has it begin."""

        def plain() -> dist.Work:
            return self._delegate(call, method, args, tensors, why=POINT_TO_POINT, peer=peer)

        enforcer, me = CURRENT.enforcer, self.rank()
        if enforcer is not None and not enforcer.asleep:
            source, target = (me, peer) if method == "send" else (peer, me)
            work: dist.Work | None = enforcer.message(self, call, source, target, plain)
            if work is not None:
                return work
        return plain()

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive tensors from whichever rank sends first."""
        return self._delegate(
            CollectiveCall.of("recv", tensors), "recv_anysource", (tensors, tag), tensors, why=POINT_TO_POINT
        )

    # What is not a collective.

    def name(self) -> str:
        """The backend's name."""
        return NAME

    getBackendName = name

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call may take from now on."""
        self._timeout = timeout
        self.engine.set_timeout(timeout)
        for _, _, backend in self._wrapped:
            backend._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """Wait for what runs, then end."""
        if self._has_gpu and not self._home.left:
            # First: calls on GPUs of several hosts need the executor until they end.
            self.gpu.close()
        self.engine.close()
        if self._home.left:
            return
        for _, _, backend in self._wrapped:
            backend.shutdown()

    def abort(self) -> None:
        """End at once; calls that run fail."""
        if self._has_gpu and not self._home.left:
            self.gpu.fail(StrettoError(f"group {self.label} was aborted"))
            self.gpu.close()
        self.engine.close()
        if self._home.left:
            return
        for _, _, backend in self._wrapped:
            backend.abort()

    def abandon(self) -> None:
        """In a forked child: the destructors of gloo would wait for ever for threads that only the parent has."""
        for backend in (self._plain, *(backend for _, _, backend in self._wrapped)):
            keep_forever(backend)

    def _start_coalescing(self, device: torch.device) -> None:
        self._home.check()
        if device.type != "cpu":
            self._gpu_works = []
        else:
            self._gathering = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type != "cpu":
            calls, self._gpu_works = self._gpu_works or [], None
            if self._nccl_batch:
                self._nccl_batch = False
                calls.append(self._plain._end_coalescing(device))
            return calls[0] if len(calls) == 1 else GpuWorks(calls, device)
        works, self._gathering = self._gathering or [], None
        return JoinedWork(works)

    def _run(self, call: CollectiveCall, method: str, args: tuple[Any, ...], tensors: Tensors, opts: Any) -> dist.Work:
        """As the plan says where one is enforced, on the executor, or else on the wrapped backend."""
        self._home.check()
        self.engine.count()
        if RECORDING.current is None and CURRENT.enforcer is None:
            return self._run_plainly(call, method, args, tensors, opts)

        def plainly(*, own: bool | None = None) -> dist.Work:
            # The enforcer looks into waits that take long, for which it needs a work of ours.
            work: Any = self._run_plainly(call, method, args, tensors, opts, as_ours=own is None, own=own)
            return work if work is not None else QueuedWork(call.device)

        def run() -> dist.Work:
            enforcer = CURRENT.enforcer
            planned = None if enforcer is None else enforcer.take(self, call, tensors, opts, plainly)
            if planned is None:
                return self._run_plainly(call, method, args, tensors, opts)
            return self._gathered(planned)

        return self._watched(call, run, blocking=self.alone and not opts.asyncOp)

    def _run_plainly(
        self,
        call: CollectiveCall,
        method: str,
        args: tuple[Any, ...],
        tensors: Tensors,
        opts: Any,
        *,
        as_ours: bool = False,
        own: bool | None = None,
    ) -> dist.Work:
        """On the executor or, if `own` or what runs now says so, on the backend that the job asked for.

        With `as_ours` that one's work comes inside of one of ours. NCCL gives none for a call that blocks.
        """
        if (OWN_BACKEND.runs if own is None else own) and OWN_BACKEND.serves(call.device.type):
            if as_ours or not self.alone or self.coalescing:
                return self._delegate(call, method, args, tensors, why=OWN_WHY)
            # What the job would have got: no work of ours around it, and no thread for its future.
            raw: dist.Work = getattr(self._plain, method)(*args)
            return raw
        work = self._start([call], tensors, opts)
        if isinstance(work, str):
            return self._delegate(call, method, args, tensors, why=work)
        return self._gathered(work)

    def _start(self, calls: Sequence[CollectiveCall], tensors: Tensors, opts: Any) -> GroupWork | str:
        """Run one call, or on a GPU several, as programs; or say why not."""
        if calls[0].device.type == "cuda":
            return self.gpu.start(calls, tensors, opts)
        return self.engine.start(calls[0], tensors, opts, alone=self._gathering is None)

    def _run_all(
        self, calls: list[CollectiveCall], method: str, args: tuple[Any, ...], tensors: Tensors, opts: Any
    ) -> dist.Work:
        """All on the executor, or all on the wrapped backend: other ranks decide the same only as a whole."""
        self._home.check()
        if not calls:
            return self._delegate(CollectiveCall.of(method, []), method, args, tensors, why="nothing to do")
        whole = calls[0].joined(calls)
        self.engine.count()

        def run() -> dist.Work:
            if CURRENT.enforcer is not None:
                CURRENT.enforcer.pass_by(self, whole)
            return self._run_each(calls, whole, method, args, tensors, opts)

        return self._watched(whole, run, blocking=self.alone and not getattr(opts, "asyncOp", True))

    def _run_each(
        self,
        calls: list[CollectiveCall],
        whole: CollectiveCall,
        method: str,
        args: tuple[Any, ...],
        tensors: Tensors,
        opts: Any,
    ) -> dist.Work:
        if whole.device.type == "cuda":
            started = self._start(calls, tensors, opts)
            if isinstance(started, str):
                return self._delegate(whole, method, args, tensors, why=started)
            return self._gathered(started)
        own = OWN_WHY if OWN_BACKEND.runs else ""
        why = own or next((reason for call in calls if (reason := self.engine.refusal(call))), "")
        if why:
            return self._delegate(whole, method, args, tensors, why=why)
        works: list[GroupWork] = []
        for call in calls:
            work = self.engine.start(call, call.outputs, opts, alone=False)
            if isinstance(work, str):
                raise StrettoError(f"{call.op}: {work}")
            works.append(work)
        return self._gathered(JoinedWork(works, tensors))

    def _watched(
        self,
        call: CollectiveCall,
        run: Callable[[], dist.Work],
        *,
        blocking: bool = False,
        peers: tuple[int, int] | None = None,
        tag: int = 0,
    ) -> dist.Work:
        """Run a call, and let the current recorder see it."""
        self._home.check()
        if CALL_LOG.on and peers is not None:
            CALL_LOG.message(self.label, [self.engine.selector.devices[peer] for peer in peers], call.op, call.nbytes)
        recorder = RECORDING.current
        if recorder is None:
            return run()
        ranks = self.engine.selector.devices
        seen: dist.Work = recorder.seen(
            SubmittedCall(
                op=call.op, ranks=ranks if peers is None else (ranks[peers[0]], ranks[peers[1]]),
                channel=self.label if peers is None else f"{self.label}:{tag}", nbytes=call.nbytes,
                device=call.device.type, root=call.root, blocking=blocking,
                splits=call.splits is not None,
            ),
            run,
        )  # fmt: skip
        return seen

    def _delegate(
        self,
        call: CollectiveCall,
        method: str,
        args: tuple[Any, ...],
        tensors: Tensors,
        *,
        why: str,
        peer: int | None = None,
    ) -> dist.Work:
        self._home.check()
        backend = "gloo" if call.device.type == "cpu" else "nccl"
        choice = call.choice(self.label, backend=backend, why=why, nbytes=call.nbytes)
        # That there is no executor is said once, not for every op.
        said = "every collective" if why == self.engine.missing_why else call.op
        LEDGER.add(choice, said, loud=self.rank() == 0 and self.size() > 1)
        if backend == "nccl":
            self._hand_to_nccl(call)
        message = call.op in ("send", "recv")
        delegated = DelegatedCall(op=call.op, peer=peer, number=None if message else self.engine.count_delegated())
        try:
            inner: dist.Work = getattr(self._plain, method)(*args)
        except RuntimeError as error:
            raise self._lost_ranks.explain(error, delegated) from error
        if backend != "gloo":
            # A GPU's stream waits for it, not this thread.
            return inner
        recording = current()
        ended = recording.start(f"{call.op} ({backend})", self.label, call.nbytes) if recording else None
        return self._gathered(
            DelegatedWork(
                inner, tensors, lambda error: self._lost_ranks.explain(error, delegated), ended, message=message
            )
        )

    def _hand_to_nccl(self, call: CollectiveCall) -> None:
        """The next call is NCCL's: those of a batch it has to launch together."""
        self.gpu.note_delegated(call)
        if self._gpu_works is not None and not self._nccl_batch:
            self._nccl_batch = True
            self._plain._start_coalescing(call.device)

    @property
    def wrapped(self) -> list[tuple[torch.device, BackendType, Any]]:
        """The backends that run what programs do not, each with its device and type."""
        return self._wrapped

    @property
    def own_alone(self) -> bool:
        """Whether a call that nobody looks at can only be the job's own backend's, and is waited for by itself."""
        apart = self._gathering is None and not self.coalescing
        return apart and (len(self._wrapped) == 1 or OWN_BACKEND.serves("cuda"))

    @property
    def coalescing(self) -> bool:
        """Whether calls on GPU tensors are waited for together just now."""
        return self._gpu_works is not None

    @property
    def alone(self) -> bool:
        """Whether a call is waited for by itself, not together with others."""
        return self._gathering is None

    def _gathered(self, work: GroupWork) -> GroupWork:
        if isinstance(work, GpuWork):
            if self._gpu_works is not None:
                self._gpu_works.append(work)
        elif self._gathering is not None:
            self._gathering.append(work)
        return work

    def explain(self, error: Exception) -> Exception:
        """An error of gloo's on communicators of its own among these ranks: `PeerLost` where a rank can be named."""
        return self._lost_ranks.explain(error, DelegatedCall(op="a call of gloo's"))


def _wrapped_backends(
    store: c10d.Store, rank: int, size: int, timeout: timedelta, start: str
) -> list[tuple[torch.device, BackendType, Any]]:
    gloo = dist.ProcessGroupGloo(c10d.PrefixStore(f"gloo/{start}/", store), rank, size, gloo_options(timeout))
    set_sequence_number(gloo)
    found: list[tuple[torch.device, BackendType, Any]] = [(CPU, BackendType.GLOO, gloo)]
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(c10d.PrefixStore(f"nccl/{start}/", store), rank, size, options)
        set_sequence_number(nccl)
        found.append((CUDA, BackendType.NCCL, nccl))
    return found


def _custom(kind: BackendType) -> BackendType:
    """On our own group the CPU's backend is the default one, which must be of this type; a type is one backend."""
    return BackendType.CUSTOM if kind == BackendType.GLOO else kind


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _flat(rows: Sequence[Tensors]) -> Tensors:
    return [tensor for row in rows for tensor in row]


def _with(options: Any, more: dict[str, Any], *rest: Any, **fields: Any) -> Any:
    """The options of an overload that takes its arguments one by one."""
    timeout = rest[0] if rest else more.get("timeout")
    if timeout is not None:
        fields["timeout"] = timeout
    for key, value in fields.items():
        setattr(options, key, value)
    return options
