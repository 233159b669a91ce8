# SPDX-License-Identifier: Apache-2.0
"""What this process has called last, on every group, and where in the script: for naming a hang. Loads no torch.

A call costs a few microseconds here, and only under `stretto run`, which reads the log from a thread of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ...process_state import STATE, ProcessPart

KEPT = 8
"""Calls of each group that are remembered: ranks that differ have seldom gone on for longer."""
MAX_DEPTH = 200
NO_ROOT = -1
Place = tuple[str, int]
"""A file and a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """One call of a group, by its number there."""

    number: int
    op: str
    nbytes: int
    root: int
    place: Place


class GroupLog:
    """The calls of one group, or of one direction between two of its ranks."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.calls = 0
        self.recent: deque[LoggedCall] = deque(maxlen=KEPT)

    def note(self, op: str, nbytes: int, root: int = NO_ROOT) -> None:
        """A call begins.

        Args:
            op: The collective.
            nbytes: Its size.
            root: Its root, if it has one.
        """
        self.calls += 1
        place = caller(sys._getframe(1))
        self.recent.append(LoggedCall(number=self.calls, op=op, nbytes=nbytes, root=root, place=place))


class CallLog(ProcessPart):
    """All groups of this process; `on` while somebody wants to know."""

    def __init__(self) -> None:
        self.on = False
        self.groups: dict[str, GroupLog] = {}

    def job_ended(self) -> None:
        """The next job counts anew."""
        self.groups = {}

    def after_fork(self) -> None:
        """Forget the calls of the parent in a forked child."""
        self.on = False

    def note(self, name: str, ranks: Sequence[int], op: str, args: Sequence[Any]) -> None:
        """A collective of a group begins.

        Args:
            name: The group's.
            ranks: The job's ranks in it.
            op: What PyTorch calls the group's method.
            args: That method's arguments.
        """
        self._group(name, ranks).note(op, *_facts(args))

    def message(self, name: str, ends: Sequence[int], op: str, nbytes: int) -> None:
        """A message between two ranks begins.

        Args:
            name: The group's.
            ends: The job's ranks that send and receive.
            op: "send" or "recv".
            nbytes: Its size.
        """
        # Both ends count the messages of their pair and direction.
        self._group(f"{name}: {ends[0]} to {ends[1]}", ends).note(op, nbytes)

    def _group(self, name: str, ranks: Sequence[int]) -> GroupLog:
        log = self.groups.get(name)
        if log is None:
            log = self.groups[name] = GroupLog(name, ranks)
        return log


CALL_LOG = STATE.part(CallLog)


def _facts(args: Sequence[Any]) -> tuple[int, int]:
    """The bytes of the first tensor among the arguments of a group's method, and the root, or NO_ROOT."""
    nbytes, root = 0, NO_ROOT
    for arg in args:
        while isinstance(arg, list | tuple) and arg:
            arg = arg[0]
        found = getattr(arg, "nbytes", None)
        if found is not None and not nbytes:
            nbytes = int(found)
        else:
            root = getattr(arg, "rootRank", root)
    return nbytes, root


LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
)
"""Folders of which no line is the script's own: Python's, and ours."""


def caller(frame: FrameType | None) -> Place:
    """The innermost line of a stack that is the script's own; where there is none, of the main thread's."""
    found = _own_line(frame)
    if found is None:
        # A backward pass on a GPU has a thread without frames of the script; who called it stands in the main thread.
        found = _own_line(sys._current_frames().get(threading.main_thread().ident or 0))
    return found or ("", 0)


def _own_line(frame: FrameType | None) -> Place | None:
    depth = 0
    while frame is not None and depth < MAX_DEPTH:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES) and "site-packages" not in file and not file.startswith("<frozen"):
            return file, frame.f_lineno
        frame, depth = frame.f_back, depth + 1
    return None


def place_text(place: Place) -> str:
    """``train.py:40``; empty for a place that is not known."""
    file, line = place
    if not file:
        return ""
    try:
        short = os.path.relpath(file)
    except (ValueError, OSError):
        # The working directory may be gone.
        short = file
    return f"{file if short.startswith('..') else short}:{line}"
