# SPDX-License-Identifier: Apache-2.0
"""One of the jobs of `astra_sim` in a process of its own, without what a benchmark imports beside.

NumPy's BLAS is told to start no threads: a job has no use for them, and to start and end them costs as much processor
time as all else that this process does but for importing NumPy.

``python benchmarks/astra_jobs.py NUMBER[:whole]`` prints the predicted time and the CPU seconds as JSON.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import stretto as st
from stretto.algorithms.symmetric import symmetric_algorithm
from stretto.cluster.grid import links_per_device, regular
from stretto.programs import Program, SymmetricProgram

ALGORITHMS = {"ring": "ring", "switch": "halving_doubling", "fully_connected": "direct"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One all-reduce on a regular network; `dims` are (kind, size, GB/s and latency in us of one link)."""

    dims: Sequence[tuple[str, int, float, float]]
    nbytes: float
    chunks: int = 1
    note: str = ""

    @property
    def name(self) -> str:
        """The network, the collective and the number of chunks."""
        network = " x ".join(f"{kind} {size}" for kind, size, _, _ in self.dims)
        return f"all-reduce, {network}" + (f", {self.chunks} chunks" if self.chunks > 1 else "")

    @property
    def ranks(self) -> int:
        """How many devices there are."""
        return math.prod(size for _, size, _, _ in self.dims)

    def cluster(self) -> st.Cluster:
        """The network for Stretto, whose rates are those of all links of a device in a dimension."""
        dims = []
        for kind, size, rate, latency in self.dims:
            aggregate, hops = rate * links_per_device(kind, size), 2 if kind == "switch" else 1
            dims.append(st.Dimension(kind=kind, size=size, gb_per_s=aggregate, alpha_us=hops * latency))
        return regular(self.name, dims)

    def program(self, cluster: st.Cluster) -> SymmetricProgram:
        """The algorithm that ASTRA-sim is told to use; one rank stands for all."""
        name = "hierarchical" if len(self.dims) > 1 else ALGORITHMS[self.dims[0][0]]
        return symmetric_algorithm(name, "all_reduce", cluster, chunks=self.chunks)

    def whole(self, cluster: st.Cluster) -> Program:
        """The same program, with the transfers of all ranks."""
        name = "hierarchical" if len(self.dims) > 1 else ALGORITHMS[self.dims[0][0]]
        return st.algorithm(name, "all_reduce", self.ranks, cluster=cluster, chunks=self.chunks)


def _switches(sizes: Sequence[int], rates: Sequence[float]) -> list[tuple[str, int, float, float]]:
    return [("switch", size, rate, 0.35) for size, rate in zip(sizes, rates, strict=True)]


UNSHARED = "ASTRA-sim: chunks in flight do not share a link's rate"
JOBS = [
    *(Job(dims=[("ring", size, 50.0, 0.5)], nbytes=64e6) for size in (16, 64, 256, 1024)),
    *(Job(dims=[("switch", size, 50.0, 0.5)], nbytes=64e6) for size in (16, 64, 256, 1024)),
    *(Job(dims=[("fully_connected", size, 50.0, 0.5)], nbytes=64e6) for size in (16, 64)),
    Job(dims=[("ring", 8, 50.0, 0.5), ("switch", 8, 25.0, 0.5)], nbytes=128e6),
    Job(dims=_switches((16, 8, 8), (200.0, 100.0, 50.0)), nbytes=128e6),
    Job(dims=_switches((16, 16, 16), (200.0, 100.0, 50.0)), nbytes=1024e6, chunks=64, note=UNSHARED),
]


def ours(job: Job, *, whole: bool) -> dict[str, float]:
    """Build, prove and simulate; the time and the CPU seconds of doing so."""
    begun = time.process_time()
    cluster = job.cluster()
    program = job.whole(cluster) if whole else job.program(cluster)
    program.verify()
    time_us = st.simulate(program, cluster, nbytes=job.nbytes).total_us
    return {"time_us": time_us, "work_cpu_s": time.process_time() - begun}


if __name__ == "__main__":
    number, _, every = sys.argv[1].partition(":")
    said = ours(JOBS[int(number)], whole=bool(every))
    print("{" + ", ".join(f'"{name}": {value!r}' for name, value in said.items()) + "}")
