# SPDX-License-Identifier: Apache-2.0
"""Collectives over GPUs of several hosts, in real processes with stand-ins for the GPUs."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_ranks import launch
from gpu_emulation import EmulatedGpu
from warm import Started

from stretto.programs.fused import fuse
from stretto.programs.stages import cut
from stretto.runtime.executor.executor import failure_error, load_native
from stretto.runtime.gpu.hosts_programs import KINDS, two_level
from stretto.runtime.gpu.hosts_proxy import NetworkProxy, ProgressBoard, board_bytes

JOBS = Path(__file__).parents[1] / "jobs"
LIMIT_S = 400.0


@pytest.mark.parametrize("world", [2, 5])
def test_random_collectives_on_hosts_of_any_sizes(tmp_path: Path, world: int) -> None:
    found = launch(JOBS / "gpu_hosts_job.py", tmp_path, world, "random_calls", "in_flight")
    assert found["random_calls"] == [[]] * world
    assert len({tuple(sums) for sums in found["in_flight"]}) == 1


def test_different_calls_and_dead_ranks_end_all_streams(tmp_path: Path) -> None:
    found = launch(JOBS / "gpu_hosts_job.py", tmp_path, 3, "mismatch", "killed")
    assert found["mismatch"] == [["ProgramMismatch"]] * 3
    assert all("rank 2" in rank["said"][0] for rank in found["killed"][:2])


def backend_job(folder: Path, hosts: str, *scenario: str) -> list[Any]:
    """What each rank of the backend said; None for one that did not come to it."""
    names = hosts.split(",")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(len(names)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "STRETTO_TEST_HOSTS": hosts, "STRETTO_GPU": "hosts",
    }  # fmt: skip
    job, arguments = JOBS / "gpu_hosts_backend_job.py", [str(folder), *scenario]
    ranks = [
        Started(job, arguments, env=os.environ | shared | {"RANK": str(rank)}, log=folder / f"log{rank}")
        for rank in range(len(names))
    ]
    try:
        for rank in ranks[:-1]:
            rank.wait(LIMIT_S)
    finally:
        for rank in ranks:
            rank.end()
    files = [folder / f"{rank}.json" for rank in range(len(names))]
    found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    said = "\n".join((folder / f"log{rank}").read_text()[-2000:] for rank in range(len(names)))
    assert all(each is not None for each in found[:-1]), said
    return found


def test_the_backend_joins_hosts_and_their_sub_groups(tmp_path: Path) -> None:
    for rank in backend_job(tmp_path, "a,a,b,b", "everywhere"):
        world = rank.pop("world")
        assert world["wrong"] == [] and world["why"] == "" and world["threads"] and world["held"] > 0
        assert all(rank.values())


@pytest.mark.parametrize("how", ["kill", "stop", "mismatch"])
def test_all_ranks_give_up_for_the_same_reason(tmp_path: Path, how: str) -> None:
    found = backend_job(tmp_path, "a,a,b", "fault", how)
    kind = "ProgramMismatch" if how == "mismatch" else "PeerLost"
    # The store is rank 0's: who comes when that has left has words of its own behind the same beginning.
    said = {rank["said"].partition("(in ")[0] for rank in found[:-1]}
    assert len(said) == 1 and said.pop().startswith(kind)


NOTHING = (None, 0, 0, 0, 0, 0)
"""A slice that needs no network."""


class Words:
    """The two words of a GPU."""

    def __init__(self) -> None:
        self.word = (ctypes.c_uint32 * 2)()

    @property
    def words(self) -> tuple[int, int]:
        at = ctypes.addressof(self.word)
        return at, at + 4


def proxy_of(board: ProgressBoard, device: Words) -> NetworkProxy:
    def carrier(released: int, copied: int) -> Any:
        return load_native().Carrier(None, released, copied, board.address, board.me, board.size)

    return NetworkProxy(carrier, device, failure_error, lambda error: None)


def test_a_proxy_lets_go_when_all_ranks_of_the_host_are_through(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(board_bytes(2)))
    mine, other, device = ProgressBoard(path, 0, 2), ProgressBoard(path, 1, 2), Words()
    proxy = proxy_of(mine, device)
    assert [proxy.post(1, NOTHING, 1.0), proxy.post(2, NOTHING, 1.0)] == [1, 2]
    time.sleep(0.01)
    assert proxy.through == 0 and "2 wait for the GPU (0 copied)" in proxy.state()
    device.word[1] = 2
    while proxy.through < 2:
        pass
    assert device.word[0] == 0
    other.advance(1)
    while not device.word[0]:
        pass
    assert device.word[0] == 1
    proxy.abort("enough")
    assert device.word[0] == 2
    assert proxy.post(3, NOTHING, 1.0) == 3 and device.word[0] == 3
    assert proxy.close() == 0


def test_slices_are_carried_while_a_thread_stands_with_the_interpreter_lock(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(board_bytes(1)))
    device, stand = Words(), ctypes.PyDLL(None).usleep
    proxy = proxy_of(ProgressBoard(path, 0, 1), device)
    proxy.post(1, NOTHING, 1.0)
    # A call that keeps the interpreter's lock, as cudaEventRecord may.
    device.word[1] = 1
    stand(1_000_000)
    assert device.word[0] == 1
    proxy.close()


def test_stages_inside_hosts_run_in_the_kernel() -> None:
    """The legs of random programs through the CPU build of the GPU's kernel: partial sums, ranks that hold nothing."""
    legs = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        hosts = rng.integers(0, 2, int(rng.integers(3, 7))).tolist()
        staged = cut(two_level(str(rng.choice(KINDS)), hosts, int(rng.integers(len(hosts)))), hosts)
        for leg in (leg for stage in staged.stages if not stage.network for leg in stage.legs):
            gpu = EmulatedGpu(len(leg.ranks))
            protocol = str(rng.choice(["simple", "ll"]))
            call = gpu.prepare(fuse(leg.program, protocol=protocol), leg.units * 8, "float32", "sum", rng, blocks=2)
            gpu.run([call], seed=seed)
            gpu.check(call)
            assert call.encoded.inputs == tuple(8 * leg.sizes(at)[0] for at in range(len(leg.ranks)))
            legs += 1
    assert legs > 12
