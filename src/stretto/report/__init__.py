# SPDX-License-Identifier: Apache-2.0
"""Output for people: traces, tables, plots and pages made of timelines, plans and clusters."""

from .chrome import write_chrome_json
from .perfetto import write_perfetto
from .sweep import Sweep, parse_sizes, run_sweep
from .timeline_file import load_timeline, save_timeline

__all__ = [
    "Sweep",
    "load_timeline",
    "parse_sizes",
    "run_sweep",
    "save_timeline",
    "write_chrome_json",
    "write_perfetto",
]
