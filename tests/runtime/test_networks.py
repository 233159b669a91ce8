# SPDX-License-Identifier: Apache-2.0
"""The documented path from a probed cluster with two networks to a table and its run keeps routes (in simulation)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stretto import MB, AllReduce, Cluster, simulate
from stretto.cli import run
from stretto.cluster.wiring import Wiring
from stretto.programs import Lowered, Program
from stretto.programs.formats import load_program
from stretto.programs.lower import lower
from stretto.runtime.torch_backend.networks import on_networks
from stretto.runtime.torch_backend.selection import Selector
from stretto.synthesis.table import Selection, select

NAMES = ("fast", "slow")


def two_networks(name: str = "two") -> Cluster:
    """Two hosts with two ranks each, and a NIC on each of two networks, as `stretto probe` writes them."""
    hosts = np.repeat(np.arange(2), 2)
    wiring = Wiring([f"h{host}.{rank}" for host in range(2) for rank in range(2)], hosts=hosts)
    memory = wiring.add([f"h{host}.shm" for host in range(2)], kind="switch", hosts=np.arange(2))
    wiring.duplex(wiring.devices, memory[hosts], gb_per_s=5.0, alpha_us=2.0, channel="shm")
    for network, rate in zip(NAMES, (0.05, 0.025), strict=True):
        nics = wiring.add([f"h{host}.{network}" for host in range(2)], kind="nic", hosts=np.arange(2))
        switch = wiring.add([network], kind="switch")
        wiring.duplex(wiring.devices, nics[hosts], gb_per_s=5.0, alpha_us=0.0, channel=network)
        wiring.duplex(nics, switch, gb_per_s=rate, alpha_us=10.0, channel=network)
    return wiring.cluster(name)


CLUSTER = two_networks()


@pytest.fixture(scope="module")
def made() -> Selection:
    collective = AllReduce(4, in_place=True)
    return select(collective, CLUSTER, [MB, 16 * MB], makers=["forest", "library"], budget_s=4.0, cache=False)


def test_a_table_in_text_form_is_as_fast_as_what_was_synthesized(made: Selection, tmp_path: Path) -> None:
    promised = {row["nbytes"]: row for row in made.rows()}
    assert all(row["gap"] < 0.02 for row in promised.values())
    made.save(tmp_path, suffix=".txt")
    selector = Selector(range(4), "aabb", cluster=CLUSTER, table=tmp_path)
    for nbytes, row in promised.items():
        program = selector.pick("all_reduce", nbytes, in_place=True).program
        assert isinstance(program, Program)
        assert simulate(program, CLUSTER, nbytes=nbytes).total_us == pytest.approx(row["time_us"], rel=0.01)


def test_streams_without_routes_are_slower(made: Selection, tmp_path: Path) -> None:
    made.save(tmp_path, suffix=".xml")
    streams = load_program(tmp_path / "all_reduce-0.xml")
    assert isinstance(streams, Lowered)
    assert simulate(streams, CLUSTER, nbytes=16 * MB).total_us > 1.4 * made.rows()[-1]["time_us"]


def test_synth_says_what_streams_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    CLUSTER.save(tmp_path / "c.yaml")
    words = ["synth", "allreduce", "-c", str(tmp_path / "c.yaml"), "-b", "1M,4M", "--in-place", "--no-cache"]
    words += ["--makers", "forest,library", "--budget", "20"]
    assert run([*words, "-o", str(tmp_path / "streams")]) == 0
    assert "--format txt keeps them whole" in " ".join(capsys.readouterr().out.split())
    assert run([*words, "--format", "txt", "-o", str(tmp_path / "whole")]) == 0
    assert "keeps them whole" not in " ".join(capsys.readouterr().out.split())


def test_the_executor_puts_each_transfer_on_the_network_of_its_route(made: Selection) -> None:
    program = made.best(16 * MB)
    assert isinstance(program, Program)
    placed = on_networks(program, CLUSTER, NAMES)
    loads = np.zeros(len(NAMES))
    hosts = CLUSTER.node_host
    for at in range(program.num_transfers):
        if hosts[program.src[at]] == hosts[program.dst[at]]:
            continue
        route = program.routes[program.route[at]]
        over = {CLUSTER.channels[CLUSTER.link_channel[link]] for link in route} & set(NAMES)
        assert over == {NAMES[placed.lane[at] % len(NAMES)]}
        loads[placed.lane[at] % len(NAMES)] += program.chunk_ptr[at + 1] - program.chunk_ptr[at]
    # The networks' rates are as two to one, and so are the bytes.
    assert loads[0] / loads[1] == pytest.approx(2.0, rel=0.05)
    lower(placed).verify()


def test_routes_of_another_cluster_and_a_single_network_change_nothing(made: Selection) -> None:
    program = made.best(MB)
    assert isinstance(program, Program)
    assert on_networks(program, None, NAMES) is program
    assert on_networks(program, CLUSTER, NAMES[:1]) is program
    assert on_networks(program, CLUSTER, ("other", "names")) is program
    elsewhere = program.replace(routes_digest="0" * 16)
    assert on_networks(elsewhere, CLUSTER, NAMES) is elsewhere
