# SPDX-License-Identifier: Apache-2.0
"""A host that vanishes from the network: the others are told which ranks are lost, in bounded time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from stretto.lab import Lab

pytestmark = pytest.mark.real_lab
LIMIT_S = 480.0

# All-reduces without end; the first that fails is told.
REDUCE = """
import json, time
from datetime import timedelta
import torch
import torch.distributed as dist
import stretto.torch

dist.init_process_group("stretto")
dist.all_reduce(torch.ones(10))
dist.group.WORLD.set_timeout(timedelta(seconds=10))  # a busy machine's ranks are not late by so much
print("up", flush=True)
while True:
    try:
        dist.all_reduce(torch.ones(30_000))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
        break
time.sleep(1000)  # who ends is a fault of its own: all stay until all have spoken
"""


def test_a_host_that_vanishes_is_named_by_every_other_host() -> None:
    ready: set[int] = set()
    said: dict[int, list[object]] = {}

    def heard(rank: int, stream: str, line: str) -> None:
        if line == "up":
            ready.add(rank)
            if len(ready) == 3:
                user = ["--user", "--preserve-credentials"] if lab.rootless else []
                there = ["nsenter", f"--target={lab.host_pids[2]}", *user, "--net"]
                subprocess.run([*there, "ip", "link", "set", "eth", "down"], check=True, timeout=30)
        elif stream == "stdout":
            said[rank] = json.loads(line)
            if len(said) == 3:
                for each in range(3):
                    job.signal(each, signal.SIGKILL)

    with Lab(hosts=3, ranks_per_host=1, uplinks={"eth": "400mbit"}) as lab:
        job = lab.start([sys.executable, "-c", REDUCE], on_line=heard)
        result = job.wait(LIMIT_S, keep_going=True)
    assert not result.timed_out, result.errors
    for rank in (0, 1):
        kind, text = said[rank]
        assert kind == "PeerLost"
        assert "waiting for rank 2 (it does not answer) in all_reduce" in str(text)
    kind, text = said[2]
    assert kind == "PeerLost"
    assert "rank 0 (it does not answer), rank 1 (it does not answer)" in str(text)
