# SPDX-License-Identifier: Apache-2.0
"""The part of a process group that runs programs on the executor, and says what it does not run."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ...errors import InvalidInput, StrettoError
from ...process_state import STATE, ProcessPart
from ...programs import Program
from ..executor.executor import OPERATIONS, ChannelConfig, Executor, LoadedProgram, load_native
from ..executor.join import interface_address
from .buffers import IN_PLACE, Buffers, CollectiveCall, is_rigid, lay_out
from .meeting import Card, Meeting
from .networks import on_networks
from .recording import LEDGER, Choice, current
from .selection import ProgramPick, Selector
from .work import NO_TIMEOUT, ExecutedWork, GroupWork, Tensors

MAX_READY = 4096
WHOLE_ONLY = ("band", "bor", "bxor")
REDUCED = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64,
    }
)  # fmt: skip
"""What gloo reduces; other types are refused by it, with its words."""


def _of_autograd() -> bool:
    """Whether this thread is not one of Python's: of a backward pass on a GPU, for which the application's waits."""
    known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return known is None or isinstance(known, threading._DummyThread)


class Engine:
    """One communicator's programs, and the job's executor that runs them."""

    def __init__(
        self, rank: int, size: int, name: str, selector: Selector, job: Job, communicator: int, generation: int
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.selector, self.job, self.communicator, self.generation = selector, job, communicator, generation
        self.closed = False
        self.timeout_s = 0.0
        self.calls = 0
        """How many collectives were submitted; c10d wants the same ones in the same order on all ranks of the group."""
        self.by_one_thread = True
        """Whether all calls came from the thread that made the group."""
        self._thread = threading.get_ident()
        self._ready: dict[tuple[Any, ...], tuple[LoadedProgram, Choice, bool]] = {}
        self._handles: dict[int, tuple[LoadedProgram, bool]] = {}

    @property
    def missing_why(self) -> str:
        """Why no call of this group runs on the executor; empty when there is one."""
        return self.job.why

    def count(self) -> None:
        """A collective is submitted."""
        self.calls += 1
        if threading.get_ident() != self._thread and not _of_autograd():
            self.by_one_thread = False

    def refusal(self, call: CollectiveCall) -> str:
        """Why the executor does not run a call; empty when it does.

        It may only depend on what c10d wants equal on all ranks, or ranks would part: never on strides, or on a list
        that only the root has.
        """
        if self.job.executor is None:
            return self.job.why
        if self.closed:
            return "a group that was destroyed"
        if call.device.type != "cpu":
            return f"{call.device.type} tensors"
        if self.size == 1:
            return "a group of one rank"
        if self.communicator >= self.job.max_communicators:
            return f"more than {self.job.max_communicators} groups"
        if call.op == "barrier":
            return ""
        if call.splits is not None:
            sparse = next((tensor for tensor in call.inputs if tensor.layout != torch.strided), None)
            # An empty tensor is no reason to refuse, since those of other ranks may hold data.
            return "" if sparse is None else f"{sparse.layout} tensors"
        tensor = call.tensor
        if tensor.layout != torch.strided:
            return f"{tensor.layout} tensors"
        if tensor.numel() == 0:
            return "an empty tensor"
        if call.reduce:
            if tensor.dtype not in REDUCED:
                return f"no reduction of {tensor.dtype}"
            if call.reduce not in OPERATIONS:
                return f"no reduction {call.reduce}"
            if call.reduce in (WHOLE_ONLY if tensor.is_floating_point() else ("avg",)):
                return f"no {call.reduce} of {tensor.dtype}"
        return ""

    def start(self, call: CollectiveCall, tensors: Tensors, opts: Any, *, alone: bool = True) -> GroupWork | str:
        """Run a call, or say why not. One that is not `alone` is waited for together with others.

        Args:
            call: The call.
            tensors: The tensors that its future gives.
            opts: PyTorch's options of the call.
            alone: Whether it is waited for by itself.

        Returns:
            The work, or the reason why the wrapped backend has to run it.
        """
        pick = None
        if call.op == "all_to_all" and call.splits is None and self.job.executor is not None:
            pick = self.selector.pick_exchange(call.nbytes)
            call = call if pick is None else call.with_splits()
        why = self.refusal(call)
        if why:
            return why
        executor = self.job.executor
        assert executor is not None
        kind = "all_reduce" if call.op == "barrier" else call.op
        buffers = lay_out(call, kind, self.rank, self.size)
        if buffers is None:
            # An error of the caller's; the wrapped backend says which.
            return "tensors that do not fit together"
        if call.splits is not None:
            return self._start_split(executor, call, buffers, tensors, opts, alone=alone, equal=pick)
        handle, choice, rigid = self._prepared(call, kind, buffers)
        if rigid:
            buffers = buffers.padded(handle.lowered.collective.num_chunks)
        LEDGER.add(choice)
        recording = current()
        ended = recording.start(f"{call.op} {choice.program}", self.name, call.nbytes) if recording else None
        input, output = buffers.addresses(handle)
        started = executor.start(
            handle,
            input,
            output,
            buffers.count,
            buffers.dtype,
            call.reduce or "sum",
            timeout_s=self.limit_s(opts),
            # torch.distributed waits at once for what was not asked for as asynchronous.
            blocking=alone and not opts.asyncOp,
            keep=(call, buffers),
        )
        return ExecutedWork(started, tensors, buffers.finish, ended)

    def _start_split(
        self, executor: Executor, call: CollectiveCall, buffers: Buffers, tensors: Tensors, opts: Any, *, alone: bool,
        equal: ProgramPick | None,
    ) -> GroupWork:  # fmt: skip
        """Run an all-to-all whose pieces may differ: one program for all sizes, which come with the call.

        `equal` is the choice for one whose pieces are equal on this rank.
        """
        handle, choice = self._prepared_split(call, executor, equal)
        LEDGER.add(choice)
        recording = current()
        ended = recording.start(f"{call.op} {choice.program}", self.name, call.nbytes) if recording else None
        gives, takes = buffers.pieces()
        started = executor.start_pieces(
            handle, gives, takes, timeout_s=self.limit_s(opts), blocking=alone and not opts.asyncOp,
            keep=(call, buffers),
        )  # fmt: skip
        return ExecutedWork(started, tensors, buffers.finish, ended)

    def _prepared_split(
        self, call: CollectiveCall, executor: Executor, equal: ProgramPick | None
    ) -> tuple[LoadedProgram, Choice]:
        # Sizes that follow the data have no end: calls count as alike up to the next power of two.
        nbytes = 1 << max(call.nbytes - 1, 0).bit_length() if equal is None else call.nbytes
        key = ("splits", nbytes, equal is None, call.inputs[0].dtype)
        found = self._ready.get(key)
        if found is not None:
            return found[:2]
        pick = self.selector.pick("all_to_all_v", 0)
        if id(pick) not in self._handles:
            ranks = [self.job.rank_of[device] for device in self.selector.devices]
            handle = executor.load(pick.program, ranks=ranks, communicator=self.communicator, by_call=True)
            self._handles[id(pick)] = handle, False
        handle, _ = self._handles[id(pick)]
        chosen = equal or pick
        choice = call.choice(self.name, backend="executor", why=chosen.why, nbytes=nbytes, pick=chosen)
        self._remember(key, (handle, choice, False))
        return handle, choice

    def limit_s(self, opts: Any) -> float:
        """How long a call may take."""
        timeout = getattr(opts, "timeout", None)
        return timeout.total_seconds() if timeout and timeout > NO_TIMEOUT else self.timeout_s

    def _remember(self, key: tuple[Any, ...], ready: tuple[LoadedProgram, Choice, bool]) -> None:
        if len(self._ready) >= MAX_READY:
            self._ready.clear()
        self._ready[key] = ready

    def _prepared(self, call: CollectiveCall, kind: str, buffers: Buffers) -> tuple[LoadedProgram, Choice, bool]:
        nbytes = buffers.nbytes
        key = (call.op, nbytes, call.op != "barrier" and call.tensor.dtype, call.root, call.reduce)
        found = self._ready.get(key)
        if found is not None:
            return found
        pick = self.selector.pick(kind, nbytes, root=call.root, in_place=kind in IN_PLACE)
        executor = self.job.executor
        assert executor is not None
        if id(pick) not in self._handles:
            ranks = [self.job.rank_of[device] for device in self.selector.devices]
            program = pick.program
            if isinstance(program, Program):
                program = on_networks(program, self.selector.cluster, executor.channels)
            handle = executor.load(program, ranks=ranks, communicator=self.communicator)
            self._handles[id(pick)] = handle, is_rigid(handle.lowered)
        handle, rigid = self._handles[id(pick)]
        choice = call.choice(self.name, backend="executor", why=pick.why, nbytes=nbytes, pick=pick)
        uneven = rigid and buffers.count % handle.lowered.collective.num_chunks != 0
        self._remember(key, (handle, choice, uneven))
        return handle, choice, uneven

    def count_delegated(self) -> int | None:
        """The number of a collective that the wrapped backend is about to run; None where ranks cannot be asked."""
        executor = self.job.executor
        if executor is None or self.closed or self.communicator >= self.job.max_communicators:
            return None
        return executor.count_delegated(self.communicator)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a program may take from now on."""
        self.timeout_s = timeout.total_seconds()

    def close(self) -> None:
        """Give the communicator back; leave the job, if this group is the one that joined it."""
        self.closed = True
        self.job.leave(self)


