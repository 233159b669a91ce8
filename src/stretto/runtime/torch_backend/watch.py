# SPDX-License-Identifier: Apache-2.0
"""Who records the calls of this process, if anybody does: the hooks of `stretto.torch.capture`. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...process_state import STATE, ProcessPart


@dataclass(frozen=True, kw_only=True)
class SubmittedCall:
    """A call of a `stretto` group. `ranks` are those of the job; of a message the sender and the receiver."""

    op: str
    ranks: tuple[int, ...]
    channel: str
    nbytes: int
    device: str
    splits: bool = False
    """Whether the call is an all-to-all whose pieces may differ."""
    root: int = 0
    blocking: bool = False


class CallWatcher(Protocol):
    """What a recorder of calls is told by process groups."""

    def seen(self, what: SubmittedCall, run: Callable[[], Any]) -> Any:
        """A call comes; `run` runs it."""


class Watch(ProcessPart):
    """What is told of every call of this process's groups, while a recording is made."""

    def __init__(self) -> None:
        self.current: CallWatcher | None = None


WATCH = STATE.part(Watch)
