"""Trial mode: a script that calls `distribute` runs a few iterations, leaves what was found in a file, and ends.

``STRETTO_TRIAL=10,40,result.json`` times 40 iterations after 10 to warm up; ``STRETTO_TRIAL=describe,model.yaml``
writes what strategies need to know of the model. `stretto tune` sets it.
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
"""How every rank of a finished trial ends."""
MAX_ITERATIONS = 1_000_000
DESCRIBE_STEPS = 5


class StepCounter:
    """Counts the steps of an optimizer, and ends the process when there were enough."""

    def __init__(self, groups: Groups, name: str, warmup: int, timed: int, result: Path) -> None:
        self.groups, self.name, self.result = groups, name, result
        self.warmup, self.timed = warmup, timed
        self._marks: list[float] = []
        self._seen = 0

    @classmethod
    def from_environment(cls, groups: Groups, name: str, describe: Callable[[], ModelSpec]) -> StepCounter | None:
        """What STRETTO_TRIAL asks for; None without it."""
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
        """An iteration has ended."""
        self._seen += 1
        if self._seen >= max(self.warmup, 1):
            self._marks.append(time.perf_counter())
        if len(self._marks) == self.timed + 1:
            self.conclude()
            self.end()

    def conclude(self) -> None:
        """The slowest rank's times into the file."""
        spans = [1e6 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        mean_us, median_us = (self.groups.greatest(of(spans)) for of in (statistics.fmean, statistics.median))
        written = {
            "stretto": "trial", "strategy": self.name, "ranks": self.groups.size, "iterations": self.timed,
            "iteration_us": mean_us, "median_us": median_us,
        }  # fmt: skip
        if self.groups.rank == 0:
            _write(self.result, json.dumps(written) + "\n")

    def end(self) -> NoReturn:
        """All ranks end together, once the file is there."""
        dist.barrier(group=self.groups.main)
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of the script (loaders, servers of stale parameters) must not keep the process.
        os._exit(EXIT_CODE)


class Description(StepCounter):
    """Writes the model's spec after a few steps."""

    def __init__(self, groups: Groups, name: str, result: Path, describe: Callable[[], ModelSpec]) -> None:
        super().__init__(groups, name, 1, DESCRIBE_STEPS, result)
        self.describe = describe

    def conclude(self) -> None:
        """The spec into the file, and beside it the number of each rank's host."""
        hosts = self.groups.hosts()
        if self.groups.rank == 0:
            _write(self.result.with_suffix(".hosts"), json.dumps(hosts) + "\n")
            _write(self.result, model_text(self.describe(), as_json=self.result.suffix == ".json"))


def _write(path: Path, text: str) -> None:
    """Whole or not at all: somebody may be looking."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        raise InvalidInput(f"{TRIAL_VARIABLE}: {path}: {error.strerror or error}") from None
