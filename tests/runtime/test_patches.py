# SPDX-License-Identifier: Apache-2.0
"""The list of what is replaced in PyTorch: it is whole, and each of it comes out again."""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto.runtime.torch_backend import patches
from stretto.runtime.torch_backend.torch_versions import NEWEST, OLDEST

ROOT = Path(stretto.__file__).parent
THERE = ROOT / "runtime" / "torch_backend" / "patches.py"
SETTERS = ("setattr", "delattr", "object.__setattr__", "mock.patch.object", "patch.object", "monkeypatch.setattr")
SETTINGS = ("sys.setswitchinterval", "warnings.filterwarnings", "warnings.simplefilter", "gc.disable", "gc.freeze")


def chain(node: ast.expr) -> str:
    """``a.b.c`` of such an expression; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    inside = chain(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inside}.{node.attr}" if inside and isinstance(node, ast.Attribute) else ""


def names_of_torch(tree: ast.Module) -> set[str]:
    """Names in a file that stand for modules and classes of PyTorch, by import or by assignment from such a name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or "torch") for a in node.names if a.name.partition(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and chain(node.value).partition(".")[0] in found:
                found.add(target.id)
    return found


def _enables(node: ast.AST) -> bool:
    """Whether a statement ends with ``gc.enable()`` in any case."""
    return isinstance(node, ast.Try) and any("gc.enable()" in ast.unparse(one) for one in node.finalbody)


def replaced(text: str) -> list[str]:
    """What a file changes of PyTorch or of the interpreter, line by line."""
    tree = ast.parse(text)
    known, found = names_of_torch(tree), []
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any("catch_warnings" in ast.unparse(i.context_expr) for i in node.items)
        for inner in ast.walk(node)
    }
    # A function that puts back what it has switched off, whatever happens meanwhile, changes nothing for others.
    guarded |= {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_enables(one) for one in ast.walk(node))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if chain(node.value).partition(".")[0] in known:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call):
            called, first = chain(node.func), chain(node.args[0]).partition(".")[0] if node.args else ""
            sets = called in SETTERS and first in known
            changes = called in SETTINGS and id(node) not in guarded
            named = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
            patches_text = called.endswith("mock.patch") and any("torch" in name for name in named)
            if sets or changes or patches_text or (called.endswith("Library") and "IMPL" in named):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.cuda.is_available = None",
        "import torch.distributed as dist\ndist.all_reduce, x = 1, 2",
        "from torch.nn.parallel import DistributedDataParallel\nkind: Any = DistributedDataParallel\nkind.forward = 1",
        "def f():\n    from torch.distributed.pipelining import schedules\n    setattr(schedules, name, 1)",
        "from torch import futures\nwith mock.patch.object(futures.Future, 'wait', 1): pass",
        "import torch\nlib = torch.library.Library('c10d', 'IMPL')",
        "import sys\nsys.setswitchinterval(1)",
        "import warnings\nwarnings.filterwarnings('ignore')",
        "import torch\ndel torch.compile",
    ],
)
def test_the_checker_sees_every_form(text: str) -> None:
    assert len(replaced(text)) == 1


def test_nothing_but_the_list_changes_pytorch() -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in sorted(ROOT.rglob("*.py"))
        if path != THERE and (wrong := replaced(path.read_text()))
    }
    assert found == {}
    assert replaced(THERE.read_text())


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_a_patch_says_why_and_its_attribute_is_there_in_the_versions_that_it_names(patch: patches.Patch) -> None:
    assert patch.why and OLDEST <= patch.first <= patch.last <= NEWEST
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert all(hasattr(owner, patch.name) for owner in patch.found()) or not patch.first <= version <= patch.last


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_a_patch_is_put_in_place_and_taken_out(patch: patches.Patch) -> None:
    before = [getattr(owner, patch.name) for owner in patch.found()]
    given: list[Any] = []

    def wrap(original: Any) -> Any:
        given.append(original)
        return lambda *args, **more: original(*args, **more)

    undo = patches.apply(patch, wrap)
    inside = [getattr(owner, patch.name) for owner in patch.found()]
    undo()
    assert given == before[:1] and all(new is not old for new, old in zip(inside, before, strict=True))
    assert [getattr(owner, patch.name) for owner in patch.found()] == before


def test_settings_of_the_interpreter_come_back() -> None:
    filters, interval = list(warnings.filters), sys.getswitchinterval()
    undo = [patches.ignore_warning("something of a test"), patches.set_switch_interval(1e-3)]
    assert len(warnings.filters) == len(filters) + 1 and sys.getswitchinterval() == pytest.approx(1e-3)
    for one in undo:
        one()
    assert list(warnings.filters) == filters and sys.getswitchinterval() == pytest.approx(interval)
