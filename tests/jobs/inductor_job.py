# SPDX-License-Identifier: Apache-2.0
"""Graphs with functional collectives, captured on PyTorch's fake process group, and what Inductor is told of them."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor import config
from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _runtime_estimation

import stretto.torch
from stretto.cluster import Cluster
from stretto.runtime.torch_backend.inductor import collective_of

WORLD, COUNT = 8, 1 << 20


def captured(pairs: Any, world: Any) -> Any:
    """A step with a collective of every kind, and matrix products that could hide them."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        y = weight @ weight
        total = funcol.all_reduce(x, "sum", world)
        parts = funcol.all_gather_tensor(x, 0, pairs)
        shard = funcol.reduce_scatter_tensor(x, "sum", 0, world)
        swapped = funcol.all_to_all_single(x, None, None, world)
        told = funcol.broadcast(x, 0, world)
        z = y @ weight
        return [y @ z, z, total + 1, parts + 1, shard + 1, swapped + 1, told + 1]

    with FakeTensorMode() as mode:
        inputs = (mode.from_tensor(torch.empty(COUNT)), mode.from_tensor(torch.empty(256, 256)))
        return make_fx(step)(*inputs)


def scheduled(graph: Any, estimate: Any) -> list[str]:
    """The order of collectives, their waits and the products, as Inductor's scheduler puts them."""
    # It wants to know how fast a GPU's memory is, which is asked of Triton.
    setattr(_runtime_estimation, "get_gpu_dram_gbps", lambda: 1000.0)  # noqa: B010, its stubs have no such name
    done = schedule_overlap_bucketing(
        graph, custom_runtime_estimation=estimate, compute_estimator="analytical", max_memory_increase_gb=100.0,
        max_memory_increase_ratio=100.0, pre_bucketing_fsdp_collectives=False,
    )  # fmt: skip
    names = [str(node.target) for node in done.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if "c10d" in name or "mm" in name]


def main(table: str) -> None:
    """Report as JSON."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    pairs: Any = dist.new_group([0, 1])
    graph = captured(pairs, dist.group.WORLD)
    cluster = Cluster.load(f"ring:{WORLD}")
    options: Any = config.aten_distributed_optimizations
    before = options.custom_runtime_estimation
    costs = stretto.torch.inductor_costs(cluster)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    found = {collective_of(node): costs(node) for node in nodes if collective_of(node)}
    latency = {collective_of(node): costs(node, 0) for node in nodes if collective_of(node)}
    measured = stretto.torch.inductor_costs(cluster, costs=table, install=False)
    told = {
        "found": found, "latency": latency,
        "others": [costs(node) for node in nodes if not collective_of(node)],
        "measured": {collective_of(node): measured(node) for node in nodes if collective_of(node)},
        "used": options.custom_runtime_estimation is costs,
        "keys": [costs.uuid() == stretto.torch.inductor_costs(cluster, install=False).uuid(),
                 costs.uuid() == measured.uuid()],
        "order": scheduled(graph, lambda node, size: costs(node, size) if collective_of(node) else 1.0),
    }  # fmt: skip
    costs.remove()
    told["put_back"] = options.custom_runtime_estimation is before
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
