# SPDX-License-Identifier: Apache-2.0
"""What synthesis reaches: time, lower bound, seconds spent, and the figure that a peer reaches or publishes.

Every program is verified and simulated; `time_us` is what `simulate` says (contention fifo), `bound_us` what no
algorithm beats, `synth_s` the whole search and `synth_cpu_s` its CPU seconds. No peer runs here. TACCL's times come
from a run of its public code with a free MILP solver instead of the Gurobi that it asks for (no text of TACCL has
them); the others are published. TACCL's and TACOS's block the link for alpha (alpha=blocking), TE-CCL's only delay
arrival (pipelined). `ratio` is time_us / peer_us: at most 1 is at or below the peer. In TE-CCL's DGX-2 rows the switch
multicasts, in ours only where the cluster's name says so. Its NDv2x2 rows serve only 15 of 16 GPUs, its DGX-2 rows from
16 MB on leave the switch's alpha out, and its times are rounded up to epochs.

`--only GROUP,GROUP` runs some of: ndv2x1, taccl, sketch, teccl, multicast, scale, throughput, torus, alltoall,
ablation, export.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, cpu_s, run_cases

import stretto as st
from stretto.collectives import COLLECTIVES, Collective
from stretto.synthesis import three_stage
from stretto.synthesis.sketch import Sketch
from stretto.units import format_bytes

BUDGET_S = 20.0
SKETCH_BUDGET_S = 240.0
PAPER_SKETCH = Path(__file__).parents[1] / "tests" / "synthesis" / "data" / "taccl_listing1_dgx2_sk1.json"
SIZES = (st.KB, 64 * st.KB, st.MB, 16 * st.MB, st.GB)
TECCL: dict[tuple[str, str], tuple[float, ...]] = {
    ("ndv2_teccl:2", "all_gather"): (4.135, 6.08, 48.75, 700, 43750),
    ("ndv2_teccl:4", "all_gather"): (5.45, 8.32, 69.4, 1040, 65000),
    ("dgx2_teccl:2", "all_gather"): (4.006, 4.32, 10.75, 124, 7750),
    ("dgx2_teccl:2", "all_to_all"): (4.06, 8.46, 84.25, 1292, 80500),
}
"""TE-CCL's published times for SIZES."""
FOREST = {
    "dgx_a100:1": 342.9, "dgx_a100:2": 346.7, "dgx_a100:4": 266.7, "dgx_a100:8": 228.6,
    "mi250:1": 342.9, "mi250:2": 354.1, "mi250:4": 341.3,
    "torus:6x6": 4.114, "torus:8x8": 4.063, "torus:10x10": 4.040,
}  # fmt: skip
"""Certified optimal all-gather throughput, GB/s, and the peer's CPU seconds where they are known."""
FOREST_S = {"dgx_a100:8": 724.0, "mi250:2": 63.0, "torus:10x10": 488.0}


def case(
    name: str,
    collective: Collective,
    cluster: st.Cluster,
    nbytes: float,
    *,
    peer: str = "",
    peer_us: float | None = None,
    alpha: str = "pipelined",
    budget_s: float = BUDGET_S,
    note: Callable[[st.Program], str] | None = None,
    **options: Any,
) -> Row:
    """One search as a row; a search that fails is a row that says why."""
    row: Row = {
        "case": name, "system": "stretto", "cluster": cluster.name, "collective": collective.kind, "nbytes": nbytes,
        "alpha": alpha,
    }  # fmt: skip
    began, cpu_began = time.perf_counter(), cpu_s()
    try:
        found = st.synthesize(collective, cluster, nbytes, alpha=alpha, budget_s=budget_s, cache=False, **options)
    except st.StrettoError as error:
        return row | {"synth_s": time.perf_counter() - began, "peer": peer, "peer_us": peer_us, "note": str(error)[:80]}
    return row | measured(found.time_us, found.certificate.bound_us, time.perf_counter() - began, peer, peer_us) | {
        "synth_cpu_s": cpu_s() - cpu_began, "maker": found.certificate.program,
        "maker_s": found.certificate.seconds, "note": note(found.plain) if note is not None else "",
    }  # fmt: skip


def connections(program: st.Program) -> str:
    """How many pairs of ranks a program connects: what uc-min and uc-max are about."""
    return f"{len(set(zip(program.src.tolist(), program.dst.tolist(), strict=True)))} connections"


