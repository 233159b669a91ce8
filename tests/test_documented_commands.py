# SPDX-License-Identifier: Apache-2.0
"""The commands and the Python of every page are run, one after the other as the page has them, in an empty folder.

What a page takes for granted (a trace, a topology) lies there; what needs a job, a GPU or another host is listed in
`ELSEWHERE` and `PART`, with the test that runs it. Searches are short and steps small: what is tried is that
everything can be typed as it stands.
"""

from __future__ import annotations

import doctest
import gzip
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT, command_line, stretto_lines

import stretto as st
from stretto.cli import run
from stretto.strategy import BUILDERS

PATTERN = re.compile(r"(?<![\w-])(?:[A-Z]{1,9}(?:,[A-Z])?|[A-Z]+\.\w+|FILE\S*|\S*\.\.\.)(?![\w(\[])")
"""A word that stands for another: such a command is a pattern."""
ELSEWHERE = {
    r"stretto demo$": "cli/test_demo_command.py",
    r"stretto (run|tune|probe|bench|selftest|lab|controller|status)\b": "cli/test_*_command.py",
    r"stretto advise -- ": "test_tutorial.py",
    r"stretto weights run --device cuda": "gpu/test_gpu_weights.py",
    r".*--backend ray": "synthesis/test_ray_backend.py",
    r"stretto synth allgather -c (now.yaml|dgx2:2 .*--sketch dgx2-sk-1.json)": "cli/test_synth_command.py",
    r"stretto program (verify custom.xml|convert ag.txt)": "cli/test_simulate_command.py, cli/test_synth_command.py",
    r"stretto (runtime fit|simulate all -c c.yaml --runtime mine)": "cli/test_runtime_command.py",
    r"stretto plan .*--costs": "cli/test_plan_command.py",
    r"stretto strategy simulate strategy.yaml": "cli/test_tune_command.py",
    r"stretto (simulate rign|synth allgather -c ndv2 --budget 0|dims compare --tracker|reshard --orders|reshard -o)": (
        "wrong on purpose, or a part of a command"
    ),
}
"""Commands that are not run here, and where they are."""
PART = re.compile(
    r"\b(agent|collective|comm|dist|DdpHook|enforcer|ex|executor|fully_shard|inductor_costs|job|lab|last_choice|loader"
    r"|PipelineStage|DeviceMesh|MappedSync|optimizer|register_plans|register_vllm|reshard|steps|SyncWorld|sync|batch"
    r"|WeightSync|GlooCarrier|recorder)\b[.( =,]"
)
"""What is only in a job, or in a function: such Python is run by tests/examples, tests/runtime and tests/resharding."""
SHORT = {
    "plan": ["--steps", "5"],
    "advise": ["--steps", "5"],
    "synth": ["--budget", "0.3", "--no-cache", "--makers", "library"],
}
"""Options that make a search short."""
SMALL = {
    "dlrm:A2 ": "dlrm:A2,ranks=8 ", 'dlrm("A2")': 'dlrm("A2", ranks=8)', "hgx2:16": "hgx2:1", "incast:16": "incast:1",
    "budget_s=30": "budget_s=1", "budget_s=5": "budget_s=1", "trials=20": "trials=3",
    "st.GB], lower=True": "st.MB], lower=True, budget_s=0.3", "MB, lower=True": "MB, lower=True, budget_s=0.3",
    "dgx_h200 -b 1K..1G": "dgx_h200 -b 64K..1M", "--bytes 1K..1G -o tables/": "--bytes 64K..4M -o tables/",
    "advise gpt:1.3b": "advise gpt:125m",
    'helpers="host")': 'helpers="host", budget_s=0.3)',
}  # fmt: skip
"""A step of 128 ranks is planned as well with 8."""


def made(*line: str) -> None:
    assert run(["-q", *line]) == 0


def traces(folder: Path) -> None:
    (folder / "traces").mkdir()
    data = ROOT / "tests" / "workload" / "data"
    for path in data.glob("gpu_nccl.*.json"):
        shutil.copy(path, folder / "traces")
    for rank in (0, 1):
        shutil.copy(data / f"ddp_gloo.{rank}.json", folder / f"rank{rank}.json")
    shutil.copy(data / "gpu_nccl.0.json", folder / "trace.json")
    with gzip.open(folder / "rank0.json.gz", "wb") as file:
        file.write((data / "gpu_nccl.0.json").read_bytes())


