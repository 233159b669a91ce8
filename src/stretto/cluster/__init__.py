"""The hardware: `Cluster`, its presets and its file forms."""

from .model import Cluster, Dimension, Link, Node

__all__ = ["Cluster", "Dimension", "Link", "Node"]
