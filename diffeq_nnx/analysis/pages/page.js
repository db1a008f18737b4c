"use strict";
(() => {
  const root = document.documentElement;
  const plots = [...document.querySelectorAll(".plot")];
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true, displaylogo: false, showTips: false, displayModeBar: touch ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]], plotlyServerURL: "",  // no button that sends
  };

  // ---- figures: drawn when they come near, in the colours of the page

  function themed(spec) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const text = colour("--text");
    const axis = (own) => ({
      gridcolor: colour("--grid"), zerolinecolor: colour("--axis"), linecolor: colour("--axis"),
      tickcolor: colour("--axis"), automargin: true, ...own, title: { font: { size: 12 }, standoff: 8, ...own.title },
    });
    const layout = {
      margin: { l: 8, r: 20, t: 26, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text },
      hoverlabel: {
        bgcolor: colour("--card"), bordercolor: colour("--axis"), align: "left", font: { color: text, size: 12 },
      },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--axis"), activecolor: text },
      hovermode: "closest", ...spec.layout, xaxis: axis(spec.layout.xaxis), yaxis: axis(spec.layout.yaxis),
    };
    if (touch) layout.dragmode = false;  // a finger on a figure scrolls the page
    const data = spec.data.map((trace) => trace.line?.color === "black"
      ? { ...trace, line: { ...trace.line, color: text }, marker: { ...trace.marker, color: text } } : trace);
    return [data, layout];
  }

  const specs = new Map();
  function draw(plot) {
    if (!specs.has(plot)) {
      specs.set(plot, JSON.parse(plot.parentElement.querySelector("script").textContent));
      observer.unobserve(plot);
    }
    return Plotly.react(plot, ...themed(specs.get(plot)), config);
  }
  const observer = new IntersectionObserver((seen) => {
    for (const entry of seen) if (entry.isIntersecting && !specs.has(entry.target)) draw(entry.target);
  }, { rootMargin: "400px 0px" });
  for (const plot of plots) observer.observe(plot);

  const redraw = () => Promise.all([...specs.keys()].map(draw));
  window.drawAllFigures = () => Promise.all(plots.map(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    drawAllFigures();
    for (const plot of plots) Plotly.Plots.resize(plot);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    redraw();
    for (const plot of plots) Plotly.Plots.resize(plot);
  });

  // ---- tokens: one tab stop to a text, arrows within it

  const tip = document.getElementById("tip");
  let told = null;

  function tell(token) {
    told = token;
    tip.textContent = token.dataset.told;
    tip.hidden = false;
    const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const left = Math.min(Math.max(at.left, 8), root.clientWidth - tip.offsetWidth - 8);
    const above = at.top - tip.offsetHeight - 6;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(above < 4 ? at.bottom + 6 : above) + scrollY}px`;
  }
  function hush() {
    told = null;
    tip.hidden = true;
  }
  const tokenOf = (event) => event.target.closest?.(".token");
  for (const text of document.querySelectorAll(".tokens")) {
    text.addEventListener("pointerover", (event) => tokenOf(event) && tell(tokenOf(event)));
    text.addEventListener("click", (event) => tokenOf(event) && tell(tokenOf(event)));
    text.addEventListener("pointerout", (event) => {
      if (event.pointerType === "mouse") hush();
    });
    text.addEventListener("focusin", (event) => {
      const token = tokenOf(event);
      for (const other of text.querySelectorAll(".token[tabindex='0']")) other.tabIndex = -1;
      token.tabIndex = 0;
      tell(token);
    });
    text.addEventListener("focusout", hush);
    text.addEventListener("keydown", (event) => {
      const tokens = [...text.querySelectorAll(".token")];
      const here = tokens.indexOf(tokenOf(event));
      const to = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0,
                   End: tokens.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      tokens[Math.min(Math.max(to, 0), tokens.length - 1)].focus();
    });
  }
  addEventListener("keydown", (event) => event.key === "Escape" && hush());
  addEventListener("pointerdown", (event) => told && !tokenOf(event) && hush());
  addEventListener("resize", hush);
})();
