# SPDX-License-Identifier: Apache-2.0
"""Whether this process's calls in plain order go to the backend that the job itself asked for. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...process_state import STATE, ProcessPart

WHY = "the job's own backend runs it, unchanged"


class OwnBackend(ProcessPart):
    """The backend of the job itself. It may only change where all ranks have submitted the same calls."""

    def __init__(self) -> None:
        self.asked = ""
        """The backend that the job asked for, where ours stands in for it; empty where the job asked for ours."""
        self.runs = False
        """Whether calls in plain order go straight to that backend, instead of to the executor."""

    def stand_in(self, asked: str) -> None:
        """From the next process group on, ours stands in for another backend (or for none); that one runs first."""
        self.asked, self.runs = asked, bool(asked)

    def serves(self, device: str) -> bool:
        """Whether that backend runs calls on tensors of a device: NCCL does on GPUs, and gloo beside it on CPUs."""
        return device == "cpu" or self.asked == "nccl"

    def job_ended(self) -> None:
        """Forget which backend the job asked for."""
        self.stand_in("")


OWN_BACKEND = STATE.part(OwnBackend)


@contextmanager
def on_ours(ours: bool = True) -> Iterator[None]:
    """Calls inside run on our backend (or on the job's own), whatever runs around them; all ranks do so alike."""
    before, OWN_BACKEND.runs = OWN_BACKEND.runs, not ours
    try:
        yield
    finally:
        OWN_BACKEND.runs = before
