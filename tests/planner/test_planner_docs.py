# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/planner.md give what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_examples_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "planner.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS, verbose=False)
    assert tried >= 6
    assert failed == 0
