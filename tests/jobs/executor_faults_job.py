# SPDX-License-Identifier: Apache-2.0
"""Scenarios in which something goes wrong: each rank says which error it got, and how long that took."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
from executor_ranks import TOKEN, Rank, Scenario, main

from stretto.algorithms import algorithm
from stretto.errors import StrettoError
from stretto.programs.lower import lower
from stretto.runtime.executor.executor import Executor, LoadedProgram, ProgramWork

VICTIM = 2


def arrays(handle: LoadedProgram, count: int) -> tuple[Any, Any]:
    """Input and output."""
    inputs, outputs = handle.buffer_elements(count)
    return np.ones(inputs, np.float32), np.zeros(outputs, np.float32)


def go(ex: Executor, handle: LoadedProgram, count: int, **more: Any) -> ProgramWork:
    """Start on fresh arrays."""
    x, y = arrays(handle, count)
    return ex.start(handle, x.ctypes.data, y.ctypes.data, count, keep=(x, y), **more)


def outcome(work: ProgramWork) -> dict[str, Any]:
    """How it ended."""
    begin = time.monotonic()
    try:
        work.wait()
    except StrettoError as error:
        return {"error": type(error).__name__, "text": str(error), "s": time.monotonic() - begin}
    return {"error": None, "text": "", "s": time.monotonic() - begin}


def ring(rank: Rank) -> Any:
    """An all-reduce that every rank takes part in at every step."""
    return lower(algorithm("ring", "all_reduce", rank.world))


def killed(rank: Rank, host: str | None = None) -> Any:
    """The victim is killed while the collective runs; afterwards the communicator is of no use to anybody."""
    ex = rank.executor(timeout_s=200, host=host)
    handle = ex.load(ring(rank), message_bytes=4096)
    outcome(go(ex, handle, 1000))
    if rank.rank == VICTIM:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        said = outcome(go(ex, handle, 300_000))
        if said["error"]:
            break
    next_ = outcome(go(ex, handle, 1000))
    rank.barrier()  # the others still need to hear it from the victim, not from us
    ex.close()
    return [said, next_]


def killed_over_network(rank: Rank) -> Any:
    """The same with every message over UCX."""
    return killed(rank, host=f"{rank.rank}")


def paused(rank: Rank) -> Any:
    """The victim stops for a while: everybody waits, nobody is lost."""
    with rank.executor(timeout_s=30) as ex:
        handle = ex.load(ring(rank), message_bytes=4096)
        outcome(go(ex, handle, 1000))
        pids = [int(b) for b in rank.exchange(str(os.getpid()).encode())]
        if rank.rank == 0:
            os.kill(pids[VICTIM], signal.SIGSTOP)
            threading.Timer(3.0, lambda: os.kill(pids[VICTIM], signal.SIGCONT)).start()
        said = outcome(go(ex, handle, 300_000))
        rank.barrier()
    return said


def missing(rank: Rank, count: int = 1000) -> Any:
    """The victim never starts: the others time out and name it."""
    with rank.executor(timeout_s=30) as ex:
        handle = ex.load(ring(rank))
        said = None
        if rank.rank != VICTIM:
            said = outcome(go(ex, handle, count, timeout_s=0.7))
        rank.barrier()
    return said


def missing_at_a_barrier(rank: Rank) -> Any:
    """The same where nothing is moved."""
    return missing(rank, 0)


def dead_and_not_waited_for(rank: Rank) -> Any:
    """The victim dies; one rank never starts, and the others wait for that one alone."""
    ex = rank.executor(timeout_s=30)
    handle = ex.load(lower(algorithm("direct", "scatter", rank.world)))
    outcome(go(ex, handle, 1000))
    work = go(ex, handle, 1000, timeout_s=8.0) if rank.rank not in (0, VICTIM) else None
    rank.barrier()
    if rank.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    said = outcome(work) if work is not None else None
    rank.barrier()
    ex.close()
    return said


def left_after_a_death(rank: Rank) -> Any:
    """The victim dies, and rank 0 closes its executor without a word of that; the others begin something afterwards."""
    ex = rank.executor(timeout_s=30)
    handle = ex.load(ring(rank))
    outcome(go(ex, handle, 1000))
    rank.barrier()
    if rank.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    while ex.find_culprit([VICTIM]) is None:
        time.sleep(0.01)
    if rank.rank == 0:
        ex.close()
    rank.barrier()
    said = outcome(go(ex, handle, 1000)) if rank.rank else None
    rank.barrier()
    ex.close()
    return said


def ended_before_a_barrier(rank: Rank) -> Any:
    """The victim leaves the job while the others wait for it."""
    with rank.executor(timeout_s=30) as ex:
        handle = ex.load(ring(rank))
        outcome(go(ex, handle, 0))
        if rank.rank == VICTIM:
            time.sleep(0.2)
            ex.close()
        said = outcome(go(ex, handle, 0)) if rank.rank != VICTIM else None
        rank.barrier()
    return said


def differing(rank: Rank, host: str | None = None) -> Any:
    """Sizes, types, operations, collectives and orders that differ on one rank, each in a communicator of its own."""
    said = {}
    odd = rank.rank == VICTIM
    reduce_, gather = ring(rank), lower(algorithm("ring", "all_gather", rank.world))
    tree = lower(algorithm("binary_tree", "all_reduce", rank.world))
    with rank.executor(timeout_s=20, host=host) as ex:

        def load(program: Any, communicator: int) -> LoadedProgram:
            return ex.load(program, communicator=communicator)

        said["size"] = outcome(go(ex, load(reduce_, 1), 1000 + odd))
        said["type"] = outcome(go(ex, load(reduce_, 2), 1000, dtype="int32" if odd else "float32"))
        said["operation"] = outcome(go(ex, load(reduce_, 3), 1000, op="max" if odd else "sum"))
        said["collective"] = outcome(go(ex, load(gather if odd else reduce_, 4), 1200))
        said["algorithm"] = outcome(go(ex, load(tree if odd else reduce_, 5), 1000))
        handles = [load(reduce_, 6), load(gather, 6)]
        works = [go(ex, h, 1200) for h in (reversed(handles) if odd else handles)]
        said["order"], _ = (outcome(w) for w in works)
        said["good"] = outcome(go(ex, load(reduce_, 7), 1000))
        rank.barrier()
    return said


def differing_over_network(rank: Rank) -> Any:
    """The same with every message over UCX."""
    return differing(rank, host=f"{rank.rank}")


def no_descriptors(rank: Rank) -> Any:
    """The victim may not open enough files."""
    if rank.rank == VICTIM:
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))
    try:
        rank.executor(join_timeout_s=3).close()
    except StrettoError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None}


def memory_full(rank: Rank) -> Any:
    """Shared memory ends: at once on the victim, and later for a program that needs more than there is."""
    said = []
    with rank.executor(timeout_s=10, segment_bytes=4 << 20) as ex:
        handle = ex.load(lower(algorithm("direct", "all_to_all", rank.world)), message_bytes=1 << 22)
        said.append(outcome(go(ex, handle, rank.world << 20)))
        rank.barrier()
    if rank.rank == VICTIM:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    try:
        rank.executor(join_timeout_s=2).close()
    except StrettoError as error:
        said.append({"error": type(error).__name__, "text": str(error)})
    return said


def listening_ports() -> list[int]:
    """The TCP ports this process listens on."""
    sockets = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    ports = []
    with open("/proc/self/net/tcp") as table:
        for line in list(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.append(int(fields[1].split(":")[1], 16))
    return ports


def shout(ports: list[int], seed: int) -> int:
    """Garbage for every port: lots, a little, nothing, a half-right greeting."""
    noise = np.random.default_rng(seed).bytes(5000)
    heard = 0
    for port in ports:
        for words in (noise, noise[:3], b"", b"stretto2" + noise[:36], b"GET / HTTP/1.1\r\n\r\n"):
            with socket.socket() as s:
                s.settimeout(1)
                try:
                    s.connect(("127.0.0.1", port))
                    s.sendall(words)
                    heard += 1
                except OSError:
                    continue
    return heard


def garbage(rank: Rank) -> Any:
    """Strangers talk to every port, while the ranks join and while they work."""
    heard = 0

    def exchange(mine: bytes) -> list[bytes]:
        nonlocal heard
        answers = rank.exchange(mine)
        if rank.rank == 0:
            ports = listening_ports()
            heard += shout(ports, 1)
        return answers

    with Executor(rank.rank, rank.world, exchange, token=TOKEN, host=f"{rank.rank}", timeout_s=20) as ex:
        handle = ex.load(ring(rank), message_bytes=4096)
        heard += shout(listening_ports(), 2)
        said = []
        for _ in range(5):
            x, y = arrays(handle, 50_000)
            ex.start(handle, x.ctypes.data, y.ctypes.data, 50_000).wait()
            said.append(bool((y == rank.world).all()))
            heard += shout(listening_ports(), 3)
        rank.barrier()
    return {"good": said, "heard": heard}


def wrong_token(rank: Rank) -> Any:
    """The victim has another secret."""
    token = b"quite another secret" if rank.rank == VICTIM else TOKEN
    try:
        Executor(rank.rank, rank.world, rank.exchange, token=token, join_timeout_s=3).close()
    except StrettoError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None}


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f
    for f in (
        killed, killed_over_network, dead_and_not_waited_for,
        paused, missing, missing_at_a_barrier, ended_before_a_barrier, left_after_a_death, differing,
        differing_over_network, no_descriptors, memory_full,
        garbage, wrong_token,
    )
}  # fmt: skip

if __name__ == "__main__":
    main(SCENARIOS)
