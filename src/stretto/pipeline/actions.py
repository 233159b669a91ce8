# SPDX-License-Identifier: Apache-2.0
"""One action of a pipeline schedule, in the text that ``torch.distributed.pipelining`` reads and writes."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import InvalidInput

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
REDUCE_GRAD, UNSHARD, RESHARD = "REDUCE_GRAD", "UNSHARD", "RESHARD"

COMPUTE = (FORWARD, INPUT, WEIGHT, BACKWARD)
SENDS = (SEND_F, SEND_B)
RECEIVES = (RECV_F, RECV_B)
WHOLE = (REDUCE_GRAD, UNSHARD, RESHARD)
"""Actions that concern a stage as a whole and therefore name no micro-batch."""
KINDS = (*COMPUTE, *SENDS, *RECEIVES, *WHOLE)

MAX_STAGES = 4096
MAX_MICROBATCHES = 1 << 16
_TEXT = re.compile(rf"([0-9]{{1,5}})({'|'.join(sorted(KINDS, key=len, reverse=True))})([0-9]{{0,6}})")


class Action(NamedTuple):
    """What a rank does for one micro-batch of one stage.

    ``F`` forward, ``I`` gradient of the input, ``W`` gradient of the weights, ``B`` both in one; ``SEND_F`` to the next
    stage and ``RECV_F`` from the one before, ``SEND_B`` to the stage before and ``RECV_B`` from the next.

    >>> Action(2, "F", 5), str(Action(0, "SEND_F", 1)), Action.parse("3REDUCE_GRAD")
    (2F5, '0SEND_F1', 3REDUCE_GRAD)
    """

    stage: int
    kind: str
    microbatch: int = -1

    @classmethod
    def parse(cls, text: str, where: str = "action") -> Action:
        """Read one action such as ``0F1``, ``1SEND_B0`` or ``2REDUCE_GRAD``; `where` begins the text of an error."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise InvalidInput(
                f"{where}: {text.strip()[:40]!r} is not an action; expected a stage, one of {' '.join(KINDS)}, "
                "and a micro-batch, as in 0F1"
            )
        stage, kind, microbatch = int(match[1]), match[2], int(match[3]) if match[3] else -1
        if stage >= MAX_STAGES or microbatch >= MAX_MICROBATCHES:
            raise InvalidInput(f"{where}: {text.strip()!r}: over {MAX_STAGES} stages or {MAX_MICROBATCHES} batches")
        if (kind in WHOLE) != (microbatch < 0):
            raise InvalidInput(f"{where}: {text.strip()!r} {'names a' if kind in WHOLE else 'needs a'} micro-batch")
        return cls(stage, kind, microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def computes(self) -> bool:
        """Whether the action runs on the device's compute stream."""
        return self.kind in COMPUTE


def source(action: Action, last_stage: int) -> int:
    """The stage whose output a compute action needs, or -1 if it needs none.

    A forward needs the stage before its own, a backward the stage after.
    """
    if action.kind == FORWARD:
        return action.stage - 1
    return action.stage + 1 if action.kind in (INPUT, BACKWARD) and action.stage < last_stage else -1


def receive_of(action: Action) -> Action:
    """The receive that delivers the input of a forward or backward action."""
    return Action(action.stage, RECV_F if action.kind == FORWARD else RECV_B, action.microbatch)


def send_of(receive: Action) -> Action:
    """The send that a receive waits for.

    >>> send_of(Action(1, "RECV_F", 0)), send_of(Action(0, "RECV_B", 3))
    (0SEND_F0, 1SEND_B3)
    """
    if receive.kind == RECV_F:
        return Action(receive.stage - 1, SEND_F, receive.microbatch)
    return Action(receive.stage + 1, SEND_B, receive.microbatch)


def receiver_of(send: Action) -> Action:
    """The receive that takes the data of a send."""
    if send.kind == SEND_F:
        return Action(send.stage + 1, RECV_F, send.microbatch)
    return Action(send.stage - 1, RECV_B, send.microbatch)
