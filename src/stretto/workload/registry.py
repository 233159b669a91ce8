# SPDX-License-Identifier: Apache-2.0
"""The registry of parametric models, by name: ``dlrm:A2``, ``gpt:13b,ranks=64,tensor=4``.

A model is one function ``build(variant="default", *, ranks=128, ...) -> Workload`` and one `_register` call below. The
command line and `Workload.load` call `build` in the calling process, once per request, with the variant as the only
positional argument; it needs no cluster, no GPU and no running job. `build`

* may assume that `variant` is one of the registered variants if it comes from a spec, but checks it for direct callers;
* takes every other option as a keyword-only parameter annotated with bool, str, int or float, perhaps ``| None``, since
  the text of a spec is converted by that annotation;
* checks its options and raises `InvalidInput` that begins with the option's name;
* returns a `Workload` whose `num_ranks` is `ranks`, the same for equal arguments, and writes its assumptions into
  `notes`.

`models.common.OpCollector` collects ops, `models.parallel.Replicas` adds data parallelism, and `roofline` gives compute
times.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput, unknown
from ..units import parse_number
from .catalog.convolutional import RESNET_BLOCKS
from .dag import Workload
from .models import cnn, dlrm, themis, transformer


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One family of models: its name, its builder, the names of its variants, and one line that describes it."""

    name: str
    build: Callable[..., Workload]
    variants: tuple[str, ...]
    what: str

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The options that can be set beside the variant: the builder's keyword-only parameters."""
        parameters = inspect.signature(self.build).parameters.values()
        return {entry.name: entry for entry in parameters if entry.kind is entry.KEYWORD_ONLY}

    @property
    def default(self) -> str:
        """The variant that is built if a spec names none."""
        return str(inspect.signature(self.build).parameters["variant"].default)


MODELS: dict[str, ModelFamily] = {}


def _register(name: str, build: Callable[..., Workload], variants: Iterable[str], what: str) -> None:
    MODELS[name] = ModelFamily(name=name, build=build, variants=tuple(variants), what=what)


_register("dlrm", dlrm.dlrm, dlrm.MODELS, "recommendation: sharded tables, replicated MLPs (SYNDICATE A1 to A4)")
_register("gpt", transformer.gpt, transformer.GPT, "GPT with tensor, pipeline and data parallelism, ZeRO 1 to 3")
_register("moe", transformer.moe, transformer.MOE, "GPT with experts spread over ranks")
_register("xlmr", transformer.xlmr, transformer.XLMR, "XLM-R under FSDP (xl: SYNDICATE A5)")
_register("regnetz", cnn.regnetz, cnn.REGNETZ, "RegNetZ, data parallel (4gf: SYNDICATE A6)")
_register("resnet", cnn.resnet, RESNET_BLOCKS, "ResNet, data parallel")
_register("themis", themis.themis, themis.BATCH, "ResNet-152, GNMT, DLRM and Transformer-1T as Themis has them")


def model(name: str) -> ModelFamily:
    """The registered family of models with this name."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def is_spec(text: str) -> bool:
    """Whether a text names a registered model, perhaps with a variant and options: ``dlrm:A2,ranks=16``."""
    return family_of(text) in MODELS


def family_of(spec: str) -> str:
    """The name before the variant and the options of a spec."""
    return re.split("[:,]", spec, maxsplit=1)[0]


def from_spec(spec: str) -> Workload:
    """The workload of ``model[:variant][,key=value...]``.

    >>> from_spec("resnet:50,ranks=8,batch=64")
    <Workload resnet:50: 46 ops (5 of communication) over 8 ranks, 28.24 ms of compute, 102 MB moved>
    """
    head, *tail = spec.split(",")
    name, colon, variant = head.partition(":")
    chosen = model(name)
    return _build(chosen, variant if colon else chosen.default, _options(chosen, tail))


def _build(chosen: ModelFamily, variant: str, options: Mapping[str, Any]) -> Workload:
    if variant not in chosen.variants:
        raise unknown(f"variant of {chosen.name}", variant, chosen.variants)
    return chosen.build(variant, **options)


def _options(chosen: ModelFamily, items: Iterable[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals:
            raise InvalidInput(f"{item!r}: expected key=value, as in {chosen.name}:{chosen.default},ranks=64")
        if key not in chosen.options:
            raise unknown(f"option of {chosen.name}", key, chosen.options)
        if key in options:
            raise InvalidInput(f"{key}: is given twice")
        options[key] = _value(key, text, str(chosen.options[key].annotation))
    return options


def _value(key: str, text: str, kind: str) -> Any:
    """Convert the text of an option to the type that its annotation `kind` names."""
    kind = kind.removesuffix(" | None")
    if kind == "bool":
        if text not in ("true", "false"):
            raise InvalidInput(f"{key}: must be true or false, not {text!r}")
        return text == "true"
    if kind == "str":
        return text
    try:
        value = parse_number(text)
    except InvalidInput as error:
        raise InvalidInput(f"{key}: {error}") from None
    if value is None or (kind == "int" and not isinstance(value, int)):
        wanted = "a whole number" if kind == "int" else "a number"
        raise InvalidInput(f"{key}: must be {wanted}, not {text!r}")
    return float(value) if kind == "float" else value
