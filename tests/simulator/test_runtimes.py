# SPDX-License-Identifier: Apache-2.0
"""Prices of runtimes: files, presets, and lowered programs timed with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stretto import AllReduce, Cluster, InvalidInput, simulate, synthesize
from stretto.algorithms import algorithm
from stretto.algorithms.registry import defined_for
from stretto.programs import Program
from stretto.programs.lower import lower
from stretto.simulator import Protocol, Runtime
from stretto.simulator.priced import run_priced
from stretto.simulator.runtime_fit import RuntimeRow, fit_runtime
from stretto.simulator.runtimes import PRESETS
from stretto.synthesis import select

PAIR = Cluster.preset("ring", nodes=2, gb_per_s=1.0, alpha_us=1.0)
FULL = Runtime(
    name="mine",
    launch_us=3.0,
    instruction_us={"s": 1.0, "r": 0.5, "rrc": 2.0},
    handover_us=0.7,
    block_gb_per_s={"copy": 40.0, "reduce": 30.0, "reduce:float16": 20.0, "put": 50.0},
    holds_block=True,
    window=2,
    slice_bytes=1 << 20,
    max_blocks=16,
    contention="fair",
    protocols={"Simple": Protocol(signal_us=1.5), "LL": Protocol(bytes_factor=2.0)},
    notes=("made up",),
)
FAINT = Runtime(name="faint", max_blocks=1 << 20)
"""Costs nothing, and yet goes instruction by instruction."""


def test_a_file_gives_the_same_runtime_back(tmp_path: Path) -> None:
    for runtime in (FULL, *PRESETS.values()):
        runtime.save(tmp_path / "r.yaml")
        assert Runtime.load(tmp_path / "r.yaml") == runtime


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stretto: runtime\nversion: 2\nname: x\n", "version: 2 is not known"),
        ("stretto: runtime\nversion: 1\nname: x\nlaunch_us: -1\n", "launch_us: must be a number >= 0"),
        ("stretto: runtime\nversion: 1\nname: x\ninstruction_us: {jump: 1}\n", "jump"),
        ("stretto: runtime\nversion: 1\nname: x\nblock_gb_per_s: {copy: 0}\n", "block_gb_per_s.copy"),
        ("stretto: runtime\nversion: 1\nname: x\nblock_gb_per_s: {put:float16: 1}\n", "put:float16"),
        ("stretto: runtime\nversion: 1\nname: x\nspeed: 3\n", "speed"),
        ("stretto: cluster\nversion: 1\nname: x\n", "runtime"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=says):
        Runtime.load(path)


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(InvalidInput, match="network"):
        Runtime.load("netwrok")


def test_one_message_costs_its_parts() -> None:
    """Launch, send, link and signal, receive: one after another; the block's work runs beside the link."""
    sends = Program.from_steps(
        "one", algorithm("direct", "all_gather", 2).collective, src=[0, 1], dst=[1, 0], chunk=[0, 1], step=[0, 0]
    )
    runtime = Runtime(
        name="x", launch_us=10.0, instruction_us={"s": 2.0, "r": 3.0}, protocols={"Simple": Protocol(signal_us=5.0)}
    )
    # Each rank sends 1000 bytes: 1 us on the link, 1 us latency.
    time = simulate(sends, PAIR, nbytes=2000, runtime=runtime).total_us
    copies = simulate(sends, PAIR, nbytes=2000, runtime=FAINT).total_us
    assert copies == pytest.approx(2.0, abs=1e-6)
    assert time == pytest.approx(10.0 + 2.0 + 2.0 + 5.0 + 3.0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for name in defined_for(kind, 8)
    ],
)
def test_no_prices_change_nothing(name: str, kind: str) -> None:
    """Instruction by instruction gives what message by message gives, which is another construction."""
    cluster = Cluster.preset("dgx_a100", nodes=2)
    program = algorithm(name, kind, 16 if name == "hierarchical" else 8, cluster=cluster)
    lowered = lower(program)
    # With fifo, messages that ask for a link at one moment may be served in another order.
    for window in (0, 3):
        free = Runtime(name="free", window=window)
        faint = replace(FAINT, window=window)
        a = run_priced(lowered, cluster, nbytes=1e7, runtime=free, contention="fair").total_us
        b = run_priced(lowered, cluster, nbytes=1e7, runtime=faint, contention="fair").total_us
        assert b == pytest.approx(a, rel=1e-9)


def test_prices_never_make_a_program_faster() -> None:
    cluster = Cluster.preset("dgx2", nodes=1)
    seen = np.random.default_rng(7)
    for _ in range(20):
        name, kind = seen.choice(["ring", "direct", "halving_doubling"]), seen.choice(["all_reduce", "all_gather"])
        lowered = lower(algorithm(str(name), str(kind), 8), instances=int(seen.integers(1, 3)))
        nbytes = float(10 ** seen.uniform(3, 8))
        base = run_priced(lowered, cluster, nbytes=nbytes, runtime=FAINT, contention="fair").total_us
        dear = run_priced(lowered, cluster, nbytes=nbytes, runtime=replace(FULL, max_blocks=0, slice_bytes=0)).total_us
        assert dear > base


