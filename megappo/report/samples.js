"use strict";
// Samples of a run: steps side by side or a list, with filters. Texts become text nodes alone.
const PAGE_SIZE = 20;
const RED_AT = -5; // nats
const samplesUi = {steps: [], shown: PAGE_SIZE};

const currentRun = () => REPORT.runs[Number(byId("run").value)];
const numberIn = (id, otherwise) => (byId(id).value === "" ? otherwise : Number(byId(id).value));

function matches(sample) {
  const text = byId("text").value.toLowerCase(), source = byId("source").value;
  return sample.score >= numberIn("score-low", -Infinity) && sample.score <= numberIn("score-high", Infinity)
    && (source === "all" || String(sample.data_source) === source)
    && (byId("row").value === "" || sample.row === Number(byId("row").value))
    && (text === "" || sample.response.toLowerCase().includes(text) || sample.prompt.toLowerCase().includes(text));
}

function tokens(sample) {
  return sample.tokens.map((text, i) => {
    const found = sample.log_probs[i];
    const made = element("span", text, {class: "token", title: found === null ? "no log-prob" : `${found} nats`});
    if (found !== null) made.style.background = `rgba(214,69,44,${(0.8 * Math.min(1, found / RED_AT)).toFixed(3)})`;
    return made;
  });
}

function card(sample) {
  const box = element("div", undefined, {class: "sample", "data-step": sample.step, "data-score": sample.score});
  const head = element("div", undefined, {class: "head"});
  const row = element("button", `row ${sample.row}`, {class: "link", title: "this prompt alone"});
  row.addEventListener("click", () => { byId("row").value = sample.row; drawSamples(); });
  head.append(element("span", `score ${sample.score}`, {class: "score"}), element("span", `step ${sample.step}`), row,
    element("span", sample.data_source), element("span", `${sample.response_tokens} tokens, ${sample.finish_reason}`),
    element("span", `right: ${sample.ground_truth}`));
  const response = element("pre", undefined, {class: "response"});
  response.append(...(sample.tokens.length ? tokens(sample) : [document.createTextNode(sample.response)]));
  box.append(head, element("pre", sample.prompt, {class: "prompt"}), response);
  if (sample.tokens.length && sample.tokens.length < sample.response_tokens) {
    const rest = element("details");
    rest.append(element("summary", `${sample.response_tokens - sample.tokens.length} more tokens without log-probs; the whole text`),
      element("pre", sample.response));
    box.append(rest);
  }
  return box;
}

function fill(column, samples) {
  column.append(...samples.slice(0, samplesUi.shown).map(card));
  if (samples.length > samplesUi.shown) {
    const more = element("button", `${samples.length - samplesUi.shown} more`);
    more.addEventListener("click", () => { samplesUi.shown += PAGE_SIZE; drawSamples(); });
    column.append(more);
  }
  if (!samples.length) column.append(element("p", "no sample matches", {class: "quiet"}));
}

function stepColumn(steps, i, samples) {
  const column = element("div", undefined, {class: "column"}), choice = element("select", undefined, {class: "step-choice"});
  options(choice, steps.map(String), steps.map((step) => `step ${step}`));
  choice.value = String(samplesUi.steps[i]);
  choice.addEventListener("change", () => { samplesUi.steps[i] = Number(choice.value); drawSamples(); });
  column.append(choice);
  fill(column, samples.filter((sample) => sample.step === samplesUi.steps[i]));
  return column;
}

function drawSamples() {
  const run = currentRun(), steps = [...new Set(run.samples.map((sample) => sample.step))];
  const sideBySide = byId("view").value === "columns", area = byId("sample-columns");
  byId("step-range").hidden = sideBySide;
  let found = run.samples.filter(matches);
  area.replaceChildren();
  if (sideBySide) {
    area.append(...samplesUi.steps.map((_, i) => stepColumn(steps, i, found)));
  } else {
    const low = numberIn("step-low", -Infinity), high = numberIn("step-high", Infinity);
    found = found.filter((sample) => sample.step >= low && sample.step <= high);
    const column = element("div", undefined, {class: "column"});
    area.append(column);
    fill(column, found);
  }
  byId("sample-count").textContent = `${run.name}: ${found.length} of ${run.samples.length} samples match.`;
}

// First, middle and last step of the run that the panels are of.
function chooseRun() {
  const run = currentRun(), steps = [...new Set(run.samples.map((sample) => sample.step))];
  const wanted = [0, Math.floor((steps.length - 1) / 2), steps.length - 1].filter((i) => i >= 0);
  samplesUi.steps = [...new Set(wanted)].map((i) => steps[i]);
  samplesUi.shown = PAGE_SIZE;
  options(byId("source"), ["all", ...new Set(run.samples.map((sample) => String(sample.data_source)))]);
  drawSamples();
}

for (const id of ["view", "source", "score-low", "score-high", "text", "row", "step-low", "step-high"]) {
  const event = byId(id).tagName === "SELECT" ? "change" : "input";
  byId(id).addEventListener(event, () => { samplesUi.shown = PAGE_SIZE; drawSamples(); });
}
byId("run").addEventListener("change", chooseRun);
chooseRun();
