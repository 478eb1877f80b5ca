"use strict";
// Tables that can be sorted and filtered, and the sections made of them.

const ROWS_AT_FIRST = 50;

// `columns`: { title, number: whether it is one, narrow: whether it is never wrapped, sort: row -> value, show: row -> text or element, words: row -> text }
function makeTable(columns, rows, { filter = rows.length > 8 } = {}) {
  const body = element("tbody");
  const more = element("div");
  let shown = rows;
  let limit = ROWS_AT_FIRST;
  let sorted = { column: null, descending: false };

  function draw() {
    body.replaceChildren(...shown.slice(0, limit).map((row) => element("tr", {},
      ...columns.map((column) => element("td", { className: column.number ? "number" : column.narrow ? "narrow" : "" }, column.show(row))))));
    more.replaceChildren(shown.length > limit
      ? link(`${plural(shown.length - limit, "row")} more`, () => { limit = Infinity; draw(); })
      : shown.length === 0 ? empty("Nothing matches.") : "");
  }

  function sortBy(column) {
    sorted = { column, descending: sorted.column === column ? !sorted.descending : Boolean(column.number) };
    const key = column.sort ?? column.show;
    const order = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    shown = [...shown].sort((a, b) => order(key(a), key(b)) * (sorted.descending ? -1 : 1));
    draw();
  }

  const heads = columns.map((column) => element("th",
    { className: column.number ? "number" : "", title: "sort", onclick: () => sortBy(column) }, column.title));
  const search = element("input", { type: "search", placeholder: "filter", ariaLabel: "filter rows" });
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    shown = rows.filter((row) => columns.some((column) => wordsOf(column, row).toLowerCase().includes(wanted)));
    draw();
  });
  draw();
  return element("div", {}, filter ? element("div", { className: "table-tools" }, search) : null,
    element("div", { className: "scroll" },
      element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body)), more);
}

function wordsOf(column, row) {
  const shown = column.words ? column.words(row) : column.show(row);
  return shown instanceof Node ? shown.textContent : String(shown ?? "");
}

// ----- the top of the page

function showSummary() {
  const { summary, run, notes } = data;
  document.getElementById("about").textContent = [run.command && `python ${run.command}`, run.torch && `torch ${run.torch}`,
    run.python && `Python ${run.python}`, summary.devices.join(", "), run.threads && plural(run.threads, "thread"),
    run.process && `process ${run.process}`].filter(Boolean).join(" · ");
  document.getElementById("notes").append(...notes.map((note) => element("p", { className: "note" }, note)));
  const kinds = new Set(data.programs.map((program) => program.like)).size;
  const running = summary.compiles_running ? `, ${summary.compiles_running} of them not over` : "";
  const first = summary.first_step > 1 ? `, since step ${summary.first_step}` : "";
  const tiles = [
    [inSeconds(summary.seconds), `of ${plural(summary.steps - Math.max(summary.first_step - 1, 0), "step")}${first}`],
    [percent(summary.hits, summary.syncs), `of ${plural(summary.syncs, "sync")} were known`],
    [summary.programs.toLocaleString("en"), `different programs${kinds < data.programs.length ? `, ${kinds} apart from their numbers` : ""}`],
    [(summary.compiles + summary.compiles_running).toLocaleString("en"),
      `${summary.compiles + summary.compiles_running === 1 ? "compile" : "compiles"}${running}, ${inSeconds(summary.compile_seconds)}`],
    [summary.cuts.toLocaleString("en"), `cuts, ${inSeconds(summary.cut_seconds)}`],
    [inSeconds(summary.wait_seconds), "waiting for the device"],
    ...(summary.asked_wait_seconds > 0 ? [[inSeconds(summary.asked_wait_seconds), "in wait_for_compiles()"]] : []),
  ];
  document.getElementById("tiles").append(...tiles.map(([value, label]) =>
    element("div", { className: "tile" }, element("b", {}, value), element("span", {}, label))));
}

function showFindings() {
  const place = content("findings");
  if (data.summary.syncs === 0) {
    place.append(empty("Nothing was recorded: no sync of a lazy device has happened yet."));
    return;
  }
  if (data.findings.length === 0) {
    place.append(empty(`Nothing stands out: ${percent(data.summary.hits, data.summary.syncs)} of the syncs were known, and nothing else took more than 1 % of the run.`));
    return;
  }
  const [changeable, other] = [data.findings.filter((one) => one.is_fault), data.findings.filter((one) => !one.is_fault)];
  place.append(element("h3", {}, "You can change"), changeable.length
    ? element("ol", { className: "findings" }, ...changeable.map(findingElement)) : empty("Nothing stands out."));
  if (other.length) {
    place.append(element("h3", {}, "For information"), element("ol", { className: "findings information" }, ...other.map(findingElement)));
  }
}

