# SPDX-License-Identifier: Apache-2.0
"""Write a collective algorithm by hand, let the verifier find the mistake, and time the right one.

python examples/own_algorithm.py
"""

from __future__ import annotations

import stretto as st


def broadcast(order: list[tuple[int, int]]) -> st.Program:
    """A broadcast from rank 0 as (src, dst) messages, one per step."""
    return st.Program.from_steps(
        "by hand",
        st.Broadcast(4),
        src=[a for a, _ in order],
        dst=[b for _, b in order],
        chunk=[0] * len(order),
        step=range(len(order)),
    )


def main() -> None:
    """First a program that forwards what has not arrived yet, then one that is right."""
    try:
        broadcast([(1, 3), (0, 1), (0, 2)]).verify()
    except st.VerificationError as error:
        print("refused:", error)
    program = broadcast([(0, 1), (0, 2), (1, 3)])
    print("proved: ", program.verify().subject)
    print(st.simulate(program, st.Cluster.preset("fully_connected", nodes=4), nbytes=1 * st.MB))


if __name__ == "__main__":
    main()
