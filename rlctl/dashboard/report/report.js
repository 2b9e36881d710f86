// Draws the charts and the samples of the page from its JSON. Runs once, at the end of the body.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, tip = document.getElementById("tip");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Charts.

function theme() {
  return data.themes[root.dataset.theme || (prefersDark.matches ? "dark" : "light")];
}

function rowsOf(chart) {
  if (chart.rows) return chart.rows;
  return chart.series.flatMap((series, number) => series.steps.map((step, place) => (
    { step, value: series.values[place], metric: series.metric, run: series.run, key: "s" + number })));
}

const digits = (most) => new Intl.NumberFormat("en", { maximumSignificantDigits: most });
const four = digits(4), six = digits(6);
function inWords(value, unit) {
  if (unit === "share") return four.format(100 * value) + "%";
  if (unit === "seconds") return Math.abs(value) < 1 ? four.format(1000 * value) + " ms" : four.format(value) + " s";
  return six.format(value);
}

function tipOf(chart, datum) {
  if (chart.rows) return [element("b", { textContent: `step ${datum.step}` }), element("div", { textContent: datum.text })];
  const lines = chart.series.flatMap((series, number) => {
    const value = datum["s" + number];
    if (value === undefined || value === null) return [];
    const shown = inWords(value, chart.unit);
    return [element("div", {}, `${series.label}  `, element("b", { textContent: shown }),
      element("small", { textContent: series.meaning }))];
  });
  return [element("b", { textContent: `step ${datum.step}` }), ...lines];
}

function showTip(chart, event, datum) {
  tip.hidden = !datum || typeof datum !== "object";
  if (tip.hidden) return;
  tip.replaceChildren(...tipOf(chart, datum));
  const right = event.clientX + 18, below = event.clientY + 14;
  tip.style.left = Math.max(4, right + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 14 : right) + "px";
  tip.style.top = Math.max(4, Math.min(below, innerHeight - tip.offsetHeight - 4)) + "px";
}

async function draw(place) {
  const chart = data.charts.at(Number(place.dataset.chart));
  const spec = { ...chart.spec, width: "container", autosize: { type: "fit-x", contains: "padding" },
    data: { values: rowsOf(chart) } };
  const before = views.get(place);
  views.set(place, await vegaEmbed(place, spec, {
    config: theme(), renderer: "canvas", actions: false, tooltip: (_, event, __, datum) => showTip(chart, event, datum) }));
  before?.finalize();
}

// The charts of the first screen at once, then the others, so that the page answers meanwhile.
const views = new Map();
let drawing = 0;
async function drawAll() {
  const mine = ++drawing, start = scrollY, end = start + innerHeight;
  const places = [...document.querySelectorAll("[data-chart]")];
  const top = (place) => place.getBoundingClientRect().top + start;
  const first = places.filter((place) => top(place) < end && top(place) + 190 > start);
  for (const place of first) await draw(place);
  root.dataset.drawn ||= Math.round(performance.now());
  for (const place of places.filter((each) => !first.includes(each))) {
    await new Promise((resolve) => setTimeout(resolve));
    if (mine !== drawing) return;
    await draw(place);
  }
  root.dataset.complete = Math.round(performance.now());
}

for (const button of document.querySelectorAll(".theme button")) {
  button.onclick = () => {
    root.dataset.theme = button.dataset.theme;
    choose();
    drawAll();
  };
}
function choose() {
  for (const each of document.querySelectorAll(".theme button")) {
    each.classList.toggle("on", each.dataset.theme === (root.dataset.theme || ""));
  }
}
prefersDark.addEventListener("change", drawAll);
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// Samples.

const PURPOSES = { validation: "Held-out prompts", train: "Training" };

function rolloutCard(rollout) {
  const kind = rollout.right === true ? " right" : rollout.right === false ? " wrong" : "";
  const text = element("div", { className: "text" }, ...rollout.text.map(([piece, sampled]) =>
    element("span", { className: sampled ? "" : "other", textContent: piece })));
  return element("div", { className: "rollout" + kind }, element("b", { textContent: rollout.head }),
    element("div", { className: "note", textContent: rollout.facts }), text);
}

function groupCard(group) {
  const more = group.more ? [element("p", { className: "note", textContent: `and ${group.more} more` })] : [];
  return element("div", { className: "card group" }, element("b", { textContent: group.title }),
    element("div", { className: "note", textContent: group.about }), element("div", { className: "text", textContent: group.prompt }),
    element("div", { className: "rollouts" }, ...group.rollouts.map(rolloutCard)), ...more);
}

function sampleViewer(purpose, title) {
  const runs = data.samples.map((run) => ({ name: run.name, groups: run.groups[purpose] }));
  const steps = [...new Set(runs.flatMap((run) => run.groups.map((group) => group.step)))].sort((a, b) => a - b);
  if (!steps.length) return [];
  const slider = element("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, ariaLabel: `${title}: step` });
  const label = element("b"), place = element("div", { className: "samples" });
  const show = () => {
    const step = steps[Number(slider.value)];
    label.textContent = `step ${step}`;
    place.replaceChildren(...runs.map((run) => {
      const nearest = Math.max(...run.groups.map((group) => group.step).filter((each) => each <= step));
      const groups = run.groups.filter((group) => group.step === nearest).map(groupCard);
      const name = runs.length > 1 ? [element("h3", { textContent: run.name })] : [];
      const none = groups.length ? [] : [element("p", { className: "note", textContent: "none recorded up to this step" })];
      return element("div", {}, ...name, ...none, element("div", { className: "groups" }, ...groups));
    }));
  };
  slider.oninput = show;
  show();
  return [element("div", { className: "pick" }, element("h3", { textContent: title }), slider, label), place];
}

document.getElementById("samples")?.append(...Object.entries(PURPOSES).flatMap(([purpose, title]) => sampleViewer(purpose, title)));

// Config and navigation.

const given = document.getElementById("given");
if (given) given.onchange = () => document.getElementById("config").classList.toggle("given", given.checked);
document.getElementById("nav").append(...[...document.querySelectorAll("section")].map((section) =>
  element("a", { href: "#" + section.id, textContent: section.querySelector("h2").textContent })));
choose();
drawAll();
