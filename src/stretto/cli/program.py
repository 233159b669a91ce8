# SPDX-License-Identifier: Apache-2.0
"""``stretto program``: prove, show, convert and run program files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster import Cluster
from ..collectives import Collective
from ..collectives.files import load_collective
from ..errors import CannotJudge, InvalidInput, StrettoError, VerificationError
from ..files import write_file
from ..programs import Lowered, Program, SymmetricProgram
from ..programs.formats import SUFFIXES, expanded, format_of, load_program, save_program, symmetric_text
from ..programs.formats.mscclpp_reader import ExecutionPlan, check_plan
from ..programs.formats.mscclpp_wide import PlanForm
from ..programs.formats.text import dumps
from ..programs.interpret import check
from ..programs.lowered import BUFFERS, OPS, READS_SRC, RECEIVES, SENDS, WRITES_DST
from ..report.table import ResultTable
from .common import about, out, parse_limits, progress, say
from .options import JsonOption, OptionalCluster, SeedOption
from .outputs import OutputFiles, output

app = typer.Typer(
    no_args_is_help=True,
    help="Prove, show, convert and run program files: our text form, MSCCL XML, MSCCL++ JSON.",
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="Text form (.txt, .prog), MSCCL XML or MSCCL++ JSON.")]
InPlace = Annotated[
    bool | None,
    typer.Option("--in-place/--out-of-place", help="Whether input and output share memory; default: as the file says."),
]
CollectiveFile = Annotated[
    Path | None,
    typer.Option("--collective", help="What an MSCCL file of coll=custom must achieve: a collective file."),
]


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="One or more program files.")],
    in_place: InPlace = None,
    collective: CollectiveFile = None,
    rows: JsonOption = None,
) -> None:
    """Prove that a program does what its collective asks: nothing missing, no race, no deadlock.

    \b
    Examples:
      stretto program verify ring.txt
      stretto program verify allreduce.xml --in-place
      stretto program verify *.xml

    Exit code 2 and one line that says where, when it does not. Of several files all are judged.
    """
    wrong, unknown, verdicts, told = 0, 0, [], []
    with progress("verifying", len(files)) as advance:
        for path in files:
            advance(path.name)
            try:
                verdicts.append(f"{path}: {_prove(path, _load(path, in_place, collective))}")
                told.append({"file": str(path), "right": True, "why": ""})
            except CannotJudge as error:
                if len(files) == 1:
                    raise
                unknown += 1
                verdicts.append(f"{path}: cannot judge: {str(error).removeprefix(f'{path}: ')}")
                told.append({"file": str(path), "right": None, "why": str(error)})
            except StrettoError as error:
                if len(files) == 1:
                    raise
                wrong += 1
                verdicts.append(f"{path}: WRONG: {str(error).removeprefix(f'{path}: ')}")
                told.append({"file": str(path), "right": False, "why": str(error)})
    written = OutputFiles()
    written.json(rows, {"rows": told})
    for verdict in verdicts:
        say(verdict)
    written.tell()
    if wrong:
        raise VerificationError(f"{wrong} of {len(files)} files are wrong")
    if unknown:
        raise CannotJudge(f"{unknown} of {len(files)} files do not say what is to be proved; give --collective")


@app.command()
def show(
    file: File,
    rank: Annotated[int | None, typer.Option("--rank", "-r", help="Only what this rank does.")] = None,
    lower: Annotated[bool, typer.Option("--lower", help="The instruction streams of a program.")] = False,
    in_place: InPlace = None,
    collective: CollectiveFile = None,
    rows: JsonOption = None,
) -> None:
    """Print a program so that a person can read it: transfers, or each rank's instruction streams.

    \b
    Examples:
      stretto program show ring.txt
      stretto program show ring.txt --lower --rank 0
      stretto program show allreduce.xml --rank 3
    """
    with progress("reading", 1) as advance:
        advance(file.name)
        loaded = _load(file, in_place, collective)
        if isinstance(loaded, SymmetricProgram) and lower:
            loaded = expanded(loaded, file)
        if isinstance(loaded, Program) and lower:
            loaded = loaded.lower()
    if isinstance(loaded, SymmetricProgram):
        ranks = loaded.num_ranks
    else:
        ranks = loaded.collective.num_ranks if isinstance(loaded, Program | Lowered) else len(loaded.gpus)
    if rank is not None and not 0 <= rank < ranks:
        raise InvalidInput(f"--rank: must be 0..{ranks - 1}, not {rank}")
    files = OutputFiles()
    if isinstance(loaded, Program | SymmetricProgram):
        lines = _lines(loaded, rank)
        files.json(rows, {"file": str(file), "lines": lines})
        for line in lines:
            say(line)
    else:
        tables = list(_streams(loaded, rank) if isinstance(loaded, Lowered) else _blocks(loaded, rank))
        files.json(rows, {"file": str(file), "threadblocks": [
            {"threadblock": str(table.title), "steps": table.records} for table in tables
        ]})  # fmt: skip
        say(about(loaded))
        for table in tables:
            out().print()
            out().print(table)
    files.tell()


WideOption = Annotated[
    str | None,
    typer.Option(
        metavar="FORM", help="An MSCCL++ plan of wide steps, such as protocol=LL,streams=8,slices=2; see docs."
    ),
]


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A program file.")],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUT", callback=output(*SUFFIXES), help=f"What to write: {', '.join(SUFFIXES)}."),
    ],
    dialect: Annotated[
        str | None, typer.Option(help="MSCCL XML for the 'new' runtime (and RCCL; default) or the 'old' one.")
    ] = None,
    instances: Annotated[
        int | None, typer.Option(help="Cut every chunk in so many, each on channels of its own.")
    ] = None,
    fifo_depth: Annotated[
        int | None, typer.Option(help="Be safe with FIFOs this deep: 1 (default), or 2, which fuses more.")
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help="NCCL protocol of an XML file: Simple (default), LL or LL128.")
    ] = None,
    min_bytes: Annotated[str | None, typer.Option(help="Smallest size the file is for, such as 1M.")] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Largest size the file is for; 0: no limit.")] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="0,0,1,1", help="Host of each rank: an MSCCL++ plan uses port channels between hosts."),
    ] = None,
    cluster: OptionalCluster = None,
    rank: Annotated[
        int | None, typer.Option("--rank", "-r", help="Only one rank's part of a symmetric program, as text.")
    ] = None,
    zero_copy: Annotated[
        bool | None, typer.Option("--zero-copy", help="An MSCCL++ plan puts straight into place where that is safe.")
    ] = None,
    wide: WideOption = None,
    in_place: InPlace = None,
    collective: CollectiveFile = None,
) -> None:
    """Write a program in another format; the ending of OUT decides which. It is verified first.

    \b
    Examples:
      stretto program convert ring.txt ring.xml --instances 4
      stretto program convert ring.txt ring.xml --in-place --dialect old
      stretto program convert allreduce.xml allreduce.json --hosts 0,0,1,1 --zero-copy
      stretto program convert allreduce.xml allreduce.json --cluster dgx2:2
      stretto program convert direct.txt direct.json --wide protocol=LL,streams=8 --max-bytes 1M
      stretto program convert symmetric.txt rank17.txt --rank 17
    """
    sizes = parse_limits(min_bytes, max_bytes)
    if hosts is not None and cluster is not None:
        raise InvalidInput("--hosts: --cluster says the same; give one of the two")
    with progress("verifying", 1) as advance:
        advance(source.name)
        loaded = _load(source, in_place, collective)
        _prove(source, loaded)
    if isinstance(loaded, ExecutionPlan):
        raise InvalidInput(f"{source}: an MSCCL++ plan cannot be converted back")
    kind = format_of(target)
    if rank is not None:
        _convert_rank(loaded, source, target, rank)
        return
    if isinstance(loaded, SymmetricProgram):
        loaded = expanded(loaded, source)
    if wide is not None:
        _convert_wide(loaded, target, PlanForm.parse(wide), sizes, _hosts(hosts, cluster, loaded.collective))
        return
    lowering = _given(instances=instances, fifo_depth=fifo_depth)
    for_xml = _given(dialect=dialect, protocol=protocol)
    for_plan = _given(hosts=hosts, cluster=cluster, zero_copy=zero_copy)
    _refuse_options(kind, isinstance(loaded, Lowered), lowering, sizes, for_xml, for_plan)
    with progress("converting", 1) as advance:
        advance(target.name)
        places = _hosts(hosts, cluster, loaded.collective) if kind == "mscclpp" else None
        if isinstance(loaded, Program) and kind != "text":
            loaded = loaded.lower(**lowering)
        if isinstance(loaded, Lowered):
            changes: dict[str, Any] = sizes | _given(protocol=protocol)
            loaded = replace(loaded, **changes)
        save_program(loaded, target, hosts=places, **_given(dialect=dialect, zero_copy=zero_copy))
    say(f"{target}: {about(loaded)}")
    if kind == "mscclpp" and places is None:
        say("all ranks are taken to share one host; --hosts or --cluster says otherwise")


def _convert_wide(
    loaded: Program | Lowered, target: Path, form: PlanForm, sizes: dict[str, int], hosts: Sequence[int] | None
) -> None:
    """Write a plan of wide steps."""
    with progress("converting", 1) as advance:
        advance(target.name)
        save_program(loaded, target, hosts=hosts, form=form, **sizes)
    say(f"{target}: {about(loaded)}, {form}")


def _refuse_options(
    kind: str, is_lowered: bool, lowering: dict[str, Any], sizes: dict[str, int], for_xml: dict[str, Any],
    for_plan: dict[str, Any],
) -> None:  # fmt: skip
    """Refuse what the format to write, or a program that is lowered already, has no place for."""
    if kind == "text":
        _refuse(lowering | sizes | for_xml, "the text form knows nothing of it")
    if kind != "mscclpp":
        _refuse(for_plan, "only an MSCCL++ plan (.json) has it")
    if is_lowered:
        _refuse(lowering, "instruction streams cannot be lowered again")
    if kind == "mscclpp":
        _refuse(for_xml, "only MSCCL XML has it")


def _convert_rank(loaded: Program | SymmetricProgram | Lowered, source: Path, target: Path, rank: int) -> None:
    """Write one rank's part of a symmetric program."""
    if not isinstance(loaded, SymmetricProgram):
        raise InvalidInput(f"--rank: {source} is written out for all ranks; only a symmetric program has parts")
    if format_of(target) != "text":
        raise InvalidInput(f"--rank: {target}: one rank's part has a text form only (.txt, .prog)")
    write_file(target, symmetric_text.dumps_rank(loaded, rank))
    say(f"{target}: rank {rank} of {about(loaded)}")


