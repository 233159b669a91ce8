# SPDX-License-Identifier: Apache-2.0
"""The plans that a rank holds: what the control plane has handed over, and what has become of each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ...cluster import Cluster
from ...errors import InvalidInput, PlanMismatch
from ...planner.plan import Plan
from ...workload import Workload
from .binding import Programs
from .carrier import MAX_NUMBER, SLOTS, Carrier
from .launches import check_launches
from .prepared import ExpectedOps, PreparedPlan
from .resting_plan import RETURNS, RestingPlan

log = logging.getLogger("stretto.enforcer")


class Plans:
    """Prepared, committed, offered to the other ranks, active, resting, given up.

    The control plane calls `prepare`, `commit` and `discard` whenever it likes, training the rest between its calls.
    `expected` is the step that runs here, where that is known.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        rank: int,
        hosts: Sequence[str],
        cluster: Cluster | None,
        expected: ExpectedOps | None,
    ) -> None:
        self._carrier, self._rank, self._hosts, self._cluster = carrier, rank, hosts, cluster
        self._expected = expected
        self._lock = threading.Lock()
        self._programs = Programs()
        self._prepared: dict[int, PreparedPlan] = {}
        self._burnt: set[int] = set()
        self._falls: dict[int, int] = {}
        self._stays: dict[int, int] = {}
        """How often each plan was left, and became active."""
        self._offered: PreparedPlan | None = None
        self._counting = False
        self._dismissed: set[int] = set()
        """Plans that were to be forgotten while they were offered."""
        self.committed: PreparedPlan | None = None
        self.active: PreparedPlan | None = None
        self.resting: RestingPlan | None = None
        self.fell_back = ""
        """Why the last plan was left."""

    # The control plane.

    def prepare(self, plan: Plan, workload: Workload, number: int) -> None:
        """Check a plan and make it ready beside the one that runs; raises `PlanMismatch` or `InvalidInput`.

        Args:
            plan: The plan.
            workload: The step that it is for.
            number: The plan's number.

        Raises:
            PlanMismatch: The plan is for another step, or needs what this carrier has not.
            InvalidInput: The number is out of range.
        """
        size = len(self._hosts)
        if not 1 <= number <= MAX_NUMBER:
            raise InvalidInput(f"number: must be 1..{MAX_NUMBER}, not {number}")
        if workload.num_ranks != size:
            raise PlanMismatch(f"workload {workload.name} is for {workload.num_ranks} ranks, not {size}")
        if self._expected is not None and self._expected.digest != workload.digest:
            raise PlanMismatch(
                f"workload {workload.name} ({workload.digest}) is not the step that runs here ({self._expected.digest})"
            )
        with self._lock:
            known = self._prepared.get(number)
            if known is not None and known.hash == plan.hash:
                self._dismissed.discard(number)
                return
            taken = next((at for at in self._prepared if at % SLOTS == number % SLOTS), None)
        if known is not None:
            raise PlanMismatch(f"plan {number} is {known.hash} here, not {plan.hash}")
        if number in self._burnt:
            raise PlanMismatch(f"plan {number} was given up: {self.fell_back}")
        if taken is not None:
            raise PlanMismatch(f"plan {number} needs the communicators of plan {taken}, which is still held")
        if self._carrier.one_launch_order:
            check_launches(plan, workload, self._hosts)
        made = PreparedPlan(
            plan, workload, number, rank=self._rank, hosts=self._hosts, carrier=self._carrier, cluster=self._cluster,
            programs=self._programs,
        )  # fmt: skip
        with self._lock:
            self._prepared[number] = made

    def commit(self, number: int, hash: str) -> None:
        """All ranks are ready: the plan may become active at the next boundary where all know this."""
        with self._lock:
            found = self._prepared.get(number)
            if found is None or found.hash != hash:
                here = f"is {found.hash} here" if found else "is not prepared here"
                raise PlanMismatch(f"plan {number} ({hash}) {here}")
            if number in self._burnt:
                raise PlanMismatch(f"plan {number} was given up: {self.fell_back}")
            if self.committed is None or number >= self.committed.number:
                self.committed = found

    def discard(self, number: int) -> None:
        """Forget a prepared plan that is not active.

        One that is just being offered stays until the offers are counted: other ranks may take it up, and so will
        this one then. It is not offered again.
        """
        with self._lock:
            found = self._prepared.get(number)
            if found is None or found is self.active:
                return
            if found is self.committed:
                self.committed = self.active
            if self._counting and found is self._offered:
                self._dismissed.add(number)
                return
            del self._prepared[number]
            if self.resting is not None and self.resting.plan is found:
                self.resting = None
        self._carrier.unload(number)

    # Training.

    def offer(self) -> list[int]:
        """What this rank tells the others now: number and hash of what was committed to it, and both negated."""
        with self._lock:
            made = self._offered = self.committed
            self._counting = True
        number, code = (made.number, int(made.hash[:15], 16)) if made else (0, 0)
        return [number, -number, code, -code]

    def elect(self, agreed: Sequence[int]) -> bool:
        """Read the maximum of all offers: whether another plan is active from here on, the same on all ranks."""
        number = agreed[0]
        with self._lock:
            offered, self._counting = self._offered, False
            dismissed, self._dismissed = self._dismissed, set()
            same = agreed[0] == -agreed[1] and agreed[2] == -agreed[3]
            # An offer is void once its plan was left.
            void = number != (offered.number if offered is not None else 0) or number in self._burnt
            changes = same and not void and number != (self.active.number if self.active is not None else 0)
            if changes:
                self._take_up(offered)
        if number and agreed[0] == -agreed[1] and not same:
            self._refuse(number)
        for one in dismissed:
            self.discard(one)
        return changes

    def _refuse(self, number: int) -> None:
        """Ranks hold different plans under one number, and all have just learned so: it is given up for good."""
        with self._lock:
            held = self._prepared.pop(number, None)
            self._burnt.add(number)
            self._dismissed.discard(number)
            if held is None:
                return
            self.fell_back = (
                f"plan {number} ({held.hash} here) is another plan on another rank: make a plan on one rank, and let "
                f"the others load its file"
            )
            if self.committed is held:
                self.committed = self.active
        log.warning("%s", self.fell_back)
        self._carrier.unload(number)

    def _take_up(self, new: PreparedPlan | None) -> None:
        number = new.number if new is not None else 0
        self.active = new
        if self.committed is None or self.committed.number < number:
            self.committed = new
        if self.resting is not None and self.resting.plan is not new:
            self._carrier.unload(self.resting.plan.number)
        self.resting = None
        for older in [at for at in self._prepared if at < number]:
            del self._prepared[older]
            self._carrier.unload(older)
        self._stays[number] = self._stays.get(number, 0) + 1

    def active_as(self, number: int) -> PreparedPlan | None:
        """The active plan, if it has this number."""
        active = self.active
        return active if active is not None and active.number == number else None

    def stay(self, number: int) -> int:
        """How many times a plan has become active."""
        return self._stays.get(number, 0)

    def leave(self, why: str, *, mine: bool) -> None:
        """Make no plan active from here on; where the reason is this rank's own, the plan may rest instead."""
        left = self.active
        assert left is not None
        self.fell_back = why
        self._falls[left.number] = self._falls.get(left.number, 0) + 1
        rests = mine and self._falls[left.number] <= RETURNS
        if not rests:
            self._burnt.add(left.number)
        with self._lock:
            self.resting = RestingPlan(left) if rests else self.resting
            self.active = None
            if self._offered is left:
                self._offered = None
            if not rests or self.committed is left:
                self.committed = None
        if not rests:
            self._carrier.unload(left.number)

    def see_return(self, resting: RestingPlan) -> None:
        """The step that a resting plan was made for has come back: offer it again. Or it never will: let it go."""
        with self._lock:
            if self.resting is not resting:
                # The control plane has just discarded it.
                return
            if resting.back and self.committed is None:
                self.committed = resting.plan
            elif not resting.back and self.committed is resting.plan:
                # An offer that is under way stands: others may have seen nothing, and will take it up.
                self.committed = None
            hopeless = resting.hopeless and self._offered is not resting.plan
            if hopeless:
                self.resting = None
        if hopeless:
            self._burnt.add(resting.plan.number)
            self.fell_back += "; the step did not come back"
            self._carrier.unload(resting.plan.number)
