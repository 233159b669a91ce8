# SPDX-License-Identifier: Apache-2.0
"""Builds a lab's network: a keeper process per host (and one for the switch) holds the namespaces.

A lab leaves nothing on the machine: no namespace under /run, no interface in the machine's own network, no file.
Namespaces live as long as processes are in them, and every keeper reads from a pipe that only the lab holds open. So
however a lab ends, kill -9 included, the same happens: the pipe closes, the keepers kill the processes left in their
namespaces and exit, and the kernel frees everything. Several labs cannot collide.
"""

from __future__ import annotations

import functools
import os
import selectors
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from ..children import Child
from ..errors import Infeasible
from .layout import MTU, LabChannel, LabLayout
from .processes import ROLE

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
"""The commands that a lab needs, and the packages that contain them."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 20.0
END_S = 10.0

LEAST_BURST_BYTES = 32 * 1024
BURST_S = 1e-3
LEAST_QUEUE_BYTES = 512 * 1024
QUEUE_S = 0.1
"""A shaper's bucket holds 1 ms of its rate (it must outlast a late timer) and its queue 100 ms (it must outlast the
start of many flows at once: a packet lost there costs TCP 200 ms)."""

# Beside its network a host gets a name, shared memory of its own (else ranks of different hosts would find each other
# in it), a /sys that shows its own interfaces (UCX reads them there), and an /etc/hosts with its peers.
HOST = """
set -e
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
mount -t sysfs sysfs /sys
hostname "$1"
printf '%s' "$2" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
if [ -e /proc/sys/net/ipv6/conf/all/disable_ipv6 ]; then echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; fi
if [ "$3" != machine ] && ! { echo "$3" > /proc/sys/net/ipv4/tcp_congestion_control; } 2> /dev/null; then
  echo "the kernel lets hosts choose $(cat /proc/sys/net/ipv4/tcp_allowed_congestion_control), not TCP $3;" \
    "--tcp machine takes its own"
  exit 1
