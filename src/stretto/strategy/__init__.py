"""How each parameter of a model is synchronised: represented, built, simulated and searched."""

from .model import ModelSpec, Variable
from .representation import NodeConfig, Part, Strategy, Sync

__all__ = ["ModelSpec", "NodeConfig", "Part", "Strategy", "Sync", "Variable"]
