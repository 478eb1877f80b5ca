"use strict";
// One program as a picture: calls in layers, with shapes and lines. Only what is within the window is drawn.

const NODE = { width: 0.9, height: 0.56 }; // of the distance of two calls, of two layers
const LINE_HEIGHT = 0.76; // the same of a box that stands for the calls of a line
const READABLE = { x: 176, y: 62 }; // pixels from call to call, from layer to layer
const LONG_EDGE = 12; // layers
const MAX_MATCHES = 400;

// `isFolded`: whether neighbouring calls of a line are one box; `picture`: what is shown, of all calls or folded
const graph = { program: null, isFolded: true, picture: null, entry: null, chart: null, selected: null, matches: [], colours: new Map() };

const programNamed = (name) => data.programs.find((program) => program.name === name);
const shortOp = (number) => text(number).replace(/^aten\./, "");
// `f32[4, 8]`, and a mark if there are further results
const resultShape = (place) => text(graph.picture.makes[place]).replace(/^\S+: /, "").replace(/, slot.*/, " …");

// ----- the list of programs

function showProgramList() {
  const holder = document.querySelector(".programs .rows");
  const search = document.querySelector(".programs .list input");
  // programs that differ in numbers, or lengths of lists, alone stand in one row, which shows its variants when one of them is selected
  const rows = groupBy(data.programs, (program) => program.like)
    .map((variants) => ({ variants, first: variants[0], syncs: variants.reduce((sum, one) => sum + one.syncs, 0) }))
    .sort((a, b) => b.syncs - a.syncs);
  const wordsOfProgram = (row) => `${row.name} ${row.graph} ${row.site} ${row.device} ${row.differs}`.toLowerCase();
  const button = (program, className, ...children) => element("button",
    { className, ariaCurrent: String(graph.program === program), onclick: () => selectProgram(program.name) }, ...children);
  const rowElements = ({ variants, first, syncs }, wanted) => {
    const others = variants.slice(1);
    const count = others.length ? plural(variants.length, "variant") : null;
    const head = button(first, "program", first.name, element("small", {}, `${plural(syncs, "sync")}, ${plural(first.calls, "call")}`),
      element("small", {}, shortSite(first.site)), count && element("small", {}, count));
    if (!others.length || (!wanted && graph.program?.like !== first.name)) return [head];
    const shown = others.filter((one) => wordsOfProgram(one).includes(wanted)).sort((a, b) => (b === graph.program) - (a === graph.program));
    return [head, ...shown.slice(0, 100).map((one) => button(one, "program variant", one.differs || one.name, element("small", {}, `${one.name}, ${plural(one.syncs, "sync")}`))),
      shown.length > 100 ? empty(`${shown.length - 100} more: filter to see them.`) : ""];
  };
  const draw = () => {
    const wanted = search.value.toLowerCase();
    const found = rows.filter(({ variants }) => variants.some((row) => wordsOfProgram(row).includes(wanted)));
    holder.replaceChildren(...found.slice(0, 300).flatMap((row) => rowElements(row, wanted)),
      found.length > 300 ? empty(`${found.length - 300} more: filter to see them.`) : found.length ? "" : empty("Nothing matches."));
  };
  search.addEventListener("input", draw);
  graph.drawList = draw;
  draw();
}

// ----- one program

// Show a program, and a call of it in the middle if `place` is one.
function showProgram(name, place = null) {
  scrollTo("programs");
  selectProgram(name, place);
}

function selectProgram(name, place = null) {
  const program = programNamed(name);
  const title = document.getElementById("graph-title");
  if (!program) {
    title.textContent = `${name} is not in this report: a captured call has no program of its own, and old ones are forgotten.`;
    return;
  }
  const asksForCall = place !== null && place !== undefined;
  Object.assign(graph, { program, isFolded: !asksForCall });
  choosePicture();
  graph.drawList();
  title.textContent = `${program.name} on ${program.device}: ${plural(program.calls, "call")}, ${plural(program.syncs, "sync")}`
    + `${program.graph ? `, graph ${program.graph}` : ""}, first synced at ${shortSite(program.site)}`;
  colourLines();
  if (graph.entry) drawChart(graph.entry);
  else graph.entry = makeChart("graph-chart", drawGraph);
  findCalls(document.getElementById("find-call").value);
  if (asksForCall && graph.picture) selectCall(place, true);
  else showLines();
}

