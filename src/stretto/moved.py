# SPDX-License-Identifier: Apache-2.0
"""Modules of 0.1 that pages and examples named and that have moved: old paths work for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = {
    "stretto.planner.lowering": "stretto.planner.algebra.lowering",
    "stretto.planner.make": "stretto.planner.api",
    "stretto.planner.motif": "stretto.planner.algebra.motif",
    "stretto.planner.notation": "stretto.planner.algebra.notation",
    "stretto.planner.rules": "stretto.planner.algebra.rules",
    "stretto.runtime.pipelining": "stretto.pipeline.torch_runtime",
}
"""By their old paths."""
RENAMED = {
    ("stretto.planner.make", "planned"): "plan",
    ("stretto.runtime.probe", "probe"): "stretto.torch.probe",
    ("stretto.synthesis.three_stage", "synthesise"): "synthesize",
}
"""Functions with another name now, in their module or elsewhere, by the old module and name."""


class MovedModules:
    """Finds a module at its old path."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """A module that has the names of the one that moved; see `importlib.abc.MetaPathFinder`."""
        return ModuleSpec(name, MovedModules) if name in MODULES else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """None: the module is made as usual."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Fill it, and warn whoever imports it."""
        name = module.__name__
        warnings.warn(f"{name} is {MODULES[name]} now", DeprecationWarning, stacklevel=2)
        home = vars(import_module(MODULES[name]))
        vars(module).update({word: value for word, value in home.items() if not word.startswith("__")})
        vars(module).update({old: home[new] for (where, old), new in RENAMED.items() if where == name})


def old_name(module: str, name: str) -> object:
    """What a module that is still there had under another name, with a warning: for its ``__getattr__``.

    Args:
        module: The module.
        name: The old name.

    Returns:
        What has the new name.

    Raises:
        AttributeError: The module never had this name.
    """
    if (module, name) not in RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, new = RENAMED[module, name].rpartition(".")
    where = home or module
    warnings.warn(f"{module}.{name} is {where}.{new} now", DeprecationWarning, stacklevel=3)
    return getattr(import_module(where), new)


def install() -> None:
    """Have Python ask for old paths here first; once in a process."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.insert(0, MovedModules)
