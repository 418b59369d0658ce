// Asks the server, and hands what it says to the parts of the page.
//
// Texts of the server, of the model and of people are set as textContent everywhere, never as HTML.

import { startChat } from "./chat.js";
import { drawLayer, drawMesh, drawPipeline } from "./drawing.js";
import { showNumbers } from "./live.js";

const PERIOD_MS = 1000;
const HIDDEN_MS = 5000;
const PATIENCE_MS = 5000;
const element = (id) => document.getElementById(id);

let started = null;
let lostSince = null;
const chat = startChat();

// The page's address can hold a password; the origin does not.
async function ask(path) {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const answer = await fetch(new URL(path, location.origin), { signal, cache: "no-store" });
  if (answer.status === 401) throw new Error("the key is not accepted; reload the page to give one");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

function say(text, kind) {
  // Only a change is read out.
  if (element("state").textContent !== text) element("state").textContent = text;
  element("state").className = kind;
}

function showState(numbers) {
  if (numbers.failure !== null) say(`failed: ${numbers.failure}`, "bad");
  else if (numbers.stopping) say("stopping: no new requests are taken", "warn");
  else say("ready", "good");
}

function row(list, name, value) {
  const term = document.createElement("dt");
  const text = document.createElement("dd");
  term.textContent = name;
  text.textContent = value;
  list.append(term, text);
}

const arrows = (text) => text.replaceAll("->", "→");

function cell(...texts) {
  const made = document.createElement("td");
  for (const text of texts) {
    const line = document.createElement("div");
    line.textContent = arrows(text);
    made.append(line);
  }
  return made;
}

function showLines(lines, legend) {
  const rows = lines.map((line) => {
    const made = document.createElement("tr");
    const name = document.createElement("th");
    const [before, after] = line.rows;
    name.scope = "row";
    name.textContent = line.is_boundary ? arrows(line.name) : `compute: ${line.name}`;
    name.title = line.reason;
    made.append(name, cell(`×${line.times}`), cell(before === after ? before : `${before} → ${after}`));
    made.append(cell(line.owed ?? "–"), cell(...(line.early.length ? line.early : ["–"])));
    made.append(cell(...(line.late.length ? line.late : ["–"])));
    return made;
  });
  element("lines").replaceChildren(...rows);
  const used = new Set(lines.flatMap((line) => line.rows));
  const meanings = Object.entries(legend).filter(([name]) => used.has(name));
  element("rows-legend").textContent = `Rows ${meanings.map((pair) => pair.join(": ")).join("; ")}.`;
}

function showGroups(mesh) {
  const choices = element("groups");
  choices.replaceChildren(choices.querySelector("legend"));
  choices.hidden = mesh.groups.length === 0;
  const pick = (group) => {
    element("mesh").replaceChildren(drawMesh(mesh, group));
    element("groups-text").textContent = group === null
      ? "One rank holds all of it: nothing is shared."
      : `${group.name}: ${group.groups.map((ranks) => `{${ranks.join(" ")}}`).join(" ")}`;
  };
  const smallest = (a, b) => a.groups[0].length - b.groups[0].length;
  // Of the smallest groups the innermost: it shares the most.
  const first = [...mesh.groups].reverse().sort(smallest)[0] ?? null;
  for (const group of mesh.groups) {
    const label = document.createElement("label");
    const radio = document.createElement("input");
    radio.type = "radio";
    radio.name = "group";
    radio.checked = group === first;
    radio.addEventListener("change", () => pick(group));
    label.append(radio, ` ${group.name}`);
    choices.append(label);
  }
  pick(first);
}

function showPlan(plan) {
  document.title = `${plan.model} · Layline`;
  element("model").textContent = plan.model;
  const about = element("about");
  about.replaceChildren();
  for (const [name, value] of Object.entries(plan.facts ?? {})) row(about, name, value);
  if (plan.mesh) {
    element("mesh-text").textContent = `${plan.facts.mesh}. A rank, and below it its place: attention DP · CP · TP.`;
    showGroups(plan.mesh);
    element("pipeline").replaceChildren(drawPipeline(plan.pipeline));
    element("layer").replaceChildren(drawLayer(plan.lines));
    showLines(plan.lines, plan.legend);
  }
  element("chat-section").hidden = !plan.can_chat;
  chat.use(plan.model);
}

function showLost(error) {
  lostSince ??= new Date();
  const why = error.name === "TimeoutError" ? "it does not answer" : error.message;
  say(`no answer from the server since ${lostSince.toLocaleTimeString()} (${why}); trying again`, "bad");
  document.body.classList.add("stale");
}

async function refresh() {
  try {
    const numbers = await ask("/status.json");
    if (numbers.started !== started) {
      showPlan(await ask("/plan.json"));
      started = numbers.started;
    }
    lostSince = null;
    document.body.classList.remove("stale");
    showState(numbers);
    showNumbers(numbers);
  } catch (error) {
    showLost(error);
  }
  setTimeout(refresh, document.hidden ? HIDDEN_MS : PERIOD_MS);
}

refresh();
