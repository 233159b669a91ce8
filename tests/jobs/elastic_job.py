# SPDX-License-Identifier: Apache-2.0
"""Two trainers and servers that come, leave and die, on real processes."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from capture_scenarios import _start, store_port

import stretto
import stretto.torch
from stretto.resharding.tensors.movers import Mover
from stretto.torch import TensorPart

TRAINERS, LATE, DYING, LEAVING = (0, 1), 4, 3, 2
LAST, LOST = 5, (1, 3)
ROWS, COLUMNS = 64, 6


def numbers(version: int) -> torch.Tensor:
    return (torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) * (version + 1)).float()


def right(weights: Any, version: int) -> bool:
    return weights.version == version and torch.equal(weights["w"], numbers(version))


def die_in(update: int, rank: int) -> None:
    """Have this process die in the middle of an update: in the n-th start of a round."""
    start, calls = Mover.start, []

    def broken(self: Mover, *args: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) == update:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, *args)

    mock.patch.object(Mover, "start", broken).start()


def train(world: Any) -> list[Any]:
    rank = world.rank
    half = ROWS // 2
    local = torch.zeros(half, COLUMNS)
    part = TensorPart.of(local, ranks=TRAINERS, placements=["S(0)"])
    sync = stretto.torch.ElasticSync(world, trainers=TRAINERS, source={"w": part})
    if rank == 1:
        # One round in each attempt: versions 1, 2 (twice: a server dies in the first), 3 and 4 come before.
        die_in(6, rank)
    found: list[Any] = []
    for version in range(1, LAST + 1):
        if rank == 0:
            wanted = {1: {2, 3}, 3: {2, LATE}, 4: {LATE}}.get(version, set())
            while not wanted <= set(sync.servers) or (version == 4 and LEAVING in sync.servers):
                time.sleep(0.02)
        local.copy_(numbers(version)[rank * half : (rank + 1) * half])
        try:
            found.append(sync.update())
        except stretto.StrettoError as error:
            found.append(f"{type(error).__name__}: {error}")
        if version == 2 and rank == 0:
            world.store.set("test/late", "1")
    return found


def serve(world: Any) -> list[Any]:
    rank = world.rank
    if rank == LATE:
        world.store.get("test/late")
    sync = stretto.torch.ElasticSync(world, trainers=TRAINERS, target={"w": torch.full((ROWS, COLUMNS), -1.0)})
    if rank == DYING:
        die_in(2, rank)
    found: list[Any] = []
    while True:
        try:
            version = sync.follow()
        except stretto.StrettoError as error:
            with sync.read() as weights:
                return [*found, [type(error).__name__, weights.version, right(weights, weights.version)]]
        if version is None:
            return found
        with sync.read() as weights:
            found.append([version, right(weights, version)])
        if rank == LEAVING and version == 3:
            sync.leave()
            return found


def main() -> None:
    folder, ranks, port = Path(sys.argv[1]), int(sys.argv[2]), store_port()

    def rank_main(rank: int) -> None:
        faulthandler.dump_traceback_later(500, exit=True)
        torch.set_num_threads(1)
        world = stretto.torch.SyncWorld.join(f"127.0.0.1:{port}", rank, timeout_s=400)
        found = train(world) if rank in TRAINERS else serve(world)
        (folder / f"{rank}.json").write_text(json.dumps({"elastic": found}))

    for rank in LOST:
        (folder / f"{rank}.json").write_text(json.dumps({"elastic": None}))
    waiting = {_start(rank, rank_main): rank for rank in range(ranks)}
    while waiting:
        process, status = os.wait()
        rank = waiting.pop(process)
        if bool(status) != (rank in LOST):
            sys.exit(f"rank {rank} ended with {status}")


if __name__ == "__main__":
    main()
