# SPDX-License-Identifier: Apache-2.0
"""`pipeline.py --only meshes`: pipelines over device meshes of real processes, behind shaped links.

The cross-mesh paper's cases with a hundredth of its bytes on links of a hundredth of its rate (100 Mbit/s for 10
Gbit/s), so that a transfer takes as long as there. A stage's time is the paper's too, from the roofline of a V100 as in
`--only fig7`, and is a pause: processors that compute would be shared by all hosts of the lab. 8 of the paper's 32 or
64 micro-batches. Each stage has a host of four ranks: (data, tensor) parallel (2, 2), (4, 1) or (1, 4).

`send_recv` sends each piece from a holder to everyone who lacks it, `gather_broadcast` brings tensors to one rank,
which broadcasts them; both hold the stage (1F1B). `1f1b` moves them by our programs, and waits. `overlap`,
`eager_1f1b` and `stretto` (the schedule that the search finds under the paper's memory) do not. `signal` is
eager-1F1B with one number in place of the tensors: what free communication would give. `ratio` is `send_recv`'s time
over a system's, `of_signal` that of free communication over it; `predicted_us` the simulation of schedule and
programs, from times of stages that were measured one by one. `cpu` is the ranks' own share of the processors.
`gradients` is the largest deviation from those of one process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, pstdev
from typing import Any

from common import Row, announce

from stretto.lab import Lab, unavailable
from stretto.lab.layout import wire_bytes
from stretto.lab.network import burst_bytes
from stretto.pipeline import Schedule, StageCosts, StageMemory, eager_1f1b, one_f_one_b, search, simulate
from stretto.pipeline.models import GPU_BYTES, RESERVED_BYTES, build, case
from stretto.workload.catalog.cross_mesh import crossing

RANK = Path(__file__).with_name("pipeline_mesh_rank.py")
SMALLER = 100
RATE_MBIT = 10_000 // SMALLER
MICROBATCHES, QUICK_MICROBATCHES = 8, 3
STEPS = 3
RANKS_PER_HOST = 4
CASES: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "GPT, (2,2) to (2,2)": ("gpt_222", ((2, 2), (2, 2))),
    "GPT, (2,2) to (4,1)": ("gpt_222", ((2, 2), (4, 1))),
    "GPT, (4,1) to (4,1)": ("gpt_412", ((4, 1), (4, 1))),
    "U-Transformer, (4,1) to (4,1)": ("utrans", ((4, 1), (4, 1))),
    "GPT, (2,2) to (4,1) to (1,4)": ("gpt_222", ((2, 2), (4, 1), (1, 4))),
    "U-Transformer, (4,1) to (2,2) to (4,1)": ("utrans", ((4, 1), (2, 2), (4, 1))),
}
"""The paper's case and the meshes of the stages; of three stages the first two are as the paper's first."""
QUICK = ("U-Transformer, (4,1) to (4,1)",)


def described(name: str, quick: bool) -> dict[str, Any]:
    """What the ranks are told: meshes, widths of the tensors between stages, times of stages."""
    paper, shapes = CASES[name]
    what = case(paper)
    built = build(what)
    stages = len(shapes)
    grids = [
        [[RANKS_PER_HOST * at + row * shape[1] + column for column in range(shape[1])] for row in range(shape[0])]
        for at, shape in enumerate(shapes)
    ]
    times = {
        key: [getattr(built.costs, key)[int(at == stages - 1)] for at in range(stages)]
        for key in ("forward_us", "input_us", "weight_us")
    }
    # Whole numbers of four bytes: the rows of the micro-batch stay, what belongs to a row is a hundredth.
    numbers = []
    for shape in crossing(list(what.layers), what.cut):
        size = what.dtype_bytes
        for extent in shape:
            size *= extent
        numbers.append(round(size / 4 / SMALLER))
    return {
        "grids": grids, "rows": [what.microbatch], "widths": numbers, "steps": 1 if quick else STEPS,
        "microbatches": QUICK_MICROBATCHES if quick else MICROBATCHES, "measured": True,
        "memory": [built.memory[int(at == stages - 1)] for at in range(stages)], **times,
    }  # fmt: skip


def as_run(costs: StageCosts) -> StageCosts:
    """PyTorch's first stage has no input to differentiate for: its I does nothing, its W everything."""
    inputs, weights = list(costs.input_us), list(costs.weight_us)
    inputs[0], weights[0] = 0.0, inputs[0] + weights[0]
    return replace(costs, input_us=tuple(inputs), weight_us=tuple(weights))


def planned_costs(about: dict[str, Any], transfer_us: float) -> StageCosts:
    """The costs for which a schedule is searched before anything has run."""
    between = (transfer_us,) * (len(about["grids"]) - 1)
    return as_run(StageCosts(
        forward_us=tuple(about["forward_us"]), input_us=tuple(about["input_us"]),
        weight_us=tuple(about["weight_us"]), activation_us=between, gradient_us=between,
    ))  # fmt: skip


