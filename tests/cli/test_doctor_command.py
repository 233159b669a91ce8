# SPDX-License-Identifier: Apache-2.0
"""``stretto doctor``: what is missing is said with a remedy, and only a broken base changes the exit code."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import stretto
from stretto.cli import run
from stretto.doctor import Finding, checks


def test_the_base_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in said["findings"]}
    assert said["version"] == stretto.__version__
    assert {"python", "native module", "numpy", "torch", "executor, UCX", "GPUs", "RDMA", "lab"} <= set(found)
    assert all(one["state"] == "works" for one in found.values() if one["area"] == "base")


def test_a_broken_base_is_the_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Finding(area="base", name="numpy", state="broken", about="not installed", remedy="pip install numpy")
    absent = Finding(area="jobs", name="torch", state="absent", about="not installed", remedy="pip install torch")
    monkeypatch.setattr(checks, "CHECKS", (lambda: iter([broken, absent]),))
    assert run(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "broken, and needed by everything: numpy\n" in said and "torch: pip install torch" in said
    monkeypatch.setattr(checks, "CHECKS", (lambda: iter([absent]),))
    assert run(["doctor"]) == 0


def test_packages_that_are_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks, "requires", lambda _: ["numpy>=1.26", "highspy>=1.7", 'torch<2.16,>=2.8; extra == "torch"']
    )
    versions = {"numpy": "1.20", "torch": "2.17.0+cu130"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(checks, "version", version)
    found = {one.name: one for one in checks._packages()}
    assert [found[name].state for name in ("numpy", "highspy", "torch")] == ["broken"] * 3
    assert found["highspy"].needed and not found["torch"].needed
    assert "2.17.0+cu130, but <2.16,>=2.8 is supported" in found["torch"].about
    assert found["torch"].remedy == "pip install 'stretto[torch]'"


def test_rdma_ports_are_counted_by_their_state(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(f"{state}\n")
    (found,) = checks._rdma(tmp_path)
    assert (found.state, found.about) == ("works", "1 of 2 ports active: mlx5_0")
    (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
    (found,) = checks._rdma(tmp_path)
    assert found.state == "broken" and found.remedy


@pytest.mark.parametrize(
    ("said", "states"),
    [
        ("printf 'NVIDIA H100, 550\\nNVIDIA H100, 550\\n'", ["works", "absent"]),
        ("echo no driver >&2; exit 9", ["broken"]),
    ],
)
def test_gpus_are_what_nvidia_smi_lists(
    said: str, states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{said}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("sys.executable", "/bin/false")
    found = list(checks._gpus())
    assert [one.state for one in found] == states
    assert "2 x NVIDIA H100" in found[0].about or "no driver" in found[0].about
