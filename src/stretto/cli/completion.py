# SPDX-License-Identifier: Apache-2.0
"""Values that a shell can complete. Only what begins like the word is asked for, so nothing is loaded before that."""

from __future__ import annotations


def cluster_names(incomplete: str) -> list[str]:
    """Presets that begin with the word."""
    from ..cluster.presets import presets

    return [entry.name for entry in presets() if entry.name.startswith(incomplete)]


def workload_names(incomplete: str) -> list[str]:
    """Models with their variants that begin with the word."""
    from ..workload.registry import MODELS

    names = [f"{model.name}:{variant}" for model in MODELS.values() for variant in model.variants]
    return [name for name in names if name.startswith(incomplete)]


def collective_names(incomplete: str) -> list[str]:
    """Collectives that begin with the word."""
    from ..collectives import COLLECTIVES

    return [name for name in COLLECTIVES if name.startswith(incomplete)]


def algorithm_names(incomplete: str) -> list[str]:
    """Algorithms that begin with the word, and ``all``."""
    from ..algorithms import names

    return [name for name in ("all", *names()) if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Models of the zoo of strategies that begin with the word."""
    from ..strategy import zoo

    return [name for name in zoo.MODELS if name.startswith(incomplete)]
