# SPDX-License-Identifier: Apache-2.0
"""What AutoDist's paper says about its Figures 5 to 8, beside what holds in our simulation. Called by strategy_sim.py.

The figures are missing from the text at hand, so statements of the text are compared, each as "a is so many times as
fast as b" on the clusters it names. Where it names none (`ours`), they are of our choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from common import Row
from strategy_systems import TIMES, built_us, system_us

from stretto.strategy.clusters import CLUSTERS

CNNS = ("densenet121", "resnet101", "inceptionv3")
SPREAD = ("b5", "b6", "b7", "b8")
CHUNKS = (1, 8, 32, 64, 128, 512, 100_000)
HOST_US = (0.0, 300.0, 1700.0)
"""The last is what the paper's Figure 7 asks for: merging ResNet101's 314 messages makes it more than twice as fast."""
CHEAP = ("vgg16", "ncf_dense", "ncf_sparse", "bert_3l")


@dataclass(frozen=True, kw_only=True)
class Faster:
    """`fast` takes between 1/`most` and 1/`least` of the time of every one of `slow`."""

    model: str
    cluster: str
    fast: str
    slow: tuple[str, ...]
    least: float = 1.0
    most: float = inf

    def ratio(self, host_us: float) -> float:
        """How many times as fast it is here."""
        slow = min(system_us(self.model, self.cluster, name, host_us) for name in self.slow)
        return slow / system_us(self.model, self.cluster, self.fast, host_us)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement: all of some comparisons hold, or with `some` at least one of them."""

    figure: str
    says: str
    parts: tuple[Faster, ...]
    some: bool = False
    ours: bool = False

    def judged(self, host_us: float = 0.0) -> tuple[str, str]:
        """The ratios here, and whether it holds."""
        ratios = [part.ratio(host_us) for part in self.parts]
        held = [part.least < ratio < part.most for part, ratio in zip(self.parts, ratios, strict=True)]
        shown = ", ".join(
            f"{part.model} {part.cluster.upper()} {ratio:.2f}" for part, ratio in zip(self.parts, ratios, strict=True)
        )
        if len(self.parts) > 4:
            shown = f"{min(ratios):.2f} to {max(ratios):.2f}"
        holds = any(held) if self.some else all(held)
        return shown, "yes" if holds else f"no ({sum(held)} of {len(held)})" if len(held) > 1 else "no"


def _each(models: tuple[str, ...], clusters: tuple[str, ...], fast: str, slow: tuple[str, ...], least: float = 1.0,
          most: float = inf) -> tuple[Faster, ...]:  # fmt: skip
    return tuple(
        Faster(model=m, cluster=c, fast=fast, slow=slow, least=least, most=most) for m in models for c in clusters
    )


CLAIMS = (
    Claim(figure="5", says="on one host all-reduce is faster than servers",
          parts=_each(("bert_large", *CNNS), ("b4",), "ar", ("ps1", "ps2"))),
    Claim(figure="5", says="TF-PS-LB is faster than all-reduce on a CNN at times",
          parts=_each(CNNS, SPREAD, "ps1", ("ar",)), some=True),
    Claim(figure="5", says="BERT-large: the PS builder is fastest on several hosts",
          parts=_each(("bert_large",), SPREAD, "ps2", ("ar", "ps1"))),
    Claim(figure="5", says="CNNs: the PS builder is fastest on several hosts",
          parts=_each(CNNS, SPREAD, "ps2", ("ar", "ps1"))),
    Claim(figure="6", says="BERT-3L: all-reduce > 2x as fast as whole variables on servers",
          parts=_each(("bert_3l",), ("a1", "b2", "b7"), "ar", ("ps1",), 2.0), ours=True),
    Claim(figure="6", says="BERT-3L: all-reduce > 2x as fast as cut ones on servers",
          parts=_each(("bert_3l",), ("a1", "b2", "b7"), "ar", ("ps2",), 2.0), ours=True),
    Claim(figure="6", says="BERT-large: the PS builder beats all-reduce by a small margin",
          parts=_each(("bert_large",), ("a2", "b3", "b7"), "ps2", ("ar",), 1.0, 1.3), ours=True),
    Claim(figure="6", says="NCF-dense: the PS builder is faster on one cluster at least",
          parts=_each(("ncf_dense",), tuple(CLUSTERS), "ps2", ("ar",)), some=True),
    Claim(figure="6", says="NCF-dense: all-reduce is faster on one cluster at least",
          parts=_each(("ncf_dense",), tuple(CLUSTERS), "ar", ("ps2",)), some=True),
    Claim(figure="6", says="cut variables on servers are faster than whole ones",
          parts=_each(("bert_large", "ncf_dense", "vgg16"), ("a1", "b3", "b7"), "ps2", ("ps1",)), ours=True),
    Claim(figure="6", says="but not for ResNet101 on B3 and the Transformer on B12",
          parts=_each(("resnet101",), ("b3",), "ps1", ("ps2",)) + _each(("transformer",), ("b12",), "ps1", ("ps2",))),
    Claim(figure="6", says="Transformer B2: both servers are faster than all-reduce",
          parts=_each(("transformer",), ("b2",), "ps1", ("ar",)) + _each(("transformer",), ("b2",), "ps2", ("ar",))),
    Claim(figure="6", says="Transformer B12: all-reduce is faster than both",
          parts=_each(("transformer",), ("b12",), "ar", ("ps1", "ps2"))),
    Claim(figure="6", says="Transformer A1: all-reduce is faster than both",
          parts=_each(("transformer",), ("a1",), "ar", ("ps1", "ps2"))),
    Claim(figure="6", says="sparse gradients: servers are faster than gathering",
          parts=_each(("ncf_sparse", "lm1b"), ("a1", "b7"), "ps2", ("ar",)), ours=True),
)  # fmt: skip