def topology(folder: Path) -> None:
    shutil.copy(ROOT / "tests/cluster/data/nccl_hgx_h100.xml", folder / "topo.xml")
    shutil.copy(ROOT / "tests/cluster/data/smi_dgx_a100.txt", folder / "topo.txt")
    shutil.copy(ROOT / "tests/synthesis/data/taccl_listing1_dgx2_sk1.json", folder / "dgx2-sk-1.json")
    for name, preset in (("cluster", "dgx_a100:1"), ("lab", "dgx_a100:1"), ("my-cluster", "torus:4x4")):
        made("cluster", "convert", preset, str(folder / f"{name}.yaml"))


def programs(folder: Path) -> None:
    for name, algorithm in (("ring.txt", "ring"), ("new.xml", "ring"), ("ar.xml", "direct"), ("direct.txt", "direct")):
        made("simulate", algorithm, "-c", "dgx_a100:1", "-o", str(folder / name))


def plans(folder: Path) -> None:
    for name, steps in (("old.json", "1"), ("new.json", "9")):
        made("plan", "-w", "dlrm:A2,ranks=8", "-c", "hgx2:1", "--steps", steps, "-o", str(folder / name))


GIVEN: dict[str, Callable[[Path], None]] = {
    "mscclpp": programs, "programs": programs, "planner": plans, "clusters": topology, "probe": topology,
    "README": traces, "reports": traces, "traces": traces, "workloads": traces, "sketches": topology,
}  # fmt: skip
"""What the reader of a page has already; those of `advise` and `tutorial` have traces and a topology."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The folder in which a reader of the page works."""
    monkeypatch.chdir(tmp_path)
    page: Path = request.node.callspec.params["page"]
    gifts = (traces, topology) if page.stem in ("advise", "tutorial") else (GIVEN.get(page.stem),)
    for give in gifts:
        if give is not None:
            give(tmp_path)
    return tmp_path


def smaller(text: str) -> str:
    """The same with smaller steps and shorter searches."""
    for large, small in SMALL.items():
        text = text.replace(large, small)
    return text


def words_of(line: str) -> list[str]:
    """The words of a command after `stretto`, with a search that is cut short."""
    words, path, command = shlex.split(smaller(line))[1:], list[str](), command_line()
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words[0]]
        path.append(words.pop(0))
    return [*path, *words, *SHORT.get(" ".join(path), [])]


def runnable(page: Path) -> list[str]:
    """The whole commands of a page, each once."""
    lines = [line for line in dict.fromkeys(stretto_lines(page)) if not PATTERN.search(line)]
    return [line for line in lines if not any(re.match(start, line) for start in ELSEWHERE)]


def blocks(page: Path) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def python_of(page: Path) -> list[str]:
    """The Python of a page that is no dialog, and no part of a job or of a function."""
    return [body for body in blocks(page) if ">>>" not in body and not PART.search(body)]


def name_of(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_the_commands_of_a_page_can_be_typed_as_they_stand(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in runnable(page):
        code = run(words_of(line))
        said = capsys.readouterr()
        assert code == 0, f"{line}: {said.err}"
        for name in re.findall(r" (?:-o|--html|--tuner|--trace|--json) ([\w./]+)", line):
            assert (folder / name).exists(), f"{line}: {name}"


@pytest.mark.parametrize("page", [page for page in DOCS if ">>>" in page.read_text()], ids=name_of)
def test_what_a_page_shows_after_a_prompt_is_what_happens(page: Path, folder: Path) -> None:
    dialogs = [body for body in blocks(page) if ">>>" in body]
    test = doctest.DocTestParser().get_doctest("\n".join(dialogs), {}, page.name, str(page), 0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=flags, verbose=False).run(test, out=said.append)
    assert tried > 0 and failed == 0, "".join(said)


@pytest.mark.parametrize("page", [page for page in DOCS if python_of(page)], ids=name_of)
def test_the_python_of_a_page_runs(page: Path, folder: Path) -> None:
    names: dict[str, object] = {"program": st.algorithm("ring", "all_reduce", 4)}
    builders = set(BUILDERS)
    try:
        for body in python_of(page):
            exec(compile(smaller(body), str(page), "exec"), names)
    finally:
        for name in set(BUILDERS) - builders:
            BUILDERS.forget(name)


def test_most_of_what_can_run_without_a_job_is_run() -> None:
    assert sum(len(runnable(page)) for page in PAGES) > 60
    assert sum(len(python_of(page)) for page in PAGES) > 10
