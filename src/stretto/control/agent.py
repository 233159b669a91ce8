# SPDX-License-Identifier: Apache-2.0
"""The agent: a thread of each rank that asks the controller what to do, and does it to the data plane.

Training never waits for it. What goes wrong here (no controller, a wrong token, a plan that cannot be loaded) is said
in one line of the log, or in a vote, and nowhere else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..cluster import Cluster
from ..errors import InvalidInput, StrettoError
from ..runtime.enforcer.report import DataPlane, EnforcerReport, Timing
from ..workload import Workload
from .messages import (
    PLAIN,
    CapturedStep,
    PlanId,
    Prepare,
    Profile,
    RankState,
    Reply,
    decode,
    decode_plan,
    encode,
    encode_captured,
)
from .own_costs import OwnTime
from .protocol import RankSide, captured, obey, retire
from .transport import EXCHANGE, ControllerConnection, from_environment

LOG = logging.getLogger("stretto.control")
EVERY_S = 0.5
CALL_S = 5.0
BACK_OFF = 16
"""How many times longer at most it waits between two tries while the controller does not answer."""
LAST_S = 1.0
"""How long a rank that ends tries to say so."""

Exchange = Callable[[RankState, float], Reply]
"""Called with a rank's state and a time limit in seconds."""


def exchange_over(link: ControllerConnection) -> Exchange:
    """The exchange with the controller at the other end of a link."""

    def exchange(state: RankState, timeout_s: float) -> Reply:
        return decode(link.call(EXCHANGE, encode(state), timeout_s=timeout_s), Reply)

    return exchange


def connect() -> Exchange:
    """The exchange with the controller that STRETTO_CONTROLLER names; `InvalidInput` when it names none."""
    link = from_environment()
    if link is None:
        raise InvalidInput("STRETTO_CONTROLLER: must name the controller's address, as `stretto controller` prints it")
    return exchange_over(link)


