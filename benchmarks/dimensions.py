# SPDX-License-Identifier: Apache-2.0
"""Multi-dimensional networks: baseline, Themis and ours beside the ideal and the paper's figures.

Model of every row unless it says otherwise: one device stands for all, 64 chunks, 16 stages in flight per dimension
(`in_flight`), the first of them by the queue discipline gets the dimension's rate (ordered sharing), smallest chunk
first by size before the stage. `utilisation` is the time at which all bandwidth of all dimensions is used over the time
taken, 0..1; `paper` is what the paper says; `ratio` is baseline time over this time. `plan_s` is the whole planning.

`literal` is Themis with the tracker of Algorithm 1 to the letter. `links` and `mixed` rows are whole programs on every
link; `fastest` is the best of ours, Themis' and the baseline there, its `model_us` the promise with single messages.

`--only GROUP,GROUP` runs some of: all_reduce, literal, halves, links, mixed, sharing, today, fig4, fig9, fig10,
headers, wrong, training, scale.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from common import Row, run_cases

import stretto as st
from stretto.cluster.grid import regular
from stretto.cluster.presets.themis import NETWORKS
from stretto.dimensions import Dim, DimRun, dims_of, ideal_us, resolve, simulate, stretto, themis
from stretto.dimensions.link_search import best_program, fastest_program
from stretto.dimensions.systems import SCHEDULERS, plan
from stretto.dimensions.training import SYSTEMS, iteration

SIZES = (100 * st.MB, 256 * st.MB, 512 * st.MB, 1024 * st.MB)
NETS = {name.removeprefix("themis_"): dims_of(st.Cluster.load(name)) for name in NETWORKS}
MEAN = {"baseline": 0.5631, "themis_fifo": 0.8767, "themis_scf": 0.9514}
SPEED = {"themis_fifo": 1.58, "themis_scf": 1.72}
HEADER_BYTES, PACKET_BYTES = 42.0, 4096.0
"""InfiniBand: local route, base and extended transport headers and two checksums on packets of 4 KiB."""
TRAINING = {"resnet152": (1.49, 1.54), "gnmt": (1.30, 1.32), "dlrm": (1.30, 1.33), "transformer1t": (1.25, 1.26)}
"""The paper's mean speed-ups of an iteration: Themis, and its ideal system."""


def run_of(system: str, dims: Sequence[Dim], nbytes: float, **options: int) -> tuple[DimRun, float]:
    began = time.perf_counter()
    schedule = plan(system, dims, "all_reduce", nbytes, **options)  # type: ignore[arg-type]
    spent = time.perf_counter() - began
    return simulate(schedule, in_flight=options.get("in_flight", 16)), spent


def all_reduce(quick: bool) -> list[Row]:
    """Figs. 8 and 11: six networks, four sizes; and the means that the paper prints."""
    rows: list[Row] = []
    for in_flight in (16, 8, 4, 1):
        sizes = SIZES if in_flight == 16 or not quick else SIZES[::3]
        mine: list[Row] = []
        for (name, dims), nbytes in itertools.product(NETS.items(), sizes):
            base = 0.0
            for system in SCHEDULERS:
                run, spent = run_of(system, dims, nbytes, in_flight=in_flight)
                base = base or run.total_us
                mine.append(
                    {"case": f"{name} {nbytes / st.MB:.0f}MB", "system": system, "in_flight": in_flight,
                     "time_us": run.total_us, "utilisation": run.utilization, "ratio": base / run.total_us,
                     "plan_s": spent}
                )  # fmt: skip
            best = ideal_us(dims, "all_reduce", nbytes)
            mine.append(
                {"case": f"{name} {nbytes / st.MB:.0f}MB", "system": "ideal", "in_flight": in_flight, "time_us": best,
                 "utilisation": 1.0, "ratio": base / best}
            )  # fmt: skip
        rows += mine if in_flight == 16 else []
        rows += [_mean(f"mean, {in_flight} in flight", system, mine, in_flight == 16) for system in SYSTEMS]
    return rows


def _mean(case: str, system: str, rows: Iterable[Row], quoted: bool) -> Row:
    mine = [row for row in rows if row["system"] == system]
    used = [row["utilisation"] for row in mine]
    return {
        "case": case, "system": system, "in_flight": mine[0]["in_flight"], "utilisation": float(np.mean(used)),
        "least": min(used), "ratio": float(np.mean([row["ratio"] for row in mine])),
        "plan_s": max(row.get("plan_s", 0.0) for row in mine),
        "paper_utilisation": MEAN.get(system) if quoted else None, "paper_ratio": SPEED.get(system) if quoted else None,
    }  # fmt: skip


