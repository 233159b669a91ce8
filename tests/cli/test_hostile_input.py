# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file or behind an option: success, or one line and exit code 2."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.cli import MAX_MESSAGE, run

Run = Callable[..., str]
TOKENS = (b"-1", b"0", b"99999999999", b"1e308", b"nan", b"[", b"{", b"\x00", b"\xff", b"\x1b[31m", b"*a", b"<a>", b"")


@pytest.mark.parametrize("command", [("cluster", "show"), ("program", "verify"), ("collective", "show")])
def test_pipes_and_devices_are_refused_instead_of_read(command: tuple[str, str], tmp_path: Path, bad: Run) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert bad(*command, str(pipe)).endswith("pipe: not a regular file")
    assert bad(*command, "/dev/zero").endswith("/dev/zero: not a regular file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate ring -c ring:2,alpha_us=1e10", "alpha_us: must be 0 to 1e+09"),
        ("simulate ring -c ring:2,alpha_us=1e308", "alpha_us: 1e308: must be a number up to 1e+15"),
        ("cluster show ring:4,alpha_us=99999999999999999999", "alpha_us: 99999999999999999999: must be a number up"),
        ("cluster show ring:٤", "'٤': expected preset:nodes,key=value"),
        ("cluster show torus:٤x٤", "'٤x٤': expected preset:nodes,key=value"),
        ("workload show gpt:1.3b,micro_batches=٤", "micro_batches: must be a whole number, not '٤'"),
        ("simulate ring -c ring:4 --bytes ٤", "size '٤': expected a number"),
        ("cluster show ring:4,gb_per_s=nan", "gb_per_s: nan: must be a number up to 1e+15"),
        ("cluster show ring:99999999999999999999", "nodes: 99999999999999999999: must be a number up to 1e+15"),
        ("workload show gpt:1.3b,ranks=99999999999999999999", "ranks: 99999999999999999999: must be a number up to"),
        ("workload show gpt:1.3b,micro_batches=1e400", "micro_batches: 1e400: must be a number up to 1e+15"),
        ("simulate ring -c ring:2,gb_per_s=1e-308", "gb_per_s: must be 1e-09 to 1e+09"),
        ("simulate ring -c ring:4 --set rings=1000000000", "rings: at most 256"),
        ("simulate ring -c ring:4 --set ranks=3", "--set ranks: not an option of an algorithm"),
        ("simulate ring -c :", "unknown preset ''"),
        ("simulate direct -c ring:2 --collective alltoallv --set counts=0,1;2", "counts"),
        ("collective show all_gather -n 100000", "ranks, chunks: the buffers"),
        ("collective show all_to_all_v -n 100000", "--ranks: all_to_all_v over 100000 ranks"),
        ("collective show permute -n 1000000000", "ranks: must be 1..131072"),
        ("collective show all_reduce --root 1", "--root: all_reduce has no root"),
        ("pipeline export 1f1b --backward \u0663", "--backward '\u0663': must be 0 to"),
        ("pipeline export 1f1b --forward nan", "forward"),
        ("dims sweep -c torus:4x4 --chunks \u0663", "--chunks '\u0663': expected numbers"),
        ("dims train themis:dlrm -c themis_2d_sw_sw --chunks 0", "chunks: must be 1..65536, not 0"),
        ("dims train themis:dlrm -c themis_2d_sw_sw --chunks 99999999999999999999", "chunks: must be 1..65536"),
    ],
)
def test_options_out_of_all_bounds_are_refused_at_once(arguments: str, message: str, bad: Run) -> None:
    assert message in bad(*arguments.split())


