// ---- completions ----

const DISAGREEING = 200; // entries of a ranking that are listed

// The completions of one run, column by column, and its groups: neighbours of one step and prompt.
class Store {
  constructor() {
    this.columns = null;
    this.prompts = [];
    this.promptNumbers = new Map();
    this.images = []; // names of each prompt's
    this.thumbnails = {};
    this.groups = [];
  }

  add(table) {
    const numbers = table.prompts.map((text) => this.numberOf(text));
    numbers.forEach((p, i) => (this.images[p] = table.images[i]));
    table.prompt = table.prompt.map((p) => numbers[p]);
    const start = this.count;
    if (!this.columns) this.columns = { ...table, prompts: undefined, images: undefined };
    else this.append(table);
    for (let i = start, begun = start; i < this.count; i++) {
      const c = this.columns;
      if (i + 1 < this.count && c.step[i + 1] === c.step[i] && c.group[i + 1] === c.group[i]) continue;
      this.groups.push({ store: this, step: c.step[i], prompt: c.prompt[i], row: c.row[i], start: begun, end: i + 1 });
      begun = i + 1;
    }
    this.arrange();
  }

  append(table) {
    const c = this.columns, before = this.count;
    for (const [name, values] of Object.entries(table)) {
      if (name === "prompts" || name === "images" || name === "rewards") continue;
      for (const value of values) c[name].push(value);
    }
    for (const name of new Set([...this.names, ...Object.keys(table.rewards)])) {
      c.rewards[name] = c.rewards[name] || new Array(before).fill(null);
      c.rewards[name].push(...(table.rewards[name] || new Array(table.step.length).fill(null)));
    }
  }

  numberOf(text) {
    if (!this.promptNumbers.has(text)) {
      this.promptNumbers.set(text, this.prompts.length);
      this.prompts.push(text);
    }
    return this.promptNumbers.get(text);
  }

  arrange() {
    this.steps = [...new Set(this.columns.step)];
    this.byStep = Map.groupBy ? Map.groupBy(this.groups, (g) => g.step) : groupBy(this.groups, (g) => g.step);
    this.byPrompt = groupBy(this.groups, (g) => g.prompt);
    this.lower = this.wide = this.ends_of_reward = null;
    this.ends = shared(this.prompts);
  }

  get count() { return this.columns ? this.columns.step.length : 0; }
  get names() { return this.columns ? Object.keys(this.columns.rewards) : []; }

  // What a prompt asks, without what all prompts have in common.
  short(prompt) {
    const text = this.prompts[prompt], [head, tail] = this.ends;
    return text.slice(head, text.length - tail).trim() || text;
  }

  // The images of a prompt: the browser decodes those that come into sight.
  pictures(prompt) {
    const shown = this.images[prompt].map((name, i) => this.thumbnails[name]
      ? el("img", { src: `data:image/jpeg;base64,${this.thumbnails[name]}`, alt: `image ${i + 1}`, loading: "lazy", decoding: "async" })
      : el("span", { class: "badge", title: "Beyond the size of this page, or of the run's record." }, `image ${i + 1} is not kept`));
    return shown.length > 0 && el("div", { class: "pictures" }, shown);
  }

  mean(group) {
    const values = this.columns.reward.slice(group.start, group.end).filter(known);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  }

  // Lowest and highest mean reward of a group: one scale for all prompts.
  range() {
    this.ends_of_reward = this.ends_of_reward || bounds(this.groups.map((group) => this.mean(group)));
    return this.ends_of_reward;
  }

  copies(group) {
    const counts = new Map();
    for (let i = group.start; i < group.end; i++) counts.set(this.columns.text[i], (counts.get(this.columns.text[i]) || 0) + 1);
    return counts;
  }

  // How far the reward functions are apart about each completion, each from 0 at its lowest to 1 at its highest.
  disagreement() {
    if (this.wide) return this.wide;
    const scaled = this.names.map((name) => ranged(this.columns.rewards[name])).filter(Boolean);
    this.wide = scaled.length < 2 ? new Float64Array(this.count) : Float64Array.from({ length: this.count }, (_, i) => {
      const values = scaled.map((column) => column[i]).filter(known);
      return values.length < 2 ? 0 : Math.max(...values) - Math.min(...values);
    });
    return this.wide;
  }

