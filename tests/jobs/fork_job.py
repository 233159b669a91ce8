# SPDX-License-Identifier: Apache-2.0
"""A rank that forks loaders of data while its agent talks: ``fork_job.py FOLDER``."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path

from toy_job import ToyPlane, planner, toy_cluster, toy_workload

from stretto.control.agent import Agent, exchange_over
from stretto.control.controller import Controller
from stretto.control.transport import ControllerConnection

FORK = multiprocessing.get_context("fork")
TOKEN = "0123456789abcdef0123456789abcdef"
FORKS = 30


def control(folder: Path) -> None:
    """The controller, in a process of its own."""
    server = Controller(start=planner("p")).serve(f"unix:{folder}/socket", token=TOKEN)
    time.sleep(600)
    server.close()


def load(number: int) -> None:
    """What a loader does: something, and then it ends."""
    sum(range(number))


def main(folder: Path) -> None:
    """Prints how many loaders ended well."""
    controller = FORK.Process(target=control, args=(folder,), daemon=True)
    controller.start()
    plane = ToyPlane(lambda values: values)
    exchange = exchange_over(ControllerConnection(f"unix:{folder}/socket", token=TOKEN))
    agents = [Agent(plane, exchange, job="j", epoch=1, rank=rank, size=2, every_s=0.004) for rank in range(2)]
    for agent in agents:
        agent.start()
        agent.captured(toy_workload(2), toy_cluster(2))
    deadline = time.monotonic() + 200
    while not plane.report().committed and time.monotonic() < deadline:
        time.sleep(0.01)
    ended = 0
    for number in range(FORKS):
        child = FORK.Process(target=load, args=(number * 1000,))
        child.start()
        child.join(100)
        ended += child.exitcode == 0
    alive = all(agent._thread.is_alive() for agent in agents)
    for agent in agents:
        agent.stop()
    print(ended, plane.report().committed, alive, flush=True)
    controller.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
