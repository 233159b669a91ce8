# SPDX-License-Identifier: Apache-2.0
"""Jobs that use `torch.compile`: our own functions are called, and not compiled into the job's graphs.

TorchDynamo leaves the functions of `torch.distributed` alone, but not those of a backend that is written in Python: it
would trace them, and end the job where a process group is no object that it knows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ...process_state import STATE, ProcessPart
from .patches import COMPILE, DDP_PARTS, apply

LOADED, COUNTED = "torch._dynamo.trace_rules", "torch._dynamo.utils"
FLAG = "fakify_first_call"


class DynamoWatch(ProcessPart):
    """Whether TorchDynamo knows by now that it is to leave us alone, or will at the first `torch.compile`."""

    def __init__(self) -> None:
        self.watches = self.told = False


_WATCH = STATE.part(DynamoWatch)


def keep_uncompiled() -> None:
    """Have TorchDynamo leave our functions alone: at once where it is loaded, and at the first `torch.compile`."""
    if LOADED in sys.modules:
        _tell()
    if _WATCH.watches:
        return
    _WATCH.watches = True

    def watched(compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def first(*args: Any, **more: Any) -> Any:
            _tell()
            return compile_(*args, **more)

        return first

    apply(COMPILE, watched)


def compiles() -> bool:
    """Whether TorchDynamo has looked at any function of this process yet."""
    utils: Any = sys.modules.get(COUNTED)
    return utils is not None and bool(utils.counters["frames"])


def _tell() -> None:
    """PyTorch's way to skip all functions of a package: those called by a graph's code break the graph there."""
    if not _WATCH.told:
        _WATCH.told = True
        trace_rules: Any = import_module(LOADED)
        trace_rules.add(__name__.partition(".")[0])
        apply(DDP_PARTS, _flag_held)


def _flag_held(compile_part: Callable[..., Any]) -> Callable[..., Any]:
    """While PyTorch compiles a part of a model under DDP, the flag that asks for a first call on fake tensors holds.

    A guard sets it for each part and unsets it when it dies; what keeps a frame alive, as an exception does, lets it
    die while the next part is compiled. That part then runs on tensors without memory ("Cannot access data pointer").
    """

    @functools.wraps(compile_part)
    def compile_submod(*args: Any, **more: Any) -> Any:
        guards: Any = import_module("torch._guards")
        context = guards.TracingContext.try_get()
        if context is None or type(context) is not guards.TracingContext or not hasattr(context, FLAG):
            return compile_part(*args, **more)
        always = property(lambda _: True, lambda *_: None)
        context.__class__ = type("FlagHeld", (guards.TracingContext,), {FLAG: always})
        try:
            return compile_part(*args, **more)
        finally:
            context.__class__ = guards.TracingContext

    return compile_submod
