# SPDX-License-Identifier: Apache-2.0
"""The checker refuses what would hang, or train wrongly without any error."""

from __future__ import annotations

import pytest

from stretto.errors import InvalidInput, VerificationError
from stretto.pipeline import Schedule, check, eager_1f1b, gpipe, one_f_one_b, paced, with_comms


def edited(schedule: Schedule, *pairs: tuple[str, str]) -> Schedule:
    text = schedule.to_csv()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return Schedule.from_csv(text, name="edited")


GOOD = with_comms(one_f_one_b(2, 3), "mirrored")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("0F2,", "")], "stage 0, micro-batch 2: has B; needs F and B"),
        ([("0B2,", "0I2,")], "has FI; needs F and B, or F, I and W"),
        ([("0F1,", "0F1,0F1,")], "0F1 is there twice"),
        ([("0B0,", ""), ("0F0,", "0B0,0F0,")], "0B0 comes before its F"),
        ([("0SEND_F0,0F1,0SEND_F1", "0SEND_F1,0F1,0SEND_F0")], "0SEND_F1 comes before what it sends"),
        ([("1RECV_F0,", ""), ("1F0,", "1F0,1RECV_F0,")], "1F0 comes before 1RECV_F0"),
        ([("1SEND_B1,", "")], "message 1 from rank 1 to 0 is 1SEND_B2, where the receiver expects 1SEND_B1"),
        ([("1SEND_B2,", "")], "message 2 from rank 1 to 0 is nothing"),
        ([("0F0,", "0SEND_B0,0F0,")], "0SEND_B0 goes to nobody"),
        ([("0F0,", "0RECV_F0,0F0,")], "0RECV_F0 is of no use"),
    ],
)
def test_each_fault_is_named(pairs: list[tuple[str, str]], message: str) -> None:
    check(GOOD)
    with pytest.raises(VerificationError, match=message):
        check(edited(GOOD, *pairs))


def test_messages_in_another_order_are_wrong_gradients_not_a_hang() -> None:
    plain = with_comms(gpipe(2, 2), "mirrored")
    swapped = edited(plain, ("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0"))
    with pytest.raises(VerificationError, match="gradients would be wrong without any error"):
        check(swapped)


def test_the_last_stage_must_go_forward_in_order() -> None:
    with pytest.raises(VerificationError, match=r"1F0 after micro-batch 1; the last stage's forwards must ascend"):
        check(Schedule.from_csv("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0"))
    check(Schedule.from_csv("0F1,0F0,0B0,0B1\n1F0,1F1,1B0,1B1"))


def test_stages_that_wait_for_each_other_are_a_deadlock() -> None:
    with pytest.raises(VerificationError, match="deadlock: rank 0 at 0B0; rank 1 at 1F1"):
        check(paced(2, 3, warmup=[1, 2]))


def test_one_queue_per_pair_deadlocks_where_receives_are_posted_ahead() -> None:
    ahead = with_comms(eager_1f1b(2, 6), "ahead")
    assert check(ahead).transports == ("async",)
    with pytest.raises(VerificationError, match="deadlock over a pair transport"):
        check(ahead, transport="pair")
    assert check(with_comms(eager_1f1b(2, 6), "mirrored"), transport="pair").transports == ("pair",)


def test_what_to_prove_must_be_there() -> None:
    with pytest.raises(InvalidInput, match="no communication is written out"):
        check(gpipe(2, 2), transport="async")
    with pytest.raises(InvalidInput, match="unknown transport 'tcp'; choose from: async, pair, blocking"):
        check(GOOD, transport="tcp")
