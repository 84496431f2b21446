"use strict";
// Charts and events of the report. Texts of runs become text nodes or chart labels, never HTML:
// plotly reads a few tags in labels, so `plain` takes their brackets away.
const REPORT = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#1f77b4", "#d6452c", "#2a9d57", "#8f5bbd", "#c98a12", "#16a2b8", "#d1589d", "#6b7280"];
const PHASE_COLOURS = [...COLOURS, "#9ecae9", "#f2b5a7", "#a6d9b6", "#cdb4e3", "#ecd28b", "#9fdbe4", "#efb7d4", "#c3c8d0"];
const PANELS = [
  ["Reward model: loss", ["rm/loss"]], ["Reward model: right pairs", ["rm/accuracy", "val/accuracy"]],
  ["Reward model: margin", ["rm/margin"]],
  ["Fine-tuning: loss (nats a token)", ["sft/loss"]], ["Validation loss", ["val/loss"]],
  ["Score", ["critic/score/mean", "val/score/mean"]], ["Rewards", ["critic/rewards/mean"]],
  ["Policy moved (KL, nats)", ["actor/ppo_kl"]], ["KL to the reference (nats)", ["actor/kl_loss"]],
  ["Clipped share", ["actor/pg_clipfrac"]], ["Entropy (nats)", ["actor/entropy"]],
  ["Policy loss", ["actor/pg_loss"]], ["Value loss", ["critic/vf_loss"]],
  ["Explained variance", ["critic/vf_explained_var"]],
  ["Gradient norms", ["actor/grad_norm", "critic/grad_norm"]], ["Learning rates", ["actor/lr", "critic/lr"]],
  ["Response length (tokens)", ["response_length/mean", "response_length/max"]],
  ["Cut responses", ["response_length/clip_ratio"]],
  ["Tokens a second, all ranks", ["perf/tokens_per_s"]],
  ["Share of the device's peak (MFU)", ["perf/mfu/actor", "perf/mfu/critic"]],
];
const MISMATCH = [
  ["Difference of log-probs, mean (nats)", ["rollout/log_prob_diff_mean"]],
  ["Difference of log-probs, largest (nats)", ["rollout/log_prob_diff_max"]],
  ["KL of trainer and engine, k3 (nats)", ["rollout/k3_kl"]],
  ["Share of tokens over 0.1 nats apart", ["rollout/log_prob_diff_over_0.1"]],
  ["Effective sample size", ["rollout/eff_sample_size_token", "rollout/eff_sample_size_sequence"]],
  ["Policy moved in the update (KL, nats)", ["actor/ppo_kl"]],
];
const QUIET_KINDS = new Set(["saved", "pushed", "exported", "profiled", "epoch_over"]);
const DASHES = ["solid", "dot", "dash"];
const CONFIG = {displayModeBar: false, responsive: true}; // drag zooms in, a double click out

const byId = (id) => document.getElementById(id);
const plain = (text) => String(text).replaceAll("<", "\u2039").replaceAll(">", "\u203a");

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function options(select, values, labels = values) {
  select.replaceChildren(...values.map((value, i) => element("option", labels[i], {value})));
}

// An exponential mean that starts without a bias: weights alpha^0, alpha^1 ... over their sum.
function smooth(values, alpha) {
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = total * alpha + value;
    weight = weight * alpha + 1;
    return total / weight;
  });
}

function layout(title, more = {}) {
  return {
    title: {text: plain(title), font: {size: 13}, x: 0.02, xanchor: "left"}, margin: {l: 52, r: 14, t: 34, b: 56},
    hovermode: "closest", showlegend: true, legend: {orientation: "h", y: -0.2, yanchor: "top", font: {size: 10}},
    xaxis: {title: {text: "step", font: {size: 10}, standoff: 2}}, font: {size: 11}, ...more,
  };
}

