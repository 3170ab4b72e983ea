"use strict";
// The dashboard: one stream of states, drawn into the page that index.html lays out. Text goes in as text, never as HTML.

const $ = (id) => document.getElementById(id);
const state = { last: null, selected: null, line: null, key: sessionStorage.getItem("kvferry-key") || "", paused: false, rate: [] };

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const setData = (node, name, value) => { if (node.dataset[name] !== value) node.dataset[name] = value; };

// Rows keep their nodes from one state to the next, so that focus and selection stay where they are.
function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = old.get(key);
    if (node) old.delete(key);
    else { node = create(item); node.dataset.key = key; }
    if (node !== at) parent.insertBefore(node, at); else at = at.nextElementSibling;
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}

// ---- numbers ----
const count = (n) => (n === null || n === undefined ? "–" : Number(n).toLocaleString("en"));
function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 60000) return (value / 60000).toFixed(1) + " min";
  if (value >= 10000) return (value / 1000).toFixed(1) + " s";
  if (value >= 1000) return (value / 1000).toFixed(2) + " s";
  return value.toFixed(value < 10 ? 2 : 1) + " ms";
}
function bytes(value) {
  if (!value) return "0 B";
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
  const scaled = value / 1000 ** power;
  return scaled.toFixed(power && scaled < 100 ? 1 : 0) + " " + units[power];
}

// ---- the theme ----
const THEMES = ["auto", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("kvferry-theme") || "auto";
function showTheme() {
  document.documentElement.dataset.theme = theme === "auto" ? (prefersDark.matches ? "dark" : "light") : theme;
  $("theme").textContent = "Theme: " + theme;
}
prefersDark.addEventListener("change", showTheme);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("kvferry-theme", theme);
  showTheme();
});
showTheme();

// ---- asking ----
const headers = () => (state.key ? { Authorization: "Bearer " + state.key } : {});
async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", ...options });
  if (answer.status === 401) { askKey(); throw new Error("needs a key"); }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error((body.error && body.error.message) || "status " + answer.status);
  }
  return answer;
}
function askKey() {
  if (!$("key-dialog").open) $("key-dialog").showModal();
}
function useKey() {
  state.key = $("key").value.trim();
  sessionStorage.setItem("kvferry-key", state.key);
  $("key-dialog").close();
}
$("key-ok").addEventListener("click", useKey);
$("key").addEventListener("keydown", (event) => { if (event.key === "Enter") useKey(); });

let stream = null;
async function watch() {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    while (document.hidden || $("key-dialog").open) await new Promise((done) => setTimeout(done, 200));
    stream = new AbortController();
    try {
      const reader = (await ask("/ui/events", { signal: stream.signal })).body.getReader();
      const decoder = new TextDecoder();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        rest += decoder.decode(value, { stream: true });
        const events = rest.split("\n\n");
        rest = events.pop();
        const latest = events.filter((event) => event.startsWith("data: ")).pop();
        if (latest) { pause = 500; if (!state.paused) show(JSON.parse(latest.slice(6))); }
      }
    } catch (error) {
      if (error.name !== "AbortError") showHealth("stale", "no answer: " + error.message);
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}
document.addEventListener("visibilitychange", () => { if (document.hidden && stream) stream.abort(); });
$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  $("pause").textContent = state.paused ? "Paused" : "Pause";
});

