# SPDX-License-Identifier: Apache-2.0
"""The probe on real ranks in real network namespaces: what was shaped is what is found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stretto.lab import Lab, unavailable

JOB = Path(__file__).parents[1] / "jobs" / "probe_job.py"
LIMIT_S = 400.0
TRIES = 8
"""Machines that run tests do other things, too: within so many probes each link must be undisturbed once."""


@pytest.fixture(scope="module", autouse=True)
def _needs_a_lab() -> None:
    why = unavailable()
    if why is not None:
        pytest.skip(why)


def probed(lab: Lab, folder: Path) -> dict[str, Any]:
    """What rank 0 says, which must be what all say."""
    folder.mkdir()
    done = lab.run([sys.executable, str(JOB), str(folder)], timeout_s=LIMIT_S)
    assert done.returncodes == (0,) * lab.layout.world_size, done.errors
    said = [json.loads(output) for output in done.outputs]
    assert all(each == said[0] for each in said)
    first: dict[str, Any] = said[0]
    return first


def errors_of(found: Mapping[str, Any], lab: Lab) -> dict[tuple[str, int, str], float]:
    """How far each measured rate is from what was shaped."""
    errors = {}
    for network, channel in zip(found["networks"], lab.layout.channels, strict=True):
        for port in network["ports"]:
            shaped = channel.bits_per_s[port["host"]] / 8e9
            for side in ("out_gb_per_s", "in_gb_per_s"):
                errors[network["name"], port["host"], side] = abs(port[side] / shaped - 1)
    return errors


@pytest.mark.parametrize(
    ("hosts", "ranks", "order", "uplinks"),
    [
        (2, 4, "interleaved", {"rdma": "400mbit", "eth": "200mbit"}),
        (4, 1, "host", {"eth": "200mbit,200mbit,50mbit,200mbit"}),
    ],
)
def test_shaped_rates_and_groups_are_recovered(
    tmp_path: Path, hosts: int, ranks: int, order: str, uplinks: dict[str, str]
) -> None:
    with Lab(hosts=hosts, ranks_per_host=ranks, uplinks=uplinks, order=order) as lab:
        errors: dict[tuple[str, int, str], float] = {}
        truth = [[rank for rank in range(hosts * ranks) if lab.host_of(rank) == host] for host in range(hosts)]
        for attempt in range(TRIES):
            said = probed(lab, tmp_path / str(attempt))
            found = said["found"]
            assert found["hosts"] == truth
            assert [network["name"] for network in found["networks"]] == list(uplinks)
            # Where others take the processors, ranks of a host may seem to have uplinks of their own: measure again.
            ports = [[port["ranks"] for port in network["ports"]] for network in found["networks"]]
            if ports == [truth] * len(uplinks):
                errors = {link: min(error, errors.get(link, error)) for link, error in errors_of(found, lab).items()}
                if max(errors.values()) < 0.05:
                    break
        assert errors and max(errors.values()) < 0.05, errors
    wanted = [rank for host in truth for rank in host]
    assert said["renumbering"] == (wanted if order == "interleaved" else list(range(hosts * ranks)))
    assert (said["gain"] > 1.5) == (order == "interleaved")


def test_a_rank_that_goes_while_probing_is_named_by_the_others(tmp_path: Path) -> None:
    with Lab(hosts=2, ranks_per_host=2, uplinks={"eth": "200mbit"}) as lab:
        job = lab.start([sys.executable, str(JOB), str(tmp_path), "lost"])
        done = job.wait(LIMIT_S, keep_going=True)
    assert done.returncodes == (0, 0, 0, -9)
    for output in done.outputs[:3]:
        assert "rank 3" in json.loads(output)