def measured(time_us: float, bound_us: float, synth_s: float, peer: str, peer_us: float | None) -> Row:
    return {
        "time_us": time_us,
        "bound_us": bound_us,
        "gap": time_us / bound_us - 1,
        "synth_s": synth_s,
        "peer": peer,
        "peer_us": peer_us,
        "ratio": None if peer_us is None else time_us / peer_us,
    }


def folded(cluster: st.Cluster) -> st.Cluster:
    """NVLink only and alpha folded into the 23 and 46 us per MB: what TACCL's code assumes within a node."""
    keep = np.flatnonzero(cluster.link_channel == cluster.channels.index("nvlink"))
    columns = {name: getattr(cluster, name)[keep] for name in cluster.__dataclass_fields__ if name.startswith("link_")}
    columns["link_alpha_us"] = np.zeros(len(keep))
    return replace(cluster, name=f"{cluster.name} folded", **columns)


def ndv2x1(quick: bool) -> list[Row]:
    """Unsplit chunks in exact mode, with its own proof; then the portfolio, which may split."""
    from stretto.synthesis.exact import solve

    cluster = folded(st.Cluster.load("ndv2"))
    nbytes = 8 * st.MB
    rows = []
    for collective, peer_us, must in (
        (st.AllGather(8), 92.0, 69.0), (st.AllToAll(8), 161.0, 138.0), (st.AllReduce(8), 230.0, 138.0),
    ):  # fmt: skip
        name = f"{collective.kind} ndv2x1"
        about = {"cluster": cluster.name, "collective": collective.kind, "nbytes": nbytes, "alpha": "blocking"}
        began = time.perf_counter()
        try:
            found = solve(collective, cluster, nbytes=nbytes, budget_s=BUDGET_S, alpha="blocking")
            seconds = time.perf_counter() - began
            proof = "proved optimal" if found.optimal else f"gap {100 * found.gap:.1f} %"
            rows.append(
                {"case": f"{name} unsplit", "system": "stretto", **about}
                | measured(found.time_us, found.proved_bound_us, seconds, "taccl", peer_us)
                | {"maker": found.program.name, "maker_s": seconds, "note": f"exact: {proof}; asked {must:g}"}
            )
        except st.StrettoError as error:
            rows.append({"case": f"{name} unsplit", "system": "stretto", **about, "note": str(error)[:80]})
        rows.append(
            case(
                f"{name} split",
                collective,
                cluster,
                nbytes,
                peer="taccl",
                peer_us=peer_us,
                alpha="blocking",
                budget_s=5.0 if quick else BUDGET_S,
            )
        )
    return rows


def taccl(quick: bool) -> list[Row]:
    budget_s = 5.0 if quick else BUDGET_S
    return [
        case(f"all_gather {source}", st.AllGather(ranks), st.Cluster.load(source), nbytes, peer="taccl",
             peer_us=peer_us, alpha="blocking", budget_s=budget_s)
        for source, ranks, nbytes, peer_us in (
            ("ndv2:2", 16, 16 * st.MB, 945.0), ("dgx2:2", 32, 64 * st.MB, 564.0),
        )
    ]  # fmt: skip


def sketched(quick: bool) -> list[Row]:
    """TACCL's dgx2-sk-1, whose all-gather has 1,984 sends, in both alpha modes, beside bounds on orders of them."""
    sketch, nbytes, rows = Sketch.load(PAPER_SKETCH), 64 * st.MB, []
    for alpha in ("pipelined", "blocking"):
        began, cpu_began = time.perf_counter(), cpu_s()
        found = three_stage.solve(
            st.AllGather(32), st.Cluster.load("dgx2:2"), nbytes=nbytes, budget_s=20.0 if quick else SKETCH_BUDGET_S,
            sketch=sketch, alpha=alpha,
        )  # fmt: skip
        rows.append({
            "case": "all_gather dgx2:2, dgx2-sk-1", "alpha": alpha, "nbytes": nbytes, "time_us": found.time_us,
            "schedule_bound_us": found.schedule_bound_us, "schedule_gap": found.schedule_gap,
            "symmetric_bound_us": found.symmetric_bound_us, "sends": found.program.num_transfers, "peer": "taccl",
            "peer_us": 564.0, "ratio": found.time_us / 564.0, "synth_s": time.perf_counter() - began,
            "synth_cpu_s": cpu_s() - cpu_began,
        })  # fmt: skip
    return rows


