# SPDX-License-Identifier: Apache-2.0
"""What every rank of a lab runs: ``probe_job.py FOLDER [lost|bench]``; ranks meet through files, which hosts share."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from stretto import Cluster
from stretto.errors import PeerLost
from stretto.planner.costs.measured import write_measurements
from stretto.runtime.executor.executor import ChannelConfig, Executor
from stretto.runtime.probe.bench import bench, runs
from stretto.runtime.probe.probe import probe

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Meeting:
    """An all-gather of bytes through a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.round = folder, 0

    def exchange(self, mine: bytes) -> list[bytes]:
        self.round += 1
        part = self.folder / f"part.{RANK}"
        part.write_bytes(mine)
        part.rename(self.folder / f"{self.round}.{RANK}")
        return [self._read(rank) for rank in range(WORLD)]

    def _read(self, rank: int) -> bytes:
        path = self.folder / f"{self.round}.{rank}"
        while not path.exists():
            time.sleep(0.002)
        return path.read_bytes()


def main() -> None:
    folder = Path(sys.argv[1])
    pairs = (part.partition("=") for part in os.environ["STRETTO_CHANNELS"].split(";"))
    channels = {name: ChannelConfig(devices=rest.partition(",")[0]) for name, _, rest in pairs}
    first = next(iter(channels.values())).devices
    meet = Meeting(folder).exchange
    with Executor(RANK, WORLD, meet, token=b"for tests only", channels=channels, interface=first) as ex:
        if sys.argv[2:] == ["lost"]:
            lose(ex, folder)
            return
        if sys.argv[2:] == ["bench"]:
            time_motifs(ex, folder)
            return
        probed = probe(ex)
        said = {
            "found": msgspec.to_builtins(probed.found), "renumbering": probed.renumbering, "seconds": probed.seconds,
            "digest": probed.cluster.digest, "gain": probed.gain,
        }  # fmt: skip
        print(json.dumps(said), flush=True)


def lose(executor: Executor, folder: Path) -> None:
    """The last rank goes in the middle of it; the others say how they learn of it, and stay until all have."""

    def go(label: str) -> None:
        if label != "inside hosts" and RANK == WORLD - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        probe(executor, advance=go, timeout_s=100)
        print(json.dumps("nothing"), flush=True)
    except PeerLost as error:
        print(json.dumps(str(error)), flush=True)
        # One that closes its executor at once may be taken for the cause by a rank that is later than this one.
        (folder / f"knows.{RANK}").touch()
        end = time.monotonic() + 200
        while len(list(folder.glob("knows.*"))) < WORLD - 1 and time.monotonic() < end:
            time.sleep(0.01)


def time_motifs(executor: Executor, folder: Path) -> None:
    """A table of two collectives, written by rank 0; every rank says how long it is."""
    cluster = Cluster.load(folder / "cluster.yaml")
    todo = runs(cluster, channels=("rdma", "eth"), kinds=("all_reduce", "all_to_all"), sizes=(65536,), best=1)
    done = bench(executor, cluster, todo)
    if RANK == 0:
        write_measurements(folder / "costs.csv", done.measurements)
    print(json.dumps({"rows": len(done.measurements), "left_out": len(done.left_out)}), flush=True)


main()