function choosePicture() {
  const { picture } = graph.program;
  Object.assign(graph, { picture: picture && graph.isFolded ? picture.folded : picture, selected: null, matches: [] });
  for (const [name, pressed] of [["lines", graph.isFolded], ["calls", !graph.isFolded]]) {
    document.querySelector(`[data-graph=${name}]`).setAttribute("aria-pressed", String(pressed));
  }
}

// Show the calls of a line as one box, or all calls.
function fold(isFolded) {
  if (!graph.program?.picture || graph.isFolded === isFolded) return;
  graph.isFolded = isFolded;
  choosePicture();
  drawChart(graph.entry);
  showLines();
}

// The lines with most calls get a colour each, in the order of the program.
function colourLines() {
  graph.colours.clear();
  if (!graph.picture) return;
  const counts = new Map();
  for (const site of graph.program.picture.site) counts.set(site, (counts.get(site) ?? 0) + 1);
  const most = new Set([...counts].sort((a, b) => b[1] - a[1]).slice(0, LINE_COLOURS.length).map(([site]) => site));
  for (const site of counts.keys()) if (most.has(site)) graph.colours.set(site, LINE_COLOURS[graph.colours.size]);
  graph.counts = counts;
}

const callColour = (place) => graph.colours.get(graph.picture.site[place]) ?? OTHER_COLOUR;

function bounds() {
  let [left, right, bottom] = [0, 0, 0];
  for (const x of graph.picture.x) { left = Math.min(left, x); right = Math.max(right, x); }
  for (const y of graph.picture.y) bottom = Math.max(bottom, y);
  return { left: left - 1, right: right + 1, top: -1, bottom: bottom + 1 };
}

function drawGraph(chart) {
  graph.chart = chart;
  const { picture } = graph;
  if (!picture || picture.op.length === 0) {
    const label = !picture ? "This program is left out, so that the page stays small: more recent ones are shown."
      : "No call was recorded.";
    chart.setOption({ graphic: [{ type: "text", left: "center", top: "middle", style: { text: label, fill: colour("dim"), fontSize: 14 } }] });
    return;
  }
  const box = bounds();
  const zoom = (axis, extra) => ({ filterMode: "weakFilter", minValueSpan: 1.5, ...axis, ...extra });
  chart.setOption({
    animation: false,
    grid: { left: 4, right: 26, top: 4, bottom: 26 },
    xAxis: { type: "value", show: false, min: box.left, max: box.right },
    yAxis: { type: "value", show: false, min: box.top, max: box.bottom, inverse: true },
    tooltip: { ...tooltipStyle(), formatter: (point) => (point.seriesId === "edges" ? "" : callTooltip(point.value[2])) },
    dataZoom: [
      zoom({ id: "x", type: "inside", xAxisIndex: 0 }), zoom({ id: "y", type: "inside", yAxisIndex: 0 }),
      zoom({ type: "slider", xAxisIndex: 0, bottom: 2, height: 16, showDetail: false, ...sliderStyle() }),
      zoom({ type: "slider", yAxisIndex: 0, right: 2, width: 16, showDetail: false, ...sliderStyle() }),
    ],
    series: [
      { id: "edges", type: "custom", clip: true, silent: true, renderItem: drawEdge, encode: { x: [0, 2], y: [1, 3] }, z: 1, data: edgeData() },
      { id: "near", type: "custom", clip: true, silent: true, renderItem: drawNearEdge, encode: { x: [0, 2], y: [1, 3] }, z: 2, data: [] },
      { id: "calls", type: "custom", clip: true, renderItem: drawCall, encode: { x: 0, y: 1 }, z: 3, data: picture.x.map((x, place) => [x, picture.y[place], place]) },
      { id: "marks", type: "custom", clip: true, silent: true, renderItem: drawMark, encode: { x: 0, y: 1 }, z: 4, data: [] },
    ],
  });
  chart.on("click", { seriesId: "calls" }, (point) => selectCall(point.value[2]));
  openWindow();
}

const nodeHeight = () => (graph.isFolded ? LINE_HEIGHT : NODE.height);

