# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/reshard_real.py: ours, plain messages, and gather-then-broadcast, in turn on shaped links."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from runtime_shaped_rank import hurry, measure
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stretto.torch
from stretto.resharding import Layout, Mesh, Spec, Tensor, plan_tensors
from stretto.resharding.tensors.describe import dtype_of
from stretto.resharding.tensors.plain import GatherBroadcast, PlainMessages
from stretto.resharding.tensors.reshard import _TRANSFERS
from stretto.resharding.tensors.transfer import Transfer

Side = tuple[tuple[int, ...], list[int], str]
"""Shape of a mesh, its ranks, and a spec."""


def layout(side: Side) -> Layout:
    return Layout(mesh=Mesh(shape=tuple(side[0]), devices=tuple(side[1])), spec=Spec.parse(side[2]))


def placements(side: Side) -> list[Any]:
    spec = Spec.parse(side[2])
    found: list[Any] = [Replicate() for _ in side[0]]
    for dim, axes in enumerate(spec.axes):
        for axis in axes:
            found[axis] = Shard(dim)
    return found


def mesh(side: Side) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(side[1]).view(*side[0]), _init_backend=False)


def everywhere(fine: bool) -> bool:
    """Whether it is so on all ranks."""
    word = torch.tensor([float(fine)])
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return bool(word)


def report(
    case: dict[str, Any],
    systems: dict[str, Callable[[], object]],
    check: Callable[[str], bool],
    facts: Callable[[], dict[str, Any]],
) -> None:
    """Run each system once to warm up and look at its bits, then for the clock; rank 0 prints a line for each."""
    exact = {}
    for system in case["systems"]:
        systems[system]()
        exact[system] = everywhere(check(system))
    known = facts()
    for system, same in exact.items():
        found = measure(systems[system], case["runs"])
        if dist.get_rank() == 0:
            extra = known if system == "stretto" else {}
            print(json.dumps({"case": case["name"], "system": system, "exact": same} | found | extra), flush=True)


def tensor_case(case: dict[str, Any], group: Any) -> None:
    shape, src, dst = tuple(case["shape"]), case["src"], case["dst"]
    me = dist.get_rank()
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    source = distribute_tensor(full, mesh(src), placements(src), src_data_rank=None)
    want = distribute_tensor(full, mesh(dst), placements(dst), src_data_rank=None).to_local()
    inside, holds = me in dst[1], me in src[1]
    tensors = [Tensor(shape=shape, dtype_bytes=4, src=layout(src), dst=layout(dst))]
    got = {system: torch.zeros_like(want) for system in ("send_recv", "gather_broadcast")}
    sources = [source.to_local() if holds else None]
    result: dict[str, torch.Tensor] = {}
    where, how = mesh(dst), placements(dst)

    def ours() -> None:
        if inside or holds:
            result["stretto"] = stretto.torch.reshard(source, where, how).to_local()

    targets = {system: [got[system] if inside else None] for system in got}
    systems: dict[str, Callable[[], object]] = {
        "stretto": ours,
        "send_recv": PlainMessages(tensors, sources, targets["send_recv"]),
        "gather_broadcast": GatherBroadcast(tensors, sources, targets["gather_broadcast"], group),
    }

    def facts() -> dict[str, Any]:
        return known(next(reversed(_TRANSFERS.by_layouts.values()))[1]) if me == 0 else {}

    def check(system: str) -> bool:
        return not inside or torch.equal(result[system] if system == "stretto" else got[system], want)

    report(case, systems, check, facts)


def known(transfer: Transfer) -> dict[str, Any]:
    """The simulated time of what ran, and the bound on all rounds together, both for payload."""
    share = float(sys.argv[2])
    plans, helpers = transfer.plans, tuple(transfer.carrier.device.values())
    whole = plan_tensors(transfer._tensors, plans[0].cluster, helpers=helpers)
    return {
        "predicted_us": sum(each.mover.predicted_us(share) for each in transfer.rounds),
        "bound_us": whole.bound_us,
        "tasks": sum(len(plan.tasks) for plan in plans),
        "executor": all(each.mover.handle is not None for each in transfer.rounds),
    }


class Block(torch.nn.Module):
    """One layer of a transformer, as far as its weights go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)
        self.norm = torch.nn.LayerNorm(width)


def model(width: int, layers: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Block(width) for _ in range(layers)))


def state_dict_case(case: dict[str, Any]) -> None:
    """FSDP2 over the trainers to tensor parallelism in each replica."""
    width, layers, trainers, replicas = (case[key] for key in ("width", "layers", "trainers", "replicas"))
    me = dist.get_rank()
    train_mesh = DeviceMesh("cpu", trainers)
    serve_meshes = [DeviceMesh("cpu", ranks) for ranks in replicas]
    ranks = sorted([*trainers, *(r for those in replicas for r in those)])
    funnel = dist.new_group([trainers[0], *(r for those in replicas for r in those)])
    source = target = None
    if me in trainers:
        trainer: Any = model(width, layers, 1)
        for block in trainer:
            fully_shard(block, mesh=train_mesh)
        fully_shard(trainer, mesh=train_mesh)
        source = trainer.state_dict()
    want: dict[str, torch.Tensor] = {}
    for where, those in zip(serve_meshes, replicas, strict=True):
        if me in those:
            server, right = model(width, layers, 2), model(width, layers, 1)
            each: Any
            for each in (server, right):
                for block in each:
                    plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(),
                            "down": RowwiseParallel()}  # fmt: skip
                    parallelize_module(block, where, plan)
            target, want = server.state_dict(), right.state_dict()
    sync = stretto.torch.WeightSync(source, target, ranks=ranks) if me in ranks else None
    moves = sync._state.transfer.moves if sync is not None else ()
    tensors = [
        Tensor(name=m.name, shape=m.dst.plan_shape, dtype_bytes=dtype_of(m.dst.dtype).itemsize,
               src=m.src.layout(m.src_meshes), dst=m.dst.layout(m.dst_meshes))
        for m in moves
    ]  # fmt: skip
    sources = [_local((source or {}).get(m.name)) for m in moves]
    got = {
        system: {n: torch.zeros_like(_local(t)) for n, t in (target or {}).items()}
        for system in ("send_recv", "gather_broadcast")
    }
    targets = {system: [got[system].get(m.name) for m in moves] for system in got}

    def ours() -> None:
        if sync is not None:
            sync.update()

    systems: dict[str, Callable[[], object]] = {"stretto": ours}
    if tensors:
        systems["send_recv"] = PlainMessages(tensors, sources, targets["send_recv"])
        systems["gather_broadcast"] = GatherBroadcast(tensors, sources, targets["gather_broadcast"], funnel)
    else:
        systems |= {"send_recv": lambda: None, "gather_broadcast": lambda: None}

    def check(system: str) -> bool:
        if system != "stretto":
            return all(torch.equal(got[system][n], _local(t)) for n, t in want.items())
        if sync is None:
            return True
        with sync.read() as weights:
            return all(torch.equal(_local(weights[n]), _local(t)) for n, t in want.items())

    def facts() -> dict[str, Any]:
        return known(sync._state.transfer) if sync is not None and me == 0 else {}

    report(case, systems, check, facts)
    if sync is not None:
        sync.close()


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    """The command line has what is to be measured, and whether ranks go before all other work."""
    cases, urgent = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups = {}
    if urgent:
        hurry()
    for case in cases:
        if case["kind"] == "state_dict":
            state_dict_case(case)
            continue
        src, dst = case["src"], case["dst"]
        ranks = tuple(sorted({src[1][0], *dst[1]}))
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks))
        tensor_case(case, groups[ranks])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
