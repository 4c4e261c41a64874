"""How the page looks, and what hovering does: plain CSS and JavaScript, kept beside the code that uses them."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { --ground: #f7f7f5; --sheet: #fff; --ink: #1d2126; --soft: #687078; --rule: #e3e4e2; --mark: #b3541e;
  --c0: #1668b8; --c1: #d1670d; --c2: #2b8a57; --c3: #a8407f; --c4: #6b57c2; --c5: #0d8891;
  --c6: #8a6d00; --c7: #5b6770; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --sheet: #1d2125; --ink: #e6e8ea; --soft: #98a1a9;
  --rule: #31373d; --mark: #f0a06a; --c0: #6db1f2; --c1: #f5a656; --c2: #69cf98; --c3: #ee8fc8; --c4: #aea0f5;
  --c5: #5accd4; --c6: #dcc04c; --c7: #aab4bc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 24px; }
h1 { font-size: 24px; margin: 28px 0 14px; } h2 { font-size: 17px; margin: 34px 0 10px; }
.facts { display: flex; flex-wrap: wrap; gap: 10px; margin: 0; }
.facts div { background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px; padding: 8px 16px; }
dt { color: var(--soft); font-size: 13px; } dd { margin: 0; font-size: 19px; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr)); gap: 14px; }
.broad { grid-column: 1 / -1; }
@media (max-width: 700px) { .broad { overflow-x: auto; } .broad svg { min-width: 640px; } }
.chart { position: relative; margin: 0; background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 12px 6px; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 18px; font-weight: 600; padding: 0 4px 6px; }
figcaption ul { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 0; padding: 0; list-style: none;
  font-weight: 400; color: var(--soft); font-size: 13px; align-items: center; }
figcaption i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 5px; }
svg { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); } .mark { stroke: var(--mark); stroke-dasharray: 4 3; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.area { fill: var(--c); fill-opacity: .75; } .dot { fill: var(--c); }
.lost { fill: none; stroke: var(--c); stroke-width: 2; } figcaption i { background: var(--c); }
.h0 { --c: var(--c0); } .h1 { --c: var(--c1); } .h2 { --c: var(--c2); } .h3 { --c: var(--c3); } .h4 { --c: var(--c4); }
.h5 { --c: var(--c5); } .h6 { --c: var(--c6); } .h7 { --c: var(--c7); }
.hover line { stroke: var(--soft); } .hover[hidden] { display: none; }
output { position: absolute; top: 44px; display: none; pointer-events: none; background: var(--sheet);
  border: 1px solid var(--rule); border-radius: 6px; padding: 5px 10px; font-size: 13px; white-space: nowrap;
  box-shadow: 0 2px 8px #0003; font-variant-numeric: tabular-nums; z-index: 1; }
output b { display: block; } output i { display: inline-block; width: 9px; height: 9px; border-radius: 2px;
  margin-right: 6px; background: var(--c); }
.wide { overflow-x: auto; } table { border-collapse: collapse; background: var(--sheet); margin: 0 0 14px; }
th, td { text-align: left; padding: 4px 18px 4px 10px; border: 1px solid var(--rule); font-size: 14px; }
th { color: var(--soft); font-weight: 500; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre { background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px;
  overflow-x: auto; font-size: 13px; } summary { cursor: pointer; padding: 4px 0; }
footer { color: var(--soft); font-size: 13px; margin: 34px 0; overflow-wrap: anywhere; }
.problems { color: var(--mark); }
"""

SCRIPT = """
for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".hover"), told = figure.querySelector("output");
  const data = JSON.parse(figure.querySelector("script").textContent), [low, high, start, stop] = data.x;
  const number = (value) => `${Number((value / data.unit[0]).toPrecision(5))} ${data.unit[1]}`.trim();
  const nearest = (points, step) => {
    let from = 0, to = points.length - 1;
    while (to - from > 1) { const half = (from + to) >> 1; if (points[half][0] < step) from = half; else to = half; }
    return Math.abs(points[from][0] - step) <= Math.abs(points[to][0] - step) ? points[from] : points[to];
  };
  const leave = () => { cursor.setAttribute("hidden", ""); told.style.display = "none"; };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = low + (x - start) / (stop - start) * (high - low);
    const near = data.lines.map((line) => nearest(line.points, wanted));
    const step = near.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a, [Infinity])[0];
    if (!Number.isFinite(step) || x < start - 20) { leave(); return; }
    const place = start + (step - low) / (high - low) * (stop - start), line = cursor.querySelector("line");
    line.setAttribute("x1", place); line.setAttribute("x2", place);
    cursor.removeAttribute("hidden");
    told.replaceChildren(Object.assign(document.createElement("b"), { textContent: `step ${step}` }));
    data.lines.forEach((each, index) => {
      if (near[index][0] !== step) return;
      const row = document.createElement("div"), swatch = document.createElement("i");
      swatch.className = each.hue;
      row.append(swatch, `${each.name}  ${number(near[index][1])}`);
      told.append(row);
    });
    told.style.display = "block";
    const left = place / svg.viewBox.baseVal.width * box.width + 22;
    told.style.left = `${Math.max(4, left + told.offsetWidth > box.width ? left - told.offsetWidth - 30 : left)}px`;
  });
}
"""
