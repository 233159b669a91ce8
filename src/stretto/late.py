# SPDX-License-Identifier: Apache-2.0
"""`LateFunction`: how a noun's method calls a function of a module above the noun, without importing it.

`Cluster.load` is a method that users know; reading files needs `Cluster`, so the reader's module imports the noun's
and not the other way round. The noun's module declares what it calls, and the package's ``__init__``, which Python
runs before any module of the package is imported, supplies it: ``model.LOAD.supply(files.load)``.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the supplied function."""
        if self._function is None:
            raise RuntimeError(f"{self.name}: the module that supplies this function has not been imported")
        return self._function(*args, **kwargs)
