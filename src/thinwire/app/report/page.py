"""The report's shell: one HTML page with its style, its script and Plotly inside, which fetches nothing.

A content security policy forbids the page to reach any network. Charts are JSON in `<script
type="application/json">`; the page draws them in the colours of light or dark. Errors of the script are kept in
`<body data-errors>`, the number of charts drawn in `<body data-charts>`.
"""

from __future__ import annotations

import json
from html import escape

from plotly.offline import get_plotlyjs

from thinwire.app.records.printable import printable, printable_lines
from thinwire.app.report.charts import Chart, Json

STYLE = """
:root { color-scheme: light dark; --ink:#1d2530; --soft:#5b6776; --line:#e2e6ea; --card:#ffffff; --ground:#f6f7f9;
  --accent:#2f6fa8; --mark:#fff3d6; --bad:#b23a32; }
@media (prefers-color-scheme: dark) { :root { --ink:#e4e8ee; --soft:#98a4b3; --line:#2b333d; --card:#171c23;
  --ground:#0f1318; --accent:#6fb0e6; --mark:#3a3117; --bad:#ef8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 2px; letter-spacing: -.005em; }
h3 { font-size: 14px; margin: 18px 0 0; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 4px 0; } p.soft, .soft { color: var(--soft); } a { color: var(--accent); }
code { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin-top: 18px; }
.word { display: inline-block; font-size: 11.5px; line-height: 1; padding: 3px 7px; border-radius: 20px; color: var(--soft);
  border: 1px solid var(--line); vertical-align: 2px; font-weight: 500; letter-spacing: .01em; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin-top: 18px; }
.card { display: flex; flex-direction: column; align-items: flex-start;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 15px; }
.card b { margin-top: auto; white-space: nowrap; font-size: 21px; font-weight: 600; line-height: 1.25; letter-spacing: -.015em; }
.card span.what { display: block; color: var(--soft); font-size: 13px; min-height: 20px; }
.card .word { margin-top: 8px; }
.scroll { overflow-x: auto; margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
th.n, td.n { text-align: right; white-space: nowrap; } td.n .word { margin-left: 6px; }
td.t { white-space: nowrap; }
#headline tbody th { min-width: 170px; } #headline thead th { white-space: normal; }
tbody th { font-weight: 500; overflow-wrap: anywhere; min-width: 110px; }
tr.differs td, tr.differs th { background: var(--mark); }
.bar { display: inline-block; height: 9px; border-radius: 2px; margin-right: 8px; vertical-align: 0; min-width: 2px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; margin-top: 8px; }
.legend .dot { margin-right: 6px; vertical-align: -1px; }
.tabs { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 10px; }
button { font: inherit; font-size: 13px; color: var(--ink); background: transparent; border: 1px solid var(--line);
  border-radius: 20px; padding: 3px 12px; cursor: pointer; }
button:hover { border-color: var(--accent); } button[aria-pressed=true] { background: var(--accent);
  border-color: var(--accent); color: var(--card); }
.chart { width: 100%; } .remark { color: var(--soft); font-size: 13px; }
.alert { border-left: 3px solid var(--bad); padding-left: 12px; margin-top: 10px; }
@media (max-width: 620px) { main { padding: 18px 12px 40px; } section { padding: 14px 12px; } h1 { font-size: 21px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 8px; } .card { padding: 11px 12px; } .card b { font-size: 19px; }
  #headline tbody th { min-width: 150px; } }
"""

GUARD = """
addEventListener('error', e => { document.body.dataset.errors = (document.body.dataset.errors || '') + e.message + '; '; });
addEventListener('unhandledrejection', e => {
  document.body.dataset.errors = (document.body.dataset.errors || '') + e.reason + '; '; });
"""

