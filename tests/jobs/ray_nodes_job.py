# SPDX-License-Identifier: Apache-2.0
"""One host of a Ray cluster in a lab: the first one is the head and searches, the others are nodes that work.

Arguments: a folder, and the token of the Ray cluster. The search on the head has tasks for two nodes. One of them never
ends; its node's number is printed, so that the test can take that node off the network. At last the head prints what
became of each task. Before, it prints `nodes 3` when all are there, or `late` where Ray has given up three times.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

PORT = 26379
STARTS, STARTED = 3, b"Ray runtime started"
"""How often the head is started, and what Ray says when it has."""
NODES_S = 240.0
"""How long Ray's nodes may take to come together."""
START = ["-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--block"]


class Stuck:
    """Unpickled on a node, where it leaves the number of the node in a file, and then does not end."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        code = (
            "import os, time; "
            f"open({self.path!r} + '.part', 'w').write(os.environ['RANK']); "
            f"os.rename({self.path!r} + '.part', {self.path!r}); time.sleep(3600)"
        )
        return exec, (code,)


def own_address(head: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head, 9))
        return str(probe.getsockname()[0])


def node(head: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start Ray on this host."""
    mine = ["--node-ip-address", own_address(head), "--object-store-memory", str(80 << 20)]
    there = [
        "--head",
        "--port",
        str(PORT),
        "--num-cpus=0",
        "--include-dashboard=false",
        "--temp-dir",
        str(folder / "ray"),
    ]
    if rank:
        there = ["--address", f"{head}:{PORT}", "--num-cpus=1"]
    with (folder / f"ray{rank}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-u", *START, *there, *mine], stdout=log, stderr=log)


def head_node(head: str, folder: Path) -> subprocess.Popen[bytes] | None:
    """Start Ray's head; None where Ray has given up as often as it may: on a busy machine its 30 s are too few."""
    for _ in range(STARTS):
        ray = node(head, 0, folder)
        while ray.poll() is None:
            if STARTED in (folder / "ray0.log").read_bytes():
                return ray
            time.sleep(0.2)
    return None


def search(head: str, folder: Path) -> dict[str, Any] | None:
    """Both nodes get a task; the answer says what became of them. None where Ray's nodes have not come together."""
    import stretto as st
    from stretto.synthesis import backends
    from stretto.synthesis.attempts import Board
    from stretto.synthesis.problem import MakerTask, SynthesisProblem

    ring = st.Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    problem = SynthesisProblem(collective=st.AllGather(4), cluster=ring, nbytes=st.MB)
    seen = folder / "stuck"
    stuck = MakerTask(maker="library", label="stuck", weight=1.0, options={"x": Stuck(str(seen))})
    good = [
        MakerTask(maker="library", label=name, weight=1.0, options={"algorithm": name})
        for name in ("ring", "direct", "bruck")
    ]
    with backends.backend("ray", jobs=2, address=f"{head}:{PORT}") as start:
        ray = import_module("ray")
        until = time.monotonic() + NODES_S
        while sum(one["Alive"] for one in ray.nodes()) < 3:
            if time.monotonic() > until:
                return None
            time.sleep(0.2)

        def began(request: bytes, tell: Any) -> Any:
            far = start(request, tell)
            if b"stuck" in request:
                while not seen.exists():
                    time.sleep(0.1)
                print(f"lose {seen.read_text()}", flush=True)
            return far

        bound = st.lower_bound(problem.collective, ring, st.MB)
        board = Board(bound=bound, budget_s=600.0, began=time.monotonic())
        backends.run_tasks(problem, [stuck, *good], board, jobs=2, start=began)
        alive = sum(one["Alive"] for one in ray.nodes())
    best = board.best
    assert best is not None
    return {
        "best": best.maker,
        "reasons": {c.maker: c.reason for c in board.candidates if c.time_us is None},
        "times": {c.maker: c.time_us for c in board.candidates if c.time_us is not None},
        "alive": alive,
    }


def main() -> None:
    folder, rank, head = Path(sys.argv[1]), int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    # A node that does not answer for some seconds is lost; by default it takes half a minute.
    os.environ |= {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A cluster of several hosts has a token, which whoever connects must know.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": sys.argv[2],
    }
    if rank:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((head, PORT)) == 0:
                    break
            time.sleep(0.2)
    ray = node(head, rank, folder) if rank else head_node(head, folder)
    if ray is None:
        print("late", flush=True)
        return
    try:
        while rank and ray.wait():
            ray = node(head, rank, folder)
        if not rank:
            answer = search(head, folder)
            print("late" if answer is None else f"found {json.dumps(answer)}", flush=True)
    finally:
        ray.terminate()
        ray.wait(60)


if __name__ == "__main__":
    main()
