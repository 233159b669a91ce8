# SPDX-License-Identifier: Apache-2.0
"""More turns of an undecided comparison, in real processes: all ranks take them alike, also when a plan comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
from toy_job import Ready

from stretto.control.compare import LEAST, MAX_MISSES, MOST, MOST_ROUNDS, OURS_SHARE, SETTLE
from stretto.control.controller import Controller
from stretto.control.transport import make_token
from stretto.control.worker import Planning, PlanReply, PlanRequest, Worker

JOBS = Path(__file__).parents[1] / "jobs"
LIMIT_S = 700.0
STEPS, STEPS_WITH_PLAN = 700, 1800
"""A plan takes a while to be made on a busy machine."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "STRETTO_CLUSTER": "ring:2",
}  # fmt: skip


class Promising(Worker):
    """The planner, with a plain order that looks three times as long as it is thought to be."""

    def poll(self) -> PlanReply | None:
        found = super().poll()
        return None if found is None else msgspec.structs.replace(found, plain_us=3 * found.plain_us)


def run(folder: Path, *, steps: int, plans: bool, undecided: str = "yes") -> tuple[str, list[Any]]:
    def start(ask: PlanRequest) -> Planning:
        return Promising(ask) if plans else Ready(None)

    token = make_token(folder / "token")
    controller = Controller(budget_s=0.2, start=start)
    server = controller.serve(f"unix:{folder}/socket", token=token)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stretto", "run", "--controller", f"unix:{folder}/socket",
             "--token-file", str(folder / "token"), "--", sys.executable, str(JOBS / "unchanged_job.py"), str(folder)],
            env=os.environ | ENVIRONMENT | {"STEPS": str(steps), "UNDECIDED": undecided}, capture_output=True,
            text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    finally:
        server.close()
        controller.close()
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("plans", [False, True])
def test_all_ranks_take_more_turns_at_the_same_iterations_and_few_of_them(tmp_path: Path, plans: bool) -> None:
    steps = STEPS_WITH_PLAN if plans else STEPS
    said, ranks = run(tmp_path, steps=steps, plans=plans)
    assert ranks[0]["ran"] == ranks[1]["ran"]
    for rank in ranks:
        under_control, plainly = rank["losses"]
        assert under_control == plainly and len(plainly) == steps
    ran = ranks[0]["ran"]
    sides = [(own, len(list(some))) for own, some in groupby(own for own, number, _ in ran if not number)]
    first, later = sides[: 2 * MOST_ROUNDS], sides[2 * MOST_ROUNDS :]
    assert [own for own, _ in first] == [True, False] * MOST_ROUNDS
    assert ran[-1][0], "nobody was faster for sure, so the job's own backend runs"
    if plans:
        assert ran[-1][1] > 0, "a plan was active at the end"
        return
    ours = [count for own, count in later if not own]
    assert ours and all(LEAST + SETTLE <= count <= MOST + SETTLE for count in ours[:-1]), sides
    assert sum(ours) <= OURS_SHARE * STEPS
    assert "nothing was gained" in said or "not known" in said


def test_a_plan_that_becomes_active_within_a_turn_ends_it_on_all_ranks(tmp_path: Path) -> None:
    _, ranks = run(tmp_path, steps=STEPS_WITH_PLAN, plans=True, undecided="ours")
    assert ranks[0]["ran"] == ranks[1]["ran"]
    for rank in ranks:
        under_control, plainly = rank["losses"]
        assert under_control == plainly
    ran = ranks[0]["ran"]
    active = next(at for at, (_, number, _) in enumerate(ran) if number)
    assert not ran[active - 1][0], "our backend had its turn"
    assert all(own for own, _, _ in ran[active + MAX_MISSES :]), "and the job's own backend runs what has no plan"
