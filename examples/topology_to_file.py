# SPDX-License-Identifier: Apache-2.0
"""From an NCCL topology file to an algorithm file that a runtime loads: read, search, prove, run, write.

python examples/topology_to_file.py [TOPOLOGY.xml] [OUT.xml]

NCCL writes the topology of a machine with NCCL_TOPO_DUMP_FILE=topology.xml. Without one, a machine with four GPUs in a
square of NVLinks (the diagonals only over PCIe) is made up. A runtime that knows MSCCL loads the result with
MSCCL_XML_FILES=OUT.xml.
"""

import sys
import tempfile
from pathlib import Path

import stretto as st
from stretto.programs import interpret
from stretto.programs.formats import load_program

SQUARE = {0: (1, 2), 1: (0, 3), 2: (0, 3), 3: (1, 2)}
PCI = 'class="{}" link_speed="16.0 GT/s PCIe" link_width="16"'


def made_up_topology() -> str:
    """Four GPUs behind one PCIe switch, each with two NVLinks to two of the others."""
    gpus = "".join(
        f'<pci busid="0000:0{gpu + 1}:00.0" {PCI.format("0x030200")}><gpu dev="{gpu}" sm="80" rank="{gpu}" gdr="1">'
        + "".join(f'<nvlink target="0000:0{peer + 1}:00.0" count="2" tclass="0x030200"/>' for peer in peers)
        + "</gpu></pci>"
        for gpu, peers in SQUARE.items()
    )
    switch = f'<pci busid="0000:00:00.0" {PCI.format("0x060400")}>{gpus}</pci>'
    return f'<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">{switch}</cpu></system>'


def main() -> None:
    """Read, search, write; then read what was written and run it on data."""
    folder = Path(tempfile.mkdtemp(prefix="stretto-"))
    made_up, out = folder / "topology.xml", folder / "allreduce.xml"
    made_up.write_text(made_up_topology())
    topology, target = [*map(Path, sys.argv[1:3]), *(made_up, out)[len(sys.argv) - 1 :]]

    cluster = st.Cluster.load(topology)
    print(cluster)
    wanted = st.AllReduce(cluster.num_devices, in_place=True)
    found = st.synthesize(wanted, cluster, nbytes=16 * st.MB, budget_s=10, lower=True)
    assert found.lowering is not None
    print(found.certificate)
    print(f"as instruction streams {found.lowering.time_us:.1f} us: {found.lowering.instances} instances")
    found.save(target)
    again = load_program(target, in_place=True)
    assert isinstance(again, st.programs.Lowered)
    again.verify()
    interpret.check(again, fifo_depth=2, op="sum", seed=0)
    print(f"{target}: read back, proved, and run on data of {again.collective.num_ranks} ranks")


if __name__ == "__main__":
    main()
