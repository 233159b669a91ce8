# SPDX-License-Identifier: Apache-2.0
"""Program files: Stretto's text form, MSCCL XML and MSCCL++ JSON, told apart by their content.

A format is a module of this package with ``dumps(program, *, option=...) -> str`` and, where it can be read,
``loads(text, *, where) -> Program | Lowered``. To add one, write the module, give its file ending in `SUFFIXES`, teach
`sniff` to recognise its content, and call it in `save_program` and `load_program`; both run in one process,
offline. The command line takes the endings from `SUFFIXES`.

`save_program` calls `dumps` once per file with a `Program` (formats of transfers) or a `Lowered` (formats of
instruction streams; it lowers a `Program` first). `dumps` may assume nothing about correctness: it calls
``verify()`` itself before it writes anything that a machine will run, checks the limits of the runtime that will read
the file, and raises `InvalidInput` that names the field where the format cannot hold the program. It returns the
whole text and touches no file; equal programs give equal text. `load_program` calls `loads` with untrusted text:
`loads` refuses anything malformed by `InvalidInput` that names the line or the element, bounds memory before it takes
it (`named.entries_for`), and returns an object that is checked for form but not yet verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...collectives import Collective
from ...errors import InvalidInput
from ...files import read_text, usable_path, write_file
from ..ir import Program
from ..lowered import Lowered
from ..symmetry import SymmetricProgram

if TYPE_CHECKING:
    from .mscclpp_reader import ExecutionPlan
    from .mscclpp_wide import PlanForm

__all__ = [
    "SUFFIXES", "expanded", "format_of", "load_program", "msccl_xml", "mscclpp_folder", "mscclpp_json",
    "mscclpp_reader", "mscclpp_wide", "save_program", "sniff", "symmetric_text", "text",
]  # fmt: skip

SUFFIXES = {".txt": "text", ".prog": "text", ".xml": "msccl", ".json": "mscclpp"}
"""The format that a file name's ending asks for."""
MAX_EXPANDED = 1 << 20
"""The most transfers of a symmetric program that is written for all ranks at once."""


