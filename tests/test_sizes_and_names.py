# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them, and names that are almost right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import MAX_CHOICES, InvalidInput, unknown
from stretto.units import GB, GIB, KB, KIB, MB, MIB, PIB, TB, format_bytes, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1, "1 B"), (0.25, "0.25 B"), (999, "999 B"), (1000, "1 KB"), (1023, "1.02 KB"), (1024, "1 KiB"),
        (1_500, "1.5 KB"), (999_499, "999 KB"), (999_500, "1 MB"), (999_999, "1 MB"), (1_024_000, "1.02 MB"),
        (64 * MB, "64 MB"), (32 * MIB, "32 MiB"), (24 * MIB, "24 MiB"), (250 * MIB, "262 MB"), (33_554_400, "33.6 MB"),
        (2_147_480_000, "2.15 GB"), (5000 * GB, "5 TB"), (3 * GIB, "3 GiB"), (PIB, "1 PiB"), (512 * TB, "512 TB"),
    ],
)  # fmt: skip
def test_a_size_is_written_as_people_write_it(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(1, PIB // 2))
def test_what_is_written_is_read_back_within_three_digits(nbytes: int) -> None:
    again = parse_bytes(format_bytes(nbytes))
    assert abs(again - nbytes) <= nbytes / 200
    assert format_bytes(again) == format_bytes(nbytes)


@given(st.integers(1, 999), st.sampled_from([1, KB, MB, GB, TB]))
def test_round_numbers_are_read_back_exactly(count: int, unit: int) -> None:
    assert parse_bytes(format_bytes(count * unit)) == count * unit


@given(st.integers(0, 9), st.sampled_from([KIB, MIB, GIB]))
def test_powers_of_two_are_read_back_exactly(power: int, unit: int) -> None:
    assert parse_bytes(format_bytes((1 << power) * unit)) == (1 << power) * unit


@pytest.mark.parametrize("text", ["2.1 GB", "2.1GB", "2.1g", " 2100M "])
def test_sizes_are_read_as_people_write_them(text: str) -> None:
    assert parse_bytes(text) == 2_100_000_000


@pytest.mark.parametrize(("text", "write"), [("64Mb", "64MB"), ("64 mb", "64MB"), ("1Kib", "1KiB"), ("8b", "8B")])
def test_a_size_in_bits_is_refused(text: str, write: str) -> None:
    with pytest.raises(InvalidInput, match=f"a small b is bits, and a size is bytes: write {write}$"):
        parse_bytes(text)


@given(st.integers(1, 999), st.sampled_from("KMGT"))
def test_a_rate_in_bytes_is_eight_times_one_in_bits(number: int, prefix: str) -> None:
    bits = parse_rate(f"{number}{prefix}b/s")
    assert parse_rate(f"{number} {prefix}B/s") == 8 * bits == 8 * parse_rate(f"{number}{prefix.lower()}bit")


def test_a_name_that_is_almost_right_is_suggested() -> None:
    assert str(unknown("algorithm", "rign", ["tree", "ring"])).endswith("choose from: tree, ring; did you mean 'ring'?")
    assert str(unknown("collective", "AllGatherr", ["all_gather"])).endswith("did you mean 'all_gather'?")
    assert "did you mean" not in str(unknown("algorithm", "zzz", ["tree", "ring"]))


def test_many_choices_are_listed_unless_the_right_one_is_known() -> None:
    names = [f"preset_{i}" for i in range(MAX_CHOICES + 1)]
    assert names[-1] in str(unknown("preset", "x", names))
    said = str(unknown("preset", "preset_1x", names))
    assert said.endswith(f"{names[MAX_CHOICES - 1]}, ... ({len(names)} in all); did you mean 'preset_1'?")
