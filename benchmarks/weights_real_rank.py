# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/weights_real.py: moves real weights in several ways, or loses a rank in the middle.

``python weights_real_rank.py ROWS PART DEVICE TRAINER SERVER BYTES STAGING RUNS SYSTEMS``; rank 0 appends a line of
JSON to ROWS for everything that it has measured, as soon as it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.resharding.tensors import movers
from stretto.resharding.tensors.weight_run import WeightRunner
from stretto.resharding.tensors.weight_tensors import filled
from stretto.resharding.tensors.weights import WeightSync
from stretto.weights import model_of_size

UPDATES = 4
"""Updates beside training, one behind the other."""
BLOCKS = (32, 8, 2)
"""The most thread blocks of a rank's copies in further updates beside training, where that can be chosen."""


def tell(path: Path, **row: Any) -> None:
    """One line of the results."""
    if dist.get_rank() == 0:
        with path.open("a") as out:
            out.write(json.dumps(row) + "\n")


def systems(path: Path, runner: WeightRunner, names: list[str], runs: int) -> None:
    """Every system, then training beside updates."""
    copied_ms = runner.copy_us() / 1e3
    sync = runner.sync
    tell(
        path, system="one copy", time_ms=copied_ms, over_copy=1.0, route=sync.route, rounds=sync.num_rounds,
        staging_mb=sync.staging_bytes / 1e6,
    )  # fmt: skip
    for name in names:
        try:
            found = runner.measure(name, runs)
        except (StrettoError, RuntimeError) as error:
            tell(path, system=name, said=f"{type(error).__name__}: {error}"[:300])
            raise
        took = found.time_s * 1e3
        tell(
            path, system=name, time_ms=took, over_copy=took / copied_ms, gb_per_s=runner.nbytes / took / 1e6,
            stopped_ms=found.stopped_s * 1e3, exact=found.exact,
        )  # fmt: skip
    kinds: list[tuple[str, int | None]] = [("copy", None), ("update", None)]
    kinds += [("update", blocks) for blocks in BLOCKS if sync.route == "pull"]
    for beside, blocks in kinds:
        found_training = runner.train(UPDATES, beside, blocks)
        what = f"our update of {blocks} blocks" if blocks else "our update"
        tell(
            path, system=f"training beside {what if beside == 'update' else 'plain copies'}",
            time_ms=found_training.update_s * 1e3 if beside == "update" else None, step_ms=found_training.alone_s * 1e3,
            slowdown=found_training.slowdown, lost_ms=found_training.lost_s * 1e3 if beside == "update" else None,
            steps=found_training.steps,
        )  # fmt: skip


def _holds(runner: WeightRunner, weights: Any, add: int) -> bool:
    """Whether this rank has the numbers of a version, which is the first one's with something added."""
    for t in runner.tensors:
        want = filled(t, t.dst, runner.me, runner.device)
        if want is not None and not torch.equal(weights[t.name].view(torch.int16), want.view(torch.int16) + add):
            return False
    return True


def lose(path: Path, runner: WeightRunner, who: str) -> None:
    """The last server, or the last trainer, dies in the middle of the second update; what the others have then."""
    me, size = runner.me, dist.get_world_size()
    runner.sync.close()
    given, wanted = runner.parts()
    if who == "server" and wanted:
        # Every server is a mesh of its own, so that any of them can be left out.
        wanted = {t.name: local for t, local in zip(runner.tensors, runner.targets, strict=True) if local is not None}
    sync = WeightSync(given, wanted, staging_bytes=runner.staging_bytes)
    trainers = max(d for t in runner.tensors for d in t.src.mesh.devices) + 1
    victim = size - 1 if who == "server" else trainers - 1
    sync.update()
    for source in runner.sources:
        if source is not None:
            source.view(torch.int16).add_(1)
    kinds: list[Any] = [movers.Mover, movers.PinnedMover, movers.GpuMover]
    begun, calls = {kind: kind.start for kind in kinds}, [0]

    def broken(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if me == victim and calls[0] == max(1, sync.num_rounds // 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return begun[type(self)](self, *args)

    patches = [mock.patch.object(kind, "start", broken) for kind in kinds]
    for patch in patches:
        patch.start()
    began = time.monotonic()
    try:
        said = f"version {sync.update()}"
    except StrettoError as error:
        said = f"{type(error).__name__}: {error}"
    noticed_ms = 1e3 * (time.monotonic() - began)
    for patch in patches:
        patch.stop()
    with sync.read() as weights:
        old = weights.version == 1 and (runner.trains or _holds(runner, weights, 0))
    row: dict[str, Any] = {"system": f"{who} killed", "said": said[:60], "noticed_ms": noticed_ms, "kept_old": old}
    if who == "server":
        began = time.monotonic()
        sync = sync.reform([rank for rank in range(size) if rank != victim])
        row["reformed_ms"] = 1e3 * (time.monotonic() - began)
        began = time.monotonic()
        sync.update()
        row["time_ms"] = 1e3 * (time.monotonic() - began)
        with sync.read() as weights:
            row["new_on_the_others"] = weights.version == 2 and (runner.trains or _holds(runner, weights, 1))
        row["route"] = sync.route
    # Ranks that have lost one cannot meet in their process group any more: each writes for itself.
    mine = path.with_name(f"{path.name}.{me}")
    mine.write_text(json.dumps(row))
    others = [path.with_name(f"{path.name}.{rank}") for rank in range(size) if rank != victim]
    deadline = time.monotonic() + 20
    while me == 0 and not all(other.exists() for other in others) and time.monotonic() < deadline:
        time.sleep(0.02)
    if me == 0:
        time.sleep(0.1)
        told = [json.loads(other.read_text()) for other in others if other.exists()]
        row["answered"] = len(told)
        for key in ("kept_old", "new_on_the_others"):
            if key in row:
                row[key] = len(told) == size - 1 and all(one.get(key) for one in told)
        row["noticed_ms"] = max(one["noticed_ms"] for one in told)
        tell(path, **row)


def main() -> None:
    """Run one part."""
    path, part, device, trainer, server, nbytes, staging, runs, names = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    model = model_of_size(int(nbytes))
    try:
        runner = WeightRunner(model, trainer=trainer, server=server, staging_bytes=int(staging), device=device)
        if part == "systems":
            systems(Path(path), runner, names.split(","), int(runs))
        else:
            lose(Path(path), runner, part)
    except Exception as error:
        tell(Path(path), system=part, said=f"{type(error).__name__}: {error}"[:300])
        raise
    finally:
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
