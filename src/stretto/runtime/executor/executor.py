# SPDX-License-Identifier: Apache-2.0
"""The executor: runs lowered programs on real memory, over shared memory inside a host and UCX between hosts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput, PeerLost, StrettoError, unknown
from ...programs.ir import Program
from ...programs.lower import lower
from ...programs.lowered import Lowered
from .forks import Home, abandon_in_children, keep_forever
from .handshake import OutOfResources
from .join import Exchange, JoinedDescriptors, host_key, join
from .load import SHARED_MEMORY, sized_by_call, tables

if TYPE_CHECKING:
    from ... import _executor

DTYPES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1,
    "bool": 1,
}  # fmt: skip
"""Element types and their sizes, numbered as in C++."""
OPERATIONS = ("sum", "prod", "min", "max", "band", "bor", "bxor", "avg")
FLOATS = ("float16", "bfloat16", "float32", "float64")
SEGMENT_BYTES = 256 << 20
"""Virtual size of a rank's shared segment; only what is used is ever backed by memory."""
TICK_S = 0.25
_TYPE = {name: number for number, name in enumerate(DTYPES)}
_OP = {name: number for number, name in enumerate(OPERATIONS)}


class ProgramMismatch(StrettoError):
    """Ranks ran different things at the same place in the order; the message names both."""


@dataclass(frozen=True, kw_only=True)
class ChannelConfig:
    """One network: UCX transports (``UCX_TLS``) and the devices (``UCX_NET_DEVICES``) that it may use."""

    transports: str = "tcp"
    devices: str = "lo"


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedProgram:
    """A program as loaded by one executor."""

    lowered: Lowered
    ranks: tuple[int, ...]
    me: int
    loaded: _executor.Loaded

    def place_elements(self, count: int) -> int:
        """In place: how many elements the input begins behind the output."""
        return self.loaded.place_elements(count)

    def buffer_elements(self, count: int) -> tuple[int, int]:
        """How many elements this rank's input and output have when the larger buffer of any rank has `count`."""
        try:
            return self.loaded.buffer_elements(count)
        except ValueError as error:
            raise InvalidInput(str(error)) from None


def failure_error(kind: int, why: str) -> StrettoError:
    """The exception for a failure of a work, by its number in C++."""
    return {1: PeerLost, 2: ProgramMismatch, 3: OutOfResources}.get(kind, StrettoError)(why)


