// Draws the figures of a report (plots.py) with plotly, and asks the server of `hvdtrain report --serve` for new ones.
"use strict";
(async () => {
  const byId = (name) => document.getElementById(name);
  let data = JSON.parse(byId("data").textContent);
  // What the reader has chosen; all but `whole` is in the page's address, so that a link shows the same.
  const choice = { x: "epoch", log: false, shares: new Set(), hidden: new Set(), parts: new Map(), base: data.base, sort: "", key: "", score: "", whole: new Set() };
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
  const COLORS = 12;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const color = (number) => style(number < 0 ? "grey" : `c${number % COLORS}`);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: true,
    // sendChartToCloud would offer to upload a figure: nothing leaves this page
    modeBarButtonsToRemove: ["sendChartToCloud", "toImage", "select2d", "lasso2d", "autoScale2d", ...(isTouch ? ["zoom2d"] : [])], plotlyServerURL: "",
  };
  const forms = { "%": [".2~%", ""], "/s": [".3~s", ""], B: [".3~s", "B"], "": ["", ""] }; // of a panel's unit: format, what follows

  function number(value) {
    // As one would write it: 0.0005, 12,000, 2e-6.
    if (value === null || !Number.isFinite(value)) return "";
    const size = Math.abs(value), short = Number(value.toPrecision(4));
    if (size && (size < 1e-4 || size >= 1e7)) return short.toExponential().replace("e+", "e");
    return size >= 1e4 ? short.toLocaleString("en") : String(short);
  }

  function nice(rough) {
    // The smallest 1, 2 or 5 times a power of ten that is not below a number.
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= rough * 0.999);
  }

  function logTicks(low, high) {
    // On a logarithmic axis; of a short one at equal distances.
    const found = [];
    if (high / low < 8) {
      const step = nice((high - low) / 6);
      for (let value = Math.ceil(low / step) * step; value <= high * 1.0001; value += step) found.push(Number(value.toPrecision(8)));
    } else {
      const digits = high / low < 1e4 ? [1, 2, 5] : [1];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        found.push(...digits.map((digit) => digit * 10 ** power).filter((value) => value >= low * 0.999 && value <= high * 1.001));
      }
    }
    return { tickmode: "array", tickvals: found, ticktext: found.map(number) };
  }

  function time(figures) {
    // One unit for all figures: seconds, minutes or hours, whichever the longest training asks for.
    let longest = 0;
    for (const figure of figures) for (const panel of figure.panels) for (const curve of panel.curves) {
      longest = Math.max(longest, ...curve.x.seconds.slice(-1));
    }
    return longest > 7200 ? ["hours", 3600] : longest > 180 ? ["minutes", 60] : ["seconds", 1];
  }

  function base() {
    const axis = {
      gridcolor: style("line"), zerolinecolor: style("line"), linecolor: style("line"), automargin: true,
      exponentformat: "e", minexponent: 5, separatethousands: true,
    };
    return {
      axis,
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("text"), size: 12, family: "system-ui, sans-serif" },
        margin: { l: 48, r: 14, t: 12, b: 36 }, hovermode: "x unified", dragmode: isTouch ? false : "zoom", uirevision: `${choice.x} ${choice.log}`,
        hoverlabel: { bgcolor: style("card"), bordercolor: style("line"), font: { color: style("text"), size: 12 } },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: style("faint"), activecolor: style("accent"), orientation: "h" },
      },
    };
  }

  // --- the kinds of figures ------------------------------------------------------------------------------------------
  const isShown = (run) => !choice.hidden.has(data.runs[run]?.name);
  const isPartShown = (figure, part) => choice.parts.get(part) ?? !figure.hidden.includes(part);
  const TOP = "y9"; // an axis from 0 to 1 above that of the first panel, for marks at its edges

  function curves(figure, width, height) {
    const { axis, layout } = base();
    const [unit, seconds] = time(data.figures);
    const at = (x) => (choice.x === "seconds" ? [x.seconds].flat().map((value) => value / seconds) : [x[choice.x]].flat());
    const traces = [], stars = [], beyond = [];
    const several = figure.panels.length > 1;
    figure.panels.forEach((panel, number) => {
      const y = number ? `y${number + 1}` : "y";
      const [form, after] = forms[panel.unit];
      const shown = panel.curves.filter((curve) => isShown(curve.run) && (number || isPartShown(figure, curve.part)));
      const isLog = figure.scores && !number && choice.log;
      const limits = figure.scores && !number ? limitsOf(shown, isLog, choice.whole.has(figure.name)) : null;
      const group = (curve) => `${curve.run} ${curve.part}`;
      for (const curve of shown) {
        const paint = color(curve.color), x = at(curve.x), faint = curve.look === "faint";
        const isNamed = !number && curve === shown.findLast((other) => group(other) === group(curve) && other.look !== "faint");
        const isLong = curve.y.length > 60;
        traces.push({
          type: "scatter", x, y: curve.y, yaxis: y, name: curve.name, legendgroup: group(curve), showlegend: isNamed,
          mode: curve.look === "line" && !isLong ? "lines+markers" : "lines", hoverinfo: faint ? "skip" : undefined,
          hovertemplate: faint ? undefined : `%{y:${form || ".5~g"}}${after}`, opacity: faint ? 0.28 : 1, connectgaps: false,
          line: { color: paint, width: faint ? 1 : curve.look === "steps" ? 1.6 : 2.2, dash: isLong && curve.dash === "dot" ? "solid" : curve.dash },
          marker: { size: 6 },
        });
        if (isLong && curve.dash === "dot") traces.at(-1).opacity = faint ? 0.2 : 0.5; // dots of many points look like noise
        if (curve.best !== null) stars.push({ x: x[curve.best], value: curve.y[curve.best], paint, y });
        if (curve.missing.length) {
          traces.push(marks(curve.missing.flatMap((one) => at(one)), curve.missing.map((one) => one.text), curve, paint, "x-thin", 1));
        }
        if (limits?.low !== undefined) {
          const outside = x.map((place, index) => [place, curve.y[index]]).filter(([, value]) => value !== null && (value > limits.high || value < limits.low));
          beyond.push(...outside.map(([, value]) => value));
          for (const [isOutside, symbol, edge] of [[(value) => value > limits.high, "triangle-up", 1], [(value) => value < limits.low, "triangle-down", 0]]) {
            const binned = bins(outside.filter(([, value]) => isOutside(value)), Math.max(...x));
            if (binned.length) traces.push(marks(binned.map(([place]) => place), binned.map(([, text]) => text), curve, paint, symbol, edge));
          }
        }
      }
      const name = number ? `yaxis${number + 1}` : "yaxis";
      layout[name] = { ...axis, tickformat: form, ticksuffix: after, rangemode: panel.from_zero ? "tozero" : "normal" };
      if (panel.unit === "%") layout[name].range = [0, Math.max(...shown.flatMap((curve) => curve.y)) > 0.5 ? 1.02 : undefined];
      if (panel.unit === "%" && !layout[name].range[1]) delete layout[name].range;
      if (several) layout[name].domain = number ? [0, 0.24] : [0.32, 1];
      if (number) layout[name].nticks = 4;
      if (number) layout[name].title = { text: panel.title, font: { size: 11, color: style("faint") } };
      if (limits) {
        const edges = [limits.low ?? limits.from, limits.high ?? limits.to];
        if (isLog) Object.assign(layout[name], { type: "log" }, logTicks(...edges));
        layout[name].range = isLog ? edges.map(Math.log10) : edges;
      }
    });
    const title = choice.x === "seconds" ? unit : choice.x;
    layout.xaxis = {
      ...axis, title: { text: title, standoff: 6, font: { size: 11, color: style("faint") } }, anchor: several ? "y2" : "y", showspikes: false,
      hoverformat: ".4~g", unifiedhovertitle: { text: `${title} %{x}` },
    };
    const ends = traces.flatMap((trace) => trace.x).filter((value) => value !== null);
    const longest = Math.max(0, ...ends), first = Math.min(longest, ...ends), margin = 0.015 * (longest - first) || 0.5;
    const full = [first < 0.15 * longest ? Math.min(0, first) : first - margin, longest + margin];
    if (choice.x === "epoch") Object.assign(layout.xaxis, ticks(range ? range[1] - range[0] : longest, width));
    if (choice.x === "step") layout.xaxis.tickformat = longest >= 1e4 ? "~s" : "";
    if (choice.x === "step") layout.xaxis.nticks = Math.max(3, Math.floor(width / 80));
    layout.xaxis.range = range ?? full;
    if (several) layout.xaxis.domain = [0, 1];
    layout.yaxis9 = { overlaying: "y", range: [0, 1], fixedrange: true, visible: false };
    layout.annotations = starMarks(stars, layout, width, height);
    layout.showlegend = false; // the page has its own, below the title
    if (choice.whole.has(figure.name)) layout.uirevision += " whole";
    return { traces, layout, beyond, full };
  }

  function marks(x, texts, curve, paint, symbol, edge) {
    return {
      type: "scatter", mode: "markers", x, y: x.map(() => edge), customdata: texts, yaxis: TOP, name: curve.name || "within epochs", showlegend: false, cliponaxis: false,
      hovertemplate: "%{customdata}", marker: { symbol, size: 9, color: paint, line: { color: symbol === "x-thin" ? paint : style("card"), width: symbol === "x-thin" ? 2 : 1 } },
    };
  }

  function bins(points, longest) {
    // Of points that are next to each other, one mark with the most extreme value.
    const found = new Map();
    for (const [x, value] of points) {
      const place = Math.round((80 * x) / (longest || 1));
      const [, most, count] = found.get(place) ?? [x, value, 0];
      found.set(place, [x, Math.abs(value) > Math.abs(most) ? value : most, count + 1]);
    }
    return [...found.values()].map(([x, most, count]) => [x, count > 1 ? `${count} points, up to ${number(most)}` : number(most)]);
  }

  function limitsOf(curves, isLog, whole) {
    // The y axis of scores, {from, to} or, if it does not show all of them, {low, high}. The first steps may have losses so large
    // that all later ones look alike, and so may the first epochs of many, and one training may diverge: the axis ends at the highest
    // usual mean of an epoch.
    const known = (curve) => curve.y.filter((value) => value !== null && (!isLog || value > 0));
    const all = curves.flatMap(known);
    if (!all.length) return null;
    const low = Math.min(...all), top = Math.max(...all);
    const pad = (from, to) => (isLog ? [from / 1.1, to * 1.1] : [from - 0.05 * (to - from || Math.abs(to) || 1), to + 0.07 * (to - from || Math.abs(to) || 1)]);
    const highest = [...new Set(curves.map((curve) => curve.run))].map((run) => {
      const means = curves.filter((curve) => curve.run === run && curve.look === "line").map(known).map((values) => (values.length < 40 ? values : values.slice(values.length / 20)));
      return means.some((values) => values.length) ? Math.max(...means.flat()) : null;
    }).filter((value) => value !== null).sort((one, other) => one - other);
    const usual = highest[Math.floor(highest.length / 2)];
    let high = highest.at(-1);
    if (high - low > 3 * (usual - low) && highest.length > 1) {
      const lowest = [...new Set(curves.map((curve) => curve.run))].map((run) => Math.min(...curves.filter((curve) => curve.run === run && curve.look === "line").flatMap(known)));
      high = Math.max(usual + 0.5 * (usual - low), ...lowest.map((value) => value + 0.1 * (usual - low)).filter((value) => value - low < 20 * (usual - low)));
    }
    const [from, to] = pad(low, top);
    if (isLog) return all.length < curves.flatMap((curve) => curve.y.filter((value) => value !== null)).length ? { low: from, high: to } : { from, to };
    if (whole || high === undefined || high <= low || top - low <= 2 * (high - low)) return { from, to, could: high > low && top - low > 2 * (high - low) };
    const [least, most] = pad(low, high);
    return { low: least, high: most };
  }

  function starMarks(stars, layout, width, height) {
    // Stars at the best values, moved up where they would cover each other.
    const [left, right] = layout.xaxis.range;
    const [bottom, top] = layout.yaxis.range ?? [0, 1];
    const isLog = layout.yaxis.type === "log";
    const placed = [];
    return stars.filter((star) => star.y === "y").map((star) => {
      const value = isLog ? Math.log10(star.value) : star.value;
      const x = ((star.x - left) / (right - left || 1)) * (width - 62);
      let y = ((value - bottom) / (top - bottom || 1)) * (height - 48) * (layout.yaxis.domain ? 0.68 : 1), shift = 0;
      while (placed.some(([other, above]) => Math.abs(other - x) < 13 && Math.abs(above - y - shift) < 14)) shift += 3;
      placed.push([x, y + shift]);
      const look = { xref: "x", yref: "y", text: "★", font: { size: 16, color: star.paint }, borderpad: 0 };
      if (!shift) return { ...look, x: star.x, y: value, showarrow: false, yshift: 1 };
      return { ...look, x: star.x, y: value, showarrow: true, ax: 0, ay: -shift, arrowhead: 0, arrowwidth: 1, arrowcolor: star.paint };
    });
  }

  function ticks(epochs, width) {
    // Whole epochs, if there are several.
    if (epochs <= 2) return { tickmode: "auto", dtick: null, tickformat: "" };
    return { tickmode: "linear", tick0: 0, dtick: Math.max(1, nice(epochs / Math.max(3, Math.min(14, width / 45)))), tickformat: "d" };
  }

  const MANY_BARS = 60; // are drawn as areas: narrow bars of unequal numbers of pixels look like a pattern

  function bars(figure, width) {
    const { axis, layout } = base();
    const { horizontal } = figure.bars;
    const kept = figure.bars.labels.map((_, place) => place).filter((place) => !figure.bars.of_runs || !choice.hidden.has(figure.bars.labels[place]));
    const labels = kept.map((place) => figure.bars.labels[place]);
    const series = figure.bars.series.map(([name, paint, values]) => [name, paint, kept.map((place) => values[place])]);
    const share = choice.shares.has(figure.name);
    const totals = labels.map((_, place) => series.reduce((sum, [, , values]) => sum + values[place], 0) || 1);
    const total = series.flatMap(([, , values]) => values).reduce((sum, value) => sum + value, 0);
    const isArea = !horizontal && labels.length > MANY_BARS;
    const traces = series.map(([name, paint, values]) => {
      const sum = values.reduce((one, other) => one + other, 0);
      const shown = share ? values.map((value, place) => value / totals[place]) : values;
      const form = share ? ".1%" : ".3~f";
      const common = { name, showlegend: sum > 0.002 * total, x: horizontal ? shown : labels, y: horizontal ? labels : shown, hovertemplate: horizontal ? `%{x:${form}}` : `%{y:${form}}` };
      if (isArea) return { ...common, type: "scatter", mode: "lines", stackgroup: "all", fillcolor: color(paint), line: { color: color(paint), width: 0.5, shape: "hvh" } };
      return { ...common, type: "bar", orientation: horizontal ? "h" : "v", marker: { color: color(paint), line: { width: 0 } } };
    });
    const value = { ...axis, tickformat: share ? ".0%" : "", ticksuffix: share ? "" : " s" };
    const label = { ...axis, showgrid: false, title: { text: figure.bars.axis, standoff: 6, font: { size: 11, color: style("faint") } } };
    layout.xaxis = horizontal ? value : label;
    layout.yaxis = horizontal ? { ...label, autorange: "reversed", type: "category" } : value;
    if (horizontal) layout.xaxis.nticks = Math.max(3, Math.floor(width / 80));
    if (!horizontal) Object.assign(layout.xaxis, ticks(Math.max(3, labels.at(-1) - labels[0]), width));
    Object.assign(layout, { barmode: "stack", bargap: 0.25, hovermode: horizontal ? "y unified" : "x unified" });
    layout.legend.traceorder = "normal";
    layout.margin.t = 26;
    return { traces, layout };
  }

  function heat(figure, width) {
    const { axis, layout } = base();
    const { epochs, ranks, late, own } = figure.heat;
    const most = Math.max(0.15, ...late.flat().map(Math.abs));
    const scale = [[0, style("low")], [0.5, style("middle")], [1, style("high")]];
    const traces = [{
      type: "heatmap", x: epochs, y: ranks, z: late, customdata: own, zmin: -most, zmax: most, colorscale: scale, xgap: epochs.length < 60 ? 2 : 0, ygap: ranks.length < 40 ? 2 : 0,
      hovertemplate: "rank %{y}, epoch %{x}: %{customdata:.1f} s, %{z:+.0%} against the median rank<extra></extra>",
      colorbar: { thickness: 8, outlinewidth: 0, tickformat: "+.0%", len: 1, tickfont: { color: style("faint") } },
    }];
    layout.xaxis = { ...axis, showgrid: false, title: { text: "epoch", standoff: 6, font: { size: 11, color: style("faint") } }, ...ticks(Math.max(3, epochs.length), width) };
    layout.yaxis = { ...axis, showgrid: false, autorange: "reversed", title: { text: "rank", standoff: 6, font: { size: 11, color: style("faint") } } };
    if (ranks.length <= 12) layout.yaxis.dtick = 1;
    layout.hovermode = "closest";
    return { traces, layout };
  }

  function scatter(figure) {
    const { axis, layout } = base();
    const { names, keys, scores } = figure.scatter;
    const key = choice.key in keys ? choice.key : Object.keys(keys)[0], score = choice.score in scores ? choice.score : Object.keys(scores)[0];
    const shown = names.map((_, run) => run).filter((run) => isShown(run) && scores[score][run] !== null);
    const numbers = keys[key].map(Number), isNumber = shown.every((run) => keys[key][run] !== "" && Number.isFinite(numbers[run]));
    const values = shown.map((run) => numbers[run]);
    const isLog = isNumber && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) >= 20;
    const heights = shown.map((run) => scores[score][run]), span = Math.max(...heights) - Math.min(...heights) || 1;
    const hasRoom = shown.map((run, place) => !shown.slice(0, place).some((other) => keys[key][other] === keys[key][run] && Math.abs(scores[score][other] - scores[score][run]) < 0.06 * span));
    const title = (text) => ({ text, standoff: 8, font: { size: 11, color: style("faint") } });
    const traces = [{
      type: "scatter", mode: shown.length <= 12 ? "markers+text" : "markers", x: shown.map((run) => (isNumber ? numbers[run] : keys[key][run] || "—")), y: shown.map((run) => scores[score][run]),
      text: shown.map((run, place) => (hasRoom[place] ? names[run] : "")), customdata: shown.map((run) => names[run]), textposition: "top center", textfont: { size: 11, color: style("faint") }, cliponaxis: false,
      hovertemplate: `%{customdata}<br>${key} %{x}<br>${score} %{y:.5~g}<extra></extra>`, marker: { size: 11, color: shown.map(color), line: { color: style("card"), width: 1 } },
    }];
    layout.xaxis = { ...axis, title: title(key), type: isLog ? "log" : isNumber ? "linear" : "category", ...(isLog ? logTicks(Math.min(...values), Math.max(...values)) : {}) };
    layout.yaxis = { ...axis, title: title(score) };
    const usual = scores[score][choice.base];
    if (usual !== null && shown.includes(choice.base)) layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: usual, y1: usual, line: { color: style("grey"), width: 1, dash: "dash" } }];
    layout.margin.t = 26;
    layout.hovermode = "closest";
    return { traces, layout };
  }

  // --- drawing what is in view ---------------------------------------------------------------------------------------
  const place = (figure) => document.querySelector(`[data-figure="${CSS.escape(figure.name)}"]`);
  const idOf = (figure) => `figure-${figure.name.replace(/[^A-Za-z0-9_]+/g, "-")}`;
  const visible = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || visible.has(entry.target.dataset.figure)) continue;
      visible.add(entry.target.dataset.figure);
      draw(data.figures.find((figure) => figure.name === entry.target.dataset.figure));
    }
  }, { rootMargin: "600px" });

  const drawn = (figure, element) => {
    const kind = figure.bars ? bars : figure.heat ? heat : figure.scatter ? scatter : curves;
    return kind(figure, element.clientWidth || 600, element.clientHeight || 300);
  };

  function draw(figure) {
    const element = place(figure);
    if (!element || !visible.has(figure.name)) return;
    const isNew = !element.classList.contains("js-plotly-plot");
    element.style.height = ""; // that of page.css, and more for further lines of the legend, whose columns are as wide as its longest name
    const { traces, layout, beyond, full } = drawn(figure, element);
    element.full = full;
    if (figure.panels.length) legend(figure, element, beyond);
    else if (figure.bars?.of_runs) element.style.height = `${Math.max(160, 110 + 26 * figure.bars.labels.length)}px`;
    const names = figure.bars ? traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name || "") : [];
    const columns = Math.max(1, Math.floor((element.clientWidth - 60) / (48 + 6.5 * Math.max(0, ...names.map((name) => name.length)))));
    const more = Math.ceil(names.length / columns) - 2;
    if (more > 0) element.style.height = `${element.clientHeight + 19 * more}px`;
    Plotly.react(element, traces, layout, config);
    if (isNew && figure.panels.length) element.on("plotly_relayout", (change) => follow(element, change));
  }

  function legend(figure, element, beyond) {
    // Buttons below a figure's title: runs by color, and the parts of each, such as datasets, by line style.
    const known = figure.panels[0].curves.filter((curve) => curve.look !== "faint");
    const several = data.runs.length > 1;
    const entries = [];
    const line = (paint, dash) => `<svg width=22 height=8><line x1=1 x2=21 y1=4 y2=4 stroke="${paint}" stroke-width=2.4 stroke-dasharray="${{ dash: "6 4", dot: "2 3", dashdot: "7 3 2 3" }[dash] ?? ""}"/></svg>`;
    const button = (attribute, value, isOn, picture, text) => {
      const made = document.createElement("button");
      made.type = "button";
      made.dataset[attribute] = value;
      made.setAttribute("aria-pressed", isOn);
      made.innerHTML = picture;
      made.append(text);
      entries.push(made);
    };
    const parts = new Map(known.map((curve) => [curve.part, curve]));
    if (parts.size > 1) for (const [part, curve] of parts) button("part", part, isPartShown(figure, part), line(several ? "var(--text)" : `var(--c${curve.color % COLORS})`, curve.dash), part);
    const runs = new Set(known.map((curve) => curve.run));
    if (several && runs.size <= COLORS) for (const run of runs) button("run", run, isShown(run), line(`var(--c${run % COLORS})`, "solid"), data.runs[run].name);
    const card = element.closest("figure");
    card.querySelector(".legend").replaceChildren(...entries);
    const note = card.querySelector(".beyond"), whole = choice.whole.has(figure.name);
    note.hidden = !beyond.length && !whole;
    note.textContent = whole ? "all points are shown: cut the range" : `▲ ${beyond.length} point${beyond.length === 1 ? "" : "s"} beyond the range, up to ${number(Math.max(...beyond))}: show all`;
  }

  function follow(element, change) {
    if (passive) return;
    if (choice.log && change["yaxis.range[0]"] !== undefined && element.layout.yaxis.type === "log") {
      const made = logTicks(10 ** change["yaxis.range[0]"], 10 ** change["yaxis.range[1]"]);
      Plotly.relayout(element, { "yaxis.tickvals": made.tickvals, "yaxis.ticktext": made.ticktext });
    }
    const [left, right] = element.full, near = (one, other) => Math.abs(one - other) < 1e-6 * (right - left);
    const wanted = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (change["xaxis.autorange"] || change["xaxis.showspikes"] === false || (near(wanted[0], left) && near(wanted[1], right))) range = null;
    else if (wanted[0] !== undefined) range = wanted;
    else return;
    passive = true;
    const others = data.figures.filter((figure) => figure.panels.length && visible.has(figure.name)).map(place).filter((one) => one && one !== element);
    const update = (one) => {
      const [from, to] = range ?? one.full;
      const made = choice.x === "epoch" ? ticks(to - from, one.clientWidth) : {};
      return { "xaxis.range": [from, to], ...Object.fromEntries(Object.entries(made).map(([name, value]) => [`xaxis.${name}`, value])) };
    };
    Promise.all([...others, element].map((one) => Plotly.relayout(one, update(one)))).finally(() => { passive = false; });
  }

  function show() {
    for (const button of document.querySelectorAll("[data-x]")) button.setAttribute("aria-pressed", button.dataset.x === choice.x);
    byId("log").setAttribute("aria-pressed", choice.log);
    for (const element of document.querySelectorAll("[data-figure]")) {
      element.closest("figure").querySelector(".switch")?.setAttribute("aria-pressed", choice.shares.has(element.dataset.figure));
      watcher.observe(element);
    }
    for (const select of document.querySelectorAll("[data-choose]")) if (choice[select.dataset.choose]) select.value = choice[select.dataset.choose];
    trainings();
    data.figures.forEach(draw);
  }

  // --- the table of trainings ----------------------------------------------------------------------------------------
  function trainings() {
    for (const element of document.querySelectorAll(".multiples > figure")) element.hidden = !isShown(Number(element.dataset.run));
    for (const element of document.querySelectorAll("#others > g")) element.style.display = isShown(Number(element.dataset.run)) ? "" : "none";
    const table = byId("runs")?.querySelector("table");
    if (!table) return;
    const heads = [...table.querySelectorAll("th")], rows = [...table.tBodies[0].rows];
    const usual = rows.find((row) => Number(row.dataset.run) === choice.base);
    for (const row of rows) {
      const run = Number(row.dataset.run);
      row.classList.toggle("off", !isShown(run));
      row.querySelector("[data-show]").checked = isShown(run);
      row.querySelector("[data-base]").setAttribute("aria-pressed", run === choice.base);
      for (const element of row.querySelectorAll(".delta")) {
        const cell = element.closest("td"), before = usual.cells[cell.cellIndex].dataset.v, difference = cell.dataset.v - before;
        element.textContent = run === choice.base || before === "" ? "" : `${difference < 0 ? "−" : "+"}${number(Number(Math.abs(difference).toPrecision(2)))}`;
        element.classList.toggle("better", difference && (difference > 0) === "higher" in heads[cell.cellIndex].dataset);
      }
    }
    const [column, order] = [parseInt(choice.sort, 10), choice.sort.endsWith("-") ? -1 : 1];
    heads.forEach((head, place) => head.setAttribute("aria-sort", place !== column ? "none" : order > 0 ? "ascending" : "descending"));
    const value = (row) => row.cells[column]?.dataset.v ?? "";
    const asNumber = rows.every((row) => value(row) === "" || Number.isFinite(Number(value(row))));
    const compare = (one, other) => (asNumber ? value(one) - value(other) : value(one).localeCompare(value(other), undefined, { numeric: true }));
    const sorted = Number.isNaN(column) ? rows.sort((one, other) => one.dataset.run - other.dataset.run)
      : rows.sort((one, other) => (value(one) === "") - (value(other) === "") || order * compare(one, other) || one.dataset.run - other.dataset.run);
    if (sorted.some((row, place) => table.tBodies[0].rows[place] !== row)) table.tBodies[0].append(...sorted);
  }

  function hide(run, isHidden) {
    const { name } = data.runs[run];
    if (isHidden) choice.hidden.add(name); else choice.hidden.delete(name);
  }

  // --- what the reader chooses, in the page's address ----------------------------------------------------------------
  let anchor = "";

  function address() {
    const words = new URLSearchParams();
    if (choice.x !== "epoch") words.set("x", choice.x);
    if (choice.log) words.set("log", "1");
    if (choice.hidden.size) words.set("hide", [...choice.hidden].join("|"));
    if (choice.parts.size) words.set("parts", [...choice.parts].map(([part, isOn]) => `${isOn ? "" : "-"}${part}`).join("|"));
    if (choice.shares.size) words.set("shares", [...choice.shares].join("|"));
    if (choice.base !== data.base) words.set("base", data.runs[choice.base].name);
    for (const name of ["sort", "key", "score"]) if (choice[name]) words.set(name, choice[name]);
    return `#${anchor}${[...words].length ? `?${words}` : ""}`;
  }

  function note() { history.replaceState(null, "", address()); }

  function baseNamed(name) {
    const found = data.runs.findIndex((run) => run.name === name);
    return found < 0 ? data.base : found;
  }

  function readAddress() {
    const [name, text] = location.hash.slice(1).split(/\?(.*)/s);
    const words = new URLSearchParams(text ?? "");
    const list = (key) => (words.get(key) ? words.get(key).split("|") : []);
    anchor = name;
    choice.x = ["step", "seconds"].includes(words.get("x")) ? words.get("x") : "epoch";
    choice.log = words.has("log");
    choice.hidden = new Set(list("hide"));
    choice.parts = new Map(list("parts").map((part) => (part.startsWith("-") ? [part.slice(1), false] : [part, true])));
    choice.shares = new Set(list("shares"));
    choice.base = baseNamed(words.get("base"));
    for (const key of ["sort", "key", "score"]) choice[key] = words.get(key) ?? "";
  }

  function go(name) {
    const target = byId(name);
    if (!target) return;
    for (let element = target; element; element = element.parentElement) if (element.tagName === "DETAILS") element.open = true;
    target.scrollIntoView();
  }

  // --- files ---------------------------------------------------------------------------------------------------------
  function save(name, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = `${name}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  const asCsv = (rows) => rows.map((row) => row.map((value) => { const text = String(value ?? ""); return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; }).join(",")).join("\n") + "\n";

  function figureRows(figure) {
    if (figure.bars) return [["", ...figure.bars.series.map(([name]) => name)], ...figure.bars.labels.map((label, row) => [label, ...figure.bars.series.map(([, , values]) => values[row])])];
    if (figure.heat) return [["epoch", ...figure.heat.ranks.map((rank) => `rank ${rank}`)], ...figure.heat.epochs.map((epoch, row) => [epoch, ...figure.heat.own.map((values) => values[row])])];
    if (figure.scatter) {
      const { names, keys, scores } = figure.scatter;
      return [["training", ...Object.keys(keys), ...Object.keys(scores)], ...names.map((name, run) => [name, ...Object.values(keys).map((values) => values[run]), ...Object.values(scores).map((values) => values[run])])];
    }
    const rows = [["panel", "curve", "epoch", "step", "seconds", "value"]];
    for (const panel of figure.panels) for (const curve of panel.curves) curve.y.forEach((value, place) => rows.push([panel.title, curve.name || "within epochs, not smoothed", ...["epoch", "step", "seconds"].map((x) => curve.x[x][place]), value]));
    return rows;
  }

  function tableRows(table) {
    const kept = [...table.tHead.rows[0].cells].filter((head) => !head.classList.contains("fixed")).map((head) => head.cellIndex);
    return [...table.rows].filter((row) => !row.hidden).map((row) => kept.map((place) => row.cells[place].dataset.v ?? row.cells[place].textContent));
  }

  function csv(name) {
    const figure = data.figures.find((one) => idOf(one) === name);
    save(name.replace(/^figure-/, ""), asCsv(figure ? figureRows(figure) : tableRows(byId(name).querySelector("table"))));
  }

  function png(name) {
    const figure = data.figures.find((one) => idOf(one) === name), element = place(figure);
    const { traces, layout } = drawn(figure, element);
    Object.assign(layout, { paper_bgcolor: style("card"), plot_bgcolor: style("card"), showlegend: traces.filter((trace) => trace.showlegend !== false).length > 1 });
    layout.title = { text: figure.title, x: 0.02, font: { size: 15 } };
    layout.margin.t = 70;
    Plotly.downloadImage({ data: traces, layout, config }, { filename: name.replace(/^figure-/, ""), format: "png", scale: 2, width: Math.max(700, element.clientWidth), height: Math.max(380, element.clientHeight + 60) });
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link) {
      event.preventDefault();
      anchor = link.getAttribute("href").slice(1);
      note();
      go(anchor);
      return;
    }
    const button = event.target.closest("button");
    if (!button) return;
    const { x, run, part, base: of, all } = button.dataset;
    if (x) { choice.x = x; range = null; }
    else if (button.id === "log") choice.log = !choice.log;
    else if (button.classList.contains("switch")) {
      const name = button.closest("figure").querySelector("[data-figure]").dataset.figure;
      if (!choice.shares.delete(name)) choice.shares.add(name);
    } else if (button.classList.contains("beyond")) {
      const name = button.closest("figure").querySelector("[data-figure]").dataset.figure;
      if (!choice.whole.delete(name)) choice.whole.add(name);
    } else if (run !== undefined) hide(Number(run), isShown(Number(run)));
    else if (part !== undefined) {
      const name = button.closest("figure").querySelector("[data-figure]").dataset.figure;
      choice.parts.set(part, !isPartShown(data.figures.find((figure) => figure.name === name), part));
    } else if (of !== undefined) choice.base = Number(of);
    else if (all !== undefined) data.runs.forEach((_, number) => hide(number, all === "0"));
    else if (button.dataset.csv) return void csv(button.dataset.csv);
    else if (button.dataset.png) return void png(button.dataset.png);
    else if (button.closest("th")) {
      const column = button.closest("th").cellIndex;
      choice.sort = choice.sort === `${column}` ? `${column}-` : choice.sort === `${column}-` ? "" : `${column}`;
    } else return;
    note();
    show();
  });

  document.addEventListener("change", ({ target }) => {
    if (target.dataset.show !== undefined) hide(Number(target.dataset.show), !target.checked);
    else if (target.dataset.choose) choice[target.dataset.choose] = target.value;
    else return;
    note();
    show();
  });

  document.addEventListener("input", ({ target }) => {
    if (target.type !== "search") return;
    for (const row of target.closest("details, .card").querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(target.value.toLowerCase());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  const onPaper = (isPrinted) => {
    document.body.classList.toggle("paper", isPrinted); // as wide as a page; figures out of view were not drawn yet
    if (isPrinted) data.figures.forEach((figure) => visible.add(figure.name));
    for (const element of document.querySelectorAll(".js-plotly-plot")) Plotly.purge(element); // drawn anew: plotly's resize comes too late
    data.figures.forEach(draw);
  };
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  addEventListener("hashchange", () => { readAddress(); show(); go(anchor); });
  readAddress();
  show();
  if (anchor) go(anchor);

  // --- new data while training runs ----------------------------------------------------------------------------------
  if (!("live" in document.body.dataset)) return;
  const tell = (text, stopped) => { byId("live").textContent = text; byId("live").classList.toggle("stopped", stopped); };
  let updated = new Date();
  async function update() {
    try {
      const answer = await fetch(`data.json?have=${data.version}`, { cache: "no-store" });
      if (answer.status === 200) {
        const fresh = await answer.json();
        const usual = data.runs[choice.base]?.name;
        replaceSections(fresh.sections);
        data = fresh;
        choice.base = baseNamed(usual);
        updated = new Date();
        document.title = data.title;
        show();
      } else if (!answer.ok) throw new Error(answer.status);
      tell(data.running ? `live, data of ${updated.toLocaleTimeString()}` : `not running, as of ${new Date().toLocaleTimeString()}`, !data.running);
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
      const open = [...section.querySelectorAll("details")].map((one) => one.open);
      const old = new Map([...section.querySelectorAll("[data-figure]")].map((one) => [one.dataset.figure, one]));
      section.innerHTML = html;
      section.hvdtrain = html;
      section.querySelectorAll("details").forEach((one, number) => { if (number < open.length) one.open = open[number]; });
      for (const element of section.querySelectorAll("[data-figure]")) if (old.has(element.dataset.figure)) element.replaceWith(old.get(element.dataset.figure));
    }
  }
  setTimeout(update, 1000);
})();
