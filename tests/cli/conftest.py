"""Runs the command in this process, and checks what holds for every failure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stretto.cli import run

Run = Callable[..., str]


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
