# SPDX-License-Identifier: Apache-2.0
"""The layout of a lab: hosts, ranks, channels and their rates. This module holds plain data and builds nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster import Cluster
from ..cluster.wiring import Wiring
from ..errors import InvalidInput, unknown
from ..units import counted, parse_rate

ORDERS = ("host", "interleaved")
SHAPERS = ("tbf", "htb")
DEFAULT_UPLINKS = {"eth": "1gbit"}
TCP_CONTROL, MACHINE = "reno", "machine"
"""The congestion control that hosts have unless another is asked for, and the word for the machine's own. Reno is in
every kernel, and keeps a shaped link busy; BBR leaves links idle that one connection has left (docs/lab.md)."""
MAX_HOSTS = 32
MAX_RANKS_PER_HOST = 64
MAX_RANKS = 256
MAX_CHANNELS = 8
MIN_BITS_PER_S, MAX_BITS_PER_S = 10**6, 40 * 10**9

MTU = 9000
"""Jumbo frames: headers then take 0.7 % of the shaped rate (4.4 % with 1500)."""

ETHERNET, IP, TCP = 14, 20, 32
"""Headers of a frame in bytes; TCP's with the time stamps that Linux sends."""

SHM_GB_PER_S, SHM_ALPHA_US = 5.0, 2.0
TCP_ALPHA_US = 10.0
"""Assumed by `LabLayout.cluster`: rate and latency between ranks of one host (shared memory), and the latency of one
TCP message between hosts, which is half of the shortest round trip that benchmarks/lab.py found."""


def lab_rate(text: str) -> int:
    """Bits per second of a rate that a lab can shape, as `stretto.units.parse_rate` reads it.

    >>> lab_rate("400mbit"), lab_rate("1.5gbit"), lab_rate("50MB/s")
    (400000000, 1500000000, 400000000)
    """
    rate = round(parse_rate(text))
    if not MIN_BITS_PER_S <= rate <= MAX_BITS_PER_S:
        raise InvalidInput(f"rate {text!r}: must be 1mbit to 40gbit")
    return rate


def format_rate(bits_per_s: int) -> str:
    """A rate in the form that `lab_rate` reads.

    >>> format_rate(400_000_000), format_rate(1_500_000_000)
    ('400mbit', '1.5gbit')
    """
    unit, name = (10**9, "gbit") if bits_per_s >= 10**9 else (10**6, "mbit")
    return f"{bits_per_s / unit:.12g}{name}"


def wire_bytes(payload: float) -> float:
    """Bytes that a TCP payload takes on a shaped link, headers included, if all frames are full.

    >>> round(wire_bytes(1e6))
    1007376
    """
    return payload * (MTU + ETHERNET) / (MTU - IP - TCP)


@dataclass(frozen=True, kw_only=True)
class LabChannel:
    """One network that joins all hosts; `bits_per_s[host]` is the rate of that host's uplink in each direction.

    Inside every host the network interface has the channel's name.
    """

    name: str
    index: int
    bits_per_s: tuple[int, ...]

    def address(self, host: int) -> str:
        """The IPv4 address of a host on this channel."""
        return f"10.201.{self.index}.{host + 1}"


