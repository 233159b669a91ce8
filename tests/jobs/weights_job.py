# SPDX-License-Identifier: Apache-2.0
"""Weights on CPUs or on GPUs, with the same scenarios: generated layouts, updates beside training, deltas, faults.

``python weights_job.py FOLDER DEVICE RANKS SEED SCENARIO...``; one process for each rank starts with RANK set.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mapped_weights import mapped
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import stretto
import stretto.torch
from stretto.resharding.tensors import movers, pulls, transfer
from stretto.resharding.tensors.weights import WeightSync

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64)


class Case:
    """What all ranks draw alike: half of them trainers, the others servers, and tensors cut in random ways."""

    def __init__(self, seed: int, device: str, *, most: int = 16, dims: int = 3, dtypes: Any = DTYPES) -> None:
        self.rng, self.device, self.rank, self.size = (
            random.Random(seed),
            device,
            dist.get_rank(),
            dist.get_world_size(),
        )
        rng = self.rng
        first = rng.randint(1, self.size - 1)
        self.trainers, self.servers = list(range(first)), list(range(first, self.size))
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            f"t{at}": (tuple(rng.randint(1, most) for _ in range(rng.randint(1, dims))), rng.choice(dtypes))
            for at in range(rng.randint(2, 6))
        }
        self.ways = {
            name: (self._placements(shape, self.trainers), self._placements(shape, self.servers))
            for name, (shape, _) in self.shapes.items()
        }

    def _placements(self, shape: tuple[int, ...], ranks: list[int]) -> tuple[Any, list[Any]]:
        grids: list[Any] = [ranks]
        if len(ranks) % 2 == 0:
            half = len(ranks) // 2
            grids.append([ranks[:half], ranks[half:]])
        grid = self.rng.choice(grids)
        axes = 2 if isinstance(grid[0], list) else 1
        return grid, [self.rng.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(axes)]

    def numbers(self, name: str, version: int) -> torch.Tensor:
        shape, dtype = self.shapes[name]
        count = int(torch.tensor(shape).prod())
        values = (torch.arange(count) * (version + 3) + len(name) + version) % 251
        return values.to(dtype).reshape(shape).to(self.device)

    def cut(self, name: str, version: int, side: int) -> torch.Tensor:
        grid, placements = self.ways[name][side]
        where = DeviceMesh(self.device, grid, _init_backend=False)
        return distribute_tensor(self.numbers(name, version), where, placements, src_data_rank=None)

    def source(self, version: int) -> dict[str, torch.Tensor] | None:
        return {n: self.cut(n, version, 0) for n in self.shapes} if self.rank in self.trainers else None

    def target(self) -> dict[str, torch.Tensor] | None:
        return {n: self.cut(n, 99, 1) for n in self.shapes} if self.rank in self.servers else None

    def right(self, weights: Any, versions: int | dict[str, int]) -> bool:
        if self.rank not in self.servers:
            return True
        found = True
        for name in self.shapes:
            version = versions if isinstance(versions, int) else versions[name]
            want: Any = self.cut(name, version, 1)
            found = found and torch.equal(weights[name].to_local(), want.to_local())
        return found

    def overwrite(self, source: dict[str, torch.Tensor] | None, version: int, names: Any = None) -> None:
        for name, tensor in (source or {}).items():
            if names is None or name in names:
                local: Any = tensor
                local.to_local().copy_(self.cut(name, version, 0).to_local())  # type: ignore[attr-defined]


def generated(seed: int, device: str) -> Any:
    """Versions of generated state dicts, with generous and with little staging, checksums now and then."""
    wrong, routes, rounds = [], set(), 0
    for trial in range(4):
        case = Case(100 * seed + trial, device)
        staging = case.rng.choice([256 << 20, 40_000, 4000])
        source = case.source(0)
        with WeightSync(source, case.target(), staging_bytes=staging) as sync:
            routes.add(sync.route)
            rounds = max(rounds, sync.num_rounds)
            for version in range(1, 4):
                case.overwrite(source, version)
                number = sync.update(checksums=version == 2)
                with sync.read() as weights:
                    if number != version or not case.right(weights, version):
                        wrong.append([trial, version])
    return {"wrong": wrong, "routes": sorted(routes), "rounds": rounds}


def pinned(seed: int, device: str) -> Any:
    """Versions by way of pinned memory, as weights on GPUs of several hosts go; a CPU's memory needs no pinning."""

    def through_the_host(*args: Any, **more: Any) -> movers.Mover:
        return movers.mover_of(*args, **(more | {"device": "cuda", "gpu": None}))

    with mock.patch.object(transfer, "mover_of", through_the_host):
        told = generated(seed + 7, device)
        return told | {"beside": overlapped(seed + 7, device)["wrong"]}


