"use strict";
// The charts of steps and of time. Both show at most as many shapes as there are pixels, whatever the run's length.

const syncs = data.syncs;
const MAX_BARS = 240;

// ----- seconds and outcomes per step

// Per step, summed over its syncs: seconds by kind, syncs by outcome, and where the step begins and ends.
const stepRows = (() => {
  const rows = new Map();
  for (let i = 0; i < syncs.number.length; i += 1) {
    let row = rows.get(syncs.step[i]);
    if (!row) {
      row = { step: syncs.step[i], seconds: {}, outcomes: {}, begin: syncs.begin[i], end: 0 };
      for (const [kind] of KINDS) row.seconds[kind] = 0;
      rows.set(row.step, row);
    }
    for (const [kind, value] of parts(i)) row.seconds[kind] += value;
    const outcome = text(syncs.outcome[i]);
    row.outcomes[outcome] = (row.outcomes[outcome] ?? 0) + 1;
    row.end = Math.max(row.end, endOf(i));
  }
  const sorted = [...rows.values()].sort((a, b) => a.step - b.step);
  for (const wait of data.waits) {
    const row = rows.get(wait.step) ?? sorted[sorted.length - 1];
    if (row) row.seconds.compile += wait.seconds;
  }
  return sorted;
})();

// The seconds of one sync, by kind.
function parts(i) {
  const isFirst = text(syncs.plan[i]) === "as recorded";
  return [[isFirst ? "first" : "record", syncs.trace[i]], ["sync", syncs.sync[i] - syncs.compile[i]],
    ["compile", syncs.compile[i]], ["wait", syncs.wait[i]], ["run", syncs.run[i] ?? 0]];
}

function endOf(i) {
  const host = syncs.begin[i] + syncs.trace[i] + syncs.sync[i] + syncs.wait[i];
  return Math.max(host, (syncs.run_begin[i] ?? 0) + (syncs.run[i] ?? 0));
}

// Neighbouring steps together, so that at most MAX_BARS remain of those from `first` to `last`.
function stepBuckets(first, last) {
  const rows = stepRows.filter((row) => row.step >= first && row.step <= last);
  const size = Math.max(1, Math.ceil((last - first + 1) / MAX_BARS));
  const buckets = [];
  for (const row of rows) {
    const place = Math.floor((row.step - first) / size);
    let bucket = buckets[buckets.length - 1];
    if (!bucket || bucket.place !== place) {
      bucket = { place, rows: [], from: first + place * size, to: Math.min(last, first + (place + 1) * size - 1) };
      buckets.push(bucket);
    }
    bucket.rows.push(row);
  }
  return buckets;
}

const mean = (bucket, kind) => bucket.rows.reduce((sum, row) => sum + row.seconds[kind], 0) / bucket.rows.length;

function share(bucket, outcome) {
  let [part, whole] = [0, 0];
  for (const row of bucket.rows) {
    part += row.outcomes[outcome] ?? 0;
    for (const count of Object.values(row.outcomes)) whole += count;
  }
  return 100 * part / whole;
}

let shownBuckets = [];

// The height of the axis: one slow step, as the first often is, must not make the others flat.
function tallest() {
  const heights = shownBuckets.map((bucket) => KINDS.reduce((sum, [kind]) => sum + mean(bucket, kind), 0)).sort((a, b) => a - b);
  const [usual, most] = [heights[Math.floor(0.95 * (heights.length - 1))], heights[heights.length - 1]];
  return most > 4 * usual && usual > 0 ? { max: 1.6 * usual, isCut: true, height: 1.6 * usual } : { max: null, isCut: false, height: most };
}

// The seconds axis, and a word on bars that are higher than it.
function stepAxis() {
  const { max, isCut, height } = tallest();
  return {
    yAxis: [{ max, axisLabel: { formatter: axisSeconds(height), showMaxLabel: !isCut } }, {}],
    graphic: [{ id: "cut", type: "text", right: 20, top: 6, silent: true, invisible: !isCut,
      style: { text: "higher bars are cut off: hover to see them", fill: colour("dim"), fontSize: 12 } }],
  };
}

