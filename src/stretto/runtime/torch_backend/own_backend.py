"""Whether this process's calls in plain order go to the backend that the job itself asked for. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

WHY = "the job's own backend runs it, unchanged"


class OwnBackend:
    """The state of this process. It may only change where all ranks have submitted the same calls (`control.aside`)."""

    asked = ""
    """The backend that the job asked for, where ours stands in for it; empty where the job asked for ours."""
    runs = False
    """Whether calls in plain order go straight to that backend, instead of to the executor."""

    @classmethod
    def stand_in(cls, asked: str) -> None:
        """From the next process group on, ours stands in for another backend (or for none); that one runs first."""
        cls.asked, cls.runs = asked, bool(asked)


@contextmanager
def on_ours() -> Iterator[None]:
    """Calls inside run on our backend, whatever runs around them; all ranks enter and leave at the same calls."""
    before, OwnBackend.runs = OwnBackend.runs, False
    try:
        yield
    finally:
        OwnBackend.runs = before
