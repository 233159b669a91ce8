"""`Lab`: the network, and jobs on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from .job import Job, OnLine, Result
from .layout import Layout, parse_rate
from .network import Network, tool
from .processes import ABOUT, LAB, new_name

FIRST_PORT = 29500
PORTS = 1000


class Lab:
    """Hosts with shaped uplinks on this machine, between ``with`` and its end.

    `uplinks` maps channels to rates: ``{"rdma": "400mbit", "eth": "200mbit"}``; a rate is that of every host's uplink,
    or one per host with commas. `order` says how ranks are dealt: ``host`` (0..3 on the first) or ``interleaved``.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        ranks_per_host: int = 4,
        uplinks: Mapping[str, str] | None = None,
        order: str = "host",
        shaper: str = "tbf",
    ) -> None:
        self.layout = Layout.of(
            hosts=hosts, ranks_per_host=ranks_per_host, uplinks=uplinks, order=order, shaper=shaper
        )
        self._network: Network | None = None
        self._jobs: list[Job] = []
        self._runs = 0
        self.name = ""

    def __enter__(self) -> Self:
        if self._network is not None:
            raise InvalidInput("lab: is open already")
        self.name = new_name()
        self._network = Network(self.layout, {LAB: self.name, ABOUT: self.layout.summary})
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
        """Whether the lab lives in a user namespace, so that ranks see themselves as root."""
        return self._open.rootless

    @property
    def host_pids(self) -> tuple[int, ...]:
        """For every host a process in its namespaces: ``nsenter --target=PID --net`` looks around there."""
        return self._open.host_pids

    def host_of(self, rank: int) -> int:
        """The host that a rank runs on."""
        return self.layout.host_of(rank)

    def cluster(self) -> Cluster:
        """The truth about this lab, to compare predictions and probes with."""
        return self.layout.cluster()

    def uplink_bytes(self, channel: str, host: int) -> tuple[int, int]:
        """What a host has sent and received on a channel so far, headers included."""
        table = Path(f"/proc/{self.host_pids[host]}/net/dev").read_text()
        for line in table.splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == channel:
                numbers = counts.split()
                return int(numbers[8]), int(numbers[0])
        raise unknown("channel", channel, (c.name for c in self.layout.channels))

    def reshape(self, channel: str, host: int, rate: str) -> None:
        """Give a host's uplink another rate while jobs run: ``lab.reshape("rdma", 1, "50mbit")``.

        `layout` and `cluster` go on saying what the lab was made as.
        """
        found = {one.name: one for one in self.layout.channels}
        if channel not in found:
            raise unknown("channel", channel, found)
        self._check_host(host)
        self._open.reshape(self.layout, found[channel], host, parse_rate(rate))

    def enter(self, host: int) -> list[str]:
        """The beginning of a command line whose rest runs on a host: for launchers of their own, such as mpirun."""
        self._check_host(host)
        return self._open.enter(host)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> Job:
        """Start a command once per rank, with the environment that torchrun would give it; `env` comes on top.

        Ranks die with the thread that started them.
        """
        network = self._open
        if not command:
            raise InvalidInput("command: is empty")
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if shutil.which(command[0]) is None:
            raise InvalidInput(f"command: {command[0]!r} is not an executable file or a command")
        # A port of its own for each run: what an earlier one left in TIME_WAIT is not in the way.
        port = FIRST_PORT + self._runs % PORTS
        self._runs += 1
        # The kernel forgets the signal for a parent's death when rights change, so it is asked for behind the door.
        here = [tool("setpriv"), "--pdeathsig=KILL", "--", "env", f"--chdir={Path.cwd()}", "--", *command]
        ranks = range(self.layout.world_size)
        job = Job(
            [[*network.enter(self.host_of(rank)), *here] for rank in ranks],
            [
                {**environment, LAB: self.name, **self.layout.environment(rank, port=port), **(env or {})}
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
    ) -> Result:
        """`start`, then `Job.wait`."""
        job = self.start(command, env=env, on_line=on_line)
        try:
            return job.wait(timeout_s, keep_going=keep_going)
        finally:
            self._jobs.remove(job)

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.layout.hosts:
            raise InvalidInput(f"host: must be 0..{self.layout.hosts - 1}, not {host}")

    @property
    def _open(self) -> Network:
        if self._network is None:
            raise InvalidInput("lab: is not open; use 'with Lab(...) as lab'")
        return self._network
