"use strict";
// The dashboard: one stream of states, drawn into the page that index.html lays out. Text goes in as text, never as HTML.

const $ = (id) => document.getElementById(id);
const state = { last: null, selected: null, differences: null, line: null, wanted: "", unfinished: false, key: sessionStorage.getItem("kvferry-key") || "", paused: false };

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

// A line break may come before the port, never inside it.
function address(url) {
  const [, host, port] = /^(.*?)(:\d+)?$/.exec(url);
  return port ? [host, make("wbr"), make("span", { class: "nowrap", text: port })] : [host];
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
  if (answer.status === 401) { askKey(); throw new Error("a key is needed"); }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error((body.error && body.error.message) || "status " + answer.status);
  }
  return answer;
}
function askKey() {
  $("key-refused").hidden = !state.key;
  state.key = "";
  sessionStorage.removeItem("kvferry-key");
  if ($("key-dialog").open) return;
  $("key-dialog").showModal();
  $("key").select();
}
function useKey() {
  state.key = $("key").value.trim();
  sessionStorage.setItem("kvferry-key", state.key);
  $("key-dialog").close();
  followHash();
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
  const rate = lastOf(now.history.rate);
  setText($("fig-rate"), rate.toFixed(rate < 10 ? 1 : 0));
  setText($("fig-open"), count(now.num_open));
  setText($("fig-waiting"), count(now.waiting));
  setText($("fig-ended"), count(now.num_ended));
  setText($("fig-decode-only"), (100 * now.decode_only_share).toFixed(0) + " %");
  showHistory(now.history);
  showMatrix(now);
  showDetail();
  showOpen(now);
  showRecent(now);
  if (state.unfinished) loadLine(state.wanted); // it is still open: it grows
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
  const most = Math.max(1, ...now.pairs.map((pair) => pair.landed + pair.unknown));
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
    make("b"), make("span"), make("span"), make("span", { class: "load", "aria-hidden": "true" }, make("i", { class: "used" }), make("i", { class: "kept" })), make("span", { class: "cache" }));
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
  const [name, line, second, load, cache] = node.children;
  setData(node, "up", worker.usable ? "yes" : "no");
  if (name.textContent !== nameOf(worker)) name.replaceChildren(...(worker.engine ? [worker.engine] : address(worker.url)));
  setText(line, [worker.mode, worker.kind, worker.version, worker.breaker === "open" ? "left alone" : ""].filter(Boolean).join(" · ") || (worker.engine ? worker.url : ""));
  setText(second, worker.usable ? `${count(worker.load)} open` : "not in use");
  const known = worker.usable && worker.blocks && worker.free_blocks !== null;
  const share = (blocks) => Math.min(1, Math.max(0, blocks / worker.blocks));
  const used = known ? share(worker.blocks - worker.free_blocks) : 0;
  const kept = known ? Math.min(1 - used, share(worker.cached_blocks)) : 0; // prefixes that are kept count as free
  load.children[0].style.width = 100 * used + "%";
  load.children[1].style.width = 100 * kept + "%";
  setData(load, "full", used > 0.9 ? "yes" : "no");
  const meter = known ? `Cache ${(100 * used).toFixed(0)} % in use, ${count(worker.free_blocks)} of ${count(worker.blocks)} blocks free` : "";
  load.hidden = !known;
  setText(cache, known ? `cache ${(100 * used).toFixed(0)} % · ${count(worker.free_blocks)} of ${count(worker.blocks)} free` : "");
  node.setAttribute("aria-label", `${worker.wanted} ${nameOf(worker)}: ${worker.usable ? "in use" : worker.why}, ${worker.load} requests open. ${meter}`);
}
// In push mode decode counts from its registration: prefill's own time is in it, and the wire was faster than that.
const bandwidth = (pair, decode) => (decode.mode === "push" ? "≥ " : "") + bytes(pair.bytes_per_s) + "/s";
function updateCell(cell, pair, prefill, decode, most) {
  const [fit, icon, why] = fitOf(pair, prefill, decode);
  const [word, main, small, share] = cell.children;
  setData(cell, "fit", fit);
  if (cell.dataset.word !== fit) { cell.dataset.word = fit; word.replaceChildren(icon, make("span", { class: "word", text: " " + FIT_WORDS[fit] })); }
  const rate = pair.bytes_per_s ? bandwidth(pair, decode) : pair.landed ? count(pair.landed) + " handed over" : pair.unknown ? count(pair.unknown) + " requested" : fit === "yes" ? "no traffic yet" : "";
  setText(main, fit === "no" || fit === "down" ? "" : rate);
  const counts = `${count(pair.landed)} landed · ${count(pair.failed)} failed` + (pair.unknown ? ` · ${count(pair.unknown)} unknown` : "") + (pair.open ? ` · ${count(pair.open)} in flight` : "");
  setText(small, why || counts);
  share.style.width = fit === "yes" ? (100 * (pair.landed + pair.unknown)) / most + "%" : "0";
  cell.title = why;
  cell.setAttribute("aria-label", `${pair.prefill} to ${pair.decode}: ${FIT_WORDS[fit]}. ${why} ${rate}, ${counts}`);
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
  if (state.selected && kind === "pair") loadDifferences(id);
  showDetail();
}
async function loadDifferences(id) {
  const pair = state.last && state.last.pairs.find((one) => one.prefill_url + " " + one.decode_url === id);
  state.differences = null;
  if (!pair) return;
  const query = new URLSearchParams({ prefill: pair.prefill_url, decode: pair.decode_url });
  try {
    state.differences = { id, rows: (await (await ask("/ui/pair?" + query)).json()).differences };
  } catch {
    return; // the reason is shown without its table
  }
  showDetail();
}
const CLASSES = { "must match": "✕ must match", bridged: "✓ bridged" };
function differences(pair) {
  const known = state.differences;
  if (!known || known.id !== pair.prefill_url + " " + pair.decode_url || !known.rows.length) return [];
  const head = ["Fact", pair.prefill, pair.decode, "", "What to do"];
  return [make("div", { class: "scroll" }, make("table", { class: "list facts" }, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...known.rows.map((row) => make("tr", { "data-class": row.class.replace(" ", "-") }, make("th", { scope: "row", text: row.fact }), make("td", { text: row.prefill }), make("td", { text: row.decode }),
      make("td", { text: CLASSES[row.class] || row.class }), make("td", { text: row.remedy }))))))];
}
function facts(entries) {
  return make("dl", {}, ...entries.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => make("div", {}, make("dt", { text: name }), Array.isArray(value) ? make("dd", {}, ...value) : make("dd", { text: String(value) }))));
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
    facts([["landed", count(pair.landed)], ["failed", count(pair.failed)], ["unknown", count(pair.unknown)], ["in flight", count(pair.open)], ["tokens handed over", count(pair.handed_over_tokens)],
      ["bytes", bytes(pair.bytes)], [decode.mode === "push" ? "bandwidth, prefill's time included" : "bandwidth", pair.bytes_per_s ? bandwidth(pair, decode) : "–"], ["breaker", pair.breaker]]),
    ...(why && !(pair.why_not && differences(pair).length) ? [make("pre", { text: why })] : []),
    ...differences(pair),
    ...(pair.last_why ? [make("pre", { text: "Last failure: " + pair.last_why })] : []),
  ];
}
function workerDetail() {
  const worker = state.last.workers.find((one) => one.wanted + " " + one.url === state.selected.id);
  if (!worker) return null;
  return [
    make("h3", { text: `${nameOf(worker)}: ${worker.usable ? "in use for " + worker.wanted : "not in use"}` }),
    facts([["address", address(worker.url)], ["known from", worker.source], ["engine", [worker.kind, worker.version].filter(Boolean).join(" ")], ["incarnation", worker.incarnation],
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
const tokens = (row) => [row.handed_over, row.cached, row.recomputed].map((value) => Number(value || 0));
function meter() {
  return make("span", { class: "tokens" }, make("span", { class: "meter", "aria-hidden": "true" }, make("i", { class: "handed" }), make("i", { class: "cached" }), make("i", { class: "computed" })), make("span"));
}
function updateMeter(node, row) {
  const parts = tokens(row);
  // Tokens that decode had to compute although another engine should have brought them.
  setData(node.firstChild.lastChild, "unwanted", row.why && row.route !== "local" ? "yes" : "no");
  const whole = Math.max(1, parts[0] + parts[1] + parts[2]);
  [...node.firstChild.children].forEach((bar, index) => { bar.style.width = (100 * parts[index]) / whole + "%"; });
  setText(node.lastChild, row.handed_over === null && row.recomputed === null ? "not reported" : parts.map(count).join(" · "));
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
// In pull mode decode's handshake stage is the time until prefill has granted its claim; in push mode it registers.
const stageName = (line, name) => (name === "handshake" ? (line.route === "push" ? "registration" : "claim") : PARTS[name] || name);
function partName(line, lane, name) {
  if (name === "request") return "router";
  if (name.endsWith(" request")) return "network and HTTP, " + lane;
  if (name === "choose" || name === lane) return PARTS[name];
  return `${stageName(line, name)} on ${lane}`;
}
// The address says which request is open: #request=NUMBER, or #id=X-REQUEST-ID.
const queryOf = (hash) => {
  const [, kind, value] = /^#(request|id)=(.+)$/.exec(hash) || [];
  if (!kind) return "";
  const text = decodeURIComponent(value);
  return new URLSearchParams(kind === "request" && /^\d+$/.test(text) ? { number: text } : { id: text }).toString();
};
function openLine(number) { location.hash = "request=" + number; }
async function followHash(focus = true) {
  state.wanted = queryOf(location.hash);
  state.unfinished = false;
  if (!state.wanted) { closeLine(); return; }
  await loadLine(state.wanted);
  if (focus && !$("line").hidden) { $("line").scrollIntoView({ block: "nearest" }); $("line-close").focus({ preventScroll: true }); }
}
async function loadLine(query) {
  let line = null, problem = "";
  try {
    line = await (await ask("/ui/request?" + query)).json();
  } catch (error) {
    problem = error.message;
  }
  if (query !== state.wanted) return; // another one was opened meanwhile
  state.line = line && line.number;
  state.unfinished = Boolean(line) && line.status === null;
  $("line").hidden = $("key-dialog").open;
  $("line-body").hidden = !line;
  if (line) showLine(line); else setText($("line-id"), problem);
}
function closeLine() {
  const row = document.querySelector(`#recent [data-key="${state.line}"] .link, #open [data-key="${state.line}"] .link`);
  state.line = null;
  if ($("line").hidden) return;
  $("line").hidden = true;
  if (row) row.focus();
}
$("line-close").addEventListener("click", () => { history.pushState(null, "", location.pathname); followHash(); });
addEventListener("hashchange", () => followHash());
addEventListener("popstate", () => { if (!location.hash) followHash(); });
function proofOf(line) {
  const parts = tokens(line), total = parts[0] + parts[1] + parts[2];
  const tokenText = total ? `Of ${count(total)} prompt tokens ${count(parts[0])} were handed over, ${count(parts[1])} were cached and ${count(parts[2])} were computed. ` : "";
  const way = line.route ? `Route ${line.route}${line.prefill ? ", prefill " + line.prefill : ""}${line.decode ? ", decode " + line.decode : ""}. ` : "";
  const moved = line.workers.filter((one) => one.bytes).map((one) => `${bytes(one.bytes)} in ${count(one.runs)} ${one.runs === 1 ? "run" : "runs"}, ${ms(one.transfer_ms)}. `).join("");
  return way + tokenText + moved + (line.why ? "Why: " + line.why : "");
}
function showLine(line) {
  setText($("line-id"), `${line.number} · ${line.request_id} · ${line.path} · ${line.status === null ? line.stage : "status " + line.status} · ${ms(line.ms)}` + (line.first_byte_ms === null ? "" : `, first byte after ${ms(line.first_byte_ms)}`));
  setText($("proof"), proofOf(line));
  const whole = Math.max(line.ms, 0.001);
  $("shares").replaceChildren(...line.breakdown.map((one) => {
    const bar = make("i", { "data-part": partOf(one.name), title: `${partName(line, one.lane, one.name)}: ${ms(one.ms)}` });
    bar.style.flex = `${Math.max(one.ms, whole / 500)} 0 0`;
    return bar;
  }));
  $("legend").replaceChildren(...line.breakdown.filter((one) => one.ms >= whole / 200).map((one) => make("li", {}, make("span", { class: "key", "data-part": partOf(one.name), "aria-hidden": "true" }),
    make("span", { text: `${partName(line, one.lane, one.name)} ` }), make("b", { text: ms(one.ms) }), make("span", { class: "hint", text: ((100 * one.ms) / whole).toFixed(0) + " %" }))));
  const marks = [0, 0.25, 0.5, 0.75, 1];
  $("axis").replaceChildren(...marks.map((at) => { const mark = make("span", { text: ms(at * whole) }); mark.style.left = 100 * at + "%"; return mark; }));
  $("spans").replaceChildren(...line.spans.map((span) => {
    const bar = make("i", { "data-part": partOf(span.name) });
    if (span.failed) bar.dataset.failed = "yes";
    bar.style.left = (100 * span.begin_ms) / whole + "%";
    bar.style.width = (100 * (span.end_ms - span.begin_ms)) / whole + "%";
    const depth = span.parent === "" ? "0" : span.parent === "request" ? "1" : "2";
    return make("tr", { "data-depth": depth, title: span.failed },
      make("td", {}, make("span", { class: "key", "data-part": partOf(span.name), "aria-hidden": "true" }), make("span", { text: stageName(line, span.name) + (span.failed ? " ✕ failed" : "") })),
      make("td", { text: span.engine || "router" }), make("td", {}, make("div", { class: "track", "aria-hidden": "true" }, bar)),
      make("td", { class: "num", text: ms(span.begin_ms) }), make("td", { class: "num", text: ms(span.end_ms - span.begin_ms) }));
  }));
  const errors = line.workers.map((one) => `${one.engine} ± ${ms(one.clock_error_ms)}`);
  setText($("line-note"), [
    errors.length ? "Workers' stages come from their own clocks, corrected to within: " + errors.join(", ") + "." : "",
    line.silent.length ? `${line.silent.join(", ")} reported nothing about this request: only the router's view of it is shown.` : "",
  ].filter(Boolean).join(" "));
  $("line-events").replaceChildren(...line.events.map((event) => make("tr", {}, make("td", { class: "num", text: ms(event.at_ms) }), make("td", { text: event.name }),
    make("td", { text: Object.entries(event.fields).map(([name, value]) => `${name}=${value}`).join("  ") }))));
}
followHash(false);
watch();
