# SPDX-License-Identifier: Apache-2.0
"""Neural collaborative filtering on MovieLens-20M, enlarged to 122 M parameters."""

from __future__ import annotations

from .layers import Scale, VariableLayer, linear, table

USERS, ITEMS = 138493, 26744
FACTOR_WIDTH, TOWER_WIDTH = 256, 480


def ncf(w: Scale, *, sparse: bool) -> list[VariableLayer]:
    """The layers: four tables (users and items, for the product and for the tower), two hidden layers, and the
    prediction.
    """
    users, items, factor, tower = w(USERS), w(ITEMS), w(FACTOR_WIDTH), w(TOWER_WIDTH)
    return [
        table("factor.users", users, factor, looked_up=1, sparse=sparse),
        table("factor.items", items, factor, looked_up=1, sparse=sparse),
        table("tower.users", users, tower, looked_up=1, sparse=sparse),
        table("tower.items", items, tower, looked_up=1, sparse=sparse),
        linear("tower.0", 2 * tower, w(256)),
        linear("tower.1", w(256), w(128)),
        linear("predict", factor + w(128), 1),
    ]
