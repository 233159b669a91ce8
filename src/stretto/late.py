# SPDX-License-Identifier: Apache-2.0
"""`LateFunction`: how a noun's method calls a function of a module above the noun, without importing it; and
`late_names`: names of a package whose modules are imported when they are first used.

`Cluster.load` is a method that users know; reading files needs `Cluster`, so the reader's module imports the noun's
and not the other way round. The noun's module declares what it calls, and the package's ``__init__``, which Python
runs before any module of the package is imported, supplies it: ``model.LOAD.supply(files.load)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LateFunction(Generic[P, R]):
    """A function that is declared, with its types, below the module that supplies it.

    >>> double: LateFunction[[int], int] = LateFunction("double")
    >>> double.supply(lambda number: 2 * number)
    >>> double(21)
    42
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[P, R] | None = None

    def supply(self, function: Callable[P, R]) -> None:
        """Say which function is called."""
        self._function = function

    def supply_from(self, module: str, name: str) -> None:
        """Say which function is called by the module that has it, which is imported with the first call."""

        def first(*args: P.args, **kwargs: P.kwargs) -> R:
            found: Callable[P, R] = getattr(import_module(module), name)
            self._function = found
            return found(*args, **kwargs)

        self._function = first

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the supplied function."""
        if self._function is None:
            raise RuntimeError(f"{self.name}: the module that supplies this function has not been imported")
        return self._function(*args, **kwargs)


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A ``__getattr__`` for a package: names whose modules take long to import, and are imported with their first use.

    Args:
        package: The package's ``__name__``.
        homes: By name the module that has it, relative to the package; a name that is its module's own is the module.

    Returns:
        The function.
    """

    def look_up(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name], package)
        found: object = home if homes[name] == f".{name}" else getattr(home, name)
        setattr(import_module(package), name, found)
        return found

    return look_up
