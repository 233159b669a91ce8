"""Trials: a training job run for a few iterations under a strategy, as a command that knows nothing of the search.

A job that calls `stretto.distribute` does what two environment variables say. ``STRETTO_STRATEGY`` names the file of
the strategy; ``STRETTO_TRIAL=10,40,FILE`` asks for 10 iterations to warm up and 40 timed ones, the result in a file,
and the end; ``STRETTO_TRIAL=describe,FILE`` asks for the model, and beside it for the host of each rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import Infeasible, InvalidInput
from ..files import convert, parse_json, read_text
from .files import load_model, save_strategy
from .model import ModelSpec
from .representation import Strategy
from .resources import MAX_DEVICES, Resources

STRATEGY, TRIAL = "STRETTO_STRATEGY", "STRETTO_TRIAL"
WARMUP, TIMED = 10, 40
MAX_ITERATIONS = 100_000
MAX_RESULT_BYTES = 1 << 20
TIMEOUT_S = 600.0
GRACE_S = 5.0
"""Between being asked to end and being killed."""
TAIL_BYTES, TAIL_LINES = 4096, 3

Launch = Callable[[Mapping[str, str], float], str]
"""Runs the job with these variables added to its environment, at most so many seconds; returns its last words."""


class _Result(msgspec.Struct, kw_only=True):
    """What a job leaves; other fields are for people."""

    ranks: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    median_us: Annotated[float, Meta(gt=0, lt=1e12)]


class _Hosts(msgspec.Struct, kw_only=True):
    hosts: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]], Meta(min_length=1, max_length=MAX_DEVICES)]


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Runs a job under strategies; each run has a folder of its own that is gone afterwards.

    `folder`: where those are made, which every rank must be able to read (and rank 0 to write).
    """

    launch: Launch
    warmup: int = WARMUP
    timed: int = TIMED
    timeout_s: float = TIMEOUT_S
    folder: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("warmup", 0), ("timed", 1)):
            if not low <= getattr(self, name) <= MAX_ITERATIONS:
                raise InvalidInput(f"{name}: must be {low}..{MAX_ITERATIONS} iterations, not {getattr(self, name)}")
        if not 0 < self.timeout_s < 1e7:
            raise InvalidInput(f"timeout: must be more than 0 and less than 1e7 seconds, not {self.timeout_s:g}")

    def describe(self) -> tuple[ModelSpec, Resources]:
        """The job's model, and its ranks with their hosts."""
        with self._folder() as folder:
            path = folder / "model.json"
            said = self.launch({TRIAL: f"describe,{path}"}, self.timeout_s)
            if not path.exists():
                raise Infeasible(
                    f"the job did not describe its model; does it call stretto.distribute and take 6 steps? {said}"
                )
            plain = parse_json(read_text(path.with_suffix(".hosts"), max_bytes=MAX_RESULT_BYTES), where="hosts")
            hosts = convert({"hosts": plain}, _Hosts, where="hosts").hosts
            return load_model(path), named(hosts)

    def run(self, strategy: Strategy) -> float:
        """How many microseconds an iteration takes: the slowest rank's median. `Infeasible` when it did not run."""
        with self._folder() as folder:
            save_strategy(strategy, folder / "strategy.json")
            path = folder / "result.json"
            said = self.launch(
                {STRATEGY: str(folder / "strategy.json"), TRIAL: f"{self.warmup},{self.timed},{path}"}, self.timeout_s
            )
            if not path.exists():
                raise Infeasible(f"the job left no result: {said}")
            plain = parse_json(read_text(path, max_bytes=MAX_RESULT_BYTES), where="result")
        result = convert(plain, _Result, where="result")
        if result.ranks != len(strategy.devices):
            raise Infeasible(f"the job has {result.ranks} ranks, the strategy {len(strategy.devices)}")
        return result.median_us

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="stretto-tune-", dir=self.folder) as name:
            yield Path(name)


def named(hosts: Sequence[int]) -> Resources:
    """Ranks with the hosts that they run on: ``h0.rank0``, ``h0.rank1``, ...

    >>> named([0, 0, 1]).devices
    ('h0.rank0', 'h0.rank1', 'h1.rank2')
    """
    return Resources(devices=tuple(f"h{host}.rank{rank}" for rank, host in enumerate(hosts)), hosts=tuple(hosts))


def command(words: Sequence[str]) -> Launch:
    """A command to run on this machine; when time is up it ends with everything that it has started."""
    if not words or shutil.which(words[0]) is None:
        raise InvalidInput(f"command: {words[0] if words else ''!r} is not an executable file or a command")

    def launch(variables: Mapping[str, str], timeout_s: float) -> str:
        with tempfile.TemporaryFile() as heard:
            # Its own session, so that ranks end with what started them.
            process = subprocess.Popen(
                words, env=os.environ | dict(variables), stdin=subprocess.DEVNULL, stdout=heard,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout_s)
                said = f"exit code {code}"
            except subprocess.TimeoutExpired:
                said = f"ended after {timeout_s:g} s"
            finally:
                _end(process)
            return f"{said}: {_tail(heard.fileno())}"

    return launch


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            if number == signal.SIGTERM:
                break


def _tail(file: int) -> str:
    size = os.fstat(file).st_size
    text = os.pread(file, TAIL_BYTES, max(size - TAIL_BYTES, 0)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:]) or "nothing was said"




__all__ = ["TIMED", "WARMUP", "Launch", "Trials", "command", "named"]