def literal(quick: bool) -> list[Row]:
    """The same means for Themis with a tracker that begins at A_K of the all-reduce and counts its reduce-scatter."""
    rows: list[Row] = []
    for discipline in ("fifo", "scf"):
        used, ratios = [], []
        for dims, nbytes in itertools.product(NETS.values(), SIZES):
            base = simulate(plan("baseline", dims, "all_reduce", nbytes)).total_us
            run = simulate(themis(dims, "all_reduce", nbytes, discipline=discipline, tracker="literal"))
            used.append(run.utilization)
            ratios.append(base / run.total_us)
        system = f"themis_{discipline}"
        rows.append(
            {"case": "mean, literal tracker", "system": system, "in_flight": 16, "utilisation": float(np.mean(used)),
             "least": min(used), "ratio": float(np.mean(ratios)), "paper_utilisation": MEAN[system],
             "paper_ratio": SPEED[system]}
        )  # fmt: skip
    return rows


def halves(quick: bool) -> list[Row]:
    """Reduce-scatter and all-gather alone: means over the six networks and four sizes."""
    rows: list[Row] = []
    for collective, system in itertools.product(("reduce_scatter", "all_gather"), SCHEDULERS):
        used = [
            simulate(plan(system, dims, collective, nbytes)).utilization
            for dims, nbytes in itertools.product(NETS.values(), SIZES[::3] if quick else SIZES)
        ]
        rows.append(
            {"case": f"mean, {collective}", "system": system, "in_flight": 16, "utilisation": float(np.mean(used)),
             "least": min(used)}
        )  # fmt: skip
    return rows


def links(quick: bool) -> list[Row]:
    """Programs of our schedules (64 MB, 16 chunks) on every link of tori, beside the model and the lower bound."""
    rows: list[Row] = []
    for name in ("3x5", "4x4", "6x3", "3x3x3") if quick else ("3x5", "4x4", "5x5", "6x3", "3x3x3", "8x8"):
        cluster = st.Cluster.load(f"torus:{name}")
        for wanted in (st.AllReduce, st.ReduceScatter, st.AllGather):
            collective = wanted(cluster.num_devices)
            schedule = stretto(dims_of(cluster), collective.kind, 64e6, chunks=16)
            run = best_program(schedule, cluster, units=128)
            bound = st.lower_bound(collective, cluster, 64e6).total_us
            rows.append(
                {"case": f"links torus:{name} {collective.kind}", "system": "stretto", "time_us": run.total_us,
                 "model_us": simulate(schedule).total_us, "bound_us": bound, "over_bound": run.total_us / bound - 1}
            )  # fmt: skip
    return rows


def mixed(quick: bool) -> list[Row]:
    """Schedules of networks with rings and switches as programs on every link, beside what the model promises."""
    rows: list[Row] = []
    for kinds, sizes, rates in (
        (("ring", "switch"), (5, 4), (40.0, 25.0)), (("fully_connected", "ring"), (3, 4), (60.0, 24.0)),
        (("ring", "switch"), (4, 8), (60.0, 20.0)), (("switch", "switch", "ring"), (4, 4, 3), (40.0, 20.0, 16.0)),
        (("switch", "ring"), (8, 3), (60.0, 30.0)),
    ):  # fmt: skip
        dims = [
            st.Dimension(kind=kind, size=size, gb_per_s=rate, alpha_us=0.5)
            for kind, size, rate in zip(kinds, sizes, rates, strict=True)
        ]
        name = " x ".join(f"{kind} {size}" for kind, size in zip(kinds, sizes, strict=True))
        cluster = regular(name, dims)
        bound = st.lower_bound(st.AllReduce(cluster.num_devices), cluster, 64e6).total_us
        for system in ("baseline", "themis_scf", "stretto"):
            schedule = plan(system, dims_of(cluster), "all_reduce", 64e6, chunks=16)
            run = best_program(schedule, cluster, units=128)
            model_us = simulate(schedule).total_us
            rows.append(
                {"case": f"links {name}", "system": system, "time_us": run.total_us, "model_us": model_us,
                 "over_model": run.total_us / model_us - 1, "bound_us": bound, "over_bound": run.total_us / bound - 1}
            )  # fmt: skip
        best = fastest_program(cluster, "all_reduce", 64e6, chunks=16, units=128)
        rows.append(
            {"case": f"links {name}", "system": "fastest", "time_us": best.total_us, "model_us": best.promise_us,
             "over_model": best.total_us / best.promise_us - 1, "bound_us": bound,
             "over_bound": best.total_us / bound - 1}
        )  # fmt: skip
    return rows


