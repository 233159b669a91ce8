# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: the cross-mesh paper's end-to-end figures simulated, its memory, the search, and a real pipeline.

Cases: `fig7` (GPT with two parallel configurations and the U-Transformer), `fig9` (overlap and eager-1F1B by number of
micro-batches), `memory` (what is recomputed and held at each stage), `search` (warm-ups and delays against the lower
bound), `real` (two hosts in the lab, a model with a skip connection, trained under PyTorch's own runtime; all systems
give the same losses), `meshes` (stages that are device meshes, see `pipeline_mesh.py`). `ratio` is always to the case's
baseline: Alpa, broadcast, or 1F1B with blocking transfers.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from common import Case, Row, run_cases
from pipeline_mesh import meshes

from stretto.lab import Lab, unavailable
from stretto.pipeline import (
    StageCosts,
    StageMemory,
    eager_1f1b,
    one_f_one_b,
    peak_bytes,
    search,
    simulate,
    zb_h1,
    zb_h2,
)
from stretto.pipeline.models import CASES, SYSTEMS, build, case, evaluate

RANK = Path(__file__).parent / "pipeline_rank.py"
PAPER = {"gpt_222": 1.1, "gpt_412": 1.1, "utrans": 1.5}


def fig7(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for name in CASES:
        built = build(case(name))
        results = {system: evaluate(built, system) for system in SYSTEMS}
        for system, result in results.items():
            rows.append({
                "case": f"fig7 {name}", "system": system, "iteration_us": result.iteration_us, "tflops": result.tflops,
                "ratio": results["alpa"].iteration_us / result.iteration_us,
                "of_free": results["upper_bound"].iteration_us / result.iteration_us,
                "of_bound": result.bound_us / result.iteration_us,
                "paper_ratio": PAPER[name] if system == "eager_1f1b" else None,
            })  # fmt: skip
    return rows


def fig9(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for count in (2, 4, 32):
        built = build(case("utrans").with_batches(count))
        results = {system: evaluate(built, system) for system in ("broadcast", "overlap", "eager_1f1b", "stretto")}
        before = None
        for system, result in results.items():
            rows.append({
                "case": f"fig9 utrans, {count} micro-batches", "system": system, "iteration_us": result.iteration_us,
                "tflops": result.tflops, "ratio": results["broadcast"].iteration_us / result.iteration_us,
                "over_previous": before / result.iteration_us if before else None,
                "paper_over_previous": {"overlap": 1.3, "eager_1f1b": 1.15}.get(system) if count == 32 else None,
            })  # fmt: skip
            before = result.iteration_us
    return rows


def memory(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for name, what in CASES.items():
        built = build(what)
        for schedule in (one_f_one_b(2, what.microbatches), eager_1f1b(2, what.microbatches)):
            peaks = peak_bytes(schedule, built.memory)
            for stage, held in enumerate(built.memory):
                rows.append({
                    "case": f"memory {name}, stage {stage}", "system": schedule.name,
                    "recomputed_layers": len(built.recomputed[stage]), "layers": len(what.stages[stage]),
                    "fixed_gb": held.fixed_bytes / 1e9, "per_microbatch_gb": held.activation_bytes / 1e9,
                    "peak_gb": peaks[stage] / 1e9,
                    "backward_over_forward": (built.costs.input_us[stage] + built.costs.weight_us[stage])
                    / built.costs.forward_us[stage],
                })  # fmt: skip
    return rows


def searching(quick: bool) -> list[Row]:
    rows: list[Row] = []
    sizes = [(2, 16, 6.0, None), (4, 16, 4.0, None), (4, 16, 4.0, 6), (4, 16, 4.0, 4)]
    if not quick:
        sizes += [(8, 32, 4.0, None), (8, 32, 4.0, 10)]
    for stages, microbatches, transfer, room in sizes:
        costs = StageCosts.even(stages, forward_us=10.0, transfer_us=transfer)
        cap = float("inf") if room is None else float(room)
        about = f"search {stages} stages x {microbatches}, transfer {transfer:g}, room {room or 'any'}"
        begin = time.perf_counter()
        found = search(costs, microbatches, memory=[StageMemory(activation_bytes=1.0)] * stages, cap_bytes=cap,
                       evaluations=300 if quick else 1500)  # fmt: skip
        spent = time.perf_counter() - begin
        base = simulate(one_f_one_b(stages, microbatches), costs, transport="blocking").total_us
        rows.append({
            "case": about, "system": "stretto", "time_us": found.total_us, "bound_us": found.bound_us,
            "ratio": base / found.total_us, "of_bound": found.bound_us / found.total_us, "search_s": spent,
            "evaluations": found.evaluations, "most_in_flight": max(found.peak_bytes),
        })  # fmt: skip
        for maker in (one_f_one_b, eager_1f1b, zb_h1, zb_h2):
            schedule = maker(stages, microbatches)
            deep = max(peak_bytes(schedule, [StageMemory(activation_bytes=1.0)] * stages))
            if deep <= cap:
                total = simulate(schedule, costs).total_us
                rows.append({
                    "case": about, "system": schedule.name, "time_us": total, "bound_us": found.bound_us,
                    "ratio": base / total, "of_bound": found.bound_us / total, "most_in_flight": deep,
                })  # fmt: skip
    return rows


REAL = ("torch_1f1b", "1f1b", "overlap", "eager_1f1b", "eager_1f1b+delay")
RATE_MBIT = 300
MICROBATCHES, ROWS, WIDTH, DEPTH = 8, 256, 512, 6


def real(quick: bool) -> list[Row]:
    if reason := unavailable():
        print(f"real: skipped: {reason}", file=sys.stderr)
        return []
    rounds, iterations = (1, 4) if quick else (4, 5)
    command = [sys.executable, str(RANK), "--systems", ",".join(REAL), "--json", "--rounds", str(rounds)]
    command += ["--iterations", str(iterations), "--microbatches", str(MICROBATCHES)]
    command += ["--rows", str(ROWS), "--width", str(WIDTH), "--depth", str(DEPTH)]
    with Lab(hosts=2, ranks_per_host=1, uplinks={"eth": f"{RATE_MBIT}mbit"}) as lab:
        done = lab.run(command, timeout_s=400)
    if done.exit_code:
        sys.exit(f"real: {done.why}")
    said = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in done.outputs]
    # The best of all iterations: whatever else runs on this machine only ever adds to a time.
    forward = tuple(min(found["forward_us"] for found in rank) for rank in said)
    half = tuple(min(found["backward_us"] for found in rank) / 2 for rank in said)
    # Two tensors of 4-byte numbers: what the first stage ends with, and the skip connection.
    wire = (2 * ROWS * WIDTH * 4 * 8 / RATE_MBIT,)
    costs = StageCosts(forward_us=forward, input_us=half, weight_us=half, activation_us=wire, gradient_us=wire)
    # PyTorch's first stage has no input to differentiate for: its I does nothing, its W everything.
    split = replace(costs, input_us=(0.0, half[1]), weight_us=(2 * half[0], half[1]))
    plain = one_f_one_b(2, MICROBATCHES)
    predicted = {
        "1f1b": simulate(plain, costs, transport="blocking").total_us,
        "overlap": simulate(plain, costs).total_us,
        "eager_1f1b": simulate(eager_1f1b(2, MICROBATCHES), costs).total_us,
        "eager_1f1b+delay": simulate(eager_1f1b(2, MICROBATCHES, delay=1), split).total_us,
    }
    runs = {system: [found for found in said[1] if found["system"] == system] for system in REAL}
    spent_us = {s: 1e6 * min(t for found in each for t in found["times_s"][1:]) for s, each in runs.items()}
    losses = {system: each[0]["losses"] for system, each in runs.items()}
    return [
        {
            "case": f"real, {RATE_MBIT} Mbit/s, {MICROBATCHES} micro-batches", "system": system,
            "iteration_us": spent_us[system], "predicted_us": predicted.get(system),
            "ratio": spent_us["1f1b"] / spent_us[system],
            "predicted_ratio": predicted["1f1b"] / predicted[system] if system in predicted else None,
            "last_loss": f"{losses[system][-1]:.7f}",
            "same_losses": "bit for bit" if losses[system] == losses["1f1b"] else "to 1e-6"
            if all(abs(a - b) < 1e-6 for a, b in zip(losses[system], losses["1f1b"], strict=True)) else "no",
        }
        for system in REAL
    ]  # fmt: skip


PARTS: dict[str, Case] = {"fig7": fig7, "fig9": fig9, "memory": memory, "search": searching, "real": real,
         "meshes 8": partial(meshes, ranks=8), "meshes 12": partial(meshes, ranks=12)}  # fmt: skip


if __name__ == "__main__":
    run_cases(__file__, __doc__, "pipelines", PARTS)
