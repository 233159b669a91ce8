# SPDX-License-Identifier: Apache-2.0
"""Whole state dicts from trainers (ranks 0 and 1) to two replicas (2, 3 and 4, 5), on real processes."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from capture_scenarios import _start, store_port
from reshard_job import joined, told
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import stretto
import stretto.torch
from stretto.resharding.tensors.movers import Mover
from stretto.resharding.tensors.weights import Weights, WeightSync
from stretto.weights import WeightMapping

RANKS, LOST = 6, 1
TRAINERS, SERVERS = range(2), range(2, 6)
SHAPES = {
    "embed": ((50, 16), torch.float32), "up": ((64, 16), torch.float32), "down": ((16, 64), torch.float32),
    "norm": ((16,), torch.float32), "half": ((7, 9), torch.bfloat16), "count": ((), torch.int64),
    "mask": ((5, 3), torch.bool), "nothing": ((0, 4), torch.float32),
}  # fmt: skip
TO = {"embed": Shard(0), "up": Shard(0), "down": Shard(1)}
Dict = dict[str, torch.Tensor]
MAPPING = """
version: 1
kind: weight_mapping
ignore: ["*.inv_freq"]
rules:
  - {to: "l.{n}.qkv", from: ["l.{n}.q", "l.{n}.k", "l.{n}.v"], concat: 0, sizes: [2, 1, 1]}
  - {to: "l.{n}.gate_up", from: ["l.{n}.gate", "l.{n}.up"], concat: 0, sizes: [1, 1]}
  - {to: "l.{n}.down_t", from: "l.{n}.down", transpose: true}
  - {to: experts, from: "expert.{e}", stack: true}
  - {to: wide_experts, from: "expert.{e}", stack: true, transpose: true}
  - {to: vocabulary, from: embed, rows: 10}
  - {to: head, from: embed, rows: 10}
  - {to: small, from: big, scale: small_scale, block: 16}
