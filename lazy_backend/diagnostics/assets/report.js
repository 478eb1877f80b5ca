"use strict";
// Puts the page together, in the order in which it is read.

const wantsDark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = wantsDark.matches ? "dark" : "light";
document.getElementById("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

for (const section of document.querySelectorAll("section")) {
  document.getElementById("nav").append(element("a", { href: `#${section.id}` }, section.querySelector("h2").textContent));
}

for (const show of [showSummary, showFindings, showSteps, showMisses, showCuts, showCompiles, showGraphs, showPrograms, showMemory]) show();

addEventListener("resize", () => charts.forEach((entry) => entry.chart.resize()));
performance.mark("ready");
document.documentElement.dataset.ready = "true";
