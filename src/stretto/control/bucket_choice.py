# SPDX-License-Identifier: Apache-2.0
"""DDP's buckets, chosen by `stretto run` itself: what one start of a job has recorded decides for the next.

DDP makes its buckets when it wraps a model, before anything was recorded. So with ``STRETTO_BUCKET_MB=auto`` the step
is planned with buckets of other sizes when the job has ended, and the best size is kept for the same command.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import InvalidInput, StrettoError
from ..files import convert, parse_json, read_text, write_file
from ..planner.buckets import BucketPrediction, best_of, buckets_of, compare_buckets
from .bucket_size import AUTO, OPTION
from .messages import CapturedStep, decode_captured
from .transport import private_folder
from .worker import costs_of

MIB = 1 << 20
SIZES_MB = (1, 4, 10, 25, 50)
"""What is tried beside the recorded buckets; DDP's own choice is 25."""
ENDING = ".buckets.json"
MAX_FILE_BYTES = 1 << 12


class KeptBuckets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size for the next start of a command."""

    stretto: Literal["kept buckets"] = "kept buckets"
    version: Literal[1] = 1
    cap_mb: Annotated[float, Meta(gt=0, le=1 << 20)]


def asked() -> bool:
    """Whether buckets are to be chosen."""
    return os.environ.get(OPTION, "").strip().lower() == AUTO


def kept_size(folder: Path | None, command: Sequence[str]) -> str:
    """What `STRETTO_BUCKET_MB` is to be for a start of a command: the kept size, or empty where none is kept."""
    if folder is None:
        return ""
    path = _path(folder, command)
    with contextlib.suppress(OSError, StrettoError):
        if path.is_file():
            private_folder(folder)
            text = read_text(path, max_bytes=MAX_FILE_BYTES)
            return f"{convert(parse_json(text, where='file'), KeptBuckets, where='file').cap_mb:g}"
    return ""


def choose(captured: CapturedStep, budget_s: float) -> tuple[BucketPrediction, BucketPrediction] | None:
    """Plan the recorded step with other buckets.

    Args:
        captured: The step, the cluster, and what collectives took.
        budget_s: Seconds for all plans together.

    Returns:
        The recorded buckets, and the best ones (the same where none is better by 1 %); None where the step has no
        buckets of DDP's that could be changed.
    """
    workload, cluster = decode_captured(captured)
    total = sum(op.nbytes for op in buckets_of(workload))
    # Sizes beyond all gradients are one bucket, as the smallest of them is.
    sizes = [size * MIB for size in SIZES_MB]
    sizes = [size for at, size in enumerate(sizes) if not at or sizes[at - 1] < total]
    try:
        found = compare_buckets(workload, cluster, sizes, budget_s=budget_s, costs=costs_of(captured, {}))
    except InvalidInput:
        return None
    return found[0], best_of(found)


def keep(folder: Path, command: Sequence[str], cap_mb: float) -> None:
    """Leave a size to the next start of a command.

    Args:
        folder: Where plans are kept.
        command: What starts the job.
        cap_mb: The size, in MiB.

    Raises:
        InvalidInput: The folder cannot be written, or is not this user's alone.
    """
    try:
        private_folder(folder)
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror}") from error
    write_file(_path(folder, command), msgspec.json.encode(KeptBuckets(cap_mb=cap_mb)) + b"\n")


def _path(folder: Path, command: Sequence[str]) -> Path:
    name = hashlib.sha256("\0".join([os.getcwd(), *command]).encode(errors="surrogateescape")).hexdigest()[:32]
    return folder / f"{name}{ENDING}"