def format_of(path: str | Path) -> str:
    """The format that a file name's ending asks for: ``text``, ``msccl`` or ``mscclpp``."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise InvalidInput(f"{path}: unknown ending {suffix!r}; choose from: {', '.join(SUFFIXES)}")
    return SUFFIXES[suffix]


def sniff(text: str) -> str:
    """The format of a file's content: ``text``, ``symmetric``, ``msccl`` or ``mscclpp``.

    >>> sniff("stretto-program 1"), sniff("<algo name='x'/>")
    ('text', 'msccl')
    """
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("<"):
        return "msccl"
    if start.startswith("{"):
        return "mscclpp"
    lines = (line for line in start.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    first = next(lines, "")
    if first.startswith("stretto-symmetric-program"):
        return "symmetric"
    if first.startswith("stretto-program"):
        return "text"
    raise InvalidInput("not a program: expected 'stretto-program 1', an MSCCL <algo> or an MSCCL++ JSON plan")


def load_program(
    path: str | Path, *, collective: Collective | None = None, in_place: bool | None = None
) -> Program | SymmetricProgram | Lowered | ExecutionPlan:
    """Read a program file of any format.

    Args:
        path: The file.
        collective: The collective of an MSCCL file that calls it custom; not for other formats.
        in_place: Which kind of call to read an MSCCL file for that serves both; see `msccl_xml.loads`.

    Returns:
        A `Program` or `SymmetricProgram` (text), a `Lowered` (MSCCL XML) or an MSCCL++ plan (JSON), not verified yet.

    Raises:
        InvalidInput: The file cannot be read or is not valid; the message names the file and the place.
    """
    text, where = read_text(path), str(path)
    try:
        kind = sniff(text)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
    if collective is not None and kind != "msccl":
        raise InvalidInput(f"{where}: collective: only an MSCCL file leaves this open")
    if kind == "text":
        from . import text as text_form

        return text_form.loads(text, where=where)
    if kind == "symmetric":
        from . import symmetric_text

        return symmetric_text.loads(text, where=where)
    if kind == "msccl":
        from . import msccl_xml

        try:
            return msccl_xml.loads(text, collective=collective, in_place=in_place, where="")
        except InvalidInput as error:
            raise type(error)(f"{where}: {str(error).removeprefix(': ')}") from None
    from . import mscclpp_reader

    return mscclpp_reader.loads(text, where=where)


def save_program(
    program: Program | SymmetricProgram | Lowered,
    path: str | Path,
    *,
    hosts: Sequence[int] | None = None,
    min_bytes: int | None = None,
    max_bytes: int | None = None,
    form: PlanForm | None = None,
    **options: Any,
) -> None:
    """Write a program in the format that the file name asks for, lowering it where the format needs that.

    Args:
        program: The program to write; the text form takes a `Program` or a `SymmetricProgram`, which is written as one
            group's part of it. Other formats get it expanded.
        path: The file; an existing file is replaced.
        hosts: The host of each rank (``cluster.hosts_of(collective.ranks)``), for MSCCL++ plans: port channels lead
            between hosts. Without it all ranks are taken to share one host. Other formats do not tell hosts apart.
        min_bytes: The smallest call that an MSCCL or MSCCL++ file is for; by default that of the streams.
        max_bytes: The largest call, 0 for no limit; by default that of the streams.
        form: Write an MSCCL++ plan of wide steps, carried out in this way; it takes a `Program`.
        **options: Further options of the format's ``dumps``.

    Raises:
        InvalidInput: The ending is unknown, the file cannot be written, or the format cannot hold the program.
    """
    path = usable_path(path)
    kind = format_of(path)
    if form is not None:
        text = _wide(program, path, form, hosts, (min_bytes or 0, max_bytes or 0), options)
    elif kind == "text":
        from . import symmetric_text
        from . import text as text_form

        if isinstance(program, SymmetricProgram):
            text = symmetric_text.dumps(program, **options)
        elif isinstance(program, Program):
            text = text_form.dumps(program, **options)
        else:
            raise InvalidInput(f"{path}: instruction streams have no text form; choose .xml or .json")
    else:
        plain = expanded(program, path) if isinstance(program, SymmetricProgram) else program
        lowered = plain.lower() if isinstance(plain, Program) else plain
        if kind == "msccl":
            from . import msccl_xml

            text = msccl_xml.dumps(lowered, min_bytes=min_bytes, max_bytes=max_bytes, **options)
        else:
            from . import mscclpp_json

            text = mscclpp_json.dumps(lowered, hosts=hosts, min_bytes=min_bytes, max_bytes=max_bytes, **options)
    write_file(path, text)


def _wide(
    program: Program | SymmetricProgram | Lowered,
    path: Path,
    form: PlanForm,
    hosts: Sequence[int] | None,
    sizes: tuple[int, int],
    options: dict[str, Any],
) -> str:
    """The text of a plan of wide steps."""
    from . import mscclpp_wide

    if format_of(path) != "mscclpp":
        raise InvalidInput(f"{path}: form: only MSCCL++ plans (.json) have wide steps")
    if isinstance(program, Lowered):
        raise InvalidInput(f"{path}: form: wide steps are made of a program (.txt), not of instruction streams")
    if hosts is not None and len(set(hosts)) > 1:
        raise InvalidInput(f"{path}: form: wide steps reach into peers' memory, which works inside one host only")
    plain = expanded(program, path) if isinstance(program, SymmetricProgram) else program
    return mscclpp_wide.dumps(plain, form=form, min_bytes=sizes[0], max_bytes=sizes[1], **options)


def expanded(program: SymmetricProgram, path: str | Path) -> Program:
    """The program with the transfers of all ranks, unless these are too many for one file; `path` is for messages."""
    if program.num_transfers > MAX_EXPANDED:
        what = f"{program.name} has {program.num_transfers} transfers"
        raise InvalidInput(f"{path}: {what}, more than the {MAX_EXPANDED} of a file for all ranks; choose .txt")
    return program.expand()
