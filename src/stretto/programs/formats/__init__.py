"""Program files: our text form, MSCCL XML and MSCCL++ JSON, told apart by what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...collectives import Collective
from ...errors import InvalidInput
from ...files import read_text, usable_path
from ..ir import Program
from ..lowered import Lowered

if TYPE_CHECKING:
    from .mscclpp_reader import Plan

SUFFIXES = {".txt": "text", ".prog": "text", ".xml": "msccl", ".json": "mscclpp"}
"""The format that a file name's ending asks for."""


def sniff(text: str) -> str:
    """The format of a file's content: ``text``, ``msccl`` or ``mscclpp``.

    >>> sniff("stretto-program 1"), sniff("<algo name='x'/>")
    ('text', 'msccl')
    """
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("<"):
        return "msccl"
    if start.startswith("{"):
        return "mscclpp"
    lines = (line for line in start.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    if next(lines, "").startswith("stretto-program"):
        return "text"
    raise InvalidInput("not a program: expected 'stretto-program 1', an MSCCL <algo> or an MSCCL++ JSON plan")


def load_program(
    path: str | Path, *, collective: Collective | None = None, in_place: bool | None = None
) -> Program | Lowered | Plan:
    """Read a program file: a `Program` (text), a `Lowered` (MSCCL XML) or an MSCCL++ plan (JSON).

    `collective` and `in_place` settle what an MSCCL file leaves open; see `msccl_xml.loads`.
    """
    text = read_text(path)
    try:
        return _parse(text, str(path), collective, in_place)
    except InvalidInput as error:
        message = str(error)
        raise InvalidInput(message if message.startswith(str(path)) else f"{path}: {message}") from None


def _parse(
    text: str, where: str, collective: Collective | None, in_place: bool | None
) -> Program | Lowered | Plan:
    kind = sniff(text)
    if collective is not None and kind != "msccl":
        raise InvalidInput("collective: only an MSCCL file leaves this open")
    if kind == "text":
        from . import text as text_form

        return text_form.loads(text, where=where)
    if kind == "msccl":
        from . import msccl_xml

        return msccl_xml.loads(text, collective=collective, in_place=in_place, where=where)
    from . import mscclpp_reader

    return mscclpp_reader.loads(text, where=where)


def save_program(program: Program | Lowered, path: str | Path, **options: Any) -> None:
    """Write a program in the format that the file name asks for, lowering it where the format needs that.

    `options` go to the format's ``dumps``; a file that exists is replaced.
    """
    path = usable_path(path)
    if path.suffix not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
        raise InvalidInput(f"{path}: unknown ending {path.suffix!r}; choose from: {endings}")
    kind = SUFFIXES[path.suffix]
    if kind == "text":
        from . import text as text_form

        if not isinstance(program, Program):
            raise InvalidInput(f"{path}: instruction streams have no text form; choose .xml or .json")
        text = text_form.dumps(program, **options)
    else:
        lowered = program.lower() if isinstance(program, Program) else program
        if kind == "msccl":
            from . import msccl_xml

            text = msccl_xml.dumps(lowered, **options)
        else:
            from . import mscclpp_json

            text = mscclpp_json.dumps(lowered, **options)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from None
