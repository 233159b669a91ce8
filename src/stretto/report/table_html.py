# SPDX-License-Identifier: Apache-2.0
"""A table of the terminal as an HTML table."""

from __future__ import annotations

from html import escape

from rich.table import Table
from rich.text import Text


def table_html(table: Table) -> str:
    """A table of the terminal as an HTML table."""
    header = "".join(f"<th align={column.justify}>{escape(plain_cell(column.header))}</th>" for column in table.columns)
    head = f"<tr>{header}</tr>" if table.show_header else ""
    columns = [list(column.cells) for column in table.columns]
    rows = [
        "".join(
            f"<td align={column.justify}>{escape(plain_cell(cells[at]))}</td>"
            for column, cells in zip(table.columns, columns, strict=True)
        )
        for at in range(table.row_count)
    ]
    return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def plain_cell(cell: object) -> str:
    """The text of a table's cell."""
    return cell.plain if isinstance(cell, Text) else "" if cell is None else str(cell)
