# SPDX-License-Identifier: Apache-2.0
"""`to_svg`: a cluster as a drawing, small clusters link by link, large regular ones by their repeating parts."""

from __future__ import annotations

import numpy as np

from ..cluster.model import Cluster
from ..cluster.shape import coordinates
from . import cluster_svg_grid as svg_grid
from . import cluster_svg_layers as svg_layers
from .cluster_canvas import Canvas


def to_svg(cluster: Cluster) -> str:
    """The drawing as SVG text; the width of a line shows the rate, its color the channel."""
    canvas = Canvas(cluster)
    where = coordinates(cluster)
    hosts = bool(np.any(cluster.node_host[: cluster.num_devices] >= 0))
    if where is not None and not hosts and svg_grid.fits(cluster, where):
        svg_grid.draw(canvas, where)
    elif cluster.dimensions:
        svg_grid.draw_dimensions(canvas)
    elif svg_layers.fits(cluster):
        svg_layers.draw(canvas)
    else:
        svg_layers.draw_summary(canvas)
    return canvas.finish()