fi
"""
KEEP = """
echo ready
exec > /dev/null 2>&1
read -r _ || :
round=0
left=1
while [ $left = 1 ] && [ $round -lt 50 ]; do
  left=0
  for process in /proc/[0-9]*; do
    if [ $process/ns/net -ef /proc/$$/ns/net ] && [ $process != /proc/$$ ]; then
      kill -KILL ${process#/proc/}
      left=1
    fi
  done
  round=$((round + 1))
  if [ $left = 1 ]; then sleep 0.02; fi
done
"""


def burst_bytes(bits_per_s: int) -> int:
    """Bytes that a shaper lets through at once after a pause."""
    return max(LEAST_BURST_BYTES, round(bits_per_s / 8 * BURST_S))


def queue_bytes(bits_per_s: int) -> int:
    """Bytes that a shaper queues before it drops packets."""
    return max(LEAST_QUEUE_BYTES, round(bits_per_s / 8 * QUEUE_S))


class LabNetwork:
    """The namespaces of one lab, from construction to `close`."""

    def __init__(self, layout: LabLayout, environment: dict[str, str]) -> None:
        self._rootless = _rootless()
        self._environment = environment
        self._keepers: list[Child] = []
        self._alive_read, self._alive_write = os.pipe()
        try:
            self._build(layout)
        except BaseException:
            self.close()
            raise

    @property
    def rootless(self) -> bool:
        """Whether the lab needed a user namespace, in which ranks see themselves as root."""
        return self._rootless

    @property
    def host_pids(self) -> tuple[int, ...]:
        """The process id of every host's keeper."""
        return tuple(keeper.pid for keeper in self._keepers[1:])

    def enter(self, host: int) -> list[str]:
        """The beginning of a command line that runs the command after it on a host."""
        return [*self._enter(self._keepers[1 + host]), "--mount", "--uts", "--ipc", "--"]

    def reshape(self, layout: LabLayout, channel: LabChannel, host: int, bits_per_s: int) -> None:
        """Change the rate at both ends of a host's uplink while jobs run.

        Args:
            layout: the layout that the network was built from.
            channel: the channel whose uplink changes.
            host: index of the host, 0..hosts-1.
            bits_per_s: the new rate in bits per second, in both directions.

        Raises:
            Infeasible: the kernel refused the change.
        """
        ends = ((self._keepers[1 + host], channel.name), (self._keepers[0], _port(channel, host)))
        for keeper, device in ends:
            self._batch(keeper, "tc", _shape_link(layout.shaper, device, bits_per_s, "change"))

    def close(self) -> None:
        """End every process in the lab and free its network. A second call does nothing."""
        if self._alive_write < 0:
            return
        os.close(self._alive_write)
        os.close(self._alive_read)
        self._alive_write = -1
        for keeper in self._keepers:
            try:
                keeper.wait(END_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()

    def _build(self, layout: LabLayout) -> None:
        user = ["--user", "--map-root-user"] if self._rootless else []
        switch = self._keep("switch", [tool("unshare"), *user, "--net"], KEEP)
        into = [tool("nsenter"), f"--target={switch.pid}", "--user", "--preserve-credentials"] if self._rootless else []
        apart = [*into, tool("unshare"), "--net", "--mount", "--uts", "--ipc"]
        hosts = [
            self._keep(f"h{host}", apart, HOST + KEEP, f"h{host}", layout.names_file(), layout.tcp)
            for host in range(layout.hosts)
        ]
        self._batch(switch, "ip", _switch_links(layout, [host.pid for host in hosts]))
        ports = [(c, at, _port(c, at)) for c in layout.channels for at in range(layout.hosts)]
        self._batch(switch, "tc", _shape(layout, ports))
        for at, host in enumerate(hosts):
            self._batch(host, "ip", _host_links(layout, at))
            self._batch(host, "tc", _shape(layout, ((c, at, c.name) for c in layout.channels)))

    def _keep(self, name: str, prefix: list[str], script: str, *arguments: str) -> Child:
        keeper = Child(
            [*prefix, "/bin/sh", "-c", script, "stretto-lab", *arguments],
            stdin=self._alive_read,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            environment={**self._environment, "PATH": PATH, ROLE: name},
            folder="/",
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        with keeper.stdout as said:
            if (heard := _hear(said.fileno(), b"ready\n")) != b"ready\n":
                raise Infeasible(f"lab: cannot set up {name}: {_first_line(heard) or 'no answer'}")
        return keeper

    def _batch(self, keeper: Child, command: str, lines: Iterable[str]) -> None:
        said = _complaint([*self._enter(keeper), "--", tool(command), "-batch", "-"], "".join(f"{s}\n" for s in lines))
        if said is not None:
            raise Infeasible(f"lab: {command}: {said}")

    def _enter(self, keeper: Child) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._rootless else []
        return [tool("nsenter"), f"--target={keeper.pid}", *user, "--net"]


def unavailable() -> str | None:
    """The reason why no lab can be built on this machine, in one line; None if one can.

    The function builds and closes a lab of one rank to find out.
    """
    try:
        LabNetwork(LabLayout.of(hosts=1, ranks_per_host=1), {}).close()
    except Infeasible as error:
        return str(error)
    return None


def _port(channel: LabChannel, host: int) -> str:
    return f"p{channel.index}h{host}"


def _switch_links(layout: LabLayout, pids: list[int]) -> Iterator[str]:
    for channel in layout.channels:
        bridge = f"br{channel.index}"
        yield f"link add name {bridge} mtu {MTU} type bridge mcast_snooping 0"
        yield f"link set dev {bridge} up"
        for host, pid in enumerate(pids):
            # A packet that the sender's kernel has segmented must fit the bucket; smaller packets pass more evenly.
            size = f"mtu {MTU} gso_max_size {min(65536, burst_bytes(channel.bits_per_s[host]) // 2)}"
            port = _port(channel, host)
            yield f"link add name {port} {size} type veth peer name {channel.name} netns {pid} {size}"
            yield f"link set dev {port} master {bridge} up"


def _host_links(layout: LabLayout, host: int) -> Iterator[str]:
    yield "link set dev lo up"
    for channel in layout.channels:
        yield f"addr add {channel.address(host)}/24 dev {channel.name}"
        yield f"link set dev {channel.name} up"


def _shape(layout: LabLayout, links: Iterable[tuple[LabChannel, int, str]]) -> Iterator[str]:
    """Commands that shape both ends of an uplink: the host's end limits its sends, the switch's end its receives."""
    for channel, host, device in links:
        yield from _shape_link(layout.shaper, device, channel.bits_per_s[host], "add")


def _shape_link(shaper: str, device: str, rate: int, verb: str) -> Iterator[str]:
    burst, queue = burst_bytes(rate), queue_bytes(rate)
    if shaper == "tbf":
        yield f"qdisc {verb} dev {device} root tbf rate {rate}bit burst {burst}b limit {queue}b"
        return
    if verb == "add":
        yield f"qdisc add dev {device} root handle 1: htb default 1"
    speed = f"rate {rate}bit ceil {rate}bit burst {burst}b cburst {burst}b quantum {LEAST_BURST_BYTES}"
    yield f"class {verb} dev {device} parent 1: classid 1:1 htb {speed}"
    if verb == "add":
        yield f"qdisc add dev {device} parent 1:1 bfifo limit {queue}b"


@functools.cache
def tool(name: str) -> str:
    """The full path of one of the commands in `TOOLS`; raises `Infeasible` if it is not installed."""
    found = shutil.which(name, path=PATH)
    if found is None:
        raise Infeasible(f"lab: the command '{name}' is missing; install {TOOLS[name]}")
    return found


def _rootless() -> bool:
    """Whether a user namespace is needed to make namespaces; raises `Infeasible` if that is not allowed either."""
    for name in TOOLS:
        tool(name)
    kinds = ["--net", "--mount", "--uts", "--ipc"]
    if _complaint([tool("unshare"), *kinds, "true"]) is None:
        return False
    if (said := _complaint([tool("unshare"), "--user", "--map-root-user", *kinds, "true"])) is None:
        return True
    raise Infeasible(
        "lab: this machine gives no right to make network namespaces "
        f"(run as root, or allow unprivileged user namespaces): {said}"
    )


def _complaint(command: list[str], given: str = "") -> str | None:
    """Run a command; return the first line of its error output if it fails, else None."""
    environment = {"PATH": PATH}
    try:
        done = subprocess.run(command, input=given.encode(), capture_output=True, env=environment, timeout=START_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {START_S:g} s"
    return None if done.returncode == 0 else _first_line(done.stderr) or f"exit code {done.returncode}"


def _hear(fd: int, until: bytes) -> bytes:
    """Read from a file descriptor up to a word, the end of the stream, or a pause of `START_S` seconds."""
    heard = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not heard.endswith(until) and selector.select(START_S):
            piece = os.read(fd, 4096)
            if not piece:
                break
            heard += piece
    return heard


def _first_line(text: bytes) -> str:
    return next(iter(text.decode(errors="replace").strip().splitlines()), "")
