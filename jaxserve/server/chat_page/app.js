// The chat page of jaxserve. All that the model writes is put in as text, never as HTML.
"use strict";

const POLL_MS = 2000;
const $ = (id) => document.getElementById(id);
const log = $("log"), prompt = $("prompt");
const history = []; // {role, content}, without the system prompt
let answering = null; // the AbortController of the answer that is being written

// ------------------------------------------------------------------------------------------------------------ requests

function headers(more = {}) {
  const key = $("key").value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The server's own words about a failed request, or the best there is. */
async function problem(response) {
  const body = await response.text();
  let message = body.slice(0, 300);
  try {
    message = JSON.parse(body).error.message ?? message;
  } catch { /* not JSON: a proxy answered */ }
  if (response.status === 401 || response.status === 403) {
    $("settings").open = true;
    $("key").focus();
  }
  const later = response.headers.get("Retry-After");
  return `${response.status} ${message || response.statusText}${later ? ` (try again in ${later} s)` : ""}`;
}

/** The JSON objects of a stream of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    buffer += value ?? "";
    const lines = buffer.split(/\r?\n/);
    buffer = done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? data);
      yield event;
    }
    if (done) throw new Error("the connection ended before the answer did");
  }
}

function request() {
  const system = $("system").value.trim();
  const body = {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  return body;
}

// ------------------------------------------------------------------------------------------------------- conversation

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Adds text (a string, never read as HTML) or elements, and follows them unless the reader has scrolled away. */
function write(target, ...what) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  target.append(...what);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function thoughtsOf(item) {
  let thoughts = item.querySelector(".thoughts .text");
  if (!thoughts) {
    const box = element("details", "thoughts");
    box.open = true;
    thoughts = element("div", "text");
    box.append(element("summary", "", "Thinking"), thoughts);
    item.prepend(box);
  }
  return thoughts;
}

/** Tokens, speed and how it ended. Without the server's count (a stopped answer), pieces stand for tokens. */
function facts(run, stopped) {
  const tokens = run.usage?.completion_tokens ?? run.pieces;
  const seconds = (run.last - run.first) / 1000;
  const parts = [`${run.usage ? "" : "about "}${tokens} token${tokens === 1 ? "" : "s"}`];
  if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (run.first) parts.push(`first after ${Math.round(run.first - run.start)} ms`);
  if (stopped) parts.push("stopped");
  else if (run.reason === "length") parts.push("cut off at the token limit");
  return parts.join(" · ");
}

async function receive(item, text, run, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(request()), signal,
  });
  if (!response.ok) throw new Error(await problem(response));
  for await (const event of events(response.body)) {
    run.usage = event.usage ?? run.usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    run.reason = choice.finish_reason ?? run.reason;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (!content && !thought) continue;
    run.last = performance.now();
    run.first ||= run.last;
    run.pieces += 1;
    if (thought) write(thoughtsOf(item), thought);
    if (content) write(text, content);
    $("speed").textContent = run.pieces > 1 ? `${((run.pieces - 1) * 1000 / (run.last - run.first)).toFixed(1)} tokens/s` : "";
  }
}

async function answer(question) {
  const mine = element("li", "message user");
  mine.append(element("div", "text", question));
  const item = element("li", "message assistant busy"), text = element("div", "text");
  item.append(text);
  write(log, mine, item);
  log.scrollTop = log.scrollHeight;
  history.push({ role: "user", content: question });
  const run = { start: performance.now(), first: 0, last: 0, pieces: 0 };
  answering = new AbortController();
  busy(true);
  let error = null;
  try {
    await receive(item, text, run, answering.signal);
  } catch (thrown) {
    error = thrown;
  }
  const stopped = error?.name === "AbortError";
  item.classList.remove("busy");
  if (run.pieces) {
    history.push({ role: "assistant", content: text.textContent });
    write(item, element("p", "facts", facts(run, stopped)));
  } else { // nothing was answered: the question goes back where it can be sent again
    history.pop();
    item.remove();
    if (error) {
      mine.remove();
      if (!prompt.value) prompt.value = question;
    }
  }
  if (error && !stopped) {
    const alert = element("li", "error", error instanceof TypeError ? "The server cannot be reached." : error.message);
    alert.setAttribute("role", "alert");
    write(log, alert);
  }
  answering = null;
  busy(false);
  $("speed").textContent = "";
  $("status").textContent = stopped ? "Stopped." : "";
  grow();
}

function busy(is) {
  log.setAttribute("aria-busy", String(is));
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("clear").disabled = is;
  if (!is && document.activeElement === document.body) prompt.focus();
}

/** The message box is as high as its text. */
function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function send() {
  const question = prompt.value.trim();
  if (!question || answering) return;
  if (!$("sampling").checkValidity()) {
    $("settings").open = true;
    $("sampling").reportValidity();
    return;
  }
  for (const old of log.querySelectorAll(".error")) old.remove();
  prompt.value = "";
  grow();
  answer(question);
}

// -------------------------------------------------------------------------------------------------------- server's load

/** Sum and largest value of a metric over its labels, whatever the prefix of its name; null if it is not there. */
function metric(text, name) {
  const values = [...text.matchAll(new RegExp(`^\\w+:${name}(?:\\{.*\\})? ([-+.\\de]+)`, "gim"))].map((m) => Number(m[1]));
  return values.length ? { sum: values.reduce((a, b) => a + b), max: Math.max(...values) } : null;
}

async function poll() {
  try {
    if (!document.hidden) {
      const response = await fetch("metrics", { headers: headers(), cache: "no-store" });
      if (!response.ok) throw new Error(response.statusText);
      const text = await response.text();
      $("running").textContent = metric(text, "num_requests_running")?.sum ?? "–";
      $("waiting").textContent = metric(text, "num_requests_waiting")?.sum ?? "–";
      const used = metric(text, "kv_cache_usage_perc")?.max;
      $("cache").value = used ?? 0;
      $("cache").textContent = $("cache-text").textContent = used === undefined ? "–" : `${(used * 100).toFixed(0)} %`;
      $("meters").classList.remove("stale");
      if (!$("model").value) await models();
    }
  } catch {
    $("meters").classList.add("stale");
  }
  setTimeout(poll, POLL_MS);
}

async function models() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await problem(response));
  const names = (await response.json()).data.map((model) => model.id);
  if (names.length) $("model").replaceChildren(...names.map((name) => new Option(name, name)));
}

// --------------------------------------------------------------------------------------------------------------- events

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("sampling").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => { answering?.abort(); prompt.focus(); });
$("clear").addEventListener("click", () => { history.length = 0; log.replaceChildren(); prompt.focus(); });
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") answering?.abort(); });
document.addEventListener("visibilitychange", () => { if (document.hidden) $("meters").classList.add("stale"); });
$("key").addEventListener("change", () => sessionStorage.setItem("jaxserve-api-key", $("key").value));

$("key").value = sessionStorage.getItem("jaxserve-api-key") ?? "";
$("settings").open = matchMedia("(min-width: 44.01rem)").matches;
poll();
