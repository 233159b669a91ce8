# SPDX-License-Identifier: Apache-2.0
"""Tensors between meshes, simulated: one device to many, the nine cases of the cross-mesh paper, its ablation, scale.

AWS p3.8xlarge (4 GPUs and one 10 Gb/s NIC per host). `time_us` is with fifo links, `fair_us` with fair sharing;
`bound_us` is what no algorithm beats; `of_bound` is the longer of the two times over it; `ratio` is the time of
global_allgather (Alpa) over this time, in the same kind of sharing and the better of both for the baseline. `plan_s`
is the whole planning, with the simulations that choose among ways; `plan_cpu_s` its processor time.

Baselines: tasks in Alpa's order (destination tile by destination tile), the least loaded holder sends next. A device
does its sends, receives and gathers one after the other; `_concurrent` issues everything at once instead. Uneven
slices are no problem for these baselines, as they were for Alpa. `broadcast` is the paper's own system: 100 chunks,
tasks ordered by the better of depth-first search and randomised greedy. `paper` is what the paper says of its ratio.

`--only GROUP,GROUP` runs some of: single, table2, ablation, general, drawn, scale; `--only real` moves real bytes in
the lab (`reshard_real.py`). `drawn` draws layouts on hosts with several NICs; SEED=N in the environment draws others.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import reshard_real
from common import Row, run_cases

import stretto as st
from stretto.resharding import Layout, Mesh, Spec, Tensor, plan_reshard, plan_tensors

P3 = st.Cluster.preset("p3_8xlarge", nodes=5)
SHAPE = (1024, 1024, 512)
CASES = {
    "case1": ("(2,4) S0RR", "(2,4) S0RR"),
    "case2": ("(2,4) RRR", "(2,4) S0RR"),
    "case3": ("(2,4) RS0R", "(2,4) S0RR"),
    "case4": ("(2,4) RS01R", "(2,4) S01RR"),
    "case5": ("(2,4) S1RR", "(2,4) S0RR"),
    "case6": ("(2,4) S0RR", "(3,4) S0RR"),
    "case7": ("(1,4) S1RR", "(2,4) RRR"),
    "case8": ("(2,3) RRR", "(3,2) RRR"),
    "case9": ("(2,4) RS0R", "(2,4) RRS0"),
}
PAPER = {
    "case1": "similar", "case2": "similar", "case5": "similar", "case6": "similar", "case7": "up to 2.5",
    "case8": "up to 2.5", "case3": "3 to 10", "case4": "3 to 10", "case9": "3 to 10",
}  # fmt: skip
"""Of its broadcast over its all-gather baseline; part of it comes from that implementation, not from the network."""
SYSTEMS = (
    ("send_recv", "send_recv", False), ("local_allgather", "local_allgather", False),
    ("global_allgather", "global_allgather", False), ("global_allgather_concurrent", "global_allgather", True),
    ("broadcast", "broadcast", False), ("stretto", "stretto", False),
)  # fmt: skip


def row(case: str, system: str, *, cluster: st.Cluster, tensors: Sequence[Tensor] = (), **how: Any) -> Row:
    began, worked = time.perf_counter(), time.process_time()
    plan = plan_tensors(tensors, cluster, **how) if tensors else plan_reshard(cluster=cluster, **how)
    spent, work = time.perf_counter() - began, time.process_time() - worked
    fifo, fair = (line.total_us if line else 0.0 for line in (plan.simulate("fifo"), plan.simulate("fair")))
    return {
        "case": case, "system": system, "unit_tasks": len(plan.tasks), "time_us": fifo, "fair_us": fair,
        "bound_us": plan.bound_us, "of_bound": max(fifo, fair) / plan.bound_us, "plan_s": spent,
        "plan_cpu_s": work,
    }  # fmt: skip


def against(rows: list[Row], baseline: str, paper: str | None = None) -> list[Row]:
    base = next(r for r in rows if r["system"] == baseline)
    for r in rows:
        r["ratio"] = min(base["time_us"] / r["time_us"], base["fair_us"] / r["fair_us"])
    rows[-1]["paper"] = paper
    return rows


def single(quick: bool) -> list[Row]:
    """Fig. 5: 1 GB from one device to 1..4 devices of one host, and to two devices on each of 1..4 hosts."""
    rows: list[Row] = []
    for hosts, width in [*((1, n) for n in range(1, 5)), *((n, 2) for n in range(2, 5))]:
        mine = [
            row(
                f"1 to {hosts}x{width}", system, cluster=P3, src="(1,1) R", dst=f"({hosts},{width}) R",
                shape=(250_000_000,), strategy=strategy,
            )
            for system, strategy, together in SYSTEMS
            if not together
        ]  # fmt: skip
        rows += against(mine, "global_allgather")
    return rows


def table2(quick: bool) -> list[Row]:
    """Table 2 and Fig. 6."""
    rows: list[Row] = []
    for case, (src, dst) in CASES.items():
        mine = [
            row(case, system, cluster=P3, src=src, dst=dst, shape=SHAPE, strategy=strategy, concurrent=together)
            for system, strategy, together in SYSTEMS
        ]
        rows += against(mine, "global_allgather", PAPER[case])
    return rows


def ablation(quick: bool) -> list[Row]:
    """Fig. 8: the same broadcasts with other senders and orders; `ratio` is naive over this."""
    rows: list[Row] = []
    for case, (src, dst) in CASES.items():
        mine = [
            row(f"{case}, order", f"broadcast_{order}", cluster=P3, src=src, dst=dst, shape=SHAPE,
                strategy="broadcast", order=order)
            for order in ("naive", "load_balance_only", "dfs", "greedy", "ensemble")
        ]  # fmt: skip
        mine.append(row(f"{case}, order", "stretto", cluster=P3, src=src, dst=dst, shape=SHAPE))
        rows += against(mine, "broadcast_naive")
    return rows


def general(quick: bool) -> list[Row]:
    """Beyond the paper: the same mesh, overlapping meshes, pending sums, hosts with many NICs."""
    dgx, p3 = st.Cluster.preset("dgx2", nodes=2), st.Cluster.preset("p3_8xlarge", nodes=4)
    return [
        row(case, "stretto", cluster=where, src=src, dst=dst, shape=(1024, 1024, 64))
        for case, src, dst, where in (
            ("gather on one mesh", "(4,4)@0-15 S01RR", "(4,4)@0-15 RRR", p3),
            ("transpose on one mesh", "(4,4)@0-15 S01RR", "(4,4)@0-15 RS01R", p3),
            ("sum on one mesh", "(4,4)@0-15 RRRP01", "(4,4)@0-15 RRR", p3),
            ("sum and scatter", "(4,4)@0-15 RRRP01", "(4,4)@0-15 S01RR", p3),
            ("sum to another mesh", "(2,4)@0-7 S1RRP0", "(2,4)@8-15 S0RR", p3),
            ("one host further", "(2,4)@0-7 S0RR", "(2,4)@4-11 S0RR", p3),
            ("16 NICs", "(1,16) S1RR", "(1,16) RS1R", dgx),
            ("half the NICs hold it", "(2,8)@0-7,16-23 RS01R", "(2,8)@8-15,24-31 S01RR", dgx),
        )
    ]


def drawn(quick: bool) -> list[Row]:
    """Hosts with several NICs (NDv2: one), layouts that a seed draws: the longer time over the bound."""
    specs = ("RRR", *(f"{a}RR" for a in ("S0", "S1", "S01")), "RS0R", "RS1R", "RS01R", "RRS0", "RRS01")
    specs += ("S0S1R", "S1S0R", "S0RS1", "RS0S1")
    rows: list[Row] = []
    for name in ("dgx_h100", "dgx_a100", "p4d_24xlarge", "ndv2"):
        draw = random.Random(int(os.environ.get("SEED", "0")))
        where = st.Cluster.preset(name, nodes=4)
        mine = []
        for _ in range(4 if quick else 32):
            src, dst = draw.choice(specs), draw.choice(specs)
            sides: dict[str, Any] = {"src": f"(2,8) {src}", "dst": f"(2,8) {dst}"}
            mine.append(row(f"{src} to {dst}", "stretto", cluster=where, shape=SHAPE, **sides))
        worst = max(mine, key=lambda r: r["of_bound"])
        rows.append({
            "cluster": name, "layouts": len(mine), "median_of_bound": median(r["of_bound"] for r in mine),
            "worst_of_bound": worst["of_bound"], "worst": worst["case"],
            "plan_cpu_s": max(r["plan_cpu_s"] for r in mine),
        })  # fmt: skip
    return rows


def scale(quick: bool) -> list[Row]:
    """How long planning takes: many unit tasks, and a whole state dict from FSDP to tensor parallelism."""
    rows: list[Row] = []
    for nodes, tasks in ((2, 64), (8, 1024), (16, 4096)):
        where = st.Cluster.preset("p3_8xlarge", nodes=2 * nodes)
        sides: dict[str, Any] = {"src": f"({nodes},4) RS01R", "dst": f"({nodes},4) S01RR"}
        rows.append(row(f"{tasks} unit tasks", "stretto", cluster=where, shape=SHAPE, **sides))
    where = st.Cluster.preset("p3_8xlarge", nodes=6)
    for layers in (2, 8 if quick else 48):
        mine = [
            row(f"state dict, {layers} layers", strategy, cluster=where, tensors=state_dict(layers), strategy=strategy)
            for strategy in ("global_allgather", "broadcast", "stretto")
        ]
        rows += against(mine, "global_allgather")
    return rows


def state_dict(layers: int) -> list[Tensor]:
    """A transformer (hidden 1024, bf16): FSDP over 4 hosts of 4 to two replicas of tensor parallelism over 4."""
    trainer = Mesh(shape=(16,), devices=tuple(range(16)))
    server = Mesh(shape=(2, 4), devices=tuple(range(16, 24)))
    parts = (
        ("qkv", (3072, 1024), "S1R"), ("out", (1024, 1024), "RS1"), ("up", (4096, 1024), "S1R"),
        ("down", (1024, 4096), "RS1"), ("norm1", (1024,), "R"), ("norm2", (1024,), "R"),
    )  # fmt: skip
    return [
        Tensor(
            name=f"{layer}.{name}",
            shape=shape,
            dtype_bytes=2,
            src=Layout(mesh=trainer, spec=Spec.parse("S0" + "R" * (len(shape) - 1))),
            dst=Layout(mesh=server, spec=Spec.parse(spec)),
        )
        for layer in range(layers)
        for name, shape, spec in parts
    ]


GROUPS: dict[str, Callable[[bool], list[Row]]] = {
    "single": single,
    "table2": table2,
    "ablation": ablation,
    "general": general,
    "drawn": drawn,
    "scale": scale,
}

if __name__ == "__main__":
    if "real" in sys.argv[1:]:
        sys.argv = [word for word in sys.argv if word not in ("--only", "real")]
        reshard_real.main()
    else:
        run_cases(__file__, __doc__, "resharding between meshes (simulated)", GROUPS)