  // All that was said in a completion, or in the branches of an episode.
  all(i) {
    return this.columns.branches[i] ? this.columns.turns[i].map(([, , text]) => text).join("\n") : this.columns.text[i];
  }

  lowered() {
    this.lower = this.lower || this.columns.text.map((_, i) => this.all(i).toLowerCase());
    return this.lower;
  }
}

function groupBy(items, key) {
  const map = new Map();
  for (const item of items) {
    const k = key(item);
    if (map.has(k)) map.get(k).push(item);
    else map.set(k, [item]);
  }
  return map;
}

function bounds(values) {
  return values.reduce(([low, high], value) => (known(value) ? [Math.min(low, value), Math.max(high, value)] : [low, high]), [Infinity, -Infinity]);
}

function ranged(values) {
  const [low, high] = bounds(values);
  return high > low ? values.map((value) => (known(value) ? (value - low) / (high - low) : null)) : null;
}

// Lengths of the beginning and the end that all prompts share, cut at lines and at tags of a chat template.
function shared(prompts) {
  if (prompts.length < 2) return [0, 0];
  const first = prompts[0], shortest = Math.min(...prompts.map((p) => p.length));
  let head = 0, tail = 0;
  while (head < shortest && prompts.every((p) => p[head] === first[head])) head++;
  while (tail < shortest - head && prompts.every((p) => p[p.length - 1 - tail] === first[first.length - 1 - tail])) tail++;
  const begin = Math.max(first.lastIndexOf("\n", head - 1), first.lastIndexOf(">", head - 1)) + 1;
  const rest = first.slice(first.length - tail), cut = rest.search(/[\n<]/);
  return [head ? begin : 0, cut < 0 ? 0 : rest.length - cut];
}

// Which completions a filter lists, in its order.
const FILTERS = {
  all: { title: "All" },
  best: { title: "Best", pick: (s, rows) => ranked(rows.filter((i) => known(s.columns.reward[i])), (i) => -s.columns.reward[i]) },
  worst: { title: "Worst", pick: (s, rows) => ranked(rows.filter((i) => known(s.columns.reward[i])), (i) => s.columns.reward[i]) },
  cut_off: { title: "Cut off", pick: (s, rows) => rows.filter((i) => s.columns.cut_off[i]).reverse() },
  duplicates: { title: "Duplicates", pick: duplicates },
  disagree: { title: "Rewards disagree", pick: (s, rows) => ranked(rows.filter((i) => s.disagreement()[i] > 0), (i) => -s.disagreement()[i]).slice(0, DISAGREEING) },
};

// One side of a turn: what the policy drew, or what it was given after that; or the line with which a branch begins.
const passage = ([kind, head, text, depth], query) => el("div", { class: `${kind} in${depth}` }, el("div", { class: "head" }, seen(head)), ...marked(seen(text), query));

const ranked = (rows, key) => rows.map((i) => [key(i), i]).sort((a, b) => a[0] - b[0] || b[1] - a[1]).map(([, i]) => i);

function duplicates(store, rows) {
  const wanted = new Set(rows), found = [];
  for (const group of store.groups) {
    for (const [text, times] of store.copies(group)) {
      if (times < 2) continue;
      for (let i = group.start; i < group.end; i++) if (store.columns.text[i] === text && wanted.has(i)) found.push([-times, i]);
    }
  }
  return found.sort((a, b) => a[0] - b[0] || b[1] - a[1]).map(([, i]) => i);
}

class Browser {
  constructor(runs) {
    this.runs = runs;
    this.stores = runs.map(() => new Store());
    this.state = { run: 0, view: "step", step: null, prompt: null, filter: "all", query: "", order: "place", here: false };
    this.items = el("div", { class: "items" });
    this.told = el("p", { class: "told", role: "status" });
    this.tools = el("div", { class: "tools" });
    this.node = section("completions", "Completions", "What the model wrote, and what it was given for it.", this.tools, this.told, this.items);
  }