def teccl(source: str, kind: str, quick: bool) -> list[Row]:
    # Up to 256 ranks all makers run in this process and look at this clock, so that other load changes nothing.
    time.monotonic = time.process_time
    cluster = st.Cluster.load(source)
    collective = COLLECTIVES[kind](cluster.num_devices)
    pairs = list(zip(SIZES, TECCL[source, kind], strict=True))
    return [
        case(
            f"{kind} {source} {format_bytes(nbytes)}",
            collective,
            cluster,
            nbytes,
            peer="te-ccl",
            peer_us=peer_us,
            budget_s=3.0 if quick else BUDGET_S,
        )
        for nbytes, peer_us in (pairs[::4] if quick else pairs)
    ]


def multicast(quick: bool) -> list[Row]:
    """The same machine with switches that copy and without; a star whose ports are faster down than up, and DGX-2."""
    n = 8
    nodes = [st.Node(name=f"gpu{i}") for i in range(n)] + [st.Node(name="switch", kind="switch")]
    links = [st.Link(src=i, dst=n, alpha_us=0.5, gb_per_s=25.0) for i in range(n)]
    links += [st.Link(src=n, dst=i, alpha_us=0.5, gb_per_s=100.0) for i in range(n)]
    star = st.Cluster.build("star 25 up 100 down", nodes=nodes, links=links)
    pair = st.Cluster.load("dgx2_teccl:2")
    rows = []
    for cluster, nbytes, peer_us in (
        (star, 64 * st.MB, None),
        *((pair, size, us) for size, us in zip(SIZES[2::2], TECCL["dgx2_teccl:2", "all_gather"][2::2], strict=True)),
    )[: 1 if quick else None]:
        for machine in (cluster, cluster.with_multicast()):
            rows.append(
                case(
                    f"all_gather {machine.name} {format_bytes(nbytes)}",
                    st.AllGather(machine.num_devices),
                    machine,
                    nbytes,
                    peer="" if peer_us is None else "te-ccl",
                    peer_us=peer_us,
                    budget_s=3.0 if quick else BUDGET_S,
                )
            )
    return rows