// ---- the top ----
const WORDS = { ok: "✓ ok", degraded: "! degraded", unavailable: "✕ unavailable", stale: "… not live" };
function showHealth(status, reason) {
  setData($("health"), "state", status);
  setText($("health"), WORDS[status] || status);
  $("health").title = reason;
  const loud = status !== "ok";
  if (loud) setText($("alarm"), (WORDS[status] || status).slice(2) + ": " + reason);
  setData($("alarm"), "state", status);
  $("alarm").hidden = !loud;
}
function show(now) {
  state.last = now;
  showHealth(now.status, now.reason);
  state.rate.push([performance.now(), now.num_ended]);
  if (state.rate.length > 6) state.rate.shift();
  const [from, to] = [state.rate[0], state.rate[state.rate.length - 1]];
  const rate = to[0] > from[0] ? Math.max(0, ((to[1] - from[1]) / (to[0] - from[0])) * 1000) : null;
  setText($("fig-rate"), rate === null ? "–" : rate.toFixed(rate < 10 ? 1 : 0));
  setText($("fig-open"), count(now.num_open));
  setText($("fig-waiting"), count(now.waiting));
  setText($("fig-ended"), count(now.num_ended));
  setText($("fig-alone"), (100 * now.decode_only_share).toFixed(0) + " %");
  showMatrix(now);
  showDetail();
  showOpen(now);
  showRecent(now);
}

// ---- the matrix ----
const isPrefill = (worker) => worker.wanted === "prefill";
const nameOf = (worker) => worker.engine || worker.url;
function fitOf(pair, prefill, decode) {
  if (!prefill.usable || !decode.usable) return ["down", "–", (prefill.usable ? decode : prefill).why];
  if (pair.why_not) return ["no", "✕", pair.why_not];
  const open = [[pair.breaker, "the pair"], [prefill.breaker, nameOf(prefill)], [decode.breaker, nameOf(decode)]].find(([one]) => one === "open");
  if (open) return ["paused", "‖", open[1] + " is left alone for a while after failures: " + (pair.last_why || "see the log")];
  return ["yes", "✓", ""];
}
const FIT_WORDS = { yes: "fits", no: "refused", paused: "left alone", down: "not in use" };

