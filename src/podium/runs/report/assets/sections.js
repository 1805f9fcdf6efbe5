// ---- everything but the curves and the completions ----

const SIGNS = { error: "\u25c6", warning: "\u25b2", note: "\u25cf", good: "\u2713" };
const RANK = { error: 0, warning: 1, note: 2 };

const label = (r, several) => several && el("span", { class: r ? "run-b" : "run-a" }, "AB"[r]);

function section(id, title, aside, ...content) {
  return el("section", { id }, el("header", null, el("h2", null, title), aside && el("p", null, aside)), content);
}

function verdict(run, r, several) {
  const s = run.summary;
  const progress = s.max_steps ? `step ${s.last_step} of ${s.max_steps}` : `${s.last_step} steps`;
  const facts = [s.model, progress, duration(s.seconds)].filter(Boolean);
  return el("div", { class: "verdict" },
    el("div", { class: "eyebrow" }, label(r, several), el("b", null, seen(run.name)), facts.map((fact) => el("span", null, seen(fact))),
      el("span", { class: `pill ${s.level}` }, el("span", { "aria-hidden": "true" }, SIGNS[s.level]), s.word)),
    el("h1", null, seen(s.headline)),
    el("div", { class: "tiles" }, s.numbers.map((tile) => el("div", { class: "tile" },
      el("div", { class: "label" }, tile.label), el("div", { class: "value" }, tile.value), el("div", { class: "detail" }, tile.detail)))));
}

function finding(found, r, several, id, toStep) {
  const rows = [["why", found.why], ["fix", found.fix], ["changes", found.changes]].filter(([, text]) => text);
  return el("div", { class: `card finding ${found.severity}`, id },
    el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[found.severity]),
    el("span", { class: "what" }, seen(found.what)),
    el("span", { class: "where" }, label(r, several), ` ${found.severity} ${seen(found.code)}`,
      known(found.step) && [" at ", el("button", { type: "button", class: "link", click: () => toStep(found.step, r) }, `step ${found.step}`)]),
    rows.length > 0 && el("dl", null, rows.map(([name, text]) => [el("dt", null, name), el("dd", null, seen(text))])));
}

// Findings of all runs, gravest first; each knows its run and the name of its element.
function findingsOf(runs) {
  const all = runs.flatMap((run, r) => run.findings.map((found, i) => ({ found, r, id: `finding-${r}-${i}` })));
  return all.sort((a, b) => (RANK[a.found.severity] ?? 3) - (RANK[b.found.severity] ?? 3) || (a.found.step ?? 0) - (b.found.step ?? 0));
}

// Marks on the steps of the curve above: `range` is what its axis shows.
function timeline(node, entries, range) {
  const [low, high] = range, there = new Map();
  node.replaceChildren(...entries.filter((e) => known(e.found.step) && e.found.step >= low && e.found.step <= high).map(({ found, id }) => {
    const sign = el("button", { type: "button", class: found.severity, title: seen(`Step ${found.step}: ${found.what}`), "aria-label": seen(`${found.severity} at step ${found.step}: ${found.what}`), click: () => show(id) }, SIGNS[found.severity]);
    const before = there.get(found.step) || 0; // signs of one step stand side by side
    there.set(found.step, before + 1);
    sign.style.marginLeft = `${-15 * before}px`;
    sign.style.left = `${(100 * (found.step - low)) / (high - low)}%`;
    return sign;
  }));
}

function show(id) {
  document.querySelectorAll(".finding.hit").forEach((other) => other.classList.remove("hit"));
  byId(id).classList.add("hit");
  byId(id).scrollIntoView({ block: "center" });
}

function cell(value, share) {
  if (!value) return el("td", { class: "number" }, "");
  const form = share ? FORMS.share : FORMS.number;
  const interval = known(value.low) && known(value.high) && `  ${form(value.low)} to ${form(value.high)}`;
  return el("td", { class: "number" }, el("b", null, form(value.value)), interval && el("span", { class: "interval" }, interval));
}

// Where an estimate and its interval lie among all of a row.
function strip(cells) {
  const ends = cells.flatMap((c) => (c ? [c.low ?? c.value, c.high ?? c.value] : [])).filter(known);
  const low = Math.min(0, ...ends), high = Math.max(...ends), width = high - low || 1;
  const x = (value) => (100 * (value - low)) / width;
  const marks = cells.flatMap((c, i) => (c && known(c.value) ? [
    svg("line", { x1: `${x(c.low ?? c.value)}%`, x2: `${x(c.high ?? c.value)}%`, y1: 5 + 8 * i, y2: 5 + 8 * i, class: i ? "s1" : "s2", "stroke-width": 3, opacity: 0.45 }),
    svg("circle", { cx: `${x(c.value)}%`, cy: 5 + 8 * i, r: 3.5, class: i ? "s1" : "s2", "stroke-width": 2.5, fill: "none" }),
  ] : []));
  return el("td", null, svg("svg", { width: "100%", height: 8 * cells.length + 2, class: "ab", "aria-hidden": "true" }, ...marks));
}

function evaluation(run, r, several) {
  const table = run.evaluation;
  const rows = table.rows.map((row) => el("tr", null, el("th", { scope: "row" }, seen(row.name)),
    row.cells.map((value) => cell(value, /^(accuracy$|pass@|cut off)/.test(row.name))), strip(row.cells)));
  const head = el("tr", null, el("th"), table.columns.map((name) => el("th", { scope: "col" }, name)), el("th"));
  const what = table.num_prompts ? `${table.num_prompts} held-out prompts, ${table.num_completions} completions; 95 % intervals` : "";
  return el("div", { class: "card scroll held" }, el("p", { class: "aside" }, label(r, several), " ", what), table.verdict && el("p", null, seen(table.verdict)), table.baselines && el("p", null, seen(table.baselines)), el("table", null, el("thead", null, head), el("tbody", null, rows)));
}

function proof(run, r, several) {
  const table = run.proof;
  const head = el("tr", null, table.columns.map((name) => el("th", { scope: "col" }, seen(name.replaceAll("_", " ")))));
  const rows = table.rows.map((row) => el("tr", null, row.map((text) => el("td", null, seen(text)))));
  return el("div", { class: "card scroll" }, several && el("p", null, label(r, several)), el("table", null, el("thead", null, head), el("tbody", null, rows)));
}

// Settings of all runs by name, those that differ marked and first.
function setup(title, tables) {
  const names = [...new Set(tables.flatMap((rows) => rows.map(([name]) => name)))];
  const maps = tables.map((rows) => new Map(rows));
  const lines = names.map((name) => ({ name, values: maps.map((map) => map.get(name) ?? ""), }));
  lines.forEach((line) => { line.differs = line.values.some((value) => value !== line.values[0]); });
  lines.sort((a, b) => b.differs - a.differs);
  const several = tables.length > 1, differing = lines.filter((line) => line.differs).length;
  const summary = several ? `${title}: ${differing} of ${lines.length} differ` : `${title}: ${lines.length} entries`;
  const head = several && el("thead", null, el("tr", null, el("th"), tables.map((_, r) => el("th", null, label(r, true)))));
  return el("details", { class: "card setup", open: several && differing > 0 }, el("summary", null, summary), el("table", null, head,
    el("tbody", null, lines.map((line) => el("tr", { class: line.differs && "differs" }, el("th", { scope: "row" }, seen(line.name)), line.values.map((value) => el("td", null, seen(value))))))));
}
