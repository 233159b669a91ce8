# SPDX-License-Identifier: Apache-2.0
"""Requests of a search to a job that it keeps running, and the job's replies: one file each, in a common folder.

The job first writes ``model.json`` and ``model.hosts``. Request ``3.json`` is answered by ``3.answer``; a request
without arms asks the job to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..files import convert, parse_json, plain, read_text
from .files import read_strategy, strategy_text
from .representation import Strategy
from .resources import MAX_DEVICES

MODEL_FILE = "model.json"
MAX_ITERATIONS = 100_000
MAX_ARMS, MAX_ROUNDS = 1024, 1024
MAX_BYTES = 256 << 20
DDP_BUCKET_MB = 25.0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A script without any strategy: PyTorch's DistributedDataParallel, in buckets of this size.

    >>> Reference().name, Reference(bucket_mb=1.0).name
    ('DDP', 'DDP, bucket_mb=1')
    """

    bucket_mb: float = DDP_BUCKET_MB

    @property
    def name(self) -> str:
        """A name for people to read."""
        return "DDP" if self.bucket_mb == DDP_BUCKET_MB else f"DDP, bucket_mb={self.bucket_mb:g}"


Arm = Strategy | Reference
"""A contestant that can be measured: a strategy, or plain DDP."""


class _Arm(msgspec.Struct, kw_only=True):
    strategy: str = ""
    ddp_mb: Annotated[float, Meta(ge=0, le=1e6)] = 0.0


class TrialRequest(msgspec.Struct, kw_only=True):
    """A request to measure arms one after the other, in several rounds; each with some warm-up and some timed
    iterations.
    """

    arms: Annotated[list[_Arm], Meta(max_length=MAX_ARMS)] = []
    rounds: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)] = 1
    warmup: Annotated[int, Meta(ge=0, le=MAX_ITERATIONS)] = 0
    timed: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)] = 1
    enough_us: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """An arm that takes longer than this after a few iterations is not timed any further; 0: all arms are."""

    def arm(self, at: int) -> Arm:
        """The strategy or reference at an index."""
        one = self.arms[at]
        return read_strategy(one.strategy, as_json=True) if one.strategy else Reference(bucket_mb=one.ddp_mb)


class TrialReply(msgspec.Struct, kw_only=True):
    """The slowest rank's median of every arm in every round (microseconds), or the reason why there is none."""

    ranks: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    times_us: Annotated[list[list[Annotated[float, Meta(gt=0, lt=1e12)]]], Meta(max_length=MAX_ARMS)]
    why: Annotated[list[str], Meta(max_length=MAX_ARMS)]


def request(arms: Sequence[Arm], *, rounds: int, warmup: int, timed: int, enough_us: float = 0.0) -> TrialRequest:
    """A request for measurements.

    Args:
        arms: strategies and references; none asks the job to end.
        rounds: number of rounds, 1..1024.
        warmup: iterations before timing, 0..100000.
        timed: timed iterations, 1..100000.
        enough_us: time of an iteration beyond which an arm is not timed any further; 0 times all to the end.

    Returns:
        The request.
    """
    asked = [
        _Arm(ddp_mb=arm.bucket_mb) if isinstance(arm, Reference) else _Arm(strategy=strategy_text(arm, as_json=True))
        for arm in arms
    ]
    return TrialRequest(arms=asked, rounds=rounds, warmup=warmup, timed=timed, enough_us=enough_us)


def leave(found: TrialRequest | TrialReply, path: Path) -> None:
    """Write a file atomically, because the other side is waiting for it."""
    beside = path.with_name(f".{path.name}.part")
    # An arm is a strategy or a bucket size; the field of the other kind is omitted.
    beside.write_bytes(msgspec.json.encode(plain(msgspec.structs.asdict(found))))
    beside.replace(path)


def read_request(path: Path) -> TrialRequest:
    """Read a request from its file."""
    return convert(parse_json(read_text(path, max_bytes=MAX_BYTES), where="request"), TrialRequest, where="request")


def read_answer(path: Path) -> TrialReply:
    """Read a reply from its file."""
    return convert(parse_json(read_text(path, max_bytes=MAX_BYTES), where="answer"), TrialReply, where="answer")


__all__ = [
    "DDP_BUCKET_MB",
    "MAX_ITERATIONS",
    "MODEL_FILE",
    "TrialReply",
    "Arm",
    "Reference",
    "TrialRequest",
    "leave",
    "read_answer",
    "read_request",
    "request",
]
