# SPDX-License-Identifier: Apache-2.0
"""Job scripts as forks of a process that has imported PyTorch already, which takes two seconds of a processor."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("warm_server.py")


@cache
def server() -> str:
    """The socket of this process's server, which starts with the first job."""
    folder = tempfile.mkdtemp(prefix="stretto-warm-")
    process = subprocess.Popen(
        [sys.executable, str(SERVER), f"{folder}/socket"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip

    def end() -> None:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/socket")
            os.rmdir(folder)

    atexit.register(end)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return f"{folder}/socket"


class Started:
    """A job script that runs in a session of its own; what `subprocess.Popen` has of it."""

    def __init__(self, script: Path, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        asked = {"script": str(script), "arguments": list(arguments), "environment": dict(env), "log": str(log)}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(server())
        self._socket.sendall((json.dumps(asked) + "\n").encode())
        self._said = self._socket.makefile("r")
        self.pid = int(self._said.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises TimeoutError where it takes longer than `timeout` seconds."""
        if self.returncode is None:
            self._socket.settimeout(timeout)
            self.returncode = int(self._said.readline())
            self._said.close()
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None and not select.select([self._socket], [], [], 0)[0]:
            return None
        return self.wait()

    def end(self) -> None:
        """End all that is left of its session, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(60.0)