class Job:
    """The executor that all groups of a process share, or why there is none."""

    def __init__(self, executor: Executor | None, why: str, devices: Sequence[int]) -> None:
        self.executor, self.why = executor, why
        self.rank_of = {device: rank for rank, device in enumerate(devices)}
        self.max_communicators = load_native().max_communicators if executor is not None else 0
        self.next = self.generation = 0
        self.engines: list[Engine] = []
        """The engines of all groups that are in use."""
        self._owner: Engine | None = None
        self._in_use: set[int] = set()
        self._had: dict[int, frozenset[int]] = {}
        """The ranks that have had a communicator together with this one."""

    @classmethod
    def join(cls, meeting: Meeting, cards: list[Card], devices: Sequence[int], timeout: timedelta) -> Job:
        """All ranks of the group make an executor together, or none does.

        Args:
            meeting: Where the ranks meet.
            cards: What each rank said of itself.
            devices: The device of the cluster that each rank is.
            timeout: How long to wait for all ranks.

        Returns:
            The job, with an executor or with the reason why it has none.
        """
        without = next((card for card in cards if card.executor), None)
        if without is not None:
            return cls(None, f"rank {without.rank} has no executor: {without.executor}", devices)
        if len(cards) == 1:
            return cls(None, "a job of one rank", devices)
        executor, why = None, ""
        try:
            channels = channels_of(os.environ)
            near = len({card.host for card in cards}) == 1
            executor = Executor(
                meeting.rank,
                meeting.size,
                meeting.exchange,
                token=bytes.fromhex(cards[0].token),
                channels=channels,
                interface="lo" if near else next(iter(channels.values())).devices,
                timeout_s=timeout.total_seconds(),
                watch=meeting.check,
            )
        except (StrettoError, OSError) as error:
            why = str(error)
        failed = meeting.conclude(why)
        if failed and executor is not None:
            executor.close()
            executor = None
        return cls(executor, failed, devices)

    def enter(self, engine: Engine, *, owns: bool) -> None:
        """Note that a group uses an engine of this job; the group that owns the job ends it."""
        self.reserve(engine.communicator, engine.generation, engine.selector.devices)
        self.engines.append(engine)
        if owns:
            self._owner = engine

    def reserve(self, number: int, generation: int, devices: Sequence[int]) -> None:
        """Take a communicator on which ranks have agreed; it is in use until it is given back.

        Args:
            number: The communicator.
            generation: How often groups were made, this one counted.
            devices: The ranks that have agreed.
        """
        self.next, self.generation = max(self.next, number + 1), generation
        self._in_use.add(number)
        self._had[number] = frozenset(self.rank_of[device] for device in devices)
        if self.executor is not None and number < self.max_communicators:
            self.executor.renumber(number, generation << 32)

    def give_back(self, number: int) -> None:
        """Note that no group of this process uses a communicator any longer."""
        self._in_use.discard(number)

    def taken(self, devices: Sequence[int]) -> int:
        """Communicators that a new group of these devices cannot have, as bits.

        One that was given back can be had by a group that has all its former ranks: each of them says here that it has
        left, and that nothing is under way. Of ranks that are not asked nobody knows.
        """
        ranks = {self.rank_of[device] for device in devices}
        used = set(self._in_use)
        for number, had in self._had.items():
            if not had <= ranks or not (self.executor is None or self.executor.retired(number)):
                used.add(number)
        return sum(1 << number for number in used)

    def lost(self, devices: Sequence[int]) -> str:
        """Why one of these devices' ranks will not come, as far as is known; empty where nothing is."""
        ranks = [self.rank_of[device] for device in devices if device in self.rank_of]
        found = self.executor.find_culprit(ranks) if self.executor is not None else None
        return found[1] if found is not None else ""

    def blame(self, devices: Sequence[int], why: str) -> None:
        """Tell the job's ranks that this one gives up because of one of these devices' ranks, where one is gone."""
        ranks = [self.rank_of[device] for device in devices if device in self.rank_of]
        found = self.executor.find_culprit(ranks) if self.executor is not None else None
        if self.executor is not None and found is not None:
            self.executor.blame(found[0], why)

    def leave(self, engine: Engine) -> None:
        """Note that a group is destroyed; the last one ends the job."""
        self.give_back(engine.communicator)
        if engine in self.engines:
            self.engines.remove(engine)
        if engine is not self._owner:
            return
        if self.executor is not None:
            self.executor.close()
            self.executor = None
        self.why = self.why or "the job has ended"
        if CURRENT_JOB.job is self:
            STATE.job_ended()


