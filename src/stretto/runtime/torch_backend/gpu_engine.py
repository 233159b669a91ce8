# SPDX-License-Identifier: Apache-2.0
"""The part of a process group that runs programs on GPU memory, and says what it does not run."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from ...errors import InvalidInput, PeerLost, StrettoError
from ...programs.fused import IN, OUT
from ...units import format_bytes
from ..executor.executor import ProgramMismatch
from .buffers import CollectiveCall
from .call_board import CallBoard
from .cuda_clock import cuda
from .current import CURRENT
from .engine import Engine
from .gpu_layout import GpuBuffers, gpu_buffers, gpu_refusal
from .gpu_options import GpuOptions, asked_for_programs
from .gpu_rendezvous import GpuSite, join_gpus
from .gpu_selection import GpuSelector, gains_in_place
from .gpu_work import GpuFlight, GpuWork
from .launch_queue import Launch, capture_number, on_stream
from .lost_ranks import LostRanks
from .meeting import Card, Meeting
from .own_backend import OWN_BACKEND
from .own_backend import WHY as OWN_WHY
from .recording import LEDGER, Choice, current
from .symmetric_pool import SymmetricPool
from .work import Tensors

if TYPE_CHECKING:
    from ...programs import Program
    from ...programs.lowered import Lowered
    from ..gpu import GpuProgram

MAX_READY = 4096
MARGIN_S = 60.0
"""How much longer than the group's timeout a kernel waits before it gives up by itself."""
ERRORS = {"PeerLost": PeerLost, "ProgramMismatch": ProgramMismatch}
Ready = tuple[Any, Choice, str]