@dataclass(frozen=True, kw_only=True)
class LabLayout:
    """The assignment of ranks to hosts, and the channels that join the hosts.

    >>> layout = LabLayout.of(hosts=2, ranks_per_host=2, uplinks={"eth": "200mbit"}, order="interleaved")
    >>> layout
    <Layout 2 hosts x 2 ranks, interleaved, eth=200mbit (tbf)>
    >>> [layout.host_of(rank) for rank in range(4)]
    [0, 1, 0, 1]
    """

    hosts: int
    ranks_per_host: int
    order: str
    shaper: str
    channels: tuple[LabChannel, ...]
    tcp: str = TCP_CONTROL

    @classmethod
    def of(
        cls,
        *,
        hosts: int,
        ranks_per_host: int,
        uplinks: Mapping[str, str] | None = None,
        order: str = "host",
        shaper: str = "tbf",
        tcp: str = TCP_CONTROL,
    ) -> LabLayout:
        """A checked layout.

        Args:
            hosts: number of hosts, 1..32.
            ranks_per_host: ranks on each host, 1..64; at most 256 ranks in all.
            uplinks: channel name to one rate for all hosts, or to one rate per host with commas; up to 8 channels.
                None: one channel ``eth`` of 1 Gbit/s.
            order: one of `ORDERS`: ``host`` fills host after host, ``interleaved`` deals ranks round robin.
            shaper: one of `SHAPERS`.
            tcp: the congestion control of the hosts, such as ``reno``; ``machine`` leaves the machine's own.

        Returns:
            The layout, with every rate in bits per second.

        Raises:
            InvalidInput: a number is out of range, or a name unknown.
        """
        for what, value, most in (("hosts", hosts, MAX_HOSTS), ("ranks", ranks_per_host, MAX_RANKS_PER_HOST)):
            if not 1 <= value <= most:
                raise InvalidInput(f"{what}: must be 1..{most}{' per host' * (what == 'ranks')}, not {value}")
        if hosts * ranks_per_host > MAX_RANKS:
            raise InvalidInput(f"ranks: {hosts} hosts x {ranks_per_host} are more than {MAX_RANKS} ranks in all")
        for what, name, choices in (("order", order, ORDERS), ("shaper", shaper, SHAPERS)):
            if name not in choices:
                raise InvalidInput(f"{what}: {unknown(what, name, choices)}")
        if not re.fullmatch("[a-z][a-z0-9_]{0,14}", tcp):
            raise InvalidInput(f"tcp: {tcp!r} is no name of a congestion control, such as reno, cubic, bbr or machine")
        wanted = dict(uplinks or DEFAULT_UPLINKS)
        if len(wanted) > MAX_CHANNELS:
            raise InvalidInput(f"uplink: at most {MAX_CHANNELS} channels, not {len(wanted)}")
        channels = (_channel(name, at, rates, hosts) for at, (name, rates) in enumerate(wanted.items()))
        return cls(
            hosts=hosts, ranks_per_host=ranks_per_host, order=order, shaper=shaper, channels=tuple(channels),
            tcp=tcp,
        )  # fmt: skip

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """The host that a rank runs on."""
        if not 0 <= rank < self.world_size:
            raise InvalidInput(f"rank: must be 0..{self.world_size - 1}, not {rank}")
        return rank // self.ranks_per_host if self.order == "host" else rank % self.hosts

    def local_rank(self, rank: int) -> int:
        """The number of a rank among the ranks of its host."""
        return rank % self.ranks_per_host if self.order == "host" else rank // self.hosts

    def environment(self, rank: int, *, port: int) -> dict[str, str]:
        """The environment variables of a rank: those that torchrun would set, and those that the lab adds.

        gloo and the rendezvous use the first channel.
        """
        host, first = self.host_of(rank), self.channels[0]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank(rank)),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "MASTER_ADDR": first.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": first.name,
            "STRETTO_LAB_HOST": str(host),
            "STRETTO_CHANNELS": ";".join(f"{c.name}={c.name},{c.address(host)}" for c in self.channels),
        }

    def names_file(self) -> str:
        """The content of every host's /etc/hosts: ``h1`` is an address on the first channel, ``h1.eth`` on the channel
        eth.

        Every host also has an IPv6-mapped entry, because sockets for both families (torch's store) look peers up that
        way.
        """
        lines = ["127.0.0.1 localhost"]
        for channel in self.channels:
            for host in range(self.hosts):
                alias = f" h{host}" if channel.index == 0 else ""
                lines.append(f"{channel.address(host)} h{host}.{channel.name}{alias}")
                lines.append(f"::ffff:{channel.address(host)} h{host}.{channel.name}.v6")
        return "\n".join(lines) + "\n"

    def cluster(self) -> Cluster:
        """This lab as a `Cluster`: device r is rank r; the uplinks carry their shaped rates.

        Rates inside a host and all latencies are assumed, because nothing in a lab shapes them.
        """
        place = [self.host_of(rank) for rank in range(self.world_size)]
        wiring = Wiring([f"h{host}.rank{rank}" for rank, host in enumerate(place)], hosts=place)
        names = [f"h{host}" for host in range(self.hosts)]
        memory = wiring.add([f"{name}.shm" for name in names], kind="switch", hosts=range(self.hosts))
        wiring.duplex(
            wiring.devices, memory[place], gb_per_s=SHM_GB_PER_S, alpha_us=SHM_ALPHA_US, back_us=0.0, channel="shm"
        )
        for channel in self.channels if self.hosts > 1 else ():
            nics = wiring.add([f"{name}.{channel.name}" for name in names], kind="nic", hosts=range(self.hosts))
            switch = wiring.add([channel.name], kind="switch")
            wiring.duplex(wiring.devices, nics[place], gb_per_s=SHM_GB_PER_S, alpha_us=0.0, channel=channel.name)
            rates = [bits / 8e9 for bits in channel.bits_per_s]
            wiring.duplex(nics, switch, gb_per_s=rates, alpha_us=TCP_ALPHA_US, back_us=0.0, channel=channel.name)
        notes = (
            f"the lab's own layout: {self.summary}; uplinks carry their shaped rates, headers included",
            f"assumed: {SHM_GB_PER_S:g} GB/s, {SHM_ALPHA_US:g} us inside a host; {TCP_ALPHA_US:g} us between hosts",
        )
        return wiring.cluster(f"lab-{self.hosts}x{self.ranks_per_host}", notes=notes)

    @property
    def summary(self) -> str:
        """Hosts, ranks, order, rates and shaper in one line of text."""
        order = "host order" if self.order == "host" else self.order
        own = "the machine's TCP" if self.tcp == MACHINE else f"TCP {self.tcp}"
        how = self.shaper if self.tcp == TCP_CONTROL else f"{self.shaper}, {own}"
        ranks = counted(self.ranks_per_host, "rank")
        return f"{counted(self.hosts, 'host')} x {ranks}, {order}, {self.rates} ({how})"

    @property
    def rates(self) -> str:
        """Every channel and its rate, such as ``rdma=400mbit eth=200mbit``."""
        return " ".join(f"{c.name}={','.join(map(format_rate, _short(c.bits_per_s)))}" for c in self.channels)

    def __repr__(self) -> str:
        return f"<Layout {self.summary}>"


def _short(rates: tuple[int, ...]) -> tuple[int, ...]:
    return rates[:1] if len(set(rates)) == 1 else rates


def _channel(name: str, index: int, text: str, hosts: int) -> LabChannel:
    if not re.fullmatch("[a-z][a-z0-9_]{0,11}", name) or name in ("lo", "shm"):
        raise InvalidInput(f"uplink {name!r}: a channel's name has up to 12 of a-z, 0-9 and _, and is not lo or shm")
    try:
        rates = tuple(lab_rate(part) for part in text.split(",", MAX_HOSTS))
    except InvalidInput as error:
        raise InvalidInput(f"uplink {name}: {error}") from None
    if len(rates) not in (1, hosts):
        raise InvalidInput(f"uplink {name}: has {len(rates)} rates; give one for all hosts, or one for each of {hosts}")
    return LabChannel(name=name, index=index, bits_per_s=rates * hosts if len(rates) == 1 else rates)
