# SPDX-License-Identifier: Apache-2.0
"""Found by every Python that `stretto run` starts: waits for PyTorch's distributed part, and then arms the autopilot.

Loads nothing of Stretto before that, and runs the `sitecustomize` that would have been found without it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

TARGET = "torch.distributed.distributed_c10d"


class Finder(MetaPathFinder):
    """Lets the target be found as ever, and its loader call us once the module is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the target with our loader around its own; see `importlib.abc.MetaPathFinder`."""
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Arming(spec.loader)
        return spec


class Arming(Loader):
    """Another loader, and what is to happen after it."""

    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module as its own loader makes it; see `importlib.abc.Loader`."""
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then arm the autopilot; an error of ours must not fail the job."""
        self.inner.exec_module(module)
        try:
            from stretto.control.autopilot import arm

            arm(module)
        except Exception as error:
            print(f"stretto: left as it is: {error}", file=sys.stderr)


def chain() -> None:
    """Run the next `sitecustomize` on the path."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("STRETTO_CONTROLLER"):
    sys.meta_path.insert(0, Finder())
if __name__ == "sitecustomize":
    chain()
