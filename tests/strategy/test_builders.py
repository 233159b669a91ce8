# SPDX-License-Identifier: Apache-2.0
"""Each builder follows its rule on every model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from stretto.cluster import Cluster
from stretto.errors import InvalidInput
from stretto.strategy import (
    BUILDERS,
    ModelSpec,
    NodeConfig,
    Resources,
    Strategy,
    Sync,
    Variable,
    build,
    register_builder,
    zoo,
)  # fmt: skip
from stretto.strategy.resources import resources

SMALL = {name: zoo.model(name, scale=0.02) for name in zoo.MODELS}
CLUSTER = Cluster.preset("autodist_b7")


@pytest.mark.parametrize("builder", BUILDERS)
def test_every_builder_makes_a_lossless_strategy_for_every_model(builder: str) -> None:
    for model in SMALL.values():
        made = build(builder, model, CLUSTER)
        made.check(model)
        assert made.is_lossless
        assert made.devices == CLUSTER.node_names[:16]
        assert [node.variable for node in made.nodes] == [v.name for v in model.variables]


def test_chunks_merge_neighbours_and_buckets_grow_from_the_last() -> None:
    model = ModelSpec(name="m", variables=tuple(Variable(name=f"v{at}", shape=(262_144,)) for at in range(6)))
    chunks = build("all_reduce", model, 2, chunk=4)
    assert [node.sync.group for node in chunks.nodes] == [0, 0, 0, 0, 1, 1]
    buckets = build("all_reduce", model, 2, bucket_mb=2.0)
    assert [node.sync.group for node in buckets.nodes] == [3, 2, 2, 1, 1, 0]


def test_groups_hold_one_data_type() -> None:
    kinds = ("float32", "float16", "float32")
    model = ModelSpec(
        name="m", variables=tuple(Variable(name=f"v{at}", shape=(8,), dtype=k) for at, k in enumerate(kinds))
    )
    for options in ({"chunk": 8}, {"bucket_mb": 25.0}):
        groups = [node.sync.group for node in build("all_reduce", model, 2, **options).nodes]
        assert len(set(groups)) == 3


def _loads(strategy: Strategy, model: ModelSpec) -> Counter[str]:
    load: Counter[str] = Counter()
    for v in model.variables:
        for part, sync in strategy.node(v.name).syncs(v):
            load[sync.placement[0]] += part.elements
    return load


def test_balanced_servers_have_like_loads_and_one_server_has_all() -> None:
    model = zoo.model("bert_12l", scale=0.1)
    balanced = _loads(build("ps_balanced", model, CLUSTER), model)
    assert set(balanced) == {"h0.gpu0", "h1.gpu0", "h2.gpu0", "h3.gpu0"}
    largest = max(v.elements for v in model.variables)
    assert max(balanced.values()) - min(balanced.values()) <= largest
    assert set(_loads(build("ps", model, CLUSTER, device="h1.gpu2"), model)) == {"h1.gpu2"}
    assert len(_loads(build("ps_balanced", model, CLUSTER, servers="devices"), model)) == 16
    parts = _loads(build("partitioned_ps", model, CLUSTER, part_mb=0.01), model)
    assert max(parts.values()) < 1.1 * min(parts.values())


def test_uneven_parts_follow_the_uplinks() -> None:
    model = ModelSpec(name="m", variables=(Variable(name="w", shape=(300, 1000)),))
    made = build("uneven_partitioned_ps", model, Cluster.preset("autodist_b10"))
    assert made.node("w").partition == ((100, 200), 1)
    alike = build("uneven_partitioned_ps", model, Cluster.preset("autodist_b5"))
    sizes = {part.shape[0] for part in alike.node("w").cut(model.variables[0])}
    assert len(sizes) == 2, "a number of parts that does not divide"


def test_two_levels_have_one_station_per_host_and_the_server_is_its_own() -> None:
    model = SMALL["vgg16"]
    made = build("partitioned_ps", model, CLUSTER, part_mb=0.0)
    for v in model.variables:
        for _, sync in made.node(v.name).syncs(v):
            hosts = [name.split(".")[0] for name in sync.transfer]
            assert sorted(hosts) == ["h0", "h1", "h2", "h3"]
            assert sync.placement[0] in sync.transfer


def test_parallax_sends_only_sparse_gradients_to_servers() -> None:
    model = SMALL["lm1b"]
    made = build("parallax", model, CLUSTER)
    for node in made.nodes:
        kinds = {sync.kind for sync in node.parts or (node.sync,)}
        assert kinds == ({"parameter_server"} if model.variable(node.variable).sparse else {"all_reduce"})


def test_random_axis_depends_on_its_seed_alone() -> None:
    model = zoo.model("bert_12l", scale=0.3)
    one, same, other = (build("random_axis", model, CLUSTER, seed=seed, part_mb=0.1) for seed in (1, 1, 2))
    assert one == same
    assert one.nodes != other.nodes
    assert any(node.partition and node.partition[0] == 1 for node in one.nodes), "other axes than the first"


def test_zero_differs_in_when_gradients_are_given_up() -> None:
    model = zoo.model("vgg16", scale=0.5)
    one, two = (build(name, model, 4) for name in ("zero1", "zero2"))
    assert {node.sync.kind for node in (*one.nodes, *two.nodes)} == {"sharded"}
    assert len({node.sync.group for node in one.nodes}) == 1
    assert len({node.sync.group for node in two.nodes}) > 1


def test_encoders_go_to_dense_gradients_and_staleness_to_servers() -> None:
    model = SMALL["lm1b"]
    made = build("parallax", model, CLUSTER, encoder="bfloat16", staleness=2)
    assert not made.is_lossless
    for node in made.nodes:
        for sync in node.parts or (node.sync,):
            served = sync.kind == "parameter_server"
            assert (sync.encoder, sync.staleness) == (("none", 2) if served else ("bfloat16", 0))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("magic", {}, "unknown builder 'magic'; choose from: all_reduce"),
        ("ps", {"chunk": 4}, "unknown option of builder ps 'chunk'"),
        ("ps", {"device": "rank9"}, "unknown device 'rank9'"),
        ("all_reduce", {"chunk": -1}, "chunk: must be 0.."),
        ("all_reduce", {"bucket_mb": "many"}, "bucket_mb"),
        ("ps_balanced", {"servers": "moon"}, "choose from: hosts, devices"),
        ("all_reduce", {"encoder": "topk"}, "takes a share (topk:0.01), more than 0 and at most 1, not 'topk'"),
        ("all_reduce", {"encoder": "topk:5"}, "takes a share"),
        ("all_reduce", {"encoder": "topk:inf"}, "takes a share"),
        ("all_reduce", {"encoder": "powersgd:1.5"}, "takes a rank (powersgd:4), whole and > 0"),
        ("all_reduce", {"encoder": "powersgd:inf"}, "takes a rank"),
        ("all_reduce", {"encoder": "onebit:2"}, "onebit takes no amount"),
        ("all_reduce", {"chunk": 1.5}, "chunk: must be a whole number, not 1.5"),
        ("all_reduce", {"staleness": 1}, "staleness: all_reduce has no parameter server"),
        ("ps", {"staleness": 1.5}, "staleness: must be a whole number, not 1.5"),
        ("ps_balanced", {"two_level": "maybe"}, "two_level: must be true or false, not 'maybe'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        build(name, SMALL["vgg16"], 4, **options)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_devices_are_named_or_counted() -> None:
    assert resources(CLUSTER).by_host[1] == (4, 5, 6, 7)
    assert resources(["a.0", "b.0", "a.1"]).by_host == ((0, 2), (1,))
    assert resources(["x", "y"]).by_host == ((0,), (1,))
    with pytest.raises(InvalidInput, match="different names"):
        resources(["x", "x"])


def test_shapes_that_cannot_be_cut_are_refused() -> None:
    made = build("all_reduce", SMALL["vgg16"], 2)
    name = SMALL["vgg16"].variables[0].name
    nodes = (NodeConfig(variable=name, partition=(99, 1, 1, 1)), *made.nodes[1:])
    wrong = Strategy(name="w", model=made.model, model_digest=made.model_digest, devices=made.devices, nodes=nodes)
    with pytest.raises(InvalidInput, match=r"partition\[0\]: must be 1\.\."):
        wrong.check(SMALL["vgg16"])


@pytest.fixture
def own_builder() -> Iterator[str]:
    """A builder of somebody else's, which puts everything on the first device and takes a number."""

    def to_first(model: ModelSpec, there: Resources, from_mb: float = 1.0) -> tuple[NodeConfig, ...]:
        """Everything on the first device."""
        server = Sync(kind="parameter_server", placement=there.devices[:1])
        return tuple(NodeConfig(variable=v.name, sync=server) for v in model.variables if v.nbytes >= from_mb * 0)

    register_builder("to_first", to_first)
    yield "to_first"
    BUILDERS.forget("to_first")


def test_a_server_that_was_not_asked_to_serve_is_refused(own_builder: str) -> None:
    model = SMALL["vgg16"]
    assert build(own_builder, model, CLUSTER, serve=["h0.gpu0"]).servers == ("h0.gpu0",)
    with pytest.raises(InvalidInput, match=r"serve: builder to_first places .* on h0.gpu0, .* not one of h3.gpu0"):
        build(own_builder, model, CLUSTER, serve=["h3.gpu0"])
    with pytest.raises(InvalidInput, match="serve: builder ps places"):
        build("ps", model, CLUSTER, serve=["h3.gpu0"], device="h0.gpu0")


@pytest.mark.parametrize("value", ["x", None, True, float("nan")])
def test_an_option_that_is_no_number_is_named(own_builder: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^from_mb: must be a number, not "):
        build(own_builder, SMALL["vgg16"], 2, from_mb=value)
    assert build(own_builder, SMALL["vgg16"], 2, from_mb=1).name == "to_first"


@pytest.mark.parametrize("value", ["4", 1.5, True])
def test_an_option_that_is_no_whole_number_is_named(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^parts: must be a whole number, not "):
        build("partitioned_ps", SMALL["vgg16"], 2, parts=value)