def test_a_program_of_more_blocks_than_run_is_refused() -> None:
    with pytest.raises(InvalidInput, match="threadblocks of a rank are more than the 1 that small runs"):
        simulate(
            algorithm("direct", "all_gather", 8),
            Cluster.preset("dgx2"),
            nbytes=1e6,
            runtime=Runtime(name="small", max_blocks=1),
        )


def test_a_protocol_that_the_runtime_lacks_is_refused() -> None:
    ring = lower(algorithm("ring", "all_gather", 2), protocol="LL128")
    with pytest.raises(InvalidInput, match="LL128"):
        simulate(ring, PAIR, nbytes=1e6, runtime=FULL)
    packets = replace(ring, protocol="LL")
    twice = run_priced(packets, PAIR, nbytes=1e6, runtime=FULL)
    assert twice.nbytes.sum() == pytest.approx(2 * 1e6)


def test_spans_are_instructions_and_links_carry_all_bytes() -> None:
    timeline = simulate(algorithm("ring", "all_reduce", 4), Cluster.preset("dgx2"), nbytes=4e6, runtime=FULL)
    assert set(timeline.streams) >= {"block 0"}
    assert any(name.startswith("rrc") for name in timeline.names)
    assert dict(timeline.facts)["runtime"] == "mine"
    assert timeline.total_us >= timeline.end_us.max() - 1e-9
    assert len(timeline.critical_path) > 0


def test_a_fit_finds_prices_that_made_the_times() -> None:
    """Times that a runtime made itself are told by the fitted one on programs that the fit has not seen."""
    cluster = Cluster.preset("shared_gpu", nodes=4)
    truth = Runtime(
        name="truth", launch_us=2.0, instruction_us=dict.fromkeys(("s", "r", "rrc", "rcs", "rrcs", "rrs", "cpy"), 3.0),
        block_gb_per_s={"put": 40.0, "reduce": 20.0}, holds_block=True, window=2,
    )  # fmt: skip

    def row(name: str, kind: str, nbytes: float) -> RuntimeRow:
        lowered = lower(algorithm(name, kind, 4, in_place=True))
        time_us = run_priced(lowered, cluster, nbytes=nbytes, runtime=truth).total_us
        return RuntimeRow(lowered=lowered, cluster=cluster, nbytes=nbytes, time_us=time_us)

    seen = [row("ring", kind, size) for kind in ("all_reduce", "all_gather") for size in (1e3, 1e8)]
    unseen = [row("direct", kind, size) for kind in ("all_reduce", "all_gather") for size in (1e3, 1e8)]
    start = Runtime(name="start", holds_block=True, window=2)
    found = fit_runtime(seen, start, free=("launch_us", "instruction_us", "put", "reduce"), judge=unseen)
    assert len(found.judged) == 4
    assert max(abs(ratio - 1) for ratio in found.fitted) < 0.1
    assert found.error < 0.15
    assert fit_runtime(seen, truth, free=()).fitted == pytest.approx((1.0,) * 4), "nothing to fit: only judged"
    with pytest.raises(InvalidInput, match="price to fit"):
        fit_runtime(seen, start, free=("speed",))
    with pytest.raises(InvalidInput, match="rows"):
        fit_runtime([], start, free=("put",))


def test_synthesis_chooses_few_pieces_where_instructions_are_dear(tmp_path: Path) -> None:
    """With a price on instructions the chosen streams are no slower than those of any single library algorithm."""
    cluster = Cluster.preset("shared_gpu", nodes=4)
    dear = Runtime(name="dear", instruction_us=dict.fromkeys(("s", "r", "rrc", "rcs", "rrcs", "rrs", "cpy"), 50.0))
    found = synthesize(
        AllReduce(4), cluster, 1e6, runtime=dear, makers=["library", "forest"], budget_s=10.0, cache=False
    )
    assert found.lowering is not None
    assert found.certificate.runtime == "dear"
    assert found.certificate.lowered_us == found.lowering.time_us
    for name in ("ring", "direct", "recursive_doubling"):
        alone = simulate(algorithm(name, "all_reduce", 4), cluster, nbytes=1e6, runtime=dear).total_us
        assert found.lowering.time_us <= alone * (1 + 1e-9)
    assert "dear" in str(found.certificate)
    found.save(tmp_path / "x.xml")
    table = select(AllReduce(4), cluster, [1000, 10**6], runtime=dear, makers=["library"], budget_s=5.0, cache=False)
    assert [row["time_us"] for row in table.rows()][-1] >= 100.0
