# SPDX-License-Identifier: Apache-2.0
"""A controller whose planner promises much of every plan: ``unchanged_controller.py FOLDER PLANS``.

Writes the job's status to the file `status` again and again, and `told` once somebody asked for it under a plan whose
motifs were measured, and that was set aside once, or that an earlier start has left.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from stretto.control.controller import Controller
from stretto.control.transport import make_token
from stretto.control.worker import PlanReply, Worker
from stretto.runtime.enforcer.trial import BLOCK, ROUNDS, SETTLED, SKIP

LONG = SETTLED + (ROUNDS + 1) * 2 * (BLOCK + SKIP)


class Promising(Worker):
    """The planner, with a plain order that looks three times as long as it is thought to be."""

    def poll(self) -> PlanReply | None:
        """The answer, once there is one."""
        found = super().poll()
        if found is None:
            return None
        return msgspec.structs.replace(found, plain_us=3 * found.plain_us, current_us=found.iteration_us)


class Told(Controller):
    """Notes that somebody was told of a plan that runs."""

    folder: Path
    begun: int | None = None

    def _on_status(self, message: bytes) -> bytes:
        said = super()._on_status(message)
        for job in self.status().jobs:
            if job.plan.number and job.split.plan is not None and job.motifs:
                now = job.ranks[0].iteration
                self.begun = self.begun if self.begun is not None else now
                # By then the plan was set aside for some iterations, and is back.
                if now > self.begun + LONG or job.recalled:
                    (self.folder / "told").touch()
        return said


def main() -> None:
    folder = Path(sys.argv[1])
    token = make_token(folder / "token")
    controller = Told(budget_s=0.2, start=Promising, plans=Path(sys.argv[2]))
    controller.folder = folder
    with_server = controller.serve(f"unix:{folder}/socket", token=token)
    (folder / "up").touch()
    while with_server:
        part = folder / "status.part"
        part.write_bytes(msgspec.json.encode(controller.status()))
        part.rename(folder / "status")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
