"""``stretto cluster``: list, show, check and convert hardware descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import out, progress
from .outputs import YAML, output

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
    str, typer.Argument(metavar="CLUSTER", help="A preset such as dgx2:2, or the path of a file.")
]


@app.command("list")
def list_presets() -> None:
    """The presets, with what they are and how many nodes they have by default.

    \b
    Example:
      stretto cluster list
    """
    from rich.table import Table

    from ..cluster.presets import presets

    table = Table("preset", "what", box=None, pad_edge=False)
    table.add_column("default nodes", justify="right")
    for entry in presets():
        table.add_row(entry.name, entry.description, str(entry.default_nodes))
    out().print(table)


@app.command()
def show(
    cluster: ClusterArgument,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", callback=output(".svg"), help="Write a drawing to this SVG file instead."),
    ] = None,
) -> None:
    """Draw a cluster: who is linked with whom, at what rate and latency.

    \b
    Examples:
      stretto cluster show ndv2
      stretto cluster show dgx2:2 --svg dgx2.svg
      stretto cluster show /etc/nccl/topo.xml:4
    """
    from ..cluster.files import load
    from ..files import write_file
    from ..report.cluster_drawing import picture, to_svg

    with progress("drawing", 1) as advance:
        advance(cluster)
        loaded = load(cluster)
        drawing = picture(loaded) if svg is None else to_svg(loaded)
    if svg is None:
        out().print(drawing)
        return
    write_file(svg, str(drawing))
    typer.echo(f"wrote {svg}")


@app.command()
def check(cluster: ClusterArgument) -> None:
    """Read a cluster, make sure that all devices reach each other, and say what is odd about it.

    \b
    Examples:
      stretto cluster check my.yaml
      stretto cluster check topo.xml:4
    """
    from ..cluster.check import channel_groups, oddities, require_reachable
    from ..cluster.files import load

    with progress("checking", 1) as advance:
        advance(cluster)
        loaded = load(cluster)
        require_reachable(loaded)
        joined, odd = channel_groups(loaded), oddities(loaded)
    typer.echo(f"{loaded.name}: valid, {loaded.num_devices} devices that all reach each other")
    for channel, groups in joined.items():
        typer.echo(f"  channel {channel} {_joined(groups)}")
    for line in odd:
        typer.echo(f"  odd: {line}")
    if loaded.multicasts:
        names = [loaded.node_names[n] for n in loaded.node_multicast.nonzero()[0][:8]]
        typer.echo(f"  multicast: {', '.join(names)}{', ...' if loaded.node_multicast.sum() > 8 else ''}")
    for note in loaded.notes:
        typer.echo(f"  note: {note}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A preset, or a file of any form that is read.")],
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
    from ..cluster.files import load, save

    with progress("converting", 1) as advance:
        advance(source)
        loaded = load(source)
        save(loaded, target)
    typer.echo(f"wrote {target}: {loaded.num_devices} devices, {loaded.num_links} links")
    for note in loaded.notes:
        typer.echo(f"  note: {note}")


def _joined(groups: list[int]) -> str:
    """What a channel does by itself, from the sizes of the groups of devices that it joins."""
    if len(groups) == 1:
        return "joins all devices by itself"
    if max(groups) == 1:
        return "joins no devices by itself, only together with others"
    kinds = list(dict.fromkeys(groups))
    parts = [f"{groups.count(k)} x {k}" if groups.count(k) > 1 else str(k) for k in kinds[:4]]
    return f"joins groups of {', '.join(parts)}{', ...' if len(kinds) > 4 else ''} devices by itself"
