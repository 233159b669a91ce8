"""Print what sanitizers have reported about our modules, and fail if there is anything: ``reports.py FOLDER``.

Leaks are reported for the whole process, most of them of the interpreter's: those without a frame of ours are left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OURS = re.compile(r"_native\.|_executor\.|/native/")
LEAK = re.compile(r"^(?:Direct|Indirect) leak of .*?(?=^$)", re.MULTILINE | re.DOTALL)
HEADING = "ERROR: LeakSanitizer"


def problems(text: str) -> list[str]:
    """What of a report is to be cured.

    >>> leaks = "ERROR: LeakSanitizer:\\n\\nDirect leak of 8 bytes\\n  #1 in gc_alloc\\n\\nIndirect leak of 9 bytes\\n"
    >>> problems(leaks + "\\n")
    []
    >>> problems(leaks + "  #1 in Engine::start (_executor.so)\\n\\n")
    ['Indirect leak of 9 bytes\\n  #1 in Engine::start (_executor.so)\\n']
    >>> problems("WARNING: ThreadSanitizer: data race")
    ['WARNING: ThreadSanitizer: data race']
    """
    if HEADING not in text:
        return [text]
    return [leak for leak in LEAK.findall(text) if OURS.search(leak)]


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
