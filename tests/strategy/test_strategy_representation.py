# SPDX-License-Identifier: Apache-2.0
"""What a strategy says, and what it refuses to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.strategy import ModelSpec, NodeConfig, Strategy, Sync, Variable

MODEL = ModelSpec(
    name="small",
    variables=(
        Variable(name="table", shape=(10, 4), sparse=True, rows=3),
        Variable(name="w", shape=(4, 8)),
        Variable(name="b", shape=(8,)),
    ),
)
DEVICES = ("rank0", "rank1", "rank2")
LATE = Sync(kind="parameter_server", placement=("rank0",), staleness=2)


def strategy(**nodes: NodeConfig) -> Strategy:
    chosen = {v.name: NodeConfig(variable=v.name) for v in MODEL.variables} | nodes
    return Strategy(
        name="s", model=MODEL.name, model_digest=MODEL.digest, devices=DEVICES, nodes=tuple(chosen.values())
    )


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), cut=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_parts_cover_a_variable_once(rows: int, columns: int, cut: tuple[int, int]) -> None:
    node = NodeConfig(variable="v", partition=(min(cut[0], rows), min(cut[1], columns)))
    parts = node.cut(Variable(name="v", shape=(rows, columns)))
    cells = [
        (part.start[0] + row, part.start[1] + column)
        for part in parts
        for row in range(part.shape[0])
        for column in range(part.shape[1])
    ]
    assert sorted(cells) == [(row, column) for row in range(rows) for column in range(columns)]
    assert [part.index for part in parts] == list(range(len(parts)))


def test_each_part_may_be_synchronised_in_its_own_way() -> None:
    server = Sync(kind="parameter_server", placement=("rank1",))
    found = strategy(w=NodeConfig(variable="w", partition=((3, 1), 1), parts=(server, Sync(group=2))))
    found.check(MODEL)
    assert [(p.shape, s.kind) for p, s in found.node("w").syncs(MODEL.variable("w"))] == [
        ((3, 8), "parameter_server"),
        ((1, 8), "all_reduce"),
    ]
    assert found.rank("rank2") == 2


def test_lossy_and_stale_are_known_as_such() -> None:
    assert strategy().is_lossless
    assert not strategy(w=NodeConfig(variable="w", sync=Sync(encoder="topk:0.01"))).is_lossless
    assert not strategy(w=NodeConfig(variable="w", sync=LATE)).is_lossless


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (NodeConfig(variable="w", sync=Sync(kind="gossip")), "w.sync.kind: unknown synchroniser 'gossip'; choose from"),
        (NodeConfig(variable="w", sync=Sync(kind="parameter_server")), "w.sync.placement: a parameter server is on"),
        (NodeConfig(variable="w", sync=Sync(placement=("rank1",))), "w.sync.placement: all_reduce is on every device"),
        (NodeConfig(variable="w", sync=Sync(placement=DEVICES)), "w.sync.placement: all_reduce is on every device"),
        (NodeConfig(variable="w", sync=Sync(kind="sharded", placement=DEVICES)), "w.sync.placement: sharded is on"),
        (NodeConfig(variable="w", sync=Sync(group=-2)), "w.sync.group: must be a number >= 0, or -1"),
        (NodeConfig(variable="w", sync=Sync(kind="sharded", encoder="onebit")), "w.sync.encoder: sharded has none"),
        (NodeConfig(variable="w", sync=Sync(encoder="sufficient_factors")), "w.encoder: sufficient_factors needs"),
        (NodeConfig(variable="w", sync=Sync(transfer=("gpu9",))), "w.sync.transfer: unknown device 'gpu9'"),
        (NodeConfig(variable="w", sync=Sync(sequence=("rank0",))), "w.sync.sequence: must name every device"),
        (NodeConfig(variable="w", sync=Sync(encoder="zip")), "w.sync.encoder: unknown encoder 'zip'"),
        (NodeConfig(variable="w", sync=Sync(encoder="topk")), "w.sync.encoder: topk takes a share"),
        (NodeConfig(variable="w", sync=Sync(encoder="topk:much")), "must be a number"),
        (NodeConfig(variable="w", sync=Sync(encoder="float16:2")), "float16 takes no amount"),
        (NodeConfig(variable="w", sync=Sync(staleness=1)), "w.sync.staleness: needs a parameter server"),
        (NodeConfig(variable="w", sync=replace(LATE, transfer=("rank1",))), "w.sync.transfer: with staleness ranks"),
        (NodeConfig(variable="w", sync=replace(LATE, encoder="onebit")), "w.sync.encoder: with staleness it must be"),
        (NodeConfig(variable="w", sync=Sync(kind="sharded", transfer=("rank1",))), "w.sync.transfer: sharded has no"),
        (NodeConfig(variable="w", sync=replace(LATE, sequence=DEVICES)), "w.sync.sequence: servers and"),
        (NodeConfig(variable="w", partition=(5, 1)), r"w.partition\[0\]: must be 1..4 parts"),
        (NodeConfig(variable="w", partition=((1, 2), 1)), r"w.partition\[0\]: sizes \[1, 2\] must be > 0 and add up"),
        (NodeConfig(variable="w", partition=(2,)), "w.partition: must have 2 entries"),
        (NodeConfig(variable="w", partition=(2, 1), parts=(Sync(),)), "w.parts: must be 2"),
        (NodeConfig(variable="w", sync=Sync(kind="sparse_all_gather")), "needs a sparse gradient"),
    ],
)
def test_what_cannot_be_is_refused_by_name(node: NodeConfig, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        strategy(w=node).check(MODEL)


def test_a_strategy_for_another_model_is_refused() -> None:
    other = ModelSpec(name="other", variables=(*MODEL.variables, Variable(name="more", shape=(2,))))
    with pytest.raises(InvalidInput, match="made for small, not for other: it has no node for 'more'"):
        strategy().check(other)
    wider = ModelSpec(name="wider", variables=(*MODEL.variables[:2], replace(MODEL.variables[2], shape=(9,))))
    with pytest.raises(InvalidInput, match="shapes differ"):
        strategy().check(wider)


def test_models_say_what_is_wrong_with_them() -> None:
    with pytest.raises(InvalidInput, match=r"variables\[1\] \(b\).rows: must be 1..4"):
        ModelSpec(name="m", variables=(Variable(name="a", shape=(2,)), Variable(name="b", shape=(4,), sparse=True)))
    with pytest.raises(InvalidInput, match="is there twice"):
        ModelSpec(name="m", variables=(Variable(name="a", shape=(2,)), Variable(name="a", shape=(4,))))
    with pytest.raises(InvalidInput, match="runtime: unknown runtime 'jax'; choose from: graph, torch"):
        replace(MODEL, runtime="jax")
    with pytest.raises(InvalidInput, match="unknown dtype 'int8'"):
        ModelSpec(name="m", variables=(Variable(name="a", shape=(2,), dtype="int8"),))
    assert MODEL.variable("table").gradient_bytes == 3 * (16 + 8)


def test_what_a_gradient_does_not_allow_is_refused() -> None:
    table = NodeConfig(variable="table", sync=Sync(kind="parameter_server", placement=("rank0",), encoder="float16"))
    with pytest.raises(InvalidInput, match=r"table\.encoder: float16 needs a dense gradient"):
        strategy(table=table).check(MODEL)
    linear = replace(MODEL, variables=(MODEL.variables[0], replace(MODEL.variables[1], factors=2), MODEL.variables[2]))
    by_factors = Sync(encoder="sufficient_factors")
    strategy(w=NodeConfig(variable="w", sync=by_factors)).check(linear)
    with pytest.raises(InvalidInput, match=r"w\.partition: sufficient_factors needs the whole variable"):
        strategy(w=NodeConfig(variable="w", partition=(2, 1), sync=by_factors)).check(linear)
