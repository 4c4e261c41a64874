// Draws the charts of the page with plotly, and redraws them when smoothing, scale or theme change.
// Only traces of the types "scatter" and "bar" are used: they need no eval, so the page's policy can forbid it.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const smoothing = document.getElementById("smoothing");
  const logarithmic = document.getElementById("log");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map(); // element -> chart
  const steps = charts.filter((chart) => chart.steps).flatMap((chart) => chart.steps);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const everything = first < last ? [first, last] : [first - 1, last + 1];
  let zoom = everything; // range of steps that all charts show

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const color = (name) => {
    probe.style.color = `var(--${name})`; // resolves light-dark()
    return getComputedStyle(probe).color;
  };
  const faint = (tint, opacity) => tint.replace("rgb(", "rgba(").replace(")", `, ${opacity})`);
  // plotly reads text as a kind of HTML
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  /**
   * Exponential moving average. The weight is that of a step between two points of the densest line, so that sparse
   * lines are smoothed over as many steps as others; the first values count as if nothing came before them.
   */
  function smoothed(line, weight, spacing) {
    let sum = 0, mass = 0, last = line.x[0];
    return line.y.map((value, index) => {
      if (value === null) return null;
      const kept = weight ** ((line.x[index] - last) / spacing);
      last = line.x[index];
      sum = kept * sum + (1 - weight) * value;
      mass = kept * mass + (1 - weight);
      return sum / mass;
    });
  }

  function lineTraces(chart) {
    const weight = chart.band ? 0 : Number(smoothing.value);
    const unit = chart.unit ? ` ${chart.unit}` : "";
    const spacing = (chart.steps[1] - chart.steps[0]) / Math.max(...chart.lines.map((line) => line.x.length - 1), 1) || 1;
    const traces = [];
    chart.lines.forEach((line, index) => {
      const tint = color(`c${index % 8}`);
      const dash = ["solid", "dash", "dot"][Math.floor(index / 8) % 3];
      const name = plain(line.name);
      const known = line.y.filter((value) => value !== null).length;
      const smooth = weight > 0 && known > 2;
      const common = { type: "scatter", x: line.x, name, legendgroup: `${index}`, cliponaxis: false };
      const shape = { color: tint, width: chart.stacked ? 0.5 : 2, dash };
      if (smooth && !chart.stacked) {
        traces.push({
          ...common, y: line.y, mode: "lines", line: { ...shape, color: faint(tint, 0.28), width: 1 },
          showlegend: false, hoverinfo: "skip",
        });
      }
      traces.push({
        ...common, y: smooth ? smoothed(line, weight, spacing) : line.y, customdata: line.y, line: shape,
        mode: known > 2 ? "lines" : "lines+markers", marker: { color: tint, size: 8 },
        hovertemplate: smooth ? `%{y:.5~g}${unit} (logged: %{customdata:.5~g})`
          : line.who ? `%{y:.5~g}${unit} (%{text})` : `%{y:.5~g}${unit}`,
        ...(line.who ? { text: line.who.map(plain) } : {}),
        ...(chart.band && index ? { fill: "tonexty", fillcolor: faint(tint, 0.2) } : {}),
        ...(chart.stacked ? { stackgroup: "all", fillcolor: faint(tint, 0.75) } : {}),
      });
      if (line.lost.length) {
        traces.push({
          ...common, x: line.lost.map(([step]) => step), y: line.lost.map(() => 0.97), yaxis: "y2", mode: "markers",
          marker: { color: tint, symbol: "x", size: 8 }, text: line.lost.map(([, value]) => value),
          showlegend: false, hovertemplate: "%{text}",
        });
      }
    });
    return traces;
  }

  function barTraces(chart) {
    return chart.lines.map((line, index) => ({
      type: "bar", orientation: "h", y: chart.rows.map(plain), x: line.x, name: plain(line.name),
      marker: { color: color(`c${index % 8}`) }, hovertemplate: `%{x:.4~g} ${chart.unit}`,
    }));
  }

  function layout(chart) {
    const soft = color("soft"), rule = color("rule"), ink = color("ink"), sheet = color("sheet");
    const axis = { gridcolor: rule, linecolor: rule, zerolinecolor: rule, separatethousands: true };
    const result = {
      paper_bgcolor: "rgba(0, 0, 0, 0)", plot_bgcolor: "rgba(0, 0, 0, 0)",
      font: { color: soft, family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: sheet, bordercolor: rule, font: { color: ink } },
      modebar: { bgcolor: "rgba(0, 0, 0, 0)", color: soft, activecolor: ink },
      margin: { l: 64, r: 26, t: 46, b: 46 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: ink } },
      showlegend: chart.lines.length > 1,
    };
    if (chart.rows) {
      return {
        ...result, barmode: "stack", hovermode: "closest",
        xaxis: { ...axis, title: { text: chart.unit } },
        yaxis: { automargin: true, autorange: "reversed", tickfont: { color: ink } },
      };
    }
    return {
      ...result, hovermode: "x unified", uirevision: `${logarithmic.checked}`,
      xaxis: {
        ...axis, title: { text: "step" }, hoverformat: ",d", unifiedhovertitle: { text: "step %{x:,d}" },
        range: [...zoom], ...(zoom[1] - zoom[0] < 8 ? { dtick: 1 } : {}),
      },
      yaxis: {
        ...axis, title: { text: chart.unit }, exponentformat: "e", rangemode: chart.fromZero ? "tozero" : "normal",
        type: logarithmic.checked && !chart.stacked ? "log" : "linear", autorangeoptions: { include: chart.shows },
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: chart.marks.map((step) => ({
        type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1,
        line: { color: color("mark"), width: 1, dash: "dash" },
      })),
      annotations: chart.marks.map((step) => ({
        x: step, yref: "paper", y: 0, xanchor: "left", yanchor: "bottom", text: "resumed", textangle: -90,
        showarrow: false, font: { size: 10, color: color("mark") },
      })),
    };
  }

  const config = {
    responsive: true, doubleClick: false, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "resetScale2d", "sendChartToCloud"],
    toImageButtonOptions: { format: "svg" },
  };

  function draw(element) {
    const chart = charts[Number(element.dataset.chart)];
    const isNew = !drawn.has(element);
    drawn.set(element, chart);
    Plotly.react(element, chart.rows ? barTraces(chart) : lineTraces(chart), layout(chart), config);
    if (isNew && !chart.rows) {
      element.on("plotly_relayout", (change) => follow(element, change));
      element.on("plotly_doubleclick", reset);
    }
  }

  /** Zooming into some steps in one chart shows these steps in all. */
  function follow(element, change) {
    const range = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range[0] === undefined || (range[0] === zoom[0] && range[1] === zoom[1])) return;
    zoom = range;
    for (const [other, chart] of drawn) {
      if (!chart.rows && other !== element) Plotly.relayout(other, { "xaxis.range": [...zoom] });
    }
  }

  function reset() {
    zoom = everything;
    for (const [element, chart] of drawn) {
      if (!chart.rows) Plotly.relayout(element, { "xaxis.range": [...zoom], "yaxis.autorange": true });
    }
  }

  const redraw = () => drawn.forEach((_, element) => draw(element));
  const isDark = () => (root.className ? root.className === "dark" : system.matches);

  smoothing.addEventListener("input", () => {
    document.getElementById("weight").textContent = Number(smoothing.value).toFixed(2);
    redraw();
  });
  logarithmic.addEventListener("change", redraw);
  system.addEventListener("change", redraw);
  document.getElementById("theme").addEventListener("click", () => {
    root.className = isDark() ? "light" : "dark";
    redraw();
  });
  document.getElementById("reset").addEventListener("click", reset);

  const plots = [...document.querySelectorAll(".plot")];
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  plots.forEach((element) => near.observe(element));
  addEventListener("beforeprint", () => plots.filter((element) => !drawn.has(element)).forEach(draw));
})();
