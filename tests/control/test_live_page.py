# SPDX-License-Identifier: Apache-2.0
"""The live page of a controller's jobs: who may see it, and what it shows."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec
import pytest

from stretto.control.live_page import LivePage
from stretto.control.messages import PLAIN, HangStatus, JobStatus, PlanId, RankStatus, Status
from stretto.errors import InvalidInput, StrettoError
from stretto.report.enforced_html import enforced_page

RANK = RankStatus(
    rank=0, heard_s=0.5, ballot=None, committed=PLAIN, active=PLAIN, iteration=40, iteration_us=1e5, waits_us=1e4,
    fell_back="", left=False,
)  # fmt: skip
JOB = JobStatus(
    job="train", epoch=1, size=1, phase="active", about="plan 3 is active", plan=PlanId(3, "abc"), plan_name="stretto",
    digest="d", predicted_us=4e3, plain_us=9e3, iteration_us=4e3, waits_us=1e2, replans=0, ranks=(RANK,),
)  # fmt: skip
HANG = HangStatus(job="train", kind="gone", ranks=(1,), text="rank 1 <is gone>")
STATUS = Status(pid=7, jobs=(JOB,), hangs=(HANG,))
answers: list[str | StrettoError] = []


@pytest.fixture
def live() -> Iterator[LivePage]:
    def page() -> str:
        answer = answers.pop()
        if isinstance(answer, StrettoError):
            raise answer
        return answer

    served = LivePage("127.0.0.1:0", page)
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    yield served
    served.close()
    thread.join()


def asked(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_who_knows_the_path_sees_the_page(live: LivePage) -> None:
    answers[:] = ["a page"]
    assert asked(f"http://{live.host}/")[0] == 404
    assert asked(live.url[:-2])[0] == 404
    assert asked(live.url, Host="evil.example")[0] == 404, "another page's name for this address"
    assert asked(live.url) == (200, "a page")


def test_a_controller_that_does_not_answer_is_said(live: LivePage) -> None:
    answers[:] = [StrettoError("the controller does not answer")]
    assert asked(live.url) == (503, "the controller does not answer")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "unix:/x", "example.org:80"])
def test_it_is_served_on_this_machine_alone(address: str) -> None:
    with pytest.raises(InvalidInput, match="of this machine alone"):
        LivePage(address, str)


def test_it_renews_itself_and_names_ranks_plans_and_faults() -> None:
    text = enforced_page(STATUS, again_s=5.0)
    assert '<meta http-equiv="refresh" content="5">' in text
    assert "rank 1 &lt;is gone&gt;" in text and "plan 3, hash abc" in text and "0.5 s ago" in text
    fallen = msgspec.structs.replace(RANK, fell_back="another op", left=True)
    later = Status(pid=7, jobs=(msgspec.structs.replace(JOB, ranks=(fallen,)),))
    assert "Rank 0 fell back: another op" in enforced_page(later) and "has ended" in enforced_page(later)