class Agent:
    """One rank's. `start` it once the job runs, tell it what was `captured`, and `stop` it at the end."""

    def __init__(
        self, plane: DataPlane, exchange: Exchange, *, job: str, epoch: int, rank: int, size: int,
        every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self._plane = plane
        self._exchange = exchange
        self._job, self._rank, self._size = job, rank, size
        self._every_s = every_s
        self._side = RankSide(epoch=epoch)
        self._recorded: tuple[Workload, Cluster, float, str, tuple[OwnTime, ...], Mapping[str, str]] | None = None
        self._workload: Workload | None = None
        self._cluster: Cluster | None = None
        self._motif_us, self._key = 0.0, ""
        self._own_times: tuple[OwnTime, ...] = ()
        self._identity: Mapping[str, str] = {}
        self._body: CapturedStep | None = None
        self._wanted = False
        self._beat = 0
        self._active = PLAIN
        self._barred = 0
        self._fell_back = ""
        self._plain_us = 0.0
        self._profile = ""
        self._complaint = ""
        self._compared = EnforcerReport()
        """What was measured without a plan: only these fields of it count."""
        self.whole: tuple[int, float] = (0, 0.0)
        """Iterations of the job so far, but for the first, and the microseconds that they took by the clock."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="stretto-agent", daemon=True)

    @property
    def profile_wanted(self) -> bool:
        """Whether the controller asks for the step to be recorded again."""
        return bool(self._profile) and self._profile == self._side.digest

    @property
    def side(self) -> RankSide:
        """This rank's half of the protocol."""
        return self._side

    def start(self) -> None:
        """Start the thread that asks the controller for orders."""
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye, if that takes no time, and end."""
        self._ending.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CALL_S + LAST_S)

    def captured(
        self, workload: Workload, cluster: Cluster, motif_us: float = 0.0, key: str = "",
        own_times: tuple[OwnTime, ...] = (), identity: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Tell of the training step; the same on all ranks.

        Args:
            workload: The step.
            cluster: What it runs on.
            motif_us: What a motif costs at least.
            key: Under which the plan is kept for the next start of the job; empty: none is.
            own_times: What collectives of the job's own backend take, where plans run above it.
            identity: What the key stands for.
        """
        # Training calls this, and must not wait while the agent loads a plan.
        self._profile = ""
        self._recorded = (workload, cluster, motif_us, key, own_times, identity or {})

    def compared(
        self, *, own: Timing | None = None, backend: Timing | None = None, own_name: str = "", on_own: bool = False,
        no_own: str = "",
    ) -> None:  # fmt: skip
        """Take in what was measured without a plan; the same on all ranks.

        Args:
            own: The unchanged job on the backend that it asked for.
            backend: The same order of calls on ours.
            own_name: The backend that the job asked for; empty where that is ours.
            on_own: Whether that one, not ours, runs without a plan.
            no_own: Why `own` is not known.
        """
        self._compared = EnforcerReport(own=own, backend=backend, own_name=own_name, on_own=on_own, no_own=no_own)

    def turn(self, *, leaving: bool = False) -> None:
        """Ask once, and do what the answer says; raises `StrettoError` when there is none."""
        state = self._state(leaving)
        reply = self._exchange(state, LAST_S if leaving else CALL_S)
        self._wanted = reply.send_captured
        if reply.epoch == self._side.epoch and isinstance(reply.order, Profile) and self._recorded is None:
            self._profile = reply.order.digest
        self._side = obey(self._side, reply, self._adapter())
        self._side = retire(self._side, self._active, self._adapter())

    def _state(self, leaving: bool) -> RankState:
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            self._workload, self._cluster, self._motif_us, self._key, self._own_times, self._identity = recorded
            self._body = None
            self._side = captured(self._side, self._workload.digest, self._adapter())
        report = self._plane.report()
        self._see(report)
        self._beat += 1
        side = self._side
        return RankState(
            job=self._job, epoch=side.epoch, rank=self._rank, size=self._size, beat=self._beat, digest=side.digest,
            ballot=side.ballot, committed=side.committed, active=self._active, barred=self._barred,
            report=self._told(report),
            captured=self._captured() if self._wanted else None, leaving=leaving,
        )  # fmt: skip

    def _told(self, report: EnforcerReport) -> EnforcerReport:
        """The data plane's report, with what was measured before it began."""
        if report.own is not None and report.backend is not None:
            # Measured beside the plan, and so better to compare it with than what was before it.
            self._compared = replace(self._compared, own=report.own, backend=report.backend, no_own="")
        before = self._compared
        base = before.own if before.on_own else before.backend
        return replace(
            report, fell_back=report.fell_back[:1000], own=before.own, backend=before.backend,
            own_name=before.own_name, on_own=before.on_own, no_own=before.no_own,
            job_iterations=self.whole[0], job_us=self.whole[1],
            # While a plan is made the planner takes time from the job, so what was measured before that comes first.
            plain_us=base.median_us if base is not None else self._plain_us or report.plain_us,
        )  # fmt: skip

    def _see(self, report: EnforcerReport) -> None:
        """Which plan runs; and whether one was given up since the last look, even if it never was seen running."""
        active = PlanId(report.number, report.hash)
        left = report.number < self._active.number or report.fell_back != self._fell_back
        # A plan that rests may become active again by itself, and one that runs has.
        if left and report.fell_back and not report.number and not report.resting:
            self._barred = max(self._barred, self._active.number, self._side.committed.number)
        if not report.number:
            # What a plan gained is told against the step as it is now, not as it was before it changed.
            self._plain_us = report.iteration_us
        self._active, self._fell_back = active, report.fell_back

    def _captured(self) -> CapturedStep | None:
        if self._body is None and self._workload is not None and self._cluster is not None:
            self._body = encode_captured(
                self._workload, self._cluster, self._motif_us, self._key, self._own_times, self._identity
            )
        return self._body

    def _adapter(self) -> _Adapter:
        return _Adapter(self._plane, self._workload)

    def _loop(self) -> None:
        wait_s = self._every_s
        while not self._ending.wait(wait_s):
            wait_s = self._every_s if self._try() else min(2 * wait_s, BACK_OFF * self._every_s)
        self._try(leaving=True)

    def _try(self, *, leaving: bool = False) -> bool:
        try:
            self.turn(leaving=leaving)
        except StrettoError as error:
            self._complain(str(error), leaving)
            return False
        except Exception as error:
            # A thread that dies of a surprise would leave the job without control; training knows nothing of it.
            self._complain(f"{type(error).__name__}: {error}", leaving)
            return False
        if self._complaint:
            LOG.warning("stretto: rank %d: the controller answers again", self._rank)
            self._complaint = ""
        return True

    def _complain(self, text: str, leaving: bool) -> None:
        if text != self._complaint and not leaving:
            self._complaint = text
            LOG.warning("stretto: rank %d trains on without a controller: %s", self._rank, text)


class _Adapter:
    """The data plane as the protocol wants it: what it refuses is a vote, not an error."""

    def __init__(self, plane: DataPlane, workload: Workload | None) -> None:
        self._plane = plane
        self._workload = workload

    def prepare(self, order: Prepare) -> str:
        if self._workload is None:
            return "no training step was recorded"
        try:
            plan = decode_plan(order.body, order.plan.hash)
            plan.check(self._workload)
            self._plane.prepare(plan, self._workload, order.plan.number)
        except StrettoError as error:
            return str(error)[:1500] or type(error).__name__
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:1500]
        return ""

    def commit(self, plan: PlanId) -> str:
        try:
            self._plane.commit(plan.number, plan.hash)
        except StrettoError as error:
            return str(error)[:1500] or type(error).__name__
        return ""

    def discard(self, number: int) -> None:
        self._plane.discard(number)