function curveTraces(names) {
  const alpha = Number(byId("smoothing").value), traces = [];
  REPORT.runs.forEach((run, r) => names.forEach((name, n) => {
    if (!(name in run.metrics)) return;
    const kept = run.steps.map((step, i) => [step, run.metrics[name][i]]).filter(([, y]) => y !== null);
    const x = kept.map(([step]) => step), y = kept.map(([, value]) => value);
    const label = plain(REPORT.runs.length > 1 ? `${run.name} ${name}` : name);
    const line = {color: COLOURS[r % COLOURS.length], dash: DASHES[n % DASHES.length], width: 1.6};
    if (alpha > 0) {
      traces.push({x, y, mode: "lines", line: {...line, width: 1}, opacity: 0.25, hoverinfo: "skip", showlegend: false});
    }
    traces.push({x, y: smooth(y, alpha), customdata: y, name: label, line, mode: kept.length < 40 ? "lines+markers" : "lines",
      marker: {size: 4}, hovertemplate: "step %{x}: %{customdata:.5g}<extra>" + label + "</extra>"});
  }));
  return traces;
}

// Marks at the top of a chart, with a line down where there are few enough to be read.
function eventParts() {
  if (!byId("show-events").checked) return {traces: [], shapes: []};
  const traces = [], shapes = [];
  REPORT.runs.forEach((run, r) => {
    const shown = run.events.filter((e) => e.step !== null && !QUIET_KINDS.has(e.kind));
    if (!shown.length) return;
    const color = COLOURS[r % COLOURS.length];
    traces.push({x: shown.map((e) => e.step), y: shown.map(() => 1), yaxis: "y2", mode: "markers", name: "events",
      marker: {symbol: "triangle-down", size: 9, color, line: {color: "#1d2733", width: 1}}, showlegend: false,
      text: shown.map((e) => plain(`step ${e.step}, ${e.kind}: ${e.text}`.slice(0, 160))), hoverinfo: "text"});
    for (const e of shown.slice(-60)) {
      shapes.push({type: "line", x0: e.step, x1: e.step, yref: "paper", y0: 0, y1: 1, line: {color, width: 1, dash: "dot"}, opacity: 0.5});
    }
  });
  return {traces, shapes};
}

function drawCurve(chart) {
  const {traces, shapes} = eventParts();
  const second = {overlaying: "y", range: [0, 1.02], visible: false, fixedrange: true};
  Plotly.react(chart.box, [...curveTraces(chart.names), ...traces], layout(chart.title, {shapes, yaxis2: second}), CONFIG);
}

const curves = [];

function addCurves(grid, panels) {
  for (const [title, names] of panels) {
    if (!REPORT.runs.some((run) => names.some((name) => (run.metrics[name] || []).some((y) => y !== null)))) continue;
    const box = element("div", undefined, {class: "chart"});
    grid.append(box);
    curves.push({box, title, names});
  }
}

function drawMetric() {
  const name = byId("metric").value, box = byId("metric-grid").firstChild;
  const chart = {box, title: name, names: [name]};
  curves.splice(curves.findIndex((c) => c.box === box), 1, chart);
  drawCurve(chart);
}

function drawTime() {
  const run = REPORT.runs[Number(byId("run").value)];
  const average = (values) => values.reduce((sum, v) => sum + (v || 0), 0);
  const phases = Object.keys(run.metrics).filter((n) => n.startsWith("timing_s/") && n !== "timing_s/step")
    .filter((n) => average(run.metrics[n]) > 0).sort((a, b) => average(run.metrics[b]) - average(run.metrics[a]));
  const traces = phases.map((name, i) => ({type: "bar", marker: {color: PHASE_COLOURS[i % PHASE_COLOURS.length]}, x: run.steps, y: run.metrics[name], name: plain(name.slice(9)),
    hovertemplate: "step %{x}: %{y:.3g} s<extra>" + plain(name.slice(9)) + "</extra>"}));
  Plotly.react(byId("time-grid").firstChild, traces,
    layout(`${run.name}: seconds by phase, stacked`, {barmode: "stack", bargap: 0.1, yaxis: {title: {text: "s"}}}), CONFIG);
}

