# SPDX-License-Identifier: Apache-2.0
"""The controller: hears every rank, plans in the background, and commits what all ranks can run.

Its memory may be lost at any time. Only the last plan number is on disk; ranks repeat their votes in every message, and
rank 0 sends the captured step again to whoever has not seen it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import InvalidInput
from ..files import convert, parse_json, read_text
from .hang_messages import Pulse, PulseReply
from .hangs import HangWatch, host_name
from .kept_plans import KeptPlans
from .messages import (
    MAX_NUMBER,
    PROTOCOL,
    CapturedStep,
    HushRequest,
    JobStatus,
    Prepare,
    RankState,
    RecallReply,
    RecallRequest,
    Reply,
    Status,
    StatusRequest,
    decode,
    encode,
)
from .protocol import answer
from .supervise import SupervisedJob
from .transport import EXCHANGE, HUSH, PULSE, RECALL, STATUS, Server, Tls
from .worker import Planning, PlanRequest, Worker

LOG = logging.getLogger("stretto.control")
TICK_S = 0.2
MAX_JOBS = 64
FORGET_S = 3600.0
BUDGET_S = 5.0


class _Memory(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["controller"]
    version: Literal[1]
    last: int


class Controller:
    """All jobs of one controller; `exchange` and `status` may be called by any thread.

    `memory` is the file with the last number; without one, what ranks report has to do. In the folder `plans` they are
    kept for the next start of their jobs.
    """

    def __init__(
        self, *, memory: Path | None = None, budget_s: float = BUDGET_S, seed: int = 0,
        start: Callable[[PlanRequest], Planning] = Worker, plans: Path | None = None,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._last = _read(memory) if memory is not None else 0
        self._budget_s, self._seed, self._start = budget_s, seed, start
        self._plans = KeptPlans(plans) if plans is not None else None
        self._jobs: dict[str, SupervisedJob] = {}
        self._watches: dict[str, HangWatch] = {}
        self._host = host_name()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="stretto-planning", daemon=True)
        self._thread.start()

    def serve(self, address: str, *, token: str, tls: Tls | None = None) -> Server:
        """Listen; close the server before the controller.

        Args:
            address: Where to listen: ``host:port`` or ``unix:PATH``.
            token: What callers must show.
            tls: The certificates of a server that others than this host reach.

        Returns:
            The server, which listens.
        """
        handlers = {
            EXCHANGE: self._on_exchange, STATUS: self._on_status, PULSE: self._on_pulse, RECALL: self._on_recall,
            HUSH: self._on_hush,
        }  # fmt: skip
        return Server(address, handlers, token=token, tls=tls)

    def exchange(self, state: RankState) -> Reply:
        """What a rank should do, given its state."""
        if state.protocol != PROTOCOL:
            raise InvalidInput(f"protocol: this controller speaks version {PROTOCOL}, not {state.protocol}")
        if state.rank >= state.size:
            raise InvalidInput(f"rank: must be below the job's size {state.size}, not {state.rank}")
        with self._lock:
            job = self._job(state)
            job.begin(state)
            job.job, order = answer(job.job, state)
            self._last = max(self._last, job.job.last)
            job.heard(state)
            if isinstance(order, Prepare):
                body = job.body_of(order.plan.hash)
                # A plan that a controller before this one had given out is made anew instead.
                order = msgspec.structs.replace(order, body=body)
            wanted = state.rank == 0 and state.epoch == job.job.epoch and job.wants_captured(state.digest)
            return Reply(epoch=job.job.epoch, order=order, send_captured=wanted)

    def recall(self, request: RecallRequest) -> RecallReply:
        """What an earlier start of a job has left."""
        if request.protocol != PROTOCOL:
            raise InvalidInput(f"protocol: this controller speaks version {PROTOCOL}, not {request.protocol}")
        kept = self._plans.load(request.key) if self._plans is not None else None
        if kept is not None:
            return RecallReply(captured=kept.captured, on_own=kept.on_own)
        why = self._plans.why_none(request.key, request.identity) if self._plans is not None else "plans are not kept"
        return RecallReply(why=why[:2000])

    def pulse(self, pulse: Pulse) -> PulseReply:
        """Compare a rank with the others of its job."""
        if pulse.protocol != PROTOCOL:
            raise InvalidInput(f"protocol: this controller speaks version {PROTOCOL}, not {pulse.protocol}")
        if pulse.rank >= pulse.size:
            raise InvalidInput(f"rank: must be below the job's size {pulse.size}, not {pulse.rank}")
        with self._lock:
            if pulse.job not in self._watches:
                if len(self._watches) >= MAX_JOBS:
                    self._watches.pop(next(iter(self._watches)))
                self._watches[pulse.job] = HangWatch(pulse.job, host=self._host)
            return self._watches[pulse.job].heard(pulse)

    def hush(self, request: HushRequest | None = None) -> None:
        """Name no hang of a job any more, as it was told to end; of no job that there is, where none is given."""
        if request is not None and request.protocol != PROTOCOL:
            raise InvalidInput(f"protocol: this controller speaks version {PROTOCOL}, not {request.protocol}")
        with self._lock:
            for name, watch in self._watches.items():
                if request is None or name == request.job:
                    watch.hush()

    def status(self) -> Status:
        """The state of all jobs, as `stretto status` shows it."""
        with self._lock:
            jobs = tuple(job.status() for job in self._jobs.values())
            for watch in self._watches.values():
                # A job may have ended since they were looked at last.
                watch.look()
            hangs = tuple(found for watch in self._watches.values() for found in watch.findings)
            return Status(pid=os.getpid(), jobs=jobs, hangs=hangs)

    def captured(self) -> CapturedStep | None:
        """The recorded step of the job that was heard of last; None while there is none."""
        with self._lock:
            found = [job for job in self._jobs.values() if job.captured is not None]
            return max(found, key=lambda job: job.heard_at).captured if found else None

    def job_status(self, name: str) -> JobStatus | None:
        """How one job is; None when it was never heard of."""
        with self._lock:
            job = self._jobs.get(name)
            return job.status() if job is not None else None

    def close(self) -> None:
        """End planners that are running."""
        self._ending.set()
        self._thread.join()
        for job in self._jobs.values():
            job.cancel()

    def _on_exchange(self, message: bytes) -> bytes:
        return encode(self.exchange(decode(message, RankState)))

    def _on_pulse(self, message: bytes) -> bytes:
        return encode(self.pulse(decode(message, Pulse)))

    def _on_recall(self, message: bytes) -> bytes:
        return encode(self.recall(decode(message, RecallRequest)))

    def _on_hush(self, message: bytes) -> bytes:
        self.hush(decode(message, HushRequest))
        return b""

    def _on_status(self, message: bytes) -> bytes:
        ask = decode(message, StatusRequest)
        if ask.protocol != PROTOCOL:
            raise InvalidInput(f"protocol: this controller speaks version {PROTOCOL}, not {ask.protocol}")
        return encode(self.status())

    def _job(self, state: RankState) -> SupervisedJob:
        if state.job not in self._jobs:
            if len(self._jobs) >= MAX_JOBS:
                oldest = min(self._jobs, key=lambda name: self._jobs[name].heard_at)
                if time.monotonic() - self._jobs[oldest].heard_at < FORGET_S and not self._jobs[oldest].left:
                    raise InvalidInput(f"job: this controller has {MAX_JOBS} running jobs already")
                self._jobs.pop(oldest).cancel()
            self._jobs[state.job] = SupervisedJob(
                state.job, state.epoch, state.size, last=self._last, budget_s=self._budget_s, seed=self._seed,
                start=self._start, plans=self._plans,
            )  # fmt: skip
        return self._jobs[state.job]

    def _loop(self) -> None:
        while not self._ending.wait(TICK_S):
            with self._lock:
                for watch in self._watches.values():
                    watch.look()
                for job in self._jobs.values():
                    try:
                        job.turn(self._remember)
                    except Exception as error:
                        # One job's trouble is not the others'.
                        job.fail(f"{type(error).__name__}: {error}")
                        LOG.exception("job %s", job.name)

    def _remember(self, number: int) -> int:
        """The next number is on disk before any rank hears of it."""
        self._last = max(self._last, number)
        if self._memory is not None:
            _write(self._memory, self._last)
        return self._last


def _read(path: Path) -> int:
    if not path.exists():
        return 0
    data = convert(parse_json(read_text(path, max_bytes=1 << 16), where=str(path)), _Memory, where=str(path))
    if not 0 <= data.last < MAX_NUMBER:
        raise InvalidInput(f"{path}: last: must be 0..{MAX_NUMBER}, not {data.last}")
    return data.last


def _write(path: Path, last: int) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(msgspec.json.encode(_Memory(stretto="controller", version=1, last=last)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