class GpuEngine:
    """One communicator's programs on GPU memory; ranks join at their first call, or agree to leave all to NCCL."""

    takes_pools = True

    def __init__(
        self, group: Any, engine: Engine, cards: Sequence[Card], store: Any, lost_ranks: LostRanks, options: GpuOptions
    ) -> None:
        self.engine, self.cards, self.lost_ranks = engine, list(cards), lost_ranks
        self.broken: Exception | None = None
        self.flights: deque[GpuFlight] = deque()
        """Calls that the GPU may not be done with, oldest first."""
        self.site: GpuSite | None = None
        self.captured = False
        """Whether a graph holds calls of this group."""
        self.posted = 0
        """How many calls on GPU tensors this rank has made in this group."""
        # The group holds this object, and must not outlive its last user because of it.
        self._group, self._options = weakref.ref(group), options
        self._store: Any = c10d.PrefixStore("stretto/gpu", store)
        self._why = ""
        self._selector = GpuSelector(engine.selector)
        self._ready: dict[tuple[Any, ...], Ready] = {}
        self._symmetric: list[torch.Tensor] = []
        """Memory that all ranks have made together, in the same order."""
        self._pools: list[SymmetricPool] = []
        """Pools of symmetric memory from which PyTorch takes pieces."""
        self._meeting: Meeting | None = None
        self._last: Launch | None = None
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """GPU memory that this group holds for programs."""
        pools = sum(pool.memory.nbytes for pool in self._pools)
        return 0 if self.site is None else int(self.site.communicator.held_bytes) + pools

    def refusal(self, call: CollectiveCall) -> str:
        """Why a call goes to NCCL; empty where it runs on GPU memory. The same on all ranks."""
        if not self._options.enabled:
            return "STRETTO_GPU is off"
        if OWN_BACKEND.asked and (OWN_BACKEND.runs or not asked_for_programs()):
            return OWN_WHY
        if CURRENT.enforcer is not None:
            # NCCL runs the motifs of a plan, and kernels of two libraries that wait for peers can block each other.
            return "a plan is enforced above NCCL"
        return gpu_refusal(call, self.engine.size) or self._refusal_of(call.device)

    def _refusal_of(self, given: torch.device) -> str:
        """Why no call on a device runs here; the ranks join at the first one."""
        if self._why:
            return self._why
        device = given if given.index is not None else torch.device("cuda", cuda.current_device())
        if self.site is None:
            if cuda.is_current_stream_capturing():
                return "the group's first call on GPU tensors is inside the capture of a graph"
            self._join(device)
            return self._why
        if device != self.site.device:
            return f"tensors on {device}, where the group's calls before were on {self.site.device}"
        return ""

    def start(self, calls: Sequence[CollectiveCall], tensors: Tensors, opts: Any) -> GpuWork | str:
        """Run calls as one, or say why not: the wrapped backend then runs all of them.

        Args:
            calls: The calls.
            tensors: The tensors that their future gives.
            opts: PyTorch's options of the calls.

        Returns:
            The work, or the reason why the wrapped backend has to run them.
        """
        why = next((reason for call in calls if (reason := self.refusal(call))), "")
        if why:
            return why
        site = self.site
        assert site is not None
        self.check()
        laid_out = [gpu_buffers(call, self.engine.size, site.nothing) for call in calls]
        parts = [(call, buffers) for call, buffers in zip(calls, laid_out, strict=True) if buffers is not None]
        if len(parts) < len(calls):
            # An error of the caller's; the wrapped backend says which.
            return "tensors that do not fit together"
        try:
            prepared = [self._prepared(call, buffers) for call, buffers in parts]
        except StrettoError as error:
            # Loading is the same on all ranks, and so is what goes wrong with it.
            return str(error)
        for _, choice, _ in prepared:
            LEDGER.add(choice)
        try:
            flight = self._launch(site, parts, prepared, opts)
        except Exception as error:
            self._launch_failed(error)
            raise
        barrier = calls[0].op == "barrier"
        alone = not getattr(opts, "asyncOp", True)
        return GpuWork(flight, tensors, parts, check=self.check, blocks_host=barrier, blocks_stream=alone)

    def _launch(
        self, site: GpuSite, parts: Sequence[tuple[CollectiveCall, GpuBuffers]], prepared: Sequence[Ready], opts: Any
    ) -> GpuFlight:
        """Queue everything on a stream: the current one, or the group's own where the call is asynchronous."""
        submitted_on = cuda.current_stream(site.device)
        stream = site.stream if getattr(opts, "asyncOp", True) else submitted_on
        capture = capture_number(submitted_on)
        blocks = max(int(loaded.encoded.blocks) for loaded, _, _ in prepared)
        with site.queue.lock:
            if stream != submitted_on:
                stream.wait_stream(submitted_on)
            last = self._last
            # Launches of a communicator use the same slots; one inside a graph runs where its graph does.
            if last is not None and last.stream != stream and last.capture == capture:
                stream.wait_event(last.end)
            site.queue.make_room(stream, blocks, capture)
            recording = None if capture else current()
            with on_stream(stream):
                for (call, buffers), (loaded, choice, text) in zip(parts, prepared, strict=True):
                    self._post(site.board, text)
                    began = _timed_event(stream) if recording else None
                    source, target = self._used(loaded, buffers)
                    site.communicator.launch(loaded, source, target, ordered=True)
                    if buffers.finish is not None:
                        buffers.finish()
                    if recording is not None:
                        ended = recording.expect(f"{call.op} {choice.program}", self.engine.name, buffers.nbytes)
                        site.clock.note(began, _timed_event(stream), ended, None)
                end = cuda.Event()
                end.record(stream)
            launch = Launch(stream=stream, end=end, blocks=blocks, capture=capture)
            site.queue.add(launch)
            self._last = launch
        flight = GpuFlight(
            op=parts[0][0].op, number=self.posted, launch=launch, submitted_on=submitted_on,
            limit_s=self.engine.limit_s(opts),
        )  # fmt: skip
        if capture:
            self.captured = True
        else:
            self.flights.append(flight)
            site.watch.wake()
        return flight

    def _used(self, loaded: Any, buffers: GpuBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory that this rank brings: in a broadcast only the root has an input, in a reduce an output."""
        rank, encoded = self.engine.rank, loaded.encoded
        return buffers.source[: encoded.inputs[rank]], buffers.target[: encoded.outputs[rank]]

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that ranks read and write in place; all ranks of the group make it together.

        Args:
            count: Elements, as many on all ranks.
            dtype: Their type.
            device: This rank's GPU.

        Returns:
            A tensor of one dimension.

        Raises:
            InvalidInput: No program runs on the memory of this group.
        """
        why = self._refusal_of(device) if self._options.enabled else "STRETTO_GPU is off"
        if why or self.site is None:
            raise InvalidInput(f"symmetric memory: {why}")
        self.check()
        self.site.watch.rendezvous += 1
        tensor: torch.Tensor = self.site.communicator.empty(count, dtype)
        self._symmetric.append(tensor)
        return tensor

    def make_pool(self, nbytes: int, device: torch.device) -> SymmetricPool | str:
        """Memory of which PyTorch takes pieces for tensors; all ranks of the group make it together.

        Args:
            nbytes: How much, on this rank; the most that a rank asks for is made.
            device: This rank's GPU.

        Returns:
            The pool, or why there is none: the same on all ranks.

        Raises:
            PeerLost: A rank does not come.
        """
        if not (self._options.enabled and self.takes_pools):
            return "STRETTO_GPU is off" if self.takes_pools else "a group over several hosts"
        why = self._refusal_of(device)
        if why or self.site is None:
            return why
        self.check()
        room = self._options.max_bytes - self.site.watch.held_bytes()
        asked = [text.split() for text in self._exchange(f"{nbytes} {room}".encode())]
        most, least = max(int(one[0]) for one in asked), min(int(one[1]) for one in asked)
        if most > least:
            return f"{format_bytes(most)} more are over STRETTO_GPU_MEMORY"
        self.site.watch.rendezvous += 1
        pool = SymmetricPool(self.site.communicator.empty(most, torch.uint8))
        self._pools.append(pool)
        return pool

    def agree_pool(self, pool: SymmetricPool) -> None:
        """All ranks compare what PyTorch has taken of a pool: it is used where it lies only if they have the same."""
        layouts = self._exchange(pool.layout)
        pool.agreed = len(set(layouts)) == 1

    def _exchange(self, mine: bytes) -> list[bytes]:
        if self._meeting is None:
            store: Any = c10d.PrefixStore("pools", self._store)
            self._meeting = Meeting(store, self.engine.rank, self.engine.size)
            self._meeting.cards = self.cards
        return self._meeting.exchange(mine)

    def join(self, device: torch.device) -> str:
        """Why no program runs on the memory of this group's GPUs; empty where one does. All ranks ask together."""
        return self._refusal_of(device) if self._options.enabled else "STRETTO_GPU is off"

    def load_program(self, program: Program, dtype: torch.dtype, reduce: str, nbytes: int) -> GpuProgram:
        """Make any program of this group ready for `run_program`, after `join`.

        Args:
            program: The program, equal on all ranks; its output lies in memory that `empty` has made.
            dtype: The element type; bytes where nothing is added.
            reduce: "sum", "prod", "min" or "max".
            nbytes: The bytes of the largest input or output of any rank.

        Returns:
            The loaded program.

        Raises:
            InvalidInput: The program does not fit the size or the type.
        """
        assert self.site is not None
        found: GpuProgram = self.site.communicator.load(
            program, dtype=dtype, reduce=reduce, nbytes=nbytes, symmetric=True, anchored=True
        )
        return found

    def run_program(self, loaded: GpuProgram, source: torch.Tensor, target: torch.Tensor) -> None:
        """Put a loaded program onto the current stream; all ranks do, in the same order.

        Args:
            loaded: What `load_program` has made.
            source: This rank's input, perhaps empty.
            target: This rank's output in symmetric memory, at the same place on all ranks; where it is empty, an empty
                slice of that memory.

        Raises:
            PeerLost: A rank has gone, now or before.
            ProgramMismatch: Another rank runs something else.
        """
        self.check()
        assert self.site is not None
        name = loaded.fused.name
        call = CollectiveCall.of(name, [source], outputs=[target])
        buffers = GpuBuffers(source=source, target=target, reduce=loaded.reduce)
        text = f"{name} of {loaded.count} {loaded.dtype} as number {loaded.number}"
        choice = call.choice(self.engine.name, backend="gpu", why="a program of its own", nbytes=buffers.nbytes)
        try:
            self._launch(self.site, [(call, buffers)], [(loaded, choice, text)], SimpleNamespace(asyncOp=False))
        except Exception as error:
            self._launch_failed(error)
            raise

    def addresses(self, tensor: torch.Tensor) -> list[int]:
        """Where memory that `empty` has made, and that at the same place on other ranks, is for this rank."""
        self.check()
        assert self.site is not None
        found: list[int] = self.site.communicator.addresses(tensor)
        return found

    def note_delegated(self, call: CollectiveCall) -> None:
        """NCCL runs a call of this group: a rank that runs it as a program instead is told so, and does not wait."""
        if self.site is not None and self.broken is None and call.op not in ("send", "recv"):
            self._post(self.site.board, f"{call.op} on NCCL")

    def check(self) -> None:
        """Raise what has ended this group's calls on GPU memory, if anything has."""
        if self.broken is not None:
            raise self.broken

    def fail(self, error: Exception, *, tell: bool = True) -> None:
        """End all calls that are under way, and those to come; the other ranks are told why."""
        site = self.site
        with self._lock:
            if self.broken is not None or site is None:
                return
            for flight in list(self.flights):
                with contextlib.suppress(RuntimeError):
                    if flight.launch.ended:
                        continue
                flight.error = error
            self.broken = error
        if tell:
            site.board.give_up(type(error).__name__, str(error))
        site.communicator.abort(str(error))

    def _launch_failed(self, error: Exception) -> None:
        """Raise why the group was given up, if it just was; else tell the others, who may wait for this rank."""
        broken = self.broken
        if broken is not None and broken is not error:
            raise broken from error
        self.fail(StrettoError(f"rank {self.engine.rank}: {str(error).splitlines()[0]}"))

    def fail_as_told(self, kind: str, why: str) -> None:
        """Another rank has given up."""
        self.fail(ERRORS.get(kind, StrettoError)(why), tell=False)

    def close(self) -> None:
        """Let the GPU finish, say so, and give the memory back."""
        site, self.site = self.site, None
        self._why = self._why or "a group that was destroyed"
        if site is not None:
            site.close(self.flights)

    def _join(self, device: torch.device) -> None:
        """All ranks of the group at their first call; afterwards either `site` or `_why` is set, on all of them."""
        made = join_gpus(
            self._group(), self.cards, self._store, device, self._options, self.engine.timeout_s + MARGIN_S
        )
        if isinstance(made, str):
            self._why = made
        else:
            self.site = made
            made.watch.add(self)

    def _post(self, board: CallBoard, text: str) -> None:
        self.posted += 1
        board.post(self.posted, text)
        different = board.mismatch(self.posted)
        if different:
            error = ProgramMismatch(different)
            self.fail(error)
            raise error

    def _prepared(self, call: CollectiveCall, buffers: GpuBuffers) -> Ready:
        dtype = str(buffers.source.dtype).removeprefix("torch.")
        source, target = self._places(buffers)
        key = (call.op, buffers.nbytes, dtype, call.root, buffers.reduce, source, target)
        found = self._ready.get(key)
        if found is not None:
            return found
        pick = self._selector.pick(call.op, buffers.nbytes, call.root, in_place=bool(source or target))
        loaded, places = self._loaded(pick.program, buffers, source, target)
        choice = call.choice(self.engine.name, backend="gpu", why=pick.why, nbytes=buffers.nbytes, pick=pick)
        how = f" {buffers.reduce} {dtype}" if buffers.reduce else ""
        root = f" root {call.root}" if call.op in ("broadcast", "reduce") else ""
        text = f"{call.op}{how} of {buffers.nbytes} bytes{root} as {pick.program.name}{places}"
        if len(self._ready) >= MAX_READY:
            self._ready.clear()
        self._ready[key] = found = (loaded, choice, text)
        return found

    def _loaded(
        self, program: Program | Lowered, buffers: GpuBuffers, source: str, target: str
    ) -> tuple[GpuProgram, str]:
        """A program made ready, and in words where it works: in place if what other ranks touch is symmetric memory."""
        site = self.site
        assert site is not None
        asked: dict[str, Any] = {
            "dtype": buffers.source.dtype, "reduce": buffers.reduce or "sum", "nbytes": buffers.nbytes,
        }  # fmt: skip
        if source or target:
            loaded: GpuProgram = site.communicator.load(program, **asked, symmetric=True)
            # An input that nobody else reads may lie anywhere, and elsewhere on other ranks.
            read, written = loaded.fused.touched(IN), loaded.fused.touched(OUT)
            if (source or not read) and (target or not written):
                where = [place if touched else "anywhere" for place, touched in ((source, read), (target, written))]
                return loaded, f", in memory {where[0]} to {where[1]}"
        return site.communicator.load(program, **asked), ""

    def _places(self, buffers: GpuBuffers) -> tuple[str, str]:
        """Where in symmetric memory a call reads and writes; empty where it does not, or is too small to gain."""
        pools = [pool.memory for pool in self._pools if pool.agreed]
        if not (self._symmetric or pools) or not gains_in_place(buffers.nbytes, self.engine.size):
            return "", ""
        source, target = (
            place_in(self._symmetric, tensor) or place_in(pools, tensor, "pool ")
            for tensor in (buffers.source, buffers.target)
        )
        return source, target


def place_in(allocations: Sequence[torch.Tensor], tensor: torch.Tensor, kind: str = "") -> str:
    """Which allocation holds a tensor, and at which byte.

    Args:
        allocations: Symmetric memory, in the same order on all ranks.
        tensor: The tensor.
        kind: A word before the number.

    Returns:
        Number and offset as text; empty where none holds it.
    """
    begin = tensor.data_ptr()
    for number, whole in enumerate(allocations):
        at = begin - whole.data_ptr()
        if at >= 0 and at + tensor.nbytes <= whole.nbytes:
            return f"{kind}{number}+{at}"
    return ""


def _timed_event(stream: Any) -> Any:
    event = cuda.Event(enable_timing=True)
    event.record(stream)
    return event
