# SPDX-License-Identifier: Apache-2.0
"""Folders of MSCCL++ plans: what `synth` writes is read back, checked and registered."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from stretto import KB, MB, AllReduce, Cluster
from stretto.errors import InvalidInput
from stretto.programs.formats.mscclpp_folder import plans_of, register_plans
from stretto.programs.formats.mscclpp_reader import check_plan, loads
from stretto.synthesis import select


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("plans")
    table = select(
        AllReduce(4), Cluster.preset("shared_gpu", nodes=4), [KB, 64 * MB], runtime="mscclpp:h200",
        makers=["library:direct"], budget_s=2, cache=False,
    )  # fmt: skip
    table.save(path, suffix=".json")
    return path


def test_small_calls_get_packets_and_large_ones_many_threadblocks(folder: Path) -> None:
    plans = plans_of(folder)
    assert [plans[0].min_bytes, plans[-1].max_bytes] == [0, 0]
    small, large = (json.loads(plan.path.read_text()) for plan in (plans[0], plans[-1]))
    assert [small["protocol"], large["protocol"]] == ["LL", "Simple"]
    assert len(large["gpus"][0]["threadblocks"]) > len(small["gpus"][0]["threadblocks"])
    check_plan(loads(plans[0].path.read_text()), seeds=[0])


def test_plans_are_registered_with_their_constraint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []

    class Algorithm:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

        class Constraint:
            def __init__(self, **fields: int) -> None:
                self.fields = fields

    core, ext = types.ModuleType("mscclpp"), types.ModuleType("mscclpp.ext")
    vars(core).update(Algorithm=Algorithm, ExecutionPlan=lambda path, rank: (path, rank), ext=ext)
    builder = types.SimpleNamespace(add_algorithm_builder=added.append)
    vars(ext).update(AlgorithmCollectionBuilder=lambda: builder)
    monkeypatch.setitem(sys.modules, "mscclpp", core)
    monkeypatch.setitem(sys.modules, "mscclpp.ext", ext)
    plans = register_plans(folder, 3)
    assert [one.fields["id"] for one in added] == [plan.name for plan in plans]
    assert added[0].fields["execution_plan"] == (str(plans[0].path), 3)
    assert added[0].fields["constraint"].fields == {"world_size": 4, "n_ranks_per_node": 4}
    with pytest.raises(InvalidInput, match=r"rank: must be 0..3"):
        register_plans(folder, 4)


def test_without_mscclpp_it_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mscclpp", None)
    with pytest.raises(InvalidInput, match="mscclpp: its Python package"):
        register_plans(folder, 0)


def test_overlapping_sizes_are_refused(folder: Path, tmp_path: Path) -> None:
    plan = json.loads(plans_of(folder)[-1].path.read_text()) | {"min_message_size": 0}
    rows = [{"file": name, "min_bytes": 0, "max_bytes": 0} for name in ("a.json", "b.json")]
    for row in rows:
        (tmp_path / str(row["file"])).write_text(json.dumps(plan))
    (tmp_path / "index.json").write_text(json.dumps({"collective": "all_reduce", "rows": rows}))
    with pytest.raises(InvalidInput, match=r"its sizes overlap those of a\.json"):
        plans_of(tmp_path)
    rows[0]["max_bytes"] = 5
    (tmp_path / "index.json").write_text(json.dumps({"collective": "all_reduce", "rows": rows}))
    with pytest.raises(InvalidInput, match=r"is for other sizes than index\.json says"):
        plans_of(tmp_path)


def test_our_backend_runs_the_programs_beside_the_plans(folder: Path) -> None:
    from stretto.runtime.torch_backend.selection import Selector

    selector = Selector(range(4), ["host"] * 4, table=folder)
    for nbytes in (1024, 1 << 26):
        pick = selector.pick("all_reduce", nbytes)
        assert pick.from_table and not pick.rejected