class ProgramWork:
    """A program under way on this rank."""

    def __init__(
        self, engine: _executor.Engine, native: _executor.Work, handle: LoadedProgram, keep: object, home: Home
    ) -> None:
        self._engine, self._native, self._keep, self._home = engine, native, keep, home
        self.handle = handle

    @property
    def number(self) -> int:
        """The position of the work in the order of its communicator."""
        return self._native.number

    @property
    def id(self) -> int:
        """The work's number for `Executor.wait_any`: no two works of an executor have the same."""
        return self._native.id

    @property
    def done(self) -> bool:
        """Whether the work has ended, with or without an error; never waits."""
        return self._native.done

    @property
    def error(self) -> StrettoError | None:
        """The error of the work, once it has failed; else None."""
        if not self._native.done or not self._native.failure:
            return None
        return failure_error(self._native.failure, self._native.why)

    @property
    def elapsed_us(self) -> float:
        """From start to end, on this rank."""
        return self._native.elapsed_us

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; False if it has not within `timeout_s`. Raises what it failed with.

        Without `timeout_s` the executor's own timeout ends it.
        """
        self._home.check()
        left = timeout_s if timeout_s is not None else float("inf")
        # In short pieces, so that an interrupt from the keyboard gets through.
        while not self._engine.wait(self._native, min(left, TICK_S)):
            left -= TICK_S
            if left <= 0:
                return False
        self._keep = None
        error = self.error
        if error is not None:
            raise error
        return True

    def trace(self) -> tuple[Any, ...]:
        """(threadblock, step, slice, begin_ns, end_ns) arrays of a traced work."""
        return self._native.trace()


class Executor:
    """One rank's end of a job.

    `exchange` is an all-gather of bytes among the job's ranks, used only while joining. `token` is a secret of the
    job: who does not know it is turned away. `interface` carries control connections between hosts; `channels` name
    the networks for data. Ranks with equal `host` use shared memory (default: those of one network namespace).
    While joining waits for a rank it calls `watch`, which may know that the rank will not come, and raise.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: Exchange,
        *,
        token: bytes,
        channels: Mapping[str, ChannelConfig] | None = None,
        interface: str = "lo",
        host: str | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        timeout_s: float = 300.0,
        join_timeout_s: float = 60.0,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InvalidInput(f"rank: must be 0..{world_size - 1}, not {rank}")
        if len(token) < 8:
            raise InvalidInput(f"token: must be at least 8 random bytes, not {len(token)}")
        native = load_native()
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        least = native.header_bytes + (1 << 16)
        if segment_bytes < least:
            raise InvalidInput(f"segment_bytes: must be at least {least}, not {segment_bytes}")
        self._channels = dict(channels) if channels is not None else {"net": ChannelConfig()}
        self._native = native
        self._running: list[ProgramWork] = []

        def segment() -> int:
            fd = os.memfd_create("stretto", os.MFD_CLOEXEC)
            try:
                native.prepare_segment(fd, segment_bytes)
            except BaseException:
                os.close(fd)
                raise
            return fd

        with _resources(rank):
            joined = join(
                rank, world_size, exchange, token=token, interface=interface, segment=segment,
                host=host if host is not None else host_key(), timeout_s=join_timeout_s, watch=watch,
            )  # fmt: skip
            self.hosts = joined.hosts
            """Per rank a name for its host; equal names share memory."""
            self._engine = self._connect(joined, exchange, token)
        weakref.finalize(self, self._engine.close)
        self._home = Home(f"rank {rank}")
        abandon_in_children(self)

    def _connect(self, joined: JoinedDescriptors, exchange: Exchange, token: bytes) -> _executor.Engine:
        if len(joined.local) > self._native.max_local:
            raise InvalidInput(f"ranks: at most {self._native.max_local} on one host, not {len(joined.local)}")
        engine: _executor.Engine = self._native.Engine({
            "rank": self.rank,
            "world": self.world_size,
            "job": int.from_bytes(hashlib.sha256(token).digest()[:8], "little"),
            "local": joined.local,
            "segments": joined.segments,
            "bells": joined.bells,
            "control": joined.control,
            "timeout_s": self.timeout_s,
        })  # fmt: skip
        self._local = frozenset(joined.local)
        # Every rank must take part in the exchange if any has a peer on another host.
        if len(set(joined.hosts)) > 1:
            if not self._channels:
                raise InvalidInput("channels: ranks are on several hosts, so at least one network is needed")
            for name, channel in self._channels.items():
                try:
                    engine.add_channel(channel.transports, channel.devices)
                except RuntimeError as error:
                    raise InvalidInput(f"channels[{name}]: {error}") from None
            packed = [b"".join(len(a).to_bytes(4, "little") + a for a in engine.addresses())]
            for peer, answer in enumerate(exchange(packed[0])):
                if peer not in self._local:
                    engine.connect(peer, _unpack(answer, peer))
        engine.run()
        return engine

    def load(
        self,
        program: Lowered | Program,
        *,
        ranks: Sequence[int] | None = None,
        communicator: int = 0,
        channels: Sequence[str] | None = None,
        message_bytes: int | None = None,
        first_number: int = 0,
        by_call: bool = False,
        networks: Mapping[tuple[int, int], str] | None = None,
    ) -> LoadedProgram:
        """Verify a program and make it ready to run here.

        `ranks` are the ranks of the job that take part (default: all), `communicator` is a number that they agree on:
        works of one communicator are numbered, and every rank must start them in the same order. ``channels[i]`` is the
        network for channel i of the program (default: in turn over all networks), and ``networks[a, b]`` the one for
        messages from rank a to rank b of the program, whatever their channel: where a dimension of ranks has a network
        of its own. Messages are cut into slices of about `message_bytes`, which flow through the program one behind the
        other.

        Works of a communicator are numbered from `first_number` on, or where they were if that is higher: so other
        ranks than before can use a communicator, and all of them count alike.

        With `by_call` an all-to-all-v that goes straight from rank to rank is run by `start_pieces`, with sizes that
        come with each call: of the sizes that the program was made for it only matters which are zero, since between
        those pairs nothing is ever sent.

        Args:
            program: The program; one that is not lowered yet is lowered here.
            ranks: The ranks of the job that take part. Default: all.
            communicator: The number that they agree on.
            channels: The network for each channel of the program. Default: in turn over all networks.
            message_bytes: About the size of a slice. Default: by the size of the call.
            first_number: The number of the first work.
            by_call: Whether the sizes of the pieces come with each call.
            networks: The network for messages between two ranks, whatever their channel.

        Returns:
            What `start` takes.

        Raises:
            InvalidInput: The program is for another number of ranks, or names a network that there is not.
            VerificationError: The program is wrong.
        """
        lowered = lower(program) if isinstance(program, Program) else program
        lowered.verify()
        if by_call and not sized_by_call(lowered):
            raise InvalidInput(f"by_call: {lowered.name} is no all_to_all_v straight from rank to rank")
        group = tuple(range(self.world_size)) if ranks is None else tuple(int(r) for r in ranks)
        size = lowered.collective.num_ranks
        if len(group) != size or len(set(group)) != size:
            helpers = lowered.collective.helpers
            among = f", {helpers} of them helpers outside its group, which must take part" if helpers else ""
            raise InvalidInput(f"ranks: {lowered.name} is for {size} ranks{among}, not {len(set(group))}")
        if any(not 0 <= r < self.world_size for r in group) or self.rank not in group:
            raise InvalidInput(f"ranks: must be of 0..{self.world_size - 1} with {self.rank} among them, not {group}")
        if not 0 <= communicator < self._native.max_communicators:
            raise InvalidInput(f"communicator: must be 0..{self._native.max_communicators - 1}, not {communicator}")
        names = list(self._channels)
        for name in (*(channels or ()), *(networks or {}).values()):
            if name not in names:
                raise unknown("channel", name, names)
        near = len({self.hosts[r] for r in group}) == 1
        length = message_bytes if message_bytes is not None else (near_bytes(lowered) if near else far_bytes(lowered))
        if not 64 <= length <= 1 << 28:
            raise InvalidInput(f"message_bytes: must be 64..{1 << 28}, not {length}")

        def wire(src: int, dst: int, channel: int) -> int:
            if self.hosts[group[src]] == self.hosts[group[dst]]:
                return SHARED_MEMORY
            if networks is not None and (src, dst) in networks:
                return names.index(networks[src, dst])
            return names.index(channels[channel % len(channels)]) if channels else channel % len(names)

        me = group.index(self.rank)
        loaded = self._native.load(
            tables(
                lowered,
                me=me,
                ranks=group,
                communicator=communicator,
                wire=wire,
                message_bytes=length,
                first_number=first_number,
                by_call=by_call,
            )
        )
        return LoadedProgram(lowered=lowered, ranks=group, me=me, loaded=loaded)

    def start(
        self,
        handle: LoadedProgram,
        input: int,
        output: int,
        count: int,
        dtype: str = "float32",
        op: str = "sum",
        *,
        timeout_s: float = 0.0,
        trace: bool = False,
        blocking: bool = False,
        notify: bool = False,
        keep: object = None,
    ) -> ProgramWork:
        """Begin to run a program on memory at the addresses `input` and `output`; returns at once.

        `count` is the number of elements of the larger of one rank's two buffers. For a program that works in place
        both addresses must name the memory as its collective lays it out. `keep` is held until the work is waited for:
        pass what owns the memory. With `blocking` the caller
        promises to wait at once: nothing is done before that, and nobody is woken for it. With `notify` its end is
        reported by `wait_any`.

        Args:
            handle: What `load` returned.
            input: The address of the input.
            output: The address of the output.
            count: Elements of the larger of the rank's two buffers.
            dtype: The element type.
            op: The reduction.
            timeout_s: After which the work fails. 0: the executor's own limit.
            trace: Whether to note when every message began and ended.
            blocking: Whether the caller waits at once.
            notify: Whether `wait_any` reports the end.
            keep: What owns the memory; it is held until the work is waited for.

        Returns:
            The work.

        Raises:
            PeerLost: A rank is gone.
            InvalidInput: The program does not take so many elements, this type or this reduction.
            StrettoError: The executor was closed, or has failed before.
        """
        self._home.check()
        arguments = self._checked(handle, input, output, count, dtype, op)
        try:
            native = self._engine.start(handle.loaded, *arguments, timeout_s, trace, blocking, notify)
        except ValueError as error:
            raise InvalidInput(str(error)) from None
        except RuntimeError as error:
            raise StrettoError(str(error)) from None
        return self._begun(native, handle, keep)

    def start_pieces(
        self,
        handle: LoadedProgram,
        gives: Sequence[tuple[int, int]],
        takes: Sequence[tuple[int, int]],
        *,
        timeout_s: float = 0.0,
        blocking: bool = False,
        notify: bool = False,
        keep: object = None,
    ) -> ProgramWork:
        """Begin to run an all-to-all whose pieces have the sizes given here; returns at once.

        Both ends of a pair must give the same size: `ProgramMismatch` names two that do not. Pieces must not overlap.

        Args:
            handle: An all-to-all-v that was loaded with `by_call`.
            gives: (address, bytes) of what goes to each rank that the program sends to, this one included, in order.
            takes: The same of what comes from each rank.
            timeout_s: How long it may take; 0 for the executor's own limit.
            blocking: The caller promises to wait at once.
            notify: Its end is reported by `wait_any`.
            keep: What owns the memory; held until the work is waited for.

        Returns:
            The work under way.

        Raises:
            InvalidInput: The pieces are not those of the program.
            StrettoError: The executor is closed.
        """
        self._home.check()
        try:
            native = self._engine.start_pieces(
                handle.loaded, list(gives), list(takes), timeout_s, False, blocking, notify
            )
        except ValueError as error:
            raise InvalidInput(str(error)) from None
        except RuntimeError as error:
            raise StrettoError(str(error)) from None
        return self._begun(native, handle, keep)

    def _begun(self, native: _executor.Work, handle: LoadedProgram, keep: object) -> ProgramWork:
        work = ProgramWork(self._engine, native, handle, keep, self._home)
        if keep is not None:
            self._running = [w for w in self._running if not w.done]
            self._running.append(work)
        return work

    def wait_any(self, timeout_s: float) -> list[int]:
        """The `Work.id` of works started with ``notify=True`` that have ended, well or not, since the last call.

        Waits, without the interpreter's lock, until there is one, the executor is closed or the time is up. Each end is
        reported once, to one caller.
        """
        self._home.check()
        return self._engine.wait_any(timeout_s)

    def repeat(
        self,
        handle: LoadedProgram,
        input: int,
        output: int,
        count: int,
        dtype: str = "float32",
        op: str = "sum",
        *,
        times: int,
        fence: LoadedProgram | None = None,
    ) -> list[float]:
        """Run a program several times without Python between; the microseconds of each.

        With a `fence` (an all-reduce of the same ranks) every run begins when all ranks have come to it.

        Args:
            handle: What `load` returned.
            input: The address of the input.
            output: The address of the output.
            count: Elements of the larger of the rank's two buffers.
            dtype: The element type.
            op: The reduction.
            times: How often.
            fence: An all-reduce of the same ranks that stands before each run.

        Returns:
            Microseconds, one for each run.
        """
        self._home.check()
        arguments = self._checked(handle, input, output, count, dtype, op)
        return self._engine.repeat(handle.loaded, *arguments, times, fence.loaded if fence else None)

    def carrier(self, released: int, copied: int, board: int, me: int, size: int) -> _executor.Carrier:
        """A thread that runs programs on slices which a GPU has copied to the host's memory, without Python and CUDA.

        Args:
            released: The address of a word of 32 bits: up to which slice the GPU may go on.
            copied: The address of another: up to which one it has copied.
            board: The address of a word of 64 bits for each rank of the host: with how many slices it is through.
            me: This rank among them.
            size: How many they are.

        Returns:
            The thread; it must be closed before the executor is.
        """
        self._home.check()
        made: _executor.Carrier = self._native.Carrier(self._engine, released, copied, board, me, size)
        return made

    def arguments(
        self, handle: LoadedProgram, input: int, output: int, count: int, dtype: str, op: str
    ) -> tuple[_executor.Loaded, int, int, int, int, int]:
        """The arguments of a program as C++ takes them, checked as `start` does.

        Args:
            handle: What `load` returned.
            input: The address of the input.
            output: The address of the output.
            count: Elements of the larger of the rank's two buffers.
            dtype: The element type.
            op: The reduction.

        Returns:
            The native program, both addresses, and numbers for the rest.
        """
        return handle.loaded, *self._checked(handle, input, output, count, dtype, op)

    def _checked(
        self, handle: LoadedProgram, input: int, output: int, count: int, dtype: str, op: str
    ) -> tuple[int, int, int, int, int]:
        if dtype not in _TYPE:
            raise unknown("dtype", dtype, _TYPE)
        if op not in _OP:
            raise unknown("op", op, _OP)
        if count < 0:
            raise InvalidInput(f"count: must be >= 0, not {count}")
        c = handle.lowered.collective
        if c.combining:
            if op == "avg" and (dtype not in FLOATS or handle.loaded.parts == 0):
                raise InvalidInput(f"op: avg needs one of {', '.join(FLOATS)} and one number of parts, not {dtype}")
            if op in ("band", "bor", "bxor") and dtype in FLOATS:
                raise InvalidInput(f"op: {op} needs whole numbers, not {dtype}")
        inputs, outputs = handle.buffer_elements(count)
        size = DTYPES[dtype]
        for name, address, elements in (("input", input, inputs), ("output", output, outputs)):
            if elements and not address:
                raise InvalidInput(f"{name}: must be the address of {elements} elements, not 0")
            if elements and address % min(size, 8):
                raise InvalidInput(f"{name}: the address of {dtype} must be a multiple of {size}")
        if inputs and outputs:
            if c.in_place:
                shift = handle.place_elements(count) * size
                if output + shift != input:
                    raise InvalidInput(f"input: in place it must lie {shift} bytes behind output, not {input - output}")
            elif input < output + outputs * size and output < input + inputs * size:
                raise InvalidInput(f"input, output: overlap, but {handle.lowered.name} does not work in place")
        return input, output, count, _TYPE[dtype], _OP[op]

    def retired(self, communicator: int) -> bool:
        """Whether this rank is through with a communicator: nothing is under way or to be taken, nothing failed."""
        self._home.check()
        return self._engine.retired(communicator)

    def renumber(self, communicator: int, first_number: int) -> None:
        """Works of a communicator get numbers from `first_number` on, or from where they were if that is higher.

        So other ranks than before can use it: all of them count alike.
        """
        self._home.check()
        self._engine.renumber(communicator, first_number)

    def count_delegated(self, communicator: int) -> int:
        """The number of a collective that another backend is about to run for the ranks of a communicator."""
        return self._engine.count_delegated(communicator)

    def ask_delegated(self, communicator: int, number: int, ranks: Sequence[int], timeout_s: float) -> dict[int, bool]:
        """Ask ranks whether they have come to a collective that another backend runs.

        Args:
            communicator: The communicator of the ranks that run it.
            number: What `count_delegated` gave for it, the same on all of these ranks.
            ranks: Whom to ask.
            timeout_s: How long to wait for answers.

        Returns:
            Their answers; a rank that is missing here has not answered.
        """
        self._home.check()
        return self._engine.ask_delegated(communicator, number, list(ranks), timeout_s)

    def find_culprit(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """The rank to name, and why, where something fails among these ranks; None where all of them are there.

        It is one that has ended without a word; else the one because of which another has given up; else one that has
        closed its executor.
        """
        self._home.check()
        return self._engine.find_culprit(list(ranks))

    def blame(self, lost: int, why: str) -> None:
        """Tell all ranks that this one gives up because `lost` is gone: so they name that one when this one leaves."""
        self._home.check()
        self._engine.blame(lost, why)

    @property
    def channels(self) -> tuple[str, ...]:
        """The networks between hosts that it may use."""
        return tuple(self._channels)

    def counters(self) -> dict[str, int]:
        """What the engine has done and holds: works started and under way, staging memory, sleeps, wake-ups."""
        self._home.check()
        return self._engine.counters()

    def abandon(self) -> None:
        """In a forked child: close its copies of the descriptors, so that others notice when the rank itself ends."""
        self._engine.abandon()
        keep_forever(self._engine)

    def close(self) -> None:
        """Leave the job. Works that have not ended fail; what was sent still arrives."""
        self._engine.close()
        self._running.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


FAR_BYTES, MOST_FAR_BYTES = 64 << 10, 256 << 10
CACHE_BYTES = 8 << 20


def near_bytes(lowered: Lowered) -> int:
    """Inside a host messages should stay in the cache between their two ends: what all connections can hold at once.

    >>> from stretto.algorithms import algorithm
    >>> [near_bytes(lower(algorithm("direct", "all_reduce", n))) >> 10 for n in (2, 4, 8)]
    [256, 168, 36]
    """
    connections = max(1, int((lowered.tb_send >= 0).sum()))
    return min(max(CACHE_BYTES // (4 * connections) // 4096 * 4096, 32 << 10), 256 << 10)


def far_bytes(lowered: Lowered) -> int:
    """Between hosts a chunk goes in pieces long enough that the network's fixed cost does not show, and short enough
    that the ranks of a host take turns on its uplink.

    >>> from stretto.algorithms import algorithm
    >>> [far_bytes(lower(algorithm(*what, 8))) >> 10 for what in (("pairwise", "all_to_all"), ("ring", "all_reduce"))]
    [64, 64]
    """
    return min(FAR_BYTES * lowered.max_chunks, MOST_FAR_BYTES)


def load_native() -> Any:
    """The C++ module, with UCX loaded before it; one clear line if either is missing."""
    # UCX would otherwise install handlers for signals that belong to the application.
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    with contextlib.suppress(ImportError):
        importlib.import_module("libucx").load_library()
    try:
        return importlib.import_module("stretto._executor")
    except ImportError as error:
        raise StrettoError(
            f"the executor is not available ({error}); pip install libucx-cu12 and, from source, stretto again"
        ) from None


@contextlib.contextmanager
def _resources(rank: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC):
            raise OutOfResources(f"descriptors or memory: none left on rank {rank}: {error.strerror}") from error
        raise
    except RuntimeError as error:
        raise OutOfResources(f"rank {rank}: {error}") from None


def _unpack(answer: bytes, peer: int) -> list[bytes]:
    found, at = [], 0
    while at < len(answer):
        size = int.from_bytes(answer[at : at + 4], "little")
        if at + 4 + size > len(answer):
            raise InvalidInput(f"exchange: the addresses of rank {peer} are cut short")
        found.append(answer[at + 4 : at + 4 + size])
        at += 4 + size
    return found
