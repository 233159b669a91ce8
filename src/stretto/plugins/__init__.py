# SPDX-License-Identifier: Apache-2.0
"""Plug-ins for other programs: vLLM's weight transfer and verl's checkpoint engines, found through entry points.

Neither package is needed to import this one, and none is a dependency.
"""

from __future__ import annotations

NAME = "stretto"


def register_vllm() -> None:
    """Register our weight transfer with vLLM, on workers and trainers; vLLM calls it through ``vllm.general_plugins``.

    A trainer that is no vLLM process calls it by hand. A second call does nothing.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    here = f"{__name__}.vllm_engine"
    for factory, name in (
        (WeightTransferEngineFactory, "StrettoWeightTransferEngine"),
        (WeightTransferTrainerFactory, "StrettoTrainerWeightTransferEngine"),
    ):
        if NAME not in factory._registry:
            factory.register_engine(NAME, here, name)


def register_verl() -> None:
    """Register our checkpoint engine with verl; ``custom_backend_module=stretto.plugins.verl_engine`` does the same."""
    from . import verl_engine  # noqa: F401
