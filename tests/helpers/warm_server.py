# SPDX-License-Identifier: Apache-2.0
"""``warm_server.py SOCKET``: a process that has imported PyTorch and ours, and forks the jobs of tests from itself.

A request is one line of JSON (script, arguments, environment, log); the answers are the child's process id and, when it
has ended, its exit code, negative for a signal. It has no threads, which is what makes forking safe, and ends with the
process that started it.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from typing import Any

import torch._dynamo  # what optimizers need
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import stretto.torch  # noqa: F401

EVERY_S = 0.02


def run(asked: dict[str, Any]) -> int:
    """What the child does: the script, as if this process had been started with it."""
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(asked["environment"])
    script = asked["script"]
    sys.argv = [script, *asked["arguments"]]
    sys.path[:0] = [os.path.dirname(script), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(listening: socket.socket, parent: int) -> None:
    """Fork a child for each request, tell whoever asked how it ended."""
    waiting: dict[int, socket.socket] = {}
    while os.getppid() == parent:
        if select.select([listening], [], [], EVERY_S if waiting else 1.0)[0]:
            asking, _ = listening.accept()
            line = asking.makefile("r").readline()
            child = os.fork()
            if not child:
                code = 1
                try:
                    listening.close()
                    for other in (asking, *waiting.values()):
                        other.close()
                    code = run(json.loads(line))
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            asking.sendall(f"{child}\n".encode())
            waiting[child] = asking
        for child in list(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                asked = waiting.pop(child)
                asked.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                asked.close()


def main() -> None:
    """Listen, then say so on standard output."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        print("ready", flush=True)
        serve(listening, os.getppid())


if __name__ == "__main__":
    main()
