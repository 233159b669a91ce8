# SPDX-License-Identifier: Apache-2.0
"""The one kind of table that commands print: aligned, without lines, and readable on 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

GAP = 2
"""Blanks between two columns."""
NARROWEST = 16
"""To so many columns the text of a cell may be folded; numbers never are."""


class ResultTable(Table):
    """A table whose columns of numbers (headings that begin with ``>``) are aligned right and never cut.

    Texts are folded where the table would be too wide. If it still is, the columns are printed in several blocks, each
    with the first column before it. Cells are plain text, never markup, since names in them come from files.
    """

    def __init__(self, *headings: str, title: str = "", header: bool = True) -> None:
        super().__init__(box=None, pad_edge=False, show_header=header, title_justify="left", title_style="bold")
        if title:
            self.title = Text(title)
        for heading in headings:
            number = heading.startswith(">")
            self.add_column(
                Text(heading.removeprefix(">")),
                justify="right" if number else "left",
                no_wrap=number,
                overflow="fold",
            )

    def add_row(self, *cells: Any, style: Any = None, end_section: bool = False) -> None:
        """Add a row.

        Args:
            *cells: The cells; a text is printed as it is.
            style: How the row looks.
            end_section: Whether a line would follow it, in a table that has lines.
        """
        plain = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*plain, style=style, end_section=end_section)

    @property
    def records(self) -> list[dict[str, str]]:
        """The rows as they are printed, each cell by its heading."""
        headings = [str(column.header) for column in self.columns]
        columns = ([str(cell) for cell in column.cells] for column in self.columns)
        return [dict(zip(headings, row, strict=True)) for row in zip(*columns, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = self._blocks(console, options)
        if len(blocks) == 1:
            yield from super().__rich_console__(console, options)
            return
        for number, block in enumerate(blocks):
            if number:
                yield Text("")
            yield self._part(block, first=number == 0)

    def _blocks(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """The columns that are printed beside each other."""
        least = [self._least(console, options, column) for column in self.columns]
        blocks: list[list[int]] = [[]]
        used = 0
        for number, width in enumerate(least):
            if used + width > options.max_width and len(blocks[-1]) > 1:
                blocks.append([0])
                used = least[0] + GAP
            blocks[-1].append(number)
            used += width + GAP
        return blocks

    def _least(self, console: Console, options: ConsoleOptions, column: Column) -> int:
        cells = [column.header, *column.cells] if self.show_header else list(column.cells)
        widest = max((Measurement.get(console, options, cell).maximum for cell in cells), default=0)
        return widest if column.no_wrap else min(widest, NARROWEST)

    def _part(self, block: Sequence[int], *, first: bool) -> Table:
        part = Table(box=None, pad_edge=False, show_header=self.show_header, title_justify="left", title_style="bold")
        part.title = self.title if first else None
        for number in block:
            column = self.columns[number]
            part.add_column(
                column.header, justify=column.justify, no_wrap=column.no_wrap, overflow="fold", style=column.style
            )
        cells = [list(self.columns[number].cells) for number in block]
        for at, row in enumerate(self.rows):
            part.add_row(*(column[at] for column in cells), style=row.style)
        return part