SCRIPT = """
'use strict';
const tone = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const spans = [0.01,0.02,0.05,0.1,0.2,0.5,1,2,5,10,15,30,60,120,300,600,900,1800,3600,7200,10800,21600,43200,86400,
  172800,432000,864000];
function clock(s, unit) {
  if (s < 0) return '-' + clock(-s, unit);
  if (unit < 1) return +s.toFixed(2) + ' s';
  s = Math.round(s);
  const d = Math.floor(s / 86400), h = Math.floor(s % 86400 / 3600), m = Math.floor(s % 3600 / 60), r = s % 60;
  const parts = [[d, 'd'], [h, 'h'], [m, 'min'], [r, 's']].filter(p => p[0]).map(p => p[0] + ' ' + p[1]);
  return parts.join(' ') || '0 s';
}
function timeTicks(range, width) {
  const length = range[1] - range[0], unit = spans.find(u => length / u <= Math.max(3, width / 115)) || 864000;
  const tickvals = [], from = Math.max(0, Math.floor((range[0] - length) / unit));
  for (let i = from; i * unit <= range[1] + length; i++) tickvals.push(i * unit);
  return { tickmode: 'array', tickvals, ticktext: tickvals.map(v => clock(v, unit)) };
}
function dressed(view, height) {
  const axis = { gridcolor: tone('--line'), linecolor: tone('--line'), zerolinecolor: tone('--line'), automargin: true,
    title: { standoff: 10 } };
  const given = view.layout, dress = a => ({ ...axis, ...a, title: { ...axis.title, ...(a.title || {}) } });
  return { ...given, height, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: 'system-ui, sans-serif', size: 12.5, color: tone('--ink') },
    margin: given.margin || { l: 56, r: 14, t: 40, b: 44 }, xaxis: dress(given.xaxis), yaxis: dress(given.yaxis),
    legend: { orientation: 'h', x: 0, y: 1, yref: 'paper', yanchor: 'bottom', font: { size: 12 }, itemwidth: 30 },
    hoverlabel: { bgcolor: tone('--card'), bordercolor: tone('--line'), font: { color: tone('--ink') }, align: 'left' } };
}
const charts = [...document.querySelectorAll('.chart')].map(div => ({ div, chart: JSON.parse(
  document.getElementById(div.id + '-data').textContent), shown: 0 }));
const config = { displayModeBar: false, responsive: true, doubleClick: 'reset' };
function ticks(c) {
  const full = c.div._fullLayout, view = c.chart.views[c.shown];
  if (view.layout.xaxis.meta !== 'seconds' || !full || full.xaxis.type === 'log') return null;
  return Plotly.relayout(c.div, Object.fromEntries(Object.entries(timeTicks(full.xaxis.range, full.xaxis._length))
    .map(([key, value]) => ['xaxis.' + key, value])));
}
async function draw(c) {
  const view = structuredClone(c.chart.views[c.shown]);
  await Plotly.react(c.div, view.data, dressed(view, c.chart.height), config);
  await ticks(c);
}
function buttons(c) {
  const bar = document.getElementById(c.div.id + '-tabs'), timeline = c.chart.views[0].layout.meta === 'timeline';
  const add = (label, act, pressed) => { const b = document.createElement('button'); b.type = 'button';
    b.textContent = label; if (pressed !== undefined) b.setAttribute('aria-pressed', pressed); b.onclick = act;
    bar.append(b); return b; };
  if (c.chart.views.length > 1) c.chart.views.forEach((view, i) => add(view.label, e => { c.shown = i;
    [...bar.children].forEach(b => b.setAttribute('aria-pressed', b === e.target)); draw(c); }, i === 0));
  if (!timeline) return;
  const home = c.chart.views[0].layout.xaxis.range, ends = c.chart.views[0].data.reduce((m, t) => t.base.reduce(
    (n, b, i) => Math.max(n, b + t.x[i]), m), 0);
  const move = f => () => { const [a, b] = c.div._fullLayout.xaxis.range; Plotly.relayout(c.div,
    { 'xaxis.range': f(a, b, b - a) }); };
  add('◀ earlier', move((a, b, w) => [a - w * .7, b - w * .7]));
  add('later ▶', move((a, b, w) => [a + w * .7, b + w * .7]));
  add('zoom in', move((a, b, w) => [a + w * .25, b - w * .25]));
  add('zoom out', move((a, b, w) => [a - w * .5, b + w * .5]));
  add('whole run', move(() => [-ends * .01, ends * 1.01]));
  add('a few cycles', move(() => home));
}
(async () => {
  for (const c of charts) {
    buttons(c);
    await draw(c);
    c.div.on('plotly_relayout', change => { if (!('xaxis.tickvals' in change)) ticks(c); });
    document.body.dataset.charts = +(document.body.dataset.charts || 0) + 1;
  }
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => charts.forEach(draw));
})();
"""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page(title: str, body: str, charts: dict[str, Chart]) -> str:
    """The whole page. `body` is escaped HTML with a `chart_place` for each of `charts`."""
    data = "\n".join(
        f'<script type="application/json" id="{escape(name)}-data">{_json(chart)}</script>'
        for name, chart in charts.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(printable(title))}</title><style>{STYLE}</style></head>
<body><script>{GUARD}</script>
<main>{printable_lines(body, len(body))}</main>
{data}
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body></html>
"""


def chart_place(name: str, chart: Chart) -> str:
    """The place of `chart` in the page, with its buttons above and its remarks below."""
    remarks = "".join(f'<p class="remark">{escape(remark)}</p>' for remark in chart.remarks)
    legend = "".join(
        f'<span><i class="dot" style="background:{escape(paint)}"></i>{escape(text)}</span>'
        for text, paint in chart.legend
    )
    return (
        f'<div class="tabs" id="{escape(name)}-tabs"></div><div class="legend">{legend}</div><div class="chart" id="{escape(name)}" '
        f'style="height:{chart.height}px"></div>{remarks}'
    )


def word(provenance: str) -> str:
    """The small label with the provenance of a number."""
    return f'<span class="word">{escape(provenance)}</span>'


def table(head: list[str], rows: list[str], numeric: int = 0) -> str:
    """`rows` are ready `<tr>`s; the last `numeric` columns are set to the right."""
    cells = [
        f"<th{' class=n' if index >= len(head) - numeric else ''}>{escape(text)}</th>"
        for index, text in enumerate(head)
    ]
    return f'<div class="scroll"><table><thead><tr>{"".join(cells)}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _json(chart: Chart) -> str:
    views: list[Json] = [{"data": view.data, "layout": view.layout, "label": view.label} for view in chart.views]
    text = json.dumps({"views": views, "height": chart.height}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")  # so that no string can end the script element
