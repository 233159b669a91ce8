# SPDX-License-Identifier: Apache-2.0
"""Looks at pages in a headless Chromium: what the console says, which texts overlap or are cut, and how they look.

It speaks the DevTools protocol through two pipes, so that nothing but Debian's `chromium` is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DESKTOP, PHONE = (1280, 900), (390, 844)

FAULTS = r"""
(() => {
  const quads = [], faults = [];
  const text = element => element.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
  const shrink = (p, by) => {
    const x = (p[0][0] + p[2][0]) / 2, y = (p[0][1] + p[2][1]) / 2;
    return p.map(([a, b]) => [x + (a - x) * by, y + (b - y) * by]);
  };
  const corners = r => [[r.left, r.top], [r.right, r.top], [r.right, r.bottom], [r.left, r.bottom]];
  const seen = element => element.checkVisibility({checkOpacity: true, checkVisibilityCSS: true});
  // What of a box can be seen inside the parts that scroll or cut.
  const clipped = (element, box) => {
    let {left, top, right, bottom} = box;
    for (let e = element.parentElement; e && e !== document.body; e = e.parentElement) {
      if (getComputedStyle(e).overflow === "visible") continue;
      const r = e.getBoundingClientRect();
      left = Math.max(left, r.left), right = Math.min(right, r.right);
      top = Math.max(top, r.top), bottom = Math.min(bottom, r.bottom);
    }
    return right - left > 2 && bottom - top > 2 ? {left, top, right, bottom} : null;
  };
  for (const element of document.querySelectorAll("svg text")) {
    if (!text(element) || !seen(element)) continue;
    const box = element.getBBox(), to = element.getScreenCTM();
    const at = (x, y) => { const p = new DOMPoint(x, y).matrixTransform(to); return [p.x, p.y]; };
    const quad = [at(box.x, box.y), at(box.x + box.width, box.y), at(box.x + box.width, box.y + box.height),
                  at(box.x, box.y + box.height)];
    const root = element.closest("svg").getBoundingClientRect();
    if (quad.some(([x, y]) => x < root.left - 3 || x > root.right + 3 || y < root.top - 3 || y > root.bottom + 3))
      faults.push(`cut: ${text(element)}`);
    quads.push([text(element), shrink(quad, 0.8)]);
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!text(walker.currentNode) || parent.closest("svg, script, style") || !seen(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    for (const line of range.getClientRects()) {
      const box = clipped(parent, line);
      if (box) quads.push([text(walker.currentNode), shrink(corners(box), 0.8)]);
    }
  }
  const apart = (p, q) => [p, q].some(one => [0, 1].some(side => {
    const [ax, ay] = one[side], [bx, by] = one[side + 1], nx = by - ay, ny = ax - bx;
    const on = points => points.map(([x, y]) => x * nx + y * ny);
    const a = on(p), b = on(q);
    return Math.max(...a) <= Math.min(...b) || Math.max(...b) <= Math.min(...a);
  }));
  const top = q => Math.min(...q[1].map(p => p[1])), bottom = q => Math.max(...q[1].map(p => p[1]));
  quads.sort((a, b) => top(a) - top(b));
  for (let i = 0; i < quads.length; i++)
    for (let j = i + 1; j < quads.length && top(quads[j]) < bottom(quads[i]); j++)
      if (!apart(quads[i][1], quads[j][1])) faults.push(`overlap: ${quads[i][0]} | ${quads[j][0]}`);
  if (document.documentElement.scrollWidth > WIDTH + 1)
    faults.push(`wider than the screen: ${document.documentElement.scrollWidth} of ${WIDTH}`);
  for (const figure of document.querySelectorAll(".plotly-graph-div, div.bars, .wide > svg"))
    if (!figure.getAttribute("aria-label")) faults.push("a picture without a label");
  if (!document.querySelector("footer")?.textContent.trim()) faults.push("no footer");
  return {faults, height: document.documentElement.scrollHeight, texts: quads.length};
})()
"""


@dataclass(frozen=True, kw_only=True)
class PageView:
    """A page as a browser shows it."""

    faults: tuple[str, ...]
    """What the console says, which texts overlap or are cut, and what else is wrong with it."""
    texts: int
    picture: bytes


class Browser:
    """A Chromium without a window; a context manager."""

    def __init__(self) -> None:
        assert CHROMIUM is not None, "chromium is not installed"
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        # Chromium reads from 3 and writes to 4; copies with higher numbers, so that neither replaces the other.
        far = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (there, back)]
        self._process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={self._folder.name}"],
            close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: [os.dup2(fd, at) for at, fd in enumerate(far, 3)],
        )  # fmt: skip
        for fd in (there, back, *far):
            os.close(fd)
        self._number, self._buffer, self._session = 0, b"", ""
        self._said: list[str] = []
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    def look(self, page: Path, *, size: tuple[int, int] = DESKTOP, dark: bool = False, shot: int = 0) -> PageView:
        """Open a page and look at it.

        Args:
            page: the file.
            size: width and height of the screen.
            dark: whether the person likes dark pages.
            shot: how many pixels of its height to take a picture of; 0: none.

        Returns:
            What was seen; the picture is WebP.
        """
        self._said.clear()
        screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self._ask("Emulation.setDeviceMetricsOverride", screen)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", {"features": features})
        self._ask("Page.navigate", {"url": page.resolve().as_uri()})
        # The page says when it has drawn its figures; one without figures has nothing to draw.
        self._value(
            """new Promise(done => { const wait = () => document.readyState == "complete" && document.body
            && (!document.getElementById("plotly") || document.body.dataset.drawn) ? done(1) : setTimeout(wait, 50);
            wait(); })"""
        )
        found = self._value(FAULTS.replace("WIDTH", str(size[0])))
        picture = b""
        if shot:
            clip = {"x": 0, "y": 0, "width": size[0], "height": min(shot, found["height"]), "scale": 1}
            how = {"format": "webp", "quality": 60, "clip": clip, "captureBeyondViewport": True}
            picture = base64.b64decode(self._ask("Page.captureScreenshot", how)["data"])
        return PageView(faults=(*self._said, *found["faults"]), texts=found["texts"], picture=picture)

    def _value(self, script: str) -> Any:
        found = self._ask("Runtime.evaluate", {"expression": script, "awaitPromise": True, "returnByValue": True})
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def _ask(self, method: str, params: dict[str, Any] | None = None) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self._said.append(f"exception: {params['exceptionDetails'].get('exception', {}).get('description')}")
        elif event.get("method") == "Runtime.consoleAPICalled":
            self._said.append(f"console: {[one.get('value') for one in params['args']]}")
        elif event.get("method") == "Log.entryAdded":
            self._said.append(f"log: {params['entry']['text']}")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read, 1 << 20)
            if not read:
                raise RuntimeError("chromium has ended")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer
