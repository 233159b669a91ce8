# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/nccl_real.py: NCCL's programs and ours, each as a group of the backend with its own table."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from runtime_shaped_rank import call, hurry, measure

import stretto.torch


def main() -> None:
    """Cases are [collective, bytes, runs, table of each system]; rank 0 prints a line of JSON for each and system."""
    cases = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups: dict[str, Any] = {}
    for _, _, _, systems in cases:
        for table in systems.values():
            if table not in groups:
                # A group reads its table when it is made.
                os.environ["STRETTO_TABLE"] = table
                groups[table] = dist.new_group(backend="stretto")
    hurry()
    ranks = dist.get_world_size()
    for kind, nbytes, times, systems in cases:
        count = nbytes // 4 // ranks * ranks
        for system, table in systems.items():
            group = groups[table]
            x, y = torch.ones(count), torch.zeros(count)
            call(kind, x, y, group)
            same = bool((x == ranks).all()) if kind == "all_reduce" else bool((y == 1).all())
            choice = stretto.torch.last_choice()
            found = measure(partial(call, kind, x, y, group), times)
            if dist.get_rank() == 0:
                what = {"system": system, "collective": kind, "nbytes": nbytes, "exact": same}
                print(json.dumps(what | {"program": choice.program if choice else ""} | found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