function edgeData() {
  const { edges, x, y } = graph.picture;
  const found = [];
  for (let i = 0; i < edges.length; i += 2) found.push(edgeBetween(edges[i], edges[i + 1], x, y));
  return found;
}

const edgeBetween = (from, to, x = graph.picture.x, y = graph.picture.y) =>
  [x[from], y[from] + nodeHeight() / 2, x[to], y[to] - nodeHeight() / 2];

function edgeShape(api) {
  const [x1, y1] = api.coord([api.value(0), api.value(1)]);
  const [x2, y2] = api.coord([api.value(2), api.value(3)]);
  const bend = Math.min(40, Math.abs(y2 - y1) / 2);
  return { x1, y1, x2, y2, cpx1: x1, cpy1: y1 + bend, cpx2: x2, cpy2: y2 - bend };
}

function drawEdge(params, api) {
  const far = api.size([1, 1])[1] < 14;
  // from forward to backward there are hundreds, one beside the other: faint, until a call is selected
  const isLong = api.value(3) - api.value(1) > LONG_EDGE;
  const opacity = isLong ? 0.06 : far ? 0.18 : 0.45;
  return { type: far || isLong ? "line" : "bezierCurve", shape: edgeShape(api), style: { stroke: colour2().dim, fill: null, lineWidth: 1, opacity } };
}

function drawNearEdge(params, api) {
  return { type: "bezierCurve", shape: edgeShape(api), style: { stroke: colour2().accent, fill: null, lineWidth: 2 } };
}

// Looking a colour up takes a while, and thousands of shapes need one: once per drawing is enough.
let cachedColours = { theme: null };
function colour2() {
  const { theme } = document.documentElement.dataset;
  if (cachedColours.theme !== theme) {
    cachedColours = { theme, ...Object.fromEntries(["dim", "accent", "card", "text", "line", "soft", "wait"].map((name) => [name, colour(name)])) };
  }
  return cachedColours;
}

function callRect(api) {
  const [x, y] = api.coord([api.value(0), api.value(1)]);
  const [unitX, unitY] = api.size([1, 1]);
  const width = Math.min(Math.max(2, unitX * NODE.width), 230);
  const height = Math.min(Math.max(2, unitY * nodeHeight()), 48);
  return { x: x - width / 2, y: y - height / 2, width, height, r: Math.min(5, height / 4) };
}

function drawCall(params, api) {
  const place = api.value(2);
  const shape = callRect(api);
  const fill = callColour(place);
  if (shape.width < 46 || shape.height < 13) return { type: "rect", shape, style: { fill } };
  const two = shape.height >= 30;
  const words = { x: shape.x + 10, overflow: "truncate", width: shape.width - 16, verticalAlign: "middle" };
  const name = graph.isFolded ? lineText(place) : shortOp(graph.picture.op[place]);
  const below = graph.isFolded ? `${shortOp(graph.picture.op[place])}  ${resultShape(place)}` : resultShape(place) || "writes in place";
  return {
    type: "group",
    children: [
      { type: "rect", shape, style: { fill: colour2().card, stroke: fill, lineWidth: 1 } },
      { type: "rect", shape: { ...shape, width: 4, r: [shape.r, 0, 0, shape.r] }, style: { fill } },
      { type: "text", style: { ...words, y: shape.y + shape.height * (two ? 0.31 : 0.5), text: name, fill: colour2().text, fontSize: 12, fontWeight: 600 } },
      ...(two ? [{ type: "text", style: { ...words, y: shape.y + shape.height * 0.71, text: below, fill: colour2().dim, fontSize: 11 } }] : []),
    ],
  };
}

// the text of the line that a box stands for
function lineText(place) {
  const site = text(graph.picture.site[place]);
  return data.sources[site] || shortSite(site) || "an unknown line";
}

function drawMark(params, api) {
  const shape = callRect(api);
  const grown = { x: shape.x - 3, y: shape.y - 3, width: shape.width + 6, height: shape.height + 6, r: shape.r + 3 };
  const isSelected = api.value(2) === graph.selected;
  return { type: "rect", shape: grown, style: { fill: null, stroke: isSelected ? colour2().accent : colour2().wait, lineWidth: isSelected ? 3 : 2 } };
}

// ----- where the window is

