# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: the ordered actions of every rank of a pipeline."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from ..errors import InvalidInput
from ..files import read_text, write_file
from .actions import COMPUTE, MAX_MICROBATCHES, MAX_STAGES, RECEIVES, SENDS, Action

MAX_RANKS = 1024
MAX_ACTIONS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """For every rank of the pipeline its actions in order; one rank may hold several stages.

    >>> two = Schedule.from_csv("0F0,0F1,0B0,0B1" + chr(10) + "1F0,1B0,1F1,1B1", name="1f1b")
    >>> two
    <Schedule 1f1b: 2 stages on 2 ranks, 2 micro-batches, 8 actions, no communication>
    >>> two.ranks[1]
    (1F0, 1B0, 1F1, 1B1)
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.ranks) <= MAX_RANKS:
            raise InvalidInput(f"ranks: must be 1..{MAX_RANKS}, not {len(self.ranks)}")
        if (count := sum(len(row) for row in self.ranks)) > MAX_ACTIONS:
            raise InvalidInput(f"actions: {count} is over {MAX_ACTIONS}")
        home: dict[int, int] = {}
        for rank, row in enumerate(self.ranks):
            if not row:
                raise InvalidInput(f"ranks[{rank}]: has no actions")
            for at, action in enumerate(row):
                if home.setdefault(action.stage, rank) != rank:
                    raise InvalidInput(
                        f"ranks[{rank}][{at}] ({action}): stage {action.stage} is on rank {home[action.stage]}"
                    )
        missing = next((stage for stage in range(len(home)) if stage not in home), None)
        if missing is not None:
            raise InvalidInput(f"stages: {missing} is missing; there are {', '.join(map(str, sorted(home)[:8]))}")

    @cached_property
    def stage_rank(self) -> tuple[int, ...]:
        """The rank of each stage."""
        home = {action.stage: rank for rank, row in enumerate(self.ranks) for action in row}
        return tuple(home[stage] for stage in sorted(home))

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.stage_rank)

    @cached_property
    def num_microbatches(self) -> int:
        """How many micro-batches an iteration has."""
        return 1 + max(action.microbatch for row in self.ranks for action in row)

    @cached_property
    def has_comms(self) -> bool:
        """Whether the schedule has sends and receives."""
        return any(action.kind in SENDS or action.kind in RECEIVES for row in self.ranks for action in row)

    def compute_only(self) -> Schedule:
        """This schedule without communication and without the actions of a whole stage (`WHOLE`)."""
        rows = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in self.ranks)
        return Schedule(name=self.name, ranks=rows)

    def renamed(self, name: str) -> Schedule:
        """This schedule under another name."""
        return Schedule(name=name, ranks=self.ranks)

    def to_csv(self) -> str:
        """One line per rank, as ``_PipelineScheduleRuntime._load_csv`` reads it.

        With communication its format is ``compute_comms``, without it ``compute_only``.
        """
        return "".join(",".join(map(str, row)) + "\n" for row in self.ranks)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> Schedule:
        """Read one line per rank; empty cells (bubbles) are skipped."""
        rows: list[tuple[Action, ...]] = []
        count = 0
        try:
            lines = list(islice(csv.reader(io.StringIO(text)), MAX_RANKS + 1))
        except csv.Error as error:
            raise InvalidInput(f"{name}: is not a CSV file: {error}") from None
        for rank, cells in enumerate(lines):
            if rank >= MAX_RANKS:
                raise InvalidInput(f"{name}: more than {MAX_RANKS} ranks")
            count += len(cells)
            if count > MAX_ACTIONS:
                raise InvalidInput(f"{name}: more than {MAX_ACTIONS} actions")
            row = [
                Action.parse(cell, f"{name}: line {rank + 1}, cell {at + 1}")
                for at, cell in enumerate(cells)
                if cell.strip()
            ]
            rows.append(tuple(row))
        while rows and not rows[-1]:
            rows.pop()
        return cls(name=name, ranks=tuple(rows))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule from a CSV file; its name is the file's."""
        return cls.from_csv(read_text(path), name=Path(path).stem)

    def save(self, path: str | Path) -> None:
        """Write the schedule to a CSV file."""
        write_file(path, self.to_csv())

    def __repr__(self) -> str:
        actions = sum(len(row) for row in self.ranks)
        comms = "with" if self.has_comms else "no"
        return (
            f"<Schedule {self.name}: {self.num_stages} stages on {len(self.ranks)} ranks, {self.num_microbatches} "
            f"micro-batches, {actions} actions, {comms} communication>"
        )


def check_counts(stages: int, microbatches: int) -> None:
    """Raise `InvalidInput` for numbers of stages or micro-batches that no schedule can have."""
    for name, value, most in (("stages", stages, MAX_STAGES), ("microbatches", microbatches, MAX_MICROBATCHES)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InvalidInput(f"{name}: must be 1..{most}, not {value!r}")
    if stages * microbatches * 9 > MAX_ACTIONS:
        raise InvalidInput(f"microbatches: {stages} stages x {microbatches} are over {MAX_ACTIONS // 9} together")


def per_stage(name: str, values: int | Sequence[int], stages: int, low: int, high: int) -> tuple[int, ...]:
    """One number per stage, from one number for all stages or from one number for each.

    Args:
        name: name of the argument, for errors.
        values: one number, or one per stage.
        stages: number of stages.
        low: smallest valid number.
        high: largest valid number.

    Returns:
        As many numbers as there are stages.

    Raises:
        InvalidInput: a number is outside low..high, or there is not one per stage.
    """
    numbers: Iterable[int] = (values,) * stages if isinstance(values, int) else values
    found = tuple(numbers)
    if len(found) != stages:
        raise InvalidInput(f"{name}: {len(found)} numbers for {stages} stages")
    for at, number in enumerate(found):
        if not low <= number <= high:
            raise InvalidInput(f"{name}[{at}]: must be {low}..{high}, not {number}")
    return found
