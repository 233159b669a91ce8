# SPDX-License-Identifier: Apache-2.0
"""A thread per process that looks after calls on GPU memory: kernels wait for ranks that may never come.

A stream cannot say what is wrong, and a host that waits for it cannot look. So this thread does: it ends the calls of a
group when a rank has given up, has died, runs another call, or does not come within the group's timeout. Ending means
to raise the communicator's abort flag, which every wait in a kernel sees.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from typing import Any

from ...errors import PeerLost, StrettoError
from ...process_state import STATE, ProcessPart
from ..executor.executor import ProgramMismatch
from .gpu_work import GpuFlight
from .launch_queue import ask_freely
from .lost_ranks import DelegatedCall
from .meeting import find_gone

TICK_S = 0.02
"""Between two looks while something is under way."""
REST_S = 0.5
"""Between two looks at boards while nothing is."""
SLOW_S = 0.25
"""A call that takes longer than this may be waiting for a rank that is gone."""


class GroupWatch:
    """One look at one group (a `GpuEngine`); remembers which calls were compared already."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._compared = 0

    @property
    def engine(self) -> Any:
        """The group's engine; None where the group is gone."""
        return self._engine()

    def look(self) -> bool:
        """Read clocks, compare calls, ask for lost ranks; whether something is under way."""
        engine = self.engine
        site = engine.site if engine is not None else None
        if site is None or engine.broken is not None:
            return False
        told = site.board.given_up()
        if told is not None:
            engine.fail_as_told(*told)
            return False
        self._compare(engine, site)
        try:
            site.clock.read()
            while engine.flights and engine.flights[0].ended:
                engine.flights.popleft()
        except RuntimeError as error:
            # CUDA itself has failed, perhaps because of a rank that is gone.
            self._find_lost(engine, site, engine.flights[0] if engine.flights else None, 0.0)
            engine.fail(StrettoError(f"the GPU has failed: {str(error).splitlines()[0]}"))
            return False
        oldest = engine.flights[0] if engine.flights else None
        if oldest is None:
            if engine.captured:
                # It cannot be known when a captured graph runs, but no rank may be lost while graphs can run.
                self._find_lost(engine, site, None, 0.0)
            return False
        lost = site.communicator.lost()
        if lost is not None:
            where = f"(in {oldest.op} of group {engine.engine.name})"
            engine.fail(PeerLost(f"timed out waiting for rank {lost[0]} {where}"))
            return False
        waited_s = time.monotonic() - oldest.since
        if waited_s > SLOW_S:
            self._find_lost(engine, site, oldest, waited_s)
        return True

    def state(self) -> str:
        """The calls under way, and for groups over several hosts where their slices are."""
        engine = self.engine
        site = engine.site if engine is not None else None
        if site is None:
            return "a group that is gone"
        flights = [f"{flight.op} {flight.number}" for flight in list(engine.flights)]
        more = site.communicator.state() if hasattr(site.communicator, "state") else ""
        return f"group {engine.engine.name}: {engine.posted} calls, under way {', '.join(flights) or 'none'}; {more}"

    def _compare(self, engine: Any, site: Any) -> None:
        """Calls of ranks that came to them later than this one."""
        while self._compared < engine.posted:
            number = self._compared + 1
            different = site.board.mismatch(number)
            if different:
                engine.fail(ProgramMismatch(different))
                return
            if site.board.missing(number) and number + site.board.kept > engine.posted:
                return
            self._compared = number

    def _find_lost(self, engine: Any, site: Any, oldest: GpuFlight | None, waited_s: float) -> None:
        """End the calls where a rank is gone, or has not come to the oldest one in time."""
        missing = site.board.missing(oldest.number) if oldest is not None else []
        # A rank that is done may leave: what others still wait for then is on its way.
        gone = [rank for rank in find_gone(engine.cards, 0.0) if not site.board.has_left(rank) or rank in missing]
        where = f"(in {oldest.op if oldest is not None else 'a graph'} of group {engine.engine.name})"
        if gone:
            names = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} are"
            engine.fail(PeerLost(f"{names} gone {where}"))
        elif oldest is not None and waited_s > oldest.limit_s:
            timed_out = RuntimeError(f"Timed out waiting {waited_s:.1f} s")
            named = engine.lost_ranks.explain(timed_out, DelegatedCall(op=oldest.op))
            if not isinstance(named, PeerLost):
                behind = f"rank {', '.join(map(str, missing))}, which has not made this call" if missing else "a rank"
                named = PeerLost(f"timed out waiting for {behind} {where}")
            engine.fail(named)


class GpuWatchdog(ProcessPart):
    """The thread, and the groups that it looks after."""

    def __init__(self) -> None:
        self.rendezvous = 0
        """Symmetric allocations that this process has made; PyTorch counts them for the whole of it, too."""
        self._begin()
        atexit.register(self._leave)

    def _begin(self) -> None:
        self._groups: list[GroupWatch] = []
        self._thread: threading.Thread | None = None
        self._busy = threading.Event()
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        """The thread is the parent's, and its groups are, too."""
        self._begin()

    def held_bytes(self) -> int:
        """GPU memory that all groups of this process hold."""
        return sum(group.engine.held_bytes for group in list(self._groups) if group.engine is not None)

    def states(self) -> list[str]:
        """Where the calls of every group are; asks CUDA nothing, so it can be called while the GPU stands still."""
        return [group.state() for group in list(self._groups) if group.engine is not None]

    def add(self, engine: object) -> None:
        """Look after a group from now on."""
        with self._lock:
            self._groups = [group for group in self._groups if group.engine is not None]
            self._groups.append(GroupWatch(engine))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="stretto-gpu-watch", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Wake the thread: a call was launched."""
        if not self._busy.is_set():
            self._busy.set()

    def _run(self) -> None:
        # Another thread may capture a graph meanwhile.
        ask_freely()
        while self._groups:
            self._busy.wait(REST_S)
            self._busy.clear()
            busy = True
            while busy:
                busy = False
                for group in list(self._groups):
                    # A GPU that is lost says so to everybody who asks, and ranks are asked about in the end.
                    with contextlib.suppress(Exception):
                        busy = group.look() or busy
                if busy:
                    time.sleep(TICK_S)

    def _leave(self) -> None:
        """A process that ends without destroying its groups says that it is done, too."""
        for group in list(self._groups):
            engine = group.engine
            if engine is not None:
                with contextlib.suppress(Exception):
                    engine.close()


WATCHDOG = STATE.part(GpuWatchdog)
