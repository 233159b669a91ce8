# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and the command lines that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from stretto.cli import app

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def stretto_lines(page: Path) -> Iterator[str]:
    """The command lines of ours in a page's blocks and sentences, without what stands beside them."""
    text = page.read_text()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines() if language in ("", "sh", "console") else ():
            plain = re.sub(r"(?<=\S)  +", "  ", re.sub(r" \[-[^]]*\]", "", line))
            for found in re.findall(r"(?:^|^\$ |srun |-m |bin/|^[A-Z_]+=\S+ |-- )(stretto [a-z].*)", plain):
                yield found.partition("  ")[0].partition(" # ")[0].partition(" | ")[0].partition(" > ")[0].rstrip(" &")
        for words in re.findall(r"^\s*command: \[(stretto,.*)\]$", block, re.M):
            yield shlex.join(word.strip().strip('"') for word in words.split(","))
    # In a sentence a command may be a pattern, with parts that may be left out: only whole ones are taken.
    for line in re.findall(r"`(stretto [a-z][^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.S)):
        if re.search(r"-.* [^-]\S*$", line) and not re.search(r"[][|…]|\.\.\.|<|>", line):
            yield line
