"use strict";
// Builds the page from the JSON that it carries. No number is made or written here: `shown` takes its text from there.
const R = JSON.parse(document.getElementById("report").textContent);
const page = document.getElementById("page");
const HATCHED = ["waiting", "idle", "starting", "queued"];
document.documentElement.dataset.errors = "0";
window.addEventListener("error", () => { document.documentElement.dataset.errors++; });

// ---- elements ----
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") element.style.cssText = value; else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
function at(path) { return path.split("/").reduce((value, key) => (value === null || value === undefined ? null : value[key]), R); }
function shown(path, tag = "span") { // a number by its text, a name as it is
  const value = at(path) ?? null;
  return el(tag, { "data-path": path, "data-value": JSON.stringify(value) }, R.text[path] ?? String(value ?? ""));
}
function named(i) { return el("span", {}, "rank ", shown(`ranks/${i}/rank`)); }
function swatch(kind) { return el("i", { style: `--kind: var(--${kind})`, class: HATCHED.includes(kind) ? "hatched" : "" }); }
function add(...children) { page.append(...children.filter(Boolean)); }
function section(title, note) { add(el("h2", {}, title), note ? el("p", { class: "note" }, ...[].concat(note)) : null); }
function stack(parts) { // [[colour, share], …]
  return el("div", { class: "bar" }, ...parts.filter(([, share]) => share > 0).map(([kind, share]) =>
    el("div", { style: `flex: ${share} 0 0; background-color: var(--${kind})`, class: HATCHED.includes(kind) ? "hatched" : "", title: kind })));
}
function table(heads, rows) {
  return el("div", { class: "card scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map(([head, text]) => el("th", { class: text ? "text" : "" }, head)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell, i) => el("td", { class: heads[i][1] ? "text" : "" }, cell)))))));
}

// ---- the story ----
function head() {
  const facts = R.facts || {}, versions = facts.versions || {};
  const hosts = [...new Set(R.ranks.map((rank) => rank.host))];
  const devices = [...new Set(R.ranks.map((rank) => rank.device))];
  add(el("header", {}, el("h1", {}, shown("title")), el("span", { class: `status ${R.status}` }, shown("status")),
    el("span", {}, `${R.ranks.length} × ${devices.join(", ") || "unknown"} on ${hosts.join(", ") || "no host"}`),
    versions.torch ? el("span", {}, `torch ${versions.torch}`) : null, facts.started ? el("span", {}, facts.started) : null,
    R.source === "measured" ? null : el("span", { class: "status" }, shown("source"))));
  const above = R.headline && !R.verdict.startsWith(R.headline.replace(/\.$/, ""));
  if (above) add(el("p", { class: "verdict" }, shown("headline")));
  add(el("p", { class: above ? "soft" : "verdict" }, shown("verdict")));
  if (R.findings.length && R.findings[0].sentence === R.verdict) add(el("p", { class: "advice" }, shown("findings/0/advice")));
  const about = Object.keys(R.about || {});
  if (about.length) add(el("dl", { class: "about" }, ...about.flatMap((name) => [el("dt", {}, name), el("dd", {}, shown(`about/${name}`))])));
  if (R.missing.length) {
    add(el("div", { class: "card missing" }, el("b", {}, "What is missing"),
      el("ul", {}, ...R.missing.map((_, i) => el("li", {}, shown(`missing/${i}`))))));
  }
  const size = (i) => R.ranks[i].peak_memory ?? -1;
  const most = R.ranks.reduce((best, _, i) => (size(i) >= 0 && (best < 0 || size(i) > size(best)) ? i : best), -1);
  const tiles = [["step, median", shown("step_seconds")], ["step, 95 % within", shown("step_seconds_p95")],
    ["samples a second", shown("samples_per_second")], ["steps", shown("steps")], ["wall time", shown("wall_seconds")]];
  if (most >= 0) tiles.push([el("span", {}, "peak memory, ", named(most)), shown(`ranks/${most}/peak_memory`)]);
  add(el("div", { class: "tiles" }, ...tiles.map(([label, value]) =>
    el("div", { class: "card tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value)))));
}
function findings() {
  if (R.findings.every((finding) => finding.sentence === R.verdict)) return; // above, with its advice
  section("What limits it", "Shares of a step, mean over ranks, without the first step.");
  const colour = { straggler: "waiting", late: "waiting", input: "data", imbalance: "waiting", bubble: "waiting", compute: "backward", checkpoint: "checkpoint", evaluation: "evaluate", idle: "idle", memory: "lost", stalls: "lost" };
  add(el("div", { class: "findings" }, ...R.findings.map((finding, i) => (finding.sentence === R.verdict ? null :
    el("div", { class: "card finding", style: `--kind: var(--${colour[finding.kind] || finding.kind})` },
      shown(`findings/${i}/sentence`, "p"), el("p", { class: "advice" }, shown(`findings/${i}/advice`)))))));
}
function goodput() {
  section("Goodput", "What the wall time went into, mean over devices. The parts add up to all of it.");
  const key = (path, part) => el("span", { class: "key" }, part ? swatch(part) : null, shown(`${path}/name`),
    shown(`${path}/share`), el("span", { class: "soft" }, shown(`${path}/seconds`)));
  add(el("div", { class: "card" }, stack(R.goodput.map((part) => [part.name, part.share])),
    el("div", { class: "keys" }, ...R.goodput.map((part, i) => key(`goodput/${i}`, part.name))),
    el("div", { class: "keys soft" }, "waiting for", ...R.waiting.map((_, i) => key(`waiting/${i}`, null)))));
}
function attempts() {
  if (R.attempts.length < 2) return;
  section("Attempts", "Each start of the workers. Hatched: between two of them, in a queue or until somebody started it again.");
  const colours = { finished: "useful", running: "useful", stopped: "evaluation", failed: "lost" };
  const whole = R.attempts.reduce((sum, one, i) => sum + one.seconds + (i || one.queued ? one.before : 0), 0) || 1;
  add(el("div", { class: "card" }, stack(R.attempts.flatMap((one, i) => [[one.queued ? "queued" : "idle", i || one.queued ? one.before / whole : 0], [colours[one.status] || "idle", one.seconds / whole]]))));
  const heads = [["attempt"], ["began", true], ["after"], ["on", true], ["devices"], ["lived"], ["from step"], ["done again"], ["ended", true]];
  add(table(heads, R.attempts.map((one, i) => [...["number", "began", "before", "launched", "devices", "seconds", "from_step", "steps_lost", "ended"].map((name) => shown(`attempts/${i}/${name}`))])));
}
function ranks() {
  if (!R.ranks.length) return;
  const kinds = KINDS.filter((kind) => R.ranks.some((rank) => rank.seconds[kind] > 0));
  section("Devices", "Seconds of training, evaluating and saving. Communication counts from the last rank's arrival on, where no computing hides it; waiting is until then.");
  const heads = [["device", true], ["steps"], ["a step"], ["its time"], ...kinds.map((kind) => [kind === "communication" ? "comm." : kind]), ["comm. hidden"], ["was last"], ["cost"], ["peak memory"]];
  add(table(heads, R.ranks.map((rank, i) => [named(i), shown(`ranks/${i}/steps`), shown(`ranks/${i}/step_seconds`), stack(kinds.map((kind) => [kind, rank.seconds[kind]])),
    ...kinds.map((kind) => shown(`ranks/${i}/seconds/${kind}`)), shown(`ranks/${i}/hidden_seconds`),
    el("span", {}, shown(`ranks/${i}/last_steps`), el("span", { class: "soft" }, " of ", shown(`ranks/${i}/steps`), " steps")), shown(`ranks/${i}/straggler_seconds`),
    rank.peak_memory === null ? "" : shown(`ranks/${i}/peak_memory`)])));
  add(el("div", { class: "keys" }, ...kinds.map((kind) => el("span", { class: "key" }, swatch(kind), kind))));
}

// ---- charts ----
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }
function layout(more) {
  const line = colour("line"), axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true };
  const base = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("ink"), family: "system-ui, sans-serif", size: 13 },
    margin: { l: 64, r: 18, t: 12, b: 44 }, hoverlabel: { font: { family: "system-ui, sans-serif" } }, legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, traceorder: "normal" } };
  return { ...base, ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis } };
}
const CONFIG = { displayModeBar: false, responsive: true };
const charts = [];
function chart(parent, name, height, draw) {
  const place = el("div", { id: name, style: `height: ${height}px` });
  parent.append(el("div", { class: "card chart" }, place));
  charts.push(() => { const [traces, shape] = draw(); return Plotly.react(place, traces, layout({ ...shape, height: place.clientHeight }), CONFIG); });
  return place;
}
function times(values, factor) { return values.map((value) => (value === null ? null : value * factor)); } // unknown stays unknown
function safe(text) { return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }
function rows(view) { // of the Gantt: [rank, lane] from top to bottom
  const used = new Set(view.bars.map((bar) => `${bar.rank} ${bar.lane}`));
  return R.ranks.flatMap((rank) => LANES.filter((lane) => used.has(`${rank.rank} ${lane}`)).map((lane) => [rank.rank, lane]));
}
function label(rank, lane) { return lane === "main" ? `rank ${rank}` : `${lane === "communication" ? "comm." : lane} ${rank}`; }
function microbatch(bar) { const found = /^stage \d+, microbatch (\d+)$/.exec(bar.name); return found ? found[1] : ""; }
function gantt(view) {
  const order = rows(view).map(([rank, lane]) => label(rank, lane));
  const found = view.bars.filter((bar) => bar.found), logged = view.bars.filter((bar) => !bar.found);
  const trace = (bars, kind, name, more) => ({ type: "bar", orientation: "h", name, legendgroup: kind, base: bars.map((bar) => bar.start * 1e3), x: bars.map((bar) => bar.seconds * 1e3),
    y: bars.map((bar) => label(bar.rank, bar.lane)), width: bars.map((bar) => (bar.lane === "main" ? 0.86 : 0.6)), hoverinfo: "text",
    hovertext: bars.map((bar) => `<b>${safe(kind)}${bar.name ? ` · ${safe(bar.name)}` : ""}</b><br>rank ${bar.rank}, step ${bar.step}<br>${safe(bar.text)}`),
    ...(bars.some(microbatch) ? { text: bars.map(microbatch), textposition: "inside", insidetextanchor: "start", textangle: 0, textfont: { color: "#fff" } } : {}), ...more });
  const line = { color: colour("card"), width: 0.6 };
  const traces = KINDS.map((kind) => [kind, logged.filter((bar) => bar.kind === kind)]).filter(([, bars]) => bars.length)
    .map(([kind, bars]) => trace(bars, kind, kind, { marker: { color: colour(kind), line } }));
  const hatch = (name) => ({ marker: { color: colour(name), line: { color: colour("card"), width: 0.6 }, pattern: { shape: "/", fillmode: "overlay", fgcolor: colour("card"), fgopacity: 0.75, size: 6, solidity: 0.38 } } });
  const waits = [...found, ...view.attributed.filter((bar) => bar.kind === "waiting")], sends = view.attributed.filter((bar) => bar.kind === "communication");
  if (waits.length) traces.push(trace(waits, "waiting", "waiting for the last rank", hatch("waiting")));
  if (sends.length) traces.push(trace(sends, "communication", "communicating, nothing to compute", hatch("communication")));
  return [traces, { barmode: "overlay", bargap: 0, uniformtext: { minsize: 9, mode: "hide" }, showlegend: document.getElementById("gantt").clientWidth > 640, dragmode: "zoom", margin: { l: 84, r: 18, t: document.getElementById("gantt").clientWidth > 640 ? 40 : 12, b: 48 },
    xaxis: { title: { text: "ms" }, range: [0, view.seconds * 1e3], zeroline: false },
    yaxis: { categoryorder: "array", categoryarray: order, autorange: "reversed", fixedrange: true, showgrid: false } }];
}
function chosen() { return Math.max(0, R.views.findIndex((view) => location.hash === `#view=${view.name}`)); }
function timeline() {
  if (!R.views.length) return;
  section("Timeline", [el("span", { id: "view" }), " Drag to zoom, double-click for all of it. Hatched: nothing to compute, for the last rank has not come, or the bytes are on their way.",
    ...(R.plan ? [] : [" Times of different ranks agree to ±", shown("error_seconds"), "."])]);
  const links = R.views.map((view) => el("a", { href: `#view=${view.name}` }, view.name === "all" ? "all steps" : view.name));
  if (links.length > 1) add(el("div", { class: "choose" }, ...links));
  const height = Math.max(...R.views.map((view) => 110 + rows(view).reduce((sum, [, lane]) => sum + (lane === "main" ? 30 : 24), 0)));
  const place = chart(page, "gantt", Math.max(240, height), () => {
    const view = R.views[chosen()];
    links.forEach((link, i) => link.classList.toggle("here", i === chosen()));
    const step = (end) => shown(`views/${chosen()}/${end}_step`);
    document.getElementById("view").replaceChildren(...(view.first_step === view.last_step ? ["Step ", step("first"), "."] : ["Steps ", step("first"), " to ", step("last"), "."]));
    place.dataset.view = view.name;
    return gantt(view);
  });
  window.addEventListener("hashchange", drawAll);
}
function ceiling(values) { // of an axis: what nearly all points reach, so that one slow step does not flatten the rest
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b), most = sorted.length ? sorted[sorted.length - 1] : 0;
  const usual = sorted.length ? sorted[Math.floor(0.98 * (sorted.length - 1))] * 1.3 : 0;
  return { top: Math.min(most * 1.05, usual) || 1e-3, cut: usual < most };
}
function series() {
  const kinds = KINDS.filter((kind) => R.series.kinds && R.series.kinds[kind]);
  if (R.series.step && R.series.step.length > 1) {
    const { top, cut } = ceiling(R.series.seconds);
    section("Over the run", "Milliseconds of a step by kind, mean over ranks; each point is the mean of the steps up to the next."
      + (cut ? " A few points are higher than the axis: double-click shows all of them." : ""));
    chart(page, "kinds", 320, () => [kinds.map((kind) => ({ type: "scatter", mode: "none", stackgroup: "one", name: kind, x: R.series.step, y: times(R.series.kinds[kind], 1e3),
      fillcolor: colour(kind), hovertemplate: `%{y:.2f} ms<extra>${kind}</extra>` })), { hovermode: "x unified", xaxis: { title: { text: "step" } }, yaxis: { title: { text: "ms a step" }, range: [0, top * 1e3] } }]);
  }
  const two = el("div", { class: "two" });
  const half = (title) => { const side = el("div", {}, el("h2", {}, title)); two.append(side); return side; };
  if (R.series.loss && R.series.loss.some((loss) => loss !== null)) {
    chart(half("Loss"), "loss", 260, () => [[{ type: "scatter", mode: "lines", x: R.series.step, y: R.series.loss, connectgaps: true, line: { color: colour("accent"), width: 1.8 }, hovertemplate: "step %{x}: %{y:.4f}<extra></extra>" }],
      { xaxis: { title: { text: "step" } }, showlegend: false }]);
  }
  const memory = R.counters.filter((counter) => !NOT_MEMORY.includes(counter.name));
  if (memory.length) {
    const names = [...new Set(memory.map((counter) => counter.name))];
    chart(half("Memory over time"), "memory", 260, () => [memory.map((counter) => ({ type: "scatter", mode: counter.time.length > 1 ? "lines" : "markers", x: counter.time, y: times(counter.value, 2 ** -20),
      name: `rank ${counter.rank}${names.length > 1 ? ` ${counter.name}` : ""}`, line: { width: 1.6 }, hovertemplate: "%{y:,.0f} MiB<extra>%{fullData.name}</extra>" })),
      { xaxis: { title: { text: "seconds since the run began" } }, yaxis: { title: { text: `MiB ${names.length > 1 ? "" : names[0]}` } }, showlegend: memory.length <= 12 }]);
  }
  if (two.children.length) add(two);
}
function memoryByPhase() {
  for (const name of new Set(R.ranks.flatMap((rank) => Object.keys(rank.memory_by_phase)))) {
    const of = (rank) => rank.memory_by_phase[name] || {};
    const phases = KINDS.filter((kind) => R.ranks.some((rank) => of(rank)[kind] !== undefined));
    if (!phases.length) continue;
    const texts = (i) => phases.map((phase) => R.text[`ranks/${i}/memory_by_phase/${name}/${phase}`]).filter(Boolean);
    if (phases.length > 1 && R.ranks.every((rank, i) => new Set(texts(i)).size <= 1)) { // columns that are all alike
      const known = R.ranks.map((rank, i) => [i, phases.find((phase) => of(rank)[phase] !== undefined)]).filter(([, phase]) => phase);
      section(`Memory by phase: ${name}`, ["The same at the end of every phase: ", ...known.flatMap(([i, phase], n) =>
        [n ? ", " : "", named(i), " ", shown(`ranks/${i}/memory_by_phase/${name}/${phase}`)]), "."]);
      continue;
    }
    section(`Memory by phase: ${name}`, `The most that was ${name} at the end of each phase, sampled about once a second.`);
    add(table([["device", true], ...phases.map((phase) => [phase])], R.ranks.map((rank, i) => [named(i),
      ...phases.map((phase) => (of(rank)[phase] === undefined ? "" : shown(`ranks/${i}/memory_by_phase/${name}/${phase}`)))])));
  }
}
function collectives() {
  if (!R.collectives.length) return;
  section("Collectives", "From the last rank's arrival to the last end, median. Bus bandwidth by the definition of nccl-tests.");
  add(table([["collective", true], ["of", true], ["bytes"], ["times"], ["share"], ["takes"], ["skew"], ["bus bandwidth"]], R.collectives.map((_, i) => [shown(`collectives/${i}/name`), shown(`collectives/${i}/of`),
    shown(`collectives/${i}/bytes`), shown(`collectives/${i}/count`), shown(`collectives/${i}/share`), shown(`collectives/${i}/seconds`), shown(`collectives/${i}/skew_seconds`), at(`collectives/${i}/bus_bandwidth`) === null ? "" : shown(`collectives/${i}/bus_bandwidth`)])));
}
function stages() {
  if (!R.pipeline) return;
  section("Pipeline", ["The bubble is the share of the time from a step's first forward to its last backward in which a rank has none under way: ", shown("pipeline/bubble"),
    ". The schedule alone, with ", shown("pipeline/microbatches"), " microbatches, makes ", shown("pipeline/bubble_of_schedule"), "; with these stages ", shown("pipeline/bubble_of_stages"), ". Times are of a microbatch, median, without waiting."]);
  const most = Math.max(...R.pipeline.stages.map((stage) => stage.forward_seconds + stage.backward_seconds));
  add(table([["stage", true], ["ranks", true], ["forward"], ["backward"], ["of the longest", true]], R.pipeline.stages.map((stage, i) => [`stage ${stage.stage}`, stage.ranks.join(", "),
    shown(`pipeline/stages/${i}/forward_seconds`), shown(`pipeline/stages/${i}/backward_seconds`),
    stack([["forward", stage.forward_seconds / most], ["backward", stage.backward_seconds / most], ["", 1 - (stage.forward_seconds + stage.backward_seconds) / most]])])));
}
function predicted() {
  if (!R.predicted) return;
  section("Predicted and measured", shown("predicted/sentence"));
  const beside = (list, i) => [shown(`predicted/${list}/${i}/predicted`), R.predicted[list][i].measured === null ? "" : shown(`predicted/${list}/${i}/measured`)];
  add(table([["of a step", true], ["predicted"], ["measured"]], [
    ...(R.predicted.seconds === null ? [] : [["all", shown("predicted/seconds"), shown("predicted/measured")]]),
    ...R.predicted.kinds.map((_, i) => [shown(`predicted/kinds/${i}/name`), ...beside("kinds", i)]),
    ...R.predicted.memory.map((_, i) => [el("span", {}, shown(`predicted/memory/${i}/name`), " memory"), ...beside("memory", i)])]));
}
function watching() {
  if (!R.ranks.length) return;
  section("Clocks and watching", "Each rank's clock against rank 0's, from round trips between them; what was recorded, and what that took of a core.");
  const clock = (rank, key) => { const i = R.clocks.findIndex((one) => one.rank === rank); return i < 0 ? "" : shown(`clocks/${i}/${key}`); };
  add(table([["device", true], ["offset"], ["drift"], ["±"], ["round trips"], ["spans"], ["dropped"], ["processor time"]], R.ranks.map((rank, i) => [named(i),
    clock(rank.rank, "offset_seconds"), clock(rank.rank, "drift"), clock(rank.rank, "error_seconds"), clock(rank.rank, "samples"),
    shown(`ranks/${i}/spans`), shown(`ranks/${i}/dropped`), shown(`ranks/${i}/overhead_seconds`)])));
}

