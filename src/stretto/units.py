# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates. Sizes are bytes, times microseconds, rates GB/s (10^9 bytes per second).

In what people write, a capital B is bytes and a small b bits, everywhere: a size is never in bits, and a rate in bytes
says per second (25GB/s), because 25GB is often written for 25 Gbit/s.
"""

from __future__ import annotations

import re
from typing import TypeGuard

import numpy as np

from .errors import InvalidInput

KB = 1000
MB = 1000 * KB
GB = 1000 * MB
TB = 1000 * GB
PB = 1000 * TB
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
PIB = 1024 * TIB

_DECIMAL = {"PB": PB, "TB": TB, "GB": GB, "MB": MB, "KB": KB, "B": 1}
_BINARY = {"PiB": PIB, "TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_SUFFIX = {name.lower().removesuffix("b"): unit for name, unit in (_DECIMAL | _BINARY).items()}
_LARGEST_ODD = 15
"""Of sizes in binary units, people write those that are a small odd number times a power of two (24 MiB)."""


MAX_SEED = 1 << 62
MAX_DIGITS = 40


def check_seed(seed: object) -> int:
    """Return the seed of a search or of random data, if it is a whole number that every generator takes.

    >>> check_seed(7)
    7
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed <= MAX_SEED:
        raise InvalidInput(f"seed: must be a whole number 0..{MAX_SEED}, not {seed!r}")
    return int(seed)


def check_bytes(nbytes: object) -> float:
    """Return a number of bytes, if it is one and more than 0.

    >>> check_bytes(1e6)
    1000000.0
    """
    if isinstance(nbytes, str):
        raise InvalidInput(f"nbytes: must be a number, not the text {nbytes!r}; stretto.units.parse_bytes reads a size")
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | float | np.number) or not 0 < nbytes < np.inf:
        raise InvalidInput(f"nbytes: must be finite and > 0, not {nbytes}")
    return float(nbytes)


LARGEST = 1e15
"""The largest magnitude of a number in specs and options: whole numbers up to it are exact as int64 and as float."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite int or float (bool is excluded) whose magnitude is at most `LARGEST`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def parse_number(text: str) -> int | float | None:
    """Read a number from the text of a spec or an option; None where the text is not a number.

    Raises `InvalidInput` for a number that is larger than `LARGEST` or longer than `MAX_DIGITS`.

    >>> parse_number("25"), parse_number("1e3"), parse_number("auto")
    (25, 1000.0, None)
    """
    for kind in (int, float) if text.isascii() else ():
        try:
            value = kind(text[:MAX_DIGITS])
        except ValueError:
            continue
        if len(text) <= MAX_DIGITS and is_number(value):
            return value
        raise InvalidInput(f"{text[:MAX_DIGITS]}: must be a number up to {LARGEST:g}, of at most {MAX_DIGITS} digits")
    return None


def parse_bytes(text: str) -> int:
    """Read a size such as ``64M``, ``1 KiB``, ``2.1 GB`` or ``4096``; a small b, which is bits, is refused.

    >>> parse_bytes("64M"), parse_bytes("1KiB"), parse_bytes("1.5 GB"), parse_bytes("7")
    (64000000, 1024, 1500000000, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgtpKMGTP][iI]?)?([bB]?)\s*", text, re.ASCII)
    if match is None:
        raise InvalidInput(f"size {text[:80]!r}: expected a number with an optional K, M, G, T, Ki, Mi, Gi or Ti")
    if match[3] == "b":
        unit = (match[2] or "").upper().replace("I", "i")
        raise InvalidInput(f"size {text!r}: a small b is bits, and a size is bytes: write {match[1]}{unit}B")
    value = float(match[1]) * _SUFFIX[(match[2] or "").lower()]
    if not 1 <= value <= PIB:
        raise InvalidInput(f"size {text!r}: must be between 1 byte and 1 PiB")
    return round(value)


_RATE = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([kKmMgGtT]?)([a-zA-Z/]*)\s*")
_PREFIX = {"": 1, "K": KB, "M": MB, "G": GB, "T": TB}


def parse_rate(text: str) -> float:
    """Read a rate such as ``400gbit``, ``25 Gb/s``, ``10Gbps``, ``25GbE`` or ``50GB/s``; the result is bits per second.

    A bare G or M is bits, as networks are sold. Bytes are said with a capital B and per second.

    >>> parse_rate("400mbit"), parse_rate("1.5 Gb/s"), parse_rate("50MB/s"), parse_rate("25G")
    (400000000.0, 1500000000.0, 400000000.0, 25000000000.0)
    """
    match = _RATE.fullmatch(text)
    number, prefix, unit = match.groups() if match is not None else ("", "", "")
    bits = _bits_of(unit, prefix)
    if not prefix or bits is None:
        raise InvalidInput(f"rate {text[:80]!r}: expected a number with its unit, such as 400mbit, 25gbit or 50MB/s")
    if not bits:
        both = f"{number}{prefix.upper()}B/s (bytes) or {number}{prefix.lower()}bit (bits)"
        raise InvalidInput(f"rate {text.strip()!r}: could be bytes or bits per second: write {both}")
    return float(number) * _PREFIX[prefix.upper()] * bits


def _bits_of(unit: str, prefix: str) -> int | None:
    """How many bits the unit of a rate has; 0 where both bits and bytes may be meant, None where it is no unit."""
    small = unit.lower()
    if small in ("", "bit", "bits", "bit/s", "bits/s", "be"):
        return 1
    if small in ("byte/s", "bytes/s") or unit in ("B/s", "Bps"):
        return 8
    if unit in ("b/s", "bps") or (unit == "b" and prefix.isupper()):
        return 1
    return 0 if small in ("b", "bps", "b/s", "byte", "bytes") else None


def format_bytes(nbytes: float) -> str:
    """Write a size as people do, so that `parse_bytes` reads it.

    Three digits and a decimal unit, unless a binary unit says exactly what three digits would not.

    >>> format_bytes(64_000_000), format_bytes(1024), format_bytes(32 << 20), format_bytes(2_147_480_000)
    ('64 MB', '1 KiB', '32 MiB', '2.15 GB')
    """
    value, unit = _three_digits(nbytes)
    if value * _DECIMAL[unit] != nbytes:
        for name, size in _BINARY.items():
            count = int(nbytes // size)
            if 1 <= count < 1024 and count * size == nbytes and count // (count & -count) <= _LARGEST_ODD:
                return f"{count} {name}"
    return f"{value:g} {unit}"


def _three_digits(nbytes: float) -> tuple[float, str]:
    """The size rounded to three digits, in the largest decimal unit of which it has one or more."""
    for name, unit in _DECIMAL.items():
        value = float(f"{nbytes / unit:.3g}")
        if value >= 1:
            return (float(round(nbytes / unit)) if value >= 1000 else value), name
    return float(f"{nbytes:.3g}"), "B"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is one.

    >>> counted(1, "rank"), counted(2, "rank"), counted(1, "all-reduce")
    ('1 rank', '2 ranks', '1 all-reduce')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_us(us: float) -> str:
    """Write a time in microseconds with the unit (us, ms or s) that a person would choose.

    >>> format_us(0.25), format_us(1234.5), format_us(2.5e6)
    ('0.25 us', '1.234 ms', '2.5 s')
    """
    if us >= 1e6:
        return f"{us / 1e6:.4g} s"
    if us >= 1e3:
        return f"{us / 1e3:.4g} ms"
    return f"{us:.4g} us"
