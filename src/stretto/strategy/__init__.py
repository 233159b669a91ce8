# SPDX-License-Identifier: Apache-2.0
"""How each parameter of a model is synchronized: strategies are represented, built, simulated and searched here."""

from .builders import BUILDERS, Resources, build, register_builder
from .clusters import paper_cluster
from .compare import StrategyChange, diff, explain
from .files import load_model, load_strategy, save_model, save_strategy
from .kernels import global_step, local_step, to_workload
from .model import ModelSpec, Variable
from .representation import NodeConfig, Strategy, Sync, VariablePart
from .search import search
from .simulate import SimulatedStrategy, iteration_us, plan_strategy, simulate_strategy

__all__ = [
    "BUILDERS",
    "StrategyChange",
    "ModelSpec",
    "NodeConfig",
    "Resources",
    "VariablePart",
    "SimulatedStrategy",
    "Strategy",
    "Sync",
    "Variable",
    "build",
    "diff",
    "explain",
    "global_step",
    "iteration_us",
    "load_model",
    "load_strategy",
    "local_step",
    "paper_cluster",
    "plan_strategy",
    "register_builder",
    "save_model",
    "save_strategy",
    "search",
    "simulate_strategy",
    "to_workload",
    "zoo",
]
