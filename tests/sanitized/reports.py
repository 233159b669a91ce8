# SPDX-License-Identifier: Apache-2.0
"""Print what sanitizers have reported about our modules, and fail if there is anything: ``reports.py FOLDER``.

Leaks and races are reported for the whole process, most of them of libraries that were built without a sanitizer: those
without a part of ours are left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OURS = re.compile(r"_native\.|_executor\.|/native/|\bstretto::")
NANOBIND = re.compile(r" in (?:\(anonymous namespace\)::)?(?:nanobind::|nb_)|/nanobind/src/")
FRAME = re.compile(r"^ *#\d+ .*$", re.MULTILINE)
LEAK = re.compile(r"^(?:Direct|Indirect) leak of .*?(?=^$)", re.MULTILINE | re.DOTALL)
LEAKS, RACES = "ERROR: LeakSanitizer", "WARNING: ThreadSanitizer"
BETWEEN_RACES = re.compile(r"^={18}\n", re.MULTILINE)


def is_our_leak(leak: str) -> bool:
    """Whether the innermost frame of our modules is our code: below it nanobind calls, and makes what Python keeps."""
    frames = [frame for frame in FRAME.findall(leak) if OURS.search(frame) or NANOBIND.search(frame)]
    return bool(frames) and not NANOBIND.search(frames[0])


def problems(text: str) -> list[str]:
    """What of a report is to be cured.

    >>> leaks = "ERROR: LeakSanitizer:\\n\\nDirect leak of 8 bytes\\n  #1 in gc_alloc\\n\\nIndirect leak of 9 bytes\\n"
    >>> problems(leaks + "\\n")
    []
    >>> ours = "  #1 0x1 in stretto::Engine::start (_executor.so)\\n"
    >>> theirs = "  #2 0x2 in nanobind::call (_executor.so)\\n"
    >>> problems(leaks + ours + theirs + "\\n") == ["Indirect leak of 9 bytes\\n" + ours + theirs]
    True
    >>> problems(leaks + theirs + ours + "\\n")
    []
    >>> race = "WARNING: ThreadSanitizer: data race\\n"
    >>> problems(f"{race}  #0 in gloo\\n{'=' * 18}\\n{race}{ours}") == [race + ours]
    True
    >>> problems("runtime error: shift exponent 40 is too large")
    ['runtime error: shift exponent 40 is too large']
    """
    if LEAKS in text:
        return [leak for leak in LEAK.findall(text) if is_our_leak(leak)]
    if RACES in text:
        return [race for race in BETWEEN_RACES.split(text) if OURS.search(race)]
    return [text]


def main() -> None:
    """Read all reports of a folder."""
    reports = [path.read_text(errors="replace") for path in sorted(Path(sys.argv[1]).iterdir())]
    found = [text for report in reports for text in problems(report)]
    for text in found:
        print(text)
    if found:
        sys.exit(f"sanitizers: {len(found)} reports")
    print("sanitizers: nothing to report")


if __name__ == "__main__":
    main()
