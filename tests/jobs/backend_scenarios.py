# SPDX-License-Identifier: Apache-2.0
"""What the processes of a backend test run: every scenario on gloo and then on stretto, outcomes reported as JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from capture_scenarios import chosen, fork

import stretto.torch
from stretto.runtime.executor import join as executor_join
from stretto.runtime.torch_backend import meeting as backend_meet

Scenario = Callable[[], Any]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The same for equal shapes, dtypes and bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            state.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def run(scenarios: dict[str, Scenario], layouts: tuple[str, ...] = ("gloo", "stretto")) -> None:
    """Run all scenarios on every rank of one job, once for each layout; an outcome is a list, one for each layout.

    ``stretto:abab`` is stretto with ranks that believe to be on two hosts, taking turns.
    """
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore", FutureWarning)
    scenarios = chosen(scenarios)

    def rank_main(rank: int) -> None:
        logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
        outcomes: dict[str, list[Any]] = {name: [] for name in scenarios}
        for number, layout in enumerate(layouts):
            backend, _, hosts = layout.partition(":")
            key = (lambda host=hosts[rank]: host) if hosts else executor_join.host_key
            with mock.patch.multiple(backend_meet, host_key=key), mock.patch.multiple(executor_join, host_key=key):
                store = f"file://{folder}/store-{number}"
                dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
                for name, scenario in scenarios.items():
                    torch.manual_seed(0)
                    outcomes[name].append(scenario())
                dist.barrier()
                dist.destroy_process_group()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))

    fork(ranks, rank_main)


def is_stretto() -> bool:
    """Whether the scenario runs on our backend."""
    return isinstance(dist.group.WORLD, stretto.torch.StrettoGroup)
