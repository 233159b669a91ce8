# SPDX-License-Identifier: Apache-2.0
"""Pages of tables: what a command prints, as one file for a browser."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..report.html import Section, write_html


def write_tables(path: Path, title: str, *tables: Table, note: str = "") -> None:
    """Write the tables that a command prints as one page.

    Args:
        path: Where.
        title: The heading of the page.
        tables: The tables; their titles become headings.
        note: A sentence under the first heading.
    """
    sections = [
        Section(heading=_plain(table.title) or title, note=note if number == 0 else "", body=table_html(table))
        for number, table in enumerate(tables)
    ]
    write_html(path, title=title, sections=sections)


def table_html(table: Table) -> str:
    """A table of the terminal as an HTML table."""
    head = "".join(f"<th>{escape(_plain(column.header))}</th>" for column in table.columns)
    columns = [list(column.cells) for column in table.columns]
    rows = [
        "".join(
            f"<td align={column.justify}>{escape(_plain(cells[at]))}</td>"
            for column, cells in zip(table.columns, columns, strict=True)
        )
        for at in range(table.row_count)
    ]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else "" if cell is None else str(cell)