  get store() { return this.stores[this.state.run]; }

  async add(r, completions) {
    if (!completions.gzip) return;
    const store = this.stores[r], following = this.state.step === null || (r === this.state.run && this.state.step === store.steps?.at(-1));
    Object.assign(store.thumbnails, completions.thumbnails);
    store.add(JSON.parse(await inflate(completions.gzip)));
    if (following && r === this.state.run) this.state.step = store.steps.at(-1);
    return following;
  }

  // Change what is shown; the tools keep the focus unless they themselves change.
  set(changes, keepTools) {
    Object.assign(this.state, changes);
    if (!keepTools) this.drawTools();
    this.draw();
  }

  toStep(step, run = this.state.run) {
    const steps = this.stores[run].steps;
    if (!steps) return;
    const nearest = steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    this.set({ run, view: "step", step: nearest, filter: "all", query: "" });
    this.node.scrollIntoView();
  }

  // ---- tools ----

  drawTools() {
    const s = this.state;
    if (!this.store.count) return this.tools.replaceChildren(this.runSwitch() || "");
    const views = el("div", { class: "segment" }, [["step", "By step"], ["prompt", "By prompt"]].map(([view, title]) =>
      el("button", { type: "button", "aria-pressed": String(s.view === view), click: () => this.set({ view, prompt: null, filter: "all", query: "", here: false }) }, title)));
    const chips = el("div", { class: "chips", role: "group", "aria-label": "Filter" }, Object.entries(FILTERS).map(([name, { title }]) =>
      el("button", { type: "button", "data-filter": name, "aria-pressed": String(s.filter === name), click: () => this.set({ filter: name }) }, title)));
    this.search = el("input", { type: "search", placeholder: "Search in completions and prompts", "aria-label": "Search", value: s.query, input: () => this.later() });
    const order = el("select", { "aria-label": "Order within a group", change: () => this.set({ order: order.value }, true) },
      [["place", "As sampled"], ["reward", "Best first"]].map(([value, title]) => el("option", { value, selected: s.order === value }, title)));
    const here = el("label", null, el("input", { type: "checkbox", checked: s.here, change: (e) => this.set({ here: e.target.checked }, true) }), " this step only");
    const listing = s.filter !== "all" || s.query;
    this.tools.replaceChildren(
      el("div", { class: "row" }, this.runSwitch(), views, s.view === "step" && this.stepper(), s.view === "prompt" && s.prompt !== null && el("button", { type: "button", click: () => this.set({ prompt: null }) }, "All prompts")),
      el("div", { class: "row" }, chips, this.search, listing ? here : order, el("button", { type: "button", click: () => this.save(), title: "What is listed, as a table for a spreadsheet" }, "CSV")));
  }

  runSwitch() {
    if (this.runs.length < 2) return null;
    return el("div", { class: "segment" }, this.runs.map((run, r) => el("button", { type: "button", "aria-pressed": String(this.state.run === r), click: () => this.set({ run: r, step: this.nearest(r), prompt: null }) }, label(r, true), " ", seen(run.name))));
  }

  nearest(r) {
    const steps = this.stores[r].steps || [null];
    return steps.includes(this.state.step) ? this.state.step : steps.at(-1);
  }

