# SPDX-License-Identifier: Apache-2.0
"""Times of programs: the network simulator, its timelines, prices of runtimes, and lower bounds."""

from typing import TYPE_CHECKING

from ..late import late_names
from .network import SIMULATE_PRICED, simulate
from .timeline import Timeline

if TYPE_CHECKING:
    from . import bounds as bounds
    from . import priced as priced
    from .bounds import Bound as Bound
    from .bounds import lower_bound as lower_bound
    from .runtimes import Protocol as Protocol
    from .runtimes import Runtime as Runtime
else:
    # Bounds need solvers and prices need readers of files; most simulations need neither.
    __getattr__ = late_names(
        __name__,
        {
            "Bound": ".bounds", "bounds": ".bounds", "lower_bound": ".bounds", "priced": ".priced",
            "Protocol": ".runtimes", "Runtime": ".runtimes", "runtimes": ".runtimes",
        },
    )  # fmt: skip

SIMULATE_PRICED.supply_from(f"{__name__}.priced", "simulate_priced")

__all__ = ["Bound", "Protocol", "Runtime", "Timeline", "lower_bound", "simulate"]