function showMatrix(now) {
  const prefill = now.workers.filter(isPrefill);
  const decode = now.workers.filter((worker) => !isPrefill(worker));
  const table = $("matrix");
  table.classList.toggle("compact", decode.length > 8);
  const shape = JSON.stringify([prefill.map((w) => w.url), decode.map((w) => w.url)]);
  if (table.dataset.shape !== shape) buildMatrix(table, prefill, decode, shape);
  $("no-fleet").hidden = Boolean(now.workers.length);
  setText($("no-fleet"), "No worker is known yet: give --prefill and --decode, a fleet file, or let workers register.");
  const most = Math.max(1, ...now.pairs.map((pair) => pair.landed));
  for (const worker of now.workers) updateWorker(table, worker);
  const byUrl = new Map(now.workers.map((worker) => [worker.wanted + worker.url, worker]));
  for (const pair of now.pairs) {
    const cell = table.querySelector(`[data-pair="${CSS.escape(pair.prefill_url + " " + pair.decode_url)}"]`);
    const [p, d] = [byUrl.get("prefill" + pair.prefill_url), byUrl.get("decode" + pair.decode_url)];
    if (cell && p && d) updateCell(cell, pair, p, d, most);
  }
}
function buildMatrix(table, prefill, decode, shape) {
  table.dataset.shape = shape;
  const header = (worker) => make("button", { class: "worker", type: "button", tabindex: "-1", "data-worker": worker.wanted + " " + worker.url, onclick: () => select("worker", worker.wanted + " " + worker.url) },
    make("b"), make("span"), make("span"), make("span", { class: "load" }, make("i")));
  const top = make("tr", { role: "row" }, make("td", { class: "corner", text: prefill.length ? "prefill ↓  decode →" : "decode only" }),
    ...decode.map((worker) => make("th", { scope: "col", role: "columnheader" }, header(worker))));
  const rows = prefill.map((p) => make("tr", { role: "row" }, make("th", { scope: "row", role: "rowheader" }, header(p)),
    ...decode.map((d) => {
      const id = p.url + " " + d.url;
      const cell = make("button", { class: "cell", type: "button", tabindex: "-1", "data-pair": id, onclick: () => select("pair", id) },
        make("span", { class: "state" }), make("div", { class: "main" }), make("div", { class: "small" }), make("span", { class: "share" }));
      return make("td", { role: "gridcell" }, cell);
    })));
  table.replaceChildren(make("thead", {}, top), make("tbody", {}, ...rows));
  const first = table.querySelector(".cell") || table.querySelector(".worker");
  if (first) first.tabIndex = 0;
}
function updateWorker(table, worker) {
  const node = table.querySelector(`[data-worker="${CSS.escape(worker.wanted + " " + worker.url)}"]`);
  if (!node) return;
  const [name, line, second, load] = node.children;
  setData(node, "up", worker.usable ? "yes" : "no");
  setText(name, nameOf(worker));
  setText(line, [worker.mode, worker.kind, worker.version, worker.breaker === "open" ? "left alone" : ""].filter(Boolean).join(" · ") || worker.url);
  setText(second, worker.usable ? `${count(worker.load)} open` + (worker.blocks ? ` · ${count(worker.free_blocks)} of ${count(worker.blocks)} blocks free` : "") : "not in use");
  const used = worker.blocks && worker.free_blocks !== null ? 1 - worker.free_blocks / worker.blocks : 0;
  load.firstChild.style.width = Math.round(100 * Math.min(1, Math.max(0, used))) + "%";
  node.setAttribute("aria-label", `${worker.wanted} ${nameOf(worker)}: ${worker.usable ? "in use" : worker.why}, ${worker.load} requests open`);
}
// In push mode decode counts from its registration: prefill's own time is in it, and the wire was faster than that.
const bandwidth = (pair, decode) => (decode.mode === "push" ? "≥ " : "") + bytes(pair.bytes_per_s) + "/s";
function updateCell(cell, pair, prefill, decode, most) {
  const [fit, icon, why] = fitOf(pair, prefill, decode);
  const [word, main, small, share] = cell.children;
  setData(cell, "fit", fit);
  if (cell.dataset.word !== fit) { cell.dataset.word = fit; word.replaceChildren(icon, make("span", { class: "word", text: " " + FIT_WORDS[fit] })); }
  const rate = pair.bytes_per_s ? bandwidth(pair, decode) : pair.landed ? count(pair.landed) + " handed over" : fit === "yes" ? "no traffic yet" : "";
  setText(main, fit === "no" || fit === "down" ? "" : rate);
  const told = `${count(pair.landed)} landed · ${count(pair.failed)} failed` + (pair.open ? ` · ${count(pair.open)} in flight` : "");
  setText(small, why || told);
  share.style.width = fit === "yes" ? (100 * pair.landed) / most + "%" : "0";
  cell.title = why;
  cell.setAttribute("aria-label", `${pair.prefill} to ${pair.decode}: ${FIT_WORDS[fit]}. ${why} ${rate}, ${told}`);
}
$("matrix").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -99], End: [0, 99] }[event.key];
  if (!step || !event.target.closest("button")) return;
  event.preventDefault();
  const grid = [...$("matrix").rows].map((row) => [...row.cells].map((cell) => cell.querySelector("button")));
  const row = grid.findIndex((line) => line.includes(event.target));
  const column = grid[row].indexOf(event.target);
  const clamp = (value, most) => Math.min(Math.max(value, 0), most);
  const next = clamp(row + step[0], grid.length - 1);
  const found = grid[next][clamp(column + step[1], grid[next].length - 1)];
  if (!found) return;
  for (const button of $("matrix").querySelectorAll("button")) button.tabIndex = -1;
  found.tabIndex = 0;
  found.focus();
});

