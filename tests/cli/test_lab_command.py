# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from stretto.cli.lab import _uplinks

Run = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument"),
        (("--hosts", "0", "--", "true"), "--hosts: must be 1..32, not 0"),
        (("--ranks", "0", "--", "true"), "--ranks: must be 1..64 per host, not 0"),
        (("--hosts", "two", "--", "true"), "Invalid value for '--hosts'"),
        (("--order", "odd", "--", "true"), "--order: unknown order 'odd'; choose from: host, interleaved"),
        (("--shaper", "cake", "--", "true"), "--shaper: unknown shaper 'cake'; choose from: tbf, htb"),
        (("--tcp", "RENO", "--", "true"), "--tcp: 'RENO' is no name of a congestion control"),
        (("--uplink", "200", "--", "true"), "--uplink eth: rate '200': expected a number with its unit"),
        (("--uplink", "a=1gbit", "--uplink", "a=2gbit", "--", "true"), "--uplink 'a=2gbit': a is given twice"),
        (("--uplink", "=1gbit", "--", "true"), "--uplink '=1gbit': expected KEY=VALUE"),
        (("--uplink", "1gbit,1gbit,1gbit", "--", "true"), "--uplink eth: has 3 rates"),
        (("--env", "X", "--", "true"), "--env 'X': expected KEY=VALUE"),
        (("--timeout", "0", "--", "true"), "--timeout: must be more than 0"),
        (("--latency", "1ms", "--", "true"), "No such option"),
    ],
)
def test_wrong_options_are_named_with_the_choices(arguments: tuple[str, ...], message: str, bad: Run) -> None:
    assert message in bad("lab", "run", *arguments)


def test_a_rate_alone_is_the_uplink_of_the_channel_eth() -> None:
    assert _uplinks(["200mbit"]) == {"eth": "200mbit"}
    assert _uplinks(["rdma=400mbit", "eth=200mbit"]) == {"rdma": "400mbit", "eth": "200mbit"}
    assert _uplinks([]) is None
