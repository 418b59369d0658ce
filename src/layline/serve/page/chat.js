// A conversation with the model, streamed. It is kept in this page only.

const MOST_TOKENS = 1024;
const element = (id) => document.getElementById(id);

export function startChat() {
  const messages = [];
  let model = "";
  let running = null;

  function addLine(kind, who, text) {
    const log = element("log");
    const line = document.createElement("div");
    const name = document.createElement("b");
    const body = document.createElement("p");
    line.className = kind;
    name.textContent = who;
    body.textContent = text;
    line.append(name, body);
    log.append(line);
    log.scrollTop = log.scrollHeight;
    return body;
  }

  function append(body, text) {
    const log = element("log");
    // Who has scrolled up is reading.
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    body.append(text);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  function readEvent(text, body) {
    if (!text.startsWith("data: ") || text === "data: [DONE]") return null;
    const event = JSON.parse(text.slice(6));
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    append(body, choice?.delta?.content ?? "");
    return choice?.finish_reason ?? null;
  }

  async function answer(body, signal) {
    const response = await fetch(new URL("/v1/chat/completions", location.origin), {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model, messages, stream: true, max_completion_tokens: MOST_TOKENS }),
      signal,
    });
    if (!response.ok) {
      const found = await response.json().catch(() => null);
      throw new Error(found?.error?.message ?? `status ${response.status}`);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    let reason = null;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        if (reason === null) throw new Error("the answer broke off");
        return reason;
      }
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) reason = readEvent(event, body) ?? reason;
    }
  }

  function setRunning(controller) {
    running = controller;
    element("send").disabled = element("clear").disabled = controller !== null;
    element("stop").disabled = controller === null;
    element("log").setAttribute("aria-busy", String(controller !== null));
  }

  async function ask(event) {
    event.preventDefault();
    const box = element("text");
    const text = box.value.trim();
    if (!text || running !== null) return;
    box.value = "";
    messages.push({ role: "user", content: text });
    addLine("user", "You", text);
    const body = addLine("assistant", model, "");
    body.className = "writing";
    setRunning(new AbortController());
    try {
      const reason = await answer(body, running.signal);
      if (reason === "length") addLine("info", "", "cut off: the token limit or the context was reached");
    } catch (error) {
      if (error.name === "AbortError") addLine("info", "", "stopped");
      else addLine("error", "Error", error.message);
    }
    body.className = "";
    if (body.textContent) messages.push({ role: "assistant", content: body.textContent });
    else {
      // It was never answered, and would be part of every later question.
      messages.pop();
      body.parentElement.remove();
      if (box.value === "") box.value = text;
    }
    setRunning(null);
    box.focus();
  }

  element("chat").addEventListener("submit", ask);
  element("stop").addEventListener("click", () => running?.abort());
  element("clear").addEventListener("click", () => {
    messages.length = 0;
    element("log").replaceChildren();
    element("text").focus();
  });
  element("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      element("chat").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  return { use(name) { model = name; } };
}
