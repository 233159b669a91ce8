# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: pages that are made from the code, and links that lead out of docs/."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"../CONTRIBUTING.md": "contributing.md", "../CHANGELOG.md": "changelog.md"}
"""Links out of docs/, and the pages that they become."""


def on_files(files: Any, config: Any) -> Any:
    """Add the reference of all commands, and the pages of the repository's root."""
    from mkdocs.structure.files import File

    made = {"cli-commands.md": commands_page()}
    for source, name in OUTSIDE.items():
        text = (ROOT / source.removeprefix("../")).read_text()
        made[name] = re.sub(r"\]\(docs/([\w-]+\.md)", r"](\1", text)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Make links to pages of the root links to their copies, and links to other files plain text."""
    for source, name in OUTSIDE.items():
        markdown = markdown.replace(f"]({source}", f"]({name}")
    elsewhere = r"\[([^\]]*)\]\((?:\.\./)?((?:examples|scripts|tests|src|benchmarks|LICENSE)[^)]*)\)"
    return re.sub(elsewhere, r"\1 (`\2`)", markdown)


def commands_page() -> str:
    """The help of every command, as the command line prints it."""
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    from stretto.cli import run
    from stretto.cli.commands import ENTRIES

    parts = ["# All commands\n\nThe help of each command, as `stretto COMMAND --help` prints it.\n"]
    for entry in ENTRIES:
        for words in _words(entry):
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                run([*words, "--help"])
            parts.append(f"## stretto {' '.join(words)}\n\n```text\n{said.getvalue().strip()}\n```\n")
    return "\n".join(parts)


def _words(entry: Any) -> list[list[str]]:
    inner = getattr(entry.load(), "commands", {})
    return [[entry.name], *([entry.name, name] for name in inner)]
