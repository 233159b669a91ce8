# SPDX-License-Identifier: Apache-2.0
"""The motif algebra: how a comm-op is divided into motifs, the rules that rewrite motifs, and their programs."""

from . import rulebook as rulebook  # The rules of the paper register themselves.
from .lowering import check, leaf_programs
from .motif import SHOW, motif, seq
from .notation import parse, show
from .rules import apply, rewrite_all, rule, unregister, variants

__all__ = [
    "apply", "check", "leaf_programs", "motif", "parse", "rewrite_all", "rule", "seq", "unregister", "variants",
]  # fmt: skip

SHOW.supply(show)
