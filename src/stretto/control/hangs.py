# SPDX-License-Identifier: Apache-2.0
"""Names a hang: compares the pulses of a job's ranks, and says who waits for whom, in which call, and where.

Nothing is ended or delayed here: a rank that waits for another one that saves a model, say, is told of, too, and so is
when it went on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .hang_messages import GroupPulse, Pulse, PulseCall, PulseReply
from .hang_words import call_words, how_far, rank_words
from .messages import HangStatus
from .starved import StarvedClock, waited_s

STILL_S = 5.0
"""A rank that has called nothing for so long, at one line of its script, waits."""
LOOK_S = 2.0
SILENT_S = 4.0
"""Pulses come twice a second."""
SILENT_HERE_S = 20.0
"""How long a process of this machine may be silent: one that was stopped or has ended is known, so it is only busy."""
SURE_S = 2.0
"""What seems to hang is named when it still does after so long, in which each of its ranks could run and was heard."""
MUTE_S = 3.0
"""A rank that could run for this long and has said nothing is taken to be mute."""
SAME_MOMENT_S = 0.3
JUST_S = 1.0
"""A rank that was seen to be gone so shortly before a signal was heard of is gone because of that signal."""
MAX_FINDINGS = 16
SIZED = frozenset(["allreduce", "all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single"])
"""Calls whose size is the same on all ranks."""
GONE, STOPPED, SILENT, LEFT, HERE = "gone", "stopped", "silent", "left", "here"
DIFFERS, BEHIND, STUCK = "differs", "behind", "stuck"


@dataclass
class _Rank:
    pulse: Pulse
    heard: float
    gone_at: float = 0.0
    state: str = HERE
    quiet: StarvedClock | None = None
    """Made once the rank has not been heard for a while: how much of the time since then it got no processor."""
    mute_s: float = 0.0
    """For how long since then it could have run, and has said nothing: a thread holds Python's lock."""


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    """What seems to hang: for each of its ranks since when, and how often it had been heard, and starved, by then."""

    then: dict[int, tuple[float, int, float]]
    """A rank may come to those that wait later than others."""


@dataclass(kw_only=True)
class _Finding:
    status: HangStatus
    key: tuple[object, ...]
    since: float
    waiting: dict[int, int] = field(default_factory=dict)
    """Ranks that waited, and the calls that they had made."""
    group: str = ""


