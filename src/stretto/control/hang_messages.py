# SPDX-License-Identifier: Apache-2.0
"""What a rank's pulse says, and what the controller answers; bounded as all messages are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .messages import MAX_RANKS, PROTOCOL, Line, Name, Number

MAX_RECENT = 64
MAX_PULSE_GROUPS = 256
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]


class PulseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a rank has made; `number` counts those of its group from 1."""

    number: Number
    op: Name
    nbytes: Number = 0
    root: Annotated[int, Meta(ge=-1, lt=MAX_RANKS)] = -1
    place: Line = ""
    open: bool = False
    """Whether the call is known not to have ended."""


class GroupPulse(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank is in one group."""

    name: Annotated[str, Meta(max_length=256)]
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=MAX_RANKS)] = ()
    calls: Number
    recent: Annotated[tuple[PulseCall, ...], Meta(max_length=MAX_RECENT)] = ()
    """The last calls, oldest first."""


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank reports every second: its last calls, and whether it is let run."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 16)] = PROTOCOL
    job: Name
    epoch: Number
    """The number of the job's start, as in `RankState`."""
    rank: Rank
    size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    beat: Number
    pid: Number
    host: Name = ""
    """A name for the processes that the rank sees: those with equal names know each other's process numbers."""
    place: Line = ""
    """The line at which the rank's script stands."""
    still_s: Annotated[float, Meta(ge=0)] = 0.0
    """How long the rank has stood there without a call, less the time in which it got no processor."""
    starved_s: Annotated[float, Meta(ge=0)] = 0.0
    """How long the rank got no processor although it could have run, since its start."""
    waits: bool = False
    """Whether the rank stands inside of a call of the communication library."""
    groups: Annotated[tuple[GroupPulse, ...], Meta(max_length=MAX_PULSE_GROUPS)] = ()
    leaving: bool = False
    error: Line = ""
    """The exception that ends the rank, if one does."""


class PulseReply(msgspec.Struct, frozen=True, kw_only=True):
    """What this rank is to say, and whether others seem to hang, so that it looks closer at itself."""

    say: tuple[str, ...] = ()
    look: bool = False
