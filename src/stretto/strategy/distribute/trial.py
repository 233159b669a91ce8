# SPDX-License-Identifier: Apache-2.0
"""Trial mode: a script that calls `distribute` runs a few iterations, writes its times to a file, and ends.

``STRETTO_TRIAL=10,40,result.json`` times 40 iterations after 10 to warm up; ``STRETTO_TRIAL=describe,model.yaml``
writes the model's description. `stretto tune` sets the variable.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ...errors import InvalidInput
from ..files import model_text
from ..model import ModelSpec
from .groups import Groups

TRIAL_VARIABLE = "STRETTO_TRIAL"
EXIT_CODE = 86
"""The exit code of every rank of a finished trial."""
MAX_ITERATIONS = 1_000_000
DESCRIBE_STEPS = 5


class StepCounter:
    """Counts the steps of an optimizer, and ends the process after enough steps."""

    def __init__(self, groups: Groups, name: str, warmup: int, timed: int, result: Path) -> None:
        self.groups, self.name, self.result = groups, name, result
        self.warmup, self.timed = warmup, timed
        self._marks: list[float] = []
        self._seen = 0

    @classmethod
    def from_environment(cls, groups: Groups, name: str, describe: Callable[[], ModelSpec]) -> StepCounter | None:
        """The trial that STRETTO_TRIAL asks for.

        Args:
            groups: the communicators.
            name: name of the strategy.
            describe: returns the model's description.

        Returns:
            The trial; None if the variable is not set.

        Raises:
            InvalidInput: the variable is malformed.
        """
        text = os.environ.get(TRIAL_VARIABLE, "")
        if not text:
            return None
        kind, _, rest = text.partition(",")
        if kind == "describe" and rest:
            return Description(groups, name, Path(rest), describe)
        timed, _, path = rest.partition(",")
        if not (kind.isdigit() and timed.isdigit() and path and 1 <= int(timed) <= MAX_ITERATIONS >= int(kind)):
            raise InvalidInput(f"{TRIAL_VARIABLE}: must be WARMUP,TIMED,FILE or describe,FILE, not {text!r}")
        return cls(groups, name, int(kind), int(timed), Path(path))

    def step(self) -> None:
        """Count an iteration that has ended."""
        self._seen += 1
        if self._seen >= max(self.warmup, 1):
            self._marks.append(time.perf_counter())
        if len(self._marks) == self.timed + 1:
            self.conclude()
            self.end()

    def conclude(self) -> None:
        """Write the slowest rank's times to the file."""
        spans = [1e6 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        mean_us, median_us = (self.groups.greatest(of(spans)) for of in (statistics.fmean, statistics.median))
        written = {
            "stretto": "trial", "strategy": self.name, "ranks": self.groups.size, "iterations": self.timed,
            "iteration_us": mean_us, "median_us": median_us,
        }  # fmt: skip
        if self.groups.rank == 0:
            _write(self.result, json.dumps(written) + "\n")

    def end(self) -> NoReturn:
        """End the processes of all ranks together, once the file is written."""
        dist.barrier(group=self.groups.main)
        sys.stdout.flush()
        sys.stderr.flush()
        # os._exit also ends threads of the script (loaders, servers of stale parameters) that would keep the process.
        os._exit(EXIT_CODE)


class Description(StepCounter):
    """A trial that writes the model's spec after a few steps."""

    def __init__(self, groups: Groups, name: str, result: Path, describe: Callable[[], ModelSpec]) -> None:
        super().__init__(groups, name, 1, DESCRIBE_STEPS, result)
        self.describe = describe

    def conclude(self) -> None:
        """Write the spec to the file, and next to it a file with the host of each rank."""
        hosts = self.groups.hosts()
        if self.groups.rank == 0:
            _write(self.result.with_suffix(".hosts"), json.dumps(hosts) + "\n")
            _write(self.result, model_text(self.describe(), as_json=self.result.suffix == ".json"))


def _write(path: Path, text: str) -> None:
    """Write a file atomically, because another process may be waiting for it."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        raise InvalidInput(f"{TRIAL_VARIABLE}: {path}: {error.strerror or error}") from None
