// Behaviour of the pages: times in the reader's time zone, sections that refresh, logs that are streamed. Pages
// also work without this script. Text of tasks and logs becomes text nodes, never markup.
"use strict";

const REFRESH_MS = 2000; // minimum time between two refreshes
const RATE = 50; // maximum characters of pages a millisecond
const OLDEST_MS = 30000; // maximum age of a page
const TIMEOUT_MS = 15000; // of a request
const LINES = 5000; // maximum lines of a log in the page
const CHARACTERS = 2000000;
const LINE = 65536; // maximum characters of an incomplete line

// -- times ------------------------------------------------------------------------------------------------

function localize(part) {
  const today = new Date().toDateString();
  for (const time of part.querySelectorAll("time")) tell(time, today);
  if (part.matches("time")) tell(part, today);
}

function tell(time, today) {
  const when = new Date(time.dateTime);
  if (Number.isNaN(when.getTime())) return;
  time.title = time.dateTime;
  time.textContent = when.toDateString() === today
    ? when.toLocaleTimeString([], { hour12: false })
    : when.toLocaleString([], { hour12: false });
}

// -- signing in by a link -----------------------------------------------------------------------------------

// The code is in the fragment, so the browser sends it only in the form, and no log of addresses contains it. If the
// link is opened in a tab that already shows this page, only the fragment changes.
function signIn() {
  const form = document.querySelector("form[data-sign-in]");
  const found = /^#code=([A-Za-z0-9_-]+)$/.exec(location.hash);
  if (!form || !found) return;
  history.replaceState(null, "", location.pathname + location.search);
  form.elements.token.value = found[1];
  form.submit();
}

// -- sections that refresh ----------------------------------------------------------------------------------

const source = new Map(); // id of a section -> its markup as the server sent it
let looking = false;
let again = false; // a change was reported while a request was in flight
let looked = Date.now();
let due = 0;
let pause = REFRESH_MS;
let away = false;

function remember() {
  for (const part of document.querySelectorAll("[data-live]")) source.set(part.id, part.outerHTML);
}

