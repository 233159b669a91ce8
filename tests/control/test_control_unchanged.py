# SPDX-License-Identifier: Apache-2.0
"""A job that knows nothing of us, from its own backend over ours to a plan; the controller is killed meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from stretto.runtime.enforcer.trial import BLOCK, ROUNDS, SETTLED, SKIP

JOBS = Path(__file__).parents[1] / "jobs"
LIMIT_S = 700.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "STRETTO_CLUSTER": "ring:2"}


def wait_for(path: Path, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        assert all(process.poll() is None for process in processes), f"ended before {path.name}"
        time.sleep(0.05)


def own_network() -> list[str]:
    """What makes a command run in a network namespace of its own, as a new container has it; nothing where that may
    not be."""
    for options in ("-n", "-rn"):
        begin = ["unshare", options, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        with contextlib.suppress(OSError):
            if not subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
                return begin
    return []


def run_once(folder: Path, plans: Path, begin: Sequence[str] = ()) -> Any:
    """A job under a controller that is killed once `stretto run` has heard of its plan."""
    page = folder / "page.html"
    controller = subprocess.Popen(
        [sys.executable, str(JOBS / "unchanged_controller.py"), str(folder), str(plans)], start_new_session=True
    )
    job = None
    try:
        wait_for(folder / "up", controller)
        job = subprocess.Popen(
            [
                sys.executable, "-m", "stretto", "run", "--controller", f"unix:{folder}/socket",
                "--token-file", str(folder / "token"), "--html", str(page),
                "--", *begin, sys.executable, str(JOBS / "unchanged_job.py"), str(folder),
            ],
            env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        wait_for(folder / "told", controller, job)
        controller.kill()
        (folder / "stop").touch()
        said, _ = job.communicate(timeout=LIMIT_S)
    finally:
        for process in (controller, job):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert job.returncode == 0, said.decode()[-4000:]
    (status,) = json.loads((folder / "status").read_text())["jobs"]
    return {
        "said": said.decode(), "page": page.read_text(), "status": status,
        "ranks": [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The first start of a job, and the folder of the plan that it has left."""
    folder = tmp_path_factory.mktemp("u")
    return run_once(folder, folder / "plans") | {"plans": folder / "plans"}


def test_losses_are_those_of_plain_gloo_across_all_changes(ran: Any) -> None:
    for rank in ran["ranks"]:
        under_control, plainly = rank["losses"]
        assert under_control == plainly


def test_all_ranks_change_at_the_same_iterations(ran: Any) -> None:
    first, second = (rank["ran"] for rank in ran["ranks"])
    assert first == second
    sides = [own for own, _ in groupby(own for own, number, _ in first if not number)]
    assert sides[:5] in ([True, False, True, False], [True, False, True, False, True]), "in turns"
    assert first[-1][1] > 0, "a plan was active at the end"


def test_a_plan_is_set_aside_once_on_all_ranks_to_be_compared(ran: Any) -> None:
    first = ran["ranks"][0]["ran"]
    under_first_plan = [side for _, number, side in first if number == min(n for _, n, _ in first if n)]
    sides = [(side, len(list(some))) for side, some in groupby(under_first_plan)]
    block = BLOCK + SKIP
    assert sides[:6] == [("", SETTLED), *[("own", block), ("ours", block)] * ROUNDS, ("", sides[5][1])]
    assert [side for side, _ in sides].count("own") == ROUNDS


def test_the_status_has_all_three_figures_and_their_shares(ran: Any) -> None:
    split = ran["status"]["split"]
    assert (split["own"], split["no_unchanged"]) == ("gloo", "")
    each = [split[name] for name in ("unchanged", "backend", "plan")]
    assert all(one["iterations"] > 0 and one["low_us"] <= one["median_us"] <= one["high_us"] for one in each)
    own, ours, plan = (one["median_us"] for one in each)
    assert split["backend_share"] == pytest.approx(own / ours)
    assert split["plan_share"] == pytest.approx(ours / plan)
    # A plan that is slower than what runs without it may have been given up by now.
    assert split["gain"] == pytest.approx(own / {"unchanged": own, "backend": ours, "plan": plan}[split["kept"]])
    assert split["whole_iterations"] > 100 and split["whole_gain"] == pytest.approx(own / split["whole_us"])
    assert split["predicted_backend_us"] > 0 and split["predicted_plan_us"] > 0


def test_a_controller_that_is_gone_at_the_end_is_said_to_be_and_what_it_knew_is_told(ran: Any) -> None:
    assert "stretto: the controller is gone at the end" in ran["said"]
    assert "no job was heard of" not in ran["said"]
    for words in ("unchanged job (gloo):", "our backend, plain order:", "under the plan:", "the unchanged job"):
        assert words in ran["said"], words


def test_the_report_has_the_timelines_all_the_same(ran: Any) -> None:
    assert ran["page"].count("plotly-graph-div") >= 1
    for words in ("plain order, predicted", "the plan, predicted", "the plan, measured", "Motifs of plan"):
        assert words in ran["page"], words


def test_a_job_that_asks_for_our_backend_has_no_unchanged_one_to_compare_with(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "run", "--budget", "0.2", "--",
         sys.executable, str(JOBS / "unchanged_job.py"), str(tmp_path)],
        env=os.environ | ENVIRONMENT | {"BACKEND": "stretto", "STEPS": "40"}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the unchanged job was not measured: the job asked for the backend stretto itself" in done.stderr
    assert "what was gained over the unchanged job is not known" in done.stderr
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert not any(own for own, _, _ in told["ran"]), "gloo never ran"
        assert told["losses"][0] == told["losses"][1]


def test_a_second_start_begins_with_the_plan_of_the_first(ran: Any, tmp_path: Path) -> None:
    assert "recorded 5 iterations" in ran["said"]
    assert len(list(ran["plans"].iterdir())) == 1
    assert "no kept plan is used, so the step is recorded: no plan is kept for unchanged_job.py" in ran["said"]
    again = run_once(tmp_path, ran["plans"], own_network())
    assert "not recorded, as an earlier start has left" in again["said"], again["said"]
    assert "recorded 5 iterations" not in again["said"] and "measured in turns" not in again["said"]
    assert "began with a plan of an earlier start" in again["said"]
    first, second = (rank["ran"] for rank in again["ranks"])
    assert first == second and any(number for _, number, _ in first)
    for rank in again["ranks"]:
        assert rank["losses"][0] == rank["losses"][1]