def sharing(quick: bool) -> list[Row]:
    """The same means when those in flight share a dimension's rate alike."""
    rows = []
    for system in SCHEDULERS:
        used, ratios = [], []
        for dims, nbytes in itertools.product(NETS.values(), SIZES[:1] if quick else SIZES):
            base = simulate(plan("baseline", dims, "all_reduce", nbytes), sharing="equal").total_us
            run = simulate(plan(system, dims, "all_reduce", nbytes, sharing="equal"), sharing="equal")
            used.append(run.utilization)
            ratios.append(base / run.total_us)
        rows.append(
            {"case": "mean, equal sharing", "system": system, "in_flight": 16, "utilisation": float(np.mean(used)),
             "least": min(used), "ratio": float(np.mean(ratios))}
        )  # fmt: skip
    return rows


def today(quick: bool) -> list[Row]:
    """Today's platform of Fig. 4: 1200 and 100 Gb/s.

    The paper does not give its sizes: 16 x 8 is fitted, since its loads alone say 97.7 %; 16 x 64 is as its networks.
    """
    rows = []
    for size in (64, 8):
        dims = (
            Dim(kind="switch", size=16, gb_per_s=150, step_us=0.7),
            Dim(kind="switch", size=size, gb_per_s=12.5, step_us=1.7),
        )
        for system in SCHEDULERS:
            run, _ = run_of(system, dims, SIZES[-1])
            paper = 0.977 if system == "baseline" else None
            rows.append(
                {"case": f"today 16x{size} 1024MB", "system": system, "time_us": run.total_us,
                 "utilisation": run.utilization, "paper": paper}
            )  # fmt: skip
    return rows


def fig4(quick: bool) -> list[Row]:
    """Fig. 4: how much bandwidth the baseline uses in training, and what all of it, or an infinite one, would bring."""
    rows: list[Row] = []
    for model in ("resnet152", "gnmt", "transformer1t"):
        work = st.Workload.load(f"themis:{model}")
        for name, dims in NETS.items():
            found = {system: iteration(work, dims, system) for system in ("baseline", "ideal")}
            computing = found["ideal"].forward_us + found["ideal"].backward_us
            base = found["baseline"].total_us
            for system, each in found.items():
                rows.append(
                    {"case": f"fig4 {model} {name}", "system": system, "iteration_us": each.total_us,
                     "utilisation": each.utilization, "ratio": base / each.total_us, "infinite_ratio": base / computing}
                )  # fmt: skip
    used = [row["utilisation"] for row in rows if row["system"] == "baseline"]
    rows.append(
        {"case": "fig4 mean", "system": "baseline", "utilisation": float(np.mean(used)), "least": min(used),
         "paper": 0.597, "paper_least": 0.351}
    )  # fmt: skip
    return rows


def fig9(quick: bool) -> list[Row]:
    """Fig. 9: 1 GB on 3D-SW_SW_SW_homo, how much of the time each dimension has a chunk (windows of 100 us)."""
    rows = []
    for system in SCHEDULERS:
        run, _ = run_of(system, NETS["3d_sw_sw_sw_homo"], 1000 * st.MB)
        active = run.activity(100.0)
        rows.append(
            {"case": "fig9 3d_sw_sw_sw_homo 1GB", "system": system, "time_us": run.total_us,
             "utilisation": run.utilization}
            | {f"dim{at + 1}_active": float(row.mean()) for at, row in enumerate(active)}
        )  # fmt: skip
    return rows


