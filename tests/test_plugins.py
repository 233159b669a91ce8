# SPDX-License-Identifier: Apache-2.0
"""Plug-ins: modules that `STRETTO_PLUGINS` or an entry point names are known to commands, to Python and to workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto as st
from stretto.algorithms import register_algorithm
from stretto.algorithms.registry import entry
from stretto.cluster.presets import register
from stretto.errors import InvalidInput
from stretto.planner.algebra import rule
from stretto.registry import PluginLoader, Registry
from stretto.strategy import register_builder
from stretto.synthesis import SearchMaker, register_maker

PLUGIN = '''
import stretto as st
from dataclasses import replace
from stretto.algorithms import Algorithm, register_algorithm
from stretto.algorithms.chain import chain
from stretto.cluster.presets import Wiring, numbered, register
from stretto.planner.algebra import rule, seq
from stretto.strategy import NodeConfig, Sync, register_builder
from stretto.synthesis import SearchMaker, register_maker


def drawn(request):
    return st.algorithm("ring", request.collective.kind, request.collective.ranks, chunks=2)


register_maker(SearchMaker(name="drawn_rings", make=drawn, collectives=("all_gather",)))


@register("a_star", "devices around one switch", default_nodes=4)
def a_star(name, nodes, *, gb_per_s=25.0):
    wiring = Wiring(numbered("gpu", nodes), hosts=range(nodes))
    hub = wiring.add(["hub"], kind="switch")
    wiring.duplex(wiring.devices, hub, gb_per_s=gb_per_s, alpha_us=1.0, back_us=0.0, channel="ethernet")
    return wiring.cluster(f"{name}:{nodes}")


def to_server(model, there, from_mb: float = 1.0):
    """Large variables on the first server."""
    server = Sync(kind="parameter_server", placement=there.servers[:1])
    return tuple(NodeConfig(variable=v.name, sync=server) for v in model.variables)


register_builder("to_server", to_server)


@rule("in_halves", kinds=["RE"])
def in_halves(motif):
    """Half of the payload, then the other half."""
    lo, hi = motif.spans[0]
    return seq([replace(motif, spans=((lo, hi // 2),)), replace(motif, spans=((hi // 2, hi),))])


register_algorithm(
    Algorithm(name="own_chain", collectives=("broadcast",), build=chain, summary="a chain", where="any number of ranks")
)
'''


@pytest.fixture
def plugins(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that know the plug-in."""
    (tmp_path / "my_plugins.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "greedy_plugin.py").write_text(
        "from stretto.synthesis import SearchMaker, register_maker\n"
        "register_maker(SearchMaker(name='forest', make=print, collectives=()))\n"
    )
    (tmp_path / "second.py").write_text("import my_plugins\n")
    cache = str(tmp_path / "cache")
    return {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "STRETTO_PLUGINS": " my_plugins, second,",
        "STRETTO_CACHE": cache,
    }