def _hosts(text: str | None, cluster: str | None, collective: Collective) -> list[int] | None:
    """The host of each rank, from ``--hosts`` or ``--cluster``."""
    if cluster is not None:
        found: list[int] = Cluster.load(cluster).hosts_of(collective.ranks).tolist()
        return found
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise InvalidInput(f"--hosts: {text!r} is not a list of host numbers such as 0,0,1,1")
    return [int(part) for part in parts]


def _given(**options: object) -> dict[str, Any]:
    """The options that were given at all."""
    return {key: value for key, value in options.items() if value is not None}


def _refuse(options: dict[str, Any], why: str) -> None:
    for key in options:
        raise InvalidInput(f"--{key.replace('_', '-')}: {why}")


@app.command()
def run(
    file: File,
    fifo_depth: Annotated[int | None, typer.Option(help="Messages that fit into a connection (default 2).")] = None,
    op: Annotated[str | None, typer.Option(help="What reductions do: sum (default), prod, max or min.")] = None,
    seed: SeedOption = 0,
    in_place: InPlace = None,
    collective: CollectiveFile = None,
    rows: JsonOption = None,
) -> None:
    """Execute a program on random data with NumPy, every rank at once, and compare with the right answer.

    \b
    Examples:
      stretto program run ring.txt
      stretto program run allreduce.xml --fifo-depth 1 --op max
    """
    with progress("running", 1) as advance:
        advance(file.name)
        loaded = _load(file, in_place, collective)
        if isinstance(loaded, SymmetricProgram):
            loaded = expanded(loaded, file)
        if isinstance(loaded, ExecutionPlan):
            _refuse(_given(fifo_depth=fifo_depth, op=op), "a plan settles this itself")
            result = str(check_plan(loaded, seeds=(seed,)))
        else:
            _prove(file, loaded)
            lowered = loaded.lower() if isinstance(loaded, Program) else loaded
            depth, how = 2 if fifo_depth is None else fifo_depth, op or "sum"
            check(lowered, fifo_depth=depth, op=how, seed=seed)
            result = (
                f"{lowered.num_instructions} instructions on {lowered.collective.num_ranks} ranks ran with FIFO depth "
                f"{depth}; all {len(lowered.collective.out_chunk)} output chunks are right ({how})"
            )
    files = OutputFiles()
    files.json(rows, {"file": str(file), "right": True, "seed": seed, "about": result})
    say(f"{file}: {result}")
    files.tell()