def fig10(quick: bool) -> list[Row]:
    """Fig. 10: 100 MB on two networks, 4 to 512 chunks; the paper's means over both at the two ends."""
    scf, fifo = "themis_scf", "themis_fifo"
    quoted = {(scf, 4): 0.4858, (scf, 512): 0.9118, (fifo, 4): 0.4313, (fifo, 512): 0.8781}
    rows = []
    for in_flight in (16, 64):
        for count in (4, 64, 512) if quick else (4, 8, 16, 32, 64, 128, 256, 512):
            for system in SCHEDULERS:
                runs = [
                    run_of(system, NETS[name], 100 * st.MB, chunks=count, in_flight=in_flight)[0]
                    for name in ("3d_sw_sw_sw_hetero", "4d_ring_fc_ring_sw")
                ]
                rows.append(
                    {"case": f"fig10 {count} chunks, {in_flight} in flight", "system": system, "in_flight": in_flight,
                     "utilisation": float(np.mean([run.utilization for run in runs])),
                     "paper_utilisation": quoted.get((system, count))}
                )  # fmt: skip
    return rows


def headers(quick: bool) -> list[Row]:
    """What goes over the wire more because small chunks do not fill packets: 42 bytes of header per 4 KiB packet."""
    rows = []
    for name, dims in NETS.items():
        dressed = [replace(dim, header_bytes=HEADER_BYTES, packet_bytes=PACKET_BYTES) for dim in dims]

        def sent(count: int, dressed: Sequence[Dim] = dressed) -> float:
            return float(plan("baseline", dressed, "all_reduce", 100 * st.MB, chunks=count).stages.wire_bytes.sum())

        plain = float(plan("baseline", dims, "all_reduce", 100 * st.MB).stages.wire_bytes.sum())
        for count in (1, 64, 512):
            rows.append(
                {"case": f"headers {name} 100MB {count} chunks", "system": "baseline",
                 "header_share": sent(count) / plain - 1, "more_than_one_chunk": sent(count) / sent(1) - 1,
                 "paper": 0.005 if count == 64 else None}
            )  # fmt: skip
        run, _ = run_of("stretto", dressed, 100 * st.MB)
        rows.append({"case": f"headers {name} 100MB", "system": "stretto", "utilisation": run.utilization})
    return rows


def wrong(quick: bool) -> list[Row]:
    """Every dimension's bandwidth mis-estimated by so much, up or down, in all combinations; then solved again."""
    rows = []
    for error in (0.05, 0.1) if quick else (0.02, 0.05, 0.1, 0.2):
        used: dict[str, list[float]] = {}
        lost = 0
        for (_, dims), nbytes in itertools.product(NETS.items(), SIZES[::3]):
            plans = {system: plan(system, dims, "all_reduce", nbytes) for system in SCHEDULERS}
            means: dict[str, list[float]] = {}
            for at, signs in enumerate(itertools.product((-error, error), repeat=len(dims))):
                real = [replace(dim, gb_per_s=dim.gb_per_s * (1 + sign)) for dim, sign in zip(dims, signs, strict=True)]
                for system, schedule in plans.items():
                    means.setdefault(system, []).append(simulate(schedule, dims=real).utilization)
                if at % (8 if quick else 2) == 1:
                    again = resolve(plans["stretto"], [dim.gb_per_s for dim in real])
                    means.setdefault("stretto, solved again", []).append(simulate(again).utilization)
            lost += np.mean(means["stretto"]) < np.mean(means["themis_scf"])
            for system, values in means.items():
                used.setdefault(system, []).extend(values)
        for system, values in used.items():
            rows.append(
                {"case": f"bandwidth wrong by {100 * error:.0f} %", "system": system,
                 "utilisation": float(np.mean(values)), "least": min(values)}
                | ({"cases_behind_themis": int(lost)} if system == "stretto" else {})
            )  # fmt: skip
    return rows


