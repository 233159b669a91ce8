# SPDX-License-Identifier: Apache-2.0
"""Kernels rewrite a step aspect by aspect; each rank's part of it fits to the others'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto.cluster import Cluster
from stretto.errors import InvalidInput
from stretto.strategy import (
    BUILDERS,
    ModelSpec,
    NodeConfig,
    Strategy,
    Sync,
    Variable,
    build,
    global_step,
    local_step,
    to_workload,
    zoo,
)
from stretto.strategy.kernels import Message

MODEL = ModelSpec(
    name="small",
    variables=(
        Variable(name="table", shape=(1000, 16), sparse=True, rows=10, forward_us=5.0, backward_us=10.0),
        Variable(name="w", shape=(64, 32), forward_us=20.0, backward_us=40.0, factors=4),
        Variable(name="b", shape=(32,)),
    ),
)
DEVICES = ("h0.gpu0", "h0.gpu1", "h1.gpu0", "h1.gpu1")


def one(variable: str, sync: Sync, partition: tuple[int, ...] = (), devices: tuple[str, ...] = DEVICES) -> Message:
    """The message of a variable that is synchronised so."""
    nodes = [
        NodeConfig(variable=v.name, sync=Sync(kind="sparse_all_gather") if v.sparse else Sync())
        for v in MODEL.variables
    ]
    at = [v.name for v in MODEL.variables].index(variable)
    nodes[at] = NodeConfig(variable=variable, sync=sync, partition=partition)
    strategy = Strategy(name="s", model="small", model_digest=MODEL.digest, devices=devices, nodes=tuple(nodes))
    step = global_step(strategy, MODEL, devices)
    return next(message for message in step.messages if message.pieces[0].variable.name == variable)


def test_a_server_is_reached_by_all_and_updates_alone() -> None:
    found = one("w", Sync(kind="parameter_server", placement=("h1.gpu0",)))
    assert [(e.kind, e.groups, e.nbytes, e.push) for e in found.exchanges] == [
        ("reduce", ((2, 0, 1, 3),), 8192, True),
        ("broadcast", ((2, 0, 1, 3),), 8192, False),
    ]
    assert found.updaters == (2,)


def test_stations_sum_up_their_hosts_first() -> None:
    found = one("w", Sync(kind="parameter_server", placement=("h1.gpu0",), transfer=("h0.gpu1", "h1.gpu0")))
    assert [(e.kind, e.groups) for e in found.exchanges] == [
        ("reduce", ((1, 0), (2, 3))),
        ("reduce", ((2, 1),)),
        ("broadcast", ((2, 1),)),
        ("broadcast", ((1, 0), (2, 3))),
    ]


def test_a_host_without_a_station_reaches_the_server_by_itself() -> None:
    found = one("w", Sync(kind="parameter_server", placement=("h1.gpu0",), transfer=("h1.gpu0",)))
    assert [e.groups for e in found.exchanges[:2]] == [((2, 3),), ((2, 0, 1),)]


def test_sparse_gradients_travel_as_rows() -> None:
    rows = 10 * (16 * 4 + 8)
    gathered = one("table", Sync(kind="sparse_all_gather"))
    assert [(e.kind, e.nbytes) for e in gathered.exchanges] == [("all_gather", 4 * rows)]
    served = one("table", Sync(kind="parameter_server", placement=("h0.gpu0",)))
    assert [(e.kind, e.nbytes) for e in served.exchanges] == [("gather", 4 * rows), ("scatter", 4 * rows)]
    dense = one("table", Sync())
    assert [(e.kind, e.nbytes) for e in dense.exchanges] == [("all_reduce", 64000)]


def test_on_torch_changed_rows_go_to_all_and_a_forward_pass_waits_for_everything() -> None:
    model = replace(MODEL, runtime="torch")
    step = global_step(build("ps", model, DEVICES), model, DEVICES)
    table = next(message for message in step.messages if message.name == "table")
    assert [(e.kind, e.nbytes) for e in table.exchanges] == [("gather", 4 * 720.0), ("broadcast", 4 * 720.0)]
    everywhere = replace(model, variables=tuple(replace(v, rows=900) if v.sparse else v for v in model.variables))
    whole = global_step(build("ps", everywhere, DEVICES), everywhere, DEVICES)
    assert next(m for m in whole.messages if m.name == "table").exchanges[1].nbytes == 1000 * (64 + 8)
    first, second = (op for op in to_workload(build("ps", model, 4), model, 4).ops if op.phase == "forward")
    assert len(first.after) == 3 and not second.after


def test_a_sequence_is_the_order_of_the_group() -> None:
    order = tuple(reversed(DEVICES))
    assert one("w", Sync(sequence=order)).exchanges[0].groups == ((3, 2, 1, 0),)


def test_sharded_updates_a_share_everywhere() -> None:
    found = one("w", Sync(kind="sharded"))
    assert [(e.kind, e.push) for e in found.exchanges] == [("reduce_scatter", True), ("all_gather", False)]
    assert (found.updaters, found.update_share) == ((), 0.25)


@pytest.mark.parametrize(
    ("encoder", "kind", "nbytes"),
    [
        ("float16", "all_reduce", 4096),
        ("topk:0.01", "all_gather", 4 * 21 * 8),
        ("onebit", "all_gather", 4 * (256 + 8)),
        ("sufficient_factors", "all_gather", 4 * 4 * 96 * 4),
    ],
)
def test_encoders_change_what_travels(encoder: str, kind: str, nbytes: float) -> None:
    (exchange,) = one("w", Sync(encoder=encoder)).exchanges
    assert (exchange.kind, exchange.nbytes, exchange.encoding) == (kind, nbytes, encoder.partition(":")[0])


def test_powersgd_has_its_first_matrix_everywhere_before_it_makes_the_second() -> None:
    both = [("all_reduce", 2 * 64 * 4), ("all_reduce", 2 * 32 * 4)]
    assert [(e.kind, e.nbytes) for e in one("w", Sync(encoder="powersgd:2")).exchanges] == both
    server = Sync(kind="parameter_server", placement=("h0.gpu0",), encoder="powersgd:2")
    found = one("w", server).exchanges
    assert [(e.kind, e.nbytes, e.push) for e in found] == [
        ("reduce", 512, True), ("broadcast", 512, True), ("reduce", 256, True), ("broadcast", 8192, False),
    ]  # fmt: skip
    assert [bool(e.at_work_us) for e in found] == [True, False, False, False]
    assert [(e.kind, e.nbytes) for e in one("b", Sync(encoder="powersgd:2")).exchanges] == [("all_reduce", 32 * 4)]


def test_runs_are_joined_at_stations_and_all_of_them_handed_out() -> None:
    found = one("w", Sync(transfer=("h0.gpu0", "h1.gpu0"), encoder="onebit")).exchanges
    run = 256 + 8
    assert [(e.kind, e.nbytes) for e in found] == [("gather", 2 * run), ("all_gather", 4 * run), ("broadcast", 4 * run)]


def test_only_gradients_are_encoded() -> None:
    found = one("w", Sync(kind="parameter_server", placement=("h0.gpu0",), encoder="float16"))
    assert [(e.nbytes, e.encoding) for e in found.exchanges] == [(4096, "float16"), (8192, "")]


def test_factors_need_a_linear_layer() -> None:
    with pytest.raises(InvalidInput, match="linear layer"):
        one("b", Sync(encoder="sufficient_factors"))


def test_parts_of_a_cut_variable_have_lanes_of_their_own() -> None:
    kinds = ("sparse_all_gather", "all_reduce", "all_reduce")
    nodes = tuple(NodeConfig(variable=v.name, sync=Sync(kind=k)) for v, k in zip(MODEL.variables, kinds, strict=True))
    cut = replace(nodes[1], partition=(4, 1))
    strategy = Strategy(
        name="s", model="small", model_digest=MODEL.digest, devices=DEVICES, nodes=(nodes[0], cut, nodes[2])
    )
    step = global_step(strategy, MODEL, DEVICES)
    assert sorted((m.name, m.lane, m.nbytes) for m in step.messages if m.name.startswith("w")) == [
        (f"w[{at}]", at, 2048) for at in range(4)
    ]


def test_staleness_is_a_lag() -> None:
    server = Sync(kind="parameter_server", placement=("h0.gpu0",))
    assert [one("w", replace(server, staleness=k)).lag for k in (0, 2, 16, -1)] == [1, 3, 16, 16]


@pytest.mark.parametrize("builder", BUILDERS)
def test_every_rank_does_its_part_of_every_exchange_and_every_piece_is_updated(builder: str) -> None:
    model = zoo.model("ncf_sparse", scale=0.02)
    options: dict[str, Any] = {"part_mb": 0.01} if "part_mb" in BUILDERS[builder].options else {}
    step = global_step(build(builder, model, DEVICES, **options), model, DEVICES)
    locals_ = [local_step(step, rank) for rank in range(4)]
    for message in step.messages:
        for number, exchange in enumerate(message.exchanges):
            members = {rank for group in exchange.groups for rank in group}
            mine = {
                rank for rank, local in enumerate(locals_)
                for kept in local.messages if kept.name == message.name
                for other in kept.exchanges[number : number + 1] if other.groups
                and set(other.groups) <= set(exchange.groups)
            }  # fmt: skip
            assert members == mine, (message.name, number)
        updaters = [rank for rank, local in enumerate(locals_) if message.name in {m.name for m in local.updates}]
        assert updaters == list(message.updaters or range(4))
    assert {p.variable.name for m in step.messages for p in m.pieces} == {v.name for v in model.variables}


def test_a_workload_has_the_whole_step() -> None:
    cluster = Cluster.preset("autodist_b5")
    step = to_workload(build("parallax", MODEL, cluster), MODEL, cluster)
    assert sum(op.duration_us for op in step.ops if op.phase == "forward") == 25.0
    assert [op.kind for op in step.comm_ops] == ["all_reduce", "gather", "scatter"]
    needs = {dep.op: dep.lag for dep in step.op("fwd-0").after}
    assert needs == {"scatter1-table": 1}


def test_slow_ranks_compute_longer() -> None:
    step = to_workload(build("all_reduce", MODEL, 2), MODEL, 2, slowdown=(1.0, 3.0))
    assert step.op("fwd-1").durations_us == (20.0, 60.0)
    with pytest.raises(InvalidInput, match="slowdown: must be 2 numbers"):
        to_workload(build("all_reduce", MODEL, 2), MODEL, 2, slowdown=(1.0,))


def test_a_strategy_for_other_devices_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"unknown device 'x'; choose from: h0\.gpu0"):
        global_step(build("all_reduce", MODEL, ["x", "y"]), MODEL, DEVICES)
    with pytest.raises(InvalidInput, match=r"must be 'h0\.gpu0', the cluster's, not 'h0\.gpu1'"):
        to_workload(build("all_reduce", MODEL, DEVICES[1:]), MODEL, DEVICES)
    assert to_workload(build("all_reduce", MODEL, 4), MODEL, DEVICES).num_ranks == 4, "ranks by number fit anywhere"


@pytest.mark.parametrize("runtime", ["torch", "graph"])
def test_gradients_go_straight_to_servers_that_share_them_evenly(runtime: str) -> None:
    """Beside the bytes of the busiest link by both ways, by hand: 4 ranks, variables of one size."""
    variables = tuple(Variable(name=f"v{at}", shape=(64, 64)) for at in range(4))
    model = ModelSpec(name="even", variables=variables, runtime=runtime)
    for servers, even in (((0, 1, 2, 3), True), ((0, 0, 1, 1), False), ((0, 0, 0, 0), False)):
        nodes = tuple(
            NodeConfig(variable=v.name, sync=Sync(kind="parameter_server", placement=(DEVICES[at],)))
            for v, at in zip(variables, servers, strict=True)
        )
        strategy = Strategy(name="s", model="even", model_digest=model.digest, devices=DEVICES, nodes=nodes)
        step = global_step(strategy, model, DEVICES)
        pushes = [one for message in step.messages for one in message.exchanges if one.push]
        # In quarters of the model: straight, the busiest server gets 3 for each of its own; round the ring and to it,
        # a rank passes on 3/4 of each, and gets 3/4 more of each of its own.
        own = max(servers.count(at) for at in servers)
        assert (3 * own <= max(0.75 * (4 + own), 4 - 0.25 * min(map(servers.count, range(4))))) == even
        assert {one.direct for one in pushes} == {even and runtime == "torch"}
