# SPDX-License-Identifier: Apache-2.0
"""What the commands share: consoles, lists of ranks and sizes, a progress bar that only shows when it takes long."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..errors import InvalidInput
from .session import SESSION

if TYPE_CHECKING:
    from ..cluster import Cluster

SHOW_AFTER_S = 2.0
REPLACED = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """The text with every character replaced that could command a terminal; line breaks and tabs stay.

    >>> printable("\\x1b[31mred\\x07\\n")
    '\ufffd[31mred\ufffd\\n'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else REPLACED for c in text)


def one_line(text: str) -> str:
    """The text on one line, with every character replaced that could command a terminal.

    >>> one_line("a job\\nanother job \\x1b[2J")
    'a job another job \ufffd[2J'
    """
    return printable("".join(" " if c.isspace() else c for c in text))


def about(thing: object) -> str:
    """What an object says of itself, without what only programmers want to know.

    >>> from stretto.cluster import Cluster
    >>> about(Cluster.load("ring:4"))[:6]
    'ring:4'
    """
    return re.sub(r"<\w+ (.*)>", r"\1", repr(thing), flags=re.DOTALL)


def say(text: str, *, error: bool = False) -> None:
    """Print one line to standard output, or to standard error; names in it may come from files and other processes."""
    if not error and SESSION.json_alone:
        return
    print(one_line(text), file=sys.stderr if error else sys.stdout, flush=True)