function setWindow(left, right, top, bottom) {
  const { chart } = graph;
  chart.dispatchAction({ type: "dataZoom", dataZoomId: "x", startValue: left, endValue: right });
  chart.dispatchAction({ type: "dataZoom", dataZoomId: "y", startValue: top, endValue: bottom });
}

// A window in which calls have the size at which their texts are read well, around (x, y).
function readable(x = null, y = null) {
  const box = bounds();
  const { chart } = graph;
  const [wide, high] = [chart.getWidth() / READABLE.x, chart.getHeight() / READABLE.y];
  const inside = (middle, size, from, to) => {
    if (to - from <= size) return [from, to];
    const start = Math.min(Math.max(middle - size / 2, from), to - size);
    return [start, start + size];
  };
  const [left, right] = inside(x ?? graph.picture.x[0], wide, box.left, box.right);
  const [top, bottom] = inside(y ?? 0, high, box.top, box.bottom);
  // what has room to spare keeps the size of a call, instead of growing
  const padX = Math.max(0, wide - (right - left)) / 2;
  const padY = Math.max(0, high - (bottom - top));
  chart.setOption({ xAxis: { min: box.left - padX, max: box.right + padX }, yAxis: { min: box.top, max: box.bottom + padY } });
  chart.dispatchAction({ type: "dataZoom", dataZoomId: "x", startValue: left - padX, endValue: right + padX });
  chart.dispatchAction({ type: "dataZoom", dataZoomId: "y", startValue: top, endValue: bottom + padY });
}

// The whole program; one that is small in calls of the usual size.
function openWindow() {
  const box = bounds();
  const { chart } = graph;
  const fits = (box.right - box.left) * READABLE.x <= chart.getWidth() && (box.bottom - box.top) * READABLE.y <= chart.getHeight();
  if (fits) readable();
  else wholeGraph();
}

function wholeGraph() {
  const box = bounds();
  setWindow(box.left - 1e6, box.right + 1e6, box.top, box.bottom + 1e6);
}

// ----- one call

function operandsOf(place) {
  const { edges } = graph.picture;
  const [reads, readers] = [[], []];
  for (let i = 0; i < edges.length; i += 2) {
    if (edges[i + 1] === place) reads.push(edges[i]);
    if (edges[i] === place) readers.push(edges[i + 1]);
  }
  return { reads, readers };
}

// Show a call and what it is connected to; `center`: move the window there.
function selectCall(place, center = false) {
  if (!graph.picture || place >= graph.picture.op.length) return;
  graph.selected = place;
  if (center) readable(graph.picture.x[place], graph.picture.y[place]);
  drawMarks();
  showCall(place);
}

function drawMarks() {
  const { picture, selected, matches } = graph;
  const marked = [...matches.slice(0, MAX_MATCHES), ...(selected === null ? [] : [selected])];
  const { reads, readers } = selected === null ? { reads: [], readers: [] } : operandsOf(selected);
  graph.chart.setOption({ series: [
    { id: "marks", data: marked.map((place) => [picture.x[place], picture.y[place], place]) },
    { id: "near", data: [...reads.map((from) => edgeBetween(from, selected)), ...readers.map((to) => edgeBetween(selected, to))] },
  ] });
}

function callTooltip(place) {
  const { picture } = graph;
  if (graph.isFolded) return element("div", {}, element("b", {}, shortOp(picture.op[place])), siteElement(text(picture.site[place])), element("div", { className: "dim" }, "click for more"));
  return element("div", {}, element("b", {}, text(picture.op[place])), element("div", {}, text(picture.makes[place]) || "writes in place"),
    siteElement(text(picture.site[place])), element("div", { className: "dim" }, "click for more"));
}

// The calls that a box stands for; a click shows one of them.
function showLine(place) {
  const [first, count] = graph.picture.places.slice(2 * place, 2 * place + 2);
  const all = graph.program.picture;
  const calls = Array.from({ length: Math.min(count, 60) }, (_, i) => first + i);
  const open = (call) => { fold(false); selectCall(call, true); };
  document.getElementById("call").replaceChildren(
    link("← all lines of this program", () => { graph.selected = null; drawMarks(); showLines(); }),
    siteElement(text(graph.picture.site[place])),
    element("h4", {}, plural(count, "call")),
    ...calls.map((call) => element("div", {}, link(`${call}: ${shortOp(all.op[call])}`, () => open(call)), " ",
      element("span", { className: "dim" }, text(all.makes[call]).replace(/^\S+: /, "").replace(/, slot.*/, " …")))),
    count > calls.length ? element("div", { className: "dim" }, `${count - calls.length} more`) : "");
}