async function ask() {
  const answer = await fetch(location.href, {
    redirect: "manual", headers: { Accept: "text/html" }, signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (answer.type === "opaqueredirect") location.reload();
  if (answer.status >= 500) throw new Error(`${answer.status}`);
  return answer.ok ? await answer.text() : "";
}

async function look() {
  due = 0;
  again = looking;
  if (looking || document.hidden) return;
  looking = true;
  looked = Date.now();
  let text = "";
  try {
    text = await ask();
    tellAway(false);
  } catch {
    tellAway(true);
  } finally {
    looking = false;
    if (again) soon();
  }
  if (!text) return;
  pause = Math.max(REFRESH_MS, text.length / RATE);
  renew(new DOMParser().parseFromString(text, "text/html"));
}

// Shows that the server does not answer and the page is outdated, until the server answers again.
function tellAway(gone) {
  if (away === gone) return;
  away = gone;
  const note = document.getElementById("away");
  const since = new Date().toLocaleTimeString([], { hour12: false });
  note.textContent = gone ? `No answer from the server since ${since}; trying again.` : "";
}

function soon() {
  if (!due) due = setTimeout(look, Math.max(0, looked + pause - Date.now()));
}

function renew(fresh) {
  for (const old of document.querySelectorAll("[data-live]")) {
    const part = fresh.getElementById(old.id);
    if (!part) continue;
    const markup = part.outerHTML;
    const focus = old.contains(document.activeElement) ? document.activeElement : null;
    if (source.get(old.id) === markup || (focus && focus.matches("input, select, textarea"))) continue;
    source.set(old.id, markup);
    for (const shown of old.querySelectorAll("details")) {
      const same = part.querySelector(`#${CSS.escape(shown.id)}`);
      if (same) same.open = shown.open;
    }
    const next = document.importNode(part, true);
    localize(next);
    old.replaceWith(next);
    if (focus) refocus(next, focus);
  }
  newAttempt(fresh);
}

function refocus(part, focus) {
  const target = focus.getAttribute("href");
  const same = focus.id
    ? document.getElementById(focus.id)
    : target && part.querySelector(`a[href="${CSS.escape(target)}"]`);
  if (same) same.focus({ preventScroll: true });
}

function follow(address) {
  let changes = null;
  const open = () => {
    changes = new EventSource(address);
    changes.onopen = soon; // the stream does not report changes since the page was made
    changes.addEventListener("change", soon);
    changes.onerror = soon;
  };
  document.addEventListener("visibilitychange", () => {
    if (changes) changes.close();
    changes = null;
    if (!document.hidden) { open(); soon(); }
  });
  addEventListener("pagehide", () => { if (changes) changes.close(); });
  setInterval(() => { if (away || Date.now() - looked >= OLDEST_MS) soon(); }, 1000);
  if (!document.hidden) open();
}

// -- logs -----------------------------------------------------------------------------------------------------

// As in text_filters.py: a newline, or the next escape, ends an unterminated sequence.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*(?:[@-~]|(?=[^ -~]))|\][^\x07\x1b\n]*(?:\x07|\x1b\\|(?=[\x1b\n]))|[PX^_][^\x1b\n]*(?:\x1b\\|(?=[\x1b\n]))|[ -/]*[0-OQ-WYZ\\`-~])/g;
const UNFINISHED = /\x1b[^\x1b\n]{0,4000}$/;
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;

function last(line) {
  if (!line.includes("\r")) return line;
  const parts = line.split("\r").filter((part) => part);
  return parts.length ? parts[parts.length - 1] : "";
}

// Text of a log as text nodes: blocks of complete lines, then the incomplete last line.
class Pane {
  constructor(pre) {
    const text = pre.textContent;
    const cut = text.lastIndexOf("\n") + 1;
    this.pre = pre;
    this.blocks = [];
    this.lines = 0;
    this.characters = 0;
    this.line = text.slice(cut);
    this.rest = "";
    this.tail = document.createTextNode(this.line);
    pre.replaceChildren(this.tail);
    if (cut) this.put(text.slice(0, cut));
  }

  put(text) {
    const node = document.createTextNode(text);
    const lines = text.split("\n").length - 1;
    this.pre.insertBefore(node, this.tail);
    this.blocks.push({ node, lines, length: text.length });
    this.lines += lines;
    this.characters += text.length;
    while (this.blocks.length > 1 && (this.lines > LINES || this.characters > CHARACTERS)) {
      const old = this.blocks.shift();
      old.node.remove();
      this.lines -= old.lines;
      this.characters -= old.length;
    }
  }

  add(text) {
    text = (this.rest + text).replace(ESCAPES, "");
    const open = UNFINISHED.exec(text);
    this.rest = open ? open[0] : "";
    if (open) text = text.slice(0, open.index);
    const lines = (this.line + text.replace(/\r\n/g, "\n").replace(CONTROLS, "")).split("\n");
    this.line = lines.pop();
    if (lines.length) this.put(`${lines.map(last).join("\n")}\n`);
    const shown = last(this.line);
    if (this.line.includes("\r")) this.line = this.line.endsWith("\r") ? `${shown}\r` : shown;
    if (this.line.length > LINE) {
      this.put(`${shown}\n`);
      this.line = "";
    }
    this.tail.data = last(this.line);
  }
}

let logStream = null;

function watchLog() {
  const pre = document.getElementById("log");
  if (!pre) return;
  const pane = new Pane(pre);
  const note = document.getElementById("log-note");
  const pause = document.getElementById("pause");
  const following = document.getElementById("follow");
  let place = `${pre.dataset.attempt}:${pre.dataset.offset}`;
  let stream = null;
  let over = false;

  const scroll = () => { if (following.checked) pre.scrollTop = pre.scrollHeight; };
  const close = () => { if (stream) stream.close(); stream = null; };
  const open = () => {
    close();
    if (over || document.hidden || pause.getAttribute("aria-pressed") === "true") return;
    const [attempt, offset] = place.split(":");
    stream = new EventSource(`${pre.dataset.stream}?attempt=${attempt}&offset=${offset}`);
    note.textContent = "Live.";
    stream.addEventListener("log", (message) => {
      place = message.lastEventId;
      pane.add(JSON.parse(message.data));
      scroll();
    });
    stream.addEventListener("end", () => {
      over = true;
      close();
      note.textContent = "The attempt is over.";
    });
    stream.onerror = () => {
      const closed = stream && stream.readyState === EventSource.CLOSED;
      note.textContent = closed ? "The stream has ended." : "Connecting…";
      if (closed) soon();
    };
    stream.onopen = () => { note.textContent = "Live."; };
  };

  pause.hidden = following.parentElement.hidden = false;
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Continue" : "Pause";
    if (paused) { close(); note.textContent = "Paused."; } else open();
  });
  following.addEventListener("change", scroll);
  pre.addEventListener("wheel", () => { unfollow(); }, { passive: true });
  pre.addEventListener("touchmove", () => { unfollow(); }, { passive: true });
  const unfollow = () => {
    following.checked = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 40;
  };
  const visible = () => { if (document.hidden) close(); else open(); };
  document.addEventListener("visibilitychange", visible);
  addEventListener("pagehide", close);
  logStream = { stop: () => { close(); document.removeEventListener("visibilitychange", visible); } };
  scroll();
  open();
}

// Shows the log of the task's next attempt once it has started, unless the reader has selected an attempt.
function newAttempt(fresh) {
  const old = document.getElementById("log-section");
  const next = fresh.getElementById("log-section");
  if (!old || !next || "pinned" in old.dataset || old.dataset.attempt === next.dataset.attempt) return;
  if (logStream) logStream.stop();
  logStream = null;
  const part = document.importNode(next, true);
  old.replaceWith(part);
  watchLog();
}

// -- start ----------------------------------------------------------------------------------------------------

remember();
localize(document.body);
signIn();
addEventListener("hashchange", signIn);
if (document.body.dataset.changes) follow(document.body.dataset.changes);
watchLog();
