# SPDX-License-Identifier: Apache-2.0
"""Runs the command in this process, and checks what holds for every failure; or in one of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from stretto.cli import run

Run = Callable[..., str]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
LIMIT_S = 900.0


@pytest.fixture
def good(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command that must succeed; returns what it printed."""
    monkeypatch.setenv("COLUMNS", "80")

    def check(*arguments: str) -> str:
        code = run(arguments)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return check


@pytest.fixture
def bad(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must fail with exit code 2 and one line; returns the line."""

    def check(*arguments: str) -> str:
        code = run(arguments)
        captured = capsys.readouterr()
        assert code == 2
        assert captured.err.startswith("stretto: error: ")
        assert captured.err.count("\n") == 1
        assert captured.err.endswith("\n")
        assert "Traceback" not in captured.err + captured.out
        return captured.err.strip()

    return check


@pytest.fixture(scope="session")
def stretto() -> Launch:
    """Run the command in a process of its own, which is ended with all its children when it hangs."""

    def launch(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
            start_new_session=True,
        )  # fmt: skip
        try:
            said, complained = process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return subprocess.CompletedProcess(process.args, process.returncode, said, complained)

    return launch
