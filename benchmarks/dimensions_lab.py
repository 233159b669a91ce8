# SPDX-License-Identifier: Apache-2.0
"""Dimension schedules on the executor, in the lab: real messages on two real dimensions, beside the model.

``shm x network``: two hosts of two ranks; memory inside a host is one dimension, the uplinks are the other, and both
are found from the links (`stretto.dimensions.discover`). ``two uplinks``: four hosts as a grid of two by two; a host's
first uplink leads along one dimension, its second along the other. `model_us` is the model with single messages;
`links_us` is the program on every link, with the rates that TCP leaves of the shaped ones, `measured_us` the median run
and `least_us` the fastest: on a machine whose processors are taken by others, that is nearer to what the links do.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import Row, finish, options

import stretto as st
from stretto.cluster.grid import regular
from stretto.dimensions import discover
from stretto.dimensions.link_search import LinkProgram, link_programs
from stretto.lab import Lab, unavailable
from stretto.lab.layout import wire_bytes
from stretto.programs.formats.text import dumps

RANK = Path(__file__).with_name("dimensions_lab_rank.py")
LIMIT_S = 240.0
CHUNKS = 16
SYSTEMS = ("baseline", "themis_fifo", "themis_scf", "fastest")
Networks = Mapping[tuple[int, int], str]


def memory_and_network() -> tuple[Lab, st.Cluster, Networks]:
    lab = Lab(hosts=2, ranks_per_host=2, uplinks={"rdma": "5mbit"})
    cluster = _without_headers(lab.cluster())
    return lab, replace(cluster, dimensions=discover(cluster)), {}


def two_uplinks() -> tuple[Lab, st.Cluster, Networks]:
    lab = Lab(hosts=4, ranks_per_host=1, uplinks={"rdma": "5mbit", "eth": "5mbit"})
    dims = [st.Dimension(kind="switch", size=2, gb_per_s=0.000625, alpha_us=10.0) for _ in range(2)]
    between = {0b01: "rdma", 0b10: "eth"}
    networks = {(a, b): between[a ^ b] for a in range(4) for b in range(4) if a ^ b in between}
    return lab, _without_headers(regular("2x2", dims)), networks


CASES: dict[str, Callable[[], tuple[Lab, st.Cluster, Networks]]] = {
    "shm x network": memory_and_network, "two uplinks": two_uplinks,
}  # fmt: skip


def _without_headers(cluster: st.Cluster) -> st.Cluster:
    """Rates of payload: what TCP and IP add to every packet is not the program's."""
    share = 1e6 / wire_bytes(1e6)
    return replace(cluster, link_gb_per_s=cluster.link_gb_per_s * share)


def rows_of(case: str, nbytes: int, times: int) -> list[Row]:
    lab, cluster, networks = CASES[case]()
    found = link_programs(cluster, "all_reduce", nbytes, chunks=CHUNKS, units=8 * CHUNKS)
    best = min(found.values(), key=lambda one: one.total_us)
    chosen: dict[str, LinkProgram] = {name: {**found, "fastest": best}[name] for name in SYSTEMS}
    measured = _measured(lab, networks, chosen, nbytes, times)
    bound = st.lower_bound(st.AllReduce(cluster.num_devices), cluster, nbytes).total_us
    return [
        {
            "case": f"{case} {nbytes / 1e6:.3g}MB", "system": name, "model_us": one.promise_us,
            "links_us": one.total_us, "measured_us": median(measured[name]), "least_us": min(measured[name]),
            "least_over_links": min(measured[name]) / one.total_us - 1, "bound_us": bound,
        }
        for name, one in chosen.items()
    ]  # fmt: skip


def _measured(
    lab: Lab, networks: Networks, chosen: Mapping[str, LinkProgram], nbytes: int, times: int
) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name, lab:
        folder = Path(name)
        asked: dict[str, Any] = {
            "count": nbytes // 4, "times": times, "networks": [(*pair, net) for pair, net in networks.items()],
            "programs": {system: dumps(one.program) for system, one in chosen.items()},
        }  # fmt: skip
        (folder / "asked.json").write_text(json.dumps(asked))
        done = lab.run([sys.executable, str(RANK), name], timeout_s=LIMIT_S)
        if done.failed is not None or done.timed_out:
            sys.exit(f"dimensions in the lab: {done.why}")
        ranks = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    return {
        system: [
            1e6 * (max(end for _, end in run) - min(begin for begin, _ in run))
            for run in list(zip(*(rank[system] for rank in ranks), strict=True))[1:]
        ]
        for system in chosen
    }  # fmt: skip


def main() -> None:
    args = options(__doc__, only=tuple(CASES))
    why = unavailable()
    if why:
        sys.exit(f"no lab here: {why}")
    cases = [args.only] if args.only else list(CASES)
    rows = [row for case in cases for row in rows_of(case, 1_048_576, 3 if args.quick else 7)]
    finish(rows, args, title="Dimension schedules on the executor, in the lab")


if __name__ == "__main__":
    main()
