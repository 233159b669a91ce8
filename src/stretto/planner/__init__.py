# SPDX-License-Identifier: Apache-2.0
"""The joint planner: motifs, their physical plans, schedules, and the search over all of them together.

The function that plans is `stretto.plan`; here is what a cost model of one's own is written with.
"""

from typing import TYPE_CHECKING

from ..late import late_names

if TYPE_CHECKING:
    from .costs.channels import bindings as bindings
    from .costs.channels import bindings_for as bindings_for
    from .costs.channels import restrict as restrict
    from .costs.costs import Bounding as Bounding
    from .costs.costs import Cost as Cost
    from .costs.costs import CostModel as CostModel
    from .costs.costs import Motion as Motion
    from .costs.costs import SimulatedCosts as SimulatedCosts
    from .costs.measured import LayeredCosts as LayeredCosts
    from .costs.measured import MeasuredCosts as MeasuredCosts
    from .costs.measured import read_measurements as read_measurements
else:
    # A rank that enforces a plan asks no cost model.
    __getattr__ = late_names(
        __name__,
        {
            "bindings": ".costs.channels", "bindings_for": ".costs.channels", "restrict": ".costs.channels",
            "Bounding": ".costs.costs", "Cost": ".costs.costs", "CostModel": ".costs.costs", "Motion": ".costs.costs",
            "SimulatedCosts": ".costs.costs", "LayeredCosts": ".costs.measured", "MeasuredCosts": ".costs.measured",
            "read_measurements": ".costs.measured",
        },
    )  # fmt: skip

__all__ = [
    "Bounding", "Cost", "CostModel", "LayeredCosts", "MeasuredCosts", "Motion", "SimulatedCosts", "bindings",
    "bindings_for", "read_measurements", "restrict",
]  # fmt: skip
