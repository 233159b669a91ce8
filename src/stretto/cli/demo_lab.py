# SPDX-License-Identifier: Apache-2.0
"""The last step of ``stretto demo``: one collective for real, on hosts behind shaped uplinks, beside its prediction.

This module is also what every rank runs (``python -m stretto.cli.demo_lab``): only there is torch imported.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from ..errors import Infeasible, StrettoError

HOSTS, RANKS, RATE, ORDER = 2, 2, "200mbit", "interleaved"
NBYTES = 4 << 20
RUNS = 3
LEAD_S = 0.03
TIMEOUT_S = 600.0
"""It takes seconds, and minutes on a machine at a load of 60."""


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """What was measured, and what had been predicted for the program that ran."""

    program: str
    predicted_us: float
    stretto_us: float
    gloo_us: float


def missing() -> str | None:
    """Why nothing can be run here, in one line; None where it can."""
    from ..lab import unavailable
    from ..runtime.executor.executor import load_native

    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'stretto[torch]')"
    try:
        load_native()
    except StrettoError as error:
        return str(error)
    return unavailable()


def real_run(cluster_file: Path, trace_file: Path) -> RealRun:
    """An all-reduce in the lab, by gloo and by us; leaves the lab's cluster, and rank 0's measured timeline."""
    from ..lab import Lab
    from ..lab.layout import wire_bytes
    from ..programs import Program
    from ..programs.lower import lower
    from ..runtime.executor.executor import far_bytes
    from ..runtime.torch_backend.prediction import predict
    from ..runtime.torch_backend.selection import Selector

    with Lab(hosts=HOSTS, ranks_per_host=RANKS, uplinks={"eth": RATE}, order=ORDER) as lab:
        cluster = lab.cluster()
        cluster.save(cluster_file)
        command = [sys.executable, "-m", __name__, str(trace_file.resolve())]
        done = lab.run(command, env={"STRETTO_CLUSTER": str(cluster_file.resolve())}, timeout_s=TIMEOUT_S)
        hosts = [str(lab.host_of(rank)) for rank in range(lab.layout.world_size)]
    if done.timed_out:
        raise Infeasible(f"the ranks took longer than {TIMEOUT_S:g} s; is the machine busy?")
    if done.exit_code:
        first, *more = done.why.splitlines()
        raise Infeasible(" ".join([first.partition(":")[0] + ":", more[-1]]) if more else first)
    found = json.loads(done.outputs[0].splitlines()[-1])
    program = Selector(range(len(hosts)), hosts, cluster=cluster).pick("all_reduce", NBYTES, in_place=True).program
    lowered = lower(program) if isinstance(program, Program) else program
    message_bytes = round(wire_bytes(far_bytes(lowered)))
    predicted_us = predict(lowered, cluster, nbytes=wire_bytes(NBYTES), message_bytes=message_bytes).total_us
    return RealRun(
        program=found["program"], predicted_us=predicted_us, stretto_us=found["stretto"], gloo_us=found["gloo"]
    )


def rank_main(trace_file: Path) -> None:
    """One rank; all share the machine's clock, so a run begins at one moment and ends with the last rank."""
    import torch
    import torch.distributed as dist

    import stretto.torch

    from ..report import write_perfetto

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"stretto": dist.new_group(backend="stretto"), "gloo": None}
    tensor = torch.zeros(NBYTES // 4)
    found: dict[str, str | float] = {}
    for system, group in groups.items():
        dist.all_reduce(tensor, group=group)
        taken = []
        for _ in range(RUNS):
            start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
            dist.all_reduce(start, dist.ReduceOp.MAX)
            time.sleep(max(0.0, float(start) - time.monotonic()))
            dist.all_reduce(tensor, group=group)
            end = torch.tensor([time.monotonic()], dtype=torch.float64)
            dist.all_reduce(end, dist.ReduceOp.MAX)
            taken.append((float(end) - float(start)) * 1e6)
        found[system] = median(taken)
    with stretto.torch.record() as recording:
        dist.all_reduce(tensor, group=groups["stretto"])
    choice = stretto.torch.last_choice()
    if dist.get_rank() == 0 and choice is not None:
        write_perfetto(recording.timeline, trace_file)
        print(json.dumps({**found, "program": choice.program}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