function stepSeries(first, last) {
  shownBuckets = stepBuckets(first, last);
  const middle = (bucket) => (bucket.from + bucket.to) / 2;
  const bars = (name, key, axis, values, fill) => ({
    id: `${axis}${key}`, name, type: "bar", stack: `stack${axis}`, xAxisIndex: axis, yAxisIndex: axis, barCategoryGap: shownBuckets.length > 80 ? "0%" : "8%",
    itemStyle: { color: fill }, emphasis: { disabled: true }, data: shownBuckets.map((bucket) => [middle(bucket), values(bucket)]),
  });
  return [
    ...KINDS.map(([kind, name]) => bars(name, kind, 0, (bucket) => mean(bucket, kind), colour(kind))),
    ...outcomesMet().map((outcome, place, all) => bars(outcome, outcome, 1, (bucket) => share(bucket, outcome),
      outcomeColour(outcome, all))),
  ];
}

const outcomesMet = () => Object.keys(OUTCOMES).filter((outcome) => stepRows.some((row) => outcome in row.outcomes));

// Two outcomes that share a colour, as both kinds of hits from elsewhere do, are told apart where both occur.
function outcomeColour(outcome, met) {
  const twin = met.find((other) => OUTCOMES[other] === OUTCOMES[outcome]);
  return twin === outcome ? colour(OUTCOMES[outcome]) : "#c2579b";
}

function drawSteps(chart) {
  const [first, last] = [stepRows[0].step, stepRows[stepRows.length - 1].step];
  const x = (axis, labels) => ({
    gridIndex: axis, type: "value", min: first - 0.5, max: last + 0.5, ...axisStyle(), splitLine: { show: false },
    axisTick: { show: false },
    axisLabel: { show: labels, color: colour("dim"), showMinLabel: false, showMaxLabel: false, hideOverlap: true,
      formatter: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : "") },
  });
  chart.setOption({
    animation: false,
    legend: [
      { top: 0, left: 70, itemWidth: 12, itemHeight: 12, textStyle: { color: colour("dim") }, data: KINDS.map(([, name]) => name) },
      { top: 208, left: 70, itemWidth: 12, itemHeight: 12, textStyle: { color: colour("dim") }, data: outcomesMet() },
    ],
    grid: [{ left: 70, right: 16, top: 34, height: 150 }, { left: 70, right: 16, top: 236, height: 70 }],
    xAxis: [x(0, false), x(1, true)],
    yAxis: [
      { gridIndex: 0, type: "value", ...axisStyle(), axisLabel: { color: colour("dim"), formatter: seconds } },
      { gridIndex: 1, type: "value", min: 0, max: 100, interval: 50, ...axisStyle(), axisLabel: { color: colour("dim"), formatter: "{value} %" } },
    ],
    dataZoom: [
      { type: "inside", xAxisIndex: [0, 1], filterMode: "none", minValueSpan: 4 },
      { type: "slider", xAxisIndex: [0, 1], filterMode: "none", minValueSpan: 4, left: 70, right: 16, bottom: 8, height: 20, ...sliderStyle(),
        labelFormatter: (value) => Math.round(value).toLocaleString("en") },
    ],
    tooltip: { trigger: "axis", axisPointer: { type: "line", lineStyle: { color: colour("dim") } }, ...tooltipStyle(), formatter: stepTooltip },
    axisPointer: { link: [{ xAxisIndex: "all" }] },
    series: stepSeries(first, last),
  });
  chart.setOption(stepAxis());
  chart.on("datazoom", () => {
    const { startValue, endValue } = chart.getOption().dataZoom[0];
    chart.setOption({ series: stepSeries(Math.max(first, Math.ceil(startValue)), Math.min(last, Math.floor(endValue))) });
    chart.setOption(stepAxis());
  });
  chart.getZr().on("click", (event) => {
    const [x0] = chart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY]);
    const bucket = shownBuckets.find((one) => x0 >= one.from - 0.5 && x0 <= one.to + 0.5);
    if (bucket && event.offsetY < 310) showTime(bucket.rows[0].begin, bucket.rows[bucket.rows.length - 1].end);
  });
}

function stepTooltip(points) {
  const bucket = shownBuckets[points[0].dataIndex];
  const several = bucket.rows.length > 1;
  const title = several ? `steps ${bucket.from} to ${bucket.to}, means` : `step ${bucket.from}`;
  const rows = KINDS.map(([kind, name]) => [kind, name, mean(bucket, kind)]).filter(([, , value]) => value > 0);
  const outcomes = outcomesMet().map((outcome) => [outcome, share(bucket, outcome)]).filter(([, value]) => value > 0);
  return element("div", {}, element("b", {}, title),
    ...rows.map(([kind, name, value]) => element("div", {}, dot(colour(kind)), `${name}: `, element("b", {}, seconds(value)))),
    ...outcomes.map(([outcome, value]) => element("div", { className: "dim" }, `${outcome}: ${value.toFixed(0)} %`)));
}

