// ---- the page ----

const data = JSON.parse(byId("data").textContent);
const runs = data.runs, several = runs.length > 1;
const browser = new Browser(runs);
const charts = new Charts((step) => browser.toStep(step));
const places = el("div");

function draw() {
  const entries = findingsOf(runs), marks = el("div", { class: "timeline no-print", "aria-label": "Findings by step" });
  const figures = chartsOf(runs).map((chart, i) => figure(chart, runs, chart.key === "reward" && i === 0));
  const hero = figures.find((f) => f.chart.key === "reward");
  if (hero) {
    hero.plot.after(marks);
    hero.moved = (range) => timeline(marks, entries, range);
    hero.moved(span(runs));
  }
  const main = figures.filter((f) => f !== hero && !f.chart.other), other = figures.filter((f) => f.chart.other);
  const found = entries.map(({ found, r, id }) => finding(found, r, several, id, (step, run) => browser.toStep(step, run)));
  const evaluated = runs.map((run, r) => run.evaluation && evaluation(run, r, several)).filter(Boolean);
  const proved = runs.map((run, r) => run.proof && proof(run, r, several)).filter(Boolean);
  places.replaceChildren(
    el("div", { class: `verdicts${several ? " two" : ""}`, id: "verdict" }, runs.map((run, r) => verdict(run, r, several))),
    ...(data.uncharted ? [el("p", { class: "uncharted" }, data.uncharted)] : []),
    ...(hero ? [el("section", { id: "reward" }, hero.node)] : []),
    ...(found.length ? [section("findings", "Findings", "What the health checks said, gravest first.", el("div", { class: "findings" }, found))] : []),
    ...(main.length ? [section("curves", "Curves", several ? "A and B over the same steps." : "Click a step to read what the model wrote then.", el("div", { class: "grid" }, main.map((f) => f.node)))] : []),
    ...(evaluated.length ? [section("evaluation", "Before and after", "The same held-out prompts, sampled before the first step and after the last.", el("div", { class: "two-up" }, evaluated))] : []));
  after.replaceChildren(
    ...(other.length ? [section("other", "Other metrics", null, el("details", null, el("summary", null, `${other.length} more`), el("div", { class: "grid" }, other.map((f) => f.node))))] : []),
    ...(proved.length ? [section("proof", "Proof", "What the trainer checked on its first batch.", el("div", { class: "two-up" }, proved))] : []),
    section("setup", "Setup", null, el("div", { class: several ? "findings" : "two-up" }, setup("Configuration", runs.map((run) => run.config)), setup("Environment", runs.map((run) => run.environment)))));
  charts.show(runs, figures);
  byId("links").replaceChildren(...[...document.querySelectorAll("main section[id]")].map((node) => el("a", { href: `#${node.id}` }, node.querySelector("h2")?.textContent || "Reward")));
}

const after = el("div");

function themes() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    charts.redraw();
  });
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    charts.redraw();
    charts.print();
  });
  addEventListener("afterprint", () => {
    if (before === undefined) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = before;
    charts.redraw();
  });
}

// Plotly is the largest part of the page: it starts when everything else is there to read.
async function startCharts() {
  if (data.uncharted) {
    document.documentElement.dataset.charts = "none";
    return;
  }
  const code = await inflate(byId("plotly").textContent);
  const script = document.createElement("script");
  script.textContent = code;
  document.head.append(script);
  charts.start();
  document.documentElement.dataset.charts = "ready";
}

async function startBrowser() {
  for (const [r, run] of runs.entries()) {
    await browser.add(r, run.completions);
    Object.assign(run.completions, { gzip: "", thumbnails: {} });
  }
  browser.set({});
  document.documentElement.dataset.completions = "ready";
}

// ---- news of a run that goes on ----

const EVERY = 2000; // milliseconds between two questions

async function ask() {
  const held = browser.stores.map((store) => store.steps?.at(-1) ?? -1);
  const key = new URLSearchParams(location.search).get("key");
  const query = new URLSearchParams({ version: data.version || "", after: held.join(","), ...(key ? { key } : {}) });
  const answer = await fetch(`data?${query}`, { cache: "no-store" });
  if (answer.status === 204) return null;
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

async function take(news) {
  data.version = news.version;
  let following = false;
  for (const [r, run] of news.runs.entries()) {
    following = (await browser.add(r, run.completions)) || following;
    const { kept, total } = runs[r].completions;
    Object.assign(runs[r], run, { completions: { gzip: "", thumbnails: {}, kept: kept + run.completions.kept, total: total + run.completions.total } });
  }
  const at = scrollY;
  draw();
  scrollTo({ top: at, behavior: "instant" });
  if (following) browser.set({});
}

async function follow() {
  const live = byId("live");
  try {
    const news = document.hidden ? null : await ask();
    if (news) await take(news);
    live.className = "live";
    live.textContent = `live, step ${Math.max(...runs.map((run) => run.summary.last_step))}`;
  } catch {
    live.className = "live lost";
    live.textContent = "no answer; what was last known";
  }
  setTimeout(follow, EVERY);
}

byId("main").replaceChildren(places, browser.node, after);
draw();
themes();
setTimeout(async () => {
  await Promise.all([startCharts(), startBrowser()]);
  document.documentElement.dataset.ready = "yes";
  if (data.live) follow();
}, 0);
