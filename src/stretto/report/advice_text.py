# SPDX-License-Identifier: Apache-2.0
"""Advice in words: one page for a terminal, and the sentences of its HTML page."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..advice import AdvisedChange, StepAdvice
from ..advice.advice import WORTHWHILE
from ..units import counted, format_us
from .table import ResultTable

LATE = 0.25
"""From this share on, waiting for later ranks is worth a sentence."""
SMALL = 0.01
"""A smaller change of the step is none."""


def verdict(advice: StepAdvice) -> str:
    """What to do, in one to four sentences; what was measured or is not known comes first."""
    if not advice.workload.comm_ops:
        return "The step communicates nothing, so there is nothing to gain."
    if advice.cluster is None:
        if advice.measured and advice.waits_share < WORTHWHILE:
            return "Nothing is to be gained: almost nothing of the step waits for communication."
        return "Give a cluster (-c) to learn the lower bound and what each change would gain."
    first = [_measured_just_now(advice)] if advice.trial is not None else []
    if advice.waiting and advice.waits_share < WORTHWHILE and advice.best is None:
        share = f"only {advice.waits_share:.1%} of the step waits for communication"
        return " ".join([*first, f"Nothing is to be gained: {share}."])
    if advice.unusable:
        return " ".join([*first, _unusable(advice)])
    if advice.unexplained:
        first.append(_unknown(advice))
    return " ".join([*first, _of_the_model(advice)]) + _but(advice)


def _measured_just_now(advice: StepAdvice) -> str:
    """What the job gained while it was recorded, as far as it was sure of that."""
    assert advice.trial is not None
    trial = advice.trial
    both = f"{trial.tried} {format_us(trial.tried_us)} an iteration, {trial.own} {format_us(trial.own_us)}"
    if trial.kept and trial.gain >= 1 + SMALL:
        return f"`stretto run` makes this job {trial.gain:.2f} times as fast, measured just now ({both})."
    sure = "" if trial.gain < 1 + SMALL else ", too short to be sure"
    return f"`stretto run` gains nothing on this job, measured just now: {trial.gain:.2f}x{sure} ({both})."


def _unusable(advice: StepAdvice) -> str:
    text = f"The model is unusable for this job, and nothing is advised from it: {advice.unusable}."
    return text if advice.trial is not None else f"{text} `stretto run -- COMMAND` measures what is to be gained."


def _unknown(advice: StepAdvice) -> str:
    """What is said first where collectives are slower than the network is, for a reason that is not known."""
    network = "probed network" if advice.probed else "network as described"
    may = "" if advice.probed else " or the description"
    return (
        "What is to be gained is unknown until `stretto run -- COMMAND` has measured it: collectives take "
        f"{advice.unexplained:.1f} times as long as the {network} lets expect. The backend's algorithms may be the "
        f"reason, or the network{may}."
    )


def _of_the_model(advice: StepAdvice) -> str:
    """What the changes gain that can simply be made."""
    best = advice.best
    if best is None:
        begin = (
            "As long as they stay so, no setting and no plan helps" if advice.unexplained else "Nothing is to be gained"
        )
        if advice.trial is not None:
            begin = "No other change helps"
        return f"{begin}: {_why_nothing(advice)}"
    first = next(change for change in advice.advised if not change.changes_training and not change.diagnosis)
    if first.measured:
        return "Of the other changes, none is worthwhile in the model."
    so = "As long as they stay so: " if advice.unexplained else ""
    text = f"{so}{_sentence(first)}: the step becomes {first.gain:.2f} times as fast, {_saved(advice, first)} shorter."
    if best is not first:
        text += f" The most is gained by {best.name}: {best.gain:.2f} times as fast, {_saved(advice, best)} shorter."
    return text


def _but(advice: StepAdvice) -> str:
    """What is worth a look beside the changes that can simply be made."""
    text = ""
    for change in advice.advised:
        if change.diagnosis:
            as_it_is = "as probed" if advice.probed else "as described"
            text += f" Look into the network: {as_it_is}, the step would be {change.gain:.2f} times as fast."
    other = [change for change in advice.advised if change.changes_training]
    if other and advice.best is None:
        text += f" What would help trains otherwise: {other[0].name}, {other[0].gain:.2f} times as fast."
    return text


def _why_nothing(advice: StepAdvice) -> str:
    least = 1 - advice.bound_us / advice.model_us if advice.model_us > 0 else 0.0
    if least < WORTHWHILE:
        least_text = f"more than {least:.1%} of the step" if least >= 0.0005 else "any time"
        return f"in the model, no plan can save {least_text} on this cluster."
    return (
        f"no change that was tried saves {WORTHWHILE:.0%} of the step, though the bound leaves room for {least:.0%}; "
        "a longer --budget may find more."
    )


def _sentence(change: AdvisedChange) -> str:
    begin = {"environment": "Set", "buckets": "Use", "tuner": "Load", "plan": "Make", "parallelism": "Change to"}
    return f"{begin[change.effort]} {change.name}"


def _saved(advice: StepAdvice, change: AdvisedChange) -> str:
    return format_us(advice.step_us * change.saves)


def facts(advice: StepAdvice) -> list[tuple[str, str]]:
    """What the step does, and what bounds it: a name and a sentence each."""
    known = "measured" if advice.measured else "simulated"
    found = [("step", f"{format_us(advice.step_us)} on {counted(advice.workload.num_ranks, 'rank')}, {known}")]
    if advice.placed:
        found.append(("ranks", advice.placed))
    if advice.measured or advice.cluster is not None:
        least = "at most " * (bool(advice.unusable) and not advice.waiting)
        waits = f"{least}{format_us(advice.waits_us)}, {advice.waits_share:.1%} of the step, for communication"
        found.append(("waits", f"{waits}{_spread(advice)}"))
    if advice.waiting:
        slowest = max(advice.waiting, key=lambda one: one.share)
        found.append(
            ("computes", f"{format_us(slowest.compute_us)}; hides {_hidden(slowest.comm_us, slowest.waits_us)}")
        )
        if slowest.idle_us > SMALL * slowest.step_us:
            rest = "launches, Python, loading of data: communication is not the reason"
            found.append(("pauses", f"{format_us(slowest.idle_us)}: {rest}"))
    else:
        found.append(("computes", format_us(advice.compute_us)))
    if advice.late_share >= LATE:
        share = f"{advice.late_share:.0%} of the time in collectives is waiting for later ranks"
        found.append(("late ranks", f"{share}: even out their work first, no plan shortens that"))
    if advice.unusable:
        found.append(("the model", f"unusable: {advice.unusable}"))
    elif advice.model_us:
        stay = "with these buckets, and collectives as fast as they were"
        found.append(("at best", f"{format_us(advice.bound_us)} {stay}: no plan is faster ({advice.bound_by})"))
        scaled = "; all times here are scaled to the measured step" if advice.measured else ""
        found.append(("in the model", f"{format_us(advice.model_us)} as it is{scaled}"))
    return found


def _spread(advice: StepAdvice) -> str:
    shares = [one.share for one in advice.waiting]
    if len(shares) < 2:
        return ""
    slowest = max(advice.waiting, key=lambda one: one.share)
    return f" (rank {slowest.rank}; {min(shares):.1%} to {max(shares):.1%} over ranks)"


def _hidden(comm_us: float, waits_us: float) -> str:
    return (
        f"{1 - waits_us / comm_us:.0%} of {format_us(comm_us)} of communication" if comm_us > 0 else "no communication"
    )


def changes_table(advice: StepAdvice) -> ResultTable:
    """All changes that were simulated or measured, the least effort first."""
    table = ResultTable("change", ">step", ">times as fast", "")
    for change in advice.changes:
        open_yet = advice.unexplained and change.effort == "plan" and not change.measured
        judged = "unknown until measured" if open_yet else _judged(change)
        table.add_row(change.name, format_us(change.step_us), f"{change.gain:.2f}", judged)
    return table


def _judged(change: AdvisedChange) -> str:
    if change.refused and change.saves >= SMALL:
        return "too short to be sure"
    if change.worthwhile:
        return "trains otherwise" if change.changes_training else "look into it" if change.diagnosis else "advised"
    return "slower" if change.saves < -SMALL else "no gain" if change.saves < SMALL else f"under {WORTHWHILE:.0%}"


def inputs_table(advice: StepAdvice) -> ResultTable:
    """What the advice rests on."""
    table = ResultTable("input", "known", "how")
    for one in advice.inputs:
        table.add_row(one.what, one.known, one.how)
    return table


def advice_page(advice: StepAdvice) -> RenderableType:
    """One page for a terminal."""
    head = ResultTable("", "", header=False)
    for name, sentence in facts(advice):
        head.add_row(name, sentence)
    where = f" on {advice.cluster.name}" if advice.cluster is not None else ""
    parts: list[RenderableType] = [Text(f"{advice.workload.name}{where}", style="bold"), head, Text("")]
    parts.append(Text(verdict(advice), style="bold"))
    if advice.changes:
        parts += [Text(""), changes_table(advice), Text("")]
        for change in advice.advised:
            parts.append(Text(f"{change.name}:"))
            parts.append(Padding(Text(f"{change.how}{f' ({change.note})' if change.note else ''}"), (0, 0, 0, 4)))
        if advice.advised:
            parts.append(Text(""))
    parts += [Text(f"confidence: {advice.confidence} ({advice.confidence_why})"), inputs_table(advice)]
    return Group(*parts)