def resharded(seed: int, device: str) -> Any:
    """DTensors between generated meshes, several under way at a time, and pending sums."""
    wrong = []
    for trial in range(6):
        case = Case(900 + 100 * seed + trial, device, dtypes=(torch.float32, torch.float64))
        works = []
        for name, (shape, dtype) in case.shapes.items():
            grid, placements = case.ways[name][1]
            where = DeviceMesh(device, grid, _init_backend=False)
            src_grid, src_placements = case.ways[name][0]
            full = case.numbers(name, trial)
            from_mesh = DeviceMesh(device, src_grid, _init_backend=False)
            part: Any = None
            if case.rng.random() < 0.3:
                src_placements = [Partial("sum")] + [Replicate()] * (len(src_placements) - 1)
                ways = from_mesh.mesh.shape[0]
                part = DTensor.from_local(full, from_mesh, src_placements, run_check=False)
                full = full * ways
            elif case.rank in case.trainers:
                part = case.cut(name, trial, 0)
            more: Any = {}
            if case.rank not in case.trainers:
                part = None
                more = {"shape": shape, "dtype": dtype, "src_mesh": from_mesh, "src_placements": src_placements}
            work = stretto.torch.reshard(part, where, placements, async_op=True, **more)
            works.append((work, full, where, placements))
        for number, (work, full, where, placements) in enumerate(works):
            found = work.wait()
            if case.rank in case.servers:
                want: Any = distribute_tensor(full, where, placements, src_data_rank=None)
                if not torch.equal(found.to_local(), want.to_local()):
                    wrong.append([trial, number])
    return {"wrong": wrong}


def overlapped(seed: int, device: str) -> Any:
    """Trainers change their weights while a version of them is sent: servers get what they were."""
    wrong: list[list[Any]] = []
    did = set()
    # On a GPU weights are made, sent and changed on another stream than PyTorch's own.
    streams: Any = torch.cuda
    side = streams.Stream() if device == "cuda" else None
    if side is not None:
        torch.cuda.set_stream(side)
    for trial, how in enumerate(("copy", "wait", "cheaper", "now", "limit")):
        case = Case(500 + 10 * seed + trial, device)
        source = case.source(1)
        options: Any = {"snapshot": "now"} if how == "now" else {"snapshot_bytes": 64} if how == "limit" else {}
        with WeightSync(source, case.target(), staging_bytes=5000) as sync:
            for version in (1, 2, 3):
                pending = sync.update_async(checksums=version == 2, **options)
                if source is not None:
                    did.add(pending.before_write("cheaper" if how in ("now", "limit") else how))
                    case.overwrite(source, version + 1)
                if pending.wait() != version:
                    wrong.append([how, "number"])
                with sync.read() as weights:
                    if not case.right(weights, version):
                        wrong.append([how, version])
    case, refused = Case(590 + seed, device), ""
    with WeightSync(case.source(1), case.target(), staging_bytes=5000) as sync:
        try:
            sync.update_async(snapshot="now", snapshot_bytes=1).wait()
        except stretto.errors.InvalidInput as error:
            refused = str(error)
        sync.update()
        with sync.read() as weights:
            if not case.right(weights, 1):
                wrong.append(["refused", 1])
    if side is not None:
        torch.cuda.set_stream(torch.cuda.default_stream())
    return {"wrong": wrong, "did": sorted(did), "refused": refused}