const dot = (fill) => element("span", { style: { display: "inline-block", width: "9px", height: "9px", "border-radius": "2px", "margin-right": "6px", background: fill } });

// ----- what happened when

// Lanes from top to bottom, each with its segments in order: { from, to, kind, sync or compile }.
const lanes = (() => {
  const made = [];
  for (const device of data.summary.devices) {
    const host = { name: `${device}, Python`, segments: [] };
    const runs = { name: `${device}, runs`, segments: [] };
    for (let i = 0; i < syncs.number.length; i += 1) {
      if (text(syncs.device[i]) !== device) continue;
      let at = syncs.begin[i];
      for (const [kind, value] of parts(i)) {
        if (kind === "run") continue;
        if (value > 0) host.segments.push({ from: at, to: at + value, kind, sync: i });
        at += value;
      }
      if (syncs.run[i] !== null) runs.segments.push({ from: syncs.run_begin[i], to: syncs.run_begin[i] + syncs.run[i], kind: "run", sync: i });
    }
    made.push(host, runs);
  }
  // a wait belongs to no device, but to a rank if there are several
  for (const wait of data.waits) {
    const lane = made.find(({ name }) => name === `${wait.device}, Python`) ?? made[0];
    lane?.segments.push({ from: wait.begin, to: wait.begin + wait.seconds, kind: "compile", wait });
  }
  for (const lane of made) lane.segments.sort((a, b) => a.from - b.from);
  const end = Math.max(0, ...made.flatMap((lane) => lane.segments.length ? [lane.segments[lane.segments.length - 1].to] : []));
  const compiled = data.compiles.map((compile) => ({ from: compile.begin, to: compile.end ?? end, kind: "compile", compile }));
  if (compiled.length) made.push({ name: "compiler", segments: compiled.sort((a, b) => a.from - b.from) });
  return made;
})();

const timeRange = (() => {
  let [from, to] = [Infinity, 0];
  for (const lane of lanes) for (const segment of lane.segments) {
    from = Math.min(from, segment.from);
    to = Math.max(to, segment.to);
  }
  return [from, to];
})();

// The segments of one lane between two times; those narrower than a pixel are joined, in the colour of most of them.
function visibleSegments(lane, from, to, pixel) {
  const found = [];
  let joined = null;
  const flush = () => { if (joined) found.push(joined); joined = null; };
  for (const segment of lane.segments) {
    if (segment.to < from || segment.from > to) continue;
    const width = segment.to - segment.from;
    if (width >= 1.5 * pixel) {
      flush();
      found.push({ ...segment, count: 1 });
      continue;
    }
    if (joined && (segment.to - joined.from > 3 * pixel || segment.from - joined.to > pixel)) flush();
    if (!joined) joined = { ...segment, count: 0, spent: {} };
    joined.to = Math.max(joined.to, segment.to);
    joined.count += 1;
    joined.spent[segment.kind] = (joined.spent[segment.kind] ?? 0) + width;
    joined.kind = Object.keys(joined.spent).reduce((a, b) => (joined.spent[a] >= joined.spent[b] ? a : b));
  }
  flush();
  return found;
}

let shownSegments = [];
let timelineEntry = null;

function timelineData(chart, from, to) {
  const pixel = (to - from) / Math.max(200, chart.getWidth() - 140);
  shownSegments = lanes.flatMap((lane, place) => visibleSegments(lane, from, to, pixel).map((segment) => ({ ...segment, lane: place })));
  return shownSegments.map((segment) => ({ value: [segment.lane, segment.from, segment.to], itemStyle: { color: colour(segment.kind) } }));
}

