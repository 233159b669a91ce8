# SPDX-License-Identifier: Apache-2.0
"""The price of fused steps, beside times that are worked out by hand; tables of measured calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import Cluster
from stretto.algorithms import algorithm
from stretto.cli.runtime_rows import read_rows
from stretto.errors import InvalidInput
from stretto.programs.fused import fuse
from stretto.simulator import Runtime
from stretto.simulator.priced_fused import fused_time_us, rounds_of
from stretto.simulator.runtime_fit import fit_runtime
from stretto.simulator.runtimes import Protocol

PRICES = Runtime(
    name="gpu:test", launch_us=1.0, step_us=0.5, meet_us=2.0, peer_us=0.25, place_us=0.1, max_blocks=64,
    block_gb_per_s={"read": 10.0, "write": 20.0},
    protocols={"Simple": Protocol(), "LL": Protocol(bytes_factor=2.0, signal_us=0.4, step_us=0.3, poll_us=0.2)},
)  # fmt: skip
FAST = Cluster.preset("shared_gpu", nodes=4, gb_per_s=1e9)
"""Links that take no time worth mentioning."""
HEAD = "collective,algorithm,ranks,nbytes,protocol,symmetric,blocks,microseconds\n"


@pytest.mark.parametrize("blocks", [1, 8])
def test_a_direct_all_reduce_in_symmetric_memory(blocks: int) -> None:
    fused = fuse(algorithm("direct", "all_reduce", 4), symmetric=True)
    took = fused_time_us(fused, FAST, nbytes=4e6, blocks=blocks, runtime=PRICES)
    meeting = 2.0 + 0.25 * 2  # Three peers are waited for at once.
    work = 1e6 * (4 / 10e3 + 4 / 20e3) / blocks
    assert took == pytest.approx(1.0 + meeting + 0.5 + 8 * 0.1 + work + meeting, rel=1e-4)


def test_packets_are_added_up_while_they_come() -> None:
    fused = fuse(algorithm("direct", "all_reduce", 4, steps=1), protocol="ll")
    assert fused.depth == 2
    took = fused_time_us(fused, FAST, nbytes=4e3, runtime=PRICES)
    # One step sends three packets and the next reads three, adds its own and stores; each pays for itself first.
    begun = 1.0 + 0.3 + 0.1
    add = max(begun + 4 * (1 / 10 + 3 * 2 / 20), begun + 0.4)
    took_add = 4 * ((1 + 3 * 2) / 10 + 1 / 20)
    assert begun + 0.4 + took_add <= took <= add + 0.3 + 3 * 0.2 + 2 * 0.1 + 0.4 + took_add


def test_large_staged_calls_go_in_rounds() -> None:
    fused = fuse(algorithm("direct", "all_reduce", 8))
    assert rounds_of(fused, 1 << 20, 32) == 1 < rounds_of(fused, 1 << 28, 32)
    with pytest.raises(InvalidInput, match="blocks: 65 are more than the 64"):
        fused_time_us(fused, FAST, nbytes=1e6, blocks=65, runtime=PRICES)


def test_links_bound_what_blocks_could_move() -> None:
    slow = Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=1.0)
    ring, direct = (
        fused_time_us(fuse(algorithm(name, "all_gather", 4)), slow, nbytes=4e6, blocks=32, runtime=PRICES)
        for name in ("ring", "direct")
    )
    assert 3e3 <= ring < direct


def test_prices_are_found_again_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "calls.csv"
    lines = []
    for kind in ("all_reduce", "all_gather"):
        for protocol, symmetric in (("simple", "yes"), ("ll", "no")):
            fused = fuse(algorithm("direct", kind, 4), protocol=protocol, symmetric=symmetric == "yes")
            for nbytes in (1 << 10, 1 << 16, 1 << 20):
                for blocks in (1, 8):
                    took = fused_time_us(
                        fused, Cluster.preset("shared_gpu", nodes=4), nbytes=nbytes, blocks=blocks, runtime=PRICES
                    )
                    lines.append(f"{kind},direct,4,{nbytes},{protocol},{symmetric},{blocks},{took}")
    table.write_text(HEAD + "\n".join([*lines, lines[0]]) + "\n")
    rows = read_rows(table)
    assert len(rows) == len(lines) and sum(judge for *_, judge in rows) == len(lines) // 4
    found = fit_runtime(
        [row for _, row, judge in rows if not judge],
        Runtime(name="start", block_gb_per_s={"read": 20.0, "write": 20.0}, protocols=PRICES.protocols),
        free=("launch_us", "step_us", "meet_us", "read", "write"),
        judge=[row for _, row, judge in rows if judge],
    )
    assert found.error < 0.2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("all_reduce,direct,4,1024,simple,maybe,1,5", "line 2: .*symmetric.*maybe"),
        ("all_reduce,direct,4,1024,fast,no,1,5", "line 2: .*protocol.*fast"),
        ("all_reduce,direct,4,0,simple,no,1,5", "line 2: nbytes: must be a whole number > 0"),
        ("all_reduce,direct,4,1024,simple,no,1,soon", "line 2: microseconds: must be a number"),
        ("all_reduce,direct,4,1024,simple,no,1,-5", "line 2: time_us: must be > 0"),
        ("all_reduce,direct(),4,1024,simple,no,1,nan", "line 2: time_us"),
        ("all_reduce,dir ect,4,1024,simple,no,1,5", "line 2: algorithm: must be NAME"),
        ("all_reduce,rign,4,1024,simple,no,1,5", "line 2: .*did you mean 'ring'"),
    ],
)
def test_wrong_lines_of_a_table_are_named(line: str, said: str, tmp_path: Path) -> None:
    table = tmp_path / "calls.csv"
    table.write_text(HEAD + line + "\n")
    with pytest.raises(InvalidInput, match=said):
        read_rows(table)
    table.write_text("collective,ranks\nall_reduce,4\n")
    with pytest.raises(InvalidInput, match="columns: algorithm is missing"):
        read_rows(table)
