# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the files of recorded traces, which are large and have a size limit of their own."""

from __future__ import annotations

import gzip
import re
import stat
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import InvalidInput
from ..files import is_folder, usable_path

MAX_TRACE_BYTES = 1 << 30
MAX_RANK_FILES = 4096
_GZIP = b"\x1f\x8b"


def read_bytes(path: Path) -> bytes:
    """The content of a trace, decompressed if it is gzip.

    Raises `InvalidInput` if the file is missing or, compressed or not, too large.
    """
    usable_path(path)
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise InvalidInput(f"{path}: not a regular file")
        if about.st_size > MAX_TRACE_BYTES:
            raise InvalidInput(f"{path}: {about.st_size} bytes is more than the limit of {MAX_TRACE_BYTES}")
        data = path.read_bytes()
        if not data.startswith(_GZIP):
            return data
        with gzip.open(path) as packed:
            data = packed.read(MAX_TRACE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInput(f"{path}: not a whole gzip file: {error}") from None
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from None
    if len(data) > MAX_TRACE_BYTES:
        raise InvalidInput(f"{path}: unpacks to more than the limit of {MAX_TRACE_BYTES} bytes")
    return data


def rank_files(path: str | Path, peers: Sequence[str | Path], endings: Iterable[str]) -> list[Path]:
    """The files of one job: a file and its peers, or the files in a directory.

    Args:
        path: a file or a directory.
        peers: files of other ranks; empty for a directory.
        endings: endings of the file names that are taken from a directory.

    Returns:
        The files, those of a directory in the order of the numbers in their names.

    Raises:
        InvalidInput: there are no files or too many, or peers are given with a directory.
    """
    path, endings = Path(path), tuple(endings)
    if not is_folder(path):
        files = [path, *map(Path, peers)]
    elif peers:
        raise InvalidInput(f"{path}: is a directory, which already holds the files of all ranks: leave {peers[0]} out")
    else:
        files = sorted((p for p in path.iterdir() if p.name.endswith(endings)), key=_natural)
        if not files:
            raise InvalidInput(f"{path}: no file in it ends with {' or '.join(endings)}")
    if len(files) > MAX_RANK_FILES:
        raise InvalidInput(f"{path}: {len(files)} files is more than the limit of {MAX_RANK_FILES}")
    return files


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """A sort key for file names that puts ``rank10`` after ``rank9``."""
    parts = re.split(r"([0-9]{1,18})", path.name)
    return [(1, int(part), "") if part.isascii() and part.isdigit() else (0, 0, part) for part in parts]