function drawTimeline(chart) {
  const [from, to] = timeRange;
  const axis = {
    animation: false,
    grid: { left: 116, right: 16, top: 8, bottom: 64 },
    tooltip: { ...tooltipStyle(), formatter: (point) => segmentTooltip(shownSegments[point.dataIndex]) },
    xAxis: { type: "value", min: from, max: to, ...axisStyle(),
      axisLabel: { color: colour("dim"), hideOverlap: true, showMinLabel: false, showMaxLabel: false, formatter: (value) => `${+value.toPrecision(7)} s` } },
    yAxis: { type: "category", inverse: true, data: lanes.map((lane) => lane.name), ...axisStyle(), axisTick: { show: false }, splitLine: { show: false } },
    dataZoom: [
      { id: "wheel", type: "inside", filterMode: "weakFilter", minValueSpan: 1e-5 },
      { id: "slider", type: "slider", filterMode: "weakFilter", minValueSpan: 1e-5, left: 116, right: 16, bottom: 8, height: 20, ...sliderStyle(), labelFormatter: inSeconds },
    ],
    series: [{ id: "segments", type: "custom", renderItem: drawSegment, encode: { x: [1, 2], y: 0 }, clip: true, data: timelineData(chart, from, to) }],
  };
  chart.setOption(axis);
  chart.on("datazoom", () => {
    const { startValue, endValue } = chart.getOption().dataZoom[0];
    chart.setOption({ series: [{ id: "segments", data: timelineData(chart, startValue, endValue) }] });
  });
}

function drawSegment(params, api) {
  const [x, y] = api.coord([api.value(1), api.value(0)]);
  const [end] = api.coord([api.value(2), api.value(0)]);
  const height = Math.min(34, api.size([0, 1])[1] * 0.62);
  const { coordSys } = params;
  const shape = echarts.graphic.clipRectByRect({ x, y: y - height / 2, width: Math.max(1, end - x), height }, coordSys);
  if (!shape) return shape;
  const rect = { type: "rect", shape, style: { fill: api.visual("color") } };
  const { wait } = shownSegments[params.dataIndex] ?? {};
  if (!wait || shape.width < 40) return rect;
  const words = { text: wait.call, x: shape.x + shape.width / 2, y, align: "center", verticalAlign: "middle", fill: "#fff", fontSize: 12,
    overflow: "truncate", width: shape.width - 8 };
  return { type: "group", children: [rect, { type: "text", style: words }] };
}

function segmentTooltip(segment) {
  const length = element("b", {}, seconds(segment.to - segment.from));
  if (segment.compile) {
    return element("div", {}, dot(colour("compile")), `graph ${segment.compile.graph || "?"}: ${segment.compile.outcome}, `, length,
      element("div", { className: "dim" }, `since ${segment.compile.reason}`));
  }
  if (segment.count > 1) return element("div", {}, `${segment.count} pieces in `, length, element("div", { className: "dim" }, "zoom in to see each"));
  if (segment.wait) {
    return element("div", {}, dot(colour("compile")), `${segment.wait.call}: `, length,
      element("div", { className: "dim" }, `the program asked to wait for the compiler, ${segment.wait.done ? "until it was done" : "and went on before it was done"}`),
      siteElement(segment.wait.site));
  }
  const i = segment.sync;
  const names = Object.fromEntries(KINDS);
  return element("div", {}, dot(colour(segment.kind)), `${names[segment.kind]}: `, length,
    element("div", {}, `step ${syncs.step[i]}, ${text(syncs.program[i])}, ${text(syncs.outcome[i])}, ${text(syncs.plan[i])}`),
    element("div", { className: "dim" }, `synced by ${text(syncs.cause[i])}`), siteElement(text(syncs.site[i])));
}

// Zoom the timeline to some seconds, with a little room at both sides.
function showTime(from, to) {
  const room = (to - from) * 0.05;
  timelineEntry.chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, startValue: Math.max(timeRange[0], from - room), endValue: Math.min(timeRange[1], to + room) });
}

function showSteps() {
  if (stepRows.length === 0) {
    for (const id of ["steps-chart", "timeline-chart"]) document.getElementById(id).replaceWith(empty("No step was recorded."));
    return;
  }
  makeChart("steps-chart", drawSteps);
  document.getElementById("timeline-chart").style.height = `${96 + 58 * lanes.length}px`;
  timelineEntry = makeChart("timeline-chart", drawTimeline);
  const kinds = new Set(lanes.flatMap((lane) => lane.segments.map((segment) => segment.kind)));
  document.getElementById("timeline-legend").append(...KINDS.filter(([kind]) => kinds.has(kind)).map(([kind, name]) =>
    element("span", {}, element("i", { style: { background: `var(--${kind})` } }), name)));
  document.querySelector("[data-zoom=all]").onclick = () => showTime(...timeRange);
}
