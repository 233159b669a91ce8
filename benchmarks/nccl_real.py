# SPDX-License-Identifier: Apache-2.0
"""Ours over NCCL's ring and tree with real bytes: the communication of three models' steps in the lab.

NCCL's own library needs GPUs. Here its algorithms, as docs/algorithms.md builds them, and ours run on one executor, on
two hosts of four ranks behind shaped uplinks: a table of one program for each of NCCL's (`STRETTO_TABLE`), and what
the backend chooses by itself. The calls are those of `nccl.py --only models`: gradients of Transformer-XL and BERT-base
in buckets of 25 MiB, the all-to-all of 6 MB and the all-reduce of 256 MB of the mixture of experts. Each call is timed
by itself, medians; a step is as many of them as the model has. `ratio` is the time over ours; `predicted_us` the
simulation of the program that ran, with the executor's messages, and `error` how far the time is from it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median, pstdev
from typing import Any

from common import Row, run_cases
from nccl import MODELS

import stretto as st
from stretto.lab import Lab, unavailable
from stretto.lab.layout import wire_bytes
from stretto.programs import Program
from stretto.programs.formats import load_program, save_program
from stretto.programs.lower import lower
from stretto.runtime.executor.executor import far_bytes
from stretto.runtime.torch_backend.prediction import predict
from stretto.runtime.torch_backend.selection import Selector

JOB = Path(__file__).with_name("nccl_real_rank.py")
HOSTS, WIDTH, UPLINK = 2, 4, "400mbit"
RUNS, QUICK_RUNS = 5, 1
LONG_BYTES, LONG_RUNS = 1 << 26, 2
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "nccl_ring": ("all_reduce", {}), "nccl_tree": ("all_reduce", {"pattern": "balanced"}), "direct": ("all_to_all", {}),
}  # fmt: skip
"""NCCL's programs: the collective that each does, and options."""


def tables(folder: Path, cluster: st.Cluster) -> dict[str, Path]:
    """One table for each of NCCL's programs."""
    found = {}
    for name, (kind, options) in THEIRS.items():
        table = folder / name
        table.mkdir()
        inside: dict[str, Any] = {"in_place": True} if kind == "all_reduce" else {}
        program = st.algorithm(name, kind, cluster.num_devices, cluster=cluster, **options, **inside)
        save_program(program, table / "program.txt")
        index = {"collective": kind, "rows": [{"file": "program.txt", "min_bytes": 0, "max_bytes": 0}]}
        (table / "index.json").write_text(json.dumps(index))
        found[name] = table
    return found


def measured(quick: bool) -> tuple[list[Row], dict[tuple[str, str, int], Program], st.Cluster]:
    """Times of all calls by all systems, and what ran."""
    calls = list(dict.fromkeys((kind, nbytes) for parts in MODELS.values() for kind, nbytes, _ in parts))
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(hosts=HOSTS, ranks_per_host=WIDTH, uplinks={"eth": UPLINK}) as lab,
    ):
        cluster, folder = lab.cluster(), Path(name)
        cluster.save(folder / "truth.yaml")
        made = tables(folder, cluster)
        cases = [
            (kind, nbytes, QUICK_RUNS if quick else LONG_RUNS if nbytes >= LONG_BYTES else RUNS,
             {"stretto": "", **{name: str(made[name]) for name in made if THEIRS[name][0] == kind}})
            for kind, nbytes in calls
        ]  # fmt: skip
        environment = {"STRETTO_CLUSTER": str(folder / "truth.yaml")}
        done = lab.run([sys.executable, str(JOB), json.dumps(cases)], env=environment, timeout_s=1200)
        if done.exit_code:
            sys.exit(done.why)
        hosts = [str(lab.host_of(rank)) for rank in range(lab.layout.world_size)]
        ran = {}
        for kind, nbytes, _, systems in cases:
            for system, table in systems.items():
                if table:
                    program = load_program(Path(table) / "program.txt")
                else:
                    selector = Selector(range(len(hosts)), hosts, cluster=cluster)
                    program = selector.pick(kind, nbytes, in_place=kind == "all_reduce").program
                assert isinstance(program, Program)
                ran[system, kind, nbytes] = program
    return [json.loads(line) for line in done.outputs[0].splitlines() if line.startswith("{")], ran, cluster


def call_rows(lines: list[Row], ran: dict[tuple[str, str, int], Program], cluster: st.Cluster) -> list[Row]:
    """A row for each call and system."""
    rows: list[Row] = []
    for line in lines:
        kind, nbytes = line["collective"], line["nbytes"]
        program = ran[line["system"], kind, nbytes]
        if line["program"] != program.name:
            sys.exit(f"{line['program']} ran, but {program.name} was predicted")
        lowered = lower(program)
        message = round(wire_bytes(far_bytes(lowered)))
        guess_us = predict(lowered, cluster, nbytes=wire_bytes(nbytes), message_bytes=message).total_us
        time_us = median(line["times_us"])
        own = next(o for o in lines if (o["system"], o["collective"], o["nbytes"]) == ("stretto", kind, nbytes))
        rows.append({
            "case": f"{kind} {nbytes / 1e6:.0f} MB", "system": line["system"], "program": program.name,
            "exact": line["exact"], "time_us": time_us, "deviation": pstdev(line["times_us"]) / time_us,
            "ratio": time_us / median(own["times_us"]), "predicted_us": guess_us, "error": time_us / guess_us - 1,
            "cpu": line["cpu"],
        })  # fmt: skip
    return rows


def models(quick: bool) -> list[Row]:
    """Calls, then the steps of the models."""
    if reason := unavailable():
        print(f"real bytes: skipped, {reason}", file=sys.stderr)
        return []
    rows = call_rows(*measured(quick))
    by = {(row["case"], row["system"]): row["time_us"] for row in rows}
    for model, calls in MODELS.items():
        parts = [(f"{kind} {nbytes / 1e6:.0f} MB", kind, count) for kind, nbytes, count in calls]
        own = sum(count * by[call, "stretto"] for call, _, count in parts)
        for name in ("stretto", "nccl_ring", "nccl_tree"):
            step_us = sum(
                count * by[call, name if kind == "all_reduce" or name == "stretto" else "direct"]
                for call, kind, count in parts
            )
            rows.append({"case": f"step of {model}", "system": name, "time_us": step_us, "ratio": step_us / own})
    return rows


if __name__ == "__main__":
    run_cases(__file__, __doc__, "Ours over NCCL's ring and tree, real bytes", {"models": partial(models)})