class _CleanConsole(Console):
    """A console on which texts from files and other processes can neither move the cursor nor change colors."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            clean = segment.control or segment.text.isprintable()
            yield segment if clean else Segment(printable(segment.text), segment.style)


def out() -> Console:
    """Where results go; at least 80 columns when nobody looks, so that files and pipes keep their tables."""
    if SESSION.json_alone:
        return Console(file=io.StringIO(), width=80)
    console = _console()
    return console if console.is_terminal else _console(width=max(80, console.width))


def progress_console() -> Console:
    """Where a bar goes that shows how far a command is."""
    return _console(stderr=True, quiet=SESSION.quiet)


def _console(**settings: Any) -> _CleanConsole:
    # Rich leaves out colors by itself where NO_COLOR is set, but not bold and dim.
    if os.environ.get("NO_COLOR"):
        settings["color_system"] = None
    return _CleanConsole(highlight=False, **settings)


def wrote(console: Console, path: Path, note: str = "") -> None:
    """Say what was written, on one line that can be copied.

    Args:
        console: Where to say it.
        path: The file.
        note: What is in it, where the name does not say.
    """
    if not SESSION.quiet:
        console.print(f"wrote {path}{f' ({note})' if note else ''}", markup=False, soft_wrap=True)


def quoted(word: object) -> str:
    """A word of a command line that a person can copy into a shell.

    >>> quoted("dgx2:2"), quoted("hosts: 2, gpus: a100")
    ('dgx2:2', "'hosts: 2, gpus: a100'")
    """
    return shlex.quote(str(word))


def next_step(command: str) -> None:
    """Say, as the last line, what most people do next; not to who asked for quiet."""
    if not SESSION.quiet:
        out().print(f"next: {command}", style="dim", markup=False, soft_wrap=True)


def plot_width(console: Console) -> int:
    """Plots use the terminal up to what the eye still takes in."""
    return min(console.width, 110)


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Yields ``advance(label)``, to be called before each step; a bar appears on stderr after two seconds.

    A timer starts the bar, not the first step that ends late, so that one long step shows it too.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=progress_console(),
        transient=True,
    )
    task = bar.add_task(title, total=steps)
    started = -1

    def advance(label: str) -> None:
        nonlocal started
        started += 1
        bar.update(task, completed=started, description=f"{title}: {label}")

    timer = threading.Timer(SHOW_AFTER_S, bar.start)
    timer.daemon = True
    if bar.console.is_terminal and not SESSION.quiet:
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if bar.live.is_started:
            bar.stop()


def script_hint(word: str) -> str:
    """How to start a script that was given without its interpreter, to end a message; empty for anything else.

    >>> script_hint("train.py"), script_hint("nothing")
    ('; to run the script: -- python train.py, or -- torchrun --nproc-per-node N train.py', '')
    """
    start = f"; to run the script: -- python {word}, or -- torchrun --nproc-per-node N {word}"
    return start if word.endswith(".py") else ""


def with_multicast(cluster: Cluster, asked: bool | None) -> Cluster:
    """The cluster as it is (None), with all its switches multicasting (unless some do already), or with none."""
    if asked is None or asked == cluster.multicasts:
        return cluster
    return cluster.with_multicast(None if asked else ())


def parse_ranks(text: str | None, count: int, option: str = "--ranks") -> tuple[int, ...]:
    """The devices that take part: all, the first N (``8``), or a list (``0-7,16,20-23``).

    Args:
        text: What the user wrote; None for all.
        count: How many devices the cluster has.
        option: The option, for messages.

    Returns:
        The devices, each once.

    Raises:
        InvalidInput: The text is no count and no list of devices.

    >>> parse_ranks(None, 3), parse_ranks("2", 3), parse_ranks("0,4-6", 8)
    ((0, 1, 2), (0, 1), (0, 4, 5, 6))
    """
    if text is None:
        return tuple(range(count))
    if text.isascii() and text.isdecimal() and len(text) < 8:
        if not 1 <= int(text) <= count:
            raise InvalidInput(f"{option}: must be 1..{count} (the cluster's devices), not {text}")
        return tuple(range(int(text)))
    ranks: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not all(end.isascii() and end.isdecimal() and len(end) < 8 for end in (low, high if dash else low)):
            raise InvalidInput(f"{option} {text!r}: expected a count (8) or a list (0-7,16,20-23)")
        first, last = int(low), int(high if dash else low)
        if not first <= last < count:
            raise InvalidInput(f"{option} {text!r}: {part.strip()} is not within 0..{count - 1}")
        ranks.extend(range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        raise InvalidInput(f"{option} {text!r}: names a device twice")
    return tuple(ranks)


def check_root(kind: str, root: int | None) -> dict[str, int]:
    """The root as an option of a collective, where one was given; refused for a collective that has none.

    >>> check_root("broadcast", 3), check_root("all_reduce", None)
    ({'root': 3}, {})
    """
    from ..collectives import ROOTED

    if root is None:
        return {}
    if kind not in ROOTED:
        raise InvalidInput(f"--root: {kind} has no root; rooted are {', '.join(ROOTED)}")
    return {"root": root}


def parse_all_sizes(text: str, factor: float) -> tuple[int, ...]:
    """Sizes as ``--bytes`` takes them: one, a list, or a range that grows by ``--factor``.

    >>> parse_all_sizes("1K..64K", 8.0)
    (1000, 8000, 64000)
    """
    from ..report.sweep import check_factor, parse_sizes

    check_factor(factor)
    try:
        return parse_sizes(text, factor=factor)
    except InvalidInput as error:
        raise InvalidInput(f"--bytes: {error}") from None


def parse_one_size(text: str, option: str = "--bytes") -> int:
    """The size of an option that takes one.

    >>> parse_one_size("64M")
    64000000
    """
    from ..units import parse_bytes

    if "," in text or ".." in text:
        raise InvalidInput(f"{option} {text[:80]!r}: one size is expected here, such as 64M")
    try:
        return parse_bytes(text)
    except InvalidInput as error:
        raise InvalidInput(f"{option}: {error}") from None


def parse_names(text: str | None) -> list[str] | None:
    """Names with commas between them; None where none were given.

    >>> parse_names("nvlink, rdma"), parse_names(None)
    (['nvlink', 'rdma'], None)
    """
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def parse_limits(min_bytes: str | None, max_bytes: str | None) -> dict[str, int]:
    """The ends of a range of sizes that were given, by name; ``0`` as the upper one is no limit.

    >>> parse_limits("1K", None), parse_limits(None, "0")
    ({'min_bytes': 1000}, {'max_bytes': 0})
    """
    from ..programs.lowered import check_size_range
    from ..units import parse_bytes

    given = {"min_bytes": min_bytes, "max_bytes": max_bytes}
    found = {key: 0 if text == "0" else parse_bytes(text) for key, text in given.items() if text is not None}
    check_size_range(found.get("min_bytes", 0), found.get("max_bytes", 0))
    return found


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Options of an algorithm as ``key=value``; numbers, true/false, lists, rows and pairs are read as such.

    >>> parse_options(["rings=2", "order=0,2,1,3", "two_way=true", "style=chain"])
    {'rings': 2, 'order': [0, 2, 1, 3], 'two_way': True, 'style': 'chain'}
    >>> parse_options(["counts=0,1;2,0", "pairs=0>1,1>2"])
    {'counts': [[0, 1], [2, 0]], 'pairs': [(0, 1), (1, 2)]}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier() or not text:
            raise InvalidInput(f"--set {pair!r}: expected key=value")
        if key in options:
            raise InvalidInput(f"--set {pair!r}: {key} is given twice")
        options[key] = _value(text)
    return options


def _value(text: str) -> Any:
    words: Mapping[str, bool] = {"true": True, "false": False}
    if text in words:
        return words[text]
    if re.fullmatch(r"[0-9]{1,9}>[0-9]{1,9}(,[0-9]{1,9}>[0-9]{1,9})*", text):
        ends = [pair.split(">") for pair in text.split(",")]
        return [(int(a), int(b)) for a, b in ends]
    rows = [row.split(",") for row in text.split(";")]
    if not all(re.fullmatch("[0-9]{1,15}", part) for row in rows for part in row):
        return text
    numbers = [[int(part) for part in row] for row in rows]
    if len(numbers) > 1:
        return numbers
    return numbers[0] if len(numbers[0]) > 1 else numbers[0][0]


def json_bytes(value: object) -> bytes:
    """Plain data as JSON, indented so that a person can read it."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