def _load(
    path: Path, in_place: bool | None, collective: Path | None
) -> Program | SymmetricProgram | Lowered | ExecutionPlan:
    wanted = None if collective is None else load_collective(collective)
    loaded = load_program(path, collective=wanted, in_place=in_place)
    if isinstance(loaded, Program):
        given = loaded.collective if in_place is None else replace(loaded.collective, in_place=in_place)
        return loaded if given is loaded.collective else loaded.replace(collective=given)
    if isinstance(loaded, SymmetricProgram):
        if in_place:
            raise InvalidInput(f"{path}: a symmetric program is for out of place calls only")
        return loaded
    if not isinstance(loaded, Lowered) and in_place not in (None, loaded.inplace):
        raise InvalidInput(f"{path}: the plan is for {'in' if loaded.inplace else 'out of'} place calls only")
    return loaded


def _prove(path: Path, loaded: Program | SymmetricProgram | Lowered | ExecutionPlan) -> str:
    """Verify, and say in one line what was proved."""
    if isinstance(loaded, Program | SymmetricProgram | Lowered):
        try:
            report = loaded.verify()
        except VerificationError as error:
            raise VerificationError(f"{path}: {error}") from None
        notes = "".join(f"; {note}" for note in report.warnings)
        return f"right: {about(loaded)}; cannot deadlock with FIFO depth {report.fifo_depth}{notes}"

    return str(check_plan(loaded))