function findingElement(finding) {
  const share = Math.min(1, finding.seconds / Math.max(data.summary.seconds, 1e-9));
  const cost = finding.seconds > 0
    ? element("div", {}, element("div", { className: "cost" }, inSeconds(finding.seconds)),
      element("div", { className: "dim" }, `${percent(share, 1)} of the run`),
      element("div", { className: "share" }, element("i", { style: { width: `${100 * share}%`, background: finding.is_fault ? "var(--compile)" : "var(--dim)" } })))
    : element("div", { className: "dim" }, "no time by itself");
  const actions = [link("details", () => scrollTo(finding.section))];
  if (finding.program) actions.push(programLink(finding.program, finding.place, "show in the program"));
  return element("li", {}, cost, element("div", {},
    element("h3", {}, finding.title), element("p", {}, finding.text),
    finding.site ? siteElement(finding.site) : null,
    element("p", { className: "advice" }, finding.advice),
    element("div", { className: "actions" }, ...actions)));
}

// A column of times, in one unit.
function secondsColumn(title, rows, read, suffix = () => "") {
  const show = secondsLike(rows.map(read));
  return { title, number: true, sort: read, show: (row) => (read(row) ? `${show(read(row))}${suffix(row)}` : "–") };
}

const programLink = (name, place, label = name) => link(label, () => showProgram(name, place));

// ----- what was not known, cuts, compiles, graphs

function showMisses() {
  const place = content("misses");
  if (data.explained.length === 0) {
    place.append(empty("Every sync was known."));
    return;
  }
  place.append(makeTable([
    { title: "syncs", number: true, sort: (row) => row.count, show: (row) => row.count.toLocaleString("en") },
    secondsColumn("Python's time", data.explained, (row) => row.seconds),
    { title: "steps", narrow: true, sort: (row) => row.first_step, show: (row) => row.first_step === row.last_step ? `${row.first_step}` : `${row.first_step} to ${row.last_step}` },
    { title: "outcome", sort: (row) => row.outcome, show: (row) => badge(row.outcome) },
    { title: "what differed, the last time", sort: (row) => row.difference?.kind ?? "", show: differenceElement },
    { title: "synced by", sort: (row) => row.site, show: (row) => element("div", {}, row.cause, siteElement(row.site)) },
  ], data.explained));
}

function differenceElement(row) {
  const found = row.difference;
  const show = programLink(row.program, found?.place);
  if (!found) return element("div", {}, show, ": ", row.outcome === "miss" ? "the first of its device" : "nothing in the program");
  const at = found.place === null ? "" : `, at call ${found.place}`;
  return element("div", {},
    show, `, unlike ${row.nearest === row.program ? "itself before" : row.nearest}: `, element("b", {}, found.kind), at,
    element("div", { className: "sides" },
      element("span", {}, "before"), element("div", {}, found.before, found.before_site ? siteElement(found.before_site) : null),
      element("span", {}, "now"), element("div", {}, found.now, found.now_site ? siteElement(found.now_site) : null)),
    row.advice ? element("p", { className: "advice" }, row.advice) : null);
}

function showCuts() {
  const place = content("cuts");
  if (data.cuts.length === 0) {
    place.append(empty("No step was cut."));
    return;
  }
  place.append(makeTable([
    { title: "cuts", number: true, sort: (row) => row.count, show: (row) => row.count.toLocaleString("en") },
    { title: "in steps", number: true, sort: (row) => row.steps, show: (row) => row.steps.toLocaleString("en") },
    secondsColumn("Python waited", data.cuts, (row) => row.seconds),
    { title: "line", sort: (row) => row.site, show: (row) => siteElement(row.site) },
    { title: "cause", show: (row) => row.cause },
    { title: "advice", show: (row) => row.advice },
  ], data.cuts));
}

function showCompiles() {
  const place = content("compiles");
  if (data.compiles.length === 0) {
    place.append(empty("Nothing was compiled: no graph recurred, or config.compile is \"off\"."));
    return;
  }
  place.append(makeTable([
    { title: "at", number: true, sort: (row) => row.begin, show: (row) => inSeconds(row.begin) },
    { title: "graph", show: (row) => row.graph || "–" },
    { title: "nodes", number: true, sort: (row) => row.nodes, show: (row) => row.nodes.toLocaleString("en") },
    secondsColumn("time", data.compiles, (row) => row.elapsed, (row) => (row.outcome === "started" ? " so far" : "")),
    { title: "outcome", show: (row) => row.outcome === "started" ? "not over at the end" : row.outcome === "loaded" ? "found on disk" : row.outcome },
    { title: "why", sort: (row) => row.reason, show: compileReason },
  ], data.compiles));
}

