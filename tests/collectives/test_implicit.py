# SPDX-License-Identifier: Apache-2.0
"""Collectives over very many ranks: written out only when asked for, and bounded by one group's needs."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from stretto import AllGather, AllReduce, AllToAll, Cluster, Collective, InvalidInput, ReduceScatter, lower_bound
from stretto.collectives import implicit
from stretto.collectives.implicit import ImplicitCollective
from stretto.synthesis.matching import same_task

MAKE = {"all_gather": AllGather, "reduce_scatter": ReduceScatter, "all_reduce": AllReduce}


@pytest.fixture
def never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implicit, "MAX_WRITTEN", 0)


@pytest.mark.parametrize("kind", [*MAKE, "all_to_all"])
def test_what_is_written_later_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = AllToAll if kind == "all_to_all" else MAKE[kind]
    plain = make(6, chunks=2)
    monkeypatch.setattr(implicit, "MAX_WRITTEN", 0)
    late = make(6, chunks=2)
    assert isinstance(late, ImplicitCollective) and late.implicit and not isinstance(plain, ImplicitCollective)
    assert late == pickle.loads(pickle.dumps(late)) == make(6, chunks=2)
    assert late != make(6, chunks=3) and late != make(6, chunks=2, in_place=True)
    assert same_task(late, make(6, chunks=3)) and same_task(late, plain) and same_task(plain, late)
    assert (late.combining, late.num_parts) == (plain.combining, plain.num_parts)
    for field in dataclasses.fields(Collective):
        first, second = getattr(late, field.name), getattr(plain, field.name)
        assert repr(first) == repr(second)
    again = dataclasses.replace(late, in_place=True)
    assert again.in_place and not (isinstance(again, ImplicitCollective) and again.implicit)


def test_too_many_chunks_are_an_error_only_when_they_are_read() -> None:
    many = AllGather(16384)
    assert repr(many) == "<Collective all_gather over 16384 ranks, 16384 chunks, out of place>"
    with pytest.raises(InvalidInput, match="hold over 67108864 chunks; only symmetric programs serve so many"):
        many.inputs(0)
    with pytest.raises(AttributeError):
        many.no_such_thing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("source", ["dgx_h100:3", "dgx_a100:2", "ndv2:3", "torus:4x3", "hgx2:2"])
@pytest.mark.parametrize("kind", MAKE)
def test_one_groups_needs_bound_all(kind: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.load(source)
    plain = lower_bound(MAKE[kind](cluster.num_devices), cluster, 1e9)
    monkeypatch.setattr(implicit, "MAX_WRITTEN", 0)
    late = MAKE[kind](cluster.num_devices)
    alike = lower_bound(late, cluster, 1e9)
    assert alike.bandwidth_us == pytest.approx(plain.bandwidth_us)
    assert alike.latency_us == pytest.approx(plain.latency_us)
    assert alike.exact == plain.exact
    assert float(alike.weights @ cluster.link_gb_per_s[alike.links]) * 1e3 * alike.bandwidth_us == pytest.approx(
        alike.demand_bytes
    )


def test_the_bound_of_16384_gpus() -> None:
    boxes = Cluster.load("dgx_h100:2048")
    bound = lower_bound(AllGather(16384), boxes, 256e6)
    assert bound.exact and bound.bandwidth_us == pytest.approx(256e6 * 16376 / 16384 / 400e3)
    with pytest.raises(InvalidInput, match="hold over"):
        lower_bound(AllGather(range(1, 16384)), boxes, 256e6)