def _lines(program: Program | SymmetricProgram, rank: int | None) -> list[str]:
    """The text of a program, or what of it concerns one rank."""
    if isinstance(program, SymmetricProgram):
        text = symmetric_text.dumps(program) if rank is None else symmetric_text.dumps_rank(program, rank)
        return text.splitlines()
    found = []
    for line in dumps(program).splitlines():
        number = line.partition(":")[0]
        if rank is None or not number.isdecimal() or rank in (program.src[int(number)], program.dst[int(number)]):
            found.append(line)
    return found


def _streams(x: Lowered, rank: int | None) -> Iterator[ResultTable]:
    first = -1
    for b, owner in enumerate(x.tb_rank.tolist()):
        if b == 0 or x.tb_rank[b - 1] != owner:
            first = b
        if rank not in (None, owner):
            continue
        source, target = int(x.tb_recv[b]), int(x.tb_send[b])
        ends = [f"from {source}" if source >= 0 else "", f"to {target}" if target >= 0 else ""]
        peers = " ".join(filter(None, ends)) or "local"
        table = _table(f"rank {owner} tb {b - first}: {peers}, channel {x.tb_channel[b]}", "after")
        for step, k in enumerate(range(int(x.tb_ptr[b]), int(x.tb_ptr[b + 1]))):
            op, count = int(x.op[k]), int(x.count[k])
            mine = _span(BUFFERS[x.src_buf[k]], int(x.src_off[k]), count) if READS_SRC[op] else ""
            result = _span(BUFFERS[x.dst_buf[k]], int(x.dst_off[k]), count) if WRITES_DST[op] else ""
            reads = " + ".join(filter(None, [ends[0] if RECEIVES[op] else "", mine]))
            writes = ", ".join(filter(None, [result, ends[1] if SENDS[op] else ""]))
            after = f"tb {x.dep_tb[k]} step {x.dep_step[k]}" if x.dep_tb[k] >= 0 else ""
            table.add_row(str(step), OPS[op], reads, writes, after)
        yield table


def _blocks(plan: ExecutionPlan, rank: int | None) -> Iterator[ResultTable]:
    for gpu in plan.gpus:
        if rank not in (None, gpu.id):
            continue
        for block in gpu.threadblocks:
            table = _table(f"rank {gpu.id} tb {block.id}", "channels")
            for step, op in enumerate(block.ops):
                sides = [
                    ", ".join(_span(p.type or f"peer{p.buffer_id}", p.index, p.size) for p in parts)
                    for parts in (op.src_buff, op.dst_buff)
                ]
                ids = ",".join(str(c) for c in (*op.channel_ids, *op.semaphore_ids))
                table.add_row(str(step), op.name, *sides, ids)
            yield table


def _table(title: str, last: str) -> ResultTable:
    return ResultTable(">step", "op", "reads", "writes", last, title=title)


def _span(buffer: str, offset: int, count: int) -> str:
    """Consecutive chunks of a buffer."""
    return f"{buffer}[{offset}{f'..{offset + count - 1}' if count > 1 else ''}]"