def churned(seed: int, device: str) -> Any:
    """Trainers change their weights and take and fill memory while copies of them are sent."""
    wrong: list[list[Any]] = []
    copied = 0
    streams: Any = torch.cuda
    side = streams.Stream() if device == "cuda" else None
    if side is not None:
        torch.cuda.set_stream(side)
    case = Case(800 + seed, device, most=96)
    source = case.source(1)
    with WeightSync(source, case.target(), staging_bytes=200_000) as sync:
        for version in range(1, 5):
            pending = sync.update_async(checksums=version % 2 == 0, snapshot=("on_write", "now")[version // 3])
            if source is not None:
                pending.before_write("copy")
                case.overwrite(source, version + 1)
                for nbytes in (1 << 12, 1 << 15, 1 << 18) * 8:
                    torch.full((nbytes,), 77, dtype=torch.uint8, device=device)
            if pending.wait() != version:
                wrong.append([version, "number"])
            copied += pending.copied_bytes
            with sync.read() as weights:
                if not case.right(weights, version):
                    wrong.append([version, "bits"])
    if side is not None:
        torch.cuda.set_stream(torch.cuda.default_stream())
    return {"wrong": wrong, "copied": copied}


def deltas(seed: int, device: str) -> Any:
    """Only what has changed is sent, named or found; servers have all of every version."""
    wrong, rounds = [], []
    case = Case(700 + seed, device, most=900, dims=2)
    source = case.source(0)
    have = dict.fromkeys(case.shapes, 0)
    with WeightSync(source, case.target(), deltas=True, staging_bytes=1 << 20) as sync:
        run, counts = sync._state.transfer.run, []

        def counted(*args: Any, **more: Any) -> None:
            counts.append(len(more["rounds"]))
            run(*args, **more)

        with mock.patch.object(sync._state.transfer, "run", counted):
            for version in range(1, 7):
                names = case.rng.sample(sorted(case.shapes), case.rng.randint(0, 2))
                case.overwrite(source, version, names)
                have |= dict.fromkeys(names, version)
                sync.update(changed="auto" if version % 2 else names, checksums=version % 3 == 0)
                with sync.read() as weights:
                    if not case.right(weights, have):
                        wrong.append(version)
            rounds = counts
    return {"wrong": wrong, "rounds": rounds, "all": sync.num_rounds}


def dies(seed: int, device: str) -> Any:
    """A trainer dies in the middle of an update: the others say so, and servers keep the version that they have."""
    case = Case(seed, device)
    source = case.source(1)
    sync = WeightSync(source, case.target(), staging_bytes=2000)
    sync.update()
    calls: list[int] = []
    steps: list[tuple[Any, str]] = [
        (movers.Mover, "start"), (movers.PinnedMover, "start"), (movers.GpuMover, "start"), (pulls.PullMover, "meet"),
    ]  # fmt: skip
    begun = {kind: getattr(kind, name) for kind, name in steps}

    def broken(self: Any, *args: Any) -> Any:
        calls.append(1)
        if case.rank == len(case.trainers) - 1 and len(calls) == max(1, sync.num_rounds // 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return begun[type(self)](self, *args)

    patches = [mock.patch.object(kind, name, broken) for kind, name in steps]
    for patch in patches:
        patch.start()
    case.overwrite(source, 2)
    began = time.monotonic()
    try:
        said = f"version {sync.update()}"
    except stretto.StrettoError as error:
        said = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began
    with sync.read() as weights:
        return {"said": said, "kept": weights.version == 1 and case.right(weights, 1), "took_s": took_s}


SCENARIOS: dict[str, Callable[[int, str], Any]] = {
    "generated": generated, "resharded": resharded, "overlapped": overlapped, "churned": churned,
    "deltas": deltas, "dies": dies, "mapped": mapped, "pinned": pinned,
}  # fmt: skip


def main() -> None:
    folder, device, seed, names = Path(sys.argv[1]), sys.argv[2], int(sys.argv[4]), sys.argv[5:]
    rank, size = int(os.environ["RANK"]), int(sys.argv[3])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=90)
    )
    found: dict[str, Any] = {}
    for name in names:
        began = time.monotonic()
        try:
            found[name] = SCENARIOS[name](seed, device)
        except Exception:
            found[name] = {"error": traceback.format_exc()[-1500:]}
        found[name]["s"] = round(time.monotonic() - began, 1)
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if "error" in found[name]:
            break
    sys.stdout.flush()
    # A job that has lost a rank cannot meet again.
    os._exit(0 if not any("error" in each for each in found.values()) else 1)


if __name__ == "__main__":
    main()
