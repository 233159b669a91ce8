# SPDX-License-Identifier: Apache-2.0
"""What is documented is public, loaded lazily, and keeps its old spellings for one release."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import stretto
from stretto.moved import MODULES, RENAMED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
LONE_MODULES = {"stretto.torch", "stretto.units", "stretto.errors"}
"""Public modules that are no packages."""
MOVED = {
    "WeightSync": "torch", "capture": "torch", "distribute": "torch", "model_spec": "torch", "reshard": "torch",
    "step": "torch", "Lowered": "programs", "SymmetricProgram": "programs", "Certificate": "synthesis",
    "Synthesis": "synthesis", "Bound": "simulator", "ReshardPlan": "resharding",
}  # fmt: skip


def code_of(page: Path) -> str:
    """The import lines of a page or a script, in code of Python or after a prompt."""
    text = page.read_text()
    if page.suffix == ".py":
        return text
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    return re.sub(r"^(>>>|\.\.\.) ?", "", blocks, flags=re.M)


def imports_of(text: str) -> list[tuple[str, str]]:
    """The modules of ours that are imported, with each name that is taken from them ("" where none is)."""
    found = []
    # One by one, since pages leave things out that would be needed to parse the rest.
    for line in re.findall(r"^\s*((?:from|import) stretto\b(?:[^\n#(]*\([^)]*\)|[^\n#]*))", text, re.M):
        for node in ast.walk(ast.parse(line.strip())):
            if isinstance(node, ast.Import):
                found += [(alias.name, "") for alias in node.names if alias.name.startswith("stretto")]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.module or "", alias.name) for alias in node.names]
    return found


def refusal(module: str, name: str) -> str:
    """Why a documented import is of something internal; empty where it is not."""
    home = import_module(module)
    if module not in LONE_MODULES and not hasattr(home, "__path__"):
        return f"{module}: is a module inside a package; export the name from the package"
    public = getattr(home, "__all__", None)
    if not name or name == "*":
        return ""
    if module in {"stretto.units", "stretto.errors"}:
        return "" if hasattr(home, name) else f"{module}: has no {name}"
    if module == "stretto" and name in stretto._PACKAGES:
        return ""
    return "" if public is not None and name in public else f"{module}: {name} is not in __all__"


def test_documents_and_examples_import_public_names_alone() -> None:
    taken = [(page, *each) for page in [*PAGES, *EXAMPLES] for each in imports_of(code_of(page))]
    assert len(taken) > 50
    assert [f"{page.relative_to(ROOT)}: {why}" for page, *each in taken if (why := refusal(*each))] == []


def test_the_reader_of_imports_sees_what_is_internal() -> None:
    said = imports_of(
        "import stretto as st\n    from stretto.runtime.probe.probe import probe\nfrom stretto import A, B"
    )
    assert said == [("stretto", ""), ("stretto.runtime.probe.probe", "probe"), ("stretto", "A"), ("stretto", "B")]
    assert "inside a package" in refusal("stretto.runtime.probe.probe", "probe")
    assert "not in __all__" in refusal("stretto.planner", "api")
    assert refusal("stretto.torch", "probe") == refusal("stretto.pipeline", "Schedule") == ""


def test_about_thirty_five_names_are_at_the_top() -> None:
    assert 30 <= len(stretto.__all__) <= 40
    assert f"`stretto.__all__` has {len(stretto.__all__)} names" in (ROOT / "docs" / "architecture.md").read_text()
    assert not {name for name in stretto.__all__ if name in MOVED}


def test_packages_are_there_without_an_import() -> None:
    code = "import stretto as st; print(st.workloads.__name__, st.algorithms.__name__, st.resharding.Mesh.__name__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["stretto.workload.workloads", "stretto.algorithms", "Mesh"]


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_moved_works_with_one_warning(name: str) -> None:
    vars(stretto).pop(name, None)
    with pytest.warns(DeprecationWarning, match=rf"stretto\.{name} is stretto\.{MOVED[name]}\.{name} now") as said:
        old = getattr(stretto, name)
    assert len(said) == 1 and said[0].filename == __file__
    assert old is getattr(import_module(f"stretto.{MOVED[name]}"), name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(stretto, name) is old
    del vars(stretto)[name]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_moved_is_found_at_its_old_path_with_one_warning(name: str) -> None:
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=rf"{name} is {MODULES[name]} now") as said:
        old = import_module(name)
    assert len(said) == 1
    new = import_module(MODULES[name])
    assert all(getattr(old, word) is value for word, value in vars(new).items() if not word.startswith("__"))
    assert import_module(name) is old


@pytest.mark.parametrize(("where", "name"), RENAMED)
def test_a_function_with_another_name_is_found_by_its_old_one(where: str, name: str) -> None:
    code = f"from {where} import {name}; assert callable({name}), {name}"
    told = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert told.stderr.count(f"<string>:1: DeprecationWarning: {where}") == 1, told.stderr


def test_jobs_find_everything_in_one_module() -> None:
    module = import_module("stretto.torch")
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no_such"):
        _ = module.no_such


def test_torch_is_loaded_by_its_own_import_alone() -> None:
    code = """
import stretto, sys
said = [str(getattr(stretto, "torch", "nothing")), *dir(stretto)]
assert "torch" not in sys.modules
try:
    stretto.torch
except AttributeError as error:
    print(error)
import stretto.torch
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "module 'stretto' has no attribute 'torch' before `import stretto.torch`\n"


def named_types(hint: object) -> set[type]:
    """Classes of ours in an annotation."""
    inside = {one for part in get_args(hint) for one in named_types(part)}
    inside |= {one for part in get_args(hint) if isinstance(part, list) for each in part for one in named_types(each)}
    ours = isinstance(hint, type) and hint.__module__.startswith("stretto.runtime")
    return inside | ({hint} if ours and isinstance(hint, type) else set())


def test_all_types_that_a_carrier_of_ones_own_meets_are_public() -> None:
    import stretto.torch as home

    contracts = (home.Carrier, home.HostCarrier, home.CarrierSite, home.Submission)
    hints = [get_type_hints(contract) for contract in contracts]
    methods = [m for contract in contracts for m in vars(contract).values() if inspect.isfunction(m)]
    hints += [get_type_hints(method) for method in methods if not method.__name__.startswith("_")]
    met = {one.__name__ for found in hints for hint in found.values() for one in named_types(hint)}
    assert {"QueuedOp", "CompiledOp", "GroupWork", "ActiveMotif", "PendingMaximum", "Sequencer"} <= met
    assert met <= set(home.__all__)
    assert {"CarrierMaker", "ExecutorCarrier", "NcclCarrier", "GlooCarrier"} <= set(home.__all__)
