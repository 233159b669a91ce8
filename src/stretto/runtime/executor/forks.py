# SPDX-License-Identifier: Apache-2.0
"""Forked children of a rank: they inherit the rank's memory and descriptors, but are not that rank.

A child that used them would send in the rank's name. So everything that belongs to a job knows the process that made
it (`Home`), and refuses to work in another one. Counting forks costs nothing per call, other than asking the kernel
for the process's number.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from typing import Any, Protocol

from ...errors import StrettoError
from ...process_state import STATE, ProcessPart


class InheritedResource(Protocol):
    """What a forked child inherits and has to let go of."""

    def abandon(self) -> None:
        """Called in the child, right after the fork, where no other thread runs."""


class Inheritance(ProcessPart):
    """What this process has from the one that forked it, and what its own children will have to let go of."""

    def __init__(self) -> None:
        self.world: Any = None
        """A weak reference to the default process group that the parent had when it forked this process."""
        self.resources: weakref.WeakSet[InheritedResource] = weakref.WeakSet()

    def after_fork(self) -> None:
        """Remember the parent's group, and let go of what only the parent may use."""
        world = _default_group()
        self.world = weakref.ref(world) if world is not None else None
        for resource in list(self.resources):
            resource.abandon()
        self.resources.clear()


INHERITANCE = STATE.part(Inheritance)


class Home:
    """The process that made an object."""

    __slots__ = ("_forks", "_pid", "_whose")

    def __init__(self, whose: str) -> None:
        self._forks, self._pid, self._whose = STATE.forks, os.getpid(), whose

    @property
    def left(self) -> bool:
        """Whether this is another process than the one that made the object: a forked child of it."""
        return self._forks != STATE.forks

    def check(self) -> None:
        """Raises `StrettoError` in a forked child."""
        if self._forks != STATE.forks:
            raise refusal(f"{self._whose} (process {self._pid})")


def refusal(whose: str) -> StrettoError:
    """The error of a forked child that does what only its parent may do."""
    return StrettoError(
        f"process {os.getpid()} was forked from {whose} and is no rank of its job: call collectives in the rank "
        "itself, or make a job of the child's own after destroy_process_group()"
    )


def check_world() -> None:
    """Raises `StrettoError` where the default process group was inherited from the parent by a fork."""
    world = INHERITANCE.world() if INHERITANCE.world is not None else None
    if world is not None and world is _default_group():
        raise refusal(f"a rank (process {os.getppid()})")


def abandon_in_children(resource: InheritedResource) -> None:
    """Have a forked child call ``resource.abandon()``."""
    INHERITANCE.resources.add(resource)


def keep_forever(thing: object) -> None:
    """Never destroy an object: its destructor would wait for threads, or change what the parent still uses."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _default_group() -> Any:
    distributed = sys.modules.get("torch.distributed")
    group = getattr(distributed, "group", None)
    return getattr(group, "WORLD", None)
