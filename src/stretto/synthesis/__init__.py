# SPDX-License-Identifier: Apache-2.0
"""New algorithms for a given cluster: from sketches, by exact search, by flows and trees, and greedily at scale.

`synthesize` asks every maker that can make a program, and returns the best program with its certificate; `select` does
so for a range of sizes. Solvers are loaded only by the makers that use one.
"""

from . import sketch, sketch_files
from .certificate import Candidate, Certificate, Lowering, Synthesis
from .maker import Maker, MakerRequest, SearchMaker
from .makers import register_maker
from .portfolio import SearchStopped, synthesize
from .problem import MakerTask, SynthesisProblem
from .sketch import Sketch
from .table import Selection, select

__all__ = [
    "Candidate", "Certificate", "Lowering", "Maker", "MakerRequest", "MakerTask", "SearchMaker", "SearchStopped",
    "Selection", "Sketch", "Synthesis", "SynthesisProblem", "forest", "register_maker", "select", "synthesize",
    "three_stage",
]  # fmt: skip

sketch.LOAD.supply(sketch_files.load)
sketch.SAVE.supply(sketch_files.save)