def host_name() -> str:
    """A name that two processes have in common exactly where each sees the other's process number."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def process_state(pid: int) -> str:
    """Whether a process of this machine is here, stopped or gone."""
    with contextlib.suppress(OSError):
        # A process's name may have any character but ends with the last parenthesis.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return STOPPED if letter in "Tt" else GONE if letter in "ZX" else HERE
    return GONE


class HangWatch:
    """Finds, from the pulses of one job, the rank that hangs."""

    def __init__(
        self, job: str, *, host: str = "", now: Callable[[], float] = time.monotonic,
        process: Callable[[int], str] = process_state,
        waited: Callable[[int | str], dict[str, float]] = waited_s,
    ) -> None:  # fmt: skip
        self._job, self._host, self._now, self._process, self._waited = job, host, now, process, waited
        self._epoch = 0
        self._ranks: dict[int, _Rank] = {}
        self._findings: list[_Finding] = []
        self._suspicions: dict[tuple[object, ...], _Suspicion] = {}
        self._suspected: set[tuple[object, ...]] = set()
        self._to_say: list[str] = []
        self._hushed = False

    @property
    def findings(self) -> tuple[HangStatus, ...]:
        """All so far, oldest first."""
        return tuple(found.status for found in self._findings)

    def heard(self, pulse: Pulse) -> PulseReply:
        """Take in a rank's pulse."""
        if pulse.epoch > self._epoch:
            # The job was started again; what was found before stays known.
            self._epoch, self._ranks = pulse.epoch, {}
        if pulse.epoch < self._epoch:
            return PulseReply()
        known = self._ranks.get(pulse.rank)
        if known is None or pulse.beat > known.pulse.beat or pulse.pid != known.pulse.pid:
            if not pulse.groups and known is not None:
                # The record of groups that are not ours comes only while somebody waits.
                pulse = msgspec.structs.replace(pulse, groups=known.pulse.groups)
            self._ranks[pulse.rank] = _Rank(pulse, self._now())
        say: tuple[str, ...] = ()
        if self._to_say and pulse.rank == min(self._here(), default=pulse.rank):
            say, self._to_say = tuple(self._to_say), []
        look = any(self._ranks[rank].pulse.still_s >= LOOK_S for rank in self._here())
        return PulseReply(say=say, look=look)

    def hush(self) -> None:
        """The job was told to end, by a signal: ranks that go from here on are no hang. What was named before stays."""
        self._hushed = True
        now = self._now()
        early = [found for found in self._findings if found.status.kind == GONE and now - found.since <= JUST_S]
        self._findings = [found for found in self._findings if found not in early]
        untrue = {_spoken(found.status) for found in early}
        self._to_say = [line for line in self._to_say if line not in untrue]

    def look(self) -> None:
        """Compare the ranks; called several times a second."""
        if self._hushed:
            return
        now = self._now()
        for rank in self._ranks.values():
            self._see(rank, now)
        self._went_on(now)
        self._suspected = set()
        lost = self._lost()
        if lost:
            self._tell_lost(lost, now)
        troubled = bool(lost) or any(rank.pulse.error for rank in self._ranks.values())
        for name, ranks in self._groups():
            self._look_at(name, ranks, now, troubled)
        # What does not seem so any more begins anew when it does.
        self._suspicions = {key: one for key, one in self._suspicions.items() if key in self._suspected}

    def _here(self) -> list[int]:
        return [number for number, rank in self._ranks.items() if rank.state == HERE]

    def _see(self, rank: _Rank, now: float) -> None:
        if rank.pulse.leaving:
            rank.state = LEFT
        elif rank.gone_at:
            rank.state = GONE
        else:
            local = bool(self._host) and rank.pulse.host == self._host
            found = self._process(rank.pulse.pid) if local else HERE
            if found == GONE:
                rank.gone_at, rank.state = now, GONE
            elif now - rank.heard < SILENT_S / 2:
                rank.state, rank.quiet, rank.mute_s = HERE, None, 0.0
            elif found == STOPPED:
                rank.state = STOPPED
            else:
                rank.state = self._silent(rank, now) if local or now - rank.heard >= SILENT_S else HERE

    def _silent(self, rank: _Rank, now: float) -> str:
        """A process of this machine may only not be let run, and then cannot say anything."""
        if not self._host or rank.pulse.host != self._host:
            return SILENT
        rank.quiet = rank.quiet or StarvedClock(rank.pulse.pid, now=self._now, waited=self._waited)
        starved_s = rank.quiet.read()
        rank.mute_s = rank.quiet.age_s - starved_s
        return SILENT if now - rank.heard - starved_s >= SILENT_HERE_S else HERE

    def _lost(self) -> list[int]:
        """The ranks that were lost first: others may have ended because of them, or been ended by the launcher."""
        gone = {number: rank.gone_at for number, rank in self._ranks.items() if rank.state == GONE}
        if gone:
            first = min(gone.values())
            return sorted(number for number, at in gone.items() if at <= first + SAME_MOMENT_S)
        return sorted(number for number, rank in self._ranks.items() if rank.state in (STOPPED, SILENT))

    def _tell_lost(self, lost: list[int], now: float) -> None:
        state = self._ranks[lost[0]].state
        if state == SILENT and not self._waiting(self._here()):
            # A long piece of the application's own that lets no other thread run.
            return
        how = {
            GONE: "its process has ended without a word" if len(lost) == 1 else "processes have ended without a word",
            STOPPED: "stopped by a signal (SIGSTOP, or a debugger)",
            SILENT: "nothing is heard of it" if len(lost) == 1 else "nothing is heard of them",
        }[state]
        places = {number: rank.pulse for number, rank in self._ranks.items()}
        verb = "is" if len(lost) == 1 else "are"
        text = f"{rank_words(lost)} {verb} {state}: {how}; {how_far(places, self._states(), lost)}"
        key = ("lost", state, tuple(lost))
        if state == GONE and any(found.key[:2] == key[:2] and found.key[-1] == self._epoch for found in self._findings):
            return
        self._find(state, lost, text, (*key, self._epoch), now, waiting=self._stopped_at(lost))

    def _stopped_at(self, lost: Sequence[int]) -> dict[int, int]:
        """A rank that was stopped, or silent, has gone on when its pulse does."""
        return {number: self._ranks[number].pulse.beat for number in lost}

    def _look_at(self, name: str, ranks: Sequence[int], now: float, troubled: bool) -> None:
        mine = {rank: self._group_of(rank, name) for rank in ranks if rank in self._ranks}
        calls = {rank: group.calls if group is not None else 0 for rank, group in mine.items()}
        most = max(calls.values(), default=0)
        waiting = [rank for rank in self._waiting(self._here()) if calls.get(rank) == most and most]
        if not waiting and not troubled:
            return
        different = first_difference(mine)
        if different is not None:
            number, each = different
            parts = "; ".join(f"{rank_words(who)}: {call_words(call)}" for who, call in each)
            text = f"ranks call different things: call {number} of group {name} is {parts}"
            self._find(DIFFERS, [rank for who, _ in each for rank in who], text, (DIFFERS, name, number), now)
            return
        behind = [rank for rank in mine if calls[rank] < most]
        unheard = [rank for rank in ranks if rank not in mine]
        if not waiting or self._lost():
            return
        last = self._last_call(waiting[0], name)
        still_s = max(self._ranks[rank].pulse.still_s for rank in waiting)
        head = f"{rank_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in call {most} of group {name}, "
        head += f"{call_words(last)}, for {still_s:.0f} s"
        pulses = {rank: self._ranks[rank].pulse for rank in mine}
        key = (name, most)
        at = {rank: most for rank in waiting}
        if behind or (unheard and len(waiting) == len(mine)):
            missing = f"{rank_words(behind)} {'has' if len(behind) == 1 else 'have'} not come: " if behind else ""
            text = f"{head}; {missing}{how_far(pulses, self._states(), behind, calls)}"
            if unheard:
                behind = [*behind, *unheard]
                text += f"; nothing was ever heard of {rank_words(unheard)}"
            self._suspect(BEHIND, behind, text, (BEHIND, *key, tuple(behind)), now, waiting=at, group=name)
        elif len(waiting) == len(mine) and all(self._in_call(rank, name) for rank in waiting):
            text = f"{head}: all of its ranks have made the same calls, and it does not end"
            self._suspect(STUCK, waiting, text, (STUCK, *key), now, waiting=at, group=name)

    def _in_call(self, rank: int, name: str) -> bool:
        last = self._last_call(rank, name)
        return self._ranks[rank].pulse.waits or (last is not None and last.open)

    def _waiting(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._ranks[rank].pulse.still_s >= STILL_S]

    def _states(self) -> dict[int, str]:
        return {number: rank.state for number, rank in self._ranks.items()}

    def _group_of(self, rank: int, name: str) -> GroupPulse | None:
        return next((group for group in self._ranks[rank].pulse.groups if group.name == name), None)

    def _last_call(self, rank: int, name: str) -> PulseCall | None:
        group = self._group_of(rank, name)
        return group.recent[-1] if group is not None and group.recent else None

    def _groups(self) -> list[tuple[str, tuple[int, ...]]]:
        found: dict[str, tuple[int, ...]] = {}
        for rank in self._ranks.values():
            for group in rank.pulse.groups:
                found.setdefault(group.name, group.ranks or tuple(range(rank.pulse.size)))
        return list(found.items())

    def _suspect(
        self, kind: str, ranks: Sequence[int], text: str, key: tuple[object, ...], now: float, *,
        waiting: dict[int, int], group: str,
    ) -> None:  # fmt: skip
        """Name what seems to hang once it has for long enough.

        A rank may have been heard last before it came, or be slow because others have the processors: each must have
        been heard again, and could have run for a while since.
        """
        concerned = {rank: self._ranks[rank].pulse for rank in {*ranks, *waiting} if rank in self._ranks}
        self._suspected.add(key)
        if key not in self._suspicions:
            self._suspicions[key] = _Suspicion(then={})
        then = self._suspicions[key].then
        for rank, pulse in concerned.items():
            then.setdefault(rank, (now, pulse.beat, pulse.starved_s))
        for rank, pulse in concerned.items():
            since, beat, starved_s = then[rank]
            known = self._ranks[rank]
            ran_s = known.heard - since - (pulse.starved_s - starved_s)
            heard = pulse.beat >= beat + 2 and ran_s >= SURE_S
            if not heard and known.state == HERE and known.mute_s < MUTE_S:
                return
        self._find(kind, ranks, text, key, now, waiting=waiting, group=group)

    def _find(
        self, kind: str, ranks: Sequence[int], text: str, key: tuple[object, ...], now: float, *,
        waiting: dict[int, int] | None = None, group: str = "",
    ) -> None:  # fmt: skip
        if len(self._findings) >= MAX_FINDINGS or any(found.key == key for found in self._findings):
            return
        status = HangStatus(job=self._job, kind=kind, ranks=tuple(sorted(ranks)), text=text[:2000])
        self._findings.append(_Finding(status=status, key=key, since=now, waiting=waiting or {}, group=group))
        self._to_say.append(_spoken(status))

    def _went_on(self, now: float) -> None:
        """Whether what was found is over."""
        for found in self._findings:
            if found.status.went_on_s or not found.waiting or not all(self._moved(found, r) for r in found.waiting):
                continue
            after_s = round(now - found.since, 1)
            found.status = msgspec.structs.replace(found.status, went_on_s=max(after_s, 0.1))
            self._to_say.append(f"hang: {rank_words(sorted(found.waiting))} went on, {after_s:.0f} s later")

    def _moved(self, found: _Finding, number: int) -> bool:
        rank = self._ranks.get(number)
        if rank is None or rank.state != HERE:
            return False
        if not found.group:
            return rank.pulse.beat > found.waiting[number]
        group = self._group_of(number, found.group)
        return group is not None and (group.calls > found.waiting[number] or rank.pulse.still_s < LOOK_S)


def _spoken(status: HangStatus) -> str:
    """The line that a rank prints."""
    return f"hang: {status.text}"


def first_difference(
    groups: dict[int, GroupPulse | None],
) -> tuple[int, list[tuple[list[int], PulseCall]]] | None:
    """The first call of a group that its ranks do not agree on.

    Args:
        groups: How far each rank is; None where it has called nothing.

    Returns:
        The number of the call, and who called what; None where all that is known is alike.
    """
    by_number: dict[int, dict[tuple[object, ...], tuple[list[int], PulseCall]]] = {}
    for rank, group in groups.items():
        for call in group.recent if group is not None else ():
            if call.op in ("send", "recv"):
                same: tuple[object, ...] = (call.nbytes,)
            else:
                same = (call.op, call.nbytes if call.op in SIZED else 0, call.root)
            by_number.setdefault(call.number, {}).setdefault(same, ([], call))[0].append(rank)
    for number in sorted(by_number):
        if len(by_number[number]) > 1:
            return number, list(by_number[number].values())
    return None
