# SPDX-License-Identifier: Apache-2.0
"""Every algorithm through one mill: proved, lowered, run on data, exported, read back, held to the bound."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from stretto import Cluster, Collective, InvalidInput, Program, algorithm, simulate
from stretto.algorithms import NAMES, algorithms, defined_for
from stretto.collectives import COLLECTIVES, ROOTED
from stretto.programs import interpret
from stretto.programs.formats import msccl_xml, mscclpp_json, mscclpp_reader, text
from stretto.programs.lowered import Lowered
from stretto.simulator import lower_bound

COUNTS = (2, 3, 4, 5, 7, 8, 12, 16)
NO_IN_PLACE = ("permute", "all_to_all_v")
IN_MSCCLPP = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class Case(NamedTuple):
    """One program, by what makes it."""

    name: str
    kind: str
    ranks: int
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = "".join(f"-{key}={value}" for key, value in self.options)
        return f"{self.name}-{self.kind}-{self.ranks}{options}"


def _plain_cases() -> list[Case]:
    return [
        Case(entry.name, kind, count)
        for entry in algorithms()
        for kind in entry.collectives
        for count in COUNTS
        if entry.refusal(kind, count) is None
    ]


def _variants() -> list[Case]:
    wheel = ("all_gather", "reduce_scatter", "all_reduce")
    found = [
        Case("ring", kind, count, tuple(options.items()))
        for kind in wheel
        for count in (2, 5, 8)
        for options in (
            {"directions": 2},
            {"rings": 2},
            {"rings": 3, "directions": 2},
            {"order": tuple(np.roll(np.arange(count)[::-1], 1).tolist())},
        )
    ]
    found += [Case("ring", "all_reduce", 7, (("strides", (1, 3)),))]
    found += [Case("ring", "all_gather", 4, (("order", ((0, 1, 2, 3), (2, 0, 3, 1))),))]
    found += [Case("halving_doubling", kind, count, (("largest", "far"),)) for kind in wheel for count in (6, 8)]
    found += [
        Case("swing", kind, 16, (("dims", dims), ("ports", ports), ("order", order)))
        for kind in wheel
        for dims, ports, order in (((4, 4), 4, None), ((2, 8), 3, tuple(range(15, -1, -1))), ((2, 2, 4), 6, None))
    ]
    found += [
        Case("hierarchical", kind, 12, (("dims", dims), ("inside", inside)))
        for kind in wheel
        for dims, inside in (
            ((4, 3), "ring"),
            ((2, 2, 3), ("halving_doubling", "direct", "ring")),
            ((12,), "direct"),
            ((4, 3), ("halving_doubling", "direct")),
            ((1, 6, 2), "ring"),
        )
    ]
    found += [Case("hierarchical", "all_reduce", 8, (("dims", (4, 2)), ("order", (5, 2, 7, 0, 1, 6, 3, 4))))]
    found += [Case("hierarchical", "all_gather", 8, (("dims", (4, 2)), ("order", (5, 2, 7, 0, 1, 6, 3, 4))))]
    found += [
        Case(name, "all_to_all", count, (("local", local),))
        for name in ("two_step", "three_step")
        for count, local in ((6, 2), (6, 3), (8, 2), (4, 1), (4, 4))
    ]
    found += [Case("two_step", "all_to_all", 6, (("local", 3), ("order", (4, 0, 2, 1, 5, 3))))]
    found += [
        Case("nccl_tree", "all_reduce", sum(hosts), (("hosts", hosts), ("pattern", pattern)))
        for hosts in ((2, 2, 1), (4, 4), (3, 1, 2, 2), (2,) * 6)
        for pattern in ("tree", "balanced", "split")
    ]
    two = tuple(tuple(range(at, 8)) + tuple(range(at)) for at in (0, 4))
    found += [Case("nccl_tree", "all_reduce", 8, (("hosts", (4, 4)), ("order", two)))]
    found += [Case("nccl_ring", kind, 8, (("order", two),)) for kind in wheel]
    found += [Case("pairwise", "all_to_all", 8, (("pattern", "shift"),))]
    found += [Case("direct", "all_reduce", count, (("steps", 1),)) for count in (2, 5, 8)]
    found += [
        Case("direct", "permute", 4, (("pairs", ((0, 3), (2, 2), (3, 1))),)),
        Case("direct", "all_to_all_v", 3, (("counts", ((1, 0, 2), (3, 0, 0), (0.5, 4, 1))),)),
    ]
    found += [
        Case(entry.name, kind, 6, (("root", 4),))
        for entry in algorithms()
        for kind in entry.collectives
        if kind in ROOTED
    ]
    return found


CASES = _plain_cases() + _variants()
SMALL = [case for case in CASES if case.ranks <= 8]
TINY = [case for case in CASES if case.ranks <= 5]


@cache
def built(case: Case, chunks: int = 1, in_place: bool = False) -> Program:
    return algorithm(case.name, case.kind, case.ranks, chunks=chunks, in_place=in_place, **dict(case.options))


@cache
def lowered(case: Case, chunks: int = 1, in_place: bool = False) -> Lowered:
    return built(case, chunks, in_place).lower()


def places(case: Case) -> tuple[bool, ...]:
    return (False,) if case.kind in NO_IN_PLACE else (False, True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_are_proved_right_for_several_chunk_counts(case: Case) -> None:
    for chunks in (1, 2, 3):
        program = built(case, chunks)
        assert program.collective.kind == case.kind
        assert program.collective.num_ranks == case.ranks
        assert program.verify().fifo_depth == 1


@pytest.mark.parametrize("case", TINY, ids=str)
def test_any_order_that_the_rules_allow_gives_the_right_result(
    case: Case, run_in_random_order: Callable[[Program, random.Random, int], str | None]
) -> None:
    for seed in range(2):
        assert run_in_random_order(built(case, 2), random.Random(seed), 1 + seed) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowered_streams_are_proved_right_and_compute_the_right_data(case: Case) -> None:
    for in_place in places(case):
        for chunks in (1, 2):
            streams = lowered(case, chunks, in_place)
            assert streams.collective.in_place == in_place
            interpret.check(streams, fifo_depth=streams.verify().fifo_depth, seed=chunks)


def msccl_refusal(case: Case, dialect: str) -> str | None:
    """What the format cannot say, in the words of the error."""
    if case.kind == "permute" and dialect == "new":
        return "choose dialect 'old'"
    return "equal size" if dict(case.options).get("counts") is not None else None


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_msccl_files_of_both_dialects_read_back_as_right_programs(case: Case) -> None:
    for in_place in places(case):
        streams = lowered(case, 1, in_place)
        for dialect in msccl_xml.DIALECTS:
            refused = msccl_refusal(case, dialect)
            if refused is not None:
                with pytest.raises(InvalidInput, match=refused):
                    msccl_xml.dumps(streams, dialect=dialect)
                continue
            file = msccl_xml.dumps(streams, dialect=dialect)
            custom = streams.collective if 'coll="custom"' in file else None
            again = msccl_xml.loads(file, in_place=in_place, collective=custom)
            assert again.num_instructions == streams.num_instructions
            interpret.check(again, fifo_depth=again.verify().fifo_depth)


@pytest.mark.parametrize("case", [c for c in SMALL if c.kind in IN_MSCCLPP], ids=str)
def test_mscclpp_plans_do_the_right_thing_in_an_independent_machine(case: Case) -> None:
    streams = lowered(case, 1, case.ranks % 2 == 0)
    plan = mscclpp_reader.loads(mscclpp_json.dumps(streams))
    outcome = mscclpp_reader.check(plan, streams.collective, seeds=(0, 1), launches=2)
    assert outcome.launches == 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_text_form_comes_back_equal(case: Case) -> None:
    program = built(case, 2)
    assert text.loads(text.dumps(program)) == program


@cache
def cluster(shape: str, count: int) -> Cluster:
    return Cluster.preset(shape, nodes=count)


@cache
def bound_us(kind: str, count: int, root: int, shape: str, nbytes: int) -> float:
    rooted = {"root": root} if kind in ROOTED else {}
    collective: Collective = COLLECTIVES[kind](count, **rooted)
    return lower_bound(collective, cluster(shape, count), nbytes).total_us


def hops(program: Program, network: Cluster) -> NDArray[np.int64]:
    """How many links each transfer crosses."""
    ptr, _ = network.route_table(program.src, program.dst, program.lane.astype(np.int64))
    return np.diff(ptr)


@pytest.mark.parametrize("case", [c for c in CASES if c.ranks in (2, 5, 8, 12)], ids=str)
def test_no_simulated_time_is_below_the_bound_and_every_byte_arrives(case: Case) -> None:
    program = built(case, 2)
    for shape in ("ring", "fully_connected"):
        network = cluster(shape, case.ranks)
        for nbytes in (4_800, 4_800_000):
            if case.kind in NO_IN_PLACE:
                least = lower_bound(program.collective, network, nbytes).total_us
            else:
                least = bound_us(case.kind, case.ranks, max(program.collective.root, 0), shape, nbytes)
            for contention in ("fifo", "fair"):
                timeline = simulate(program, network, nbytes=nbytes, contention=contention)
                assert least > 0
                assert timeline.total_us >= least * (1 - 1e-9)
                sent = float(np.sum(hops(program, network) * program.transfer_bytes(nbytes)))
                assert timeline.link_bytes.sum() == pytest.approx(sent, rel=1e-9)


@pytest.mark.parametrize("entry", algorithms(), ids=lambda entry: entry.name)
def test_where_an_algorithm_is_not_defined_it_says_so(entry: Any) -> None:
    for kind in entry.collectives:
        for count in COUNTS:
            assert (entry.name in defined_for(kind, count)) == (entry.refusal(kind, count) is None)
            reason = entry.refusal(kind, count)
            if reason is not None:
                with pytest.raises(InvalidInput, match=f"^{re.escape(f'ranks: {reason}')}$"):
                    algorithm(entry.name, kind, count)


def test_every_algorithm_is_defined_for_some_of_the_counts_of_each_collective_it_serves() -> None:
    served = {(case.name, case.kind) for case in CASES}
    assert served == {(entry.name, kind) for entry in algorithms() for kind in entry.collectives}
    assert {name for name, _ in served} == set(NAMES)
    assert {kind for _, kind in served} == set(COLLECTIVES)
