# SPDX-License-Identifier: Apache-2.0
"""Real jobs of several processes, bounded in time."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from warm import Started

from stretto.workload import Workload

Outcome = Workload | str
"""What one rank got: a workload, or the message of the error."""
Job = Callable[..., dict[str, list[Any]]]

LIMIT_S = 600.0
JOBS = Path(__file__).parents[1] / "jobs"
EXAMPLES = Path(__file__).parents[2] / "examples"


def launch(
    session: pytest.Session, script: str, folder: Path, *, ranks: int, reporting: int = 0
) -> dict[str, list[Any]]:
    """Run the scenarios of a job script on some ranks; what each rank (or the first `reporting`) says, by scenario.

    Where tests were asked for by name, only the scenarios that they need are run. A rank that fails or hangs takes the
    whole job down, with its output in the assertion.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    environment["STRETTO_TEST_WORDS"] = json.dumps(words_of(session, script))
    process = Started(JOBS / script, [str(folder), str(ranks)], env=os.environ | environment, log=log)
    try:
        code: int | str = process.wait(LIMIT_S)
    except TimeoutError:
        code = f"none after {LIMIT_S:g} s"
    finally:
        process.end()
    assert code == 0, f"exit code {code}\n{log.read_text()[-6000:]}"
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(reporting or ranks)]
    return {name: [_read(report[name]) for report in reports] for name in reports[0]}


def _read(report: Any) -> Any:
    if isinstance(report, dict) and "ops" in report:
        return msgspec.convert(report, Workload)
    return report


def words_of(session: pytest.Session, script: str) -> list[list[str]]:
    """The strings of each test that needs a script, among which are the names of its scenarios; none: run all."""
    asked = session.config.getoption("keyword") or any("::" in argument for argument in session.config.args)
    if not asked:
        return []
    found = []
    for item in session.items:
        if isinstance(item, pytest.Function) and item.module is not None and script in inspect.getsource(item.module):
            given = item.callspec.params.values() if hasattr(item, "callspec") else ()
            strings = re.findall(r"""["']([^"'\n]+)["']""", inspect.getsource(item.function))
            found.append([*strings, *(value for value in given if isinstance(value, str))])
    return found


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest) -> Job:
    """Run a job script of `tests/jobs`."""
    return partial(launch, request.session)