function compileReason(row) {
  const found = row.difference;
  return element("div", {}, row.reason,
    found ? element("div", { className: "sides" }, element("span", {}, "before"), found.before,
      element("span", {}, "now"), element("div", {}, found.now, found.now_site ? siteElement(found.now_site) : null)) : null,
    found?.advice ? element("p", { className: "advice" }, found.advice) : null,
    row.error ? element("code", { className: "code" }, row.error) : null);
}

function showGraphs() {
  const place = content("graphs");
  if (data.graphs.length === 0) {
    place.append(empty("No graph ran: what is seen for the first time runs while it is recorded."));
  } else {
    place.append(makeTable([
      { title: "graph", show: (row) => (row.graph || "–") + (row.variants > 1 ? ` and ${plural(row.variants - 1, "variant")}` : "") },
      { title: "program", sort: (row) => row.program, show: (row) => programLink(row.program) },
      { title: "plan", show: (row) => row.plan },
      { title: "nodes", number: true, sort: (row) => row.nodes ?? -1, show: (row) => row.nodes?.toLocaleString("en") ?? "–" },
      { title: "runs", number: true, sort: (row) => row.runs, show: (row) => row.runs.toLocaleString("en") },
      secondsColumn("in all", data.graphs, (row) => row.seconds),
      secondsColumn("median", data.graphs, (row) => row.median),
      secondsColumn("slowest", data.graphs, (row) => row.slowest),
    ], data.graphs));
  }
  if (data.nodes.length > 0) {
    const total = data.nodes.reduce((sum, node) => sum + node.seconds, 0);
    place.append(element("h3", {}, "Slowest nodes of the profile"), makeTable([
      { title: "place", number: true, sort: (row) => row.place, show: (row) => String(row.place) },
      { title: "operator", show: (row) => row.op },
      secondsColumn("time per run", data.nodes, (row) => row.seconds),
      { title: "share", number: true, sort: (row) => row.seconds, show: (row) => percent(row.seconds, total) },
    ], data.nodes));
  }
}

// ----- memory and caches

function showMemory() {
  const place = content("memory");
  if (data.memory.length > 1) {
    place.append(element("div", { className: "columns" },
      element("div", {}, element("h3", {}, "Live tensors"), element("div", { className: "chart", id: "tensors-chart" })),
      element("div", {}, element("h3", {}, "Memory"), element("div", { className: "chart", id: "memory-chart" }))));
    makeChart("tensors-chart", (chart) => drawSamples(chart, [["tensors", "live tensors", 0]], (value) => value.toLocaleString("en")));
    makeChart("memory-chart", (chart) => drawSamples(chart,
      [["process_bytes", "process", 0], ["bytes", "live tensors (right axis)", 1], ["device_bytes", "allocated on the GPU (right axis)", 1]], bytes));
  } else {
    place.append(empty("Too short a run for a picture of memory: samples are taken ten times a second."));
  }
  place.append(element("div", { className: "columns" }, liveTensors(), diskCache()), computations());
}

// One line per device and figure over time, each figure on the left axis (0) or the right one (1): beside a process's memory
// that of its tensors would be a flat line. The process has one, whatever the device; ranks have one each.
function drawSamples(chart, figures, show) {
  const lines = [];
  for (const [key, name, axis] of figures) {
    for (const device of key === "process_bytes" && !data.run.ranks ? [null] : data.summary.devices) {
      const samples = data.memory.filter((sample) => sample[key] !== null && (device === null || sample.device === device));
      if (samples.length) {
        lines.push({ name: device === null ? name : `${device}: ${name}`, type: "line", yAxisIndex: axis, showSymbol: false, lineStyle: { width: 2 },
          areaStyle: { opacity: axis === 0 ? 0.08 : 0 }, data: samples.map((sample) => [sample.time, sample[key], sample.step]) });
      }
    }
  }
  const axes = [...new Set(figures.map(([, , axis]) => axis))].map((axis) => {
    const most = Math.max(1, ...lines.filter((line) => line.yAxisIndex === axis).flatMap((line) => line.data.map((point) => point[1])));
    const onLeft = { ...axisStyle(), axisLabel: { color: colour("dim"), formatter: show } };
    return { type: "value", min: 0, position: axis ? "right" : "left", ...(show === bytes ? roundAxis(most) : { minInterval: 1 }), ...onLeft,
      ...(axis ? { splitLine: { show: false }, alignTicks: false } : {}) };
  });
  const latest = Math.max(...data.memory.map((sample) => sample.time));
  chart.setOption({
    animation: false, color: [colour("record"), colour("wait"), colour("run"), colour("sync")],
    legend: { top: 0, left: 64, icon: "roundRect", itemHeight: 4, textStyle: { color: colour("dim") } },
    grid: { left: 68, right: axes.length > 1 ? 72 : 20, top: 32, bottom: 28 },
    tooltip: { trigger: "axis", ...tooltipStyle(), formatter: (points) => element("div", {},
      element("div", { className: "dim" }, `at ${seconds(points[0].data[0])}, step ${points[0].data[2]}`),
      ...points.map((point) => element("div", {}, dot(point.color), `${point.seriesName}: `, element("b", {}, show(point.data[1]))))) },
    xAxis: { type: "value", min: "dataMin", max: "dataMax", ...axisStyle(), splitLine: { show: false },
      axisLabel: { color: colour("dim"), formatter: axisSeconds(latest), hideOverlap: true, showMinLabel: false, showMaxLabel: false } },
    yAxis: axes,
    series: lines,
  });
}

