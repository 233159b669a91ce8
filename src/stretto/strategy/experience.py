# SPDX-License-Identifier: Apache-2.0
"""What searches have found, kept in a file for the next one, of another model or on another cluster.

A search leaves a `PastSearch`: for each trial the features that every model and cluster has, its time, and the `Habit`
that the strategy follows. A later search begins with the habits that were best where the usual strategy looked most
alike, and its prior is the estimate corrected by how much estimates were wrong before, as far as that was of use: the
correction is scaled by how well it predicts each past search from all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ..errors import InvalidInput
from ..files import convert, parse_json, read_text, write_file
from .cost import Floats
from .habits import Habit

VERSION = 1
MAX_SEARCHES, MAX_TRIALS = 64, 64
"""What a file keeps: the latest searches, and the first trials of each."""
NEAREST = 12
"""The number of past searches that a new one learns from: those that looked most alike."""
ALONE = 0.5
"""The share of the correction that counts when there is one past search, which nothing can check."""
NOISE = 0.1
"""Standard deviation of a logarithm of time that the features do not explain."""

Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=256)]


@dataclass(frozen=True, kw_only=True)
class PastTrial:
    """One run: features that all models have, the logarithm of its time over the usual strategy's, and its habit."""

    vector: Numbers
    slower: Number
    habit: Habit


@dataclass(frozen=True, kw_only=True)
class PastSearch:
    """One search; the features of the usual strategy, beside all trials (the usual strategy is one of them)."""

    model: Annotated[str, Meta(max_length=4096)]
    devices: Annotated[int, Meta(ge=1, le=1 << 16)]
    hosts: Annotated[int, Meta(ge=1, le=1 << 16)]
    names: Annotated[tuple[str, ...], Meta(max_length=256)]
    usual: Numbers
    trials: Annotated[tuple[PastTrial, ...], Meta(max_length=MAX_TRIALS)]

    @property
    def place(self) -> Floats:
        """Where a search stands among others: what the usual strategy's time is made of, and how many ranks there are.

        The first seven features are logarithms of times, the estimate first.
        """
        times = np.array(self.usual[:7])
        return np.array([*(times[1:] - times[0]), np.log(self.devices), np.log(self.hosts)])


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Past searches, the oldest first."""

    searches: Annotated[tuple[PastSearch, ...], Meta(max_length=MAX_SEARCHES)] = ()
    stretto: Literal["experience"] = "experience"
    version: Literal[1] = field(default=1)

    @classmethod
    def load(cls, path: str | Path) -> Experience:
        """The experience in a file; raises `InvalidInput` if it cannot be read."""
        found = convert(parse_json(read_text(path), where=str(path)), Experience, where=str(path))
        for at, search in enumerate(found.searches):
            width = len(search.names)
            if len(search.usual) != width or any(len(trial.vector) != width for trial in search.trials):
                raise InvalidInput(f"{path}: $.searches[{at}]: every vector must have the {width} features of `names`")
        return found

    def save(self, path: str | Path) -> None:
        """Write it to a file, whole or not at all."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self), indent=1))

    def plus(self, search: PastSearch) -> Experience:
        """This experience and one more search; the oldest one is left out where there are too many."""
        return Experience(searches=(*self.searches, search)[-MAX_SEARCHES:])

    def nearest(self, here: PastSearch) -> tuple[PastSearch, ...]:
        """The past searches with the same features, those that look most alike first."""
        known = [past for past in self.searches if past.names == here.names and len(past.trials) > 1]
        return tuple(sorted(known, key=lambda past: float(((past.place - here.place) ** 2).sum()))[:NEAREST])


class Hint:
    """The correction of estimates that past searches suggest for the strategies of a new one.

    Args:
        past: past searches with the features of `here`.
        here: the new search; only its features and its usual strategy count.
    """

    def __init__(self, past: Sequence[PastSearch], here: PastSearch) -> None:
        self._here = here
        self._length = 1.0
        self._rows: Floats = np.zeros((0, 1))
        self._pull: Floats = np.zeros(0)
        self.share = 0.0
        """How much of the correction counts, 0..1."""
        if not past:
            return
        tables = [_rows(one, np.array([trial.vector for trial in one.trials])) for one in past]
        wrong = [_wrong(one) for one in past]
        self.share = ALONE if len(past) < 2 else self._checked(tables, wrong)
        self._fit(np.concatenate(tables), np.concatenate(wrong))

    def __call__(self, vectors: Floats) -> Floats:
        """What to add to a utility (a logarithm of speed) for each feature vector."""
        if not len(self._pull) or self.share == 0.0:
            return np.zeros(len(vectors))
        rows = _rows(self._here, vectors[:, : len(self._here.names)])
        return np.asarray(self.share * (_kernel(rows, self._rows, self._length) @ self._pull))

    def _fit(self, rows: Floats, wrong: Floats) -> None:
        gaps = ((rows[:, None] - rows[None]) ** 2).sum(-1)
        self._length = max(float(np.median(gaps)), 1e-6)
        self._rows = rows
        kernel = _kernel(rows, rows, self._length) + NOISE * np.eye(len(rows))
        self._pull = np.asarray(np.linalg.solve(kernel, wrong))

    def _checked(self, tables: Sequence[Floats], wrong: Sequence[Floats]) -> float:
        """How well each search is predicted from the others: the best share, 0..1."""
        said, truth = [], []
        for at in range(len(tables)):
            self._fit(
                np.concatenate([rows for other, rows in enumerate(tables) if other != at]),
                np.concatenate([each for other, each in enumerate(wrong) if other != at]),
            )
            guess = _kernel(tables[at], self._rows, self._length) @ self._pull
            said.append(guess - guess.mean())
            truth.append(wrong[at])
        a, b = np.concatenate(said), np.concatenate(truth)
        return float(np.clip(a @ b / max(float(a @ a), 1e-12), 0.0, 1.0))


def _rows(search: PastSearch, vectors: Floats) -> Floats:
    """Comparable features: against the usual strategy's, beside where the search stands."""
    change = vectors - np.array(search.usual)
    return np.hstack([change, np.tile(0.5 * search.place, (len(vectors), 1))])


def _wrong(search: PastSearch) -> Floats:
    """How much faster each trial was than its estimate said, against the mean of its search."""
    vectors = np.array([trial.vector for trial in search.trials])
    faster = -np.array([trial.slower for trial in search.trials]) + (vectors[:, 0] - search.usual[0])
    return np.asarray(faster - faster.mean())


def _kernel(a: Floats, b: Floats, length: float) -> Floats:
    return np.asarray(np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2.0 * length)))


__all__ = ["Experience", "Hint", "PastSearch", "PastTrial"]
