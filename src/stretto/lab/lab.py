# SPDX-License-Identifier: Apache-2.0
"""`Lab`: an emulated network on this machine, and jobs that run on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from .job import LabJob, LabResult, OnLine
from .layout import TCP_CONTROL, LabLayout, lab_rate
from .network import LabNetwork, tool
from .processes import ABOUT, LAB, RATES, new_name

FIRST_PORT = 29500
PORTS = 1000


class Lab:
    """Hosts with shaped uplinks on this machine; they exist inside the ``with`` block.

    A lab is built by one process; `start` and `run` then start one process per rank inside the hosts' namespaces.
    Leaving the block kills every job that still runs and removes the network. Methods that need the network raise
    `InvalidInput` outside of the block.

    Args:
        hosts: number of emulated hosts, 1..32.
        ranks_per_host: ranks on each host, 1..64; at most 256 ranks in all.
        uplinks: channel name to rate, as ``{"rdma": "400mbit", "eth": "200mbit"}``; the rate holds for the uplink of
            every host, or is a list with commas, one rate per host. None: one channel ``eth`` of 1 Gbit/s.
        order: how ranks are dealt to hosts: ``host`` (0..3 on the first host of four) or ``interleaved`` (round robin).
        shaper: the kernel's queueing discipline that limits the rates: ``tbf`` or ``htb``.
        tcp: the congestion control of the hosts: ``reno``, ``cubic``, ``bbr``; ``machine`` leaves the machine's own.

    Raises:
        InvalidInput: an argument is out of range or names an unknown choice.
        Infeasible: on entering the block, if this machine lacks a tool or the right to make network namespaces.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        ranks_per_host: int = 4,
        uplinks: Mapping[str, str] | None = None,
        order: str = "host",
        shaper: str = "tbf",
        tcp: str = TCP_CONTROL,
    ) -> None:
        self.layout = LabLayout.of(
            hosts=hosts, ranks_per_host=ranks_per_host, uplinks=uplinks, order=order, shaper=shaper, tcp=tcp
        )
        self._network: LabNetwork | None = None
        self._jobs: list[LabJob] = []
        self._runs = 0
        self.name = ""

    def __enter__(self) -> Self:
        if self._network is not None:
            raise InvalidInput("lab: is open already")
        self.name = new_name()
        self._network = LabNetwork(self.layout, {LAB: self.name, ABOUT: self.layout.summary})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        network, self._network = self._network, None
        try:
            for job in self._jobs:
                job.kill()
        finally:
            self._jobs.clear()
            if network is not None:
                network.close()

    @property
    def rootless(self) -> bool:
        """Whether the lab lives in a user namespace, in which ranks see themselves as root."""
        return self._open.rootless

    @property
    def host_pids(self) -> tuple[int, ...]:
        """For every host one process in its namespaces; ``nsenter --target=PID --net`` opens the host's network."""
        return self._open.host_pids

    def host_of(self, rank: int) -> int:
        """The host that a rank runs on."""
        return self.layout.host_of(rank)

    def cluster(self) -> Cluster:
        """The lab as a `Cluster` with its configured rates, to compare predictions and probes with."""
        return self.layout.cluster()

    def uplink_bytes(self, channel: str, host: int) -> tuple[int, int]:
        """Bytes that a host has sent and received on a channel so far, headers included."""
        table = Path(f"/proc/{self.host_pids[host]}/net/dev").read_text()
        for line in table.splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == channel:
                numbers = counts.split()
                return int(numbers[8]), int(numbers[0])
        raise unknown("channel", channel, (c.name for c in self.layout.channels))

    def reshape(self, channel: str, host: int, rate: str) -> None:
        """Change the rate of a host's uplink while jobs run: ``lab.reshape("rdma", 1, "50mbit")``.

        `layout` and `cluster` keep describing the lab as it was made.

        Args:
            channel: name of one of the lab's channels.
            host: index of the host, 0..hosts-1.
            rate: the new rate in both directions, 1mbit to 40gbit, such as ``50mbit`` or ``50MB/s``.

        Raises:
            InvalidInput: the channel is unknown, or the host or rate out of range.
            Infeasible: the kernel refused the change.
        """
        found = {one.name: one for one in self.layout.channels}
        if channel not in found:
            raise unknown("channel", channel, found)
        self._check_host(host)
        self._open.reshape(self.layout, found[channel], host, lab_rate(rate))

    def enter(self, host: int) -> list[str]:
        """The beginning of a command line that runs the command after it on a host; for launchers such as mpirun."""
        self._check_host(host)
        return self._open.enter(host)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> LabJob:
        """Start a command once per rank, with the environment variables that torchrun would set; do not wait for it.

        Ranks die with the thread that started them.

        Args:
            command: program and arguments, the same for all ranks; ranks differ in ``RANK`` and the other variables.
            env: variables that are set for every rank on top of this process's and the lab's own.
            on_line: called as ``on_line(rank, "stdout" or "stderr", line)`` for each line, from the thread that waits.

        Returns:
            The running job; call `LabJob.wait` to read its output.

        Raises:
            InvalidInput: the command is empty or not executable, or the lab is not open.
        """
        network = self._open
        if not command:
            raise InvalidInput("command: is empty")
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if shutil.which(command[0]) is None:
            raise InvalidInput(f"command: {command[0]!r} is not an executable file or a command")
        # Each run gets another port, so that sockets of an earlier run in TIME_WAIT do not block it.
        port = FIRST_PORT + self._runs % PORTS
        self._runs += 1
        # nsenter changes credentials, and the kernel then drops the parent-death signal: setpriv asks for it again.
        here = [tool("setpriv"), "--pdeathsig=KILL", "--", "env", f"--chdir={Path.cwd()}", "--", *command]
        ranks = range(self.layout.world_size)
        job = LabJob(
            [[*network.enter(self.host_of(rank)), *here] for rank in ranks],
            [
                {
                    **environment,
                    LAB: self.name,
                    RATES: self.layout.rates,
                    **self.layout.environment(rank, port=port),
                    **(env or {}),
                }
                for rank in ranks
            ],
            on_line,
        )
        self._jobs.append(job)
        return job

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        keep_going: bool = False,
        on_line: OnLine | None = None,
    ) -> LabResult:
        """Start a command once per rank and wait until all ranks have ended.

        Args:
            command: program and arguments, the same for all ranks.
            env: variables that are set for every rank on top of this process's and the lab's own.
            timeout_s: seconds after which all ranks are ended; None waits without limit.
            keep_going: whether the other ranks go on when one fails.
            on_line: called as ``on_line(rank, "stdout" or "stderr", line)`` for each line of output.

        Returns:
            Return codes and output of all ranks. A failing rank is no exception: see `LabResult.exit_code`.

        Raises:
            InvalidInput: the command is empty or not executable, or the lab is not open.
        """
        job = self.start(command, env=env, on_line=on_line)
        try:
            return job.wait(timeout_s, keep_going=keep_going)
        finally:
            self._jobs.remove(job)

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.layout.hosts:
            raise InvalidInput(f"host: must be 0..{self.layout.hosts - 1}, not {host}")

    @property
    def _open(self) -> LabNetwork:
        if self._network is None:
            raise InvalidInput("lab: is not open; use 'with Lab(...) as lab'")
        return self._network