"""


def mesh(grid: Any) -> DeviceMesh:
    return DeviceMesh("cpu", grid, _init_backend=False)


def numbers(name: str, version: int) -> torch.Tensor:
    """What a tensor holds in a version, the same on all ranks."""
    shape, dtype = SHAPES[name]
    seed = torch.Generator().manual_seed(1000 * version + len(name))
    return (torch.randn(shape, generator=seed) * 5).to(dtype)


def cut(full: torch.Tensor, where: DeviceMesh, placement: Any) -> torch.Tensor:
    return distribute_tensor(full, where, [placement], src_data_rank=None)


def trained(version: int) -> Dict | None:
    """FSDP over the trainers; a buffer that is a plain tensor on each of them."""
    if dist.get_rank() not in TRAINERS:
        return None
    where = mesh(list(TRAINERS))
    found = {
        name: cut(numbers(name, version), where, Shard(0) if shape else Replicate())
        for name, (shape, _) in SHAPES.items()
    }
    found["mask"] = numbers("mask", version)
    return found


def served(version: int) -> Dict | None:
    """Tensor parallelism over the two ranks of this replica."""
    rank = dist.get_rank()
    if rank not in SERVERS:
        return None
    where = mesh([2, 3] if rank < 4 else [4, 5])
    found = {name: cut(numbers(name, version), where, TO.get(name, Replicate())) for name in SHAPES}
    found["mask"] = numbers("mask", version)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().flatten().view(torch.uint8).numpy().tobytes() if local.numel() else b""


def equal(weights: Weights, version: int) -> bool:
    want = served(version)
    return want is None or (set(want) == set(weights) and all(bits(weights[n]) == bits(want[n]) for n in want))


def versions_arrive(**how: Any) -> Any:
    """Several versions, bit for bit; the optimizer changes the source in place, or another dict is given."""
    source, target = trained(0), served(7)
    with stretto.torch.WeightSync(source, target, **how) as sync:
        seen = []
        for version in range(1, 4):
            fresh = trained(version)
            if version < 2 and source is not None and fresh is not None:
                for name, tensor in source.items():
                    tensor.copy_(fresh[name])
            number = sync.update(fresh if version >= 2 else None)
            with sync.read() as weights:
                seen.append([number == version, weights.version == version == sync.version, equal(weights, version)])
        return [seen, sync.num_rounds, sync.staging_bytes]


def small_staging() -> Any:
    return versions_arrive(staging_bytes=2500)


def casts() -> Any:
    """From float32 to bfloat16 on the way, and a pending average."""
    rank = dist.get_rank()
    full = torch.linspace(-3, 3, 60).reshape(10, 6)
    source = target = None
    if rank in TRAINERS:
        where = mesh(list(TRAINERS))
        part = DTensor.from_local(full * (rank + 1), where, [Partial("avg")], run_check=False)
        source = {"w": cut(full, where, Shard(0)), "mean": part}
    else:
        where = mesh([2, 3] if rank < 4 else [4, 5])
        target = {"w": cut(full.bfloat16() * 0, where, Shard(1)), "mean": cut(full * 0, where, Shard(0))}
    with stretto.torch.WeightSync(source, target) as sync:
        sync.update()
        if target is None:
            return [True]
        with sync.read() as weights:
            mean = cut(sum((full * k for k in range(1, 3)), torch.zeros(10, 6)) / 2, where, Shard(0))
            near = torch.allclose(weights["mean"].to_local(), mean.to_local())  # type: ignore[attr-defined]
            return [bits(weights["w"]) == bits(cut(full.bfloat16(), where, Shard(1))), near]


def readers_see_one_version() -> Any:
    """Threads read all the time while versions come; every tensor of a version holds its number."""
    rank = dist.get_rank()
    shapes = {f"w{k}": (37 + k, 20) for k in range(12)}
    source = target = None
    if rank in TRAINERS:
        source = {n: cut(torch.zeros(s), mesh(list(TRAINERS)), Shard(0)) for n, s in shapes.items()}
    else:
        where = mesh([2, 3] if rank < 4 else [4, 5])
        target = {n: cut(torch.zeros(s), where, Shard(1)) for n, s in shapes.items()}
    with stretto.torch.WeightSync(source, target, staging_bytes=20_000) as sync:
        torn: list[int] = []
        reads: list[int] = []
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                with sync.read() as weights:
                    values = {float(v) for t in weights.values() for v in t.to_local().unique()}  # type: ignore[attr-defined]
                    if values != {float(weights.version)}:
                        torn.append(weights.version)
                    reads.append(weights.version)

        thread = threading.Thread(target=read)
        if target is not None:
            thread.start()
        for version in range(1, 11):
            for tensor in (source or {}).values():
                tensor.to_local().fill_(version)  # type: ignore[attr-defined]
            sync.update()
            while target is not None and version not in reads[-3:] and not torn:
                time.sleep(0.001)
        over.set()
        if target is not None:
            thread.join()
        return [torn, reads == sorted(reads), len(set(reads)) if target is not None else None]


def old_versions() -> Any:
    """The version before the current can be asked for until the next update, which waits for its readers."""
    source, target = trained(1), served(0)
    with stretto.torch.WeightSync(source, target) as sync:
        sync.update()
        sync.update(trained(2))
        with sync.read(version=1) as before:
            held = equal(before, 1)
        with sync.read(version=2) as weights:
            held = held and equal(weights, 2)
        gone = told(lambda: sync.read(version=0).__enter__())
        late = []
        entered = sync.read(version=1)
        entered.__enter__()

        def leave() -> None:
            late.append(equal(Weights(1, sync._state.sets[1]), 1))
            entered.__exit__(None, None, None)

        timer = threading.Timer(0.3, leave)
        timer.start()
        number = sync.update(trained(3))
        timer.join()
        return [held, gone, late, number]


def wrong() -> Any:
    """What does not fit is said on every rank, and the next one works."""
    rank = dist.get_rank()

    def made(change: Callable[[Dict | None, Dict | None], None], **how: Any) -> list[str]:
        source, target = trained(0), served(0)
        change(source, target)
        return told(lambda: stretto.torch.WeightSync(source, target, **how))

    def drop(side: int, name: str, *ranks: int) -> Callable[[Dict | None, Dict | None], None]:
        def change(source: Dict | None, target: Dict | None) -> None:
            one = (source, target)[side]
            if one is not None and (not ranks or rank in ranks):
                del one[name]

        return change

    def reshape(source: Dict | None, target: Dict | None) -> None:
        if target is not None:
            target["norm"] = cut(torch.zeros(17), mesh([2, 3] if rank < 4 else [4, 5]), Replicate())

    def other(source: Dict | None, target: Dict | None) -> None:
        if source is not None and rank == 1:
            source["up"] = cut(torch.zeros(66, 16), mesh(list(TRAINERS)), Shard(0))

    def text(source: Dict | None, target: Dict | None) -> None:
        if source is not None and rank == 1:
            source["up"] = "weights"  # type: ignore[assignment]

    def nothing(source: Dict | None, target: Dict | None) -> None:
        for one in (source, target):
            if one is not None:
                one.clear()

    found = {
        "keys": made(drop(0, "norm")),
        "keys of a rank": made(drop(0, "norm", 1)),
        "keys of a replica's rank": made(drop(1, "up", 5)),
        "shapes": made(reshape),
        "shapes of a rank": made(other),
        "no tensor": made(text),
        "nothing": made(nothing),
        "staging": made(lambda s, t: None, staging_bytes=1),
        "other staging": made(lambda s, t: None, staging_bytes=1 << (20 + (rank == 3))),
    }
    with stretto.torch.WeightSync(trained(1), served(0)) as sync:
        sync.update()
        changed = trained(2)
        if changed is not None and rank == 0:
            changed["norm"] = changed["norm"].double()
        found["changed source"] = told(lambda: sync.update(changed))
        with sync.read() as weights:
            kept = equal(weights, 1)
        found["then"] = [str(sync.update(trained(2))), str(kept)]
    return found


def mapped() -> Any:
    """Every kind of rule, on two replicas of two ranks, against making everything of whole tensors."""
    rank = dist.get_rank()
    mapping = WeightMapping.parse(yaml.safe_load(MAPPING))
    shapes = {
        "l.0.q": (16, 6), "l.0.k": (8, 6), "l.0.v": (8, 6), "l.0.gate": (12, 6), "l.0.up": (12, 6), "l.0.down": (6, 12),
        "embed": (10, 6), "big": (64, 40), "norm": (6,), "rope.inv_freq": (3,),
        **{f"expert.{e}": (5, 6) for e in range(4)},
    }  # fmt: skip
    draw = torch.Generator().manual_seed(7)
    full = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    full["big"] = full["big"].bfloat16()
    source = target = None
    if rank in TRAINERS:
        where = mesh(list(TRAINERS))
        source = {name: cut(t, where, Shard(0)) for name, t in full.items()}
    else:
        where = mesh([2, 3] if rank < 4 else [4, 5])
        f8 = torch.float8_e4m3fn
        target = {
            "l.0.qkv": empty(where, (32, 6), Shard(0)), "l.0.gate_up": empty(where, (24, 6), Shard(0)),
            "l.0.down_t": empty(where, (12, 6), Shard(0)), "experts": empty(where, (4, 5, 6), Shard(0)),
            "wide_experts": empty(where, (4, 6, 5), Shard(1)),
            "vocabulary": empty(where, (16, 6), Shard(0)), "head": empty(where, (16, 6), Shard(0)),
            "small": empty(where, (64, 40), Shard(0), f8), "small_scale": empty(where, (4, 3), Shard(0)),
            "norm": torch.empty(6),
        }  # fmt: skip
    seen = []
    with stretto.torch.MappedSync(source, target, mapping=mapping) as sync:
        for version in (1, 2):
            scaled = {name: t * version for name, t in full.items()}
            fresh = {name: cut(t, where, Shard(0)) for name, t in scaled.items()} if rank in TRAINERS else None
            number = sync.update(fresh)
            if target is None:
                seen.append(number == version)
                continue
            with sync.read() as weights:
                want = made_by_hand(scaled, rank % 2)
                same = {
                    name: bits(weights[name]) == value.contiguous().view(torch.uint8).numpy().tobytes()
                    for name, value in want.items()
                }
                seen.append(all(same.values()) and set(weights) == set(want) and weights.version == version)
    return [seen, mapping_errors(source, target, mapping)]


def empty(
    where: DeviceMesh, shape: tuple[int, ...], placement: Any, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return cut(torch.empty(shape).to(dtype), where, placement)


def made_by_hand(full: Dict, at: int) -> Dict:
    """The tensors of one rank of a replica, of whole ones."""

    def half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2)[at]

    padded = torch.cat([full["embed"], torch.zeros(6, 6)])
    value = full["big"].float()
    scales, small = torch.empty(4, 3), torch.empty(64, 40, dtype=torch.float8_e4m3fn)
    for i in range(4):
        for j in range(3):
            where = (slice(16 * i, 16 * i + 16), slice(16 * j, min(16 * j + 16, 40)))
            scales[i, j] = value[where].abs().max() / 448.0
            small[where] = (value[where] / scales[i, j]).to(torch.float8_e4m3fn)
    return {
        "l.0.qkv": torch.cat([half(full[f"l.0.{x}"]) for x in "qkv"]),
        "l.0.gate_up": torch.cat([half(full["l.0.gate"]), half(full["l.0.up"])]),
        "l.0.down_t": half(full["l.0.down"].t().contiguous()),
        "experts": half(torch.stack([full[f"expert.{e}"] for e in range(4)])),
        "wide_experts": torch.stack([full[f"expert.{e}"].t() for e in range(4)]).chunk(2, 1)[at].contiguous(),
        "vocabulary": half(padded), "head": half(padded), "small": half(small), "small_scale": half(scales),
        "norm": full["norm"],
    }  # fmt: skip


def mapping_errors(source: Any, target: Any, mapping: WeightMapping) -> Any:
    """Mappings and layouts that do not fit are refused on all ranks, before anything moves."""
    found = {}
    changes: dict[str, Callable[[Any], Any]] = {
        "layout": lambda t: {**t, "small": torch.empty(60, 40).to(torch.float8_e4m3fn)},
        "blocks": lambda t: {**t, "small": empty(t["small"].device_mesh, (48, 40), Shard(0), torch.float8_e4m3fn)},
        "fused": lambda t: {**t, "l.0.qkv": empty(t["l.0.qkv"].device_mesh, (30, 6), Shard(0))},
        "lacking": lambda t: {name: one for name, one in t.items() if name != "small_scale"},
        "two ways": lambda t: {**t, "head": torch.empty(16, 6, dtype=torch.float64)},
        "shape": lambda t: {**t, "norm": torch.empty(7)},
    }
    for name, change in changes.items():
        # One rank alone is wrong, or all servers are.
        wrong = target if target is None or (name == "lacking" and dist.get_rank() != 3) else change(target)
        found[name] = told(partial(stretto.torch.MappedSync, source, wrong, mapping=mapping))
    return found


def fails(happens: Callable[[], None], at: int) -> Any:
    """Something happens to a rank in the middle of the second update."""
    rank = dist.get_rank()
    start, calls = Mover.start, []

    def broken(self: Mover, *args: torch.Tensor) -> Any:
        calls.append(1)
        if rank == at and len(calls) == sync.num_rounds + 2:
            happens()
        return start(self, *args)

    sync = stretto.torch.WeightSync(trained(1), served(0), staging_bytes=4000)
    patch: AbstractContextManager[Any] = mock.patch.object(Mover, "start", broken)
    with patch:
        sync.update()
        first = told(lambda: sync.update(trained(2)))
    with sync.read() as weights:
        kept = [sync.version, equal(weights, 1)]
    return [first, kept, told(lambda: sync.update(trained(2))), sync.num_rounds, sync]


def raises() -> Any:
    def no() -> None:
        raise RuntimeError("no more paper")

    return fails(no, 1)[:-1]


def dies() -> Any:
    *found, sync = fails(lambda: os.kill(os.getpid(), signal.SIGKILL), LOST)
    return [*found, goes_on(sync)]


def goes_on(sync: WeightSync) -> Any:
    """Without the lost trainer, first with one replica, then with the other, which comes late."""
    rank = dist.get_rank()
    found = []
    for version, ranks in ((2, [0, 2, 3]), (3, [0, 2, 3, 4, 5])):
        if rank in ranks:
            whole = {name: numbers(name, version) for name in SHAPES} if rank == 0 else None
            sync = sync.reform(ranks, whole)
            begins = sync.version
            number = sync.update()
            with sync.read() as weights:
                found.append([begins, number, rank == 0 or equal(weights, version)])
    return found


SCENARIOS: dict[str, Callable[[], Any]] = {
    "versions_arrive": versions_arrive, "small_staging": small_staging, "casts": casts,
    "readers_see_one_version": readers_see_one_version, "old_versions": old_versions, "wrong": wrong,
    "raises": raises, "mapped": mapped,
}  # fmt: skip
ONLY = {"messages": ("small_staging", "casts"), "stretto": ("versions_arrive",)}
"""What runs without the executor, and in a job whose own backend is ours; all of it runs beside gloo."""


def main() -> None:
    folder = Path(sys.argv[1])
    port = store_port()

    def rank_main(rank: int) -> None:
        # Many processes of a busy machine.
        faulthandler.dump_traceback_later(500, exit=True)
        outcomes: dict[str, list[Any]] = {name: [] for name in SCENARIOS}
        for layout in ("gloo", "messages", "stretto"):
            absent = mock.patch("stretto.runtime.torch_backend.backend.missing", lambda: "left out")
            with absent if layout == "messages" else nullcontext():
                joined(port, layout, rank, RANKS)
                for name in ONLY.get(layout, tuple(SCENARIOS)):
                    outcomes[name].append(SCENARIOS[name]())
                dist.barrier()
                dist.destroy_process_group()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        joined(port, "dies", rank, RANKS)
        (folder / f"{rank}.json").write_text(json.dumps(outcomes | {"dies": dies()}))

    waiting = {_start(rank, rank_main): rank for rank in range(RANKS)}
    while waiting:
        process, status = os.wait()
        rank = waiting.pop(process)
        if status and rank != LOST:
            sys.exit(f"rank {rank} failed")
    lost = folder / f"{LOST}.json"
    lost.write_text(json.dumps(json.loads(lost.read_text()) | {"dies": None}))


if __name__ == "__main__":
    main()
