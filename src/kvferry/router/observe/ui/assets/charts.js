"use strict";
// The small charts of the last minutes. It is loaded before app.js, whose helpers it uses once the first state is here.

const SVG = "http://www.w3.org/2000/svg";
function path(values, most) {
  let text = "", drawing = false;
  values.forEach((value, index) => {
    if (value === null) { drawing = false; return; }
    const [x, y] = [(100 * index) / Math.max(1, values.length - 1), 27 - (24 * value) / most];
    text += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (!drawing) text += "h.01"; // a single value is a dot
    drawing = true;
  });
  return text;
}
const lastOf = (values) => values.reduce((found, value) => (value === null ? found : value), null);
function sparkline(id, most, ...lines) {
  const svg = $(id);
  const top = Math.max(most, ...lines.flat().filter((value) => value !== null));
  lines.forEach((values, index) => {
    let line = svg.children[index];
    if (!line) { line = document.createElementNS(SVG, "path"); svg.append(line); }
    line.setAttribute("d", path(values, top));
  });
}
function showHistory(history) {
  const { rate, first_byte_p50_ms: p50, first_byte_p99_ms: p99, handed_over_share: share } = history;
  sparkline("chart-rate", 1, rate);
  sparkline("chart-first", 1, p99, p50);
  sparkline("chart-share", 1, share);
  setText($("now-rate"), `${lastOf(rate)} now, ${Math.max(...rate)} at most`);
  setText($("now-first"), lastOf(p50) === null ? "no streamed answer yet" : `p50 ${ms(lastOf(p50))}, p99 ${ms(lastOf(p99))}`);
  setText($("now-share"), lastOf(share) === null ? "no prompt yet" : `${(100 * lastOf(share)).toFixed(0)} %`);
}
