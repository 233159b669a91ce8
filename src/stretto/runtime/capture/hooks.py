# SPDX-License-Identifier: Apache-2.0
"""The hooks that watch a PyTorch job: every collective that any code submits, and every wait for one.

All of c10d's collectives, whoever calls them (Python, DDP's reducer, functional collectives, FSDP), go through
PyTorch's dispatcher. While the hooks are in place, kernels of ours stand at its key BackendSelect, which every call
passes just before the device's own kernel: each calls that and hands its `Work` on inside one of ours, whose `wait`
is called even from C++. Only DDP waits otherwise, for futures, in a callback at the end of the backward pass; a
callback of ours, queued before DDP's, sees that moment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from ...process_state import STATE, ProcessPart
from ..torch_backend.compiled import compiles
from ..torch_backend.patches import (
    FUTURE_THEN,
    FUTURE_WAIT,
    RUN_BACKWARD,
    apply,
    apply_kernels,
    ignore_warning,
    set_switch_interval,
)
from ..torch_backend.watch import WATCH, SubmittedCall
from .gpu_streams import StreamTrails
from .gpu_times import GpuTimes
from .tape import FIRST_PHASE, CallShape, RecordedCall, RecordedIteration, ThreadStep, TimedStep

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "send",
    "barrier": "all_reduce",
}
NO_SOURCE = "recv_any_source_"
_KEYS = {
    False: {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA, "meta": torch._C.DispatchKey.Meta},
    True: {"cpu": torch._C.DispatchKey.SparseCPU, "cuda": torch._C.DispatchKey.SparseCUDA},
}
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

_OUR_REFERENCES = 3
"""To an open work when nobody else has one: the list, a loop variable and getrefcount's argument."""


class RecordedWorks(ProcessPart):
    """C++ may hold a `Work` whose Python half must not die before it; the shells of those that are done are small."""

    def __init__(self) -> None:
        self.open: list[RecordedWork] = []
        self.done: list[RecordedWork] = []


_WORKS = STATE.part(RecordedWorks)


def now_us() -> float:
    """The clock of every recorded time; ranks under one kernel share it."""
    return time.perf_counter_ns() / 1000.0


class RecordedWork(dist.Work):
    """A `Work` that tells when the application waits for it, and is the original in all else."""

    def __init__(self, hooks: Hooks, inner: dist.Work | None, call: RecordedCall) -> None:
        super().__init__()
        self.hooks = hooks
        self.inner: dist.Work | None = inner
        self.call = call

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the original does."""
        if self.inner is None:
            return True
        entered = now_us()
        gpu = self.hooks.gpu
        reached = gpu.here() if gpu is not None and not self.call.waited else None
        done = self.inner.wait(timeout) if timeout else self.inner.wait()
        if gpu is not None and self.call.on_gpu:
            self.hooks.waited_on_gpu(self.call, gpu, reached)
        else:
            self.hooks.waited(self.call, entered, now_us())
        return bool(done)

    def get_future(self) -> Any:
        """The original's future; whoever waits for that is noticed as well."""
        future = self.original().get_future()
        self.hooks.future_taken(self.call, future)
        return future

    def is_completed(self) -> bool:
        """Whether the op has ended."""
        return self.inner is None or self.inner.is_completed()

    def original(self) -> dist.Work:
        """What the library returned."""
        if self.inner is None:
            raise RuntimeError("this communication is done and was waited for")
        return self.inner


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: RecordedWork, *args: Any) -> Any:
        return getattr(self.original(), name)(*args)

    return method


for _name in (
    "is_success", "exception", "result", "synchronize", "source_rank", "_source_rank", "get_future_result",
    "block_current_stream", "_get_duration", "_get_op_type",
):  # fmt: skip
    setattr(RecordedWork, _name, _delegate(_name))


