# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/motifs.md give what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_examples_on_motifs_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "motifs.md"
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS, verbose=False)
    assert failed == 0
    assert tried > 20
