# SPDX-License-Identifier: Apache-2.0
"""``stretto selftest``: one line without a GPU, and what it prints of what the ranks found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import run
from stretto.doctor import gpu_selftest
from stretto.errors import InvalidInput, StrettoError

MACHINE = {
    "ranks": 2, "gpus": ["NVIDIA H200", "NVIDIA H200"], "torch": "2.11", "cuda": "13.0", "nccl": "2.28.9",
    "driver": "580", "topology": "GPU0 X", "held_bytes": 1 << 20,
}  # fmt: skip
ROW = {
    "collective": "all_reduce", "algorithm": "direct", "dtype": "float32", "nbytes": 1024, "right": True, "us": 5.0,
    "nccl_us": 90.0,
}  # fmt: skip


def test_without_a_gpu_there_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["selftest", "--gpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("stretto: error: selftest: there is no GPU here") and said.count("\n") == 1
    assert run(["selftest"]) == 2
    assert capsys.readouterr().err == "stretto: error: selftest: say what to test: --gpu\n"


def fake_ranks(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], machine: dict[str, Any] | None) -> None:
    def play(folder: Path, ranks: int, *, shared: bool, asked: dict[str, Any]) -> bool:
        assert ranks == 2 and shared
        (folder / "out-0").write_text("Traceback\nImportError: no symmetric memory\n")
        if machine is not None:
            (folder / "machine.json").write_text(json.dumps(machine))
        (folder / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return True

    home = sys.modules["stretto.doctor.gpu_selftest"]
    monkeypatch.setattr(home, "gpu_count", lambda: 1)
    monkeypatch.setattr(home, "_run_ranks", play)


def test_the_fastest_right_one_is_shown_and_the_report_has_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ring = ROW | {"algorithm": "ring", "us": 9.0}
    fake_ranks(monkeypatch, [ROW, ring], MACHINE)
    assert run(["selftest", "--gpu", "--json", str(tmp_path / "r.json")]) == 0
    said = capsys.readouterr().out
    assert "direct" in said and "ring" not in said and "2 runs, 0 wrong; GPU memory held by a rank: 1 MiB" in said
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["machine"]["topology"] == "GPU0 X" and len(report["rows"]) == 2 and report["finished"]


def test_a_wrong_result_is_named_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(monkeypatch, [ROW, ROW | {"algorithm": "ring", "right": False}], MACHINE)
    assert run(["selftest", "--gpu"]) == 1
    assert "all_reduce ring float32 1024 bytes: wrong result" in capsys.readouterr().out


def test_refusals_and_wrong_arguments_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ranks(monkeypatch, [], MACHINE | {"refusal": "ranks 0 and 1 are on different hosts"})
    assert run(["selftest", "--gpu"]) == 1
    assert "no program ran on GPU memory: ranks 0 and 1 are on different hosts" in capsys.readouterr().out
    with pytest.raises(InvalidInput, match="ranks: must be from 2 to 32, not 1"):
        gpu_selftest(ranks=1)
    with pytest.raises(InvalidInput, match="dtypes: 'half' must be one of float32"):
        gpu_selftest(dtypes=["half"])
    fake_ranks(monkeypatch, [], None)
    with pytest.raises(StrettoError, match="ended before they had joined: ImportError: no symmetric memory"):
        gpu_selftest()
