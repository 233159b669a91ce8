# SPDX-License-Identifier: Apache-2.0
"""The examples that other tests do not run as jobs: started by torchrun, with small models."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 600.0


def torchrun(ranks: int, name: str, *words: str) -> list[str]:
    """The lines that an example prints; a job that hangs is ended with all its processes."""
    script = str(EXAMPLES / f"{name}.py")
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said, complained = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, f"{said}\n{complained[-6000:]}"
    return said.splitlines()


def test_servers_get_every_version_of_the_weights() -> None:
    lines = torchrun(2, "sync_weights", "--width", "16", "--steps", "3")
    assert [line.partition(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_a_builders_strategy_trains() -> None:
    words = ("--builder", "parallax", "--iterations", "3", "--width", "32", "--batch", "2", "--backend", "gloo")
    lines = torchrun(2, "train_strategy", *words)
    assert lines[0] == "strategy parallax, backend gloo, 2 ranks"
    losses = [float(loss) for loss in lines[1].split()[1:]]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_pipelines_train_alike_under_every_schedule() -> None:
    found = [torchrun(2, "train_pipeline", "--width", "16", "--schedule", name) for name in ("1f1b", "zb_h1")]
    losses = [[line.partition("loss ")[2] for line in lines] for lines in found]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert float(losses[0][-1]) < float(losses[0][0])
