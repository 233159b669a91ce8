# SPDX-License-Identifier: Apache-2.0
"""The sources of the package as syntax trees, each parsed once for all tests of the house rules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import stretto

ROOT = Path(stretto.__file__).parent


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file; nobody changes it."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(tree_of(path)))