def training(quick: bool) -> list[Row]:
    """Fig. 12, twice: compute as the paper describes it, and scaled so that the ideal system gains what theirs does.

    The second needs one number per model from the paper's ideal column; its Themis column is then a prediction.
    """
    rows: list[Row] = []
    exposed: dict[str, dict[str, list[float]]] = {}
    for model, (paper, paper_ideal) in TRAINING.items():
        scale = 1.0
        for label in ("", " scaled"):
            if label:
                scale = _compute_scale(rows, model, paper_ideal)
            work = st.Workload.load(f"themis:{model},compute={scale:.6g}")
            ratios: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            behind = 0.0
            for name, dims in NETS.items():
                found = {system: iteration(work, dims, system) for system in SYSTEMS}
                behind = max(behind, found["stretto"].total_us / found["ideal"].total_us - 1)
                for system, each in found.items():
                    ratios[system].append(found["baseline"].total_us / each.total_us)
                    relief = found["baseline"].exposed_us / each.exposed_us
                    exposed.setdefault(label, {}).setdefault(system, []).append(relief)
                    rows.append(
                        {"case": f"{model}{label} {name}", "system": system, "iteration_us": each.total_us,
                         "forward_us": each.forward_us, "backward_us": each.backward_us,
                         "exposed_data_us": each.data_parallel_us, "exposed_model_us": each.model_parallel_us,
                         "utilisation": each.utilization, "ratio": ratios[system][-1],
                         "over_ideal": each.total_us / found["ideal"].total_us - 1}
                    )  # fmt: skip
            quoted = {"themis_scf": paper, "ideal": paper_ideal}
            for system in SYSTEMS:
                rows.append(
                    {"case": f"{model}{label} mean", "system": system, "ratio": float(np.mean(ratios[system])),
                     "paper_ratio": quoted.get(system), "compute_scale": scale}
                    | ({"over_ideal": behind} if system == "stretto" else {})
                )  # fmt: skip
    for label, of in exposed.items():
        for system, values in of.items():
            paper_relief = {"themis_scf": 1.65, "ideal": 1.72}.get(system)
            rows.append(
                {"case": f"exposed communication{label or ' unscaled'}", "system": system,
                 "ratio": float(np.mean(values)), "paper_ratio": paper_relief}
            )  # fmt: skip
    return rows


def _compute_scale(rows: Iterable[Row], model: str, wanted: float) -> float:
    """By what to scale compute, so that the ideal system's mean speed-up is `wanted`; exposed time stays what it is."""
    of = {
        system: [
            row
            for row in rows
            if row["system"] == system and row["case"].startswith(f"{model} ") and "forward_us" in row
        ]
        for system in ("baseline", "ideal")
    }

    def gain(scale: float) -> float:
        times = {system: [scale * _compute(row) + _exposed(row) for row in mine] for system, mine in of.items()}
        return float(np.mean(np.divide(times["baseline"], times["ideal"])))

    low, high = 1e-4, 1e2
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > wanted else (low, middle)
    return low


def _compute(row: Row) -> float:
    return float(row["forward_us"] + row["backward_us"])


def _exposed(row: Row) -> float:
    return float(row["exposed_data_us"] + row["exposed_model_us"])


def scale(quick: bool) -> list[Row]:
    """Planning and simulating one all-reduce of 1 GB: 1024 NPUs, and 100,000 in five dimensions."""
    large = [("ring", 10, 3000, 0.02), ("switch", 10, 1600, 0.7), ("fully_connected", 10, 1400, 0.7),
             ("switch", 10, 800, 0.7), ("switch", 10, 400, 1.7)]  # fmt: skip
    nets: dict[str, Sequence[Dim]] = {
        "1024 NPUs, 3D": NETS["3d_sw_sw_sw_homo"],
        "1024 NPUs, 4D": NETS["4d_ring_fc_ring_sw"],
        "100000 NPUs, 5D": [Dim(kind=k, size=n, gb_per_s=g / 8, step_us=a) for k, n, g, a in large],
    }
    rows = []
    for name, dims in nets.items():
        for system in SCHEDULERS:
            plan(system, dims, "all_reduce", 1e9)  # the solver is loaded once
            began = time.perf_counter()
            schedule = plan(system, dims, "all_reduce", 1e9)
            planned = time.perf_counter()
            run = simulate(replace(schedule))  # a copy: nothing that planning computed is used again
            simulated = time.perf_counter()
            rows.append(
                {"case": f"scale {name}", "system": system, "utilisation": run.utilization, "plan_s": planned - began,
                 "simulate_ms": 1e3 * (simulated - planned), "time_us": run.total_us}
            )  # fmt: skip
    return rows


GROUPS: dict[str, Callable[[bool], list[Row]]] = {
    "all_reduce": all_reduce, "literal": literal, "halves": halves, "links": links, "mixed": mixed, "sharing": sharing,
    "today": today, "fig4": fig4, "fig9": fig9, "fig10": fig10,
    "headers": headers, "wrong": wrong, "training": training, "scale": scale,
}  # fmt: skip


if __name__ == "__main__":
    run_cases(__file__, __doc__, "multi-dimensional networks", GROUPS)
