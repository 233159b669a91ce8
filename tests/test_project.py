# SPDX-License-Identifier: Apache-2.0
"""The furniture of the project: license lines, one version, the marks of tests, the commands that pages name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import stretto

ROOT = Path(__file__).parents[1]
LINE = "SPDX-License-Identifier: Apache-2.0"


def test_the_base_and_the_runtime_leave_the_pytorch_of_an_environment_alone() -> None:
    extra = re.compile(r'extra == "(\w+)"')
    wanted = [line for line in requires("stretto") or [] if (extra.search(line) or ["", ""])[1] in ("", "runtime")]
    assert wanted and not [line for line in wanted if line.startswith(("torch", "nvidia", "triton"))]


def spdx(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "spdx"), *words], capture_output=True, text=True, check=False
    )


def test_license_lines_are_added_once_and_below_the_interpreter(tmp_path: Path) -> None:
    for folder in ("src", "native", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "a.py").write_text('"""A module."""\n')
    (tmp_path / "src" / "data.json").write_text("{}\n")
    (tmp_path / "native" / "b.cpp").write_text("int b;\n")
    (tmp_path / "scripts" / "c").write_text("#!/bin/sh\ntrue\n")
    asked = spdx("--check", str(tmp_path))
    assert asked.returncode == 1 and len(asked.stdout.splitlines()) == 3
    for _ in range(2):
        assert spdx(str(tmp_path)).returncode == 0
        assert (tmp_path / "src" / "a.py").read_text() == f'# {LINE}\n"""A module."""\n'
        assert (tmp_path / "native" / "b.cpp").read_text() == f"// {LINE}\nint b;\n"
        assert (tmp_path / "scripts" / "c").read_text() == f"#!/bin/sh\n# {LINE}\ntrue\n"
        assert (tmp_path / "src" / "data.json").read_text() == "{}\n"
    assert spdx("--check", str(tmp_path)).returncode == 0


def test_every_file_has_the_license_line_once_the_first_has() -> None:
    if LINE in (ROOT / "src" / "stretto" / "__init__.py").read_text():
        assert spdx("--check").stdout == ""


def test_the_version_is_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert [
        str(path) for path in (ROOT / "src").rglob("*.py") if re.search(r"^__version__ = ", path.read_text(), re.M)
    ] == []
    assert isinstance(stretto.__version__, str)


def test_the_list_of_slow_tests_is_of_tests_that_there_are() -> None:
    names = (ROOT / "tests" / "slow_tests.txt").read_text().split()
    gone = []
    for name in names:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        # A doctest is named after its object, a test after its function.
        if function.rpartition(".")[2].rpartition("::")[2] not in text:
            gone.append(name)
    # A name that changes makes `make check` slower, not wrong: it is time for a new list when many have.
    assert len(gone) < len(names) / 10, gone


def test_what_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {name for name in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)} <= targets
    for path in re.findall(r"`((?:src|tests|docs|scripts|native)/[\w/.]+)`|\]\(([\w/.]+)\)", text):
        assert "NAME" in "".join(path) or (ROOT / "".join(path)).exists(), path


def test_pages_name_the_tag_of_the_wheels() -> None:
    glibc = re.search(r'^GLIBC = "(.+)"', (ROOT / "scripts" / "make-wheels").read_text(), re.MULTILINE)
    assert glibc is not None
    for page in ("README.md", "docs/tutorial.md"):
        assert set(re.findall(r"manylinux_(\d+_\d+)", (ROOT / page).read_text())) == {glibc[1].replace(".", "_")}, page
