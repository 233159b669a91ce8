# SPDX-License-Identifier: Apache-2.0
"""Which carrier an enforcer gets: by name, by what the job uses anyway, or one that was brought along."""

from __future__ import annotations

from ...errors import unknown
from ..torch_backend.engine import Engine
from ..torch_backend.recording import LEDGER
from .carrier import Carrier, CarrierMaker, CarrierSite
from .executor_carrier import ExecutorCarrier
from .gloo import GlooCarrier
from .nccl import NcclCarrier

MAKERS: dict[str, CarrierMaker] = {"executor": ExecutorCarrier, "gloo": GlooCarrier, "nccl": NcclCarrier}
CARRIERS = ("auto", *MAKERS)


def chosen(carrier: str | CarrierMaker, engine: Engine) -> CarrierMaker:
    """Who makes a carrier; "auto" stands for NCCL where the job uses GPU tensors, else for ours, else for gloo's."""
    if not isinstance(carrier, str):
        return carrier
    if carrier not in CARRIERS:
        raise unknown("carrier", carrier, CARRIERS)
    if carrier != "auto":
        return MAKERS[carrier]
    # All ranks have made the same calls. Plans on GPU tensors run above NCCL.
    if any(choice.backend in ("nccl", "gpu") for choice in LEDGER.all()):
        return NcclCarrier
    return GlooCarrier if engine.job.executor is None else ExecutorCarrier


def make(carrier: str | CarrierMaker, site: CarrierSite) -> Carrier:
    """This rank's carrier; all ranks make it at the same point. Raises `InvalidInput` where it cannot work here."""
    return chosen(carrier, site.engine)(site)
