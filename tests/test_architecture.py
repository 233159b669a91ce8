# SPDX-License-Identifier: Apache-2.0
"""The house rules: imports go downward only, and the core never needs torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from sources import ROOT, nodes_of, tree_of

import stretto

# A layer may import itself and the layers before it; rooms of one line do not import each other. A dotted name
# is a room inside another one, with a place of its own.
LAYERS = [
    {"errors", "late", "moved", "process_state", "_native"},
    {"field_errors", "registry"},
    {"units", "files", "children"},
    {"solvers"},
    {"cluster", "collectives"},
    {"programs"},
    {"simulator"},
    {"algorithms"},
    {"synthesis"},
    {"workload"},
    {"dimensions"},
    {"resharding"},
    {"pipeline", "weights"},
    {"planner"},
    {"strategy"},
    {"runtime.executor", "runtime.gpu", "lab"},
    {"runtime.torch_backend"},
    {"runtime.capture", "runtime.probe"},
    {"runtime.enforcer"},
    {"strategy.distribute", "resharding.tensors", "pipeline.torch_runtime"},
    {"pipeline.meshes"},
    {"control"},
    {"advice", "doctor"},
    {"torch", "plugins"},
    {"report"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def room_of(parts: tuple[str, ...]) -> str | None:
    """The room that a module is in: the longest beginning of its dotted name that is one."""
    names = (".".join(parts[:length]) for length in (2, 1))
    return next((name for name in names if name in LEVEL), None)


def imported(path: Path) -> set[str]:
    """The rooms of the house that a file imports, whether at the top or inside a function."""
    inside = path.relative_to(ROOT).with_suffix("").parts
    package = inside[:-1]
    found: set[str | None] = set()
    for node in nodes_of(path):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            module = tuple(node.module.split(".")) if node.module else ()
            names = [(*base, *module, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "stretto":
            names = [(*node.module.split(".")[1:], alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "stretto"]
        found |= {room_of(name) for name in names}
    return {room for room in found if room}


def test_imports_go_downward_only() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts in (("__init__",), ("__main__",), ("runtime", "__init__")):
            continue
        room = room_of(parts)
        assert room, f"{path} is in a room that the architecture does not know"
        wrong += [
            f"{path.relative_to(ROOT)} imports {other}"
            for other in imported(path)
            if other != room and LEVEL[other] >= LEVEL[room]
        ]
    assert wrong == []


def modules() -> dict[str, Path]:
    """Every module of the house by its dotted name."""
    paths = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in ROOT.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths.items()}


def imported_modules(name: str, path: Path, known: Collection[str]) -> set[str]:
    """The modules that a module imports when it runs, at the top or inside a function.

    Imports under TYPE_CHECKING are left out: they never run, and an annotation may name the noun that supplies it.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & set(known)) - {name}


