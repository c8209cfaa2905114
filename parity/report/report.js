"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const STEP = 200; // rows of the table at a time: thousands would make every sort slow
const ABOVE_ALL = 1e300; // a share that nothing excuses

const share = x => x === null ? "∞" : x.toFixed(3);
const scientific = x => x === null ? "–" : x.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
const count = n => n.toLocaleString("en-US");

function make(tag, content, className) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...[content ?? []].flat());
  return element;
}

const verdicts = data.verdicts.map(([op, layer, phase, bound, passed, used, l2, flips, elements, outputs]) => {
  const words = data.words, name = words.layer_id[layer];
  const v = { op: words.op[op], layer: name, kind: data.kinds[name], phase: words.phase[phase], bound: words.bound[bound],
    verdict: passed ? "pass" : "fail", used, l2, flips, elements, outputs };
  v.text = [v.op, v.layer, v.kind, v.phase, v.verdict].join(" ").toLowerCase();
  return v;
});
const strain = v => v.verdict === "fail" ? Math.max(1 + 1e-12, v.used ?? ABOVE_ALL) : v.used ?? ABOVE_ALL;
const worst = some => some.reduce((a, b) => strain(b) > strain(a) ? b : a);

// The record behind a cell of the map: all phases and outputs of an op in a layer.
const cells = new Map();
for (const v of verdicts) {
  const at = v.op + " " + v.layer;
  cells.set(at, [...cells.get(at) ?? [], v]);
}
const record = document.getElementById("record");

function table(head, rows) {
  const t = make("table", [make("thead", make("tr", head.map(name => make("th", name)))), make("tbody", rows)]);
  return make("div", t, "wide");
}

function show(op, layer) {
  const found = cells.get(op + " " + layer);
  const rows = found.flatMap(v => v.outputs.map(([name, storage, passed, all, failing, flips, used, tests, place, pattern]) => make("tr", [
    make("td", v.phase), make("td", name), make("td", storage), make("td", passed ? "pass" : "fail", passed ? "good" : "bad"),
    make("td", share(used), "number"), make("td", tests), make("td", `${count(failing)} of ${count(all)}`, "number"),
    make("td", count(flips), "number"), make("td", pattern ? `${place}: ${pattern}` : place)])));
  const again = worst(found);
  const command = data.command.replace("{op}", () => op).replace("{layer}", () => layer.replace(/^layer_/, "")).replace("{phase}", () => again.phase);
  record.replaceChildren(
    make("h3", `${op} · ${layer} · ${found[0].kind}`), make("p", `Bound: ${found[0].bound}`),
    table(["phase", "output", "stored as", "verdict", "budget used", "share by test", "failing rows", "flips", "worst at"], rows),
    make("p", `The worst phase, ${again.phase}, again:`), make("pre", command));
  for (const button of heat.values()) button.removeAttribute("aria-current");
  heat.get(op + " " + layer)?.setAttribute("aria-current", "true");
}

// One stop of the Tab key; arrows go to the next cell that there is.
const heat = new Map(), grid = [];
document.querySelectorAll("#heat tbody tr").forEach((tr, row) => {
  grid[row] = [];
  tr.querySelectorAll("button").forEach(button => {
    const column = button.parentElement.cellIndex - 1;
    const cell = { button, row, column, op: tr.cells[0].textContent, layer: Object.keys(data.kinds)[column] };
    grid[row][column] = cell;
    heat.set(cell.op + " " + cell.layer, button);
    button.addEventListener("click", () => { settle(cell); show(cell.op, cell.layer); });
    button.addEventListener("keydown", event => move(event, cell));
  });
});
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
let stop = null;

function settle(cell) {
  if (stop) stop.button.tabIndex = -1;
  stop = cell;
  cell.button.tabIndex = 0;
}

function move(event, cell) {
  const by = MOVES[event.key];
  if (!by) return;
  event.preventDefault();
  const width = Object.keys(data.kinds).length;
  for (let row = cell.row + by[0], column = cell.column + by[1]; grid[row] && column >= 0 && column < width; row += by[0], column += by[1]) {
    const next = grid[row][column];
    if (next) { settle(next); next.button.focus(); return; }
  }
}

if (verdicts.length) {
  const first = worst(verdicts), button = heat.get(first.op + " " + first.layer);
  settle(grid.flat().find(cell => cell.button === button));
  show(first.op, first.layer);
}

// The table of all verdicts.
const COLUMNS = [["op", v => v.op], ["layer", v => v.layer], ["kind", v => v.kind], ["phase", v => v.phase], ["budget used", strain],
  ["relative L2", v => v.l2 ?? -1], ["flips", v => v.flips], ["elements", v => v.elements], ["verdict", v => v.verdict]];
const body = document.querySelector("#verdicts tbody"), more = document.getElementById("more");
let shown = verdicts, limit = STEP;

function line(v) {
  const op = make("button", v.op, "link");
  op.type = "button";
  op.addEventListener("click", () => { show(v.op, v.layer); record.scrollIntoView({ block: "nearest" }); });
  return make("tr", [make("td", op), ...[v.layer, v.kind, v.phase].map(word => make("td", word)),
    ...[share(v.used), scientific(v.l2), count(v.flips), count(v.elements)].map(word => make("td", word, "number")),
    make("td", v.verdict, v.verdict === "pass" ? "good" : "bad")]);
}

function draw() {
  body.replaceChildren(...shown.slice(0, limit).map(line));
  const fit = shown.length < verdicts.length ? `${count(shown.length)} of ` : "";
  const part = shown.length > limit ? `; the first ${count(limit)} are shown` : "";
  document.getElementById("count").textContent = `${fit}${count(verdicts.length)} verdicts${part}.`;
  more.hidden = shown.length <= limit;
}

document.getElementById("filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = verdicts.filter(v => words.every(word => v.text.includes(word)));
  limit = STEP;
  draw();
});
more.addEventListener("click", () => { limit += STEP; draw(); });

COLUMNS.forEach(([name, key], column) => {
  const button = make("button", name), th = make("th", button, column > 3 && column < 8 ? "number" : "");
  button.type = "button";
  button.addEventListener("click", () => {
    const down = th.ariaSort !== "descending"; // large numbers are looked for first
    for (const other of th.parentElement.cells) other.ariaSort = null;
    th.ariaSort = down ? "descending" : "ascending";
    const order = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? -1 : 1);
    verdicts.sort(order);
    if (shown !== verdicts) shown.sort(order);
    draw();
  });
  document.querySelector("#verdicts thead tr").append(th);
});
draw();
