# SPDX-License-Identifier: Apache-2.0
"""A runtime that runs fused steps is charged for these, wherever a runtime can be named."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest

from stretto import AllGather, AllReduce, Cluster, algorithm, simulate, synthesize
from stretto.errors import InvalidInput
from stretto.planner.costs.channels import default_binding
from stretto.planner.costs.costs import Motion
from stretto.planner.costs.priced import PricedCosts
from stretto.runtime.gpu import communicator, encode
from stretto.simulator import Runtime, priced_fused

NAME = "stretto-gpu:h200"
TABLE = Path(__file__).parents[2] / "benchmarks" / "gpu_h200.csv"


def test_simulated_times_are_those_that_were_measured() -> None:
    """Of calls that ran as a communicator does it by default; as instruction streams they would cost a third."""
    off = []
    for line in csv.DictReader(TABLE.open()):
        name, _, options = line["algorithm"].partition("(")
        if line["symmetric"] != "no" or options or line["collective"] == "broadcast":
            continue
        program, nbytes = algorithm(name, line["collective"], int(line["ranks"])), int(line["nbytes"])
        cluster = Cluster.preset("shared_gpu", nodes=int(line["ranks"]))
        found = simulate(program, cluster, nbytes=nbytes, runtime=NAME)
        protocol = "LL" if line["protocol"] == "ll" else "Simple"
        if dict(found.facts)["steps"] == f"protocol={protocol},blocks={line['blocks']}":
            off.append(abs(found.total_us / float(line["microseconds"]) - 1))
    assert len(off) >= 5
    assert mean(off) < 0.2


def test_the_defaults_are_those_of_the_executor() -> None:
    assert communicator.LL_BYTES == priced_fused.PACKETS_UP_TO
    assert communicator.MAX_BLOCKS == priced_fused.SLOT_BLOCKS
    for protocol, nbytes in (("simple", encode.VECTOR_BYTES), ("ll", 8)):
        assert priced_fused.LEAST_BLOCK_BYTES[protocol] == encode.BLOCK_VECTORS * nbytes


def test_spans_are_steps() -> None:
    cluster = Cluster.preset("shared_gpu", nodes=4)
    found = simulate(algorithm("direct", "all_reduce", 4), cluster, nbytes=1 << 20, runtime=NAME)
    assert found.num_spans == 12 and set(found.rank.tolist()) == set(range(4))
    assert (found.start_us < found.end_us).all() and found.end_us.max() <= found.total_us
    assert found.end_us[found.critical_path].tolist() == sorted(found.end_us[found.critical_path])
    with pytest.raises(InvalidInput, match="channels: stretto-gpu:h200 reaches"):
        simulate(algorithm("direct", "all_reduce", 4), cluster, nbytes=1, runtime=NAME, channels=["hbm"])


def test_synthesis_times_programs_as_steps() -> None:
    cluster = Cluster.preset("dgx_h200")
    found = synthesize(
        AllReduce(8), cluster, 4096, runtime=NAME, makers=["library:direct", "library:ring"], cache=False, budget_s=5
    )
    assert found.certificate.steps.startswith("protocol=LL") and found.program.name == "direct"
    took = found.certificate.lowered_us
    assert took is not None and took == simulate(found.plain, cluster, nbytes=4096, runtime=NAME).total_us
    ring = simulate(algorithm("ring", "all_reduce", 8), cluster, nbytes=4096, runtime=NAME).total_us
    assert took < ring
    with pytest.raises(InvalidInput, match="stretto-gpu:h200 has prices for ranks on one host"):
        synthesize(AllGather(16), Cluster.preset("dgx_h200", nodes=2), 4096, runtime=NAME, cache=False)


def test_the_planner_charges_for_steps_inside_a_host() -> None:
    cluster = Cluster.preset("dgx_h200", nodes=2)
    on_links, priced = PricedCosts(cluster, Runtime(name="network")), PricedCosts(cluster, NAME)
    inside = Motion(kind="all_reduce", groups=(tuple(range(8)),), channels=("nvlink",))
    across = Motion(kind="all_reduce", groups=((0, 8),), channels=default_binding(cluster).channels)
    assert priced.cost(inside, 4096, "direct").us > on_links.cost(inside, 4096, "direct").us + 5
    assert priced.cost(across, 4096, "direct").us == on_links.cost(across, 4096, "direct").us
