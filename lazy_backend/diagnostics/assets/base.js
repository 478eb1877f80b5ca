"use strict";
// What the other scripts share: the data, texts, numbers as people read them, elements, colours.

const data = JSON.parse(document.getElementById("data").textContent);
const text = (number) => data.texts[number];

// ----- words

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : /(s|ch)$/.test(noun) ? "es" : "s"}`;

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${(value / 60).toFixed(1)} min`;
}

// What is compared is told in one unit: costs and tiles in seconds, the figures of a column or an axis in that of the largest.
function inSeconds(value) {
  if (value === null || value === undefined) return "–";
  const digits = value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : value >= 0.995 ? 2 : 3;
  return `${value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} s`;
}

function secondsLike(values) {
  const most = Math.max(0, ...values);
  const [unit, scale, digits] = most < 1e-3 ? ["µs", 1e-6, 0] : most < 1 ? ["ms", 1e-3, most < 0.1 ? 2 : 1] : ["s", 1, most < 100 ? 3 : 1];
  return (value) => `${(value / scale).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}

// Labels of an axis that reaches `most`, without zeros at their ends.
function axisSeconds(most) {
  const [unit, scale] = most < 1e-3 ? ["µs", 1e-6] : most < 1 ? ["ms", 1e-3] : ["s", 1];
  return (value) => `${+(value / scale).toPrecision(5)} ${unit}`;
}

const UNITS_OF_BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

function bytesLike(values) {
  const most = Math.max(1, ...values);
  const unit = Math.min(UNITS_OF_BYTES.length - 1, Math.floor(Math.log(most) / Math.log(1024)));
  const digits = unit ? 2 : 0;
  const shown = (value) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
  return (value) => {
    const scaled = value / 1024 ** unit;
    return `${scaled > 0 && scaled < 0.01 ? "< 0.01" : shown(scaled)} ${UNITS_OF_BYTES[unit]}`;
  };
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = UNITS_OF_BYTES;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(part === whole || part / whole < 0.995 ? 0 : 1)} %` : "–";

// `train.py:31` for a line below the directory that the run was started in, else with the folder that it is in
function shortSite(site) {
  const below = `${data.run.directory}/`;
  return site.startsWith(below) ? site.slice(below.length) : site.split("/").slice(-2).join("/");
}

// The items by what `key` gives for them, in the order of the first of each.
function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) {
    if (!groups.has(key(item))) groups.set(key(item), []);
    groups.get(key(item)).push(item);
  }
  return [...groups.values()];
}

// ----- elements: texts are never markup

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") for (const [key, item] of Object.entries(value)) made.style.setProperty(key, item);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// a line of the user's code with its text
function siteElement(site) {
  if (!site) return element("span", { className: "dim" }, "an unknown line");
  const source = data.sources[site];
  return element("div", { className: "where" },
    element("code", { className: "site", title: site }, shortSite(site)),
    source ? element("code", { className: "code" }, source) : null);
}

const link = (label, onclick) => element("button", { className: "link", onclick }, label);
const empty = (label) => element("p", { className: "empty" }, label);
const content = (section) => document.querySelector(`#${section} .content`);
const scrollTo = (section) => document.getElementById(section).scrollIntoView({ behavior: "smooth" });

// ----- colours

const KINDS = [
  ["record", "recording (Python)"], ["first", "first time: recorded and run"], ["sync", "sync"],
  ["compile", "the compiler"], ["wait", "waiting for the device"], ["run", "run"],
];
const OUTCOMES = {
  "hit, level 1": "run", "replay": "first", "generalised hit": "record", "hit, level 2": "sync", "disk hit": "sync",
  "new specialisation": "wait", "miss": "compile",
};
const LINE_COLOURS = ["#4f86e8", "#dd9a26", "#2f9e64", "#dc4f55", "#9067dc", "#23a0a8", "#c2579b", "#8a9a3b", "#b0714a",
  "#5f6fb5", "#4aa3d8", "#a8853a"];
const OTHER_COLOUR = "#8b95a5";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const badge = (outcome) => element("span", { className: "badge", style: { "--badge": `var(--${OUTCOMES[outcome] ?? "dim"})` } }, outcome);

// ----- charts: made again when the colours change

const charts = [];

function makeChart(id, build) {
  const holder = document.getElementById(id);
  const entry = { holder, build, chart: null };
  charts.push(entry);
  drawChart(entry);
  return entry;
}

function drawChart(entry) {
  if (entry.chart) entry.chart.dispose();
  entry.chart = echarts.init(entry.holder, null, { renderer: "canvas" });
  entry.build(entry.chart);
}

const axisStyle = () => ({
  axisLine: { lineStyle: { color: colour("line") } },
  axisTick: { lineStyle: { color: colour("line") } },
  axisLabel: { color: colour("dim") },
  splitLine: { lineStyle: { color: colour("line"), opacity: 0.7 } },
  nameTextStyle: { color: colour("dim") },
});

const tooltipStyle = () => ({
  backgroundColor: colour("card"), borderColor: colour("line"), textStyle: { color: colour("text"), fontSize: 12 },
  extraCssText: "max-width: 460px; white-space: normal; overflow-wrap: anywhere;", confine: true, transitionDuration: 0,
});

const sliderStyle = () => ({
  borderColor: colour("line"), backgroundColor: colour("soft"), fillerColor: "rgba(79, 134, 232, 0.18)",
  handleStyle: { color: colour("card"), borderColor: colour("accent") }, moveHandleStyle: { color: colour("dim"), opacity: 0.35 },
  textStyle: { color: colour("dim") }, showDataShadow: false, brushSelect: false,
});

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  charts.forEach(drawChart);
}
