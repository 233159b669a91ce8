# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import doctest
from pathlib import Path


def test_what_the_page_shows_is_what_happens() -> None:
    page = Path(__file__).parents[2] / "docs" / "pipeline.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 8
    assert failed == 0
