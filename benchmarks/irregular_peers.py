# SPDX-License-Identifier: Apache-2.0
"""All-gather on the irregular topologies of `irregular.py`, beside ForestColl and TACOS from their public sources.

    git clone https://github.com/liangyuRain/ForestColl && git clone https://github.com/astra-sim/tacos
    benchmarks/irregular_peers.py --forestcoll ForestColl --tacos tacos

Nothing of them is part of this project. ForestColl gives the best throughput that any all-gather can have, without
latencies; `share` is what our program of that size reaches of it. TACOS synthesizes for networks without switches, with
latencies that block a link, so our program is searched under these, too; of TACOS the best of several numbers of chunks
and of several random runs is shown.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import networkx as nx
from common import Row, common_options, cpu_s, finish
from irregular import topologies

import stretto as st
from stretto.units import parse_bytes

MAIN = """
#include <iostream>
#include <tacos/collective/all_gather.h>
#include <tacos/synthesizer/synthesizer.h>
#include <tacos/topology/topology.h>
struct Links : tacos::Topology {
  Links(int n, int links) {
    setNpusCount_(n);
    for (int a, b; links--;) {
      double rate, alpha;
      std::cin >> a >> b >> rate >> alpha;
      connect_(a, b, rate, alpha, false);
    }
  }
};
int main() {
  int n, links, repeats;
  double bytes;
  std::cin >> n >> links >> repeats >> bytes;
  Links topology(n, links);
  double best = 1e300;
  int best_chunks = 0;
  for (int chunks : {1, 2, 4, 8, 16})
    for (int k = 0; k < repeats; k++) {
      if (chunks > 1 && (double)n * n * chunks > 6000) continue;
      tacos::AllGather collective(n, chunks);
      double took = tacos::Synthesizer().solve(topology, collective, bytes / (n * chunks));
      if (took < best) best = took, best_chunks = chunks;
    }
  std::cout.precision(12);
  std::cout << best << " " << best_chunks << std::endl;
}
"""


def build_tacos(sources: Path, folder: Path) -> Path:
    """Compile TACOS with a main function that reads a list of links."""
    (folder / "main.cpp").write_text(MAIN)
    files = [path for path in sorted(sources.glob("src/*/*.cpp")) if path.name != "main.cpp"]
    program = folder / "tacos"
    command = ["g++", "-O2", "-std=c++17", f"-I{sources / 'include'}", str(folder / "main.cpp"), *map(str, files)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def tacos_row(program: Path, cluster: st.Cluster, nbytes: float, repeats: int) -> Row:
    lines = [f"{cluster.num_devices} {cluster.num_links} {repeats} {nbytes}"]
    lines += [f"{x.src} {x.dst} {x.gb_per_s * 1e9 / 2**30} {x.alpha_us}" for x in cluster.links()]
    began = cpu_s()
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    took, chunks = done.stdout.split()
    return {"time_us": float(took), "program": f"chunks={chunks}", "synth_cpu_s": cpu_s() - began}


def load_forestcoll(sources: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_allgather", sources / "pipeline_allgather.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forestcoll_row(module: ModuleType, cluster: st.Cluster) -> Row:
    graph = nx.DiGraph()
    for link in cluster.links():
        before = graph.get_edge_data(link.src, link.dst, {"capacity": 0})["capacity"]
        graph.add_edge(link.src, link.dst, capacity=before + link.gb_per_s)
    began = cpu_s()
    whole, scale = module.scale_to_integer_capacities(module.to_capacitated_graph(graph))
    n = cluster.num_devices
    u, k = module.OptimalBranchingsAlgo(whole, capacitated=True, compute_nodes=range(n)).binary_search()
    return {"optimum_gb_per_s": k * n / (u * scale), "synth_cpu_s": cpu_s() - began}


def ours(cluster: st.Cluster, nbytes: float, budget_s: float, alpha: str) -> Row:
    began = cpu_s()
    found = st.synthesize(
        st.AllGather(cluster.num_devices), cluster, nbytes, budget_s=budget_s, alpha=alpha, cache=False
    )
    return {
        "time_us": found.time_us,
        "gb_per_s": nbytes / found.time_us / 1e3,
        "bound_us": found.certificate.bound_us,
        "program": found.certificate.program,
        "synth_cpu_s": cpu_s() - began,
    }


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--forestcoll", type=Path, help="ForestColl's sources")
    parser.add_argument("--tacos", type=Path, help="TACOS's sources")
    parser.add_argument("--seed", type=int, default=1, help="draws the topologies")
    parser.add_argument("--bytes", default="256M", help="separated by commas, for TACOS; the largest for ForestColl")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for each search of ours")
    parser.add_argument("--repeats", type=int, default=5, help="random runs of TACOS for each number of chunks")
    parser.add_argument("--cpu", action="store_true", help="the budget counts CPU seconds: for a busy machine")
    given = parser.parse_args()
    if given.cpu:
        time.monotonic = time.process_time
    sizes = [float(parse_bytes(size)) for size in given.bytes.split(",")]
    forestcoll = load_forestcoll(given.forestcoll) if given.forestcoll else None
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        tacos = build_tacos(given.tacos, Path(folder)) if given.tacos else None
        for cluster in topologies(given.seed):
            if given.quick and cluster.num_devices > 8:
                continue
            case = {"case": cluster.name, "collective": "all_gather"}
            if forestcoll is not None:
                best = forestcoll_row(forestcoll, cluster)
                mine = ours(cluster, max(sizes), given.budget, "pipelined")
                share = mine["gb_per_s"] / best["optimum_gb_per_s"]
                rows.append(case | {"system": "forestcoll", "nbytes": max(sizes)} | best)
                rows.append(case | {"system": "stretto", "nbytes": max(sizes), "share": share} | mine)
            for nbytes in sizes if cluster.num_nodes == cluster.num_devices else ():
                if tacos is None:
                    break
                theirs = tacos_row(tacos, cluster, nbytes, given.repeats)
                mine = ours(cluster, nbytes, given.budget, "blocking")
                rows.append(case | {"system": "tacos", "nbytes": nbytes} | theirs)
                ratio = mine["time_us"] / theirs["time_us"]
                rows.append(case | {"system": "stretto, blocking", "nbytes": nbytes, "over_tacos": ratio} | mine)
            print(cluster.name, *(f"{key} {rows[-1][key]:.4f}" for key in ("share", "over_tacos") if key in rows[-1]),
                  file=sys.stderr, flush=True)  # fmt: skip
    finish(rows, given, title="all-gather beside ForestColl and TACOS")


if __name__ == "__main__":
    main()
