# SPDX-License-Identifier: Apache-2.0
"""Labs seen from outside: which labs run on this machine, and which processes dead labs have left.

A lab leaves no file. Its processes carry its name, `STRETTO_LAB=PID-START-N`, in their environment: the id of the
process that made the lab, the start time of that process (process ids are reused), and the number of the lab in that
process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..process_state import STATE

LAB = "STRETTO_LAB"
ABOUT = "STRETTO_LAB_ABOUT"
ROLE = "STRETTO_LAB_ROLE"
RATES = "STRETTO_LAB_RATES"
END_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LabProcesses:
    """A lab, or what is left of a dead one.

    `pid` is the process that made the lab and `alive` whether that process still runs; `keepers` maps the name of a
    host, or ``switch``, to its keeper's process id; `pids` are all processes of the lab.
    """

    name: str
    pid: int
    alive: bool
    about: str
    keepers: dict[str, int]
    pids: tuple[int, ...]


def new_name() -> str:
    """A new name for a lab that this process makes."""
    pid = os.getpid()
    return f"{pid}-{_started(pid)}-{STATE.number('lab')}"


def running() -> list[LabProcesses]:
    """All labs of which this user can see at least one process, sorted by name."""
    found: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for pid, environment in _members():
        found.setdefault(environment[LAB], []).append((pid, environment))
    labs = []
    for name, members in sorted(found.items()):
        pid, started, _ = (int(part) for part in name.split("-"))
        keepers = {env[ROLE]: member for member, env in members if ROLE in env}
        about = next((env[ABOUT] for _, env in members if ABOUT in env), "")
        pids = tuple(member for member, _ in members)
        labs.append(
            LabProcesses(name=name, pid=pid, alive=_started(pid) == started, about=about, keepers=keepers, pids=pids)
        )
    return labs


def clean(*, everything: bool = False) -> list[LabProcesses]:
    """Kill the processes of dead labs, or of all labs with `everything`; return the labs that were killed.

    Namespaces, interfaces and shapers go with the last process.
    """
    doomed = [lab for lab in running() if everything or not lab.alive]
    names = {lab.name for lab in doomed}
    until = time.monotonic() + END_S
    # Repeat until none is left, since a process may start a child between being listed and being killed.
    while left := [pid for pid, env in _members() if env[LAB] in names and pid != os.getpid()]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return doomed


def _members() -> Iterator[tuple[int, dict[str, str]]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            raw = (entry / "environ").read_bytes()
        except OSError:
            continue
        if LAB.encode() not in raw:
            continue
        pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
        environment = {key: value for key, _, value in pairs}
        parts = environment.get(LAB, "").split("-")
        if len(parts) == 3 and all(part.isdecimal() and len(part) < 20 for part in parts):
            yield int(entry.name), environment


def _started(pid: int) -> int:
    """The start time of a process in ticks since boot; -1 if there is no such process or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] == "Z" else int(fields[19])
