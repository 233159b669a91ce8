# SPDX-License-Identifier: Apache-2.0
"""Names of options from before the commands had one grammar; they work for one release, with a warning."""

from __future__ import annotations

from collections.abc import Mapping

OLD_NAMES: Mapping[str, Mapping[str, str]] = {
    "algorithms": {"-c": "--collective"},
    "cluster show": {"--svg": "--output"},
    "collective show": {"--save": "--output"},
    "demo": {"--out": "--output"},
    "dims advise": {"--budget": "--gbit-per-s"},
    "lab run": {"--truth": "--output"},
    "motif show": {"--program": "--output"},
    "plan": {"--report": "--html"},
    "reshard": {"--program": "--output"},
    "run": {"--report": "--html"},
    "simulate": {"--plot": "--html", "--program": "--output"},
    "status": {"--report": "--html"},
    "strategy simulate": {"--plan": "--budget"},
    "synth": {"--sizes": "--bytes"},
    "tune": {"--plan-s": "--budget"},
}
"""The old names of each command, and the options that they are now."""
OLD_FLAGS: Mapping[str, Mapping[str, str]] = {"status": {"--json": "-"}}
"""Options that took no value, and the value that they then mean."""
OUTPUT_ARGUMENTS = ("cluster convert", "program convert", "workload convert")
"""Commands whose output is their last argument; ``-o FILE`` says the same."""