@pytest.mark.parametrize("suffix", ["txt", "xml", "json"])
def test_a_few_words_cannot_ask_for_much_memory(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"p.{suffix}"
    whole = ["simulate", "direct", "-c", "fully_connected:3", "--collective", "all_to_all", "-o", str(file)]
    assert run(whole) == 0
    text, count = file.read_text(), 1 << 20
    if suffix == "txt":
        text = text.replace("chunks 1", f"chunks {count}")
    elif suffix == "xml":
        for key in ("nchunksperloop", "i_chunks", "o_chunks"):
            text = text.replace(f'{key}="3"', f'{key}="{3 * count}"')
    else:
        for key in ("input_chunks", "output_chunks"):
            text = re.sub(f'"{key}": *3', f'"{key}": {3 * (count // 4)}', text)
    assert text != file.read_text()
    file.write_text(text)
    # The tables alone would take ten times what is allowed here beside the imported modules.
    limit = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({3 << 30},) * 2)"
    script = f"{limit}; from stretto.cli import run; import stretto.programs.verify; before = r.getrusage(0).ru_maxrss"
    script += f"; code = run(['program', 'verify', {str(file)!r}]); print(code, r.getrusage(0).ru_maxrss - before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    code, more_kb = map(int, done.stdout.split()[-2:])
    assert (code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert more_kb < 80_000


@pytest.mark.parametrize("hidden", ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\u202e", "\r", "\x08"])
def test_names_from_files_do_not_command_the_terminal(hidden: str, tmp_path: Path, good: Run) -> None:
    cluster = tmp_path / "c.json"
    assert run(["cluster", "convert", "ring:3", str(cluster)]) == 0
    cluster.write_text(cluster.read_text().replace("ring:3", f"ring{json.dumps(hidden)[1:-1]}:3", 1))
    workload = tmp_path / "w.json"
    ops = [{"name": f"a{hidden}b", "kind": "all_reduce", "nbytes": 1, "stream": hidden}]
    workload.write_text(json.dumps({"stretto": "workload", "version": 1, "name": f"x{hidden}", "ranks": 3, "ops": ops}))
    program = tmp_path / "p.txt"
    assert run(["simulate", "ring", "-c", "ring:3", "-o", str(program)]) == 0
    text = program.read_text().splitlines()
    program.write_text("\n".join([text[0], f"name {json.dumps('p' + hidden)}", *text[2:]]) + "\n")
    for command in (("cluster", "show", cluster), ("workload", "show", workload), ("program", "show", program),
                    ("program", "verify", program), ("program", "run", program)):  # fmt: skip
        shown = good(*map(str, command))
        assert not [c for c in shown if not c.isprintable() and c not in "\n\t"], command


def test_a_message_neither_floods_nor_commands_the_terminal(tmp_path: Path, bad: Run) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"stretto": "cluster", "version": 1, "name": "x", "\\u001b[31m' + "x" * 5000 + '": 1}')
    line = bad("cluster", "check", str(file))
    assert "\x1b" not in line
    assert "unknown field" in line
    assert len(line) < MAX_MESSAGE + 100


@pytest.mark.parametrize("kind", ["cluster", "collective", "text", "xml", "json"])
def test_damaged_files_never_cause_a_traceback(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "cluster":
        file, command = tmp_path / "c.yaml", ("cluster", "check")
        assert run(["cluster", "convert", "hgx2:2", str(file)]) == 0
    elif kind == "collective":
        file, command = tmp_path / "c.yaml", ("collective", "show")
        assert run(["collective", "show", "all_to_all_v", "-o", str(file)]) == 0
    else:
        file, command = tmp_path / f"p.{kind.replace('text', 'txt')}", ("program", "run")
        assert run(["simulate", "ring", "-c", "ring:3", "-o", str(file)]) == 0
    whole = file.read_bytes()
    draw = random.Random(kind)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(len(data) + 1)
            data[at : at + draw.choice((0, 1, 3, 40))] = draw.choice(TOKENS)
        file.write_bytes(data[: draw.choice((len(data), draw.randrange(len(data) + 1)))])
        capsys.readouterr()
        code, said = run([*command, str(file)]), capsys.readouterr().err
        assert (code, said.count("\n")) in ((0, 0), (2, 1)), said