function drawSpread() {
  const run = REPORT.runs[Number(byId("run").value)], grid = byId("spread-grid");
  byId("spread-text").textContent = run.num_read
    ? `${run.name}: shares of the samples in rollouts/ (rank 0's, up to trainer.rollouts_per_step a step; ${run.num_read} were read).`
    : `${run.name}: no samples are in rollouts/.`;
  for (const box of grid.children) Plotly.purge(box);
  grid.replaceChildren();
  for (const [name, title] of [["score", "Scores"], ["response_tokens", "Response lengths (tokens)"]]) {
    const found = run.histograms[name];
    if (!found) continue;
    const box = element("div", undefined, {class: "chart"});
    grid.append(box);
    const middles = found.edges.slice(1).map((edge, i) => (edge + found.edges[i]) / 2);
    const z = middles.map((_, bin) => found.shares.map((shares) => shares[bin]));
    Plotly.newPlot(box, [{type: "heatmap", x: found.steps, y: middles, z, zmin: 0, colorscale: [[0, "#ffffff"], [1, "#1f5fa8"]],
      hovertemplate: "step %{x}, about %{y:.4g}: %{z:.1%} of the samples<extra></extra>"}], layout(title, {showlegend: false}), CONFIG);
  }
}

function drawEvents() {
  const kind = byId("event-kind").value, rows = [];
  for (const run of REPORT.runs) {
    for (const e of run.events) {
      if (kind === "all" || e.kind === kind || (kind === "all but routine ones" && !QUIET_KINDS.has(e.kind))) {
        const row = element("tr");
        row.append(...[run.name, e.step === null ? "" : e.step, e.kind, e.text, e.time].map((text) => element("td", text)));
        rows.push(row);
      }
    }
  }
  byId("event-rows").replaceChildren(...rows);
  byId("event-count").textContent = `${rows.length} events`;
}

function drawHeader() {
  byId("runs").replaceChildren(...REPORT.runs.map((run, r) => {
    const box = element("div", undefined, {class: "run"});
    const name = element("b", run.name);
    name.style.setProperty("--colour", COLOURS[r % COLOURS.length]);
    box.append(name, element("small", `${run.path}: ${run.state}`), ...run.notes.map((note) => element("small", note, {class: "note"})));
    return box;
  }));
  byId("footer").textContent = `Made ${REPORT.made} by megappo ${REPORT.version}.`;
}

function startCharts() {
  drawHeader();
  options(byId("run"), REPORT.runs.map((_, i) => String(i)), REPORT.runs.map((run) => run.name));
  byId("run-label").hidden = REPORT.runs.length < 2;
  addCurves(byId("curve-grid"), PANELS);
  addCurves(byId("mismatch-grid"), MISMATCH);
  byId("time-grid").append(element("div", undefined, {class: "chart"}));
  const names = [...new Set(REPORT.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  options(byId("metric"), names);
  if (names.length) {
    const box = element("div", undefined, {class: "chart"});
    byId("metric-grid").append(box);
    curves.push({box, title: names[0], names: [names[0]]});
  }
  const kinds = [...new Set(REPORT.runs.flatMap((run) => run.events.map((e) => e.kind)))].sort();
  options(byId("event-kind"), ["all but routine ones", "all", ...kinds]);
  const redraw = () => {
    byId("smoothing-value").textContent = byId("smoothing").value;
    curves.forEach(drawCurve);
  };
  byId("smoothing").addEventListener("input", redraw);
  byId("show-events").addEventListener("change", redraw);
  byId("metric").addEventListener("change", drawMetric);
  byId("event-kind").addEventListener("change", drawEvents);
  byId("run").addEventListener("change", () => { drawTime(); drawSpread(); });
  redraw();
  drawTime();
  drawSpread();
  drawEvents();
}

startCharts();
