// ---- curves ----

const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6"];
const DASHES = ["solid", "dot"];
const FEW = 30; // steps below which a curve is drawn as it is

// The colours of the theme that is shown now.
function palette() {
  const probe = el("i");
  document.body.append(probe);
  const read = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  const colours = Object.fromEntries([...COLOURS, "ink", "ink2", "card", "line"].map((name) => [name, read(name)]));
  probe.remove();
  return colours;
}

// "rgb(1, 2, 3)" with an opacity.
const faint = (colour, opacity) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${opacity})`);

// Plotly reads some markup in names; here all of it is text.
const plain = (text) => seen(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/%\{/g, "%\u2060{");

function smooth(values) {
  const half = Math.max(2, Math.round(values.length / 40));
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter(known);
    return known(value) && near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
}

// One chart of the page over all runs: the same curve of every run, in the order of the table.
function chartsOf(runs) {
  const found = new Map();
  runs.forEach((run, r) => run.charts.forEach((chart) => {
    if (!found.has(chart.key)) found.set(chart.key, { ...chart, runs: [] });
    found.get(chart.key).runs.push({ r, steps: run.steps, curves: chart.curves });
  }));
  return [...found.values()];
}

// Alone, a run has a colour for every curve. Two runs have a colour each where a chart is one curve, else a dash each.
function looks(chart, r, c, several) {
  const single = chart.runs.every((run) => run.curves.length === 1);
  return several && single ? { colour: COLOURS[r], dash: "solid" } : { colour: COLOURS[c % 6], dash: several ? DASHES[r] : DASHES[Math.floor(c / 6) % 2] };
}

// Where the steps of each stage begin and end: a curve is not joined across stages, whose rewards differ.
function parts(run, steps) {
  const begins = run.stages.map((stage) => steps.findIndex((step) => step >= stage.first)).filter((i) => i > 0);
  const edges = [0, ...new Set(begins), steps.length];
  return edges.slice(1).map((end, i) => [edges[i], end]);
}

const cut = (curve, from, to) => ({ ...curve, ...Object.fromEntries(["values", "low", "high"].filter((key) => curve[key]).map((key) => [key, curve[key].slice(from, to)])) });

function traces(chart, runs, colours) {
  const several = runs.length > 1, made = [];
  for (const { r, steps, curves } of chart.runs) {
    const pieces = parts(runs[r], steps);
    curves.forEach((whole, c) => pieces.forEach(([from, to]) => {
      const look = looks(chart, r, c, several), curve = cut(whole, from, to);
      const colour = colours[look.colour];
      const name = plain(several ? `${"AB"[r]} ${curve.name}` : curve.name);
      const base = { x: steps.slice(from, to), type: "scatter", mode: "lines", connectgaps: true, showlegend: false };
      if (chart.kind === "stacked" && !several) {
        made.push({ ...base, y: curve.values.map((v) => v ?? 0), name, stackgroup: "all", line: { width: 0.5, color: colour }, fillcolor: faint(colour, 0.55) });
        return;
      }
      if (curve.low && !several) {
        const edge = { ...base, hoverinfo: "skip", line: { width: 0 } };
        made.push({ ...edge, y: curve.low }, { ...edge, y: curve.high, fill: "tonexty", fillcolor: faint(colour, 0.13) });
      }
      const long = steps.length >= FEW && chart.key !== "rate";
      const dots = steps.length === 1 ? { mode: "markers" } : {};
      made.push({ ...base, ...dots, y: curve.values, name, opacity: long ? 0.34 : 1, line: { color: colour, width: long ? 1.1 : 2, dash: look.dash } });
      if (long) made.push({ ...base, y: smooth(curve.values), hoverinfo: "skip", line: { color: colour, width: 2.2, dash: look.dash } });
    }));
  }
  return made;
}

function span(runs) {
  const steps = runs.flatMap((run) => [run.steps[0], run.steps.at(-1)]).filter(known);
  const low = Math.min(...steps), high = Math.max(...steps), edge = Math.max((high - low) * 0.012, 0.5);
  return [low - edge, high + edge];
}

// Ticks at whole steps only.
function integerTicks(runs) {
  const [low, high] = span(runs);
  return high - low < 7 ? { tick0: 0, dtick: 1 } : { nticks: 6 };
}

// Where stages begin: a line, and the stage's name beside it. Of two runs the second's are dotted.
function boundaries(runs, colours) {
  const marks = runs.flatMap((run, r) => run.stages.map((stage, i) => ({ r, i, x: stage.first - 0.5, name: stage.name })));
  const line = ({ r, x }) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, layer: "below", line: { color: colours.ink2, width: 1, dash: DASHES[r] } });
  const name = ({ r, x, name }) => ({ x, yref: "paper", y: r ? 0 : 1, text: plain(name.length > 24 ? `${name.slice(0, 23)}…` : name), showarrow: false, xanchor: "left", yanchor: r ? "bottom" : "top", xshift: 2, font: { size: 10, color: colours.ink2 }, bgcolor: colours.card, opacity: 0.85 });
  return { shapes: marks.filter(({ i }) => i).map(line), annotations: marks.map(name) };
}

// What a constant has around it: Plotly would show 3e-5 between -1 and 1.
function around(chart) {
  const values = chart.runs.flatMap((run) => run.curves.flatMap((curve) => [...curve.values, ...(curve.low || []), ...(curve.high || [])])).filter(known);
  const [value] = values;
  const top = chart.form === "share" ? Math.min(2 * value, 1.05) : 2 * value;
  return value && values.every((other) => other === value) ? { range: value > 0 ? [0, top] : [2 * value, 0] } : {};
}

function frame(chart, runs, colours) {
  const tick = chart.form === "share" ? ".1~%" : chart.key === "rate" ? ".1e" : "~s";
  const axis = { showline: false, ticks: "", automargin: false, tickfont: { size: 11 }, zeroline: false };
  const small = chart.form !== "share" && chart.key !== "rate";
  return {
    ...boundaries(runs, colours),
    margin: { l: 50, r: 14, t: 10, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colours.ink2 },
    hovermode: "x unified", hoverdistance: -1, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: { bgcolor: colours.card, bordercolor: colours.line, font: { color: colours.ink, size: 12 } },
    xaxis: { ...axis, range: span(runs), ...integerTicks(runs), title: { text: "step", standoff: 4, font: { size: 11 } }, showgrid: false, spikethickness: 1, spikedash: "solid", spikecolor: colours.ink2, hoverformat: "d", unifiedhovertitle: { text: "step %{x}" } },
    yaxis: { ...axis, nticks: 5, fixedrange: true, rangemode: chart.zero ? "tozero" : "normal", ...(small ? { exponentformat: "SI" } : { tickformat: tick }), hoverformat: chart.form === "share" ? ".1%" : ".4~g", gridcolor: colours.line, ...around(chart) },
  };
}

function legend(chart, runs) {
  const several = runs.length > 1;
  const entries = chart.runs.flatMap(({ r, curves }) => curves.map((curve, c) => ({ ...looks(chart, r, c, several), name: several ? `${"AB"[r]}  ${curve.name}` : curve.name })));
  if (entries.length < 2) return null;
  return el("div", { class: "legend" }, entries.map(({ colour, dash, name }) => {
    const line = svg("line", { x1: 0, y1: 5, x2: 18, y2: 5, class: `s${colour[1]}`, "stroke-width": 3, "stroke-dasharray": dash === "solid" ? "none" : "3 3" });
    return el("span", null, svg("svg", { width: 18, height: 10 }, line), seen(name));
  }));
}

function lastValues(chart, runs) {
  if (chart.kind === "stacked" || chart.runs.some((run) => run.curves.length > 1 && chart.key !== "length")) return "";
  return chart.runs.map(({ r, curves }) => `${runs.length > 1 ? "AB"[r] : "last"} ${FORMS[chart.form](curves[0].values.findLast(known))}`).join("  ");
}

// A figure with its title, legend and an empty plot, filled when it comes into sight.
function figure(chart, runs, wide) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": seen(`${chart.title}. ${chart.caption}`) });
  const node = el("figure", { class: `card chart${wide ? " wide" : ""}${chart.other ? " other" : ""}`, "data-chart": chart.key },
    el("div", { class: "head" }, el("h3", null, seen(chart.title)), el("span", { class: "last" }, lastValues(chart, runs))),
    el("p", { class: "caption" }, seen(runs.length > 1 ? chart.caption.replace(/; the band [^.]*/, "") : chart.caption)), legend(chart, runs), plot);
  return { node, plot, chart };
}

class Charts {
  constructor(onStep) {
    this.onStep = onStep;
    this.figures = [];
    this.ready = false;
    this.watcher = new IntersectionObserver((entries) => entries.forEach((e) => e.isIntersecting && this.draw(this.figures.find((f) => f.plot === e.target))), { rootMargin: "300px" });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  show(runs, figures) {
    for (const old of this.figures) {
      if (this.ready && old.drawn) Plotly.purge(old.plot);
    }
    this.watcher.disconnect();
    this.runs = runs;
    this.figures = figures;
    if (this.ready) this.start();
  }

  start() {
    this.ready = true;
    this.figures.forEach((f) => this.watcher.observe(f.plot));
  }

  draw(figure, size) {
    if (!figure || (figure.drawn && !size)) return;
    const first = !figure.drawn, colours = palette();
    figure.drawn = true;
    const layout = { ...frame(figure.chart, this.runs, colours), ...(size || {}) };
    Plotly.react(figure.plot, traces(figure.chart, this.runs, colours), layout, { displayModeBar: false, responsive: true });
    if (!first) return;
    figure.plot.on("plotly_click", (event) => this.onStep(event.points[0].x));
    figure.plot.on("plotly_relayout", () => figure.moved && figure.moved(figure.plot.layout.xaxis.range));
  }

  redraw() {
    const drawn = this.figures.filter((f) => f.drawn);
    drawn.forEach((f) => { f.drawn = false; Plotly.purge(f.plot); this.draw(f); });
  }

  // Paper is narrower than a window, and nothing is out of sight on it.
  print() {
    if (!this.ready) return;
    this.figures.forEach((f) => this.draw(f, { width: f.node.classList.contains("wide") ? 640 : 300, height: f.node.classList.contains("wide") ? 240 : 170 }));
  }
}
