# SPDX-License-Identifier: Apache-2.0
"""What is known by name and can be added to from outside, and the modules that add to it (docs/plugins.md).

`STRETTO_PLUGINS` names modules, and installed packages name theirs in the entry-point group `stretto.plugins`. They are
imported once in a process, before anything is looked up in a `Registry`; nothing imports them before that.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeVar

from .errors import InvalidInput, StrettoError
from .process_state import STATE, ProcessPart

VARIABLE = "STRETTO_PLUGINS"
GROUP = "stretto.plugins"

Item = TypeVar("Item")


class PluginLoader(ProcessPart):
    """Imports the plug-ins of this process once, when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._begun = self._loaded = False
        self._failure = ""

    def after_fork(self) -> None:
        """Another thread of the parent may have been importing plug-ins; the child imports them itself."""
        self._lock = threading.RLock()
        self._begun = self._loaded

    def load(self) -> None:
        """Import all plug-ins; nothing where that has been done, or is being done by the caller's caller.

        Raises:
            InvalidInput: A plug-in cannot be imported; every later call says so, too.
        """
        if self._loaded:
            return
        with self._lock:
            if self._failure:
                raise InvalidInput(self._failure)
            if self._begun:
                return
            self._begun = True
            try:
                self._import_all()
                self._loaded = True
            except InvalidInput as error:
                self._failure = str(error)
                raise

    def _import_all(self) -> None:
        for name in dict.fromkeys(word.strip() for word in os.environ.get(VARIABLE, "").split(",")):
            if name:
                try:
                    import_module(name)
                except (Exception, SystemExit) as error:
                    raise InvalidInput(f"{VARIABLE}: {name}: {_why(error)}") from error
                _log().info("plug-in %s, which %s names", name, VARIABLE)
        for entry in entry_points(group=GROUP):
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                package = entry.dist.name if entry.dist is not None else "?"
                raise InvalidInput(f"plug-in {entry.value} of the package {package}: {_why(error)}") from error
            _log().info("plug-in %s, an entry point of %s", entry.value, GROUP)


LOADER = STATE.part(PluginLoader)


class Registry(Mapping[str, Item]):
    """Things of one kind by name: those of this package first, then those of plug-ins, which every look-up loads.

    A name has one meaning: to register another thing under it is refused unless it is meant to be replaced.
    """

    def __init__(self, kind: str, reserved: Collection[str] = ()) -> None:
        """Begin without things.

        Args:
            kind: What the things are, as messages shall call them.
            reserved: Names that are taken although they are kept elsewhere.
        """
        self._kind, self._reserved = kind, reserved
        self._things: dict[str, Item] = {}

    def register(self, name: str, thing: Item, *, replace: bool = False) -> None:
        """Make a thing known by a name.

        Args:
            name: The name.
            thing: The thing.
            replace: Whether a thing that has the name gives way.

        Raises:
            InvalidInput: The name is taken, or no name.
        """
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"name: a {self._kind} needs a name, not {name!r}")
        if not replace and (name in self._things or name in self._reserved):
            raise InvalidInput(f"name: {name!r} is the name of another {self._kind}; replace=True replaces it")
        self._things[name] = thing

    def forget(self, name: str) -> None:
        """Forget a thing."""
        del self._things[name]

    def __getitem__(self, name: str) -> Item:
        LOADER.load()
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        LOADER.load()
        return iter(self._things)

    def __len__(self) -> int:
        LOADER.load()
        return len(self._things)


def _why(error: BaseException) -> str:
    """What has kept a plug-in from being imported, in one line."""
    if isinstance(error, StrettoError):
        return str(error)
    hint = "; it must be a module that Python finds (PYTHONPATH)" if isinstance(error, ModuleNotFoundError) else ""
    return f"cannot be imported: {type(error).__name__}: {error}{hint}"


def _log() -> logging.Logger:
    return logging.getLogger("stretto.plugins")