// About four labels on an axis of bytes, at multiples of 1, 2, 5, 10, 20, 50, ... of a unit.
function roundAxis(most) {
  const quarter = Math.max(most / 4, 1);
  const unit = 1024 ** Math.floor(Math.log(quarter) / Math.log(1024));
  const interval = unit * [1, 2, 5, 10, 20, 50, 100, 200, 500, 1024].find((factor) => factor * unit >= quarter);
  return { interval, max: interval * Math.ceil(most / interval) || interval };
}

function liveTensors() {
  const rows = data.peaks.flatMap((peak) => peak.lines);
  const steps = data.peaks.map((peak) => `${peak.device} at the end of step ${peak.step}`).join(", ");
  const head = element("h3", {}, rows.length ? `Live tensors when most were held: ${steps}` : "Live tensors");
  if (rows.length === 0) return element("div", {}, head, empty("None were seen."));
  const size = bytesLike(rows.map((row) => row.bytes));
  return element("div", {}, head, makeTable([
    { title: "tensors", number: true, sort: (row) => row.tensors, show: (row) => row.tensors.toLocaleString("en") },
    { title: "memory", number: true, sort: (row) => row.bytes, show: (row) => size(row.bytes) },
    { title: "met last", sort: (row) => row.site, show: (row) => element("div", {}, row.how, row.site ? siteElement(row.site) : null) },
  ], rows));
}

function diskCache() {
  const cache = data.state["disk cache"];
  const head = element("h3", {}, "Disk cache");
  if (!cache) return element("div", {}, head, empty("Not in use in this run."));
  const rows = [["directory", cache.place], ["entries", cache.entries ?? "–"], ["size", `${bytes(cache.bytes)} of ${bytes(cache.limit)}`],
    ["graphs found on disk", cache.hits], ["graphs not found", cache.misses], ["graphs written", cache.writes],
    ["removed to stay below the size", cache.evictions], ["damaged files", cache.corrupt],
    ["files that could not be read or written", cache.errors + cache.refused]];
  for (const folder of cache.behind ?? []) rows.push(["folder that is only read", folder]);
  if (cache.hits_behind) rows.push(["of the graphs found, in such a folder or a loaded file", cache.hits_behind]);
  if (cache.error) rows.push(["error", cache.error]);
  return element("div", {}, head, makeTable([
    { title: "", show: (row) => row[0] }, { title: "", show: (row) => String(row[1]) },
  ], rows, { filter: false }));
}

// What `get_debug_state` calls the plan of a graph, in the words of the rest of the page.
const PLANS = {
  profiling: "interpreted: compiled if it recurs", compiling: "interpreted: being compiled", optimized: "compiled",
  fallback: "interpreted: the compiler failed",
};

function computations() {
  const rows = data.state.computations;
  const head = element("h3", {}, "Graphs in memory");
  if (!rows) return element("div", {}, head, empty("Not known: the log has no state at exit."));
  if (rows.length === 0) return element("div", {}, head, empty("None."));
  return element("div", {}, head, makeTable([
    { title: "graph", show: (row) => row.graph },
    { title: "hash", show: (row) => element("code", {}, row.hash.slice(0, 8)) },
    { title: "nodes", number: true, sort: (row) => row.nodes, show: (row) => row.nodes.toLocaleString("en") },
    { title: "inputs", number: true, sort: (row) => row.inputs, show: (row) => String(row.inputs) },
    { title: "outputs", number: true, sort: (row) => row.outputs, show: (row) => String(row.outputs) },
    { title: "runs", number: true, sort: (row) => row.runs, show: (row) => row.runs.toLocaleString("en") },
    { title: "plan", show: (row) => PLANS[row.plan] ?? row.plan },
    { title: "compiles", number: true, sort: (row) => row.compiles, show: (row) => String(row.compiles) },
    { title: "floats that are inputs", number: true, sort: (row) => row.promoted_scalars, show: (row) => String(row.promoted_scalars) },
    { title: "error", show: (row) => row.error ?? "" },
  ], rows));
}
