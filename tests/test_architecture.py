"""The house rules: imports go downward only, and the core never needs torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import stretto

ROOT = Path(stretto.__file__).parent

# Each layer may import itself and those before it; modules on one line know nothing of each other.
LAYERS = [
    {"errors", "_native"},
    {"units", "files", "highs"},
    {"cluster", "collectives"},
    {"programs"},
    {"simulator"},
    {"algorithms"},
    {"synthesis"},
    {"workload"},
    {"dimensions"},
    {"resharding"},
    {"pipeline"},
    {"planner"},
    {"strategy"},
    {"runtime", "lab"},
    {"control"},
    {"torch"},
    {"report"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[str]:
    """The rooms of the house that a file imports, whether at the top or inside a function."""
    inside = path.relative_to(ROOT).with_suffix("").parts
    package = inside if path.name == "__init__.py" else inside[:-1]
    package = tuple(part for part in package if part != "__init__")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            module = tuple(node.module.split(".")) if node.module else ()
            names = [(*base, *module, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "stretto":
            names = [(*node.module.split(".")[1:], alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "stretto"]
        found |= {name[0] for name in names if name and name[0] in LEVEL}
    return found


def test_imports_go_downward_only() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).with_suffix("").parts[0]
        if room in ("__init__", "__main__"):
            continue
        assert room in LEVEL, f"{path} is in a room that the architecture does not know"
        wrong += [
            f"{path.relative_to(ROOT)} imports {other}"
            for other in imported(path)
            if other != room and LEVEL[other] >= LEVEL[room]
        ]
    assert wrong == []


def test_the_checker_sees_every_form_of_import(tmp_path: Path) -> None:
    here = ROOT / "programs" / "ir.py"
    assert {"collectives", "errors", "_native"} <= imported(here)
    assert "cli" not in imported(here)


def test_core_imports_without_torch_and_without_the_plotting_stack() -> None:
    code = "import stretto, sys; print([m for m in ('torch', 'plotly', 'perfetto', 'highspy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
