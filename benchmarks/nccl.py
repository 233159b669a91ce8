# SPDX-License-Identifier: Apache-2.0
"""Ours over NCCL's ring and tree, simulated, on DGX-like clusters.

NCCL's figure is the best for it: rings of 1 to 8 pieces, trees of 1 to 128 in two patterns, each in the shorter of both
contention models (docs/algorithms.md says what is assumed). Ours is the fastest program of the rest of the library and,
from 1 MB on, of the makers `forest` and `compose`, in the default model. `ratio` is NCCL's time over ours.

The cases `models` are the communication of a training step of three models, as in TACCL's evaluation: the gradients of
Transformer-XL (151 M parameters) and BERT-base (110 M), in half precision in DDP's buckets of 25 MiB, and the 6 MB of
all-to-all and 256 MB of all-reduce that TACCL gives for its mixture of experts. Of the first two the paper's text at
hand has no sizes: these are the models' own. NCCL's all-to-all is one send from every rank to every other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache, partial

from common import Row, run_cases

import stretto as st
from stretto.algorithms import algorithms
from stretto.collectives import COLLECTIVES
from stretto.programs import Program

BOXES = ("dgx2", "dgx_a100", "dgx_h100")
COUNTS = (1, 2, 4)
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = (st.KB, st.MB, st.GB)
PIECES = (1, 8, 32, 128)
MAX_TRANSFERS = 300_000
MAKERS = ("forest", "compose")
BUDGET_S = 20.0
BUCKET = 25 * st.MIB
MODEL_BUDGET_S = 60.0
MODELS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "transformer-xl 151 M": (("all_reduce", BUCKET, round(2 * 151e6 / BUCKET)),),
    "bert-base 110 M": (("all_reduce", BUCKET, round(2 * 110e6 / BUCKET)),),
    "moe": (("all_to_all", 6 * st.MB, 1), ("all_reduce", 256 * st.MB, 1)),
}
"""Collective, bytes, and how many of them a step has."""
MODEL_BOXES = ("ndv2:2", "ndv2:4", "dgx2:2")


def shortest_us(programs: list[Program], cluster: st.Cluster, nbytes: int) -> float:
    """The shortest time of these programs in either contention model."""
    return min(
        st.simulate(program, cluster, nbytes=nbytes, contention=contention).total_us
        for program in programs
        for contention in ("fifo", "fair")
    )


def nccls(cluster: st.Cluster, kind: str) -> dict[str, list[Program]]:
    """NCCL's rings and trees for a collective."""
    n = cluster.num_devices
    rings = [st.algorithm("nccl_ring", kind, n, cluster=cluster)]
    for chunks in (4, 8):
        if chunks * rings[0].num_transfers <= MAX_TRANSFERS:
            rings.append(st.algorithm("nccl_ring", kind, n, cluster=cluster, chunks=chunks))
    found = {"nccl_ring": rings}
    if kind == "all_reduce":
        found["nccl_tree"] = [
            st.algorithm("nccl_tree", kind, n, cluster=cluster, chunks=chunks, pattern=pattern)
            for chunks in PIECES
            for pattern in ("tree", "balanced")
        ]
    return found


def ours(cluster: st.Cluster, kind: str) -> Iterator[Program]:
    """The rest of the library, with several numbers of pieces."""
    for entry in algorithms(kind):
        for chunks in (None, *PIECES) if not entry.name.startswith("nccl") else ():
            try:
                program = st.algorithm(entry.name, kind, cluster.num_devices, cluster=cluster, chunks=chunks)
            except st.InvalidInput:
                continue  # not defined for this rank count
            if program.num_transfers <= MAX_TRANSFERS:
                yield program


def compare(source: str, quick: bool) -> list[Row]:
    """One cluster: every collective and size; the budget of a search counts CPU seconds."""
    time.monotonic = time.process_time
    cluster = st.Cluster.load(source)
    rows: list[Row] = []
    for kind in KINDS:
        began = time.perf_counter()
        theirs = nccls(cluster, kind)
        mine = list(ours(cluster, kind))
        for nbytes in SIZES[: 1 if quick else None]:
            nccl_us = {name: shortest_us(programs, cluster, nbytes) for name, programs in theirs.items()}
            times = {p.name: st.simulate(p, cluster, nbytes=nbytes).total_us for p in mine}
            if nbytes >= st.MB:
                try:
                    found = st.synthesize(
                        COLLECTIVES[kind](cluster.num_devices), cluster, nbytes, budget_s=BUDGET_S, makers=list(MAKERS),
                        cache=False,
                    )  # fmt: skip
                    times[found.program.name] = found.certificate.time_us
                except st.StrettoError:
                    pass  # nothing in time: the library stands
            name = min(times, key=lambda n: times[n])
            best = min(nccl_us.values())
            rows.append(
                {
                    "case": f"{kind} on {source}", "system": name, "cluster": source, "collective": kind,
                    "nbytes": nbytes, "time_us": times[name], "nccl_ring_us": nccl_us["nccl_ring"],
                    "nccl_tree_us": nccl_us.get("nccl_tree", float("nan")), "ratio": best / times[name],
                    "bound_us": st.lower_bound(mine[0].collective, cluster, nbytes=nbytes).total_us,
                }
            )  # fmt: skip
        rows[-1]["seconds"] = time.perf_counter() - began
    return rows


@cache
def both_us(source: str, kind: str, nbytes: int) -> tuple[float, float, str]:
    """The time of NCCL's best and of ours, and what ours is."""
    cluster = st.Cluster.load(source)
    if kind == "all_to_all":
        theirs = {"direct": [st.algorithm("direct", kind, cluster.num_devices, cluster=cluster)]}
    else:
        theirs = nccls(cluster, kind)
    nccl_us = min(shortest_us(programs, cluster, nbytes) for programs in theirs.values())
    times = {p.name: st.simulate(p, cluster, nbytes=nbytes).total_us for p in ours(cluster, kind)}
    found = st.synthesize(
        COLLECTIVES[kind](cluster.num_devices), cluster, nbytes, budget_s=MODEL_BUDGET_S, cache=False,
        makers=["compose", "flow"] if kind == "all_to_all" else list(MAKERS),
    )  # fmt: skip
    times[found.program.name] = found.certificate.time_us
    name = min(times, key=lambda n: times[n])
    return nccl_us, times[name], name


def models(source: str, quick: bool) -> list[Row]:
    """The communication of a step of each model on one cluster."""
    rows: list[Row] = []
    for model, calls in list(MODELS.items())[: 1 if quick else None]:
        nccl_us = ours_us = 0.0
        names = []
        for kind, nbytes, count in calls:
            theirs_us, mine_us, name = both_us(source, kind, nbytes)
            nccl_us, ours_us = nccl_us + count * theirs_us, ours_us + count * mine_us
            names.append(f"{count} x {kind} of {nbytes / 1e6:.0f} MB: {name}")
        rows.append(
            {"case": f"{model} on {source}", "system": "; ".join(names), "cluster": source, "time_us": ours_us,
             "nccl_us": nccl_us, "ratio": nccl_us / ours_us}
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    cases = {f"{box}:{count}": partial(compare, f"{box}:{count}") for count in COUNTS for box in BOXES}
    cases |= {f"models {source}": partial(models, source) for source in MODEL_BOXES}
    run_cases(__file__, __doc__, "Ours over NCCL's ring and tree, simulated", cases)
