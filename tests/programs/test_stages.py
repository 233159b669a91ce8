# SPDX-License-Identifier: Apache-2.0
"""Programs cut at host boundaries: the stages, one behind the other, on numbers and by proof."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stretto.algorithms import algorithm
from stretto.algorithms.registry import defined_for
from stretto.errors import Infeasible, InvalidInput, StrettoError, VerificationError
from stretto.programs.interpret import expected_outputs, interpret, random_inputs
from stretto.programs.ir import Program
from stretto.programs.stages import INPUT, Source, Staged, cut
from stretto.runtime.gpu.hosts_plan import plan_for, slices_of
from stretto.runtime.gpu.hosts_programs import KINDS, program_for, two_level


def run_stages(staged: Staged, inputs: Any, seed: int) -> list[list[Any]]:
    """Every leg by the interpreter, which knows nothing of stages; what each rank then has."""
    held: list[dict[Source, Any]] = [{Source(INPUT, at): piece for at, piece in enumerate(row)} for row in inputs]
    for number, stage in enumerate(staged.stages):
        for leg in stage.legs:
            given = [[held[rank][source] for source in leg.reads[at]] for at, rank in enumerate(leg.ranks)]
            for rank, row in zip(leg.ranks, interpret(leg.program.lower(), given, seed=seed), strict=True):
                held[rank] |= {Source(number, at): piece for at, piece in enumerate(row)}
    return [[held[rank][source] for source in row] for rank, row in enumerate(staged.results)]


def drawn(rng: np.random.Generator) -> tuple[Program, list[int]] | None:
    ranks = int(rng.integers(2, 9))
    hosts = rng.integers(0, rng.integers(2, 5), ranks).tolist()
    kind, root = str(rng.choice(KINDS)), int(rng.integers(ranks))
    if rng.integers(2):
        return (program_for if rng.integers(2) else two_level)(kind, hosts, root), hosts
    names = defined_for(kind, ranks)
    try:
        return algorithm(str(rng.choice(names)), kind, ranks, in_place=bool(rng.integers(2))), hosts
    except StrettoError:
        return None


def test_random_programs_in_stages_give_what_their_collectives_ask_for() -> None:
    cuts = 0
    for trial in range(60):
        found = drawn(np.random.default_rng(trial))
        if found is None:
            continue
        program, hosts = found
        staged = cut(program, hosts)
        c = program.collective
        inputs = random_inputs(c, seed=trial)
        for got, want in zip(run_stages(staged, inputs, trial), expected_outputs(c, inputs), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)), (program.name, hosts)
        cuts += len(staged.stages) > 1
    assert cuts > 25


@pytest.mark.parametrize(
    ("kind", "hosts", "stages"),
    [
        ("all_reduce", "aaaabbbb", "in out in"),
        ("all_reduce", "aab", "in out in"),
        ("all_reduce", "abc", "out"),
        ("all_gather", "aabb", "out in"),
        ("reduce_scatter", "aabbb", "in out"),
        ("all_to_all", "abab", "in out"),
        ("broadcast", "aabbcc", "out in"),
        ("reduce", "aab", "in out"),
    ],
)
def test_few_turns_between_inside_and_out(kind: str, hosts: str, stages: str) -> None:
    staged = cut(program_for(kind, hosts), [ord(host) for host in hosts])
    assert " ".join("out" if stage.network else "in" for stage in staged.stages) == stages


@pytest.mark.parametrize("hosts", ["aaaabbbb", "aaabb", "abbb", "aabbcc"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_host_sends_no_more_than_it_must(kind: str, hosts: str) -> None:
    """Out of a host goes each sum, or shard, once to each other host; of an all-reduce twice a share."""
    program = program_for(kind, hosts)
    nbytes, count = 840.0, len(set(hosts))
    far = np.array([hosts[a] != hosts[b] for a, b in zip(program.src, program.dst, strict=True)])
    for host in set(hosts):
        mine = np.array([hosts[a] == host for a in program.src])
        sent = program.transfer_bytes(nbytes)[far & mine].sum()
        inside = hosts.count(host) / len(hosts)
        least = {
            "all_reduce": 2 * (count - 1) / count * nbytes,
            "all_gather": (count - 1) * inside * nbytes,
            "reduce_scatter": (1 - inside) * nbytes,
        }[kind]
        assert sent == pytest.approx(least)


def test_what_is_wrong_is_found_by_the_proof() -> None:
    staged = cut(program_for("all_reduce", "aabb"), [0, 0, 1, 1])
    first = staged.stages[0]
    for broken in (
        replace(staged, stages=staged.stages[:-1]),
        replace(staged, stages=(staged.stages[2], *staged.stages[1:])),
        replace(staged, hosts=(0, 1, 0, 1)),
        replace(staged, results=(staged.results[0][::-1], *staged.results[1:])),
        replace(staged, stages=(replace(first, legs=first.legs[:1]), *staged.stages[1:])),
    ):
        with pytest.raises(VerificationError):
            broken.verify()


def test_what_cannot_be_cut_is_said() -> None:
    program = algorithm("direct", "all_reduce", 4)
    with pytest.raises(InvalidInput, match="hosts: must be 4, one for each rank, not 3"):
        cut(program, [0, 0, 1])
    many = algorithm("ring", "all_reduce", 40)
    with pytest.raises(Infeasible, match="take over 64 turns"):
        cut(many, [rank // 2 for rank in range(40)])


def test_slices_cover_every_element_once_and_fit_the_room() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        hosts = rng.integers(0, 3, int(rng.integers(2, 7))).tolist()
        staged = cut(two_level(str(rng.choice(KINDS)), hosts), hosts)
        plans = [plan_for(staged, rank) for rank in range(len(hosts))]
        shard, element = int(rng.integers(1, 100_000)), int(rng.choice([1, 2, 4, 8]))
        found = slices_of(plans, shard, element, slice_bytes=1 << int(rng.integers(10, 18)), room=1 << 18)
        assert [each.begin for each in found] == [0, *(each.end for each in found[:-1])] and found[-1].end == shard
        pieces = staged.collective.chunks
        assert all(each.chunk * pieces >= each.end - each.begin for each in found)
        assert len({each.chunk for each in found[:-1]}) <= 1
        assert all(each.chunk * element % 16 == 0 for each in found)
