# SPDX-License-Identifier: Apache-2.0
"""`Child`: a process with a session of its own, so that a signal reaches it and everything that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

POLL_S = 0.01


class Child(subprocess.Popen[bytes]):
    """A process that is the first of a session. It reads nothing, and what it writes is dropped, unless said otherwise.

    A Ctrl-C of the terminal does not reach it.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        """Start the process.

        Args:
            words: The command and its arguments.
            stdin: Its standard input, as `subprocess.Popen` takes it.
            stdout: Its standard output.
            stderr: Its standard error; None for that of this process.
            environment: All its variables; those of this process when not given.
            folder: The folder that it starts in; that of this process when not given.
            keep: Descriptors of this process that stay open in it.
        """
        super().__init__(
            words, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, cwd=folder, pass_fds=keep,
            start_new_session=True,
        )  # fmt: skip

    def signal_all(self, number: int) -> None:
        """Send a signal to the process and all of its session's group; harmless where none is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill_all(self) -> int:
        """Kill the process and all that it has started; returns its exit code."""
        # Until the process is reaped no other can get its pid, so the signal reaches only the rest of its group.
        self.signal_all(signal.SIGKILL)
        return self.wait()

    def end_all(self, grace_s: float) -> int:
        """Let the process end by itself, then ask it to, each for `grace_s` seconds, then kill; returns its code."""
        if not self.ends_within(grace_s):
            self.signal_all(signal.SIGTERM)
            self.ends_within(grace_s)
        return self.kill_all()

    def ends_within(self, limit_s: float) -> bool:
        """Whether the process has ended, or ends within the limit; it is not reaped."""
        deadline = time.monotonic() + limit_s
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def ask(self, request: bytes, *, limit_s: float) -> bytes | None:
        """Write a request, and wait for all that the process answers; None where it takes longer and is killed."""
        try:
            return self.communicate(request, timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            self.kill_all()
            return None
