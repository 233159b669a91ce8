# SPDX-License-Identifier: Apache-2.0
"""Which carrier an enforcer gets: by name, by what the job uses anyway, or one that was brought along."""

from __future__ import annotations

import os
from importlib import import_module

from ...errors import InvalidInput, unknown
from ..torch_backend.engine import Engine
from ..torch_backend.recording import LEDGER
from .carrier import Carrier, CarrierMaker, CarrierSite
from .executor_carrier import ExecutorCarrier
from .gloo import GlooCarrier
from .nccl import NcclCarrier

MAKERS: dict[str, CarrierMaker] = {"executor": ExecutorCarrier, "gloo": GlooCarrier, "nccl": NcclCarrier}
CARRIERS = ("auto", *MAKERS)
VARIABLE = "STRETTO_CARRIER"


def from_environment() -> str:
    """The carrier that `STRETTO_CARRIER` names, "auto" where it is not set."""
    return os.environ.get(VARIABLE) or "auto"


def imported(name: str) -> CarrierMaker:
    """The carrier of somebody else's that ``MODULE:CLASS`` names; `InvalidInput` where there is none."""
    module, _, attribute = name.partition(":")
    try:
        found: CarrierMaker = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"carrier {name!r}: {error}; it must be MODULE:CLASS that Python can import") from None
    return found


def chosen(carrier: str | CarrierMaker, engine: Engine) -> CarrierMaker:
    """Who makes a carrier: by name, as ``MODULE:CLASS``, or one that was brought along.

    "auto" stands for what `STRETTO_CARRIER` names, else for NCCL where the job uses GPU tensors, else for ours,
    else for gloo's.
    """
    carrier = from_environment() if carrier == "auto" else carrier
    if not isinstance(carrier, str):
        return carrier
    if ":" in carrier:
        return imported(carrier)
    if carrier not in CARRIERS:
        raise unknown("carrier", carrier, (*CARRIERS, "MODULE:CLASS"))
    if carrier != "auto":
        return MAKERS[carrier]
    # All ranks have made the same calls. Plans on GPU tensors run above NCCL.
    if any(choice.backend in ("nccl", "gpu") for choice in LEDGER.all()):
        return NcclCarrier
    return GlooCarrier if engine.job.executor is None else ExecutorCarrier


def make(carrier: str | CarrierMaker, site: CarrierSite) -> Carrier:
    """This rank's carrier; all ranks make it at the same point. Raises `InvalidInput` where it cannot work here."""
    return chosen(carrier, site.engine)(site)