def stretto(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("synth all_gather -c ring:4 -b 1M --makers drawn_rings", "drawn_rings"),
        ("synth all_gather -c a_star:4 -b 1M --makers drawn_rings --jobs 2 --no-cache", "drawn_rings"),
        ("cluster list", "a_star"),
        ("cluster show a_star:3,gb_per_s=10", "a_star:3"),
        ("strategy list", "to_server"),
        ("strategy simulate to_server -m vgg16 -c ring:4", "to_server"),
        ("motif list -k RE", "in_halves"),
        ("algorithms --collective broadcast", "own_chain"),
        ("simulate own_chain broadcast -c a_star:4 -b 1M", "a_star"),
        ("simulate all broadcast -c a_star:4 -b 1M", "a_star"),
    ],
)
def test_commands_know_what_a_plugin_registers(plugins: dict[str, str], line: str, said: str) -> None:
    without = stretto({**plugins, "STRETTO_PLUGINS": ""}, *line.split())
    assert said not in without.stdout, "this is no test of plug-ins"
    result = stretto(plugins, *line.split())
    assert result.returncode == 0, result.stderr
    assert said in result.stdout


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("broken_plugin", "STRETTO_PLUGINS: broken_plugin: cannot be imported: ModuleNotFoundError"),
        ("my_plugins,not_there", "STRETTO_PLUGINS: not_there: cannot be imported: ModuleNotFoundError"),
        ("greedy_plugin", "STRETTO_PLUGINS: greedy_plugin: name: 'forest' is the name of another maker"),
        ("../my_plugins.py", "STRETTO_PLUGINS: ../my_plugins.py: cannot be imported"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line(plugins: dict[str, str], names: str, said: str) -> None:
    result = stretto({**plugins, "STRETTO_PLUGINS": names}, "synth", "all_gather", "-c", "ring:4", "-b", "1M")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1 and said in result.stderr, result.stderr


def test_a_plugin_that_nothing_asks_for_is_not_imported(plugins: dict[str, str]) -> None:
    assert stretto({**plugins, "STRETTO_PLUGINS": "broken_plugin"}, "--help").returncode == 0
    code = "import stretto, sys; print('my_plugins' in sys.modules, 'importlib.metadata' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env=plugins, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_python_knows_what_a_plugin_registers(plugins: dict[str, str]) -> None:
    code = """
import stretto as st
print(st.Cluster.preset("a_star", nodes=3).name, st.Cluster.load("a_star:2").name)
print(st.algorithm("own_chain", "broadcast", 4).num_transfers)
from stretto.strategy import build, zoo
print(build("to_server", zoo.model("vgg16", scale=0.05), 2).name)
"""
    found = subprocess.run([sys.executable, "-c", code], env=plugins, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["a_star:3", "a_star:2", "24", "to_server"]


def test_an_installed_package_names_its_plugin_by_an_entry_point(plugins: dict[str, str], tmp_path: Path) -> None:
    about = tmp_path / "own_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[stretto.plugins]\nown = my_plugins\n")
    environment = {**plugins, "STRETTO_PLUGINS": ""}
    assert "a_star" in stretto(environment, "cluster", "list").stdout
    (about / "entry_points.txt").write_text("[stretto.plugins]\nown = broken_plugin\n")
    result = stretto(environment, "cluster", "list")
    assert result.returncode == 2
    assert "plug-in broken_plugin of the package own-package: cannot be imported" in result.stderr


def test_the_planner_of_a_running_job_knows_plugins(plugins: dict[str, str]) -> None:
    code = """
from stretto.control import worker
class Noted:
    def __init__(self, words, **settings):
        print({name for name in settings["environment"] if name.startswith("STRETTO_")})
worker.Child = Noted
import msgspec
worker.msgspec.msgpack.encode = lambda ask: b""
class Ask: budget_s = 1.0
worker.Worker(Ask())
"""
    found = subprocess.run([sys.executable, "-c", code], env=plugins, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "{'STRETTO_PLUGINS'}"


def test_a_name_that_is_taken_is_refused_unless_it_is_to_be_replaced() -> None:
    forest = SearchMaker(name="forest", make=lambda request: request.options["program"], collectives=())
    with pytest.raises(InvalidInput, match="'forest' is the name of another maker; replace=True replaces it"):
        register_maker(forest)
    with pytest.raises(InvalidInput, match="'zero1' is the name of another builder"):
        register_builder("zero1", lambda model, there: ())
    with pytest.raises(InvalidInput, match="'ring' is the name of another rule"):
        rule("ring")(lambda motif: motif)
    with pytest.raises(InvalidInput, match="'dgx2' is the name of another preset"):
        register("dgx2", "mine", default_nodes=1)(lambda name, nodes: st.Cluster.preset("torus"))
    with pytest.raises(InvalidInput, match="'ring' is the name of another algorithm"):
        register_algorithm(entry("ring"))
    kept = Registry[int]("number", reserved=("two",))
    kept.register("one", 1)
    kept.register("one", 2, replace=True)
    kept.register("two", 3, replace=True)
    assert dict(kept) == {"one": 2, "two": 3}


def test_a_plugin_that_failed_is_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_PLUGINS", "no_such_module_at_all")
    loader = PluginLoader()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="STRETTO_PLUGINS: no_such_module_at_all: cannot be imported"):
            loader.load()
