# SPDX-License-Identifier: Apache-2.0
"""Files that commands write: paths are checked before any work, and files are written before anything is printed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..errors import InvalidInput, StrettoError
from ..files import write_file
from .common import json_bytes, next_step, out, wrote
from .session import SESSION

YAML = (".yaml", ".yml", ".json")
HTML = (".html", ".htm")
TRACE = (".pftrace", ".perfetto-trace")
SEVERAL_FORMATS = frozenset({".yaml", ".yml", ".prog", ".xml"})
"""Endings that only options have whose file may be of several formats."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What an option that names an output takes: a file with one of these endings, a folder, or either of the two."""

    suffixes: tuple[str, ...] = ()
    folder: bool = False
    stdout: bool = False
    """Whether ``-`` stands for standard output, which then gets nothing else."""
    only_rank_0: bool = False
    """Whether only rank 0 of a job writes the file: other hosts need not have its folder."""

    @property
    def ending_decides(self) -> bool:
        """Whether the ending of the file's name chooses among formats."""
        return not SEVERAL_FORMATS.isdisjoint(self.suffixes)

    def check(self, path: Path, option: str) -> None:
        """Refuse a path that could not be written.

        Args:
            path: What the user gave.
            option: How the option or argument is called, for the message.

        Raises:
            InvalidInput: In one line, with the endings to choose from where the ending is wrong.
        """
        if "\0" in str(path):
            raise InvalidInput(f"{option}: a path cannot hold a zero byte")
        if self.stdout and str(path) == "-":
            SESSION.json_alone = True
            return
        if self.only_rank_0 and os.environ.get("RANK", "0") != "0":
            return
        try:
            if self.folder and path.suffix not in self.suffixes:
                self._check_folder(path, option)
            else:
                self._check_file(path, option)
        except OSError as error:
            raise InvalidInput(f"{option}: {path}: {error.strerror or error}") from None

    def _check_file(self, path: Path, option: str) -> None:
        if path.is_dir():
            raise InvalidInput(f"{option}: {path}: is a directory, not a file")
        if str(path) == "-":
            raise InvalidInput(f"{option}: - is no file; /dev/stdout is one")
        # Where there is one format only, a name (or a device, or a pipe) needs no ending.
        unnamed = not path.suffix and not self.ending_decides
        if self.suffixes and path.suffix not in self.suffixes and not unnamed:
            raise InvalidInput(f"{option}: {path}: {self._endings(path)}")
        # The file is written under another name first, so its folder must be writable even where the file exists;
        # a link is followed, also one whose file is still to be made.
        _check_writable((path.resolve() if path.is_symlink() else path).parent, option, path)
        if path.exists() and not os.access(path, os.W_OK):
            raise InvalidInput(f"{option}: {path}: the file may not be changed")

    def _endings(self, path: Path) -> str:
        return f"unknown ending {path.suffix!r}; choose from: {', '.join(self.suffixes)}"

    def _check_folder(self, path: Path, option: str) -> None:
        if self.suffixes and path.suffix:
            raise InvalidInput(f"{option}: {path}: {self._endings(path)}, or a name without an ending for a directory")
        above = next((one for one in (path, *path.absolute().parents) if one.exists()), path)
        _check_writable(above, option, path)


