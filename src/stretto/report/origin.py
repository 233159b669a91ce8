# SPDX-License-Identifier: Apache-2.0
"""Where a page comes from: the command, the version, the date, and hashes of the files that the command names."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from .. import __version__

MAX_HASHED = 64 << 20
"""Larger files, such as traces of long runs, are named without a hash."""

WRITTEN = frozenset(
    ["-o", "--output", "--html", "--json", "--trace", "--chrome-json", "--timeline", "--tuner", "--report"]
)
"""Options whose files are written, not read: those of the last run may still lie there."""


def page_origin(words: Sequence[str] | None = None) -> str:
    """One line for the foot of a page, by which what it shows can be made again.

    ``SOURCE_DATE_EPOCH`` sets the date, as for other tools that make files that can be compared.

    Args:
        words: the command line; None takes that of this process, if it is the command ``stretto``.

    Returns:
        Plain text.
    """
    line = sys.argv if words is None else list(words)
    program = Path(line[0]).parts[-2:] if line else ()
    ours = words is not None or program[-1:] == ("stretto",) or program == ("stretto", "__main__.py")
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    date = datetime.fromtimestamp(int(seconds), UTC) if seconds.isascii() and seconds.isdigit() else datetime.now(UTC)
    text = f"stretto {__version__}, {date:%Y-%m-%d %H:%M} UTC"
    if not ours:
        return text
    given = [word for before, word in pairwise(line) if before not in WRITTEN]
    inputs = [f"{word} {found}" for word in given if (found := _hash(Path(word)))]
    text += f": {shlex.join(['stretto', *line[1:]])}"
    return f"{text}; inputs (SHA-256): {', '.join(inputs)}" if inputs else text


def _hash(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > MAX_HASHED:
            return ""
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except (OSError, ValueError):
        return ""