def _chunks(model: str, host_us: float) -> dict[int, float]:
    cluster = "b2" if model == "transformer" else "b7"
    return {chunk: built_us(model, cluster, ("all_reduce", (("chunk", chunk),)), host_us) for chunk in CHUNKS}


Judge = Callable[[float], tuple[str, bool]]


def _merging() -> list[tuple[tuple[str, ...], str, Judge]]:
    """Figure 7's statements: models, what it says, and the judgement for so much host code per message."""

    def gain(model: str, good: Callable[[float], bool], chunks: tuple[int, ...] = CHUNKS) -> Judge:
        def judge(host_us: float) -> tuple[str, bool]:
            times = _chunks(model, host_us)
            found = times[1] / min(times[chunk] for chunk in chunks)
            return f"{found:.2f}", good(found)

        return judge

    def best(models: tuple[str, ...], good: tuple[int, ...]) -> Judge:
        def judge(host_us: float) -> tuple[str, bool]:
            tables = {m: _chunks(m, host_us) for m in models}
            found = {m: min(times, key=lambda chunk: times[chunk]) for m, times in tables.items()}
            return ", ".join(f"{m} {chunk}" for m, chunk in found.items()), all(x in good for x in found.values())

        return judge

    def whole(models: tuple[str, ...]) -> Judge:
        def judge(host_us: float) -> tuple[str, bool]:
            loss = {m: (t := _chunks(m, host_us))[100_000] / min(t.values()) for m in models}
            return f"{min(loss.values()):.2f} to {max(loss.values()):.2f}", all(x > 1 for x in loss.values())

        return judge

    every = ("resnet101", "vgg16", "ncf_dense", "bert_6l", "bert_12l", "transformer", "bert_large")
    deep = ("bert_6l", "bert_12l", "transformer")
    return [
        (("resnet101",), "ResNet101: merging gives > 2x", gain("resnet101", lambda found: found > 2)),
        (("vgg16",), "VGG16: merging (8 of 32 variables) has no impact",
         gain("vgg16", lambda found: 0.95 < found < 1.05, (8,))),
        (("ncf_dense",), "NCF-dense: merging makes it slower", best(("ncf_dense",), (1,))),
        (every, "all in one message is never best (here: its loss)", whole(every)),
        (deep, "BERT-6L, BERT-12L, Transformer: best chunk near 64", best(deep, (32, 64, 128))),
        (("bert_large",), "BERT-large: best chunk near 128", best(("bert_large",), (64, 128))),
    ]  # fmt: skip


FOUND = (
    ("ncf_dense", "a2", 1.18), ("ncf_dense", "b7", 1.18), ("vgg16", "b7", 1.6), ("vgg16/8", "b7", 1.6),
    ("bert_large", "a2", 1.25), ("bert_large", "b7", 1.2),
)  # fmt: skip
"""Figure 8: how many times as fast as the best made by hand the found strategy is there."""
FOUND_TRIALS = 40


def paper(quick: bool) -> list[Row]:
    """What the paper's text says about its figures, and what holds here."""
    rows: list[Row] = []
    for claim in CLAIMS:
        if quick and not {part.model for part in claim.parts} <= set(CHEAP):
            continue
        ratios, holds = claim.judged()
        rows.append({
            "case": f"Fig. {claim.figure}", "says": claim.says, "clusters": "ours" if claim.ours else "paper's",
            "here": ratios, "holds": holds,
        })  # fmt: skip
    for models, says, judge in _merging():
        if not quick or set(models) <= set(CHEAP):
            here, good = judge(0.0)
            rows.append({"case": "Fig. 7", "says": says, "clusters": "ours", "here": here,
                         "holds": "yes" if good else "no"})  # fmt: skip
    for model, cluster, factor in FOUND:
        us = TIMES.get(f"{model} {cluster} found {FOUND_TRIALS}")
        if us is not None:  # part fig8 has run
            hand = min(system_us(model, cluster, name) for name in ("ar", "ps1", "ps2"))
            rows.append({
                "case": "Fig. 8", "says": f"{model} {cluster.upper()}: found is {factor}x as fast as made by hand",
                # A smaller batch is a variant of ours: it says nothing about the paper's statement.
                "clusters": "paper's", "here": f"{hand / us:.2f}",
                "holds": "variant" if "/" in model else "yes" if hand / us >= factor else "no",
            })  # fmt: skip
    return rows


def overhead(quick: bool) -> list[Row]:
    """The same statements if every message, collective or to a server, cost so much more in host code."""
    rows: list[Row] = []
    for claim in CLAIMS:
        if not quick or {part.model for part in claim.parts} <= set(CHEAP):
            found = {us: claim.judged(us) for us in HOST_US}
            rows.append({"case": f"Fig. {claim.figure}", "says": claim.says} | {
                f"{us:g}us": f"{holds}: {ratios}" if len(claim.parts) < 4 else holds
                for us, (ratios, holds) in found.items()
            })  # fmt: skip
    for models, says, judge in _merging():
        if not quick or set(models) <= set(CHEAP):
            judged = {us: judge(us) for us in HOST_US}
            rows.append({"case": "Fig. 7", "says": says} | {
                f"{us:g}us": f"{'yes' if good else 'no'}: {here}" for us, (here, good) in judged.items()
            })  # fmt: skip
    return rows
