# SPDX-License-Identifier: Apache-2.0
"""``stretto controller`` and ``stretto status``: one process that serves, one that asks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stretto.cli import run
from stretto.control.messages import RankState, Status, encode
from stretto.control.transport import EXCHANGE, from_environment
from stretto.runtime.enforcer.report import EnforcerReport

Run = Callable[..., str]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A running controller: the variables that it prints."""
    folder = tmp_path_factory.mktemp("c")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "stretto", "controller", "--listen", "127.0.0.1:0",
            "--token-file", str(folder / "token"), "--state", str(folder / "state.json"),
        ],
        env=os.environ | {"XDG_RUNTIME_DIR": str(folder)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        yield dict(line.split("=", 1) for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def arguments(address: dict[str, str]) -> list[str]:
    return ["--address", address["STRETTO_CONTROLLER"], "--token-file", address["STRETTO_TOKEN_FILE"]]


def test_the_token_that_it_makes_is_secret(address: dict[str, str]) -> None:
    assert Path(address["STRETTO_TOKEN_FILE"]).stat().st_mode & 0o077 == 0


def test_status_shows_jobs_ranks_and_what_they_run(
    good: Run, bad: Run, address: dict[str, str], tmp_path: Path
) -> None:
    assert "no job has been heard of" in good("status", *arguments(address))
    link = from_environment(address)
    assert link is not None
    report = EnforcerReport(iteration=12, iteration_us=1500.0, waits_us=300.0, fell_back="gradients has another size")
    for rank in range(2):
        state = RankState(job="mine", epoch=1, rank=rank, size=2, beat=1, report=report)
        link.call(EXCHANGE, encode(state), timeout_s=100.0)
    link.close()
    shown = good("status", *arguments(address))
    assert "job mine: 2 ranks" in shown
    assert "plain order: 1.5 ms per iteration" in shown
    assert "20.0%" in shown
    assert "rank 1 fell back: gradients has another size" in shown
    page = tmp_path / "page.html"
    good("status", "--html", str(page), *arguments(address))
    assert "Plans, promised and measured" in page.read_text()
    assert "is a directory, not a file" in bad("status", "--html", str(tmp_path), *arguments(address))
    found = msgspec.json.decode(good("status", "--json", "-", *arguments(address)), type=Status)
    assert [job.job for job in found.jobs] == ["mine"]


def test_what_ranks_say_neither_commands_the_terminal_nor_looks_like_another_line(
    good: Run, address: dict[str, str]
) -> None:
    link = from_environment(address)
    assert link is not None
    hidden = "a\x1b]0;title\x07\x1b[2J\x9b\u202e\r\njob forged: 8 ranks"
    report = EnforcerReport(iteration=12, iteration_us=1500.0, waits_us=300.0, fell_back=hidden)
    state = RankState(job=hidden, epoch=1, rank=0, size=1, beat=1, report=report)
    link.call(EXCHANGE, encode(state), timeout_s=20.0)
    link.close()
    shown = good("status", *arguments(address))
    assert not [c for c in shown if not c.isprintable() and c != "\n"]
    assert not [line for line in shown.splitlines() if line.startswith("job forged")]


def test_status_with_a_wrong_token_or_nobody_there_is_one_line(
    bad: Run, address: dict[str, str], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("x" * 32)
    assert "token" in bad("status", "--address", address["STRETTO_CONTROLLER"], "--token-file", str(token))
    assert "does not answer" in bad("status", "--address", f"unix:{tmp_path}/none", "--token-file", str(token))
    assert "missing" in bad("status", "--address", f"unix:{tmp_path}/none", "--token-file", str(tmp_path / "missing"))


def test_a_wrong_address_is_told_before_a_missing_token(bad: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRETTO_TOKEN_FILE", raising=False)
    assert "expected unix:/path or HOST:PORT" in bad("status", "--address", "foo:bar")


def test_status_without_a_controller_says_where_one_would_be_found(
    bad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("STRETTO_CONTROLLER", raising=False)
    assert "--address: no `stretto controller` of this user runs here" in bad("status")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "0.0.0.0:0"], "give certificates"),
        (["--listen", "nonsense"], "expected unix:/path or HOST:PORT"),
        (["--budget", "-1"], "--budget"),
        (["--tls-cert", "c.pem"], "--tls-key: mTLS needs all"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "no.pem", "--tls-key", "no.pem", "--tls-ca", "no.pem"], "no.pem"),
    ],
)
def test_a_controller_that_cannot_be_is_one_line(
    options: list[str], message: str, bad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert message in bad("controller", *options)


def test_two_controllers_on_one_socket_are_refused(
    capsys: pytest.CaptureFixture[str], address: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run(["controller", "--listen", address["STRETTO_CONTROLLER"]]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_a_second_controller_does_not_take_the_socket_of_the_first_but_that_of_a_killed_one(
    bad: Run, good: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-m", "stretto", "controller"], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("STRETTO_CONTROLLER=unix:")
            handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
            assert "another controller listens there" in bad("controller")
            assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
            assert "no job has been heard of" in good("status")
        finally:
            process.kill()
            process.wait()
    assert "does not answer" in bad("status")
