# SPDX-License-Identifier: Apache-2.0
"""Composition on a quotient: what one host stands for must be what all hosts do, in proof, time and files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stretto import (
    AllGather,
    AllReduce,
    AllToAll,
    Cluster,
    InvalidInput,
    ReduceScatter,
    VerificationError,
    lower_bound,
    simulate,
    synthesize,
)
from stretto.cluster.wiring import Wiring, host_names, numbered
from stretto.collectives import implicit
from stretto.errors import Infeasible
from stretto.programs import Program, SymmetricProgram
from stretto.programs.formats import load_program, save_program, symmetric_text, text
from stretto.synthesis import symmetric
from stretto.synthesis.compose import inside_algorithms
from stretto.synthesis.makers import MAX_WHOLE_MOVES, plan_tasks
from stretto.synthesis.orbits import exchanges, gathering, phased
from stretto.synthesis.problem import SynthesisProblem

KINDS = {"all_gather": AllGather, "reduce_scatter": ReduceScatter, "all_reduce": AllReduce, "all_to_all": AllToAll}


def random_boxes(rng: np.random.Generator) -> Cluster:
    """Equal hosts: an NVSwitch, some direct links, one NIC per GPU on rails, and sometimes spines over the rails."""
    hosts, local = int(rng.integers(2, 6)), int(rng.integers(1, 5))
    place = np.arange(hosts)
    wiring = Wiring(host_names(hosts, numbered("gpu", local)), hosts=np.repeat(place, local))
    gpus = wiring.devices.reshape(hosts, local)
    hubs = wiring.add(host_names(hosts, ["switch"]), kind="switch", hosts=place)
    for number in range(local):
        rate, alpha = rng.integers(50, 400), float(rng.integers(1, 8)) / 10
        wiring.duplex(gpus[:, number], hubs, gb_per_s=float(rate), alpha_us=alpha, back_us=0.0, channel="nvlink")
    nics = wiring.add(host_names(hosts, numbered("nic", local)), kind="nic", hosts=np.repeat(place, local))
    wiring.duplex(gpus.ravel(), nics, gb_per_s=64.0, alpha_us=0.0, channel="pcie")
    rails = wiring.add(numbered("rail", local), kind="switch")
    for number in range(local):
        own, width = nics.reshape(hosts, local)[:, number], float(rng.integers(10, 50))
        wiring.duplex(own, rails[number], gb_per_s=width, alpha_us=2.5, back_us=0.0, channel="rdma")
    spines = int(rng.integers(0, 3))
    if spines:
        top = wiring.add(numbered("spine", spines), kind="switch")
        wiring.duplex(rails[:, None], top, gb_per_s=200.0, alpha_us=1.0, channel="spine")
    return wiring.cluster(f"boxes:{hosts}x{local}", devices_forward=True)


def judged(one: SymmetricProgram, cluster: Cluster, **physics: Any) -> None:
    """The whole program passes the ordinary verifier and takes the same time, transfer by transfer."""
    whole = one.expand()
    assert whole.num_transfers == one.num_transfers
    assert one.verify().fifo_depth >= whole.verify().fifo_depth
    short = simulate(one, cluster, nbytes=1e6, **physics)
    full = simulate(whole, cluster, nbytes=1e6, **physics)
    assert np.repeat(short.end_us, one.copies).tolist() == pytest.approx(full.end_us.tolist(), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["dgx_h100:2", "dgx_h100:5", "dgx_a100:4", "ndv2:3"])
def test_one_host_stands_for_all(source: str, kind: str) -> None:
    cluster = Cluster.load(source)
    for pieces in (1, 3):
        one = symmetric.synthesize(KINDS[kind](cluster.num_devices), cluster, nbytes=1e6, pieces=[pieces])
        assert one.pieces == pieces * (cluster.num_devices if kind == "all_to_all" else 1) and one.kind == kind
        judged(one, cluster)


@pytest.mark.parametrize("seed", range(8))
def test_random_equal_hosts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = random_boxes(rng)
    kind = [*KINDS][seed % 4]
    physics: dict[str, Any] = {
        "alpha": ["pipelined", "blocking"][seed % 2],
        "contention": ["fifo", "fair"][seed // 4 % 2],
    }
    one = symmetric.synthesize(
        KINDS[kind](cluster.num_devices), cluster, nbytes=1e6, pieces=[int(rng.integers(1, 3))], **physics
    )
    judged(one, cluster, **physics)


def a_gather(hosts: int = 4) -> SymmetricProgram:
    inside = inside_algorithms(
        "all_gather", [0, 1, 2], Cluster.preset("ring", nodes=3), nbytes=1e6, seed=0, alpha="pipelined"
    )
    return gathering("gather", next(exchanges(hosts)), inside[0].program, pieces=2)


def test_faults_are_caught_as_in_the_whole_program() -> None:
    rng, right = np.random.default_rng(3), a_gather()
    caught = {"after": 0, "home": 0, "dst": 0}
    for _ in range(60):
        field = str(rng.choice([*caught]))
        values = getattr(right, field).copy()
        at = int(rng.integers(len(values)))
        if field == "after":
            # The dependency goes to an earlier orbit that delivers to the same rank, so that data may be read early.
            waits = int(np.searchsorted(right.after_ptr, at, side="right")) - 1
            others = np.flatnonzero(right.dst % right.local == right.src[waits])
            values[at] = rng.choice(others)
        else:
            values[at] = rng.integers(right.num_ranks)
        if values[at] == getattr(right, field)[at]:
            continue
        verdicts = []
        try:
            wrong = dataclasses.replace(right, **{field: values})
        except InvalidInput:
            continue
        for program in (wrong, wrong.expand()):
            try:
                program.verify()
                verdicts.append(True)
            except VerificationError:
                verdicts.append(False)
        assert verdicts[0] <= verdicts[1]  # what one group proves holds for the whole
        caught[field] += not verdicts[0]
    assert min(caught.values()) > 5


def test_faults_of_an_all_to_all_are_caught() -> None:
    rng, right = np.random.default_rng(4), phased(3, 4, 2)
    right.verify()
    verdicts = []
    for field, limit in (("home", 12), ("piece", 24), ("dst", 12)) * 10:
        values = getattr(right, field).copy()
        at = int(rng.integers(len(values)))
        values[at] = (values[at] + 1 + rng.integers(limit - 1)) % limit
        try:
            wrong = dataclasses.replace(right, **{field: values})
        except InvalidInput:
            continue
        with pytest.raises(VerificationError):
            wrong.verify()
        with pytest.raises(VerificationError):
            wrong.expand().verify()
        verdicts.append(field)
    assert {*verdicts} == {"home", "piece", "dst"}
    with pytest.raises(InvalidInput, match="pieces: must be a multiple of the 12 ranks"):
        dataclasses.replace(right, pieces=25)


def test_an_all_to_all_of_4096_gpus() -> None:
    cluster = Cluster.load("dgx_h100_spine:512")
    found = synthesize(AllToAll(4096), cluster, 256e6, cache=False)
    assert isinstance(found.program, SymmetricProgram) and found.certificate.gap < 0.001
    assert found.program.num_transfers == 512 * (511 * 8 + 512 * 56) * (found.program.pieces // 4096)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_equal_hosts_is_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = random_boxes(np.random.default_rng(100 + seed))
    plain = lower_bound(AllToAll(cluster.num_devices), cluster, 1e8)
    monkeypatch.setattr(implicit, "MAX_WRITTEN", 0)
    alike = lower_bound(AllToAll(cluster.num_devices), cluster, 1e8)
    assert 0 < alike.bandwidth_us <= plain.bandwidth_us * (1 + 1e-9)
    assert alike.latency_us == pytest.approx(plain.latency_us)
    assert float(alike.weights @ cluster.link_gb_per_s[alike.links]) * 1e3 * alike.bandwidth_us == pytest.approx(
        alike.demand_bytes
    )


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_the_text_form_gives_back_the_same_program(kind: str, tmp_path: Path) -> None:
    right = a_gather() if kind == "all_gather" else phased(3, 4, 2)
    save_program(right, tmp_path / "gather.txt")
    again = load_program(tmp_path / "gather.txt")
    assert isinstance(again, SymmetricProgram)
    assert again.expand() == right.expand()
    assert symmetric_text.dumps(again) == symmetric_text.dumps(right)


def test_wrong_texts_are_refused() -> None:
    right = a_gather()
    for wrong, message in (
        ("stretto-symmetric-program 2\n", "version '2' is not known"),
        (
            "stretto-symmetric-program 1\nname x\ncollective all_gather torus 0 local 1 pieces 1\n",
            "sizes: must be >= 1",
        ),
        ("stretto-symmetric-program 1\nname x\ncollective sum torus 4 local 1 pieces 1\n", "symmetric collective"),
        ("stretto-symmetric-program 1\nname x\ncollective all_gather torus 4\n", "line 3: expected 'collective KIND"),
        (symmetric_text.dumps(right).replace("1: ", "7: ", 1), "expected '1: SRC>DST"),
        (symmetric_text.dumps(right).replace("c0", "c99", 1), "must be within 0..23"),
    ):
        with pytest.raises(InvalidInput, match=message.replace("+", r"\+")):
            symmetric_text.loads(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ranks_part_is_its_lines_of_the_whole(kind: str) -> None:
    cluster = Cluster.load("dgx_a100:3")
    one = symmetric.synthesize(KINDS[kind](24), cluster, nbytes=1e6, pieces=[1])
    whole = one.expand()
    for rank in (0, 13, 23):
        lines = symmetric_text.dumps_rank(one, rank).splitlines()[4:]
        wanted = [line for line in text.dumps(whole).splitlines() if line.partition(":")[0].isdecimal()]
        mine = [line for t, line in enumerate(wanted) if rank in (whole.src[t], whole.dst[t])]
        assert [line.split()[:3] for line in lines] == [line.split()[:3] for line in mine]
        sends = {line for line in mine if f" {rank}>" in line and "gate" not in line}
        assert sends <= set(lines)
    with pytest.raises(InvalidInput, match=r"rank: must be 0..23"):
        symmetric_text.dumps_rank(one, 24)


def test_clusters_and_collectives_without_the_symmetry_are_refused() -> None:
    box = Cluster.load("dgx_h100:2")
    with pytest.raises(Infeasible, match="needs all devices"):
        symmetric.synthesize(AllGather(8), box, nbytes=1e6)
    with pytest.raises(Infeasible, match="not in place"):
        symmetric.synthesize(AllGather(16, in_place=True), box, nbytes=1e6)
    with pytest.raises(InvalidInput, match="pieces: must be >= 1"):
        symmetric.synthesize(AllGather(16), box, nbytes=1e6, pieces=[0])
    with pytest.raises(Infeasible, match="needs hosts with equally many devices"):
        symmetric.synthesize(
            AllGather(4), dataclasses.replace(Cluster.preset("mesh", nodes=4), dimensions=()), nbytes=1e6
        )


def test_many_ranks_are_asked_of_the_best_makers_first() -> None:
    def makers(hosts: int) -> list[str]:
        problem = SynthesisProblem(
            collective=AllReduce(8 * hosts), cluster=Cluster.load(f"dgx_h100:{hosts}"), nbytes=1e6
        )
        return [task.maker for task in plan_tasks(problem, None)[0]]

    few, some = makers(4), makers(64)
    assert few[0] == "library" and "symmetric" not in few
    assert some[0] == "symmetric" and some[-1] == "library" and "greedy" in some
    assert makers(int(MAX_WHOLE_MOVES**0.5) // 8 + 1) == ["symmetric"]


def test_synthesis_returns_the_symmetric_program_and_its_file(tmp_path: Path) -> None:
    found = synthesize(AllGather(264), Cluster.load("dgx_h100:33"), 1e9, makers=["symmetric"], cache=False)
    assert isinstance(found.program, SymmetricProgram)
    assert found.certificate.gap < 0.03
    found.save(tmp_path / "gather.txt")
    again = load_program(tmp_path / "gather.txt")
    assert isinstance(again, SymmetricProgram) and not isinstance(again, Program)
    assert again.verify().fifo_depth == found.program.verify().fifo_depth


@pytest.mark.parametrize(("budget_s", "spent_s"), [(1.0, 8.0), (30.0, 8.0), (33.0, 16.0)])
def test_no_trial_is_begun_that_could_not_be_proved_in_time(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, spent_s: float
) -> None:
    # A trial of 8 s is followed by 16 s of proof: a second one is begun only where 32 s are there.
    now = [0.0]
    real = symmetric.SymmetricSearch.trial

    def slow(search: symmetric.SymmetricSearch, gather: SymmetricProgram) -> tuple[float, SymmetricProgram]:
        now[0] += 8.0
        return real(search, gather)

    monkeypatch.setattr(symmetric, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(symmetric.SymmetricSearch, "trial", slow)
    symmetric.synthesize(AllGather(16), Cluster.load("dgx_h100:2"), nbytes=1e6, budget_s=budget_s)
    assert now[0] == spent_s