def systems(about: dict[str, Any], memory: list[StageMemory]) -> dict[str, tuple[Schedule, str, bool]]:
    """Schedule, kind of lane and whether transfers hold the stage, of every system."""
    stages, count = len(about["grids"]), about["microbatches"]
    nbytes = 4 * about["rows"][0] * sum(about["widths"])
    found = search(planned_costs(about, 8 * wire_bytes(nbytes) / RATE_MBIT), count, memory=memory,
                   cap_bytes=GPU_BYTES - RESERVED_BYTES, evaluations=300)  # fmt: skip
    plain, eager = one_f_one_b(stages, count), eager_1f1b(stages, count)
    return {
        "send_recv": (plain, "send_recv", True),
        "gather_broadcast": (plain, "gather_broadcast", True),
        "1f1b": (plain, "program", True),
        "overlap": (plain, "program", False),
        "eager_1f1b": (eager, "program", False),
        "stretto": (found.schedule, "program", False),
        "signal": (eager, "signal", False),
    }


def measured_costs(about: dict[str, Any], line: dict[str, Any], edges: dict[str, float]) -> StageCosts:
    """Times of stages as measured one by one, of transfers as simulated, less what a shaper lets through at once."""
    burst_us = burst_bytes(RATE_MBIT * 1_000_000) * 8 / RATE_MBIT
    times = line["stage_times_us"]
    stages = range(len(times))
    weight = [about["weight_us"][at] for at in stages]
    return as_run(StageCosts(
        forward_us=tuple(times[at][0] for at in stages),
        input_us=tuple(times[at][1] - weight[at] for at in stages),
        weight_us=tuple(weight),
        reduce_us=tuple(times[at][2] for at in stages),
        activation_us=tuple(max(0.0, edges[f"{at} {at + 1}"] - burst_us) for at in stages[:-1]),
        gradient_us=tuple(max(0.0, edges[f"{at + 1} {at}"] - burst_us) for at in stages[:-1]),
    ))  # fmt: skip


def heard(name: str, rank: int, stream: str, text: str) -> None:
    """Say what a system took as soon as it has run: the table comes when all have."""
    if rank == 0 and stream == "stdout" and '"system"' in text:
        line = json.loads(text)
        announce({"case": name, "system": line["system"], "step_us": median(line["times_us"]), "cpu": line["cpu"]})


def run_case(name: str, quick: bool) -> list[Row]:
    """One lab, all systems in turn."""
    about = described(name, quick)
    memory = about.pop("memory")
    chosen = systems(about, memory)
    about |= {"urgent": True, "systems": [
        {"name": system, "csv": schedule.to_csv(), "lane": lane, "blocking": blocking}
        for system, (schedule, lane, blocking) in chosen.items()
    ]}  # fmt: skip
    share = wire_bytes(1 << 20) / (1 << 20)
    hosts = len(about["grids"])
    with (
        tempfile.NamedTemporaryFile(suffix=".yaml") as truth,
        Lab(hosts=hosts, ranks_per_host=RANKS_PER_HOST, uplinks={"eth": f"{RATE_MBIT}mbit"}) as lab,
    ):
        lab.cluster().save(truth.name)
        command = [sys.executable, str(RANK), json.dumps(about), repr(share)]
        done = lab.run(command, env={"STRETTO_CLUSTER": truth.name}, timeout_s=1200, on_line=partial(heard, name))
    if done.exit_code:
        sys.exit(f"meshes: {done.why}")
    lines = {line["system"]: line for line in map(json.loads, done.outputs[0].splitlines()) if "system" in line}
    costs = measured_costs(about, lines["send_recv"], lines["1f1b"]["edges_us"])
    base = median(lines["send_recv"]["times_us"])
    free = median(lines["signal"]["times_us"])
    rows: list[Row] = []
    for system, (schedule, lane, blocking) in chosen.items():
        line = lines[system]
        took = median(line["times_us"])
        predicted = None
        if lane in ("program", "signal"):
            given = costs.free() if lane == "signal" else costs
            predicted = simulate(schedule, given, transport="blocking" if blocking else "async").total_us
        rows.append({
            "case": f"{name}, {RANKS_PER_HOST * hosts} ranks", "system": system, "step_us": took,
            "deviation": pstdev(line["times_us"]) / took, "predicted_us": predicted,
            "error": took / predicted - 1 if predicted else None, "ratio": base / took, "of_signal": free / took,
            "gradients": None if lane == "signal" else line["wrong"], "cpu": line["cpu"],
            "machine_cpu": line["machine_cpu"], "load": os.getloadavg()[0],
        })  # fmt: skip
    return rows


def meshes(quick: bool, ranks: int) -> list[Row]:
    """The cases of so many ranks; none where no lab can be built (one line says why)."""
    if reason := unavailable():
        print(f"meshes: skipped: {reason}", file=sys.stderr)
        return []
    names = [name for name in (QUICK if quick else CASES) if RANKS_PER_HOST * len(CASES[name][1]) == ranks]
    return [row for name in names for row in run_case(name, quick)]
