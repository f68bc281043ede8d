// Draws the charts in the colours of the page, hides and shows lines, sorts tables, and prepares for printing.
"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it does not zoom a chart
  const config = {responsive: true, displaylogo: false, displayModeBar: coarse ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "pan2d", "zoom2d"]};
  const hidden = new Set(); // "section/key" of the legend buttons that are off
  const charts = [...document.querySelectorAll(".chart")];

  // Values of keys that end in "color" are variables of style.css; replace them by their colours.
  function paint(value, key = "") {
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((item) => paint(item, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, paint(item, name)]));
    if (typeof value === "string" && value.startsWith("--") && key.endsWith("color"))
      return getComputedStyle(root).getPropertyValue(value).trim();
    return value;
  }

  // Remove labels of ticks that would overlap; the last one stays.
  function spaced(axis, room) {
    if (!axis.ticktext) return axis;
    const widest = Math.max(...axis.ticktext.flatMap((text) => text.split("<br>").map((line) => line.length)));
    const every = Math.ceil(((7 * widest + 6) * axis.ticktext.length) / room), last = axis.ticktext.length - 1;
    return {...axis, ticktext: axis.ticktext.map((text, i) => ((last - i) % every ? "" : text))};
  }

  function shown(trace, chart) {
    const section = chart.closest("section");
    if (hidden.has(section.id + "/" + trace.legendgroup)) return false;
    return [...section.querySelectorAll("select")].every(
      (select) => select.value === "" || !trace.meta || trace.meta[select.name] === select.value);
  }

  function draw(chart, printed) {
    const figure = figures[chart.id];
    const data = paint(figure.data).map((trace) => ({...trace, visible: shown(trace, chart)}));
    const layout = {...paint(figure.layout), dragmode: coarse ? false : "zoom"};
    const wide = chart.closest(".wide") ? 640 : 300; // on paper, in CSS pixels
    if (printed === true) Object.assign(layout, {autosize: false, width: wide, height: 240});
    layout.xaxis = spaced(layout.xaxis, (printed === true ? wide : chart.clientWidth) - 60);
    return Plotly.react(chart, data, layout, config);
  }

  const drawAll = (printed) => Promise.all(charts.map((chart) => draw(chart, printed)));
  const drawSection = (element) => element.closest("section").querySelectorAll(".chart").forEach((chart) => draw(chart));

  document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    hidden[on ? "delete" : "add"](button.closest("section").id + "/" + button.dataset.key);
    drawSection(button);
  }));
  document.querySelectorAll("select").forEach((select) => select.addEventListener("change", () => drawSection(select)));

  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  function compare(a, b) {
    const [x, y] = [Number(a), Number(b)];
    if (a === "" || b === "") return (a === "") - (b === ""); // unknown values last
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, {numeric: true}) : x - y;
  }
  document.querySelectorAll("thead button").forEach((button) => button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const column = head.cellIndex;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      return x === "" || y === "" || !down ? compare(x, y) : compare(y, x);
    });
    body.append(...rows);
  }));

  // Print in light colours, narrow, with all details open.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((item) => { item.open = true; });
    root.dataset.print = "";
    drawAll(true);
  });
  addEventListener("afterprint", () => {
    folded.forEach((item) => { item.open = false; });
    delete root.dataset.print;
    drawAll();
  });
  let wide = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (innerWidth !== wide) { wide = innerWidth; drawAll(); } }, 150);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // One chart after the other, so that the page stays responsive.
  (async () => {
    for (const chart of charts) {
      await draw(chart);
      await new Promise((done) => setTimeout(done));
    }
    root.dataset.drawn = "";
  })();
})();