function showCall(place) {
  if (graph.isFolded) {
    showLine(place);
    return;
  }
  const { picture } = graph;
  const { reads, readers } = operandsOf(place);
  const calls = (places) => places.length === 0 ? [element("div", { className: "dim" }, "none")]
    : places.slice(0, 40).map((other) => element("div", {}, link(`${other}: ${shortOp(picture.op[other])}`, () => selectCall(other, true)),
      " ", element("span", { className: "dim" }, resultShape(other))));
  const block = (title, ...items) => (items.length ? [element("h4", {}, title), ...items] : []);
  document.getElementById("call").replaceChildren(
    link("← all lines of this program", () => { graph.selected = null; drawMarks(); showLines(); }),
    element("h3", {}, `${place}: ${text(picture.op[place])}`),
    ...block("Your line", siteElement(text(picture.site[place]))),
    ...block("Results", element("code", { className: "code" }, text(picture.makes[place]) || `writes ${(picture.writes[place] ?? []).join(", ")} in place`)),
    ...block("Arguments", element("code", { className: "code" }, picture.args[place] || "none")),
    ...(picture.enters[place] ? block("From outside the step", element("code", { className: "code" }, picture.enters[place])) : []),
    ...block("Reads", ...calls(reads)), ...block("Read by", ...calls(readers)));
}

// The lines of the program with their colours; a click marks their calls.
function showLines() {
  const holder = document.getElementById("call");
  if (!graph.picture) {
    holder.replaceChildren();
    return;
  }
  const rows = [...graph.counts].sort((a, b) => b[1] - a[1]);
  holder.replaceChildren(element("h3", {}, "Lines"), element("div", { className: "lines" }, ...rows.flatMap(([site, count]) => [
    element("i", { style: { background: graph.colours.get(site) ?? OTHER_COLOUR } }),
    element("div", {}, link(shortSite(text(site)) || "an unknown line", () => markCalls(graph.picture.site.flatMap((other, place) => (other === site ? [place] : [])), true)),
      data.sources[text(site)] ? element("code", { className: "code" }, data.sources[text(site)]) : null),
    element("span", { className: "dim" }, String(count)),
  ])));
}

// ----- finding calls

function findCalls(wanted, go = false) {
  const words = wanted.trim().toLowerCase();
  if (words) fold(false);
  const { picture } = graph;
  const found = !words || !picture ? [] : picture.op.flatMap((op, place) => {
    const site = text(picture.site[place]);
    return `${text(op)} ${text(picture.makes[place])} ${shortSite(site)} ${data.sources[site] ?? ""}`.toLowerCase().includes(words) ? [place] : [];
  });
  document.getElementById("matches").textContent = words ? plural(found.length, "match") : "";
  if (picture) markCalls(found, go);
}

function markCalls(places, go) {
  graph.matches = places;
  if (go && places.length) readable(graph.picture.x[places[0]], graph.picture.y[places[0]]);
  drawMarks();
}

function showPrograms() {
  if (data.programs.length === 0) {
    document.querySelector(".programs").replaceWith(empty("No program was recorded."));
    return;
  }
  showProgramList();
  const search = document.getElementById("find-call");
  let turn = 0;
  search.addEventListener("input", () => { turn = 0; findCalls(search.value, true); });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || graph.matches.length === 0) return;
    turn = (turn + 1) % graph.matches.length;
    selectCall(graph.matches[turn], true);
  });
  document.querySelector("[data-graph=readable]").onclick = () => graph.picture && readable(...(graph.selected === null ? [] : [graph.picture.x[graph.selected], graph.picture.y[graph.selected]]));
  document.querySelector("[data-graph=lines]").onclick = () => fold(true);
  document.querySelector("[data-graph=calls]").onclick = () => fold(false);
  document.querySelector("[data-graph=fit]").onclick = () => graph.picture && wholeGraph();
  const most = [...data.programs].filter((program) => program.picture).sort((a, b) => b.syncs - a.syncs)[0];
  selectProgram((most ?? data.programs[0]).name);
}
