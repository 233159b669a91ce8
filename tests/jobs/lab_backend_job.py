# SPDX-License-Identifier: Apache-2.0
"""A rank in the lab: every collective on whole numbers by gloo and by us, and a recorded one; rank 0 reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stretto.torch
from stretto.report import save_timeline
from stretto.runtime.torch_backend.torch_versions import all_gather_single, reduce_scatter_single

COUNT = 4 * 5003
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def result(kind: str, group: Any) -> torch.Tensor:
    """What a collective of this rank's whole numbers gives."""
    x = torch.randint(-999, 999, (COUNT,), generator=torch.Generator().manual_seed(dist.get_rank())).float()
    y, part = torch.zeros(COUNT), COUNT // dist.get_world_size()
    if kind == "all_reduce":
        dist.all_reduce(x, group=group)
    elif kind == "all_gather":
        all_gather_single(y, x[:part], group=group)
    elif kind == "reduce_scatter":
        reduce_scatter_single(y[:part], x, group=group)
    elif kind == "all_to_all":
        dist.all_to_all_single(y, x, group=group)
    else:
        dist.broadcast(x, 1, group=group)
    return x if kind in ("all_reduce", "broadcast") else y


def main() -> None:
    """Every rank must agree for the report to say so."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = dist.new_group(backend="stretto")
    same = torch.tensor([float(torch.equal(result(kind, ours), result(kind, None))) for kind in KINDS])
    dist.all_reduce(same, dist.ReduceOp.MIN)
    with stretto.torch.record() as recording:
        for kind in KINDS:
            result(kind, ours)
    if dist.get_rank() == 0:
        save_timeline(recording.timeline, Path(sys.argv[1]))
        programs = {choice.op: (choice.program, choice.why) for choice in stretto.torch.choices()}
        print(json.dumps({"same": dict(zip(KINDS, same.bool().tolist(), strict=True)), "programs": programs}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
