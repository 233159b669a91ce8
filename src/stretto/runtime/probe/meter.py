# SPDX-License-Identifier: Apache-2.0
"""What the probe measures with: flows that run at the same time on the ranks of a job, and hops one after another.

All ranks of the job measure together and end with the same figures, so that each can draw the same conclusions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...algorithms import algorithm, defined_for
from ...collectives import Permute
from ...errors import InvalidInput, unknown
from ...programs import Program
from ...programs.lower import lower
from ..executor.executor import Executor, LoadedProgram, ProgramWork

Floats = NDArray[np.float64]

MEMORY = "shm"
"""The channel between ranks of one host."""
COMMUNICATOR = 255
"""Probing has a numbering of its own: the job's groups count theirs from 0 up."""
TIMEOUT_S = 30.0
"""A flow that takes longer ends in `PeerLost`."""
BOUNCE_BYTES = 64
MAX_FLOW_BYTES = 64 << 20
MESSAGE_BYTES = 512 << 10
"""Four of these are under way: a link stays busy while a process waits for a processor."""
ANSWER_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class ProbeFlow:
    """Some bytes from one rank to another, on a channel."""

    src: int
    dst: int
    channel: str
    nbytes: int


class LinkMeter(Protocol):
    """Something that can be measured: a running job, or in tests a simulated network."""

    hosts: tuple[int, ...]
    """The host of every rank, numbered from 0 in order of appearance."""
    channels: tuple[str, ...]
    """The networks between hosts."""

    def flows(self, flows: Sequence[ProbeFlow], times: int) -> Floats:
        """Start all at once, `times` times: microseconds until each flow has arrived, a column per flow.

        A rank sends or receives, not both. Where it has several, each of them counts as arrived when all are.
        """
        ...

    def bounce(self, pairs: Sequence[tuple[int, int]], channel: str, hops: int, times: int) -> Floats:
        """Small messages to and fro, an even number of `hops` one after another, all pairs at once: microseconds.

        Args:
            pairs: The pairs of ranks.
            channel: The network.
            hops: How many messages, an even number.
            times: How often this is repeated.

        Returns:
            One row for each repetition, one column for each pair.
        """
        ...


