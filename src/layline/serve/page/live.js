// The numbers that change: rates over the last second, and totals.

import { node } from "./drawing.js";

const KEPT = 90;
const element = (id) => document.getElementById(id);
const rates = [];
let before = null;
let shownParts = "";

function show(id, text) { element(id).textContent = text; }

export function duration(seconds) {
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const ms = seconds * 1000;
  if (ms >= 1) return `${ms.toFixed(ms >= 100 ? 0 : 1)} ms`;
  return `${(ms * 1000).toFixed(0)} µs`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes >= 100 || unit === 0 ? bytes.toFixed(0) : bytes.toFixed(1)} ${units[unit]}`;
}

const count = (number) => number.toLocaleString("en");
const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

// Seconds a piece since the last look, or since the start where nothing was added.
function mean(now, earlier) {
  const added = now.count - (earlier?.count ?? 0);
  if (added > 0) return (now.seconds - (earlier?.seconds ?? 0)) / added;
  return now.count > 0 ? now.seconds / now.count : null;
}

function drawRate(rate) {
  rates.push(rate);
  if (rates.length > KEPT) rates.shift();
  const most = Math.max(...rates, 1e-9);
  const step = 240 / (KEPT - 1);
  const left = 240 - (rates.length - 1) * step;
  const points = rates.map((value, at) => `${(left + at * step).toFixed(1)},${(46 - (value / most) * 42).toFixed(1)}`);
  const line = element("rate-line");
  line.replaceChildren(
    node("polygon", { class: "area", points: `${left.toFixed(1)},48 ${points.join(" ")} 240,48` }),
    node("polyline", { class: "line", points: points.join(" ") }),
  );
  line.setAttribute("aria-label", `tokens per second: now ${rate.toFixed(1)}, at most ${most.toFixed(1)} lately`);
}

function showRate(numbers, now) {
  if (before !== null && before.numbers.started === numbers.started) {
    const seconds = (now - before.at) / 1000;
    const rate = (numbers.generated_tokens - before.numbers.generated_tokens) / seconds;
    show("rate", rate >= 100 ? rate.toFixed(0) : rate.toFixed(1));
    drawRate(rate);
  }
  show("rate-note", `${count(numbers.generated_tokens)} generated, ${count(numbers.prompt_tokens)} of prompts`);
}

function showCache(numbers) {
  const all = Math.max(numbers.kv_blocks, 1);
  const used = numbers.kv_blocks_used / all;
  const idle = numbers.kv_blocks_idle / all;
  const [first, second] = element("kv-bar").children;
  first.style.width = `${used * 100}%`;
  second.style.width = `${idle * 100}%`;
  element("kv-bar").setAttribute("aria-valuenow", (used * 100).toFixed(1));
  show("kv", percent(used));
  const bytes = numbers.block_bytes ? ` · ${size(numbers.kv_blocks_used * numbers.block_bytes)} of ${size(all * numbers.block_bytes)}` : "";
  show("kv-note", `${count(numbers.kv_blocks_used)} of ${count(numbers.kv_blocks)} blocks used${bytes}; ${count(numbers.kv_blocks_idle)} kept for later prompts`);
}

function showParts(numbers, earlier) {
  const names = Object.keys(numbers.parts);
  const found = names.map((name) => [name, mean(numbers.parts[name], earlier?.parts[name])]);
  const there = found.filter(([, seconds]) => seconds !== null);
  const key = there.map(([name]) => name).join();
  if (key !== shownParts) {
    shownParts = key;
    element("parts").replaceChildren(...there.map(([name]) => {
      const piece = document.createElement("i");
      piece.className = `part-${names.indexOf(name)}`;
      return piece;
    }));
    element("parts-legend").replaceChildren(...there.map(([name]) => {
      const entry = document.createElement("li");
      entry.className = `part-${names.indexOf(name)}`;
      entry.append(document.createElement("span"), document.createElement("b"), document.createElement("span"));
      entry.children[1].textContent = name;
      return entry;
    }));
  }
  const total = there.reduce((sum, [, seconds]) => sum + seconds, 0);
  there.forEach(([, seconds], at) => {
    element("parts").children[at].style.width = `${total > 0 ? (seconds / total) * 100 : 0}%`;
    element("parts-legend").children[at].children[2].textContent = duration(seconds);
  });
}

function showStages(numbers, earlier) {
  for (const [stage, found] of Object.entries(numbers.stages)) {
    const seconds = mean(found, earlier?.stages[stage]);
    const place = element(`stage-time-${stage}`);
    if (place !== null && seconds !== null) place.textContent = duration(seconds);
  }
}

export function showNumbers(numbers) {
  const now = performance.now();
  const earlier = before?.numbers.started === numbers.started ? before.numbers : null;
  showRate(numbers, now);
  show("running", count(numbers.running));
  show("running-note", "hold cache blocks");
  show("waiting", count(numbers.waiting));
  show("waiting-note", "in the queue");
  showCache(numbers);
  const looked = numbers.prefix_lookup_tokens;
  show("hits", looked ? percent(numbers.prefix_hit_tokens / looked) : "–");
  show("hits-note", `${count(numbers.prefix_hit_tokens)} of ${count(looked)} prompt tokens`);
  show("preemptions", count(numbers.preemptions));
  const first = mean(numbers.first_token, null);
  show("first", first === null ? "–" : duration(first));
  show("first-note", "on average");
  const ends = numbers.finished;
  show("done", count((ends.stop ?? 0) + (ends.length ?? 0)));
  show("done-note", `${count(ends.abort ?? 0)} given up, ${count(ends.error ?? 0)} failed`);
  const step = mean(numbers.step, earlier?.step);
  show("step", step === null ? "–" : duration(step));
  showParts(numbers, earlier);
  showStages(numbers, earlier);
  before = { at: now, numbers };
}
