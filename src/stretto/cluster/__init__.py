"""The hardware: `Cluster`, its presets, its file forms and its picture."""

from .model import Cluster, Dimension, Link, Node

__all__ = ["Cluster", "Dimension", "Link", "Node"]