def _check_writable(folder: Path, option: str, path: Path) -> None:
    if not folder.exists():
        raise InvalidInput(f"{option}: {path}: there is no directory {folder}")
    if not folder.is_dir():
        which = "is" if folder == path else f"{folder} is"
        raise InvalidInput(f"{option}: {path}: {which} not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(f"{option}: {path}: the directory {folder} may not be written to")


def _check_distinct(given: dict[Path, str], path: Path, option: str) -> None:
    """Refuse a file that another option of the same command line would write as well; what is no file takes both."""
    target = path.resolve()
    if path.exists() and not path.is_file():
        return
    if target in given:
        raise InvalidInput(f"{option}: {path}: is also the file of {given[target]}, and would replace it")
    given[target] = option


def output(
    *suffixes: str, folder: bool = False, stdout: bool = False, only_rank_0: bool = False
) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """The Typer callback of every option or argument that names what a command writes.

    It refuses a wrong path while the command line is read, and marks the option as one that writes
    (`tests/cli/test_outputs.py` finds all of these).

    Args:
        *suffixes: The endings that the file may have; none: any.
        folder: Whether the output is a folder (without suffixes), or may be one (with suffixes).
        stdout: Whether ``-`` stands for standard output.
        only_rank_0: Whether only rank 0 of a job writes the file.

    Returns:
        A function for ``typer.Option(callback=...)``.
    """
    kind = Output(suffixes=suffixes, folder=folder, stdout=stdout, only_rank_0=only_rank_0)

    def check(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
        if isinstance(value, Path) and not context.resilient_parsing:
            option = max(parameter.opts, key=len) if parameter.opts[0][0] == "-" else str(parameter.metavar)
            kind.check(value, option)
            _check_distinct(context.meta.setdefault("stretto.outputs", {}), value, option)
        return value

    check.output = kind  # type: ignore[attr-defined]
    return check


class OutputFiles:
    """Writes the files of a command at once, and tells of them when its results have been printed.

    A file that cannot be written keeps neither the other files nor the results from the user.
    """

    def __init__(self) -> None:
        self._written: list[tuple[Path, str]] = []
        self._failures: list[str] = []
        self._printed: bytes | None = None

    def json(self, path: Path | None, value: object) -> None:
        """Write plain data as JSON; to standard output, when everything else is done, where the path is ``-``."""
        if path is not None and str(path) == "-":
            self._printed = json_bytes(value)
        else:
            self.write(path, lambda path: write_file(path, json_bytes(value)))

    def write(self, path: Path | None, write: Callable[[Path], object], note: str = "") -> None:
        """Write a file, if there is a path for it.

        Args:
            path: Where; None: nowhere.
            write: Is called with the path. Text that it returns is added to the note; a list of paths is told of
                instead of `path`.
            note: What to say about the file.
        """
        if path is None:
            return
        try:
            said = write(path)
        except StrettoError as error:
            self._failures.append(str(error))
        except OSError as error:
            self._failures.append(f"{error.filename or path}: {error.strerror or error}")
        else:
            several = said if isinstance(said, list) else [path]
            self._written += [(one, f"{note}{said if isinstance(said, str) else ''}") for one in several]

    def tell(self, then: str = "") -> None:
        """Say what was written, then `check`.

        Args:
            then: A command line to go on with, which is the last thing that is printed.
        """
        console = out()
        for path, note in self._written:
            wrote(console, path, note)
        if self._printed is not None:
            sys.stdout.write(self._printed.decode())
            sys.stdout.flush()
        self.check()
        if then:
            next_step(then)

    def check(self) -> None:
        """Raise `InvalidInput` if something could not be written."""
        if self._failures:
            raise InvalidInput("; ".join(self._failures))


class QuietStdout(io.TextIOWrapper):
    """Standard output that goes nowhere once its reader has gone (``| head``), so that a command ends as it would."""

    def write(self, text: str, /) -> int:
        """Write, or drop what nobody reads."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what nobody reads."""
        try:
            super().flush()
        except BrokenPipeError:
            self._give_up()

    def _give_up(self) -> None:
        # What is still in the buffer is flushed to the same descriptor later on, which must not fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def open_standard_streams() -> None:
    """Open whichever of standard input, output and error the caller has closed (``>&-``), so that they lead nowhere.

    Otherwise a result file would get the free descriptor, and whatever a library prints would end up in that file.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def quiet_stdout() -> None:
    """Let this process survive a reader of its output that goes early."""
    old = sys.stdout
    if isinstance(old, io.TextIOWrapper) and not isinstance(old, QuietStdout):
        settings = {"encoding": old.encoding, "errors": old.errors, "line_buffering": old.line_buffering}
        old.flush()
        sys.stdout = QuietStdout(old.detach(), **settings)  # type: ignore[arg-type]
