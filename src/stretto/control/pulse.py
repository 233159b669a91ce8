# SPDX-License-Identifier: Apache-2.0
"""A rank's pulse: a thread that tells the controller what this rank has called, and where its script stands.

It runs from `init_process_group` on, whatever the backend, also where nothing is recorded or planned. The controller
compares the ranks (`hangs`) and answers with what is to be said; one rank says it on standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from types import FrameType

import msgspec

from ..errors import StrettoError
from ..process_state import STATE, ProcessPart
from ..runtime.torch_backend.call_log import CALL_LOG, caller, place_text
from ..runtime.torch_backend.job_store import job_store
from .flight_record import flight_groups, record_flights
from .hang_messages import GroupPulse, Pulse, PulseCall, PulseReply
from .hangs import host_name
from .messages import decode, encode
from .starved import StarvedClock
from .transport import PULSE, ControllerConnection, from_environment

EVERY_S = 0.5
CALL_S = 3.0
LAST_S = 1.0
READ_S = 0.5
MAX_GROUPS = 64
MAX_GROUP_RANKS = 4096
MAX_STACK = 64
COMMUNICATES = ("torch/distributed/", "stretto/runtime/")
"""Parts of paths: a thread inside of these is in a call, or waits for one."""


class PulseSender:
    """One rank's thread; `stop` says goodbye."""

    def __init__(self, link: ControllerConnection, job: str, rank: int, size: int, epoch: int) -> None:
        self._link = link
        self._pid = os.getpid()
        self._main = threading.get_ident()
        self._flights = False
        self._reader: threading.Thread | None = None
        self._read: tuple[GroupPulse, ...] = ()
        self._seen: object = None
        self._starved = StarvedClock("self")
        self._since, self._starved_then = time.monotonic(), 0.0
        self._beat = 0
        self._still = Pulse(job=job, epoch=epoch, rank=rank, size=size, beat=0, pid=self._pid, host=host_name())
        """What never changes of it."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="stretto-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Report once more, then stop."""
        if os.getpid() != self._pid or self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(CALL_S + LAST_S)
        with contextlib.suppress(StrettoError):
            self._beat_once(leaving=True)
        self._link.close()

    def _loop(self) -> None:
        # The first one at once: a rank that is stopped a moment later is known by it.
        while True:
            # A controller that is gone, or does not know pulses, is no reason to say anything here: the agent does.
            with contextlib.suppress(StrettoError):
                self._beat_once()
            if self._ending.wait(EVERY_S):
                return

    def _beat_once(self, *, leaving: bool = False) -> None:
        self._beat += 1
        frame = None if leaving else sys._current_frames().get(self._main)
        groups = self._groups()
        starved_s = self._starved.read()
        pulse = msgspec.structs.replace(
            self._still, beat=self._beat, place=place_text(caller(frame)) if frame is not None else "",
            still_s=self._still_s(frame, starved_s), starved_s=starved_s, groups=groups,
            waits=frame is not None and _communicates(frame), leaving=leaving, error=_last_error() if leaving else "",
        )  # fmt: skip
        del frame
        said = self._link.call(PULSE, encode(pulse), timeout_s=LAST_S if leaving else CALL_S)
        reply = decode(said, PulseReply)
        self._flights = reply.look
        for line in reply.say:
            print(f"stretto: {line}", file=sys.stderr, flush=True)

    def _groups(self) -> tuple[GroupPulse, ...]:
        logs = list(CALL_LOG.groups.values())[:MAX_GROUPS]
        found = [
            GroupPulse(
                name=log.name[:128], ranks=log.ranks[:MAX_GROUP_RANKS], calls=log.calls,
                recent=tuple(
                    PulseCall(
                        number=call.number, op=call.op, nbytes=call.nbytes, root=call.root,
                        place=place_text(call.place)[:400],
                    )
                    for call in list(log.recent)
                ),
            )
            for log in logs
        ]  # fmt: skip
        # Groups of other backends are looked at only when somebody seems to hang.
        return tuple(found) or (self._flown() if self._flights else ())

    def _flown(self) -> tuple[GroupPulse, ...]:
        """What PyTorch has recorded, as it was read last: reading may take as long as something of the GPU's does."""
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read_flights, name="stretto-flights", daemon=True)
            self._reader.start()
            self._reader.join(READ_S)
        return self._read

    def _read_flights(self) -> None:
        self._read = flight_groups()[:MAX_GROUPS]

    def _still_s(self, frame: FrameType | None, starved_s: float) -> float:
        """For how long nothing was called, and the script has not moved although it could."""
        where: list[tuple[int, int]] = []
        at = frame
        while at is not None and len(where) < MAX_STACK:
            where.append((id(at.f_code), at.f_lasti))
            at = at.f_back
        now, seen = time.monotonic(), (where, sum(log.calls for log in list(CALL_LOG.groups.values())))
        if seen != self._seen:
            self._seen, self._since, self._starved_then = seen, now, starved_s
        return max(now - self._since - (starved_s - self._starved_then), 0.0)


class CurrentPulse(ProcessPart):
    """The pulse of this process."""

    def __init__(self) -> None:
        self.sender: PulseSender | None = None

    def after_fork(self) -> None:
        """A child has no thread of its parent's."""
        self.sender = None


CURRENT_PULSE = STATE.part(CurrentPulse)


def start_pulse(job: str, *, ours: bool) -> None:
    """After `init_process_group`: begin to tell. `ours`: calls come by our groups, which log them themselves."""
    import torch.distributed as dist

    link = from_environment()
    if link is None or dist.get_world_size() < 2 or CURRENT_PULSE.sender is not None:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    store = job_store("stretto/pulse")
    if rank == 0:
        store.set("epoch", str(time.time_ns() // 1000))
    epoch = int(store.get("epoch"))
    CALL_LOG.on = ours
    CURRENT_PULSE.sender = PulseSender(link, job, rank, size, epoch)


def stop_pulse() -> None:
    """Before the default process group goes, or at the end of the process."""
    sender, CURRENT_PULSE.sender = CURRENT_PULSE.sender, None
    CALL_LOG.on = False
    if sender is not None:
        sender.stop()


def prepare() -> None:
    """Before any process group is made: PyTorch's own record of calls is read where a backend is not ours."""
    record_flights()


def _communicates(frame: FrameType) -> bool:
    """Whether a thread is inside of a call of the communication library, or waits for one."""
    file = frame.f_code.co_filename
    return any(part in file for part in COMMUNICATES)


def _last_error() -> str:
    """What ends this process, where an exception does."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line}"[:500]
