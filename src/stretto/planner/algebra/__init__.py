"""The motif algebra: how a comm-op is divided into motifs, the rules that rewrite motifs, and their programs."""

from . import motif, notation
from . import rulebook as rulebook  # The rules of the paper register themselves.

motif.SHOW.supply(notation.show)
