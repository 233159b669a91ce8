# SPDX-License-Identifier: Apache-2.0
"""The recorder of the calls of this process: hooks of `stretto.torch.capture`, or a recalled plan. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...process_state import STATE, ProcessPart


@dataclass(frozen=True, kw_only=True)
class SubmittedCall:
    """A call of a `stretto` group. `ranks` are numbers in the job; a message has two, its sender and its receiver."""

    op: str
    ranks: tuple[int, ...]
    channel: str
    nbytes: int
    device: str
    splits: bool = False
    """Whether the call is an all-to-all whose pieces may differ."""
    root: int = 0
    blocking: bool = False


class CallRecorder(Protocol):
    """What a recorder of calls is told by process groups."""

    def seen(self, what: SubmittedCall, run: Callable[[], Any]) -> Any:
        """Record a call of this process and run it by `run()`, whose work is returned."""


class CurrentRecording(ProcessPart):
    """The recorder that is told of every call of this process's groups; None while nothing is recorded."""

    def __init__(self) -> None:
        self.current: CallRecorder | None = None


RECORDING = STATE.part(CurrentRecording)
