# SPDX-License-Identifier: Apache-2.0
"""``stretto run`` on scripts as they are written everywhere: the same training, or the script's own error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
STYLES = (
    "amp", "accumulated", "checkpointed", "evaluated", "by_hand", "critic", "critic_by_hand", "marked", "uneven",
    "served", "compiled",
)  # fmt: skip
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "STRETTO_CLUSTER": "ring:2"}


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, stretto: Launch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, list[float]]], str]:
    folder = tmp_path_factory.mktemp("styles")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and "ran" in item.fixturenames]
    styles = [item.callspec.params["style"] for item in tests if hasattr(item, "callspec")]
    # Where tests of some styles alone were chosen, the others are not run.
    only = styles if len(styles) == len(tests) else ()
    script = Path(__file__).parents[1] / "jobs" / "run_styles_job.py"
    done = stretto("run", "--budget", "0.3", "--", sys.executable, str(script), str(folder), *only, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], done.stderr


@pytest.mark.parametrize("style", STYLES)
def test_training_is_what_it_is_without_us(ran: tuple[list[dict[str, list[float]]], str], style: str) -> None:
    for rank in ran[0]:
        plainly, controlled = rank[style]
        assert plainly == controlled
        assert rank[f"{style} on"] == [0.0, 1.0]


def test_every_style_is_recorded_also_the_one_without_an_optimizer(
    ran: tuple[list[dict[str, list[float]]], str],
) -> None:
    assert ran[1].count("stretto: recorded 5 iterations") == len(STYLES) - 2
    assert "mark the ends of iterations with stretto.torch.step()" in ran[1], "of the one that cannot be"


def test_ranks_that_do_not_come_to_the_ends_of_iterations_are_not_waited_for(
    ran: tuple[list[dict[str, list[float]]], str],
) -> None:
    assert ran[1].count("iterations do not end at the same calls on all ranks") == 1


def test_several_steps_that_repeat_together_are_one_iteration(ran: tuple[list[dict[str, list[float]]], str]) -> None:
    assert ran[1].count("stretto: an iteration is 3 steps") == 2, "with and without optimizers"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("dist.init_process_group('gloo')\nraise SystemExit(3)", ""),
        ("dist.init_process_group('gloo')\nraise ValueError('mine')", "ValueError: mine"),
        ("dist.init_process_group('nccl')\ndist.barrier()", "Error: .*nccl"),
    ],
)
def test_a_script_that_fails_fails_as_it_would(stretto: Launch, lines: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch.distributed as dist\n{lines}\n")
    address = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = stretto("run", "--", sys.executable, str(script), env=ENVIRONMENT | address)
    assert done.returncode == (3 if "SystemExit" in lines else 1), done.stderr
    assert re.search(words, done.stderr, re.IGNORECASE)
    assert "stretto: error" not in done.stderr
