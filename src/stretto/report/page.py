# SPDX-License-Identifier: Apache-2.0
"""Writes one HTML file that needs no network: plotly figures, tables and drawings under headings."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_file
from .origin import page_origin

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ddd; --strong: #999; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #ddd; --paper: #1b1d21; --line: #3a3d44; --strong: #777; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
        max-width: 1180px; margin: 0 auto; padding: 16px 24px 48px; }}
h1 {{ font-size: 24px; margin: 8px 0; }}
h2 {{ font-size: 18px; margin: 32px 0 4px; border-top: 1px solid var(--line); padding-top: 16px; }}
h1, h2, p, li {{ overflow-wrap: anywhere; }}
p {{ margin: 4px 0 8px; max-width: 80ch; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child, th[align=left], td[align=left] {{ text-align: left; }}
th {{ border-bottom: 1px solid var(--strong); }}
td.best {{ font-weight: 700; }}
.wide {{ overflow-x: auto; }}
.roomy {{ min-width: 700px; }}
div.bars {{ display: grid; grid-template-columns: minmax(8ch, max-content) minmax(12ch, 1fr) max-content;
         gap: 5px 10px; align-items: center; max-width: 900px; margin: 8px 0 16px; }}
div.bars .bar {{ position: relative; display: flex; height: 18px; }}
div.bars .bar b {{ display: block; height: 100%; }}
div.bars .bar i {{ position: absolute; top: -4px; bottom: -4px; border-left: 2px dashed var(--strong); }}
div.bars > span:nth-child(3n+1) {{ text-align: right; overflow-wrap: anywhere; }}
.key span {{ margin-right: 18px; white-space: nowrap; }}
.key b {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; }}
svg {{ max-width: 100%; height: auto; }}
footer {{ margin-top: 40px; border-top: 1px solid var(--line); padding-top: 8px; font-size: 12px;
          overflow-wrap: anywhere; }}
@media (max-width: 600px) {{
  body {{ padding: 8px 10px 32px; }}
  div.bars {{ grid-template-columns: 1fr max-content; }}
  div.bars > span:nth-child(3n+1) {{ grid-column: 1 / 3; text-align: left; margin-bottom: -4px; }}
}}
</style>
{head}
</head>
<body>
<h1>{title}</h1>
{body}
<footer>{origin}</footer>
{draw}
</body>
</html>
"""
_DRAW = """<script type="text/plain" id="plotly">{packed}</script>
<script>
(async () => {{
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
  const run = text => {{
    const script = document.createElement("script");
    script.textContent = text;
    document.body.append(script);
  }};
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  run(await new Response(stream).text());
  window.Plotly ??= window.moduleName;
  document.querySelectorAll("script[type='text/figure']").forEach(figure => run(figure.textContent));
  if (matchMedia("(prefers-color-scheme: dark)").matches)
    document.querySelectorAll(".plotly-graph-div").forEach(figure => {{
      const look = {{paper_bgcolor: "#1b1d21", plot_bgcolor: "#1b1d21", "font.color": "#ddd"}};
      const axes = Object.keys(figure.layout).filter(key => /^[xy]axis/.test(key));
      axes.forEach(key => look[key + ".gridcolor"] = "#3a3d44");
      Plotly.relayout(figure, look);
      figure.data.forEach((trace, at) => {{
        if (trace.type == "heatmap")
          Plotly.restyle(figure, {{colorscale: [[[0, "#1b1d21"], [1, trace.colorscale.at(-1)[1]]]]}}, [at]);
      }});
    }});
  document.body.dataset.drawn = "yes";
}})();
</script>"""
"""Unpacks plotly's script and draws the figures; they have colors of their own, which follow a page that is dark."""
_PLOTLY = "plotly-cartesian.min.js.gz"
"""The part of plotly.js 4.1.1 (MIT) that draws lines, bars and heat maps (on npm: plotly.js-cartesian-dist-min);
all of it would make every page 5 MB."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, a sentence, and a body of finished HTML (from one of the functions here, or an SVG)."""

    heading: str
    note: str = ""
    body: str = ""


def write_html(path: str | Path, *, title: str, sections: Sequence[Section]) -> None:
    """Write a page; the part of plotly's script that draws our figures is embedded once if any section has one.

    Args:
        path: file to write.
        title: title of the page, which is escaped.
        sections: the sections in order; headings and notes are escaped, bodies are not; words of a note between
            backticks are code.

    Raises:
        InvalidInput: the file cannot be written.
    """
    write_file(path, page_html(title=title, sections=sections))


def page_html(*, title: str, sections: Sequence[Section], head: str = "") -> str:
    """The text of a page; see `write_html`.

    Args:
        title: title of the page, which is escaped.
        sections: the sections in order.
        head: more lines for its head, which are not escaped.

    Returns:
        The page.
    """
    body = "\n".join(map(_section_html, sections))
    draw = ""
    if "plotly-graph-div" in body:
        packed = base64.b64encode((files(__package__) / _PLOTLY).read_bytes()).decode()
        draw = _DRAW.format(packed=packed)
    return _PAGE.format(title=escape(title), head=head, body=body, origin=escape(page_origin()), draw=draw)


def _section_html(section: Section) -> str:
    """A section; its figures are labelled with its heading, for readers that do not see them."""
    label = f'role="img" aria-label="{escape(section.heading)}"'
    body = section.body.replace('class="plotly-graph-div"', f'class="plotly-graph-div" {label}')
    heading, note = escape(section.heading), re.sub("`([^`]+)`", r"<code>\1</code>", escape(section.note))
    return f"<h2>{heading}</h2>\n<p>{note}</p>\n<div class='wide'>{body}</div>"


def figure_html(figure: Figure) -> str:
    """A plotly figure as HTML for the body of a section; its script runs when the page has unpacked plotly's."""
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )
    text = re.sub(r'<script( type="text/javascript")?>', '<script type="text/figure">', text)
    # Titles and legends need room: on a phone such a figure is wider than the screen, and scrolls.
    crowded = figure.layout.annotations or sum(bool(trace.name) for trace in figure.data) > 1
    return f"<div class=roomy>{text}</div>" if crowded else text
