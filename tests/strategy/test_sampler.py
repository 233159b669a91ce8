# SPDX-License-Identifier: Apache-2.0
"""The guided sampler keeps its three constraints, and to what the user allows."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cluster import Cluster
from stretto.errors import InvalidInput
from stretto.strategy import BUILDERS, ModelSpec, Strategy, Variable, build, zoo
from stretto.strategy.kernels import global_step
from stretto.strategy.resources import Resources
from stretto.strategy.sampler import LARGE_SHARE, SMALL_BYTES, Sampler

NAMES = [f"h{rank // 2}.gpu{rank % 2}" for rank in range(6)]
MIXED = ModelSpec(
    name="mixed",
    variables=(
        Variable(name="table", shape=(5000, 16), sparse=True, rows=64),
        Variable(name="huge", shape=(1024, 512), factors=4),
        *(Variable(name=f"w{at}", shape=(128, 64)) for at in range(8)),
        *(Variable(name=f"b{at}", shape=(64,)) for at in range(8)),
        Variable(name="scalar", shape=()),
    ),
)


def drawn(seed: int, count: int = 30, **options: int | bool) -> list[Strategy]:
    sampler = Sampler(MIXED, NAMES, seed=seed, **options)  # type: ignore[arg-type]
    found = []
    for _ in range(count):
        recipe, strategy = sampler.sample()
        found += [strategy, sampler.change(recipe)[1]]
    return found


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=15, deadline=None)
def test_every_strategy_is_one_for_the_model_and_can_be_rewritten(seed: int) -> None:
    for strategy in drawn(seed, 4):
        strategy.check(MIXED)
        assert strategy.is_lossless
        pieces = global_step(strategy, MIXED, NAMES).pieces
        assert sum(piece.part.elements for piece in pieces) == sum(v.elements for v in MIXED.variables)


def test_the_same_seed_draws_the_same_strategies() -> None:
    assert drawn(5, 6) == drawn(5, 6)
    assert drawn(5, 6) != drawn(6, 6)


def test_small_variables_are_never_cut_and_large_ones_always() -> None:
    total = sum(v.gradient_bytes for v in MIXED.variables)
    assert MIXED.variable("huge").nbytes > LARGE_SHARE * total
    kinds = Counter[str]()
    for strategy in drawn(1):
        for node in strategy.nodes:
            variable = MIXED.variable(node.variable)
            sync = (node.parts or (node.sync,))[0]
            if variable.gradient_bytes < SMALL_BYTES:
                assert not node.partition
            elif node.variable == "huge" and sync.kind in ("all_reduce", "parameter_server"):
                kinds[sync.kind] += 1
                assert len(node.cut(variable)) > 1 or sync.encoder == "sufficient_factors"
    assert len(kinds) == 2


def test_servers_are_loaded_as_their_hosts_uplinks_allow() -> None:
    there = Resources(devices=("a", "b", "c"), hosts=(0, 1, 2), host_gb_per_s=(4.0, 4.0, 1.0))
    model = ModelSpec(name="many", variables=tuple(Variable(name=f"w{at}", shape=(100, 100)) for at in range(90)))
    sampler = Sampler(model, there, seed=0)
    checked = 0
    for _ in range(200):
        recipe, strategy = sampler.sample()
        served = Counter(node.sync.placement[0] for node in strategy.nodes if node.sync.kind == "parameter_server")
        if recipe.by_rate and set(recipe.servers) == {"a", "b", "c"} and served.total() == 90 and len(served) == 3:
            checked += 1
            assert abs(served["a"] - served["b"]) <= 1
            assert abs(served["a"] - 4 * served["c"]) <= 6
    assert checked


def test_collective_groups_have_similar_loads() -> None:
    model = ModelSpec(name="many", variables=tuple(Variable(name=f"w{at}", shape=(100, 100)) for at in range(96)))
    sampler = Sampler(model, 4, seed=0)
    sizes = []
    for _ in range(100):
        recipe, strategy = sampler.sample()
        groups = Counter(node.sync.group for node in strategy.nodes if node.sync.kind == "all_reduce")
        if groups.total() == 96 and recipe.groups in (2, 4, 8) and not recipe.apart:
            sizes.append(max(groups.values()) / min(groups.values()))
            assert len(groups) == recipe.groups
    assert sizes and max(sizes) <= 1.5


def test_lossy_and_stale_strategies_only_where_they_are_allowed() -> None:
    assert all(strategy.is_lossless for strategy in drawn(2))
    lossy = drawn(2, lossy=True)
    encoders = {sync.encoder for strategy in lossy for node in strategy.nodes for sync in (node.sync, *node.parts)}
    assert {"float16", "onebit", "topk:0.01"} <= encoders
    assert all(sync.staleness == 0 for strategy in lossy for node in strategy.nodes for sync in (node.sync,))
    late = {node.sync.staleness for strategy in drawn(2, staleness=2) for node in strategy.nodes}
    assert late == {0, 1, 2}


def test_two_levels_only_where_a_host_has_several_devices() -> None:
    def uses(where: list[str]) -> bool:
        sampler = Sampler(MIXED, where, seed=0)
        made = [sampler.sample()[1] for _ in range(40)]
        return any(sync.transfer for each in made for node in each.nodes for sync in (node.sync, *node.parts))

    assert uses(NAMES)
    assert not uses(["a", "b", "c"])


def test_the_papers_models_are_drawn_for_at_once() -> None:
    model = zoo.model("bert_3l")
    _, strategy = Sampler(model, 16, seed=0).sample()
    assert len(strategy.nodes) == len(model.variables)


def test_a_staleness_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^staleness: must be 0\.\.16, not 17$"):
        Sampler(MIXED, 2, staleness=17)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_a_builders_strategy_has_a_recipe_next_to_it(name: str) -> None:
    model = zoo.model("ncf_sparse", scale=0.1)
    sampler = Sampler(model, Cluster.preset("autodist_b5"), seed=3)
    strategy = build(name, model, sampler.there)
    recipe = sampler.recipe_of(strategy)
    composed = sampler.compose(recipe)
    # The constraints may cut a variable otherwise, but not synchronize it in another way.
    for node in strategy.nodes:
        kinds = {sync.kind for sync in (node.parts or (node.sync,))}
        other = composed.node(node.variable)
        assert {sync.kind for sync in (other.parts or (other.sync,))} == kinds
    for made in (sampler.change(recipe), sampler.cross(recipe, sampler.sample()[0])):
        made[1].check(model)
