# SPDX-License-Identifier: Apache-2.0
"""HiGHS (`highspy`) in a process that may also hold OR-Tools.

Both packages bring a library called ``libhighs.so.1``, of different versions. The dynamic loader takes two libraries of
one name for the same one, so whichever package is imported second is bound to the library of the first and fails with
an undefined symbol. Where OR-Tools is installed, `highspy` is therefore loaded from a copy in which the library has
another name of the same length. The copy is gone from the disk once it is loaded.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ..process_state import STATE, ProcessPart

NAME, OTHER_NAME = b"libhighs.so.1", b"libstrhs.so.1"


class Loading(ProcessPart):
    """One thread at a time loads the library."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def after_fork(self) -> None:
        """A thread of the parent may have held the lock."""
        self.lock = threading.Lock()


_LOADING = STATE.part(Loading)


def highspy() -> Any:
    """The module `highspy`, which is slow to import and not always needed.

    Raises:
        InvalidInput: highspy is not installed, or cannot be loaded beside a library that is loaded already.
    """
    with _LOADING.lock:
        try:
            if "highspy" not in sys.modules and find_spec("ortools") is not None:
                _import_renamed()
            return importlib.import_module("highspy")
        except ImportError as error:
            beside = " beside OR-Tools; run this in a process of its own" if "ortools" in sys.modules else ""
            raise InvalidInput(f"HiGHS (highspy) cannot be loaded{beside}: {error}") from None


def new_solver(**options: float | str | bool) -> Any:
    """A silent solver on one thread.

    All solvers of a process have to ask for the same number of threads: HiGHS sets up its threads at the first `run`,
    and a solver that asks for another number fails.

    Args:
        **options: Further options of HiGHS by name.

    Returns:
        A `highspy.Highs` without a model.

    Raises:
        InvalidInput: highspy is not installed or cannot be loaded.
    """
    solver = highspy().Highs()
    for name, value in {"output_flag": False, "threads": 1, **options}.items():
        solver.setOptionValue(name, value)
    return solver


def run(solver: Any) -> None:
    """Solve the model of `solver`, also where other code of this process has run HiGHS on more threads before."""
    if solver.run() == highspy().HighsStatus.kError:
        type(solver).resetGlobalScheduler(True)
        solver.run()


def _import_renamed() -> None:
    """Import highspy from a copy whose library has another name; where that fails, no module highspy stays loaded."""
    spec = find_spec("highspy")
    if spec is None or spec.origin is None:
        return
    original = Path(spec.origin).parent
    try:
        with tempfile.TemporaryDirectory(prefix="stretto-highs-") as folder:
            if not _copy(original, Path(folder) / "highspy"):
                return
            sys.path.insert(0, folder)
            try:
                module = importlib.import_module("highspy")
            finally:
                sys.path.remove(folder)
                importlib.invalidate_caches()
            # Submodules that are imported later (highspy.highs already is) come from the installed package.
            module.__path__ = [str(original)]
    except (ImportError, OSError):
        # The temporary folder may be mounted noexec, for example; the plain import may still work.
        for name in [name for name in sys.modules if name.partition(".")[0] == "highspy"]:
            del sys.modules[name]


def _copy(original: Path, target: Path) -> bool:
    """Copy the package with its library renamed; False where the package holds no library called `NAME`."""
    target.mkdir()
    renamed = False
    for path in original.iterdir():
        if path.suffix == ".py":
            shutil.copyfile(path, target / path.name)
        elif path.name == NAME.decode() or path.name.startswith("_core."):
            content = path.read_bytes()
            renamed |= NAME in content
            name = OTHER_NAME.decode() if path.name == NAME.decode() else path.name
            (target / name).write_bytes(content.replace(b"\0" + NAME + b"\0", b"\0" + OTHER_NAME + b"\0"))
    return renamed and (target / OTHER_NAME.decode()).exists()