// ---- details of a pair or a worker ----
function select(kind, id) {
  const same = state.selected && state.selected.kind === kind && state.selected.id === id;
  state.selected = same ? null : { kind, id };
  for (const cell of $("matrix").querySelectorAll("button")) {
    cell.setAttribute("aria-selected", String(!same && (cell.dataset.pair === id || cell.dataset.worker === id)));
  }
  showDetail();
}
function facts(entries) {
  return make("dl", {}, ...entries.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: String(value) }))));
}
function showDetail() {
  const panel = $("detail");
  const content = state.selected && state.last ? (state.selected.kind === "pair" ? pairDetail() : workerDetail()) : null;
  panel.hidden = !content;
  if (!content) return;
  const text = content.map((node) => node.textContent).join("|");
  if (panel.dataset.text !== text) { panel.dataset.text = text; panel.replaceChildren(...content); }
}
function pairDetail() {
  const pair = state.last.pairs.find((one) => one.prefill_url + " " + one.decode_url === state.selected.id);
  if (!pair) return null;
  const worker = (wanted, url) => state.last.workers.find((one) => one.wanted === wanted && one.url === url);
  const decode = worker("decode", pair.decode_url);
  const [fit, icon, why] = fitOf(pair, worker("prefill", pair.prefill_url), decode);
  return [
    make("h3", { text: `${icon} ${pair.prefill} → ${pair.decode}: ${FIT_WORDS[fit]}` }),
    facts([["landed", count(pair.landed)], ["failed", count(pair.failed)], ["in flight", count(pair.open)], ["tokens handed over", count(pair.handed_over_tokens)],
      ["bytes", bytes(pair.bytes)], [decode.mode === "push" ? "bandwidth, prefill's time included" : "bandwidth", pair.bytes_per_s ? bandwidth(pair, decode) : "–"], ["breaker", pair.breaker]]),
    ...(why ? [make("pre", { text: why })] : []),
    ...(pair.last_why ? [make("pre", { text: "Last failure: " + pair.last_why })] : []),
  ];
}
function workerDetail() {
  const worker = state.last.workers.find((one) => one.wanted + " " + one.url === state.selected.id);
  if (!worker) return null;
  return [
    make("h3", { text: `${nameOf(worker)}: ${worker.usable ? "in use for " + worker.wanted : "not in use"}` }),
    facts([["address", worker.url], ["known from", worker.source], ["engine", [worker.kind, worker.version].filter(Boolean).join(" ")], ["incarnation", worker.incarnation],
      ["role", worker.role], ["transfer mode", worker.mode], ["model", worker.model], ["open here", count(worker.open_requests)], ["open there", count(worker.load)],
      ["free blocks", worker.blocks ? `${count(worker.free_blocks)} of ${count(worker.blocks)}` : ""], ["cached blocks", count(worker.cached_blocks)],
      ["failures", count(worker.failures)], ["breaker", worker.breaker]]),
    ...(worker.why ? [make("pre", { text: worker.why })] : []),
  ];
}

// ---- requests ----
const short = (id) => (id.length > 26 ? id.slice(0, 12) + "…" + id.slice(-12) : id);
const link = (row) => make("button", { class: "link", type: "button", title: row.request_id, onclick: () => openLine(row.number) });
const routeOf = (row) => [row.prefill, row.decode].filter(Boolean).join(" → ") || "–";
const routeKind = (row) => (row.route === "alone" ? "warn" : "");
const cells = (...nodes) => nodes.map((node) => (node instanceof Node ? make("td", {}, node) : make("td", { class: "num" })));

