# SPDX-License-Identifier: Apache-2.0
"""``stretto run``: the job's own exit code and output, its environment, and training that knows nothing of us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.cli import run

ROOT = Path(__file__).parents[2]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_exit_code_is_the_jobs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--", "sh", "-c", "echo out; exit 7"]) == 7
    captured = capfd.readouterr()
    assert captured.out == "out\n"
    assert "no job was heard of" in captured.err
    assert run(["run", "--", "sh", "-c", "kill -9 $$"]) == 128 + 9
    capfd.readouterr()
    assert run(["run", "--", "/no/such/command"]) == 127
    assert run(["run", "--", "/"]) == 126
    assert "no job was heard of" not in capfd.readouterr().err, "it never started"


def test_the_job_gets_an_address_a_secret_token_and_its_own_sitecustomize_too(stretto: Launch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    code = """if True:
        import os, stat, sys
        assert os.environ["STRETTO_CONTROLLER"].startswith("unix:/")
        assert stat.S_IMODE(os.stat(os.environ["STRETTO_TOKEN_FILE"]).st_mode) == 0o600
        assert any(type(finder).__name__ == "Finder" for finder in sys.meta_path)
        assert "stretto" not in sys.modules and "torch" not in sys.modules
        print("fine")
    """
    done = stretto("run", "--", sys.executable, "-c", code, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    # Once in the command itself, once in the job.
    assert done.stdout.split() == ["mine", "mine", "fine"]


def test_what_is_wrong_with_a_controller_is_said_before_the_job_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    for address, token in (("unix:/x", tmp_path / "missing"), ("nonsense", _token(tmp_path))):
        given = ["--controller", address, "--token-file", str(token)]
        assert run(["run", *given, "--", "touch", str(ran)]) == 2
        assert capfd.readouterr().err.count("\n") == 1
        assert not ran.exists()


def test_a_controller_that_is_gone_and_a_report_that_cannot_be_written_leave_the_exit_code_alone(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--controller", f"unix:{tmp_path}/none", "--token-file", str(_token(tmp_path))]
    assert run(["run", *given, "--", "sh", "-c", "exit 5"]) == 5
    assert "does not answer" in capfd.readouterr().err
    page = tmp_path / "page.html"
    assert run(["run", "--html", str(page), "--", "sh", "-c", f"mkdir {page}; exit 6"]) == 6
    assert f"{page}: Is a directory" in capfd.readouterr().err


STATUS = """if True:
    import json, os, signal, subprocess, sys, time
    def controller(but=0):
        # On a busy machine it may not answer in time; a signal to process 0 would go to this job itself.
        for _ in range(100):
            asked = [sys.executable, "-m", "stretto", "status", "--json", "-"]
            said = subprocess.run(asked, capture_output=True, text=True).stdout
            if said and json.loads(said)["pid"] != but:
                return json.loads(said)["pid"]
            time.sleep(0.1)
        sys.exit("no controller answers")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_controller_that_a_signal_ends_is_started_again_and_the_exit_code_is_the_jobs(
    number: signal.Signals, stretto: Launch
) -> None:
    job = f"""{STATUS}
    first = controller()
    os.kill(first, {number.value})
    controller(but=first)
    sys.exit(9)
    """
    done = stretto("run", "--", sys.executable, "-c", job)
    assert done.returncode == 9, done.stderr
    said = f"stretto: the controller ended by {number.name}; it is started again, and training goes on"
    assert done.stderr.splitlines().count(said) == 1
    assert "Traceback" not in done.stderr


def test_a_controller_that_ends_just_before_the_job_is_told_of_once(stretto: Launch) -> None:
    job = f"{STATUS}\n    os.kill(controller(), signal.SIGKILL); sys.exit(9)"
    done = stretto("run", "--", sys.executable, "-c", job)
    assert done.returncode == 9, done.stderr
    assert done.stderr.count("stretto: the controller ended by SIGKILL") == 1


def test_a_controller_that_has_stopped_leaves_the_exit_code_alone(stretto: Launch) -> None:
    job = f"{STATUS}\n    os.kill(controller(), signal.SIGSTOP); sys.exit(9)"
    done = stretto("run", "--", sys.executable, "-c", job)
    assert done.returncode == 9, done.stderr
    assert "the controller did not answer at the end and was killed" in done.stderr


def test_the_controller_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"{STATUS}\n    open({str(pid)!r} + '.part', 'w').write(str(controller()))\n"
    code += f"    os.rename({str(pid)!r} + '.part', {str(pid)!r}); time.sleep(900)"
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "run", "--", sys.executable, "-c", code], start_new_session=True
    )
    try:
        _wait_for(pid.exists)
        controller = int(pid.read_text())
        process.kill()
        _wait_for(lambda: not Path(f"/proc/{controller}").exists())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupt_that_no_terminal_sent_reaches_the_job(tmp_path: Path) -> None:
    # In a session of its own there is no terminal: whoever sends SIGINT sends it to `stretto run` alone.
    up = tmp_path / "up"
    job = f"trap 'exit 9' INT; touch {up}; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "run", "--", "bash", "-c", job], start_new_session=True
    )
    try:
        for _ in range(3000):
            if up.exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 9
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _token(folder: Path) -> Path:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text("x" * 32)
    return token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0", "--", "true"], "--budget"),
        (["--controller", "unix:/x", "--", "true"], "--token-file"),
        (["--html", "/", "--", "true"], "--html: /: is a directory, not a file"),
        ([], "Missing argument"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unchanged_script_that_forks_loaders_trains_to_its_end_and_is_told_what_came_of_it(stretto: Launch) -> None:
    done = stretto(
        "run", "--budget", "0.3", "--",
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "examples" / "train_unchanged.py"), "--steps", "150", "--width", "64", "--workers", "1",
        env={"STRETTO_CLUSTER": "ring:2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "150 steps" in done.stdout
    assert "stretto: recorded 5 iterations" in done.stderr
    assert "stretto: 2 ranks, " in done.stderr
