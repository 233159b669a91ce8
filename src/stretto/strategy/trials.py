# SPDX-License-Identifier: Apache-2.0
"""Trials: a training job run for a few iterations under a strategy, started as a command that does not know of the
search.

A job that calls `stretto.torch.distribute` reads ``STRETTO_TRIAL=session,FOLDER``: it describes its model, and then
tries the strategies that are requested in the folder (`strategy.requests`), one after the other, until it is asked to
end. So a trial costs its iterations, not a start. A strategy under which the job dies or hangs is recorded, and the
job is started again for the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

import msgspec
from msgspec import Meta

from ..children import Child
from ..errors import Infeasible, InvalidInput
from ..files import convert, parse_json, read_text
from .files import load_model
from .model import ModelSpec
from .representation import Strategy
from .requests import MAX_ITERATIONS, MODEL_FILE, Arm, TrialRequest, leave, read_answer, request
from .resources import MAX_DEVICES, Resources

TRIAL = "STRETTO_TRIAL"
WARMUP, TIMED = 10, 40
SHORT_WARMUP, SHORT_SHARE, SHORT_LEAST = 3, 4, 3
"""Rounds of a comparison have many short runs: the warm-up, the divisor of the timed iterations, and their minimum."""
ENOUGH = 1.5
"""A strategy that takes this many times as long as the best so far is not timed to the end."""
MAX_HOSTS_BYTES = 1 << 20
TIMEOUT_S = 600.0
GRACE_S = 5.0
"""Seconds between asking a job to end and killing it."""
POLL_S = 0.01
TAIL_BYTES, TAIL_LINES, TAIL_CHARACTERS = 64 << 10, 3, 500
ERROR = re.compile(r"^(\[?rank ?\d+\]?:? ?)?([\w.]*(Error|Exception|InvalidInput|Infeasible)|stretto: error): ")

Times = list[float]
"""A time for each round, in microseconds."""


class TrialJob(Protocol):
    """A started job. `Trials` polls `ended` while it waits for a reply, and calls `end` when the job is no longer
    needed.
    """

    def ended(self) -> str | None:
        """None while the job runs; after its end a short text with its exit code and last output."""

    def end(self) -> str:
        """End the job and all processes that it has started; return the text of `ended`. A second call returns the same
        text.
        """


Start = Callable[[Mapping[str, str]], TrialJob]
"""``start(variables)`` starts the job with these variables added to its environment, and returns at once."""


class _Hosts(msgspec.Struct, kw_only=True):
    hosts: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]], Meta(min_length=1, max_length=MAX_DEVICES)]


class Trials:
    """Measures strategies in a job that it starts, and restarts when the job has died; used as a context manager.

    `folder` is where requests and replies are passed; rank 0 must see it under the same name. `timeout_s` applies to
    the start, and to each run of some iterations.
    """

    def __init__(
        self, start: Start, *, warmup: int = WARMUP, timed: int = TIMED, timeout_s: float = TIMEOUT_S,
        folder: str | None = None,
    ) -> None:  # fmt: skip
        for name, value, low in (("warmup", warmup, 0), ("timed", timed, 1)):
            if not low <= value <= MAX_ITERATIONS:
                raise InvalidInput(f"{name}: must be {low}..{MAX_ITERATIONS} iterations, not {value}")
        if not 0 < timeout_s < 1e7:
            raise InvalidInput(f"timeout: must be more than 0 and less than 1e7 seconds, not {timeout_s:g}")
        self.warmup, self.timed, self.timeout_s, self.folder = warmup, timed, timeout_s, folder
        self.starts = 0
        """The number of times that the job was started."""
        self._start = start
        self._job: TrialJob | None = None
        self._place: Path | None = None
        self._asked = 0
        self._least_us = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def describe(self) -> tuple[ModelSpec, Resources]:
        """The job's model, and its ranks with their hosts."""
        try:
            path = self._running() / MODEL_FILE
        except _Lost as lost:
            raise Infeasible(
                f"the job did not describe its model; does it call stretto.torch.distribute and take 6 steps? {lost}"
            ) from None
        plain = parse_json(read_text(path.with_suffix(".hosts"), max_bytes=MAX_HOSTS_BYTES), where="hosts")
        hosts = convert({"hosts": plain}, _Hosts, where="hosts").hosts
        return load_model(path), named(hosts)

    def run(self, arm: Arm) -> float:
        """Microseconds of an iteration: the slowest rank's median. Raises `Infeasible` if the strategy did not run."""
        (found,) = self.measure(
            [arm], rounds=1, warmup=self.warmup, timed=self.timed, enough_us=ENOUGH * self._least_us
        )
        if isinstance(found, Infeasible):
            raise found
        self._least_us = min(self._least_us or found[0], found[0])
        return found[0]

    @property
    def places(self) -> int:
        """The number of jobs at a time, which is 1."""
        return 1

    def run_all(self, arms: Sequence[Arm]) -> list[float | Infeasible]:
        """Measure each contestant in one run; if the job dies with one, it is started again for the next."""
        found: list[float | Infeasible] = []
        for arm in arms:
            try:
                found.append(self.run(arm))
            except Infeasible as error:
                found.append(error)
        return found

    def rounds(self, arms: Sequence[Arm], rounds: int) -> list[Times | Infeasible]:
        """Measure several contestants in turn, each in a short run per round; all of them fail if the job dies with
        one.
        """
        timed = min(self.timed, max(self.timed // SHORT_SHARE, SHORT_LEAST))
        return self.measure(arms, rounds=rounds, warmup=min(self.warmup, SHORT_WARMUP), timed=timed)

    def measure(
        self, arms: Sequence[Arm], *, rounds: int, warmup: int, timed: int, enough_us: float = 0.0
    ) -> list[Times | Infeasible]:
        """Measure several contestants in turn, in several rounds.

        Args:
            arms: strategies and references.
            rounds: number of rounds, 1..1024.
            warmup: iterations before timing, in each round.
            timed: timed iterations in each round.
            enough_us: time of an iteration beyond which a contestant is not timed any further; 0 times all to the end.

        Returns:
            For each contestant its times in microseconds, one per round, or the error.

        Raises:
            InvalidInput: the job's reply does not fit the request.
        """
        limit_s = self.timeout_s * len(arms) * rounds
        try:
            place = self._running()
            answer = place / f"{self._asked}.answer"
            asked = request(arms, rounds=rounds, warmup=warmup, timed=timed, enough_us=enough_us)
            leave(asked, place / f"{self._asked}.json")
            self._asked += 1
            self._until(answer, limit_s)
        except _Lost as lost:
            return [Infeasible(f"the job left no result: {lost}") for _ in arms]
        found = read_answer(answer)
        if len(found.times_us) != len(arms) or len(found.why) != len(arms):
            raise InvalidInput(f"answer: must be about {len(arms)} strategies")
        measured: list[Times | Infeasible] = []
        for arm, times, why in zip(arms, found.times_us, found.why, strict=True):
            if isinstance(arm, Strategy) and len(arm.devices) != found.ranks:
                why = f"the job has {found.ranks} ranks, the strategy {len(arm.devices)}"
            measured.append(times if len(times) == rounds and not why else Infeasible(why or "it was not measured"))
        return measured

    def _running(self) -> Path:
        """The folder of a job that waits for requests; starts the job if there is none."""
        if self._job is not None and self._job.ended() is not None:
            self.close()
        if self._job is None:
            self._place = Path(tempfile.mkdtemp(prefix="stretto-tune-", dir=self.folder))
            self._asked = 0
            self.starts += 1
            self._job = self._start({TRIAL: f"session,{self._place}"})
            self._until(self._place / MODEL_FILE, self.timeout_s)
        assert self._place is not None
        return self._place

    def _until(self, path: Path, limit_s: float) -> None:
        """Wait for a file that the job writes; end the job and raise if it does not come."""
        assert self._job is not None
        deadline = time.monotonic() + limit_s
        while not path.exists():
            said = self._job.ended()
            # The file may have been written just before the job ended.
            if said is not None and not path.exists():
                self.close()
                over = said.startswith("exit code 0:")
                raise _Lost(f"the script ended by itself, let it train for longer; {said}" if over else said)
            if time.monotonic() > deadline:
                said = self.close()
                raise _Lost(f"ended after {limit_s:g} s: {said}")
            time.sleep(POLL_S)

    def close(self) -> str:
        """Ask the job to end, and kill it if it does not; return its last output."""
        job, place = self._job, self._place
        self._job = self._place = None
        said = ""
        try:
            if job is not None and place is not None:
                if job.ended() is None:
                    with contextlib.suppress(OSError):
                        leave(TrialRequest(), place / f"{self._asked}.json")
                said = job.end()
        finally:
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
        return said


class _Lost(Exception):
    """The job ended, or was ended, without a reply."""


def named(hosts: Sequence[int]) -> Resources:
    """Resources of ranks with the hosts that they run on: ``h0.rank0``, ``h0.rank1``, ...

    >>> named([0, 0, 1]).devices
    ('h0.rank0', 'h0.rank1', 'h1.rank2')
    """
    return Resources(devices=tuple(f"h{host}.rank{rank}" for rank, host in enumerate(hosts)), hosts=tuple(hosts))


def command(words: Sequence[str]) -> Start:
    """A command to run on this machine; ending the job ends everything that the command has started."""
    if not words or shutil.which(words[0]) is None:
        raise InvalidInput(f"command: {words[0] if words else ''!r} is not an executable file or a command")
    return lambda variables: _Command(words, variables)


class _Command:
    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        self._heard = tempfile.TemporaryFile()  # noqa: SIM115, open as long as the job is
        self._process = Child(
            words, stdout=self._heard, stderr=subprocess.STDOUT, environment=os.environ | dict(variables)
        )
        self._said: str | None = None

    def ended(self) -> str | None:
        if self._said is None and self._process.ends_within(0.0):
            self.end()
        return self._said

    def end(self) -> str:
        if self._said is None:
            code = self._process.end_all(GRACE_S)
            self._said = f"exit code {code}: {_tail(self._heard.fileno())}"
            self._heard.close()
        return self._said


def _tail(file: int) -> str:
    """The first error in the last output, since launchers print much after it; without an error, the last lines."""
    size = os.fstat(file).st_size
    text = os.pread(file, TAIL_BYTES, max(size - TAIL_BYTES, 0)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    error = next((line for line in lines if ERROR.search(line)), None)
    return (error or " | ".join(lines[-TAIL_LINES:]))[:TAIL_CHARACTERS] or "nothing was said"


__all__ = ["TIMED", "WARMUP", "TrialJob", "Start", "Times", "Trials", "command", "named"]