class CurrentJob(ProcessPart):
    """The job of the default process group, where that is on the backend `stretto`."""

    def __init__(self) -> None:
        self.job: Job | None = None

    def job_ended(self) -> None:
        """Forget the job; there is none until the next one is made."""
        self.job = None


CURRENT_JOB = STATE.part(CurrentJob)


def missing() -> str:
    """Why there is no executor here; empty when there is one."""
    try:
        load_native()
    except StrettoError as error:
        return str(error)
    return ""


def channels_of(environment: Mapping[str, str]) -> dict[str, ChannelConfig]:
    """The networks to use: STRETTO_CHANNELS (``name=interface,...;...``), or the interface that leads to the master.

    >>> list(channels_of({"STRETTO_CHANNELS": "rdma=eth0,10.0.0.1;eth=eth1"}))
    ['rdma', 'eth']
    """
    named = environment.get("STRETTO_CHANNELS", "")
    found = {}
    for part in filter(None, named.split(";")):
        name, equals, rest = part.partition("=")
        if not name or not equals or not rest.partition(",")[0]:
            raise InvalidInput(f"STRETTO_CHANNELS: {part!r} must be NAME=INTERFACE")
        found[name] = ChannelConfig(devices=rest.partition(",")[0])
    return found or {"net": ChannelConfig(devices=environment.get("GLOO_SOCKET_IFNAME") or _interface(environment))}


def _interface(environment: Mapping[str, str]) -> str:
    """The network interface whose address this host uses to reach the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only asks for the route.
            probe.connect((environment.get("MASTER_ADDR", "127.0.0.1"), 9))
        except OSError:
            return "lo"
        mine = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(InvalidInput):
            if interface_address(name) == mine:
                return name
    return "lo"