class Hooks:
    """In place between `install` and `remove`; `cut` ends an iteration and returns what was seen in it."""

    def __init__(self, *, only_ours: bool = False, gpu: bool = False) -> None:
        self._only_ours = only_ours
        """Whether calls of other groups than ours are not looked at."""
        self.gpu = GpuTimes() if gpu else None
        """Where calls are on GPU tensors: times are those of the GPU."""
        self.trails = StreamTrails(self.gpu, self._stream_waits) if self.gpu is not None else None
        self._submitted_at: tuple[int, Any] = (0, None)
        """Where, and when, the last call was submitted."""
        self._behind = -1
        """The last call of this iteration that a stream which is not the application's waits for at once."""
        self.thread = threading.get_ident()
        self.active = False
        self.refusal = ""
        self.phase = FIRST_PHASE
        self.number = 0
        self.iteration = self._begun()
        self._submits: dict[int, Any] = {}
        """For each call on a GPU in this iteration, the event at which its stream came to it."""
        self._depth = 0
        self._inside = False
        """Whether a call that was seen is being handed on to a wrapped backend."""
        self._by_future: list[RecordedCall] = []
        self._by_ddp: list[RecordedCall] = []
        self._futures: dict[int, tuple[Any, RecordedCall]] = {}
        self._without_future = {"send", "recv"}
        self._groups: dict[str, tuple[tuple[int, ...], int]] = {}
        self._undo: list[Callable[[], object]] = []
        self._sees_modules = False
        self._module_hook: Any = None
        """Looks for the first module that runs. It costs every module, so it goes as soon as it has seen one."""

    def install(self) -> None:
        """Put the hooks in place."""
        if not self._only_ours:
            self._undo.append(apply_kernels({name: self._kernel(name) for name in (*KINDS, NO_SOURCE)}))
        WATCH.current = self
        self._undo.append(lambda: setattr(WATCH, "current", None))
        # A hook on all modules would have compiled ones compiled anew, twice.
        self._sees_modules = not compiles()
        self._undo += [
            self._stop_looking,
            ignore_warning("Using `torch.compile.module.` when there are global hooks"),
            apply(RUN_BACKWARD, self._watched_backward),
            apply(FUTURE_WAIT, self._watched_wait),
            apply(FUTURE_THEN, self._watched_then),
        ]
        if self.gpu is None:
            # A GPU's events need no thread of Python's to say when a call has ended.
            self._undo.append(set_switch_interval(1e-4))
        if self.trails is not None:
            self._undo += self.trails.install()
        self.active = True
        self._look_for_modules()

    def remove(self) -> None:
        """Take the hooks out again; what is still under way stays valid."""
        self.active = False
        while self._undo:
            self._undo.pop()()
        self._futures.clear()
        _release()

    def cut(self) -> RecordedIteration:
        """End the iteration here."""
        ended = self.iteration
        ended.end_us = now_us()
        if self.gpu is not None:
            self.gpu.put(self.gpu.here(), ended, "end_us")
        # Calls on other streams stand where the application's stream lets them begin.
        ended.marks.sort(key=lambda mark: mark.place)
        for call in self._by_future:
            # Somebody took the future and we never saw a wait for it: it may be waited for at once.
            self._wait_at_submit(ended, call)
        self._by_future.clear()
        self._futures.clear()
        self.number += 1
        self.phase = FIRST_PHASE
        self.iteration = self._begun()
        self._submits = {}
        self._behind = -1
        self._look_for_modules()
        return ended

    def _begun(self) -> RecordedIteration:
        begun = RecordedIteration(begin_us=now_us())
        if self.gpu is not None:
            self.gpu.put(self.gpu.here(), begun, "begin_us")
        return begun

    def _mark(self, mark: TimedStep, event: Any = None) -> None:
        """Note a step of the application's thread: with the GPU's time of an event, or of this place in its stream."""
        if self.gpu is not None:
            event = event if event is not None else self.gpu.here()
            self.gpu.put(event, mark, *(("enter_us",) if mark.ends_with is not None else ("enter_us", "leave_us")))
        self._append(mark)

    def _append(self, mark: TimedStep) -> None:
        if not mark.place:
            mark.place = self.trails.next_place() if self.trails is not None else len(self.iteration.marks) + 1
        self.iteration.marks.append(mark)

    def enter(self, phase: str) -> None:
        """Note that the application's thread is in another phase now."""
        if self.active and phase != self.phase and threading.get_ident() == self.thread:
            self.phase = phase
            at = now_us()
            self._mark(TimedStep(step=ThreadStep(what="phase", phase=phase), enter_us=at, leave_us=at))

    def waited(self, call: RecordedCall, entered_us: float, left_us: float) -> None:
        """Note that the application waited for an op, if it is the first time.

        Args:
            call: The call whose work was waited for.
            entered_us: When the application entered ``wait()``.
            left_us: When it came back.
        """
        if call.on_gpu and self.gpu is not None:
            self.waited_on_gpu(call, self.gpu, self.gpu.here())
        if call.waited:
            return
        call.waited = True
        if not call.exact:
            call.end_us = left_us
        if self.active:
            marks = self.iteration.marks
            if call.blocking and marks and marks[-1].step == ThreadStep(what="submit", call=call.number):
                # The application is still inside the call that submitted.
                entered_us = marks[-1].leave_us
            step = ThreadStep(what="wait", call=call.number, lag=self.number - call.iteration)
            self._append(TimedStep(step=step, enter_us=entered_us, leave_us=left_us))

    def waited_on_gpu(self, call: RecordedCall, gpu: GpuTimes, reached: Any) -> None:
        """Note that the application's stream waits for an op from the moment that was `reached`.

        Args:
            call: The call whose work is waited for.
            gpu: The clock of the GPU's events.
            reached: The event at which the application's stream began to wait.
        """
        if call.waited:
            return
        side = self.trails.side() if self.trails is not None else None
        if (call.blocking or not call.exact) and not call.on_side:
            # The collective may have run in the stream that submitted it: then it has ended where that stream is now.
            gpu.put(gpu.now_here(), call, "end_us")
        if side is not None and self.trails is not None:
            call.on_side = True
            self.trails.waited(side, call)
            return
        call.waited = True
        if call.blocking:
            reached = self._submits.get(call.number, reached)
        if self.active:
            step = ThreadStep(what="wait", call=call.number, lag=self.number - call.iteration)
            self._mark(TimedStep(step=step, enter_us=0.0, leave_us=float("nan"), ends_with=call), reached)

    def _stream_waits(self, call: RecordedCall) -> None:
        """Note that the application's stream waits for a call by an event of another stream."""
        if not call.waited and self.gpu is not None:
            call.waited = True
            if self.active:
                step = ThreadStep(what="wait", call=call.number, lag=self.number - call.iteration)
                self._mark(TimedStep(step=step, enter_us=0.0, leave_us=float("nan"), ends_with=call))

    def future_taken(self, call: RecordedCall, future: Any) -> None:
        """Note that somebody will wait for the op by its future: DDP, in a callback after the backward pass."""
        if not self.active or call.waited:
            return
        self._futures[id(future)] = (future, call)
        if not self._depth:
            self._by_future.append(call)
            return
        if not self._by_ddp:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)
        if call not in self._by_ddp:
            call.shape = replace(call.shape, label=f"{call.shape.kind}.bucket")
            self._by_ddp.append(call)

    def _backward_done(self) -> None:
        at = now_us()
        here = self.gpu.here() if self.gpu is not None else None
        for call in self._by_ddp:
            if not call.waited:
                call.waited = True
                step = ThreadStep(what="wait", call=call.number, lag=self.number - call.iteration)
                self._mark(TimedStep(step=step, enter_us=at, leave_us=at, ends_with=call), here)
        self._by_ddp.clear()

    def _wait_at_submit(self, iteration: RecordedIteration, call: RecordedCall) -> None:
        if call.waited or call.iteration != self.number:
            return
        call.waited = True
        at = next(
            i for i, mark in enumerate(iteration.marks)
            if mark.step.what == "submit" and mark.step.call == call.number
        )  # fmt: skip
        step = ThreadStep(what="wait", call=call.number)
        left_us = iteration.marks[at].leave_us
        mark = TimedStep(step=step, enter_us=left_us, leave_us=left_us)
        if self.gpu is not None and call.number in self._submits:
            mark.ends_with = call
            self.gpu.put(self._submits[call.number], mark, "enter_us")
        iteration.marks.insert(at + 1, mark)

    def _watched_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            self.enter(BACKWARD)
            try:
                return run(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.enter(OPTIMIZER)
                    self._look_for_modules()

        return run_backward

    def _watched_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def watched_wait(future: Any) -> Any:
            entered_us = now_us()
            value = wait(future)
            if id(future) in self._futures:
                self.waited(self._futures[id(future)][1], entered_us, now_us())
            return value

        return watched_wait

    def _watched_then(self, then: Callable[..., Any]) -> Callable[..., Any]:
        def watched_then(future: Any, callback: Any) -> Any:
            child = then(future, callback)
            if id(future) in self._futures:
                self._futures[id(child)] = (child, self._futures[id(future)][1])
            return child

        return watched_then

    def _forward(self, module: object, args: object) -> None:
        if not self._depth and threading.get_ident() == self.thread:
            self.enter(FORWARD)
            self._stop_looking()

    def _look_for_modules(self) -> None:
        if self.active and self._sees_modules and self._module_hook is None:
            self._module_hook = register_module_forward_pre_hook(self._forward)

    def _stop_looking(self) -> None:
        hook, self._module_hook = self._module_hook, None
        if hook is not None:
            hook.remove()

    def _kernel(self, name: str) -> Callable[..., Any]:
        op = getattr(torch.ops.c10d, name).default
        names = [argument.name for argument in op._schema.arguments]

        def kernel(*args: Any) -> Any:
            entered_us = now_us()
            tensor = _first_tensor(args)
            # This way of calling it lets go of the interpreter's lock: a thread of the library may hold its queue and
            # want the lock, to let go of a tensor.
            original = partial(op._op_dk, _key(tensor))
            given = dict(zip(names, args, strict=False))
            shape = self._shape(name, tensor, given)
            if shape is None:
                return original(*args)
            _, workers = self._group(given["process_group"])
            submitted_us = now_us()
            result = original(*args)
            inner = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            blocking = not given.get("async_op", True)
            times_us = (entered_us, submitted_us, now_us())
            work = self._submitted(
                shape, inner, times_us, nbytes=_nbytes(args), workers=workers, blocking=blocking, name=name,
                splits=name == "alltoall_" or bool(given.get("output_split_sizes") or given.get("input_split_sizes")),
            )  # fmt: skip
            boxed = work.boxed()
            return (*result[:-1], boxed) if isinstance(result, tuple) else boxed

        return kernel

    def seen(self, what: SubmittedCall, run: Callable[[], dist.Work]) -> dist.Work:
        """A call of a group that is written in Python, past which PyTorch's dispatcher does not go."""
        entered_us = now_us()
        if not self.active or len(what.ranks) < 2 or self._refused(what.op, what.device):
            return run()
        kind = "send" if what.op in ("send", "recv") else "all_reduce" if what.op == "barrier" else what.op
        shape = CallShape(
            kind=kind, group=what.ranks, channel=what.channel, root=what.root, phase=self.phase,
            label="barrier" if what.op == "barrier" else "",
        )  # fmt: skip
        event, side = None, None
        if self.gpu is not None and self.trails is not None and what.device == "cuda":
            side = self.trails.side()
            event = self.gpu.here() if side is None else self.gpu.now_here()
        submitted_us = now_us()
        self._inside = True
        try:
            inner = run()
        finally:
            self._inside = False
        return self._submitted(
            shape, inner, (entered_us, submitted_us, now_us()), nbytes=max(1, what.nbytes), workers=0,
            blocking=what.blocking, name=what.op, splits=what.splits, event=event, side=side,
        )  # fmt: skip

    def _submitted(
        self, shape: CallShape, inner: dist.Work | None, times_us: tuple[float, float, float], *, nbytes: int,
        workers: int, blocking: bool, name: str, splits: bool, event: Any = None, side: Any = None,
    ) -> RecordedWork:  # fmt: skip
        """Note what was submitted, and watch what came back."""
        entered_us, submitted_us, returned_us = times_us
        call = RecordedCall(
            iteration=self.number,
            number=len(self.iteration.calls),
            shape=shape,
            nbytes=nbytes,
            splits=splits,
            workers=0 if shape.kind == "send" else workers,
            blocking=blocking,
            submit_us=submitted_us,
            on_gpu=event is not None,
        )
        self.iteration.calls.append(call)
        mark = TimedStep(step=ThreadStep(what="submit", call=call.number), enter_us=entered_us, leave_us=entered_us)
        self._mark_submit(mark, call, event, side)
        if event is None or self.gpu is None:
            if inner is not None:
                self._note_end(name, inner, call)
        else:
            self._submits[call.number] = event
            self.gpu.put(event, call, "submit_us")
            if inner is None:
                # NCCL has queued the call in the current stream, as one that blocks, and gives no work to wait for.
                self.waited_on_gpu(call, self.gpu, event)
            elif not blocking:
                self._note_gpu_end(self.gpu, inner, call)
        _release()
        work = RecordedWork(self, inner, call)
        (_WORKS.done if inner is None else _WORKS.open).append(work)
        done_us = now_us()
        if self.gpu is None:
            mark.leave_us = done_us
        self.iteration.overhead_us += done_us - entered_us - (returned_us - submitted_us)
        return work

    def _mark_submit(self, mark: TimedStep, call: RecordedCall, event: Any, side: Any) -> None:
        """Note a submit where the application's stream lets it begin, but never before the one before it."""
        moment = event
        if side is not None and self.trails is not None and self.gpu is not None:
            trail = self.trails.trail(side)
            mark.place, moment = max(self._submitted_at, (trail.place, trail.moment), key=lambda at: at[0])
            mark.place, moment = max(mark.place, 1), moment if moment is not None else self.gpu.here()
            mark.step = replace(mark.step, behind=self._behind)
            if call.blocking:
                self._behind = call.number
        self._mark(mark, moment)
        self._submitted_at = mark.place, moment

    def _refuse(self, name: str, device: str, ranks: int) -> None:
        if self.active and ranks >= 2:
            self._refused(name, device)

    def _refused(self, name: str, device: str) -> bool:
        """Whether a call cannot be recorded; the first such says why nothing can."""
        on_gpu = device == "cuda" and self.gpu is not None
        # A backward pass on a GPU has a thread of its own, and the application's waits for it meanwhile.
        if threading.get_ident() != self.thread and not (on_gpu and self._depth):
            why = f"{name} was submitted by a second thread: such a step has no one order"
        elif device != "cpu" and not on_gpu:
            why = f"{name} moves {device} tensors: record a torch.profiler trace of the job and load that instead"
        else:
            return False
        self.refusal = self.refusal or why
        return True

    def _shape(self, name: str, tensor: torch.Tensor, given: dict[str, Any]) -> CallShape | None:
        """What is being submitted; None when it is not recorded."""
        if not self.active or self._inside:
            return None
        group, _ = self._group(given["process_group"])
        if len(group) < 2:
            return None
        self._refuse(name, tensor.device.type, len(group))
        if name == NO_SOURCE:
            self.refusal = self.refusal or "recv without src: the plan of a step must know who sends"
        if self.refusal:
            return None
        channel: str = dist.ProcessGroup.unbox(given["process_group"]).group_name
        if KINDS[name] == "send":
            me, peer = dist.get_rank(), group[given["dst" if name == "send" else "src"]]
            group = (me, peer) if name == "send" else (peer, me)
            channel = f"{channel}:{given['tag']}"
        return CallShape(
            kind=KINDS[name],
            group=group,
            channel=channel,
            root=given.get("root_rank", 0),
            encoding="sparse" if tensor.is_sparse else "",
            phase=self.phase,
            label="barrier" if name == "barrier" else "",
        )

    def _group(self, boxed: Any) -> tuple[tuple[int, ...], int]:
        """The global ranks of a process group, and how many ops it runs at once."""
        name = dist.ProcessGroup.unbox(boxed).group_name
        if name not in self._groups:
            group = torch._C._distributed_c10d._resolve_process_group(name)
            options = getattr(group._get_backend(torch.device("cpu")), "options", None)
            self._groups[name] = (tuple(dist.get_process_group_ranks(group)), getattr(options, "_threads", 1))
        return self._groups[name]

    def _note_end(self, name: str, inner: dist.Work, call: RecordedCall) -> None:
        if name not in self._without_future:
            try:
                future = inner.get_future()
            except RuntimeError:
                # Asking is slow, and the answer is the same for every op of this kind.
                self._without_future.add(name)
            else:
                future.add_done_callback(lambda _: setattr(call, "end_us", now_us()))
                return
        call.exact = False

    def _note_gpu_end(self, gpu: GpuTimes, inner: dist.Work, call: RecordedCall) -> None:
        try:
            gpu.put(gpu.end_of(inner), call, "end_us")
        except RuntimeError:
            call.exact = False


def _release() -> None:
    """Let go of what was waited for, unless the application still holds it: a library's `Work` keeps tensors alive."""
    for work in _WORKS.open:
        if (work.call.waited or work.call.on_side) and sys.getrefcount(work) <= _OUR_REFERENCES:
            work.inner = None
            _WORKS.done.append(work)
    _WORKS.open[:] = [work for work in _WORKS.open if work.inner is not None]


def _first_tensor(args: Any) -> torch.Tensor:
    for argument in args:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, list | tuple) and argument and isinstance(argument[0], torch.Tensor | list | tuple):
            return _first_tensor(argument)
    raise TypeError("a c10d op without a tensor")


def _key(tensor: torch.Tensor) -> torch._C.DispatchKey:
    """Where the device's own kernel is registered."""
    return _KEYS[tensor.is_sparse].get(tensor.device.type, torch._C.DispatchKey.PrivateUse1)


def _nbytes(args: tuple[Any, ...]) -> int:
    """The larger of what this rank gives and takes; at least one byte, for an empty message is sent all the same."""
    return max(1, *(_bytes_of(argument) for argument in args))


def _bytes_of(argument: Any) -> int:
    if isinstance(argument, list | tuple):
        return sum(_bytes_of(part) for part in argument)
    if not isinstance(argument, torch.Tensor):
        return 0
    if argument.is_sparse:
        return _bytes_of(argument._values()) + _bytes_of(argument._indices())
    return argument.numel() * argument.element_size()
