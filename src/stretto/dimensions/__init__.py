# SPDX-License-Identifier: Apache-2.0
"""Collectives over multi-dimensional networks: schedules that say which dimension each chunk visits when."""

from . import files, schedule
from .balance import best_us, resolve, stretto
from .discovery import discover
from .model import Dim, dims_of, ideal_us, split
from .schedule import DimChunk, DimSchedule
from .schedulers import baseline, themis
from .simulation import DimRun, simulate

__all__ = [
    "DimChunk", "Dim", "DimRun", "DimSchedule", "baseline", "best_us", "dims_of", "discover", "ideal_us", "resolve",
    "simulate", "split", "stretto", "themis",
]  # fmt: skip

schedule.LOAD.supply(files.load)
schedule.SAVE.supply(files.save)
schedule.DIGEST.supply(files.digest)
