# SPDX-License-Identifier: Apache-2.0
"""However a run or a lab ends, what is left is nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stretto.cli import run
from stretto.lab import Lab, job, running
from stretto.lab.processes import _members

pytestmark = pytest.mark.real_lab
LIMIT_S = 480.0
Start = Callable[[str], subprocess.Popen[str]]

# A rank with a child that leaves its process group and forgets its output.
STRAY = "setsid sleep 1000 > /dev/null 2>&1 & echo up; exec sleep 1000"
WHOLE = 3 + 2 * 2
"""The keepers of two hosts and their switch, two ranks, two strays."""


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def interfaces() -> str:
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


def eventually(done: Callable[[], bool]) -> bool:
    until = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def processes_of(lab_pid: int) -> list[int]:
    return [pid for lab in running() if lab.pid == lab_pid for pid in lab.pids]


def test_the_exit_code_is_that_of_the_rank_that_failed_first() -> None:
    with Lab(hosts=2, ranks_per_host=2) as lab:
        done = lab.run(shell("[ $RANK = 2 ] && exit 7; exec sleep 1000"), timeout_s=LIMIT_S)
    assert done.returncodes == (-signal.SIGTERM, -signal.SIGTERM, 7, -signal.SIGTERM)
    assert (done.failed, done.exit_code, done.timed_out) == (2, 7, False)
    assert done.why == "rank 2 ended with exit code 7: it wrote nothing"


def test_ranks_that_do_not_listen_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job.LabJob.end, "__defaults__", (0.3,))
    with Lab(hosts=1, ranks_per_host=3) as lab:
        deaf = f"until [ -e {tmp_path}/0 ] && [ -e {tmp_path}/2 ]; do sleep 0.02; done"
        ends = f"if [ $RANK = 1 ]; then {deaf}; exit 3; elif [ $RANK = 2 ]; then kill -STOP $$; fi"
        script = f"trap '' TERM; touch {tmp_path}/$RANK; {ends}; while :; do sleep 0.1; done"
        done = lab.run(shell(script), timeout_s=LIMIT_S)
    assert done.returncodes == (-signal.SIGKILL, 3, -signal.SIGKILL)
    assert done.exit_code == 3


def test_a_rank_that_dies_of_a_signal_gives_128_and_its_number() -> None:
    with Lab(hosts=1, ranks_per_host=1) as lab:
        done = lab.run(shell("kill -SEGV $$"), timeout_s=LIMIT_S)
    assert (done.returncodes, done.exit_code) == ((-signal.SIGSEGV,), 128 + signal.SIGSEGV)


def test_with_keep_going_a_failure_ends_nobody_else() -> None:
    with Lab(hosts=2, ranks_per_host=1) as lab:
        done = lab.run(shell("[ $RANK = 0 ] && exit 5; sleep 0.5; echo whole"), keep_going=True, timeout_s=LIMIT_S)
    assert (done.returncodes, done.exit_code, done.outputs) == ((5, 0), 5, ("", "whole\n"))


def test_time_runs_out() -> None:
    with Lab(hosts=2, ranks_per_host=1) as lab:
        running_job = lab.start(shell("[ $RANK = 0 ] && exit 0; exec sleep 1000"))
        assert eventually(lambda: Path(f"/proc/{running_job.pids[0]}/stat").read_text().split()[2] == "Z")
        done = running_job.wait(0.5)
        assert (done.returncodes, done.failed) == ((0, -signal.SIGTERM), None)
        assert (done.timed_out, done.exit_code, done.why) == (True, 124, "time was up")
        assert lab.run(shell("echo again"), timeout_s=LIMIT_S).outputs == ("again\n",) * 2


def test_a_rank_can_be_killed_while_the_others_run() -> None:
    with Lab(hosts=2, ranks_per_host=1) as lab:
        ready: set[int] = set()

        def heard(rank: int, stream: str, line: str) -> None:
            ready.add(rank)
            if len(ready) == 2:
                running_job.signal(1, signal.SIGKILL)

        running_job = lab.start(shell("echo ready; [ $RANK = 0 ] || exec sleep 1000"), on_line=heard)
        done = running_job.wait(LIMIT_S, keep_going=True)
    assert done.returncodes == (0, -signal.SIGKILL)
    assert done.failed == 1
    assert done.why.startswith("rank 1 ended by signal 9 (SIGKILL: ") and done.why.endswith(": ready")


def test_streams_are_kept_apart_and_heard_line_by_line() -> None:
    lines: list[tuple[int, str, str]] = []
    with Lab(hosts=1, ranks_per_host=1) as lab:
        script = r"printf 'one\ntw'; sleep 0.2; printf 'o\n\377\n'; printf 'bad\r\n' >&2; printf end"
        done = lab.run(shell(script), timeout_s=LIMIT_S, on_line=lambda *line: lines.append(line))
    replacement = "\N{REPLACEMENT CHARACTER}"
    assert done.outputs == (f"one\ntwo\n{replacement}\nend",)
    assert done.errors == ("bad\r\n",)
    assert [line for _, stream, line in lines if stream == "stdout"] == ["one", "two", replacement, "end"]
    assert [line for _, stream, line in lines if stream == "stderr"] == ["bad"]


def test_of_endless_output_the_end_is_kept() -> None:
    with Lab(hosts=1, ranks_per_host=1) as lab:
        done = lab.run(shell("head -c 20000000 /dev/zero | tr '\\0' x; echo; echo end"), timeout_s=LIMIT_S)
    assert len(done.outputs[0]) == job.KEPT_BYTES
    assert done.outputs[0].endswith("x\nend\n")


def test_after_a_normal_end_nothing_is_left(tmp_path: Path) -> None:
    before, descriptors = interfaces(), len(os.listdir("/proc/self/fd"))
    with Lab(hosts=2, ranks_per_host=1) as lab:
        # The stray has left its process group before the rank ends.
        stray = f"setsid sh -c 'touch {tmp_path}/'$RANK'; exec sleep 1000' > /dev/null 2>&1 &"
        done = lab.run(shell(f"{stray} until [ -e {tmp_path}/$RANK ]; do sleep 0.02; done"), timeout_s=LIMIT_S)
        assert done.exit_code == 0
        assert interfaces() == before
        assert eventually(lambda: len(processes_of(os.getpid())) == 3 + 2)
    assert processes_of(os.getpid()) == []
    assert interfaces() == before
    # Others of this process may let go of theirs meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_after_an_exception_nothing_is_left() -> None:
    class Expected(Exception):
        pass

    with pytest.raises(Expected), Lab(hosts=2, ranks_per_host=1) as lab:
        lab.start(shell(STRAY))
        raise Expected
    assert processes_of(os.getpid()) == []


def test_a_listener_that_fails_ends_the_run() -> None:
    def closed(rank: int, stream: str, line: str) -> None:
        raise BrokenPipeError

    with Lab(hosts=1, ranks_per_host=2) as lab, pytest.raises(BrokenPipeError):
        lab.run(shell("echo word; exec sleep 1000"), on_line=closed, timeout_s=LIMIT_S)
    assert processes_of(os.getpid()) == []


@pytest.fixture
def lab_process() -> Iterator[Start]:
    """Starts ``stretto lab run`` as a process of its own; returns once all ranks have said something."""
    with ExitStack() as started:

        def start(script: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "stretto", "lab", "run", "--ranks", "1", "--", *shell(script)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started.callback(killed, process)
            assert process.stdout is not None
            assert {process.stdout.readline().split("]")[0] for _ in range(2)} == {"[0", "[1"}
            return process

        yield start


def killed(process: subprocess.Popen[str]) -> None:
    """Ended by force, if it has not ended yet."""
    if process.returncode is None:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_after_kill_9_of_the_lab_everything_goes_by_itself(lab_process: Start) -> None:
    process = lab_process(STRAY)
    assert eventually(lambda: len(processes_of(process.pid)) == WHOLE)
    killed(process)
    assert eventually(lambda: not processes_of(process.pid))


def test_what_is_left_when_the_keepers_were_killed_too_is_cleaned_and_nothing_else(
    lab_process: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, alive = lab_process(STRAY), lab_process(STRAY)
    assert eventually(lambda: len(processes_of(dead.pid)) == len(processes_of(alive.pid)) == WHOLE)
    (lab,) = (lab for lab in running() if lab.pid == dead.pid)
    for pid in (dead.pid, *lab.keepers.values()):
        os.kill(pid, signal.SIGKILL)
    dead.communicate(timeout=LIMIT_S)
    # The ranks die with the lab; their strays do not.
    assert eventually(lambda: len(processes_of(dead.pid)) == 2)
    assert run(["lab", "show"]) == 0
    shown = capsys.readouterr().out
    assert next(line for line in shown.splitlines() if str(dead.pid) in line.split()).count("dead") == 1
    assert next(line for line in shown.splitlines() if str(alive.pid) in line.split()).count("runs") == 1
    kept = set(processes_of(alive.pid))
    assert run(["lab", "clean"]) == 0
    assert f"ended 2 processes of the lab of process {dead.pid}" in capsys.readouterr().out
    assert processes_of(dead.pid) == []
    assert set(processes_of(alive.pid)) == kept
    killed(alive)
    assert eventually(lambda: not processes_of(alive.pid))


def test_clean_all_ends_labs_that_run(as_root: bool, tmp_path: Path) -> None:
    # In a process namespace of its own, so that it sees no labs of anybody else.
    stretto = f"{sys.executable} -m stretto lab"
    script = f"""
{stretto} run --hosts 2 --ranks 1 -- sh -c 'echo up; exec sleep 1000' > {tmp_path}/said 2>&1 &
lab=$!
until [ "$(grep -c up {tmp_path}/said)" = 2 ]; do sleep 0.1; done
{stretto} clean
{stretto} clean --all
wait $lab
echo code $?
{stretto} show
"""
    user = [] if as_root else ["--user", "--map-root-user"]
    apart = ["unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc", "timeout", str(LIMIT_S)]
    done = subprocess.run([*apart, *shell(script)], capture_output=True, text=True, timeout=2 * LIMIT_S)
    first, second, code, last = done.stdout.splitlines()
    assert first == "nothing to clean"
    assert second.startswith("ended 5 processes of the lab of process ")
    assert code == f"code {128 + signal.SIGKILL}"
    assert last == "no lab runs here"


def test_ctrl_c_lets_ranks_say_goodbye(lab_process: Start) -> None:
    process = lab_process("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert sorted(out.splitlines()) == ["[0] bye", "[1] bye"]
    assert process.returncode == 130
    assert "Traceback" not in err
    assert processes_of(process.pid) == []


def test_a_process_with_a_strange_name_of_a_lab_is_nobodys() -> None:
    odd = subprocess.Popen(["sleep", "1000"], env={**os.environ, "STRETTO_LAB": "1-2-x"})
    try:
        assert odd.pid not in {pid for pid, _ in _members()}
    finally:
        odd.kill()
        odd.wait()
