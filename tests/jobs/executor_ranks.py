# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: processes forked from one that has imported everything, joined through pipes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.runtime.executor.executor import Executor

LIMIT_S = 600.0
TOKEN = b"a token for tests only"


def _send(s: socket.socket, words: bytes) -> None:
    s.sendall(struct.pack("<I", len(words)) + words)


def _receive(s: socket.socket) -> bytes:
    def exactly(size: int) -> bytes:
        words = b""
        while len(words) < size:
            more = s.recv(size - len(words))
            if not more:
                raise EOFError
            words += more
        return words

    return exactly(struct.unpack("<I", exactly(4))[0])


class Rank:
    """What a scenario gets: who it is, an all-gather of bytes, and executors."""

    def __init__(self, rank: int, world: int, pipe: socket.socket) -> None:
        self.rank, self.world, self._pipe = rank, world, pipe

    def exchange(self, mine: bytes) -> list[bytes]:
        """All-gather through the parent."""
        _send(self._pipe, b"x" + mine)
        answer: list[bytes] = pickle.loads(_receive(self._pipe))
        return answer

    def barrier(self) -> None:
        """Wait for all."""
        self.exchange(b"")

    def executor(self, **options: Any) -> Executor:
        """A joined executor."""
        return Executor(self.rank, self.world, self.exchange, token=TOKEN, **options)


Scenario = Callable[[Rank], Any]


def run(scenario: Scenario, world: int) -> list[Any]:
    """Run on forked ranks; what each returned, or ``{"died": signal}``, or ``{"raised": text}``."""
    pipes: list[socket.socket] = []
    children = []
    for rank in range(world):
        here, there = socket.socketpair()
        child = os.fork()
        if not child:
            here.close()
            for other in pipes:
                other.close()
            code = 0
            try:
                result = scenario(Rank(rank, world, there))
                _send(there, b"r" + json.dumps(result).encode())
            except BaseException:
                code = 1
                _send(there, b"e" + traceback.format_exc().encode())
            os._exit(code)
        there.close()
        pipes.append(here)
        children.append(child)
    results = _serve(pipes)
    for child in children:
        os.waitpid(child, 0)
    return results


def _serve(pipes: list[socket.socket]) -> list[Any]:
    """Answer exchanges until every rank has said its last word."""
    results: list[Any] = [None] * len(pipes)
    open_ranks = set(range(len(pipes)))
    while open_ranks:
        round_: dict[int, bytes] = {}
        for rank in sorted(open_ranks):
            try:
                words = _receive(pipes[rank])
            except (EOFError, OSError):
                results[rank] = {"died": True}
                open_ranks.discard(rank)
                continue
            if words[:1] == b"x":
                round_[rank] = words[1:]
            else:
                results[rank] = json.loads(words[1:]) if words[:1] == b"r" else {"raised": words[1:].decode()}
                open_ranks.discard(rank)
        answer = pickle.dumps([round_.get(rank, b"") for rank in range(len(pipes))])
        for rank in round_:
            try:
                _send(pipes[rank], answer)
            except OSError:
                results[rank] = {"died": True}
                open_ranks.discard(rank)
    return results


def launch(job: Path, folder: Path, world: int, *scenarios: str) -> dict[str, list[Any]]:
    """Run scenarios of a job script in a process of its own, bounded in time; what every rank returned.

    A rank that raised fails the test with its traceback.
    """
    out, log = folder / "said.json", folder / "log"
    with log.open("wb") as words:
        process = subprocess.Popen(
            [sys.executable, str(job), str(out), str(world), *scenarios],
            stdout=words, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"none after {LIMIT_S:g} s"
        finally:
            # The ranks are in its session: nobody is left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, f"exit code {code}\n{log.read_text()[-4000:]}"
    answers: dict[str, list[Any]] = json.loads(out.read_text())
    for name, ranks in answers.items():
        for rank, answer in enumerate(ranks):
            raised = answer.get("raised") if isinstance(answer, dict) else None
            assert raised is None, f"{name}, rank {rank}:\n{raised}"
    return answers


def open_descriptors() -> int:
    """How many descriptors this process holds."""
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    """Memory of this process that belongs to no file: what others do with what they share does not change it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as rollup:
        rows = dict(line.split()[:2] for line in list(rollup)[1:])
    return int(rows["Anonymous:"])


def main(scenarios: dict[str, Scenario]) -> None:
    """``python job.py OUT WORLD NAME...``: run scenarios one after the other, write what all ranks said as JSON."""
    out, world, *names = sys.argv[1:]
    signal.alarm(2 * int(LIMIT_S))  # nothing here may outlive the test that started it
    said = {}
    for name in names or list(scenarios):
        begin = time.monotonic()
        said[name] = run(scenarios[name], int(world))
        print(f"{name}: {time.monotonic() - begin:.2f} s", flush=True)
    with open(out, "w") as file:
        json.dump(said, file)
