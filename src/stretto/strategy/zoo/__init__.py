# SPDX-License-Identifier: Apache-2.0
"""The models of the AutoDist paper: their variables with shapes, and the compute time of each part.

AutoDist's Appendix E, which lists them, is missing from the text at hand. The figures that the text gives are kept:
BERT-3L has 11 M parameters, NCF-large 122 M in 10 variables, VGG16 138 M, BERT-large 340 M. Everything else (batch
sizes, sequence lengths, the widths of BERT-6L, ...) is ours. Compute times are a roofline's, in single precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...errors import InvalidInput, unknown
from ...files import exists
from ...units import parse_number
from ...workload.catalog.convolutional import densenet121, inceptionv3, resnet, vgg16
from ...workload.catalog.language import bert, lm1b, transformer
from ...workload.catalog.layers import Scale, VariableLayer
from ...workload.catalog.recommendation import ncf
from ...workload.roofline import ACCELERATORS, Accelerator
from ..model import ModelSpec
from .layers import variables_of

DEVICES: dict[str, Accelerator] = {
    entry.name: entry
    for entry in (
        Accelerator(name="titan_x", tflops={"fp32": 11.0}, hbm_gb_per_s=480.0),
        Accelerator(name="m60", tflops={"fp32": 4.8}, hbm_gb_per_s=160.0),
        Accelerator(name="t4", tflops={"fp32": 8.1}, hbm_gb_per_s=320.0),
        *(ACCELERATORS[name] for name in ("a100", "h100", "h200", "gb200", "mi300x")),
    )
}
"""The GPUs of the paper's clusters (one of the two of an M60 board), and those of today; all from their data sheets."""

MODELS: dict[str, tuple[Callable[[Scale], list[VariableLayer]], int]] = {
    "resnet50": (lambda scale: resnet("50", scale), 32),
    "resnet101": (lambda scale: resnet("101", scale), 32),
    "densenet121": (densenet121, 32),
    "inceptionv3": (inceptionv3, 32),
    "vgg16": (vgg16, 32),
    "bert_3l": (lambda scale: bert(scale, layers=3, width=256), 32),
    "bert_6l": (lambda scale: bert(scale, layers=6, width=512), 16),
    "bert_12l": (lambda scale: bert(scale, layers=12, width=768), 8),
    "bert_large": (lambda scale: bert(scale, layers=24, width=1024), 8),
    "bert_large_sparse": (lambda scale: bert(scale, layers=24, width=1024, sparse=True), 8),
    "transformer": (transformer, 64),
    "lm1b": (lm1b, 128),
    "ncf_dense": (lambda scale: ncf(scale, sparse=False), 4096),
    "ncf_sparse": (lambda scale: ncf(scale, sparse=True), 4096),
}
"""The function that makes each model's layers, and the number of samples per rank and step."""


def model(name: str, *, device: str = "t4", batch: int = 0, scale: float = 1.0) -> ModelSpec:
    """A model of the paper, with compute times of a device.

    >>> bert = model("bert_large")
    >>> round(bert.nbytes / 4e6), len(model("ncf_dense").variables), len(model("ncf_dense", scale=0.1).variables)
    (335, 10, 10)

    Args:
        name: one of `MODELS`.
        device: one of `DEVICES`.
        batch: samples per rank and step, up to 2^20; 0 takes the model's usual number.
        scale: factor on all widths and vocabularies, over 0 and at most 4.

    Returns:
        The model.

    Raises:
        InvalidInput: a name is unknown or a number out of range.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if not 0 < scale <= 4:
        raise InvalidInput(f"scale: must be > 0 and at most 4, not {scale:g}")
    make, usual = MODELS[name]
    if not 0 <= batch <= 1 << 20:
        raise InvalidInput(f"batch: must be 1..{1 << 20} (0: the usual {usual}), not {batch}")
    samples = batch or usual
    layers = make(Scale(scale))
    made = ModelSpec(name=name, variables=variables_of(layers, DEVICES[device], samples), batch=samples)
    return made if scale == 1.0 else replace(made, name=f"{name}@{scale:g}")


def load(source: str, *, device: str = "t4") -> ModelSpec:
    """A model by its name, perhaps scaled (``vgg16``, ``vgg16@0.1``), or from a file.

    >>> load("vgg16@0.1").name
    'vgg16@0.1'
    """
    from ..files import load_model

    name, at, factor = source.partition("@")
    if name in MODELS:
        scale = parse_number(factor) if at else 1.0
        if scale is None:
            raise InvalidInput(f"model {source!r}: what follows the @ must be a number")
        return model(name, device=device, scale=scale)
    if not Path(source).suffix and not exists(source):
        raise unknown("model", source, (*MODELS, "FILE.yaml"))
    return load_model(source)


__all__ = ["DEVICES", "MODELS", "load", "model"]
