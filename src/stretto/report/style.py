# SPDX-License-Identifier: Apache-2.0
"""One palette for the terminal and for HTML, so that an algorithm has the same color in both."""

from __future__ import annotations

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
