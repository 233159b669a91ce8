# SPDX-License-Identifier: Apache-2.0
"""The step in time: fair shares, queues, and agreement with the simulator link by link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges.link_level import link_level_us

from stretto.cluster import Cluster
from stretto.errors import Infeasible, InvalidInput
from stretto.strategy import (
    BUILDERS,
    ModelSpec,
    NodeConfig,
    Strategy,
    Sync,
    Variable,
    build,
    iteration_us,
    plan_strategy,
    simulate_strategy,
    zoo,
)
from stretto.strategy.flows import flow_costs, paces

B5, B7, A1 = (Cluster.preset(f"autodist_{name}") for name in ("b5", "b7", "a1"))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1 << 32))
def test_paces_fit_and_nobody_could_be_faster_alone(messages: int, links: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    share = rng.random((messages, links)) * (rng.random((messages, links)) < 0.6)
    capacity = rng.random(links) + 1.0
    share = np.minimum(share, capacity)
    pace = paces(share, capacity)
    load = pace @ share
    assert (load <= capacity * (1 + 1e-9)).all()
    for at in range(messages):
        if pace[at] < 1 - 1e-9:
            full = (share[at] > 0) & (load >= capacity * (1 - 1e-9))
            assert full.any(), "slowed down by a full link"
            assert any(pace[share[:, link] > 0].max() <= pace[at] + 1e-9 for link in np.flatnonzero(full))


def one_message(kind: str, nbytes: int, count: int = 1) -> ModelSpec:
    return ModelSpec(
        name="m", variables=tuple(
            Variable(name=f"{kind}{at}", shape=(nbytes // 4,), forward_us=10.0, backward_us=20.0) for at in range(count)
        ),
    )  # fmt: skip


def served(model: ModelSpec, cluster: Cluster, servers: list[str], *, staleness: int = 0) -> Strategy:
    nodes = tuple(
        NodeConfig(variable=v.name, sync=Sync(kind="parameter_server", placement=(server,), staleness=staleness))
        for v, server in zip(model.variables, servers, strict=True)
    )
    return Strategy(
        name="s", model=model.name, model_digest=model.digest, devices=cluster.node_names[: cluster.num_devices],
        nodes=nodes,
    )  # fmt: skip


def test_one_message_takes_what_it_takes_alone() -> None:
    model = one_message("v", 40_000_000)
    found = simulate_strategy(build("all_reduce", model, A1), model, A1)
    alone = flow_costs(A1).flow("all_reduce", (tuple(range(16)),), 40e6, root=0, how="stock", lane=0).us
    assert found.iteration_us == pytest.approx(found.compute_us + alone)
    assert found.settled
    assert found.messages == 1


def test_different_servers_are_reached_at_the_same_time_and_one_is_not() -> None:
    model = one_message("v", 40_000_000, count=4)
    apart = iteration_us(served(model, A1, ["h0.gpu0", "h1.gpu0", "h2.gpu0", "h3.gpu0"]), model, A1)
    together = iteration_us(served(model, A1, ["h0.gpu0"] * 4), model, A1)
    # Push and pull one after the other; at one server four pushes, and the last pull behind them.
    assert together / apart == pytest.approx(5 / 2, rel=0.02)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(("name", "cluster"), [("ncf_sparse@0.1", B5), ("bert_3l@0.5", A1), ("vgg16@0.3", B7)])
def test_agrees_with_the_links(builder: str, name: str, cluster: Cluster) -> None:
    model = zoo.load(name)
    made = build(builder, model, cluster)
    # Messages that meet are one load each here, and many small steps there; those alone are the same.
    assert iteration_us(made, model, cluster) == pytest.approx(link_level_us(made, model, cluster), rel=0.1)


def test_parts_that_are_reduced_beside_each_other_wait_for_one_another() -> None:
    model = zoo.model("ncf_dense", scale=0.5)
    made = build("partitioned_all_reduce", model, B7)
    exact = link_level_us(made, model, B7)
    assert iteration_us(made, model, B7) == pytest.approx(exact, rel=0.03)
    flow = flow_costs(B7).flow("all_reduce", (tuple(range(16)),), 3e7, root=0, how="stock", lane=0)
    four, eight = (flow_costs(B7).beside_others(flow, count) for count in (4, 8))
    # Less than a fair share of the uplinks, and of no more than that.
    fair = paces(np.array([flow.load / flow.us] * 8), B7.link_gb_per_s * 1e3)[0]
    assert eight < fair
    assert eight == pytest.approx(four / 2, rel=0.05)


def test_messages_that_cost_more_in_host_code_are_better_merged() -> None:
    model = zoo.load("bert_3l@0.5")
    alone, merged = (build("all_reduce", model, B7, chunk=chunk) for chunk in (1, 64))

    def lost(made: Strategy) -> tuple[float, float]:
        fast = [simulate_strategy(made, model, B7, host_us=us).iteration_us for us in (0.0, 1000.0)]
        exact = [link_level_us(made, model, B7, host_us=us) for us in (0.0, 1000.0)]
        return fast[1] - fast[0], exact[1] - exact[0]

    assert all(one > 5 * other > 0 for one, other in zip(lost(alone), lost(merged), strict=True))
    with pytest.raises(InvalidInput, match="host_us: must be 0 or more, not -1"):
        simulate_strategy(build("ps", model, B7), model, B7, host_us=-1.0)


def test_servers_of_many_hosts_are_reached_fairly_and_not_in_turn() -> None:
    model = one_message("v", 40_000_000, count=4)
    made = served(model, A1, [f"h{host}.gpu0" for host in range(4)])
    assert link_level_us(made, model, A1) == pytest.approx(iteration_us(made, model, A1), rel=0.01)


def test_no_iteration_beats_its_bound() -> None:
    for name in ("ncf_dense@0.2", "transformer@0.2"):
        model = zoo.load(name)
        for builder in BUILDERS:
            found = simulate_strategy(build(builder, model, B7), model, B7)
            assert found.iteration_us >= found.bound_us * (1 - 1e-9)
            assert found.exposed_us >= -1e-6 * found.compute_us


def test_a_bad_sequence_costs_more_than_a_good_one() -> None:
    model = one_message("v", 40_000_000)
    b1 = Cluster.preset("autodist_b1")
    devices = b1.node_names[:8]
    made = build("all_reduce", model, b1)

    def ordered(sequence: tuple[str, ...]) -> float:
        nodes = (replace(made.nodes[0], sync=Sync(sequence=sequence)),)
        return iteration_us(replace(made, nodes=nodes), model, b1)

    back_and_forth = tuple(name for pair in zip(devices[:4], devices[4:], strict=True) for name in pair)
    assert ordered(devices) < 0.7 * ordered(back_and_forth)


def test_cutting_before_all_reduce_pays_where_single_flows_are_capped() -> None:
    model = zoo.model("ncf_dense", scale=0.3)
    whole, cut = (iteration_us(build(name, model, B7), model, B7) for name in ("all_reduce", "partitioned_all_reduce"))
    assert cut < 0.8 * whole


def test_staleness_hides_the_way_to_the_server_but_not_its_load() -> None:
    model = one_message("v", 4_000_000)
    model = replace(model, variables=(replace(model.variables[0], forward_us=3000.0, backward_us=6000.0),))
    times = [simulate_strategy(served(model, A1, ["h0.gpu0"], staleness=late), model, A1) for late in (0, 1, 4, -1)]
    assert times[0].iteration_us > times[1].iteration_us >= times[2].iteration_us * (1 - 1e-9)
    assert times[3].iteration_us >= times[3].bound_us * (1 - 1e-9)


def test_a_slow_host_slows_all() -> None:
    model = zoo.model("vgg16", scale=0.1)
    made = build("all_reduce", model, B5)
    slow = iteration_us(made, model, B5, slowdown=(1.0,) * 4 + (2.0,) * 4)
    assert slow > 1.8 * iteration_us(made, model, B5)


def test_the_joint_planner_takes_over_what_a_strategy_leaves_open() -> None:
    model = zoo.model("vgg16", scale=0.1)
    found = plan_strategy(build("all_reduce", model, B5), model, B5, steps=200)
    assert found.plan.iteration_us <= found.plan.baselines_us["fifo"]
    assert found.plan.workload == "vgg16@0.1:all_reduce"


def test_too_many_transfers_are_refused() -> None:
    model = zoo.model("bert_large")
    with pytest.raises(Infeasible, match="transfers in 3 iterations"):
        link_level_us(build("random_axis", model, Cluster.preset("autodist_b8"), part_mb=0.0), model,
                      Cluster.preset("autodist_b8"))  # fmt: skip
