# SPDX-License-Identifier: Apache-2.0
"""A trainer and two servers, of which one is stopped in the middle of an update and goes on later."""

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

import stretto.torch
from stretto.resharding.tensors.movers import Mover

TRAINER, STOPPED, OTHER = 0, 1, 2
ROWS, TIMEOUT_S = 4096, 8.0
FOLDER = Path(sys.argv[1])


def numbers(version: int) -> torch.Tensor:
    return torch.arange(ROWS).remainder(89).add(1).mul(version).float()


def train(sync: Any, local: torch.Tensor) -> list[Any]:
    """Versions until the stopped server has gone on; the second is the one in which it stops."""
    found = []
    for version in range(1, 2000):
        local.copy_(numbers(version))
        found.append([sync.update(), sync.servers])
        if version == 3:
            (FOLDER / "go_on").touch()
        # A server that came back while a version was sent gets the next one.
        if version > 4 and STOPPED in found[-2][1] and STOPPED in found[-1][1]:
            return found
        time.sleep(0.02)
    return found


def serve(sync: Any, rank: int) -> list[Any]:
    """What came, and whether it was of one version."""
    found: list[Any] = []
    if rank == STOPPED:
        start, calls = Mover.start, []

        def stopped(self: Mover, *args: torch.Tensor) -> Any:
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            return start(self, *args)

        mock.patch.object(Mover, "start", stopped).start()
    while (version := sync.follow()) is not None:
        with sync.read() as weights:
            found.append([version, weights.version == version and torch.equal(weights["w"], numbers(version))])
    return found


def main() -> None:
    port = store_port()

    def rank_main(rank: int) -> None:
        faulthandler.dump_traceback_later(300, exit=True)
        world = stretto.torch.SyncWorld.join(f"127.0.0.1:{port}", rank, timeout_s=TIMEOUT_S)
        local = torch.full((ROWS,), -1.0)
        side: Any = {"source" if rank == TRAINER else "target": {"w": local}}
        sync = stretto.torch.ElasticSync(world, trainers=(TRAINER,), **side)
        while len(sync.servers) < 2:
            time.sleep(0.02)
        found = train(sync, local) if rank == TRAINER else serve(sync, rank)
        (FOLDER / f"{rank}.json").write_text(json.dumps({"stopped": found}))
        sync.close()

    waiting = {_start(rank, rank_main): rank for rank in range(3)}
    stopped = next(process for process, rank in waiting.items() if rank == STOPPED)
    while waiting:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process and status:
            sys.exit(f"rank {waiting[process]} ended with {status}")
        waiting.pop(process, None)
        if (FOLDER / "go_on").exists() and stopped in waiting:
            os.kill(stopped, signal.SIGCONT)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
