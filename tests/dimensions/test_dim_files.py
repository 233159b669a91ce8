# SPDX-License-Identifier: Apache-2.0
"""Schedules in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stretto import Cluster, InvalidInput
from stretto.dimensions import DimSchedule, baseline, dims_of, simulate, stretto, themis


def example() -> DimSchedule:
    dims = dims_of(Cluster.load("themis_3d_fc_ring_sw"), in_network=[2])
    return simulate(stretto(dims, "all_reduce", 100e6, chunks=16)).enforced()


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    dims = example().dims
    for schedule in (example(), baseline(dims, "all_gather", 1e6), themis(dims, "reduce_scatter", 7)):
        schedule.save(tmp_path / "s.json")
        again = DimSchedule.load(tmp_path / "s.json")
        assert again == schedule
        assert again.digest == schedule.digest


def test_the_digest_is_of_the_decision_not_of_its_name(tmp_path: Path) -> None:
    schedule = example()
    assert replace(schedule, name="other").digest == schedule.digest
    assert replace(schedule, nbytes=schedule.nbytes + 1).digest != schedule.digest
    swapped = (schedule.order[0][1], schedule.order[0][0], *schedule.order[0][2:])
    assert replace(schedule, order=(swapped, *schedule.order[1:])).digest != schedule.digest


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stretto", "plan", r"\$\.stretto"),
        ("version", 2, "version: must be 1, not 2"),
        ("extra", 1, "unknown field"),
        ("digest", "", "digest:  is not that of the content"),
        ("digest", "0" * 16, "digest: 0000000000000000 is not that of the content"),
        ("chunks", [99], r"chunks\[0\]: must be 0\.\.\d+ \(a way\), not 99"),
        ("chunks", [], "chunks"),
        ("nbytes", -1.0, "nbytes: must be > 0"),
        ("dims", [{"kind": "mesh", "size": 4, "gb_per_s": 1.0, "step_us": 0.0}] * 3, "unknown kind 'mesh'"),
        ("dims", [{"kind": "ring", "size": 1 << 40, "gb_per_s": 1.0, "step_us": 0.0}] * 3, "size"),
        ("order", [[[0, 0]], [], []], "order: must name every stage"),
        ("ways", [{"share": 1.0, "reduce_scatter": [77]}], r"ways\[0\]\.reduce_scatter"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = tmp_path / "s.json"
    example().save(path)
    data = json.loads(path.read_text()) | {field: value}
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match=message) as caught:
        DimSchedule.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_without_its_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    example().save(path)
    data = json.loads(path.read_text())
    del data["digest"]
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match="digest"):
        DimSchedule.load(path)


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        DimSchedule.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InvalidInput, match="not valid JSON"):
        DimSchedule.load(tmp_path / "bad.json")
