# SPDX-License-Identifier: Apache-2.0
"""`Canvas`: the lines, boxes and words of a drawing of a cluster, with its colors and its legend."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from ..cluster.model import Cluster
from ..cluster.shape import LinkClass, capped, link_classes, size_of

INK, PAPER, FAINT = "#1f2933", "#ffffff", "#8895a5"
FILL = {"device": "#e3f2e8", "switch": "#e4ecf7", "nic": "#fbeedd", "host": "#f6f7f9"}
EDGE = {"device": "#2e7d4f", "switch": "#3b6aa0", "nic": "#b9772b", "host": "#c5ccd6"}
CHANNELS = {
    "nvlink": "#2e9e5b", "xgmi": "#2e9e5b", "pcie": "#9a8478", "rdma": "#2f74c0", "ethernet": "#d9822b",
    "c2c": "#7e57c2",
}  # fmt: skip
OTHERS = ("#2f74c0", "#d9822b", "#2e9e5b", "#b5446e", "#7e57c2", "#6b7785")
LEGEND_ROW = 20


@dataclass
class Canvas:
    """A drawing under construction. Lines are drawn under boxes, and boxes under text; units are SVG user units
    (pixels).
    """

    cluster: Cluster
    classes: list[LinkClass] = field(init=False)
    of_link: list[int] = field(init=False)
    lines: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    width: float = 480.0
    height: float = 0.0
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.classes, of_link = link_classes(self.cluster)
        self.of_link = of_link.tolist()
        self._fastest = max((c.gb_per_s for c in self.classes), default=1.0)
        self._colors = {}
        spare = 0
        for channel in self.cluster.channels:
            if channel not in CHANNELS:
                spare += 1
            self._colors[channel] = CHANNELS.get(channel, OTHERS[(spare - 1) % len(OTHERS)])

    def stroke(self, kind: LinkClass) -> tuple[str, float]:
        """Color and line width of a link class."""
        return self._colors[kind.channel], 0.9 + 3.9 * kind.gb_per_s / self._fastest

    def path(self, d: str, kind: LinkClass, *, dashed: bool = False, arrow: bool = False) -> None:
        """Draw a link along an SVG path.

        Args:
            d: the path, as in the SVG attribute ``d``.
            kind: the class of the link, which sets color and width.
            dashed: whether the line is dashed.
            arrow: whether the line ends in an arrow head.
        """
        color, width = self.stroke(kind)
        extra = ' stroke-dasharray="3 4"' if dashed else ""
        extra += ' marker-end="url(#tip)"' if arrow else ""
        self.lines.append(
            f'<path d="{d}" fill="none" stroke="{color}" stroke-width="{width:.2f}" '
            f'stroke-opacity="0.75" stroke-linecap="round"{extra}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: LinkClass, *, dashed: bool = False) -> None:
        """Draw a straight link.

        Args:
            x1: x of the start.
            y1: y of the start.
            x2: x of the end.
            y2: y of the end.
            kind: the class of the link, which sets color and width.
            dashed: whether the line is dashed.
        """
        self.path(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", kind, dashed=dashed)

    def box(self, x: float, y: float, w: float, h: float, kind: str, text: str = "", *, size: float = 11) -> None:
        """Draw a node as a box with a label.

        Args:
            x: x of the center.
            y: y of the center.
            w: width.
            h: height.
            kind: "device", "switch", "nic" or "host", which sets the colors.
            text: the label; empty for none.
            size: largest font size of the label, which shrinks to fit the box.
        """
        self.boxes.append(
            f'<rect x="{x - w / 2:.1f}" y="{y - h / 2:.1f}" width="{w:.1f}" height="{h:.1f}" rx="5" '
            f'fill="{FILL[kind]}" stroke="{EDGE[kind]}" stroke-width="1.2"/>'
        )
        if text:
            fitted = min(size, 1.75 * (w - 4) / max(1, len(text)))
            self.text(x, y + fitted * 0.36, text, size=fitted)
        self.reach(x + w / 2, y + h / 2)

    def frame(self, x: float, y: float, w: float, h: float, title: str) -> None:
        """Draw a host: a box under everything else, with its title in the upper left corner.

        Args:
            x: x of the left edge.
            y: y of the upper edge.
            w: width.
            h: height.
            title: the title.
        """
        self.boxes.insert(
            0,
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="9" '
            f'fill="{FILL["host"]}" stroke="{EDGE["host"]}" stroke-width="1.2"/>',
        )
        self.text(x + 12, y + 18, title, size=12, anchor="start", color=FAINT)
        self.reach(x + w, y + h)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 11,
        anchor: str = "middle",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """Write text at a point.

        Args:
            x: x of the anchor.
            y: y of the baseline.
            text: the text, which is escaped.
            size: font size.
            anchor: SVG's ``text-anchor``: "start", "middle" or "end".
            color: color as SVG reads it.
            bold: whether the text is bold.
        """
        weight = ' font-weight="600"' if bold else ""
        self.words.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{html.escape(text)}</text>'
        )

    def reach(self, x: float, y: float) -> None:
        """Enlarge the drawing so that it contains this point."""
        self.width, self.height = max(self.width, x), max(self.height, y)

    def finish(self) -> str:
        """The SVG, with a title above and the legend below."""
        top, left = 64.0, 24.0
        y = self.height + 34
        legend: list[str] = []
        rows = [*self.classes[:24]]
        for kind in rows:
            color, width = self.stroke(kind)
            legend.append(
                f'<path d="M0 {y - 4:.1f}h44" stroke="{color}" stroke-width="{width:.2f}"/>'
                f'<text x="56" y="{y:.1f}" font-size="12" fill="{INK}">'
                f"{html.escape(f'{kind.label}{capped(kind)}')}"
                f'<tspan fill="{FAINT}">  {kind.count} links</tspan></text>'
            )
            y += LEGEND_ROW
        for remark in self.remarks:
            legend.append(f'<text x="0" y="{y:.1f}" font-size="12" fill="{FAINT}">{html.escape(remark)}</text>')
            y += LEGEND_ROW
        c = self.cluster
        words = max(len(k.label) + len(capped(k)) for k in rows) * 6.6 + 140 if rows else 0
        width = max(self.width, words, *(6.3 * len(r) for r in self.remarks), 0) + 2 * left
        height = y + top
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
                f'width="{width:.0f}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif">',
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="4" markerHeight="4" '
                'orient="auto"><path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>',
                f'<rect width="100%" height="100%" fill="{PAPER}"/>',
                f'<text x="{left}" y="34" font-size="20" font-weight="600" fill="{INK}">{html.escape(c.name)}</text>',
                f'<text x="{left}" y="53" font-size="12.5" fill="{FAINT}">{size_of(c)}</text>',
                f'<g transform="translate({left} {top})">',
                *self.boxes_first(),
                *legend,
                "</g>",
                "</svg>",
                "",
            ]
        )

    def boxes_first(self) -> list[str]:
        """All shapes in drawing order: frames, then lines, then boxes, then text."""
        frames = [b for b in self.boxes if FILL["host"] in b]
        rest = [b for b in self.boxes if FILL["host"] not in b]
        return [*frames, *self.lines, *rest, *self.words]
