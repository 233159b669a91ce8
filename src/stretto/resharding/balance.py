# SPDX-License-Identifier: Apache-2.0
"""Divides bundles exactly over the ports that they may leave by, and derives the lower bound that
the division proves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .bundles import Bundle, exits
from .hosts import Hosts

Shares = dict[frozenset[int], dict[int, float]]
LIMIT_S = 20.0


def sender_shares(
    bundles: Sequence[Bundle], hosts: Hosts, *, relay: bool = False
) -> tuple[list[dict[int, float]], float]:
    """The share of each bundle that should leave by each port.

    Args:
        bundles: the bundles.
        hosts: groups and ports of the devices.
        relay: whether a bundle may use the ports of all devices of its holders' hosts, not only those of its holders.

    Returns:
        For each bundle its share per port (the shares add up to 1), and the load of the busiest port in us.
    """
    keys = [frozenset(hosts.out_port[d] for d in exits(b, hosts, relay)) for b in bundles]
    amounts: dict[frozenset[int], float] = defaultdict(float)
    for key, b in zip(keys, bundles, strict=True):
        amounts[key] += b.nbytes if _leaves(b, hosts) else 0
    split, busiest_us = balance(amounts, hosts.bytes_per_us)
    return [split[key] for key in keys], busiest_us


def host_bound_us(bundles: Sequence[Bundle], hosts: Hosts) -> float:
    """A lower bound in us on every resharding, whichever devices relay: bytes that must enter and leave hosts.

    A bundle that another host wants leaves its holders' hosts at least once; the best split over these hosts is a
    linear program.
    """
    enters: dict[int, float] = defaultdict(float)
    leaves: dict[frozenset[int], float] = defaultdict(float)
    for b in bundles:
        if b.reduction:
            continue
        near = frozenset(hosts.groups(b.holders[0]))
        for group in hosts.groups(b.missing):
            enters[group] += b.nbytes if group not in near else 0
        leaves[near] += b.nbytes if _leaves(b, hosts) else 0
    receive_us = max((n / hosts.receive_bytes_per_us[g] for g, n in enters.items() if n), default=0.0)
    return max(receive_us, balance(leaves, hosts.send_bytes_per_us)[1])


def balance(amounts: Mapping[frozenset[int], float], bytes_per_us: Mapping[int, float]) -> tuple[Shares, float]:
    """Divide each amount over the carriers that may carry it, so that the busiest carrier is done soonest; and that
    time.

    >>> shares, us = balance({frozenset({0}): 100.0, frozenset({0, 1}): 300.0}, {0: 1.0, 1: 1.0})
    >>> round(us), round(shares[frozenset({0, 1})][1], 3)
    (200, 0.667)
    """
    shares: Shares = {key: {next(iter(key)): 1.0} for key in amounts if len(key) == 1}
    fixed: dict[int, float] = defaultdict(float)
    for key, share in shares.items():
        for who in share:
            fixed[who] += amounts[key] / bytes_per_us[who]
    free = sorted((sorted(key), amount) for key, amount in amounts.items() if len(key) > 1)
    if not any(amount for _, amount in free):
        shares |= {frozenset(those): {who: 1 / len(those) for who in those} for those, _ in free}
        return shares, max(fixed.values(), default=0.0)
    from ..solvers.milp import Milp, solve

    # The model is in units of the largest total, so that the solver's tolerances mean the same at every size.
    unit = max(sum(n for _, n in free) / min(bytes_per_us.values()), *fixed.values(), 0.0)
    model = Milp()
    busiest = model.column(cost=1.0)
    terms: dict[int, dict[int, float]] = defaultdict(dict)
    columns: list[dict[int, int]] = []
    for those, amount in free:
        mine = {who: model.column(upper=1.0) for who in those}
        model.row(dict.fromkeys(mine.values(), 1.0), lower=1.0, upper=1.0)
        for who, column in mine.items():
            terms[who][column] = amount / bytes_per_us[who] / unit
        columns.append(mine)
    for who, row in sorted(terms.items()):
        model.row({**row, busiest: -1.0}, upper=-fixed.get(who, 0.0) / unit)
    found = solve(model, limit_s=LIMIT_S)
    values = found.values
    assert values is not None, "any split is a solution"
    for (those, _), mine in zip(free, columns, strict=True):
        shares[frozenset(those)] = {who: float(values[c]) for who, c in mine.items() if values[c] > 1e-9}
    # The optimum may exceed the true bound by the solver's tolerance, which is subtracted.
    proved = float(values[busiest]) * unit * (1 - 1e-6) if found.optimal else 0.0
    return shares, max(proved, *fixed.values(), 0.0)


def _leaves(bundle: Bundle, hosts: Hosts) -> bool:
    near = {hosts.group[d] for alike in bundle.holders for d in alike}
    return any(hosts.group[d] not in near for d in bundle.missing)
