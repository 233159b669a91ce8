# SPDX-License-Identifier: Apache-2.0
"""The duration of a schedule, from the times of stages and transfers and from whether the two overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from .actions import COMPUTE, SEND_F, SENDS, Action
from .engine import ActionSpan, execute
from .lowering import with_comms
from .schedule import Schedule

if TYPE_CHECKING:
    from ..simulator import Timeline

STYLE_OF = {"async": "ahead", "pair": "mirrored", "blocking": "blocking"}
"""The style of `with_comms` for each transport, for schedules without communication."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Microseconds of one micro-batch at every stage, and between a stage and the next.

    A whole backward costs `input_us` + `weight_us`; recomputation belongs to `input_us`. `activation_us[s]` is the
    transfer from stage s to s + 1, `gradient_us[s]` the one back; skip connections are passed on stage by stage, as in
    PyTorch. `reduce_us` is paid once per iteration, after the stage's last backward.
    """

    forward_us: tuple[float, ...]
    input_us: tuple[float, ...]
    weight_us: tuple[float, ...]
    activation_us: tuple[float, ...] = ()
    gradient_us: tuple[float, ...] = ()
    reduce_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_us)
        if not stages:
            raise InvalidInput("forward_us: names no stage")
        for name, count in (
            ("input_us", stages), ("weight_us", stages), ("activation_us", stages - 1), ("gradient_us", stages - 1),
            ("reduce_us", stages),
        ):  # fmt: skip
            if not getattr(self, name) and name in ("activation_us", "gradient_us", "reduce_us"):
                object.__setattr__(self, name, (0.0,) * count)
            if len(getattr(self, name)) != count:
                raise InvalidInput(f"{name}: {len(getattr(self, name))} numbers where {stages} stages need {count}")
        for name in ("forward_us", "input_us", "weight_us", "activation_us", "gradient_us", "reduce_us"):
            for at, value in enumerate(getattr(self, name)):
                if not (math.isfinite(value) and value >= 0):
                    raise InvalidInput(f"{name}[{at}]: must be a number >= 0, not {value!r}")

    @classmethod
    def even(
        cls, stages: int, *, forward_us: float = 1.0, backward_us: float | None = None, transfer_us: float = 0.0
    ) -> StageCosts:
        """The same costs for all stages.

        Args:
            stages: number of stages, >= 1.
            forward_us: microseconds of a forward, >= 0.
            backward_us: microseconds of a backward, half of them for the weights; None: twice the forward.
            transfer_us: microseconds of a transfer between two stages, the same in both directions.

        Returns:
            The costs, without reductions.

        Raises:
            InvalidInput: a number is negative or not finite.
        """
        half = forward_us if backward_us is None else backward_us / 2
        between = (transfer_us,) * (stages - 1)
        each = (half,) * stages
        return cls(
            forward_us=(forward_us,) * stages, input_us=each, weight_us=each, activation_us=between, gradient_us=between
        )

    @property
    def num_stages(self) -> int:
        """The number of stages that the costs describe."""
        return len(self.forward_us)

    def free(self) -> StageCosts:
        """These costs with transfers that take no time: the paper's hypothetical upper bound."""
        none = (0.0,) * (self.num_stages - 1)
        return replace(self, activation_us=none, gradient_us=none)

    def of(self, action: Action) -> float:
        """Microseconds of one action; the time of a transfer is that of its send."""
        stage = action.stage
        match action.kind:
            case "F":
                return self.forward_us[stage]
            case "I":
                return self.input_us[stage]
            case "W":
                return self.weight_us[stage]
            case "B":
                return self.input_us[stage] + self.weight_us[stage]
            case "SEND_F":
                return self.activation_us[stage]
            case "SEND_B":
                return self.gradient_us[stage - 1]
            case "REDUCE_GRAD":
                return self.reduce_us[stage]
        return 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelineRun:
    """A simulated schedule: every action with its times."""

    schedule: Schedule
    transport: str
    spans: tuple[ActionSpan, ...]

    @cached_property
    def total_us(self) -> float:
        """The time at which the last action ends."""
        return max(span.end_us for span in self.spans)

    @cached_property
    def busy_us(self) -> tuple[float, ...]:
        """Microseconds that each rank computes."""
        busy = [0.0] * len(self.schedule.ranks)
        for span in self.spans:
            if span.action.kind in COMPUTE:
                busy[span.rank] += span.end_us - span.start_us
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute, 0..1."""
        return 1.0 - sum(self.busy_us) / (self.total_us * len(self.busy_us)) if self.total_us else 0.0

    def timeline(self) -> Timeline:
        """This run as a `Timeline` with compute and sends of every rank."""
        import numpy as np

        from ..simulator import Timeline

        streams = ("compute", "send forward", "send backward")
        stream = [0 if s.action.kind not in SENDS else 1 + (s.action.kind != SEND_F) for s in self.spans]
        return Timeline(
            total_us=self.total_us,
            rank=np.array([span.rank for span in self.spans], np.int32),
            stream=np.array(stream, np.int32),
            name=np.arange(len(self.spans), dtype=np.int32),
            start_us=np.array([span.start_us for span in self.spans]),
            end_us=np.array([span.end_us for span in self.spans]),
            nbytes=np.zeros(len(self.spans)),
            streams=streams,
            names=tuple(str(span.action) for span in self.spans),
            facts=(("schedule", self.schedule.name), ("transport", self.transport)),
        )

    def __repr__(self) -> str:
        from ..units import format_us

        return f"<Run {self.schedule.name} ({self.transport}): {format_us(self.total_us)}, bubble {self.bubble:.1%}>"


def simulate(schedule: Schedule, costs: StageCosts, *, transport: str = "async") -> PipelineRun:
    """Simulate a schedule; communication is added in the transport's style if the schedule has none.

    >>> from stretto.pipeline import eager_1f1b, one_f_one_b
    >>> costs = StageCosts.even(2, forward_us=10.0, transfer_us=6.0)
    >>> simulate(one_f_one_b(2, 16), costs, transport="blocking")
    <Run 1f1b (blocking): 702 us, bubble 31.6%>
    >>> simulate(one_f_one_b(2, 16), costs), simulate(eager_1f1b(2, 16), costs)
    (<Run 1f1b (async): 606 us, bubble 20.8%>, <Run eager_1f1b (async): 522 us, bubble 8.0%>)

    Args:
        schedule: the schedule, with or without communication.
        costs: times of as many stages as the schedule has.
        transport: one of `TRANSPORTS`.

    Returns:
        The run, whose `schedule` has its communication written out.

    Raises:
        InvalidInput: the costs have another number of stages, or the transport is unknown.
        VerificationError: the schedule deadlocks over this transport.
    """
    if costs.num_stages != schedule.num_stages:
        raise InvalidInput(f"costs: are of {costs.num_stages} stages, the schedule has {schedule.num_stages}")
    written = schedule
    if not schedule.has_comms:
        written = with_comms(schedule, STYLE_OF.get(transport, "ahead"))
    spans = execute(written, costs.of, transport)
    return PipelineRun(schedule=written, transport=transport, spans=tuple(spans))


def lower_bound_us(costs: StageCosts, microbatches: int, *, in_flight: Sequence[int] | None = None) -> float:
    """A lower bound on the time of every schedule with one stage per rank: the largest of three arguments.

    1. A stage cannot begin before the first activation arrives, must do all its work, and its last gradient has to
    travel
    back to the first stage. 2. A link must carry every micro-batch. 3. With `in_flight`, the memory of one micro-batch
    at a
    stage is used ``ceil(microbatches / in_flight)`` times, each time for a round trip to the last stage.

    Args:
        costs: times of every stage and transfer, in microseconds.
        microbatches: micro-batches of an iteration.
        in_flight: the most micro-batches that each stage has memory for, >= 1; None: no limit.

    Returns:
        Microseconds that no schedule can undercut.
    """
    last = costs.num_stages - 1
    forward, inputs, weights = costs.forward_us, costs.input_us, costs.weight_us
    there, back = costs.activation_us, costs.gradient_us
    best = 0.0
    for stage in range(last + 1):
        head = sum(forward[:stage]) + sum(there[:stage])
        tail = sum(inputs[:stage]) + sum(back[:stage]) + (weights[0] if stage else 0.0)
        work = microbatches * (forward[stage] + inputs[stage])
        best = max(best, head + work + microbatches * weights[stage], head + work + max(tail, weights[stage]))
        if stage < last:
            beyond = sum(sum(times[stage + 1 :]) for times in (forward, there, inputs, back))
            home = sum(inputs[: stage + 1]) + sum(back[:stage]) + weights[0]
            before = head + forward[stage]
            best = max(best, before + microbatches * there[stage] + beyond + back[stage] + home)
            best = max(best, before + there[stage] + beyond + microbatches * back[stage] + home)
        if in_flight is not None:
            # A micro-batch frees its memory after its weight gradient; the last one may overlap the other stages' end.
            trip = sum(sum(times[stage:]) for times in (forward, there, inputs, back)) + weights[stage]
            turns = math.ceil(microbatches / in_flight[stage])
            best = max(best, head + turns * trip - weights[stage] + max(tail, weights[stage]))
    return best + min(costs.reduce_us)
