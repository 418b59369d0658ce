"use strict";

// Every text from the server or the user is set as textContent, never as HTML.
const element = (id) => document.getElementById(id);
const messages = [];
let before = null;
let model = "";
let running = null;

function show(id, text) { element(id).textContent = text; }

function showAbout(about) {
  const list = element("about");
  list.replaceChildren();
  for (const [name, value] of Object.entries(about)) {
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = String(value);
    list.append(term, text);
  }
}

function showNumbers(found) {
  const bad = found.failure !== null || found.stopping;
  model = found.model;
  show("model", found.model);
  show("state", found.failure ?? (found.stopping ? "stopping: no new requests are taken" : "ready"));
  element("state").className = bad ? "bad" : "";
  showAbout({ ...found.about, "context": `${found.max_model_len} tokens` });
  show("running", found.running);
  show("waiting", found.waiting);
  show("generated", found.generated_tokens);
  const share = found.kv_blocks ? found.kv_blocks_used / found.kv_blocks : 0;
  element("kv").value = share;
  show("kv-text", `${found.kv_blocks_used} of ${found.kv_blocks} blocks`);
  const now = performance.now();
  if (before !== null) {
    const rate = (found.generated_tokens - before.tokens) / ((now - before.at) / 1000);
    show("rate", rate.toFixed(1));
  }
  before = { at: now, tokens: found.generated_tokens };
  element("chat-section").hidden = !found.can_chat;
}

async function refresh() {
  try {
    const answer = await fetch("/status.json");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    showNumbers(await answer.json());
  } catch (error) {
    show("state", `no answer from the server (${error.message})`);
    element("state").className = "bad";
  }
  setTimeout(refresh, 2000);
}

function addLine(kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  element("log").append(line);
  return line;
}

function readEvent(text, line) {
  if (!text.startsWith("data: ") || text === "data: [DONE]") return;
  const event = JSON.parse(text.slice(6));
  if (event.error) throw new Error(event.error.message);
  line.textContent += event.choices[0]?.delta?.content ?? "";
}

async function answer(line, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, messages, stream: true, max_completion_tokens: 512 }),
    signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    events.forEach((event) => readEvent(event, line));
  }
}

async function ask(event) {
  event.preventDefault();
  const text = element("text").value.trim();
  if (!text || running !== null) return;
  element("text").value = "";
  messages.push({ role: "user", content: text });
  addLine("user", text);
  const line = addLine("assistant", "");
  running = new AbortController();
  element("send").disabled = true;
  element("stop").disabled = false;
  try {
    await answer(line, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") addLine("error", error.message);
  }
  if (line.textContent) messages.push({ role: "assistant", content: line.textContent });
  else messages.pop();
  running = null;
  element("send").disabled = false;
  element("stop").disabled = true;
}

element("chat").addEventListener("submit", ask);
element("stop").addEventListener("click", () => running?.abort());
refresh();
