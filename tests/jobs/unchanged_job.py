# SPDX-License-Identifier: Apache-2.0
"""Plain data-parallel training on gloo, which knows nothing of us: ``unchanged_job.py FOLDER``.

Forked ranks train until the file `stop` is in the folder (or for STEPS steps, on the backend BACKEND), then as many
steps again on a gloo that is left as it is. With UNDECIDED no backend is ever found to be
faster, and with UNDECIDED=ours the first later turn never ends by itself.
Gradients are rounded so that every order of adding them gives the same sum: losses must be the same, bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stretto.runtime.torch_backend.current import CURRENT
from stretto.runtime.torch_backend.own_backend import OWN_BACKEND

RANKS = 2
GRAIN = 1 << 10
LIMIT_S = 500.0
PAUSE_S = 0.004
"""Between steps until told: what is waited for is mostly a planner, which has more of the processor then."""
LEFT_AS_IT_IS = "cpu:gloo,cuda:gloo"


def train(folder: Path, steps: int) -> tuple[list[float], list[tuple[bool, int, str]]]:
    """So many steps, or until told; the loss of each, and who ran it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: (gradient * GRAIN).round() / GRAIN)  # type: ignore[no-untyped-call]
    parallel = DistributedDataParallel(net, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    aside = dist.new_group(backend="gloo")
    losses: list[float] = []
    ran: list[tuple[bool, int, str]] = []
    stop = torch.zeros(1)
    begin = time.monotonic()
    while not stop.item() and (not steps or len(losses) < steps):
        enforcer: Any = CURRENT.enforcer
        ran.append((OWN_BACKEND.runs, *(number_and_side(enforcer) if enforcer is not None else (0, ""))))
        if not steps or "UNDECIDED" in os.environ:
            time.sleep(PAUSE_S)
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * len(losses) + dist.get_rank()))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(inputs), inputs.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        # Under way while the iteration ends, and perhaps another backend takes over.
        late = torch.full((100,), float(dist.get_rank() + len(losses)))
        work = dist.all_reduce(late, async_op=True)
        optimizer.step()
        assert work is not None
        work.wait()
        assert late[0].item() == 2 * len(losses) + 1
        losses.append(loss.item())
        if not steps and len(losses) % 5 == 0:
            # On a group that is not ours, and so no part of the step, whenever that is recorded.
            stop.fill_(float((folder / "stop").exists() or time.monotonic() - begin > LIMIT_S))
            dist.all_reduce(stop, dist.ReduceOp.MAX, group=aside)
    return losses, ran


def number_and_side(enforcer: Any) -> tuple[int, str]:
    """The plan of the next iteration, and who runs it instead where it is set aside."""
    trial = enforcer._trial
    return enforcer.report().number, (trial.side(enforcer._iteration) if trial is not None else None) or ""


def stay_on_ours(comparison: Any) -> None:
    """Instead of a later turn of both sides: one of ours that never ends by itself."""
    comparison._blocks, comparison._length = ["ours"], 1 << 30
    comparison._turn("ours")


def rank_main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    told: dict[str, Any] = {"losses": []}
    steps = int(os.environ.get("STEPS", "0"))
    if "BACKEND" in os.environ:
        import stretto.torch  # noqa: F401
    if "UNDECIDED" in os.environ:
        from stretto.control import compare

        compare.faster = lambda some, others: False
        if os.environ["UNDECIDED"] == "ours":
            compare.Comparison.again = stay_on_ours  # type: ignore[method-assign, assignment]
    for backend in (os.environ.get("BACKEND", "gloo"), LEFT_AS_IT_IS):
        where = f"file://{folder}/{backend.replace(':', '-')}"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=RANKS)
        losses, ran = train(folder, steps)
        told["losses"].append(losses)
        told.setdefault("ran", ran)
        steps = len(losses)
        dist.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


def main() -> None:
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(folder, rank)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
