# SPDX-License-Identifier: Apache-2.0
"""Loads C++ modules from the folder STRETTO_SANITIZED instead of the installed ones, in every Python of a test run.

`scripts/test-sanitized` puts this folder on PYTHONPATH. Python imports a module of this name when it starts.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class SanitizedModules:
    """Finds our C++ modules."""

    def __init__(self, folder: str, modules: Sequence[str]) -> None:
        self._folder = folder
        self._names = [f"stretto.{module}" for module in modules]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is; None for all that are not ours."""
        if name not in self._names:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, [self._folder], target)
        if found is None:
            raise ImportError(f"{name} is not in {self._folder}: was it built there?")
        return found


def set_report_path(library: str, path: str) -> None:
    """Let a sanitizer's library write its reports to files that begin with a path and end with the process's number.

    Where two sanitizers are in a process, a `log_path` in the second one's options reaches only the first one.
    """
    ctypes.CDLL(library).__sanitizer_set_report_path(path.encode())


if "STRETTO_UNDEFINED_REPORTS" in os.environ:
    set_report_path("libubsan.so.1", os.environ["STRETTO_UNDEFINED_REPORTS"])
if "STRETTO_SANITIZED" in os.environ:
    modules = os.environ["STRETTO_SANITIZED_MODULES"].split()
    # Before the finder of an editable installation, which comes first otherwise.
    sys.meta_path.insert(0, SanitizedModules(os.environ["STRETTO_SANITIZED"], modules))