def scale(source: str, budget_s: float, peer: str, quick: bool) -> list[Row]:
    cluster = st.Cluster.load(source)
    n = cluster.num_devices
    kinds = [st.AllGather(n), st.ReduceScatter(n), st.AllReduce(n)]
    if quick:
        kinds, budget_s = kinds[:1], min(budget_s, 5.0)
    return [
        case(f"{c.kind} {source}", c, cluster, 64 * st.MB * max(1, n // 64), peer=peer, budget_s=budget_s)
        for c in kinds
    ]


def large(source: str, quick: bool) -> list[Row]:
    """Thousands of GPUs with the budget that `synthesize` has by default; `peak_mib` is of the whole process so far."""
    cluster = st.Cluster.load(source)
    n, rows = cluster.num_devices, []
    for make in (st.AllGather, st.ReduceScatter, st.AllReduce, st.AllToAll):
        row = case(f"{make.__name__} {source}", make(n), cluster, 256 * st.MB, budget_s=30.0)
        rows.append(row | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024})
    return rows


def throughput(source: str, quick: bool) -> list[Row]:
    """Trees at the certified optimum; `k` per root, height; and the program that pipelines 1 GB over them."""
    from stretto.synthesis.forest import forests_of

    cluster = st.Cluster.load(source)
    if source.startswith("torus"):
        cluster = st.Cluster.preset("torus", nodes=int(source.split(":")[1].split("x")[0]) ** 2, gb_per_s=1.0)
    collective = st.AllGather(cluster.num_devices)
    began, cpu_began = time.perf_counter(), cpu_s()
    forest = forests_of(collective, cluster, max_k=1 << 12)[0]
    seconds, cpu_seconds = time.perf_counter() - began, cpu_s() - cpu_began
    nbytes = st.GB
    bound = st.lower_bound(collective, cluster, nbytes)
    rate = float(forest.algorithm_gb_per_s)
    row: Row = {
        "case": f"throughput {source}", "system": "stretto", "cluster": source, "collective": "all_gather",
        "nbytes": nbytes, "alpha": "none",
    }  # fmt: skip
    peer = FOREST.get(source)
    peer_us = None if peer is None else nbytes / peer / 1e3
    row |= measured(nbytes / rate / 1e3, bound.bandwidth_us, seconds, "" if peer is None else "forestcoll", peer_us)
    spent = f" in {FOREST_S[source]:g} CPU s" if source in FOREST_S else ""
    found = f"{rate:.4g} GB/s, {'optimal' if forest.exact else 'not optimal'}, height {forest.height}"
    theirs = "" if peer is None else f"; peer {peer:g} GB/s{spent}"
    return [row | {"synth_cpu_s": cpu_seconds, "maker": f"forest(k={forest.k})", "note": found + theirs}]


def torus(quick: bool) -> list[Row]:
    """TACOS's case: 1 GiB, 50 GiB/s links, 0.5 us that block the link; a step is one chunk over one link."""
    side = 16 if quick else 32
    rate = 50 * st.GIB / st.GB
    cluster = st.Cluster.preset("torus", nodes=side * side, gb_per_s=rate, alpha_us=0.5)
    nbytes = st.GIB
    row = case(
        f"torus {side}x{side}", st.AllGather(side * side), cluster, nbytes, peer="" if quick else "tacos",
        peer_us=None if quick else 5188.0, alpha="blocking", budget_s=10.0 if quick else 55.0, makers=["greedy"],
    )  # fmt: skip
    if "time_us" in row:
        step = 0.5 + nbytes / side**2 / rate / 1e3
        least = -(-(side * side - 1) // 4)
        row["note"] = f"{row['time_us'] / step:.1f} steps; {least} is the least, tacos {259 if not quick else '-'}"
    return [row]


def alltoall(quick: bool) -> list[Row]:
    sources = ("dgx2:2",) if quick else ("dgx2:8", "dgx_a100:16")
    rows = []
    for source in sources:
        cluster = st.Cluster.load(source)
        rows.append(
            case(
                f"all_to_all {source}",
                st.AllToAll(cluster.num_devices),
                cluster,
                64 * st.MB,
                budget_s=5.0 if quick else 120.0,
            )
        )
    return rows


def fat_tree(source: str, quick: bool) -> list[Row]:
    """All-to-all on trees of switches with the budget that `synthesize` has by default."""
    cluster = st.Cluster.load(source)
    row = case(f"all_to_all {source}", st.AllToAll(cluster.num_devices), cluster, 256 * st.MB, budget_s=30.0)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return [row | {"peak_mib": max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, children) / 1024}]


def ablation(quick: bool) -> list[Row]:
    """The paper's: inter-node connections, chunks, switch policy, instances; and its mixture-of-experts sizes."""
    from stretto.synthesis.explorer import sketches

    budget_s = 3.0 if quick else 10.0
    ndv2, dgx2, box = (st.Cluster.load(source) for source in ("ndv2:2", "dgx2:2", "dgx2"))
    rows = []

    def sketched(name: str, cluster: st.Cluster, sketch: Sketch, nbytes: float) -> None:
        rows.append(
            case(
                f"ablation {name}",
                st.AllGather(cluster.num_devices),
                cluster,
                nbytes,
                alpha="blocking",
                budget_s=budget_s,
                makers=["three_stage"],
                sketch=sketch,
                note=connections,
            )
        )

    for count in (1, 4, 8):
        sketched(f"connections={count}", dgx2, Sketch(name=f"conn={count}").with_connections(count, 16), 32 * st.KB)
    for chunks in (1, 2) if quick else (1, 2, 4):
        sketched(f"chunks={chunks}", ndv2, next(sketches(ndv2)).vary(input_chunkup=chunks), 16 * st.MB)
    # One message is planned per chunk, and a connection costs nothing by itself: policies decide about the messages.
    for cluster, nbytes in ((dgx2, 32 * st.KB), (box, 32 * st.MB), (dgx2, 32 * st.MB)):
        by_name = {sketch.name: sketch for sketch in sketches(cluster)}
        for policy in ("uc-min", "uc-max"):
            sketched(f"{policy} {cluster.name} {format_bytes(nbytes)}", cluster, by_name[f"auto,{policy}"], nbytes)
    program = st.algorithm("hierarchical", "all_gather", 16, cluster=ndv2)
    for instances in (1, 2, 4, 8, 16):
        began = time.perf_counter()
        lowered = program.lower(instances=instances)
        took = st.simulate(lowered, ndv2, nbytes=16 * st.MB, alpha="blocking").total_us
        bound = st.lower_bound(program.collective, ndv2, 16 * st.MB)
        rows.append(
            {"case": f"ablation instances={instances}", "system": "stretto", "cluster": ndv2.name,
             "collective": "all_gather", "nbytes": 16 * st.MB, "alpha": "blocking"}
            | measured(took, bound.total_us, time.perf_counter() - began, "", None)
            | {"maker": f"hierarchical, {lowered.num_channels} channels"}
        )  # fmt: skip
    rows.append(case("mixture of experts", st.AllToAll(16), ndv2, 6 * st.MB, budget_s=2 * budget_s))
    rows.append(case("mixture of experts", st.AllReduce(16), ndv2, 256 * st.MB, budget_s=2 * budget_s))
    return rows


def export(quick: bool) -> list[Row]:
    """The instruction streams of the best programs as files, read back, proved and run on data."""
    from stretto.programs.formats import SUFFIXES, load_program
    from stretto.programs.formats.mscclpp_reader import ExecutionPlan, check_plan
    from stretto.programs.interpret import check

    rows = []
    kinds = (st.AllGather, st.ReduceScatter, st.AllReduce, st.AllToAll)
    sources = ("ndv2",) if quick else ("ndv2", "ndv2:2", "dgx2:2")
    for source, build, suffix in product(sources, kinds, (".xml", ".json")):
        cluster = st.Cluster.load(source)
        collective = build(cluster.num_devices)
        began = time.perf_counter()
        row: Row = {
            "case": f"export {collective.kind} {source}{suffix}", "system": "stretto", "cluster": cluster.name,
            "collective": collective.kind, "nbytes": 16 * st.MB, "alpha": "pipelined",
        }  # fmt: skip
        try:
            found = st.synthesize(
                collective,
                cluster,
                16 * st.MB,
                lower=SUFFIXES[suffix],
                cache=False,
                budget_s=3.0 if quick else BUDGET_S / 2,
            )
            lowering = found.lowering
            assert lowering is not None
            seconds = time.perf_counter() - began
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"program{suffix}"
                found.save(path)
                again = load_program(path)
                if isinstance(again, st.programs.Lowered):
                    again.verify()
                    check(again, fifo_depth=2, op="sum", seed=0)
                else:
                    assert isinstance(again, ExecutionPlan)
                    check_plan(again)
            row |= measured(lowering.time_us, found.certificate.bound_us, seconds, "", None)
            row |= {"maker": f"{found.program.name}, {lowering.instances} instances", "note": "proved and run"}
        except st.StrettoError as error:
            row |= {"note": str(error)[:100]}
        rows.append(row)
    return rows


Case = Callable[[bool], list[Row]]
CASES: dict[str, Case] = {
    "ndv2x1": ndv2x1,
    "taccl": taccl,
    "sketch": sketched,
    **{f"teccl {source} {kind}": partial(teccl, source, kind) for source, kind in TECCL},
    "multicast": multicast,
    "scale ndv2:10": partial(scale, "ndv2:10", 10.0, "taccl, published: 480 s"),
    "scale dgx2:8": partial(scale, "dgx2:8", 40.0, "taccl, published: 11 h"),
    "scale torus:6x8": partial(scale, "torus:6x8", 15.0, ""),
    "scale torus:8x8x8": partial(scale, "torus:8x8x8", 60.0, ""),
    "scale dgx2:64": partial(scale, "dgx2:64", 200.0, ""),
    **{f"scale dgx_h100_spine:{hosts}": partial(large, f"dgx_h100_spine:{hosts}") for hosts in (64, 128, 512, 2048)},
    **{f"throughput {source}": partial(throughput, source) for source in (*FOREST, "dgx_a100:16")},
    "torus": torus,
    "alltoall": alltoall,
    **{f"alltoall fat_tree:{devices}": partial(fat_tree, f"fat_tree:{devices}") for devices in (128, 512, 1024)},
    "ablation": ablation,
    "export": export,
}
QUICK = ("ndv2x1", "teccl ndv2_teccl:2 all_gather", "scale ndv2:10", "throughput dgx_a100:2", "torus")


if __name__ == "__main__":
    run_cases(__file__, __doc__, "Synthesis: time, bound and peers", CASES, quick=QUICK)
