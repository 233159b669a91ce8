# SPDX-License-Identifier: Apache-2.0
"""``stretto cluster``: list, show, check and convert hardware descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..cluster import Cluster
from ..cluster.check import channel_groups, oddities, require_reachable
from ..cluster.files import load, save
from ..cluster.numbering import numbering, visible_devices
from ..cluster.presets import presets
from ..errors import InvalidInput
from ..files import write_file
from ..report.cluster_drawing import picture, to_svg
from ..report.table import ResultTable
from ..units import counted
from .common import next_step, out, progress, quoted, say, wrote
from .completion import cluster_names
from .options import JsonOption
from .outputs import YAML, OutputFiles, output

app = typer.Typer(
    no_args_is_help=True,
    help="""Hardware: devices, switches, NICs and links.

    \b
    A CLUSTER is
      dgx2                   a preset (see 'stretto cluster list')
      dgx2:2                 a preset with a node count
      torus:4x4x4            a grid by its sides
      torus:16,gb_per_s=25   a preset with options
      dgx2:2+multicast       the same, with switches that multicast
      topo.xml               a file of one of the forms below
      topo.xml:4             a file of one host, repeated behind a switch

    \b
    Files that are read:
      Stretto's own YAML or JSON, NCCL topology XML (NCCL_TOPO_DUMP_FILE),
      the text of 'nvidia-smi topo -m', ASTRA-sim network YAML, TACCL
      topology JSON
    """,
)

ClusterArgument = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER", autocompletion=cluster_names, help="A preset such as dgx2:2, or the path of a file."
    ),
]


@app.command("list")
def list_presets(rows: JsonOption = None) -> None:
    """The presets, with what they are and how many nodes they have by default.

    \b
    Example:
      stretto cluster list
    """
    table = ResultTable("preset", "what", ">nodes")
    for entry in presets():
        table.add_row(entry.name, entry.description, str(entry.default_nodes))
    files = OutputFiles()
    files.json(rows, {"presets": [
        {"name": one.name, "what": one.description, "nodes": one.default_nodes} for one in presets()
    ]})  # fmt: skip
    out().print(table)
    files.tell("stretto cluster show dgx2:2")


@app.command()
def show(
    cluster: ClusterArgument,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.svg", callback=output(".svg"), help="Write a drawing to this file instead."
        ),
    ] = None,
    rows: JsonOption = None,
) -> None:
    """Draw a cluster: who is linked with whom, at what rate and latency.

    \b
    Examples:
      stretto cluster show ndv2
      stretto cluster show dgx2:2 -o dgx2.svg
      stretto cluster show /etc/nccl/topo.xml:4
    """
    with progress("drawing", 1) as advance:
        advance(cluster)
        loaded = load(cluster)
        drawing = picture(loaded) if svg is None else to_svg(loaded)
    files = OutputFiles()
    files.json(rows, _facts(loaded))
    files.write(svg, lambda path: write_file(path, str(drawing)))
    if svg is None:
        out().print(drawing)
    files.tell("" if svg is not None else f"stretto simulate all -c {quoted(cluster)} -b 1K..1G")


def _facts(cluster: Cluster) -> dict[str, object]:
    return {
        "name": cluster.name, "devices": cluster.num_devices, "links": cluster.num_links,
        "channels": list(cluster.channels), "multicasts": bool(cluster.multicasts), "notes": list(cluster.notes),
    }  # fmt: skip


@app.command()
def check(cluster: ClusterArgument, rows: JsonOption = None) -> None:
    """Read a cluster, make sure that all devices reach each other, and say what is odd about it.

    \b
    Examples:
      stretto cluster check my.yaml
      stretto cluster check topo.xml:4
    """
    with progress("checking", 1) as advance:
        advance(cluster)
        loaded = load(cluster)
        try:
            require_reachable(loaded)
        except InvalidInput as error:
            raise InvalidInput(f"{cluster}: {error}") from None
        joined, odd = channel_groups(loaded), oddities(loaded)
    files = OutputFiles()
    files.json(rows, _facts(loaded) | {"groups": {name: list(sizes) for name, sizes in joined.items()}, "odd": odd})
    say(f"{loaded.name}: valid, {loaded.num_devices} devices that all reach each other")
    for channel, groups in joined.items():
        say(f"  channel {channel} {_joined(groups)}")
    for line in odd:
        say(f"  odd: {line}")
    if loaded.multicasts:
        names = [loaded.node_names[n] for n in loaded.node_multicast.nonzero()[0][:8]]
        say(f"  multicast: {', '.join(names)}{', ...' if loaded.node_multicast.sum() > 8 else ''}")
    for note in loaded.notes:
        say(f"  note: {note}")
    files.tell()


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN", autocompletion=cluster_names, help="A preset, or a file of any form that is read."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", callback=output(*YAML), help="The file to write: .yaml, .yml or .json.")
    ],
) -> None:
    """Write any cluster in Stretto's own file form, which keeps everything and reads back exactly.

    \b
    Examples:
      stretto cluster convert topo.xml:4 four-hosts.yaml
      stretto cluster convert themis_2d_sw_sw themis.json
    """
    with progress("converting", 1) as advance:
        advance(source)
        loaded = load(source)
        save(loaded, target)
    wrote(out(), target, f"{counted(loaded.num_devices, 'device')}, {counted(loaded.num_links, 'link')}")
    for note in loaded.notes:
        say(f"  note: {note}")
    next_step(f"stretto cluster show {quoted(target)}")


@app.command()
def renumber(
    host: Annotated[
        str, typer.Argument(metavar="HOST", autocompletion=cluster_names, help="A cluster of one host, or its file.")
    ],
    like: Annotated[
        str | None, typer.Option(metavar="HOST", help="The host that it should look like; else it stays what it is.")
    ] = None,
    rows: JsonOption = None,
) -> None:
    """The order of a host's GPUs in which it looks like another host, as CUDA_VISIBLE_DEVICES.

    \b
    Links of their own, distances on PCIe and distances to NICs are kept. Without
    --like only the NICs may move: GPUs beside them come first.

    \b
    Examples:
      stretto cluster renumber topo.xml
      stretto cluster renumber measured.yaml --like first-host.yaml
    """
    loaded, other = load(host), load(like) if like is not None else None
    order = numbering(loaded, other)
    if order is None:
        raise InvalidInput(f"{loaded.name}: no order of its GPUs was found in which it looks like {like or host}")
    files = OutputFiles()
    files.json(rows, {"order": list(order), "visible_devices": visible_devices(order)})
    say(f"CUDA_VISIBLE_DEVICES={visible_devices(order)}")
    files.tell()


def _joined(groups: list[int]) -> str:
    """What a channel does by itself, from the sizes of the groups of devices that it joins."""
    if len(groups) == 1:
        return "joins all devices by itself"
    if max(groups) == 1:
        return "joins no devices by itself, only together with others"
    kinds = list(dict.fromkeys(groups))
    parts = [f"{groups.count(k)} x {k}" if groups.count(k) > 1 else str(k) for k in kinds[:4]]
    return f"joins groups of {', '.join(parts)}{', ...' if len(kinds) > 4 else ''} devices by itself"
