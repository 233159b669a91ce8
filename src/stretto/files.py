# SPDX-License-Identifier: Apache-2.0
"""Reading files from outside: bounded in size, no aliases, no entities, errors that name the field.

Files are written whole or not at all.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import msgspec
import yaml

from .errors import InvalidInput
from .field_errors import explain
from .process_state import STATE, ProcessPart

MAX_BYTES = 64 << 20
MAX_XML_ELEMENTS = 4_000_000
MAX_DEPTH = 100
MAX_YAML_BYTES = 2 << 20
"""The most bytes of YAML that are read or written: its parser takes a second for each MiB. JSON may be larger."""
T = TypeVar("T")


class AnalyzedTypes(ProcessPart):
    """Types that msgspec has analyzed."""

    def __init__(self) -> None:
        self.analyzed: set[Any] = set()
        self.lock = threading.Lock()

    def after_fork(self) -> None:
        """A thread of the parent may have held the lock."""
        self.lock = threading.Lock()


_TYPES = STATE.part(AnalyzedTypes)


def cache_directory() -> Path:
    """The folder that results are kept in: ``$STRETTO_CACHE``, else the user's cache directory."""
    given = os.environ.get("STRETTO_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "stretto"


def usable_path(path: str | Path) -> Path:
    """Return the path, unless it holds a NUL or half a character, for which Python would raise `ValueError`."""
    if "\0" in str(path):
        raise InvalidInput(f"{str(path)!r}: a path cannot contain a NUL character")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise InvalidInput(f"{str(path)!r}: not a path: it holds half a character") from None
    return Path(path)


def exists(path: str | Path) -> bool:
    """Whether there is something at a path; no for what cannot be one, such as a text of 300 letters.

    >>> exists("all_reduce" * 300)
    False
    """
    try:
        return Path(path).exists()
    except OSError:
        return False


def is_folder(path: str | Path) -> bool:
    """Whether a path is a directory; no for what is no path."""
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def read_text(path: str | Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file, refused when it is missing, too large or not UTF-8."""
    path = usable_path(path)
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
            # A pipe may never end and /dev/zero never does; neither says how large it is.
            raise InvalidInput(f"{path}: not a regular file")
        if about.st_size > max_bytes:
            raise InvalidInput(f"{path}: {about.st_size} bytes is more than the limit of {max_bytes}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: not a UTF-8 text file") from None


def typed(kind: type[T]) -> type[T]:
    """Return the same type, safe to decode in several threads; every ``type=`` given to msgspec goes through this.

    msgspec analyzes a type when it is first used, and lets other threads see the unfinished result: two first messages
    at the same moment end the process with SIGSEGV. Here one thread at a time finishes the analysis of the whole type.
    """
    if kind not in _TYPES.analyzed:
        with _TYPES.lock:
            msgspec.msgpack.Decoder(kind)
            _TYPES.analyzed.add(kind)
    return kind


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all: where the disk is full the old content stays, and `InvalidInput` says so."""
    with open_output(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_output(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the place of `path` only once everything has been written to it.

    A path that is not a regular file (``/dev/stdout``, a pipe) is written to directly. Raises `InvalidInput` where
    opening, writing or replacing fails.
    """
    path = usable_path(path)
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        # A link is followed, so that it stays a link.
        target = path.resolve()
        part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                if target.exists():
                    _keep_mode(target, handle)
                yield file
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from None


def _keep_mode(target: Path, handle: int) -> None:
    """Give a new file the permissions of the one that it is to replace, which must be writable."""
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))


def convert(value: Any, kind: type[T], *, where: str, strict: bool = True) -> T:
    """Check plain data against a msgspec type; the error carries the path of the bad field and the valid choices.

    Args:
        value: Dictionaries, lists and scalars, as a parser of JSON or YAML returns them.
        kind: The type to convert to, usually a `msgspec.Struct`.
        where: What the message starts with, usually the name of the file; may be empty.
        strict: Whether texts are refused where a number or a truth value is expected, instead of being read as one.

    Returns:
        The data as an instance of `kind`.

    Raises:
        InvalidInput: The data does not fit the type.
    """
    try:
        return msgspec.convert(value, typed(kind), strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{where}: {explain(error, kind, value)}") from None


def plain(form: Any, *, keep_floats: bool = False) -> Any:
    """The plain data of a msgspec form, without the fields that equal their defaults.

    Two equal forms always give the same data. msgspec's own ``omit_defaults`` does not promise that: it compares with
    defaults by identity, so that a text which went through pickle or a number that was computed is written out.

    Args:
        form: A `msgspec.Struct`, or lists, tuples and dictionaries of such.
        keep_floats: Whether fields that hold a float are written even where they equal their default.

    Returns:
        Dictionaries, lists and scalars that share no list or dictionary with `form`.
    """
    if isinstance(form, msgspec.Struct):
        return {
            name: plain(value, keep_floats=keep_floats)
            for name, default in _defaults(type(form))
            if not _same(value := getattr(form, name), default) or (keep_floats and isinstance(value, float))
        }
    if isinstance(form, list | tuple):
        return [plain(one, keep_floats=keep_floats) for one in form]
    if isinstance(form, dict):
        return {key: plain(value, keep_floats=keep_floats) for key, value in form.items()}
    return form


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """Each field of a form with its default; `msgspec.NODEFAULT` where it has none."""
    return tuple(
        (field.name, field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory())
        for field in msgspec.structs.fields(kind)
    )


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, *, where: str) -> Any:
    """Plain data from YAML (or JSON, which is YAML), without aliases and Python objects; errors start with `where`."""
    try:
        _refuse_hostile_yaml(text, where)
        return yaml.load(text, Loader=_YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: not valid YAML: {_one_line(error)}") from None


def parse_text(text: str, *, where: str) -> Any:
    """Plain data from JSON (what begins with a brace) or YAML; errors start with `where`."""
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        return parse_json(text, where=where)
    if len(text) > MAX_YAML_BYTES:
        raise InvalidInput(f"{where}: YAML of more than {MAX_YAML_BYTES} bytes; use the same structure as JSON")
    return parse_yaml(text, where=where)


def yaml_text(text: str, path: str | Path) -> str:
    """A text of YAML, unless it is too large to be read again."""
    if len(text) > MAX_YAML_BYTES:
        raise InvalidInput(f"{path}: too large for YAML ({len(text)} bytes); give a name that ends in .json")
    return text


@contextmanager
def naming_lines(text: str, *, where: str) -> Iterator[None]:
    """Errors about the data of a text start with `where` and, if they name a field (``$.links[0]``), end with its line.

    >>> with naming_lines("links:\\n- {a: 1}\\n- {a: x}\\n", where="c.yaml"):
    ...     raise InvalidInput("$.links[1].a: must be a number")
    Traceback (most recent call last):
    stretto.errors.InvalidInput: c.yaml: $.links[1].a: must be a number (line 3)
    """
    try:
        yield
    except InvalidInput as error:
        said = str(error).removeprefix(": ")
        path = re.search(r"\$(?:\.\w+|\[\d+\])+", said)
        line = _line_of(text, path[0]) if path is not None else 0
        raise InvalidInput(f"{where}: {said}{f' (line {line})' if line else ''}") from None


def _line_of(text: str, path: str) -> int:
    """The line of a field in YAML or JSON, from 1; 0 where there is one line only, or the field is not found."""
    if "\n" not in text.strip() or len(text) > MAX_YAML_BYTES:
        return 0
    try:
        node = yaml.compose(text, Loader=_YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return 0
    line = 0
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if name and isinstance(node, yaml.MappingNode):
            key, node = next(((key, value) for key, value in node.value if key.value == name), (None, None))
        elif index and isinstance(node, yaml.SequenceNode) and int(index) < len(node.value):
            key = node = node.value[int(index)]
        else:
            return line
        if key is None or node is None:
            return line
        line = key.start_mark.line + 1
    return line


def _one_line(error: Exception) -> str:
    """The message of a YAML error on one line, without the file name that the parser invents for every text."""
    return " ".join(str(error).split()).replace('in "<unicode string>", line', "in line")


def _refuse_hostile_yaml(text: str, where: str) -> None:
    """Refuse aliases, a few lines of which can expand to gigabytes, and nesting so deep that it overflows the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_YamlLoader):
        if isinstance(event, yaml.AliasEvent):
            raise InvalidInput(f"{where}: not valid YAML here: aliases (*name) are not allowed")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{where}: YAML nested deeper than {MAX_DEPTH}")


def parse_json(text: str, *, where: str) -> Any:
    """Plain data from the text of a JSON file; errors start with `where`."""
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"{where}: not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def parse_xml(text: str, *, where: str) -> Element:
    """The root of an XML tree with no DTD and no entities, bounded in depth and count; errors start with `where`."""
    builder = TreeBuilder()
    parser = expat.ParserCreate()
    depth = count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth, count
        depth, count = depth + 1, count + 1
        if depth > MAX_DEPTH or count > MAX_XML_ELEMENTS:
            raise InvalidInput(f"{where}: XML nested deeper than {MAX_DEPTH} or over {MAX_XML_ELEMENTS} elements")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def doctype(*_: Any) -> None:
        raise InvalidInput(f"{where}: XML with a DOCTYPE is not accepted (entities could expand without bound)")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text, True)
        return builder.close()
    except expat.ExpatError as error:
        raise InvalidInput(f"{where}: not valid XML: {error}") from None