def circle(needs: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle; empty where there is none."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_one_another_in_a_circle() -> None:
    known = modules()
    assert circle({name: imported_modules(name, path, known) for name, path in known.items()}) == []


def test_the_checker_sees_a_circle_through_a_function(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from .two import f\n")
    (tmp_path / "two.py").write_text("def f():\n    from . import one\n    return one\n")
    known = {f"house.{name}": tmp_path / f"{name}.py" for name in ("one", "two")}
    assert circle({name: imported_modules(name, path, known) for name, path in known.items()})
    (tmp_path / "two.py").write_text("if TYPE_CHECKING:\n    from . import one\n")
    assert not circle({name: imported_modules(name, path, known) for name, path in known.items()})


def test_the_checker_sees_every_form_of_import(tmp_path: Path) -> None:
    here = ROOT / "programs" / "ir.py"
    assert {"collectives", "errors", "_native"} <= imported(here)
    assert "cli" not in imported(here)


def test_core_imports_without_torch_and_without_the_plotting_stack() -> None:
    code = "import stretto, sys; print([m for m in ('torch', 'plotly', 'perfetto', 'highspy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    code = "import stretto, sys; print([m for m in sys.modules if m.startswith('stretto.')], 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["['stretto.moved']", "False"], "and what finds old paths"


def test_a_rank_loads_no_makers_planner_or_gpu_engine_before_it_uses_them() -> None:
    code = """
import sys, stretto.torch, torch.distributed as dist
names = ("synthesis", "solvers", "planner", "dimensions", "workload", "pipeline", "resharding", "strategy", "control",
         "report", "lab", "runtime.enforcer", "runtime.capture", "runtime.probe", "runtime.gpu",
         "runtime.torch_backend.gpu_engine", "simulator.bounds")
def loaded():
    return [name for name in names if f"stretto.{name}" in sys.modules]
print(loaded())
dist.init_process_group("stretto", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(stretto.torch._torch.ones(3))
dist.destroy_process_group()
print(loaded())
import stretto.runtime.enforcer.enforcer
print([name for name in loaded() if name in ("synthesis", "solvers", "dimensions", "report", "runtime.gpu")])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "[]", "[]"]


def test_simulating_loads_no_solvers_readers_or_presets() -> None:
    code = """
import stretto as st, sys
from stretto.cluster.grid import regular
from stretto.programs import Program
from stretto.simulator import simulate
four = regular("four", [st.Dimension(kind="ring", size=4, gb_per_s=10.0, alpha_us=1.0)])
simulate(st.algorithm("ring", "all_gather", 4), four, nbytes=1e6)
unwanted = ("simulator.bounds", "simulator.priced", "cluster.files", "cluster.presets", "collectives.files")
print([name for name in (*unwanted, "programs.lower", "solvers") if f"stretto.{name}" in sys.modules])
from stretto.simulator import Bound, Runtime, lower_bound
print(Bound.__module__, st.Cluster.preset("dgx_h100").num_devices, st.simulator.bounds.lower_bound is lower_bound)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "stretto.simulator.bounds.lower", "8", "True"]


def test_every_name_of_the_package_can_be_loaded() -> None:
    assert all(getattr(stretto, name) is not None for name in stretto.__all__)
    assert set(stretto.__all__) <= set(dir(stretto))
    assert not hasattr(stretto, "no_such_name")


HOMES = {
    r"(from|import|import_module\(\")\s*(highspy|ortools)": {"solvers"},
    r"\bray\.init\(": {"children"},
    r"\bsubprocess\.(Popen|run|call|check_\w+)\b": {"children", "lab/network.py", "doctor", "cli/run_job.py"},
    r"\bmultiprocessing\b|\bos\.(fork|posix_spawn)\(": set[str](),
}
"""Where solvers and processes are started. Beside `Child`: short questions of the lab and the doctor to other programs,
whose answers are waited for, and the job of `stretto run`, which shares the terminal with us."""


@pytest.mark.parametrize("start", HOMES)
def test_solvers_and_processes_have_one_home(start: str) -> None:
    users = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if re.search(start, path.read_text())}
    assert bool(users) == bool(HOMES[start])
    assert {user for user in users if not user.startswith(tuple(HOMES[start]))} == set()


LONGEST_FUNCTION = 80


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_no_function_is_longer_than_a_screen_or_two() -> None:
    long = [
        f"{path.relative_to(ROOT)} {node.name}: {code_lines(node)}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > LONGEST_FUNCTION
    ]
    assert long == []


def test_a_public_class_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name for name, files in homes.items() if len(files) > 1} == set()


BRITISH = re.compile(
    r"(synchronis|synthesise|utilis|optimis|minimis|maximis|normalis|serialis|localis|initialis|quantis|randomis|summaris"
    r"|recognis|organis|parallelis|colour|neighbour|centre|behaviour|favour|travell|analyse(?!r))",
    re.IGNORECASE,
)


def test_identifiers_are_spelled_as_in_the_us() -> None:
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in nodes_of(path):
            names = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
            found |= {(name, path.name) for name in names if isinstance(name, str) and BRITISH.search(name)}
    # A baseline's name in files, and a function of the C++ module.
    assert {name for name, _ in found} <= {"hand_optimised", "colour_edges"}, found


def test_the_glossary_names_classes_that_there_are() -> None:
    defined = {
        node.name for path in ROOT.rglob("*.py") for node in tree_of(path).body if isinstance(node, ast.ClassDef)
    }
    text = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+)`", text))
    assert len(named) > 40 and named <= defined
