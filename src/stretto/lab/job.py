# SPDX-License-Identifier: Apache-2.0
"""The ranks of one run: started together, their output read, and ended together in bounded time."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from ..children import Child

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL when a job is ended."""
DRAIN_S = 2.0
"""Seconds for which output is still read after the last rank has ended."""
KEPT_BYTES = 4 << 20
"""The number of bytes that are kept of each stream of a rank, counted from its end."""
LONGEST_LINE = 64 << 10
TIMED_OUT = 124

TAIL_CHARACTERS = 3000
"""The characters at the end of a failed rank's output that are repeated in the error."""
OnLine = Callable[[int, str, str], None]
"""Called with a rank, ``stdout`` or ``stderr``, and a line."""


def ending(code: int) -> str:
    """How a process ended, by its return code.

    >>> ending(3), ending(-9)
    ('with exit code 3', 'by signal 9 (SIGKILL: a kernel that is short of memory does that, too)')
    """
    if code >= 0:
        return f"with exit code {code}"
    name = next((one.name for one in signal.Signals if one == -code), "")
    name += ": a kernel that is short of memory does that, too" * (code == -signal.SIGKILL)
    return f"by signal {-code}" + (f" ({name})" if name else "")


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """How a run ended. `outputs` and `errors` hold the last 4 MiB that each rank wrote to stdout and stderr.

    Return codes are those of `subprocess`: a negative code is the signal that killed the rank. `failed` is the rank
    that failed first by itself; ranks that the lab ended because of that failure or of the timeout do not count.
    """

    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]
    errors: tuple[str, ...]
    failed: int | None
    timed_out: bool

    @property
    def exit_code(self) -> int:
        """0, the code of the rank that failed first (128 + n for signal n), or 124 when time was up."""
        if self.failed is not None:
            code = self.returncodes[self.failed]
            return code if code > 0 else 128 - code
        return TIMED_OUT if self.timed_out else 0

    @property
    def why(self) -> str:
        """Which rank failed first and how it ended, with the last of what it wrote; empty where all went well.

        A rank that was killed has written nothing of that: its signal is all there is to be said.
        """
        said = "time was up" if self.timed_out else ""
        if self.failed is not None:
            code = self.returncodes[self.failed]
            wrote = self.errors[self.failed].strip() or self.outputs[self.failed].strip() or "it wrote nothing"
            said = f"rank {self.failed} ended {ending(code)}{'; ' * bool(said)}{said}: {wrote[-TAIL_CHARACTERS:]}"
        return said


class LabJob:
    """The running ranks of one run, started in rank order by the constructor.

    `wait` reads their output. Until `wait` is called, a rank that writes more than a pipe holds is blocked. Call
    `wait`, `end` or `kill` from one thread only.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        on_line: OnLine | None = None,
    ) -> None:
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._running: set[int] = set()
        self._failed: int | None = None
        self._timed_out = False
        self._ending = False
        self._closed = False
        try:
            for command, environment in zip(commands, environments, strict=True):
                self._start(command, environment)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of every rank; each process leads a process group of its own."""
        return tuple(rank.process.pid for rank in self._ranks)

    @property
    def running(self) -> frozenset[int]:
        """The ranks that have not ended, as far as `wait` has seen."""
        return frozenset(self._running)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank and its children: pause it, continue it, kill it."""
        if rank in self._running:
            self._ranks[rank].process.signal_all(number)

    def wait(self, timeout_s: float | None = None, *, keep_going: bool = False) -> LabResult:
        """Wait until all ranks have ended.

        A failing rank, the timeout or an exception such as Ctrl-C ends the ranks that still run. With `keep_going` a
        failing rank does not end the others. `timeout_s` is in seconds; None waits without limit.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self._running and not (self._failed is not None and not keep_going):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._timed_out = True
                    break
                self._turn(left)
            self.end()
        except BaseException:
            self.end()
            raise
        return LabResult(
            returncodes=tuple(rank.process.returncode for rank in self._ranks),
            outputs=tuple(rank.streams["stdout"].text for rank in self._ranks),
            errors=tuple(rank.streams["stderr"].text for rank in self._ranks),
            failed=self._failed,
            timed_out=self._timed_out,
        )

    def end(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM to all ranks, SIGKILL to those that run after `grace_s` seconds, then read the rest of the
        output.
        """
        self._ending = True
        try:
            for at in self._running:
                # A paused rank handles SIGTERM only once SIGCONT lets it run.
                self._ranks[at].process.signal_all(signal.SIGTERM)
                self._ranks[at].process.signal_all(signal.SIGCONT)
            until = time.monotonic() + grace_s
            while self._running and (left := until - time.monotonic()) > 0:
                self._turn(left)
        finally:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to every running rank and close all pipes. A second call does nothing."""
        if self._closed:
            return
        self._closed = self._ending = True
        for at in self._running:
            self._ranks[at].process.signal_all(signal.SIGKILL)
        until = time.monotonic() + DRAIN_S
        try:
            while self._selector.get_map() and (left := until - time.monotonic()) > 0:
                self._turn(left)
        finally:
            for at, rank in enumerate(self._ranks):
                if at in self._running:
                    self._ended(at)
                for stream in rank.streams.values():
                    self._forget(stream)
            self._selector.close()

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        at = len(self._ranks)
        process = Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, environment=environment)
        assert process.stdout is not None
        assert process.stderr is not None
        streams = {"stdout": _Stream(process.stdout), "stderr": _Stream(process.stderr)}
        rank = _Rank(process=process, pidfd=os.pidfd_open(process.pid), streams=streams)
        self._ranks.append(rank)
        self._running.add(at)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, (at, None))
        for name, stream in streams.items():
            self._selector.register(stream.pipe, selectors.EVENT_READ, (at, name))

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            at, name = key.data
            if name is None:
                self._ended(at)
            else:
                self._heard(at, name)

    def _ended(self, at: int) -> None:
        rank = self._ranks[at]
        # Until the rank is reaped, no other process can get its pid: the kill reaches only children that it left.
        rank.process.signal_all(signal.SIGKILL)
        code = rank.process.wait()
        if code and self._failed is None and not self._ending:
            self._failed = at
        self._running.discard(at)
        # The pidfd is unregistered last: if an exception interrupts the lines above, the selector reports it again.
        self._selector.unregister(rank.pidfd)
        os.close(rank.pidfd)

    def _heard(self, at: int, name: str) -> None:
        stream = self._ranks[at].streams[name]
        piece = os.read(stream.pipe.fileno(), 1 << 16)
        lines = stream.add(piece)
        if self._on_line is not None:
            try:
                for line in lines:
                    self._on_line(at, name, line)
            except Exception:
                # The listener may be gone for good (a closed pipe): later lines are no longer passed to it.
                self._on_line = None
                raise
        if not piece:
            self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        if not stream.pipe.closed:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()


@dataclass
class _Rank:
    process: Child
    pidfd: int
    streams: dict[str, _Stream]


class _Stream:
    """One pipe of a rank: the bytes kept of its end, and the line that is not complete yet."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self._kept = bytearray()
        self._line = b""

    def add(self, piece: bytes) -> list[str]:
        self._kept += piece
        if len(self._kept) > 2 * KEPT_BYTES:
            del self._kept[:-KEPT_BYTES]
        *lines, self._line = (self._line + piece).split(b"\n")
        if self._line and (not piece or len(self._line) > LONGEST_LINE):
            lines.append(self._line)
            self._line = b""
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    @property
    def text(self) -> str:
        return self._kept[-KEPT_BYTES:].decode(errors="replace")
