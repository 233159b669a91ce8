# SPDX-License-Identifier: Apache-2.0
"""Pages of tables: what a command prints, as one file for a browser."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from ..report.html import Section, write_html
from ..report.table_html import plain_cell, table_html


def write_tables(path: Path, title: str, *tables: Table, note: str = "", picture: str = "") -> None:
    """Write the tables that a command prints as one page.

    Args:
        path: Where.
        title: The heading of the page.
        *tables: The tables; their titles become headings.
        note: A sentence under the first heading.
        picture: HTML above the first table, such as `bars_html` makes.
    """
    sections = [
        Section(
            heading=plain_cell(table.title) or title, note="" if number else note,
            body=("" if number else picture) + table_html(table),
        )
        for number, table in enumerate(tables)
    ]  # fmt: skip
    write_html(path, title=title, sections=sections)
