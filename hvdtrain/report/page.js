// Draws the figures of a report (plots.py) with plotly, and asks the server of `hvdtrain report --serve` for new ones.
"use strict";
(async () => {
  const byId = (name) => document.getElementById(name);
  let data = JSON.parse(byId("data").textContent);
  const choice = { x: "epoch", log: false, shares: new Set() };
  let range = null; // of the x axis, in all figures with curves: zooming in one zooms the others
  let passive = false; // while figures follow another one's zoom

  // --- plotly's script is compressed in the page ---------------------------------------------------------------------
  const packed = Uint8Array.from(atob(byId("plotly").textContent), (letter) => letter.charCodeAt(0));
  const script = document.createElement("script");
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
  byId("plotly").remove();

  // --- looks ---------------------------------------------------------------------------------------------------------
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const color = (number) => style(number < 0 ? "grey" : `c${number % 8}`);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: true,
    // sendChartToCloud would offer to upload a figure: nothing leaves this page
    modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d", ...(isTouch ? ["zoom2d"] : [])], plotlyServerURL: "",
  };
  const forms = { "%": [".2~%", ""], "/s": [".3~s", ""], B: [".3~s", "B"], "": ["", ""] }; // of a panel's unit: format, what follows

  function time(figures) {
    // One unit for all figures: seconds, minutes or hours, whichever the longest training asks for.
    let longest = 0;
    for (const figure of figures) for (const panel of figure.panels) for (const curve of panel.curves) {
      longest = Math.max(longest, ...curve.x.seconds.slice(-1));
    }
    return longest > 7200 ? ["hours", 3600] : longest > 180 ? ["minutes", 60] : ["seconds", 1];
  }

  function base() {
    const axis = { gridcolor: style("line"), zerolinecolor: style("line"), linecolor: style("line"), automargin: true, exponentformat: "e" };
    return {
      axis,
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("text"), size: 12, family: "system-ui, sans-serif" },
        margin: { l: 48, r: 14, t: 8, b: 36 }, hovermode: "x unified", dragmode: isTouch ? false : "zoom", uirevision: "same",
        hoverlabel: { bgcolor: style("card"), bordercolor: style("line"), font: { color: style("text"), size: 12 } },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: style("faint"), activecolor: style("accent"), orientation: "h" },
      },
    };
  }

  // --- the three kinds of figures ------------------------------------------------------------------------------------
  function curves(figure) {
    const { axis, layout } = base();
    const [unit, seconds] = time(data.figures);
    const at = (curve) => (choice.x === "seconds" ? curve.x.seconds.map((value) => value / seconds) : curve.x[choice.x]);
    const traces = [];
    const several = figure.panels.length > 1;
    figure.panels.forEach((panel, number) => {
      const y = number ? `y${number + 1}` : "y";
      const [form, after] = forms[panel.unit];
      for (const curve of panel.curves) {
        const paint = color(curve.color);
        const faint = curve.look === "faint";
        const group = curve.group || curve.name;
        const last = panel.curves.findLast((other) => (other.group || other.name) === group && other.look !== "faint");
        const named = !number && curve === last && panel.curves.some((other) => other.name && (other.group || other.name) !== group);
        traces.push({
          type: "scatter", x: at(curve), y: curve.y, yaxis: y, name: named ? group : curve.name, legendgroup: group, showlegend: named,
          mode: curve.look === "line" ? "lines+markers" : "lines", hoverinfo: faint ? "skip" : undefined,
          hovertemplate: faint ? undefined : `%{y:${form || ".5~g"}}${after}`, opacity: faint ? 0.28 : 1, connectgaps: false,
          line: { color: paint, width: faint ? 1 : curve.look === "steps" ? 1.6 : 2.2, dash: curve.dash }, marker: { size: curve.y.length > 60 ? 3 : 6 },
        });
        if (curve.best !== null) {
          traces.push({
            type: "scatter", x: [at(curve)[curve.best]], y: [curve.y[curve.best]], yaxis: y, mode: "markers", showlegend: false, hoverinfo: "skip",
            legendgroup: group, cliponaxis: false, marker: { symbol: "star", size: 15, color: paint, line: { color: style("card"), width: 1.5 } },
          });
        }
      }
      const name = number ? `yaxis${number + 1}` : "yaxis";
      layout[name] = { ...axis, tickformat: form, ticksuffix: after, rangemode: panel.from_zero ? "tozero" : "normal" };
      if (panel.unit === "%") layout[name].range = [0, Math.max(...panel.curves.flatMap((curve) => curve.y)) > 0.5 ? 1.02 : undefined];
      if (panel.unit === "%" && !layout[name].range[1]) delete layout[name].range;
      if (several) layout[name].domain = number ? [0, 0.24] : [0.32, 1];
      if (number) layout[name].nticks = 4;
      if (number) layout[name].title = { text: panel.title, font: { size: 11, color: style("faint") } };
      if (figure.scores && !number && choice.log) layout[name].type = "log";
      else if (figure.scores && !number) limit(layout[name], panel.curves);
    });
    const title = choice.x === "seconds" ? unit : choice.x;
    layout.xaxis = {
      ...axis, title: { text: title, standoff: 6, font: { size: 11, color: style("faint") } }, anchor: several ? "y2" : "y", showspikes: false,
      hoverformat: ".4~g", unifiedhovertitle: { text: `${title} %{x}` },
    };
    const whole = traces.every((trace) => trace.x.every(Number.isInteger)); // no curve within epochs
    if (choice.x === "epoch") Object.assign(layout.xaxis, ticks(range ? range[1] - range[0] : Math.max(...traces.flatMap((trace) => trace.x.slice(-1))), whole));
    if (range) layout.xaxis.range = range;
    layout.margin.t = traces.some((trace) => trace.showlegend) ? 26 : 10;
    return { traces, layout };
  }

  const ticks = (epochs, whole) => ((whole || epochs > 2) && epochs <= 10 ? { dtick: 1, tickformat: "d" } : { dtick: null, tickformat: "" });

  function limit(axis, curves) {
    // The first steps may have losses so large that all later ones look alike: then the axis ends at the highest mean of an epoch.
    const means = curves.filter((curve) => curve.look === "line").flatMap((curve) => curve.y).filter((value) => value !== null);
    const all = curves.flatMap((curve) => curve.y).filter((value) => value !== null);
    if (means.length < 2 || all.length === means.length) return;
    const low = Math.min(...all), high = Math.max(...means);
    if (Math.max(...all) - low > 2 * (high - low)) axis.range = [low - 0.05 * (high - low), high + 0.08 * (high - low)];
  }

  function bars(figure) {
    const { axis, layout } = base();
    const { labels, series, horizontal } = figure.bars;
    const share = choice.shares.has(figure.name);
    const totals = labels.map((_, place) => series.reduce((sum, [, , values]) => sum + values[place], 0) || 1);
    const total = series.flatMap(([, , values]) => values).reduce((sum, value) => sum + value, 0);
    const traces = series.map(([name, number, values]) => {
      const sum = values.reduce((one, other) => one + other, 0);
      const shown = share ? values.map((value, place) => value / totals[place]) : values;
      const form = share ? ".1%" : ".3~f";
      return {
        type: "bar", name, orientation: horizontal ? "h" : "v", x: horizontal ? shown : labels, y: horizontal ? labels : shown,
        showlegend: sum > 0.002 * total, marker: { color: color(number), line: { width: 0 } }, hovertemplate: horizontal ? `%{x:${form}}` : `%{y:${form}}`,
      };
    });
    const value = { ...axis, tickformat: share ? ".0%" : "", ticksuffix: share ? "" : " s" };
    const label = { ...axis, showgrid: false, title: { text: figure.bars.axis, standoff: 6, font: { size: 11, color: style("faint") } } };
    layout.xaxis = horizontal ? value : label;
    layout.yaxis = horizontal ? { ...label, autorange: "reversed", type: "category" } : value;
    if (!horizontal && labels.length <= 12) layout.xaxis.dtick = 1;
    Object.assign(layout, { barmode: "stack", bargap: 0.25, hovermode: horizontal ? "y unified" : "x unified" });
    layout.legend.traceorder = "normal";
    layout.margin.t = 26;
    return { traces, layout };
  }

  function heat(figure) {
    const { axis, layout } = base();
    const { epochs, ranks, late, own } = figure.heat;
    const most = Math.max(0.15, ...late.flat().map(Math.abs));
    const scale = [[0, style("low")], [0.5, style("middle")], [1, style("high")]];
    const traces = [{
      type: "heatmap", x: epochs, y: ranks, z: late, customdata: own, zmin: -most, zmax: most, colorscale: scale, xgap: epochs.length < 60 ? 2 : 0, ygap: ranks.length < 40 ? 2 : 0,
      hovertemplate: "rank %{y}, epoch %{x}: %{customdata:.1f} s, %{z:+.0%} against the median rank<extra></extra>",
      colorbar: { thickness: 8, outlinewidth: 0, tickformat: "+.0%", len: 1, tickfont: { color: style("faint") } },
    }];
    layout.xaxis = { ...axis, showgrid: false, title: { text: "epoch", standoff: 6, font: { size: 11, color: style("faint") } } };
    layout.yaxis = { ...axis, showgrid: false, autorange: "reversed", title: { text: "rank", standoff: 6, font: { size: 11, color: style("faint") } } };
    if (epochs.length <= 12) layout.xaxis.dtick = 1;
    if (ranks.length <= 12) layout.yaxis.dtick = 1;
    layout.hovermode = "closest";
    return { traces, layout };
  }

  // --- drawing what is in view ---------------------------------------------------------------------------------------
  const place = (figure) => document.querySelector(`[data-figure="${CSS.escape(figure.name)}"]`);
  const visible = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || visible.has(entry.target.dataset.figure)) continue;
      visible.add(entry.target.dataset.figure);
      draw(data.figures.find((figure) => figure.name === entry.target.dataset.figure));
    }
  }, { rootMargin: "600px" });

  function draw(figure) {
    const element = place(figure);
    if (!element || !visible.has(figure.name)) return;
    const { traces, layout } = figure.bars ? bars(figure) : figure.heat ? heat(figure) : curves(figure);
    const isNew = !element.classList.contains("js-plotly-plot");
    element.style.height = ""; // that of page.css, and more for further lines of the legend, whose columns are as wide as its longest name
    const names = traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name || "");
    const columns = Math.max(1, Math.floor((element.clientWidth - 60) / (48 + 6.5 * Math.max(0, ...names.map((name) => name.length)))));
    const more = Math.ceil(names.length / columns) - 2;
    if (more > 0) element.style.height = `${element.clientHeight + 19 * more}px`;
    const name = figure.name.replace(/\W+/g, "-");
    Plotly.react(element, traces, layout, { ...config, toImageButtonOptions: { filename: name, scale: 2 } });
    if (isNew && figure.panels.length) element.on("plotly_relayout", (change) => follow(element, change));
  }

  function follow(element, change) {
    if (passive) return;
    if (change["xaxis.autorange"] || change["xaxis.showspikes"] === false) range = null;
    else if (change["xaxis.range[0]"] !== undefined) range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else return;
    passive = true;
    const others = data.figures.filter((figure) => figure.panels.length && visible.has(figure.name)).map(place).filter((one) => one && one !== element);
    const update = range ? { "xaxis.range": range, "xaxis.autorange": false } : { "xaxis.autorange": true };
    const whole = Math.max(...element.data.flatMap((trace) => trace.x.slice(-1)));
    const marks = choice.x === "epoch" ? ticks(range ? range[1] - range[0] : whole) : {};
    const own = Object.fromEntries(Object.entries(marks).map(([name, value]) => [`xaxis.${name}`, value]));
    const drawn = [...others.map((other) => Plotly.relayout(other, { ...update, ...own })), Plotly.relayout(element, own)];
    Promise.all(drawn).finally(() => { passive = false; });
  }

  function show() {
    for (const button of document.querySelectorAll("[data-x]")) button.setAttribute("aria-pressed", button.dataset.x === choice.x);
    byId("log").setAttribute("aria-pressed", choice.log);
    for (const element of document.querySelectorAll("[data-figure]")) {
      element.closest("figure").querySelector(".switch")?.setAttribute("aria-pressed", choice.shares.has(element.dataset.figure));
      watcher.observe(element);
    }
    data.figures.forEach(draw);
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    if (button.dataset.x) { choice.x = button.dataset.x; range = null; resetZoom(); }
    else if (button.id === "log") choice.log = !choice.log;
    else if (button.classList.contains("switch")) {
      const name = button.closest("figure").querySelector("[data-figure]").dataset.figure;
      if (!choice.shares.delete(name)) choice.shares.add(name);
    } else return;
    show();
  });

  function resetZoom() {
    // plotly keeps a zoom while `uirevision` stays; another x axis has another range.
    for (const figure of data.figures) {
      const element = place(figure);
      if (element?.layout && figure.panels.length) { passive = true; Plotly.relayout(element, { "xaxis.autorange": true }).finally(() => { passive = false; }); }
    }
  }

  document.addEventListener("input", ({ target }) => {
    if (target.type !== "search") return;
    for (const row of target.closest("details").querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(target.value.toLowerCase());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();

  // --- new data while training runs ----------------------------------------------------------------------------------
  if (!("live" in document.body.dataset)) return;
  const tell = (text, stopped) => { byId("live").textContent = text; byId("live").classList.toggle("stopped", stopped); };
  let updated = new Date();
  async function update() {
    try {
      const answer = await fetch(`data.json?have=${data.version}`, { cache: "no-store" });
      if (answer.status === 200) {
        const fresh = await answer.json();
        replaceSections(fresh.sections);
        data = fresh;
        updated = new Date();
        document.title = data.title;
        show();
      } else if (!answer.ok) throw new Error(answer.status);
      tell(`live, data of ${updated.toLocaleTimeString()}`, false);
    } catch {
      tell(`no answer from hvdtrain report; data of ${updated.toLocaleTimeString()}`, true);
    }
    setTimeout(update, 3000);
  }

  function replaceSections(sections) {
    const main = document.querySelector("main");
    for (const old of [...main.children]) if (!(old.id in sections)) old.remove();
    let before = null;
    for (const [name, html] of Object.entries(sections)) {
      let section = byId(name);
      if (!section || section.parentElement !== main) { section = document.createElement("section"); section.id = name; }
      if (before ? before.nextElementSibling !== section : main.firstElementChild !== section) before ? before.after(section) : main.prepend(section);
      before = section;
      if (section.hvdtrain === html) continue;
      if (section.hvdtrain === undefined && section.innerHTML && data.sections === undefined && section.dataset.seen === undefined) section.dataset.seen = "";
      const open = [...section.querySelectorAll("details")].map((one) => one.open);
      const drawn = new Map([...section.querySelectorAll("[data-figure]")].map((one) => [one.dataset.figure, one]));
      section.innerHTML = html;
      section.hvdtrain = html;
      section.querySelectorAll("details").forEach((one, number) => { if (number < open.length) one.open = open[number]; });
      for (const element of section.querySelectorAll("[data-figure]")) if (drawn.has(element.dataset.figure)) element.replaceWith(drawn.get(element.dataset.figure));
    }
  }
  setTimeout(update, 1000);
})();
