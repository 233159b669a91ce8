"""One palette for the terminal and for HTML, so that an algorithm has the same color in both."""

from __future__ import annotations

from ..units import GB, KB, MB

PALETTE = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#b07aa1",
    "#76b7b2",
    "#edc948",
    "#9c755f",
    "#ff9da7",
    "#8cd17d",
    "#499894",
    "#d37295",
)
BOUND = "#808080"
MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def color(index: int) -> str:
    """The color of the index-th series."""
    return PALETTE[index % len(PALETTE)]


def mark(index: int) -> str:
    """The letter of the index-th series in a terminal plot."""
    return MARKS[index % len(MARKS)]


def short_bytes(nbytes: float) -> str:
    """A size in three digits, for axes and narrow columns.

    >>> short_bytes(4_096_000), short_bytes(64_000_000), short_bytes(512)
    ('4.1M', '64M', '512')
    """
    for unit, name in ((GB, "G"), (MB, "M"), (KB, "K")):
        if nbytes >= 0.9995 * unit:
            return f"{nbytes / unit:.3g}{name}"
    return f"{nbytes:.3g}"