  stepper() {
    const steps = this.store.steps, at = steps.indexOf(this.state.step);
    const output = el("output", null, `step ${this.state.step}`);
    const go = (i) => { if (i >= 0 && i < steps.length) this.set({ step: steps[i] }); };
    const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: at, "aria-label": "Step", input: () => {
      output.textContent = `step ${steps[slider.value]}`;
      this.set({ step: steps[slider.value] }, true);
    } });
    const arrow = (by, sign, name) => el("button", { type: "button", "aria-label": name, click: () => go(this.store.steps.indexOf(this.state.step) + by) }, sign);
    return el("div", { class: "stepper" }, arrow(-1, "\u2190", "Step before"), slider, arrow(1, "\u2192", "Next step"), output);
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const listed = Boolean(this.state.query), query = this.search.value.trim();
      this.set({ query }, true);
      if (listed !== Boolean(query)) {
        const at = this.search.selectionStart, value = this.search.value;
        this.drawTools();
        this.search.value = value;
        this.search.focus();
        this.search.setSelectionRange(at, at);
      }
    }, 120);
  }

  // ---- what is listed ----

  draw() {
    const s = this.state;
    this.items.className = "items";
    if (!this.store.count) {
      this.told.textContent = "";
      this.items.replaceChildren(el("p", { class: "empty" }, "No completions are in this run's folder."));
    } else if (s.filter !== "all" || (s.query && s.view === "step")) this.drawList();
    else if (s.view === "step") this.drawGroups(this.store.byStep.get(s.step) || [], `Step ${s.step}`);
    else if (s.prompt === null) this.drawPrompts();
    else this.drawHistory();
  }

  drawGroups(groups, title) {
    const completions = groups.reduce((sum, g) => sum + g.end - g.start, 0);
    this.told.textContent = `${title}: ${groups.length} prompts, ${completions} completions. ${this.left()}`;
    fill(this.items, groups.length, (i) => this.group(groups[i]), 8);
  }

  left() {
    const { kept, total } = this.runs[this.state.run].completions;
    return kept < total ? `This page holds ${kept.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} completions, for its size; all are in the run's folder.` : "";
  }

  matching() {
    const s = this.state, store = this.store, query = s.query.toLowerCase();
    const asked = query && new Set(store.prompts.flatMap((p, n) => (p.toLowerCase().includes(query) ? [n] : [])));
    const rows = [];
    for (let i = 0; i < store.count; i++) {
      if (s.here && store.columns.step[i] !== s.step) continue;
      if (query && !store.lowered()[i].includes(query) && !asked.has(store.columns.prompt[i])) continue;
      rows.push(i);
    }
    return FILTERS[s.filter].pick ? FILTERS[s.filter].pick(store, rows) : rows.reverse();
  }

  drawList() {
    const rows = this.matching();
    this.told.textContent = `${rows.length.toLocaleString("en-US")} of ${this.store.count.toLocaleString("en-US")} completions. ${this.left()}`;
    this.items.className = "items completions";
    if (!rows.length) this.items.replaceChildren(el("p", { class: "empty" }, "None."));
    else fill(this.items, rows.length, (i) => this.completion(this.store, rows[i], { full: true }), 40);
  }

  drawPrompts() {
    const s = this.store, query = this.state.query.toLowerCase();
    const entries = [...s.byPrompt].filter(([p]) => !query || s.prompts[p].toLowerCase().includes(query)).map(([p, groups]) => ({ p, groups, means: groups.map((g) => s.mean(g)) }));
    entries.sort((a, b) => b.groups.length - a.groups.length || a.p - b.p);
    this.told.textContent = `${entries.length.toLocaleString("en-US")} prompts; each with its mean reward whenever it was drawn. ${this.left()}`;
    this.items.className = "items prompts";
    fill(this.items, entries.length, (i) => this.promptEntry(entries[i]), 40);
  }

  promptEntry({ p, groups, means }) {
    const open = () => this.set({ prompt: p });
    const times = groups.length === 1 ? "drawn once" : `drawn ${groups.length} times`;
    return el("div", { class: "card", tabindex: 0, role: "button", click: open, keydown: (e) => e.key === "Enter" && open() },
      el("div", null, this.store.pictures(p), el("div", { class: "text" }, seen(this.store.short(p)))), spark(groups.map((g) => g.step), means, this.store.range()),
      el("div", { class: "from" }, el("b", null, `${number(means[0], 2)} \u2192 ${number(means.at(-1), 2)}`), el("br"), times));
  }

  drawHistory() {
    const text = this.store.prompts[this.state.prompt];
    const groups = this.stores.flatMap((store) => store.byPrompt?.get(store.promptNumbers.get(text)) || []);
    groups.sort((a, b) => a.step - b.step);
    this.told.textContent = `This prompt was drawn ${groups.length} times; its groups in the order of steps.`;
    fill(this.items, groups.length, (i) => this.group(groups[i]), 8);
  }

  group(group) {
    const { store } = group, c = store.columns, copies = store.copies(group);
    const rows = Array.from({ length: group.end - group.start }, (_, i) => group.start + i);
    if (this.state.order === "reward") rows.sort((a, b) => (c.reward[b] ?? -Infinity) - (c.reward[a] ?? -Infinity) || a - b);
    const rewards = rows.map((i) => c.reward[i]).filter(known);
    const flat = rewards.length > 0 && rewards.every((value) => value === rewards[0]);
    const trained = rows.filter((i) => c.trained[i]).length, mixed = trained > 0 && trained < rows.length;
    const short = store.short(group.prompt), whole = store.prompts[group.prompt];
    const prompt = el("div", { class: "text prompt" }, seen(short));
    const toggle = short !== whole && el("button", { type: "button", class: "link", click: () => {
      const opened = prompt.classList.toggle("open");
      prompt.textContent = seen(opened ? whole : short);
      toggle.textContent = opened ? "less" : "as the model sees it";
    } }, "as the model sees it");
    const history = this.state.view === "step" && (store.byPrompt.get(group.prompt) || []).length > 1
      && el("button", { type: "button", class: "link", click: () => this.set({ run: this.stores.indexOf(store), view: "prompt", prompt: group.prompt }) }, `this prompt over time`);
    const one = (i) => this.completion(store, i, { copies: copies.get(c.text[i]), mixed });
    const key = (i) => `${c.reward[i]} ${store.all(i)}`;
    const first = new Map(rows.map((i) => [key(i), i]).reverse()), alone = rows.filter((i) => first.get(key(i)) === i);
    const list = el("div", { class: "completions" }, alone.map(one));
    const unfold = alone.length < rows.length && el("button", { type: "button", class: "link", click: () => { list.replaceChildren(...rows.map(one)); unfold.remove(); } }, `show all ${rows.length}, with ${rows.length - alone.length} repeated`);
    return el("article", { class: "card group" }, el("header", null,
      label(this.stores.indexOf(store), this.stores.length > 1), el("b", null, `step ${group.step}`), group.row >= 0 && `row ${group.row}`,
      el("span", null, "mean reward ", el("b", null, number(store.mean(group), 2))), flat ? el("span", { class: "badge" }, "equal rewards: no signal") : trained === 0 && el("span", { class: "badge" }, "not trained on"),
      el("span", { class: "push" }, toggle, toggle && history && "  \u00b7  ", history)), store.pictures(group.prompt), prompt,
      c.answer[group.start] ? el("p", { class: "aside" }, "right answer: ", el("b", null, seen(c.answer[group.start]))) : null, list, unfold);
  }

  completion(store, i, { copies = 1, full = false, mixed = false }) {
    const c = store.columns, advantage = c.advantage[i];
    const query = this.state.query, turns = c.turns[i];
    const text = el("div", { class: "text" }, turns ? turns.map((turn) => passage(turn, query)) : [...marked(seen(c.text[i]), query)]);
    const long = (turns ? turns.length > 4 : false) || c.text[i].length > 420 || c.text[i].split("\n", 12).length > 10;
    const more = long && el("button", { type: "button", class: "link", click: () => { more.textContent = text.classList.toggle("open") ? "less" : "more"; } }, "more");
    const failed = c.failed[i] && el("details", { class: "failed" }, el("summary", null, seen(`The program ${c.failed[i]}`)), el("div", { class: "text" }, seen(c.log[i] || "It wrote nothing.")));
    const wide = full && this.state.filter === "disagree" && el("span", { class: "badge wide" }, `${number(100 * store.disagreement()[i], 0)} % of their ranges apart`);
    return el("div", { class: "completion", "data-row": i },
      full && el("div", { class: "top" }, el("button", { type: "button", class: "link", click: () => this.toStep(c.step[i]) }, `step ${c.step[i]}`), el("span", null, seen(store.short(c.prompt[i]).slice(0, 90)))),
      full && store.pictures(c.prompt[i]),
      el("div", { class: "top" }, el("b", null, number(c.reward[i], 2)), c.cut_off[i] ? el("span", { class: "badge cut" }, "cut off") : null,
        copies > 1 && el("span", { class: "badge dup" }, `${copies} alike`), wide, c.branches[i] && c.trained[i] ? el("span", { class: "badge" }, "trained on") : !c.trained[i] && (full || mixed || c.branches[i]) && el("span", { class: "badge" }, "not trained on"),
        el("span", { class: "push" }, c.branches[i] ? `${c.branches[i]} branches, ` : null, `${c.tokens[i]} tokens`)),
      text, more, failed,
      el("div", { class: "rewards" }, store.names.map((name) => [el("span", { title: seen(name) }, seen(name)), el("span", { class: "value" }, number(c.rewards[name][i], 2))]),
        [el("span", null, "advantage"), el("span", { class: "value" }, known(advantage) && advantage > 0 ? `+${number(advantage, 2)}` : number(advantage, 2))]),
      known(advantage) ? bar(advantage) : null);
  }

  // ---- export ----

  save() {
    const s = this.state, c = this.store.columns;
    const rows = s.filter !== "all" || s.query ? this.matching() : this.shownGroups().flatMap((g) => Array.from({ length: g.end - g.start }, (_, i) => g.start + i));
    const head = ["step", "row", "completion", "prompt", "text", "tokens", "cut_off", "reward", "advantage", ...this.store.names];
    const lines = rows.map((i) => [c.step[i], c.row[i], c.index[i], this.store.prompts[c.prompt[i]], c.text[i], c.tokens[i], c.cut_off[i], c.reward[i], c.advantage[i], ...this.store.names.map((name) => c.rewards[name][i])]);
    const text = [head, ...lines].map((line) => line.map(csv).join(",")).join("\r\n");
    const link = el("a", { href: URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv" })), download: "completions.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  shownGroups() {
    const s = this.state;
    if (s.view === "step") return this.store.byStep.get(s.step) || [];
    return s.prompt === null ? this.store.groups : this.store.byPrompt.get(s.prompt);
  }
}

// A cell of text that begins like a formula gets a quote before it, so that no spreadsheet computes it.
function csv(value) {
  if (typeof value !== "string") return value ?? "";
  const text = /^\s*[=+\-@\t\r\n|%]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}

// Text with the places marked where a search found something.
function marked(text, query) {
  if (!query) return [text];
  const parts = [], lower = text.toLowerCase(), wanted = query.toLowerCase();
  let at = 0;
  for (let found = lower.indexOf(wanted); found >= 0 && parts.length < 400; found = lower.indexOf(wanted, at)) {
    parts.push(text.slice(at, found), el("mark", null, text.slice(found, found + wanted.length)));
    at = found + wanted.length;
  }
  return [...parts, text.slice(at)];
}

// An advantage as a bar from the middle: to the right what becomes likelier, to the left what becomes less likely.
function bar(value) {
  const width = Math.min(Math.abs(value) / 2.5, 1) * 50;
  return svg("svg", { class: "advantage", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "track", x: 0, y: 3, width: 100, height: 2 }),
    svg("rect", { class: value >= 0 ? "up" : "down", x: value >= 0 ? 50 : 50 - width, y: 1.5, width, height: 5 }),
    svg("line", { class: "zero", x1: 50, x2: 50, y1: 0, y2: 8, "vector-effect": "non-scaling-stroke" }));
}

function spark(steps, values, [low, high]) {
  const x = (i) => (100 * (steps[i] - steps[0])) / (steps.at(-1) - steps[0] || 1);
  const y = (value) => (high > low ? 30 - (28 * (value - low)) / (high - low) : 16);
  const points = values.flatMap((value, i) => (known(value) ? [`${x(i).toFixed(1)},${y(value).toFixed(1)}`] : []));
  if (points.length === 1) points.push(points[0].replace(/^[\d.]+/, (a) => String(Number(a) + 3)));
  return svg("svg", { class: "spark", viewBox: "0 0 100 32", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }));
}