// ---- a plan that was rehearsed ----
const CATEGORY = { parameters: "backward", gradients: "communication", optimizer: "optimizer", activations: "forward", temporary: "waiting", communication: "transfer", input: "data" };
function texts(list) {
  return el("div", { style: "margin-bottom: 14px" }, table(list.titles.map((title, i) => [title, list.left.includes(i)]), list.rows));
}
function planned() {
  add(el("header", {}, el("h1", {}, R.plan.title), el("span", { class: "status" }, "predicted"), el("span", {}, R.plan.counts)));
  add(el("p", { class: "verdict" }, R.plan.sentences[0]), ...R.plan.sentences.slice(1).map((sentence) => el("p", { class: "note" }, sentence)));
  section("Plans", "The fastest that fits first; each with the interval in which 80 % of cases lie.");
  add(texts(R.plan.table));
  if (R.plan.limits.length) {
    section("What the step is made of");
    add(...R.plan.limits.map((sentence) => el("p", {}, sentence)));
  }
  for (const list of R.plan.costly) add(texts(list));
}
function memoryOverStep() {
  const memory = R.plan.memory;
  section("Memory over the step", memory.note);
  chart(page, "memory-of-step", 340, () => [Object.keys(memory.categories).map((name) => ({ type: "scatter", mode: "none", stackgroup: "one", name, x: memory.at,
    y: times(memory.categories[name], 1 / 1048576), line: { shape: "hv" }, fillcolor: colour(CATEGORY[name]), hovertemplate: `%{y:,.1f} MiB<extra>${name}</extra>` })),
    { hovermode: "x unified", xaxis: { title: { text: memory.axis } }, yaxis: { title: { text: "MiB of tensors" } } }]);
  add(el("p", {}), texts(memory.largest));
}
function drawAll() { return Promise.all(charts.map((draw) => draw())); }

if (R.plan) {
  planned(); timeline(); memoryOverStep(); stages();
  add(el("footer", {}, "meshwise plan"));
} else {
  head(); findings(); goodput(); attempts(); ranks(); timeline(); stages(); predicted(); series(); memoryByPhase(); collectives(); watching();
  add(el("footer", {}, "meshwise report ", shown("folder")));
}
drawAll().then(() => { document.documentElement.dataset.drawn = "yes"; });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
