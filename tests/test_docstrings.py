# SPDX-License-Identifier: Apache-2.0
"""Docstrings for strangers: a public function with three or more parameters names each of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sources import ROOT, tree_of

from stretto import errors

MANY = 3  # functions with so many parameters (self and cls not counted) have Args and Returns sections

COMMANDS = "cli"
"""The package of commands: what a command takes is said by the help of each option."""
ELSEWHERE = re.compile(r"\b[Ss]ee `[\w.]+`|are those of PyTorch's `\w+`")
"""A method, or its class, that names the contract which it implements: the parameters are described there."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SECTION = re.compile(r"^(?P<name>[A-Z][a-z]+):[ ]*$")
ENTRY = re.compile(r"^    (?P<name>\*{0,2}\w+)(?: \([^)]*\))?: \S")


def decorators(function: Function) -> set[str]:
    """The last names of a function's decorators: {'overload'} for `@typing.overload`."""
    calls = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in calls}


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function, list[str]]]:
    """Name, node and parameters (stars included) of each public function and of each method of a public class."""
    owners: list[tuple[str, list[ast.stmt]]] = [("", tree.body)]
    owners += [
        (node.name, node.body)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and node.name[0] != "_"
        and not ELSEWHERE.search(ast.get_docstring(node) or "")
    ]
    for owner, body in owners:
        for node in body:
            if not isinstance(node, Function) or node.name.startswith("_") or "overload" in decorators(node):
                continue
            given = node.args
            names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
            if owner and "staticmethod" not in decorators(node):
                names = names[1:]
            names += [f"*{given.vararg.arg}"] if given.vararg else []
            names += [argument.arg for argument in given.kwonlyargs]
            names += [f"**{given.kwarg.arg}"] if given.kwarg else []
            yield f"{owner}.{node.name}" if owner else node.name, node, names


def sections(docstring: str) -> dict[str, list[str]]:
    """The lines of each section of a Google style docstring."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in docstring.splitlines():
        if match := SECTION.match(line):
            lines = found.setdefault(match["name"], [])
        elif line and not line.startswith(" "):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def complaints(path: Path) -> Iterator[str]:
    """What the docstrings of a module's public functions do not say."""
    for name, function, parameters in public_functions(tree_of(path)):
        if len(parameters) < MANY or ELSEWHERE.search(ast.get_docstring(function) or ""):
            continue
        is_command = decorators(function) & {"command", "callback"} or "Examples:" in (
            ast.get_docstring(function) or ""
        )
        if COMMANDS in path.parts and is_command:
            continue
        found = sections(ast.get_docstring(function) or "")
        told = [match["name"] for line in found.get("Args", ()) if (match := ENTRY.match(line))]
        if told != parameters:
            yield f"{name}: Args are {told}, parameters are {parameters}"
        returns = function.returns
        nothing = returns is None or (isinstance(returns, ast.Constant) and returns.value is None)
        if not nothing and not (found.keys() & {"Returns", "Yields"}):
            yield f"{name}: a Returns section is missing"


def test_public_functions_name_their_parameters() -> None:
    paths = sorted(ROOT.rglob("*.py"))
    assert len(paths) > 500
    assert [f"{path.relative_to(ROOT)}: {text}" for path in paths for text in complaints(path)] == []


def raised_by(function: Function) -> set[str]:
    """The classes that a function raises itself; what it calls, and functions inside it, may raise others."""
    found: set[str] = set()
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found.add("InvalidInput" if node.exc.func.id == "unknown" else node.exc.func.id)
        left += ast.iter_child_nodes(node)
    return {name for name in found if name[0].isupper()} - {"AssertionError", "NotImplementedError"}


def covers(said: str, raised: str) -> bool:
    """Whether a docstring that names the first class tells of the second, which may be one of its kinds."""
    wide, narrow = getattr(errors, said, None), getattr(errors, raised, None)
    return said == raised or (wide is not None and narrow is not None and issubclass(narrow, wide))


def unsaid(path: Path) -> Iterator[str]:
    """Errors that functions with Args raise and whose docstrings do not say so."""
    for name, function, _ in public_functions(tree_of(path)):
        text = ast.get_docstring(function) or ""
        found = sections(text)
        said = [match["name"] for line in found.get("Raises", ()) if (match := ENTRY.match(line))]
        for raised in sorted(raised_by(function)) if "Args" in found else ():
            if f"`{raised}`" not in text and not any(covers(one, raised) for one in said):
                yield f"{name}: raises {raised}, which its docstring does not say"


def test_public_functions_say_what_they_raise() -> None:
    assert [f"{path.relative_to(ROOT)}: {text}" for path in sorted(ROOT.rglob("*.py")) for text in unsaid(path)] == []


def test_an_error_that_is_not_said_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('''
def put(book, row, column):
    """Put a book.

    Args:
        book: The book.

    Raises:
        StrettoError: There is no room.
    """
    if row:
        raise Infeasible("full")
    def inner(): raise KeyError("elsewhere")
    raise PeerLost("gone") if column else TypeError("no book")

def take(book, row, column):
    """Take a book; raises `InvalidInput`.

    Args:
        book: The book.
    """
    if column: raise unknown("column", column, [])
    raise OSError("dust")
''')
    assert list(unsaid(path)) == ["take: raises OSError, which its docstring does not say"]


def test_a_missing_parameter_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('''
class Shelf:
    def put(self, book, row, *, column=0, **marks) -> int:
        """Put a book.

        Args:
            book: The book.
            column: From 0.
        """

    def move(self, book, row, column) -> int:
        """Move a book.

        Args:
            book: The book.
            row: The row, counted from 0,
                from the top.
            column: From 0.

        Returns:
            How many books had to move aside.
        """

def _private(a, b, c): ...
''')
    assert list(complaints(path)) == [
        "Shelf.put: Args are ['book', 'column'], parameters are ['book', 'row', 'column', '**marks']",
        "Shelf.put: a Returns section is missing",
    ]
