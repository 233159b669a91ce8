# SPDX-License-Identifier: Apache-2.0
"""What the probe finds inside hosts that are drawn, from copies whose times a model of its own gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from stretto.cluster.numbering import numbering
from stretto.errors import InvalidInput
from stretto.runtime.probe.host_copies import TorchHostMeter
from stretto.runtime.probe.inside import HostCopy, find_inside

Floats = NDArray[np.float64]
Link = tuple[str, str]


class DrawnHost:
    """A PCIe tree, links of their own between GPUs, and copies that share links max-min fairly, with noise."""

    def __init__(self, seed: int, *, noise: float) -> None:
        self.rng = np.random.default_rng(seed)
        rng, self.noise = self.rng, noise
        self.sockets = int(rng.integers(1, 3))
        self.gpus = int(rng.choice([2, 4, 8]))
        self.nics = tuple(f"nic{at}" for at in range(int(rng.integers(0, 4))))
        self.rate: dict[Link, float] = {}
        pcie = float(rng.choice([13.0, 26.0, 52.0]))
        switches = int(rng.integers(1, 5))
        above = [int(rng.integers(self.sockets)) for _ in range(switches)]
        for at, socket in enumerate(above):
            self._join(f"switch{at}", f"cpu{socket}", pcie)
        self.switch: dict[str, int] = {}
        self.socket: dict[str, int] = {}
        for end in [*(f"gpu{at}" for at in range(self.gpus)), *self.nics]:
            at = int(rng.integers(-1, switches))  # -1: at a socket by itself
            self.switch[end] = at
            self.socket[end] = above[at] if at >= 0 else int(rng.integers(self.sockets))
            self._join(end, f"switch{at}" if at >= 0 else f"cpu{self.socket[end]}", pcie if "gpu" in end else pcie / 2)
        if self.sockets == 2:
            self._join("cpu0", "cpu1", 1.5 * pcie)
        self.direct = np.zeros((self.gpus, self.gpus))
        self.hub = bool(rng.random() < 0.3)
        for a in range(self.gpus):
            for b in range(a):
                if self.hub or rng.random() < 0.5:
                    self.direct[a, b] = self.direct[b, a] = pcie * (6 if self.hub else float(rng.choice([2.0, 4.0])))

    def _join(self, a: str, b: str, rate: float) -> None:
        self.rate[a, b] = self.rate[b, a] = rate

    def _way(self, copy: HostCopy) -> list[Link]:
        a, b = copy.src, copy.dst
        if "gpu" in b:
            x, y = int(a[3:]), int(b[3:])
            if self.direct[x, y]:
                ways = [(a, "hub"), ("hub", b)] if self.hub else [(a, b)]
                self.rate.update(dict.fromkeys(ways, self.direct[x, y]))
                return ways
        return self._up(a) + self._across(a, b) + ([] if "cpu" in b else [(y, x) for x, y in reversed(self._up(b))])

    def _up(self, end: str) -> list[Link]:
        at, socket = self.switch[end], f"cpu{self.socket[end]}"
        return [(end, socket)] if at < 0 else [(end, f"switch{at}"), (f"switch{at}", socket)]

    def _across(self, a: str, b: str) -> list[Link]:
        there = f"cpu{self.socket[b]}" if b in self.socket else b
        here = f"cpu{self.socket[a]}"
        return [] if here == there else [(here, there)]

    def copies(self, copies: Sequence[HostCopy], times: int) -> Floats:
        """See `HostMeter.copies`."""
        ways = [self._way(copy) for copy in copies]
        left, pace = dict(self.rate), np.zeros(len(ways))
        waiting = set(range(len(ways)))
        while waiting:  # the link that gives each of its copies the least is full first
            load = {link: sum(link in ways[at] for at in waiting) for at in waiting for link in ways[at]}
            full = min(load, key=lambda link: left[link] / load[link])
            level = left[full] / load[full]
            for at in [at for at in waiting if full in ways[at]]:
                waiting.discard(at)
                pace[at] = level
                for link in ways[at]:
                    left[link] -= level
        us = np.array([len(w) + copy.nbytes / rate * 1e-3 for w, copy, rate in zip(ways, copies, pace, strict=True)])
        disturbed = 1 + self.noise * self.rng.exponential(size=(times, len(ways)))
        found: Floats = us * disturbed
        return found


def truth(host: DrawnHost) -> set[frozenset[str]]:
    """Those that share a switch."""
    shared = {frozenset(end for end, one in host.switch.items() if one == at) for at in set(host.switch.values())}
    return {group for group in shared if len(group) > 1 and host.switch[next(iter(group))] >= 0}


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_drawn_hosts_are_found(noise: float) -> None:
    for seed in range(40):
        host = DrawnHost(seed, noise=noise)
        found = find_inside(host)
        # NICs have half the rate: two of them on one switch do not disturb each other, but each a GPU beside it.
        beside = {group for group in truth(host) if any("gpu" in end for end in group)}
        assert {frozenset(group) for group in found.groups} == beside, seed
        if host.sockets == 2:
            ends = [*(f"gpu{at}" for at in range(host.gpus)), *host.nics]
            assert found.socket == tuple(host.socket[end] for end in ends), seed
        assert found.direct == pytest.approx(host.direct, rel=0.12), seed
        if host.hub and host.gpus > 2:
            assert all(found.ports), seed
        assert found.cluster().num_devices == host.gpus


def test_two_measured_hosts_are_numbered_alike() -> None:
    """The same host, measured twice with noise, has an order in which it looks like itself."""
    for seed in range(10):
        one, two = (find_inside(DrawnHost(seed, noise=noise)).cluster() for noise in (0.0, 0.03))
        assert numbering(two, one) is not None, seed


def test_a_host_without_gpus() -> None:
    host = DrawnHost(0, noise=0.0)
    host.gpus = 0
    with pytest.raises(InvalidInput, match="without GPUs"):
        find_inside(host)


def test_copies_are_timed_by_pytorch() -> None:
    """On the host's own memory: the figures mean nothing, the calls are those that GPUs get."""
    meter = TorchHostMeter("cpu", gpus=2)
    found = meter.copies(
        [HostCopy(src="gpu0", dst="cpu0", nbytes=4096), HostCopy(src="gpu1", dst="gpu0", nbytes=64)], 3
    )
    assert found.shape == (3, 2)
    assert (found > 0).all()
