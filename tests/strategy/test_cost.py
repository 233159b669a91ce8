# SPDX-License-Identifier: Apache-2.0
"""The predefined cost model: its six figures where they can be counted by hand, and how it ranks."""

from __future__ import annotations

import pytest

from stretto.strategy import ModelSpec, NodeConfig, Strategy, Sync, Variable, zoo
from stretto.strategy.builders import build
from stretto.strategy.clusters import paper_cluster
from stretto.strategy.cost import StrategyCostModel
from stretto.strategy.learned import kendall_tau
from stretto.strategy.resources import Resources
from stretto.strategy.sampler import Sampler
from stretto.strategy.simulate import iteration_us

MB = 1_000_000
MODEL = ModelSpec(
    name="two",
    variables=(
        Variable(name="first", shape=(1000, 250), backward_us=100.0),
        Variable(name="second", shape=(1000, 250), backward_us=300.0, forward_us=50.0),
    ),
)
THREE = Resources(devices=("a", "b", "c"), hosts=(0, 1, 2), host_gb_per_s=(1.0, 1.0, 0.25))


def served(first: str, second: str) -> Strategy:
    return Strategy(
        name="by hand", model="two", model_digest=MODEL.digest, devices=THREE.devices,
        nodes=(
            NodeConfig(variable="first", sync=Sync(kind="parameter_server", placement=(first,))),
            NodeConfig(variable="second", sync=Sync(kind="parameter_server", placement=(second,))),
        ),
    )  # fmt: skip


def test_a_ring_loads_the_slowest_uplink_with_its_share() -> None:
    found = StrategyCostModel(MODEL, THREE).components(build("all_reduce", MODEL, THREE))
    assert found.uplink_us == pytest.approx(2 * 2 / 3 * 2 * MB / 250)
    assert found.compute_us == 450.0


def test_servers_on_fast_hosts_spare_the_slow_one() -> None:
    model = StrategyCostModel(MODEL, THREE)
    # The slow host sends and receives each variable once; the fast ones receive theirs from two.
    assert model.components(served("a", "b")).uplink_us == pytest.approx(2 * MB / 250)
    assert model.components(served("a", "c")).uplink_us == pytest.approx((2 * MB + MB) / 250)
    assert model.estimate_us(served("a", "b")) < model.estimate_us(served("a", "c"))


def test_servers_work_beside_each_other_and_one_server_by_itself() -> None:
    model = StrategyCostModel(MODEL, 3)
    one = model.components(build("ps", MODEL, 3))
    two = model.components(build("ps_balanced", MODEL, 3))
    assert one.serial_us == pytest.approx(2 * two.serial_us)
    assert one.update_us == pytest.approx(2 * two.update_us)


def test_what_hides_behind_the_backward_pass_is_not_exposed() -> None:
    small = ModelSpec(
        name="small",
        variables=(Variable(name="a", shape=(10,), backward_us=1.0), Variable(name="b", shape=(500,), backward_us=1e4)),
    )
    found = StrategyCostModel(small, 2).components(build("all_reduce", small, 2, chunk=1))
    assert 0 < found.exposed_us < 2 * found.latency_us
    assert found.exposed_us < found.serial_us + found.latency_us


def test_small_messages_pay_latency() -> None:
    model = StrategyCostModel(MODEL, 4)
    assert (
        model.components(build("all_reduce", MODEL, 4, chunk=1)).latency_us
        == 2 * model.components(build("all_reduce", MODEL, 4, chunk=2)).latency_us
    )


@pytest.mark.parametrize(("name", "where"), [("vgg16", "b7"), ("bert_3l", "a2")])
def test_it_ranks_strategies_as_the_simulator_does_more_often_than_not(name: str, where: str) -> None:
    bed = paper_cluster(where)
    model = zoo.model(name, device=bed.device)
    cost, sampler = StrategyCostModel(model, bed.cluster), Sampler(model, bed.cluster, seed=11)
    drawn = [sampler.sample()[1] for _ in range(24)]
    times = [iteration_us(strategy, model, bed.cluster) for strategy in drawn]
    assert kendall_tau([-cost.estimate_us(strategy) for strategy in drawn], times) > 0.25