function showOpen(now) {
  $("no-open").hidden = Boolean(now.open.length);
  $("open").closest("table").hidden = !now.open.length;
  setText($("flight-hint"), now.num_open > now.open.length ? `the first ${now.open.length} of ${count(now.num_open)}` : "");
  keyed($("open"), now.open, (row) => row.number,
    (row) => make("tr", {}, ...cells(link(row), make("span", { class: "tag" }), make("span", { class: "tag" }), make("span"), null)),
    (node, row) => {
      const [id, stage, route, pair, age] = node.cells;
      setText(id.firstChild, short(row.request_id));
      setText(stage.firstChild, row.stage);
      setText(route.firstChild, row.route || "choosing");
      setText(pair.firstChild, routeOf(row));
      setText(age, ms(row.ms));
      node.setAttribute("aria-selected", String(state.line === row.number));
    });
}
function meter() {
  return make("span", { class: "tokens" }, make("span", { class: "meter", "aria-hidden": "true" }, make("i", { class: "handed" }), make("i", { class: "cached" }), make("i", { class: "again" })), make("span"));
}
function updateMeter(node, row) {
  const parts = [row.handed_over, row.cached, row.recomputed].map((value) => Number(value || 0));
  const whole = Math.max(1, parts[0] + parts[1] + parts[2]);
  [...node.firstChild.children].forEach((bar, index) => { bar.style.width = (100 * parts[index]) / whole + "%"; });
  setText(node.lastChild, row.handed_over === null && row.recomputed === null ? "not told" : parts.map(count).join(" · "));
}
function showRecent(now) {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = now.recent.filter((row) => {
    const text = [row.request_id, row.route, row.prefill, row.decode, row.why, row.status, row.path].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  $("no-recent").hidden = Boolean(rows.length);
  setText($("no-recent"), now.recent.length ? "No request matches the filter." : "No request yet.");
  $("recent").closest("table").hidden = !rows.length;
  keyed($("recent"), rows, (row) => row.number,
    (row) => make("tr", {}, ...cells(link(row), make("span", { class: "tag" }), make("span", {}, make("span", { class: "tag" }), make("span", { class: "why" })), make("span"), meter(), null, null)),
    (node, row) => {
      const [id, status, route, pair, tokens, first, whole] = node.cells;
      setText(id.firstChild, short(row.request_id));
      const bad = row.status >= 400;
      setText(status.firstChild, (bad ? "✕ " : "✓ ") + (row.status === 499 ? "hung up" : row.status) + (row.failures ? `, ${row.failures} retried` : ""));
      setData(status.firstChild, "kind", bad ? "bad" : row.failures ? "warn" : "good");
      setText(route.firstChild.firstChild, row.route || "–");
      setData(route.firstChild.firstChild, "kind", routeKind(row));
      setText(route.firstChild.lastChild, row.why);
      route.firstChild.lastChild.title = row.why;
      setText(pair.firstChild, routeOf(row));
      updateMeter(tokens.firstChild, row);
      setText(first, ms(row.first_byte_ms));
      setText(whole, ms(row.ms));
      node.setAttribute("aria-selected", String(state.line === row.number));
    });
}
$("filter").addEventListener("input", () => state.last && showRecent(state.last));

// ---- one request's time line ----
const PARTS = { choose: "choosing workers", queue: "queue", prefill: "prefill", handshake: "handshake", transfer: "transfer", decode: "decode" };
const partOf = (name) => (name in PARTS ? name : "wire");
function partName(lane, name) {
  if (name === "request") return "router";
  if (name.endsWith(" request")) return "network and HTTP, " + lane;
  if (name === "choose") return PARTS.choose;
  return `${PARTS[name] || name} on ${lane}`;
}
async function openLine(number, focus = true) {
  state.line = number;
  history.replaceState(null, "", "#request=" + number);
  try {
    showLine(await (await ask("/ui/request?number=" + number)).json());
    if (focus) { $("line").scrollIntoView({ block: "nearest" }); $("line-close").focus({ preventScroll: true }); }
  } catch (error) {
    $("line").hidden = false;
    setText($("line-id"), error.message);
  }
}
$("line-close").addEventListener("click", () => {
  const row = document.querySelector(`#recent [data-key="${state.line}"] .link, #open [data-key="${state.line}"] .link`);
  state.line = null;
  $("line").hidden = true;
  history.replaceState(null, "", location.pathname);
  if (row) row.focus();
});
function proofOf(line) {
  const total = [line.handed_over, line.cached, line.recomputed].reduce((sum, one) => sum + Number(one || 0), 0);
  const tokens = total ? `Of ${count(total)} prompt tokens ${count(line.handed_over || 0)} were handed over, ${count(line.cached || 0)} were cached, ${count(line.recomputed || 0)} recomputed. ` : "";
  const way = line.route ? `Route ${line.route}${line.prefill ? ", prefill " + line.prefill : ""}${line.decode ? ", decode " + line.decode : ""}. ` : "";
  const moved = line.workers.filter((one) => one.bytes).map((one) => `${bytes(one.bytes)} in ${count(one.runs)} runs, ${ms(one.transfer_ms)}. `).join("");
  return way + tokens + moved + (line.why ? "Why: " + line.why : "");
}
function showLine(line) {
  $("line").hidden = false;
  setText($("line-id"), `${line.request_id} · ${line.path} · ${line.status === null ? line.stage : "status " + line.status} · ${ms(line.ms)}` + (line.first_byte_ms === null ? "" : `, first byte after ${ms(line.first_byte_ms)}`));
  setText($("proof"), proofOf(line));
  const whole = Math.max(line.ms, 0.001);
  $("shares").replaceChildren(...line.breakdown.map((one) => {
    const bar = make("i", { "data-part": partOf(one.name), title: `${partName(one.lane, one.name)}: ${ms(one.ms)}` });
    bar.style.flex = `${Math.max(one.ms, whole / 500)} 0 0`;
    return bar;
  }));
  $("legend").replaceChildren(...line.breakdown.map((one) => make("li", {}, make("span", { class: "key", "data-part": partOf(one.name), "aria-hidden": "true" }),
    make("span", { text: `${partName(one.lane, one.name)} ` }), make("b", { text: ms(one.ms) }), make("span", { class: "hint", text: ((100 * one.ms) / whole).toFixed(0) + " %" }))));
  const marks = [0, 0.25, 0.5, 0.75, 1];
  $("axis").replaceChildren(...marks.map((at) => { const mark = make("span", { text: ms(at * whole) }); mark.style.left = 100 * at + "%"; return mark; }));
  $("spans").replaceChildren(...line.spans.map((span) => {
    const bar = make("i", { "data-part": partOf(span.name) });
    if (span.failed) bar.dataset.failed = "yes";
    bar.style.left = (100 * span.begin_ms) / whole + "%";
    bar.style.width = (100 * (span.end_ms - span.begin_ms)) / whole + "%";
    const depth = span.parent === "" ? "0" : span.parent === "request" ? "1" : "2";
    return make("tr", { "data-depth": depth, title: span.failed },
      make("td", {}, make("span", { class: "key", "data-part": partOf(span.name), "aria-hidden": "true" }), make("span", { text: span.name + (span.failed ? " ✕ failed" : "") })),
      make("td", { text: span.engine || "router" }), make("td", {}, make("div", { class: "track", "aria-hidden": "true" }, bar)),
      make("td", { class: "num", text: ms(span.begin_ms) }), make("td", { class: "num", text: ms(span.end_ms - span.begin_ms) }));
  }));
  const errors = line.workers.map((one) => `${one.engine} ± ${ms(one.clock_error_ms)}`);
  setText($("line-note"), [
    errors.length ? "Workers' stages are by their own clocks, set right: " + errors.join(", ") + "." : "",
    line.silent.length ? `${line.silent.join(", ")} said nothing of this request: only the router's view of it is here.` : "",
  ].filter(Boolean).join(" "));
  $("line-events").replaceChildren(...line.events.map((event) => make("tr", {}, make("td", { class: "num", text: ms(event.at_ms) }), make("td", { text: event.name }),
    make("td", { text: Object.entries(event.fields).map(([name, value]) => `${name}=${value}`).join("  ") }))));
}
const asked = /^#request=(\d+)$/.exec(location.hash);
if (asked) openLine(Number(asked[1]), false);
watch();
