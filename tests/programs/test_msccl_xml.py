# SPDX-License-Identifier: Apache-2.0
"""MSCCL XML: both dialects out and in again, the runtimes' limits, and files that are wrong in every way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stretto import AllReduce, AllToAllV, InvalidInput, Permute, Program, VerificationError
from stretto.programs import Lowered
from stretto.programs.formats.msccl_xml import DIALECTS, dumps, loads
from stretto.programs.interpret import check
from stretto.programs.lower import lower

Build = Callable[..., Program]
DATA = Path(__file__).parent / "data" / "msccl"
COLUMNS = ("scratch", "tb_rank", "tb_send", "tb_recv", "tb_channel", "tb_ptr", "op", "dep_tb", "dep_step", "count")


def same_streams(a: Lowered, b: Lowered) -> bool:
    return all(np.array_equal(getattr(a, key), getattr(b, key)) for key in COLUMNS)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("k", [1, 2])
def test_what_is_written_is_read_back_and_still_right(
    build: Build, maker: str, dialect: str, in_place: bool, k: int
) -> None:
    if maker == "unequal_all_to_all":
        return  # has its own test below
    for instances in (1, 2):
        lowered = lower(build(maker, 4, k=k, in_place=in_place), instances=instances)
        text = dumps(lowered, dialect=dialect)
        needed = lowered.collective if 'coll="custom"' in text else None
        again = loads(text, collective=needed)
        assert again.collective == lowered.collective
        assert same_streams(again, lowered)
        report = again.verify()
        for depth in range(report.fifo_depth, 3):
            check(again, fifo_depth=depth)
        assert dumps(again, dialect=dialect) == text


@pytest.mark.parametrize(
    ("file", "name", "options", "lowering", "dialect"),
    [
        ("ring_all_gather_3_new", "ring_all_gather", {"in_place": True}, {"fifo_depth": 2}, "new"),
        ("ring_all_reduce_3_old", "ring_all_reduce", {}, {}, "old"),
        ("relayed_all_to_all_3_new", "relayed_all_to_all", {}, {}, "new"),
        (
            "recursive_doubling_all_reduce_4_new",
            "recursive_doubling_all_reduce",
            {"in_place": True, "k": 2},
            {"instances": 2},
            "new",
        ),
        ("binomial_reduce_4_old", "binomial_reduce", {}, {}, "old"),
    ],
)
def test_golden_files(
    build: Build, file: str, name: str, options: dict[str, int], lowering: dict[str, int], dialect: str
) -> None:
    ranks = int(file.split("_")[-2])
    text = dumps(lower(build(name, ranks, **options), **lowering), dialect=dialect)  # type: ignore[arg-type]
    assert text == (DATA / f"{file}.xml").read_text()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("wrong_race", r"race: rank 0 tb 1 step 0 \(s\) reads"),
        ("wrong_twice", r"twice: rank 0 tb 0 step 3 \(re\) adds rank 1's part of chunk 0 on rank 0 a second time"),
        ("wrong_deadlock", r"deadlock"),
        ("wrong_missing", r"missing: rank 0 ends without chunk 0"),
    ],
)
def test_wrong_files_are_read_but_not_believed(file: str, message: str) -> None:
    lowered = loads((DATA / f"{file}.xml").read_text())
    with pytest.raises(VerificationError, match=message):
        lowered.verify()
    with pytest.raises(VerificationError):
        dumps(lowered)
    with pytest.raises(VerificationError):
        for seed in range(20):  # a race shows in some interleavings only
            check(lowered, seed=seed)


def test_dialects_differ_in_attributes_and_spelling(build: Build) -> None:
    lowered = lower(build("ring_reduce_scatter", 2))
    new, old = (dumps(lowered, dialect=d).splitlines()[0] for d in DIALECTS)
    assert 'coll="reducescatter"' in new
    assert 'outofplace="1" minBytes="0" maxBytes="0"' in new
    assert 'coll="reduce_scatter"' in old
    assert "outofplace" not in old
    assert "minBytes" not in old
    assert 'redop="sum"' in old


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [
        ("ring_all_gather", "allgather", "allgather"),
        ("ring_reduce_scatter", "reducescatter", "reduce_scatter"),
        ("ring_all_reduce", "allreduce", "allreduce"),
        ("direct_all_to_all", "alltoall", "alltoall"),
        ("binomial_broadcast", "broadcast", "broadcast"),
        ("binomial_reduce", "reduce", "reduce"),
        ("chain_gather", "gather", "custom"),
        ("chain_scatter", "scatter", "custom"),
        ("relay", "send", "custom"),
    ],
)
def test_every_collective_has_its_name(build: Build, name: str, new: str, old: str) -> None:
    lowered = lower(build(name, 3))
    assert f'coll="{new}"' in dumps(lowered, dialect="new")
    assert f'coll="{old}"' in dumps(lowered, dialect="old")


def test_an_equal_all_to_all_v_is_named_in_the_new_dialect() -> None:
    collective = AllToAllV(2, [[1, 1], [1, 1]])
    program = Program.from_steps("v", collective, src=[0, 1], dst=[1, 0], chunk=[1, 2], step=0)
    text = dumps(lower(program))
    assert 'coll="alltoallv"' in text
    again = loads(text)
    assert again.collective == collective
    check(again)


def test_size_range_is_written() -> None:
    text = dumps(_pair(), min_bytes=1024, max_bytes=4096)
    assert 'minBytes="1024" maxBytes="4096"' in text
    assert 'minBytes="1024" maxBytes="34359738368"' in dumps(_pair(), dialect="old", min_bytes=1024)


def test_names_are_escaped() -> None:
    text = dumps(replace(_pair(), name='a<b "c" & d'))
    assert loads(text).name == 'a<b "c" & d'


def _pair(chunks: int = 1) -> Lowered:
    program = Program.from_steps(
        "pair",
        AllReduce(2, chunks=chunks),
        src=np.repeat([0, 1], chunks),
        dst=np.repeat([1, 0], chunks),
        chunk=np.tile(np.arange(chunks), 2),
        step=0,
        reduce=True,
    )
    return lower(program)


def test_unequal_chunks_cannot_be_exported(build: Build) -> None:
    with pytest.raises(InvalidInput, match="chunks of equal size"):
        dumps(lower(build("unequal_all_to_all", 3)))


def test_several_sends_have_no_name_in_the_new_dialect() -> None:
    exchange = Permute(2, [(0, 1), (1, 0)])
    program = Program.from_steps("swap", exchange, src=[0, 1], dst=[1, 0], chunk=[0, 1], step=0)
    with pytest.raises(InvalidInput, match="no name in the new dialect; choose dialect 'old'"):
        dumps(lower(program))
    with pytest.raises(InvalidInput, match="custom does not say what must be true afterwards"):
        loads(dumps(lower(program), dialect="old"))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"name": "n" * 64}, {"dialect": "old"}, "name: .* is longer than 63 characters"),
        ({"protocol": "LL256"}, {}, "unknown protocol 'LL256'; choose from: Simple, LL, LL128"),
        ({}, {"dialect": "newest"}, "unknown dialect 'newest'; choose from: new, old"),
        ({}, {"min_bytes": 10, "max_bytes": 5}, "must be 0..9223372036854775807 and in order"),
        ({}, {"max_steps": 1}, r"gpu 0 tb 0: 2 steps are more than the 1 of the runtimes"),
        ({"tb_channel": np.array([40, 40], np.int32)}, {}, "channels: 41 are more than the 32"),
    ],
)
def test_limits_are_enforced_on_export(change: dict[str, object], options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dumps(replace(_pair(), **change), **options)  # type: ignore[arg-type]


def test_too_many_threadblocks_and_steps_are_refused(build: Build) -> None:
    with pytest.raises(InvalidInput, match=r"gpu 0: 218 threadblocks are more than the 216 of the old"):
        dumps(lower(build("direct_all_to_all", 110)), dialect="old")
    with pytest.raises(InvalidInput, match=r"steps are more than the 256"):
        dumps(lower(build("ring_all_reduce", 140)))


def _edit(pattern: str, replacement: str) -> str:
    text = (DATA / "ring_all_reduce_3_old.xml").read_text()
    changed, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1
    return changed


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        ("<algo ", "<graph ", "mismatched tag|not valid XML"),
        ("<algo .*>", "<!DOCTYPE x [<!ENTITY a 'b'>]><algo>", "DOCTYPE"),
        ("</algo>", "", "not valid XML"),
        (' coll="allreduce"', "", "algo: attribute coll is missing"),
        ('coll="allreduce"', 'coll="allsum"', "unknown algo coll 'allsum'; choose from: .*allreduce"),
        ('ngpus="3"', 'ngpus="4"', "algo ngpus: says 4, but there are 3 <gpu> elements"),
        ('ngpus="3"', 'ngpus="three"', "algo ngpus: expected a whole number, not 'three'"),
        ('nchannels="1"', 'nchannels="33"', r"algo nchannels: must be 1\.\.32, not 33"),
        ('nchunksperloop="3"', 'nchunksperloop="2000000000"', r"algo nchunksperloop: must be 1\.\.\d+"),
        ('nchunksperloop="3"', 'nchunksperloop="16777216"', "gpu 0 i_chunks: must be 0 or 16777216, since"),
        ('i_chunks="3"', 'i_chunks="1"', "gpu 0 i_chunks: must be 0 or 3, since nchunksperloop is 3, not 1"),
        ('o_chunks="3"', 'o_chunks="16777216"', "gpu 0 o_chunks: must be 0 or 3, since nchunksperloop is 3"),
        ('proto="Simple"', 'proto="simple"', "unknown algo proto 'simple'"),
        ('inplace="0"', 'inplace="2"', r"algo inplace: must be 0\.\.1, not 2"),
        ('<gpu id="1"', '<gpu id="7"', "algo: <gpu> id must be 0, 1, 2, ...; 1 is missing or repeated"),
        ('s_chunks="0"', 's_chunks="99999999999"', r"gpu 0 s_chunks: must be 0\.\.\d+, not 99999999999"),
        ('<tb id="0"', '<tb id="1"', "gpu 0: <tb> id must be 0, 1, 2"),
        ('send="1"', 'send="0"', "gpu 0 tb 0 send: a rank cannot be its own peer"),
        ('send="1"', 'send="3"', r"gpu 0 tb 0 send: must be -1\.\.2, not 3"),
        ('chan="0"', 'chan="1"', r"gpu 0 tb 0 chan: must be 0\.\.0, not 1"),
        ('<step s="1"', '<step s="9"', "gpu 0 tb 0: <step> s must be 0, 1, 2"),
        ('type="s"', 'type="x"', "unknown gpu 0 tb 0 step 0 type 'x'; choose from: nop, s, r"),
        ('srcbuf="i"', 'srcbuf="q"', "unknown gpu 0 tb 0 step 0 srcbuf 'q'; choose from: i, o, s"),
        ('srcoff="0"', 'srcoff="-1"', r"gpu 0 tb 0 step 0 srcoff: must be 0\.\."),
        ('srcoff="0"', 'srcoff="3"', r"gpu 0 tb 0 step 0: uses i\[3\.\.3\], but gpu 0 declares i_chunks 3"),
        ('cnt="1"', 'cnt="72"', r"gpu 0 tb 0 step 0 cnt: must be 1\.\.71, not 72"),
        ('cnt="1"', 'cnt="2"', r"connection 0->1 on channel 0: message 0 has cnt 2 at gpu 0 tb 0 step 0 but 1 at"),
        ('depid="-1"', 'depid="0"', "gpu 0 tb 0 step 0: depid 0 and deps -1 must both be given"),
        ('depid="-1" deps="-1"', 'depid="4" deps="0"', "waits for tb 4 step 0, which does not exist"),
        ('depid="-1" deps="-1"', 'depid="0" deps="3"', "waits for tb 0 step 3, which is not marked hasdep=1"),
        ('depid="-1" deps="-1" hasdep="0"', 'depid="0" deps="0" hasdep="1"', "step 0: waits for its own step 0"),
        (' hasdep="0"', "", "gpu 0 tb 0 step 0: attribute hasdep is missing"),
        ('type="s"', 'type="r"', r"connection 0->1 on channel 0: \d messages are sent and \d received"),
        ('send="1"', 'send="-1"', "gpu 0 tb 0 step 0: s needs a peer, but its tb has none"),
        (r"</step>|/>", "/><loop/>", "expected <step>, not <loop>"),
    ],
)
def test_broken_files_say_what_is_wrong_and_where(pattern: str, replacement: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        loads(_edit(pattern, replacement), where="ring.xml")
    assert "\n" not in str(error.value)


NOP = '<step s="{}" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="{}" deps="{}" hasdep="0"/>'


def test_nops_must_lead_to_a_step_that_waits() -> None:
    text = (DATA / "wrong_race.xml").read_text()
    closing = '\n    </tb>\n  </gpu>\n  <gpu id="1"'
    late = text.replace(closing, NOP.format(1, 0, 0) + closing, 1).replace('hasdep="0"', 'hasdep="1"', 1)
    with pytest.raises(InvalidInput, match="gpu 0 tb 1 step 1: a nop must be followed by a step that has a dep"):
        loads(late)


def test_waiting_for_a_nop_is_refused() -> None:
    first = NOP.format(0, -1, -1).replace('hasdep="0"', 'hasdep="1"')
    step = '<step s="1" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="1" deps="0" hasdep="0"/>'
    other = NOP.format(0, 0, 0) + step.replace('depid="1"', 'depid="0"').replace('deps="0"', 'deps="1"')
    text = (
        '<algo name="x" nchannels="1" nchunksperloop="1" proto="LL" coll="allreduce" ngpus="1" inplace="0">'
        '<gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0">'
        f'<tb id="0" send="-1" recv="-1" chan="-1">{first}{step}</tb>'
        f'<tb id="1" send="-1" recv="-1" chan="0">{other}</tb></gpu></algo>'
    )
    with pytest.raises(InvalidInput, match="waits for tb 1 step 0, which is a nop"):
        loads(text)


def test_two_threadblocks_cannot_share_one_end_of_a_connection() -> None:
    text = (DATA / "wrong_race.xml").read_text().replace('send="2" recv="-1"', 'send="2" recv="1"')
    with pytest.raises(InvalidInput, match="gpu 0 tb 1 recv: tb 0 already owns peer 1 on channel 0"):
        loads(text)


def test_one_file_can_serve_in_place_and_out_of_place() -> None:
    text = dumps(_pair()).replace('inplace="0"', 'inplace="1"')
    assert not loads(text).collective.in_place
    assert loads(text, in_place=True).collective.in_place
    loads(text, in_place=True).verify()
    with pytest.raises(InvalidInput, match="the file is not for in-place calls"):
        loads(dumps(_pair()), in_place=True)
    with pytest.raises(InvalidInput, match="inplace, outofplace: one of them must be 1"):
        loads(dumps(_pair()).replace('outofplace="1"', 'outofplace="0"'))


def test_public_habits_are_accepted() -> None:
    """In place, i and o are one buffer; o_chunks may be 0; a local tb may have channel -1 in the old dialect."""
    text = (DATA / "wrong_twice.xml").read_text()
    right = re.sub(r'      <step s="3".*\n', "", text)
    check(loads(right))
    loads(right).verify()
    local = '<tb id="1" send="-1" recv="-1" chan="-1"></tb>'
    lowered = loads(right.replace("    </tb>", f"    </tb>{local}", 1))
    assert lowered.tb_channel.tolist() == [0, 0, 0]
    check(lowered)


def test_the_root_is_found_without_being_named(build: Build) -> None:
    for maker in ("binomial_broadcast", "binomial_reduce"):
        lowered = lower(build(maker, 4, in_place=True))
        text = re.sub(r'[io]_chunks="\d"', lambda m: m[0][:10] + '1"', dumps(lowered))
        assert loads(text).collective == lowered.collective


def test_a_collective_of_other_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ngpus: is 2, but the collective has 3 ranks"):
        loads(dumps(_pair()), collective=AllReduce(3))
