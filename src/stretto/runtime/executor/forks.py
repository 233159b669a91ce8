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


class Heirloom(Protocol):
    """What a forked child inherits and has to let go of."""

    def abandon(self) -> None:
        """Called in the child, right after the fork, where no other thread runs."""


class Process:
    """What is known of this process."""

    forks = 0
    """How many forks lie between the process that loaded this module and this one."""
    inherited_world: Any = None
    """A weak reference to the default process group that the parent had when it forked this process."""


class Home:
    """The process that made an object."""

    __slots__ = ("_forks", "_pid", "_whose")

    def __init__(self, whose: str) -> None:
        self._forks, self._pid, self._whose = Process.forks, os.getpid(), whose

    @property
    def left(self) -> bool:
        """Whether this is another process than the one that made the object: a forked child of it."""
        return self._forks != Process.forks

    def check(self) -> None:
        """Raises `StrettoError` in a forked child."""
        if self._forks != Process.forks:
            raise refusal(f"{self._whose} (process {self._pid})")


def refusal(whose: str) -> StrettoError:
    """The error of a forked child that does what only its parent may do."""
    return StrettoError(
        f"process {os.getpid()} was forked from {whose} and is no rank of its job: call collectives in the rank "
        "itself, or make a job of the child's own after destroy_process_group()"
    )


def check_world() -> None:
    """Raises `StrettoError` where the default process group was inherited from the parent by a fork."""
    world = Process.inherited_world() if Process.inherited_world is not None else None
    if world is not None and world is _default_group():
        raise refusal(f"a rank (process {os.getppid()})")


def abandon_in_children(heirloom: Heirloom) -> None:
    """Have a forked child call ``heirloom.abandon()``."""
    _heirlooms.add(heirloom)


def keep_forever(thing: object) -> None:
    """Never destroy an object: its destructor would wait for threads, or change what the parent still uses."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_heirlooms: weakref.WeakSet[Heirloom] = weakref.WeakSet()


def _default_group() -> Any:
    distributed = sys.modules.get("torch.distributed")
    group = getattr(distributed, "group", None)
    return getattr(group, "WORLD", None)


def _forked() -> None:
    Process.forks += 1
    world = _default_group()
    Process.inherited_world = weakref.ref(world) if world is not None else None
    for heirloom in list(_heirlooms):
        heirloom.abandon()
    _heirlooms.clear()


os.register_at_fork(after_in_child=_forked)