class JobMeter:
    """Measures the ranks of a running job; every rank makes one and calls the same methods in the same order."""

    def __init__(
        self,
        executor: Executor,
        *,
        channels: Iterable[str] | None = None,
        communicator: int = COMMUNICATOR,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        names = list(dict.fromkeys(executor.hosts))
        self.hosts = tuple(names.index(host) for host in executor.hosts)
        known = executor.channels
        wanted = known if channels is None else tuple(dict.fromkeys(channels))
        for name in wanted:
            if name not in known:
                raise unknown("channel", name, known)
        self.channels = wanted if len(names) > 1 else ()
        self._executor, self._communicator, self._timeout_s = executor, communicator, timeout_s
        self._size = executor.world_size
        name = "bruck" if "bruck" in defined_for("all_gather", self._size) else "direct"
        self._gather = self._load(algorithm(name, "all_gather", self._size), None)
        self._loaded: dict[object, LoadedProgram] = {}
        self._input = self._output = np.ones(1 << 20, np.uint8)

    def agree(self, mine: Sequence[float] | Floats) -> Floats:
        """What every rank brings, a row each."""
        words = np.ascontiguousarray(mine, np.float64)
        everyone = np.zeros((self._size, len(words)))
        if len(words):
            self._run(self._gather, words, everyone, everyone.size, "float64")
        return everyone

    def flows(self, flows: Sequence[ProbeFlow], times: int) -> Floats:
        """See `LinkMeter.bounce`."""
        sizes = [flow.nbytes for flow in flows]
        if not flows or min(sizes) < 1 or max(sizes) > MAX_FLOW_BYTES:
            raise InvalidInput(f"flows: each needs 1..{MAX_FLOW_BYTES} bytes, not {sizes}")
        senders = {flow.src for flow in flows}
        if not senders.isdisjoint(flow.dst for flow in flows):
            raise InvalidInput("flows: a rank that sends does not receive at the same time")
        channels = list(dict.fromkeys(flow.channel for flow in flows))
        parts = [self._flow_handle(name, [flow for flow in flows if flow.channel == name]) for name in channels]
        # What has arrived is answered, and the sender's own clock tells the time: a receiver that the operating system
        # lets start late would find the bytes waiting, and seem fast.
        answers = [ProbeFlow(src=f.dst, dst=f.src, channel=f.channel, nbytes=ANSWER_BYTES) for f in flows]
        answer, answer_bytes = self._flow_handle(channels[0], answers)
        self._reserve([*parts, (answer, answer_bytes)])
        mine = np.zeros(times)
        for at in range(times):
            self.agree([0.0])
            works, start = [], 0
            begin = time.perf_counter()
            for handle, count in parts:
                works.append(self._start(handle, count, start))
                start += max(handle.buffer_elements(count))
            if self._executor.rank not in senders:
                for work in works:
                    work.wait()
            last = self._start(answer, answer_bytes, start)
            last.wait()
            # The flow's own work is not timed: much can have been sent before the answer was asked for.
            mine[at] = (time.perf_counter() - begin) * 1e6
            for work in works:
                work.wait()
        everyone = self.agree(mine)
        return np.stack([everyone[flow.src] for flow in flows], 1)

    def bounce(self, pairs: Sequence[tuple[int, int]], channel: str, hops: int, times: int) -> Floats:
        """See `LinkMeter.bounce`."""
        key = (tuple(pairs), channel, hops)
        if key not in self._loaded:
            self._loaded[key] = self._load(bouncing(self._size, pairs, hops), channel)
        mine = np.zeros(times)
        for at in range(times):
            self.agree([0.0])
            mine[at] = self._run(self._loaded[key], self._input, self._output, BOUNCE_BYTES, "uint8")
        everyone = self.agree(mine)
        return np.stack([everyone[pair[0]] for pair in pairs], 1)

    def _flow_handle(self, channel: str, flows: Sequence[ProbeFlow]) -> tuple[LoadedProgram, int]:
        """A program, and the number of bytes of the largest buffer that makes its flows as large as asked for."""
        counts = np.zeros((self._size, self._size))
        for flow in flows:
            counts[flow.src, flow.dst] += flow.nbytes
        largest = int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))
        # Flows of the same proportions are the same program.
        shares = counts / largest
        key = (channel, shares.tobytes())
        if key not in self._loaded:
            program = algorithm("direct", "all_to_all_v", self._size, counts=shares.tolist())
            self._loaded[key] = self._load(program, channel)
        return self._loaded[key], largest

    def _start(self, handle: LoadedProgram, count: int, start: int) -> ProgramWork:
        return self._executor.start(
            handle, self._input[start:].ctypes.data, self._output[start:].ctypes.data, count, "uint8",
            timeout_s=self._timeout_s, keep=(self._input, self._output),
        )  # fmt: skip

    def _load(self, program: Program, channel: str | None) -> LoadedProgram:
        if channel is None or channel == MEMORY:
            return self._executor.load(lower(program), communicator=self._communicator)
        return self._executor.load(
            lower(program), communicator=self._communicator, channels=[channel], message_bytes=MESSAGE_BYTES
        )

    def _run(
        self, handle: LoadedProgram, x: NDArray[np.generic], y: NDArray[np.generic], count: int, dtype: str
    ) -> float:
        work = self._executor.start(
            handle, x.ctypes.data, y.ctypes.data, count, dtype, timeout_s=self._timeout_s, keep=(x, y), blocking=True
        )
        work.wait()
        return work.elapsed_us

    def _reserve(self, parts: Sequence[tuple[LoadedProgram, int]]) -> None:
        need = sum(max(handle.buffer_elements(count)) for handle, count in parts)
        if need > len(self._input):
            # Filled, so that no page is touched for the first time while somebody looks at the clock.
            self._input, self._output = np.ones(need, np.uint8), np.ones(need, np.uint8)
        elif self._input is self._output:
            self._output = self._input.copy()


def bouncing(size: int, pairs: Sequence[tuple[int, int]], hops: int) -> Program:
    """A program in which a message goes `hops` times between the ranks of each pair.

    Args:
        size: The number of ranks.
        pairs: The pairs, all at once.
        hops: How often a message goes.

    Returns:
        The program.
    """
    rows = [
        (step, *(pair if step % 2 == 0 else pair[::-1]), at) for step in range(hops) for at, pair in enumerate(pairs)
    ]
    step, src, dst, chunk = np.array(rows).T
    return Program.from_steps(f"bounce {hops}", Permute(size, list(pairs)), src=src, dst=dst, chunk=chunk, step=step)
