// The script of a report. Every name comes from a traced program: it becomes text (textContent, Tabulator's plaintext), never HTML.
"use strict";
(async () => {
  const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a80a", "#8a8f98"]; // told apart also if colour-blind
  const BINS = 400; // of a timeline: report.sql
  const $ = (selector, from = document) => from.querySelector(selector);

  const packed = Uint8Array.from(atob($("#facts").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const facts = JSON.parse(await new Response(stream).text());

  // --- values ---

  const digits = (value) => (value >= 999.5 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3)).toString());
  const scaled = (value, units, step) => {
    let at = 0;
    while (Math.abs(value) >= 0.9995 * step && at < units.length - 1) { value /= step; at++; }
    return `${value < 0 ? "-" : ""}${digits(Math.abs(value))} ${units[at]}`;
  };
  const UNITS = {
    ns: (value) => scaled(value, ["ns", "us", "ms", "s"], 1000),
    bytes: (value) => scaled(value, ["B", "KB", "MB", "GB", "TB"], 1024),
    count: (value) => Math.round(value).toLocaleString("en"),
    ratio: (value) => digits(value),
    share: (value) => `${(100 * value).toFixed(1)} %`,
  };
  const FACTORS = { us: 1e3, ms: 1e6, s: 1e9, kb: 1024, mb: 1024 ** 2, gb: 1024 ** 3, k: 1e3, m: 1e6, "%": 0.01 };
  const quantity = (text) => { // "2 ms", "5 %", "1 MB"
    const match = /^\s*([\d.,]+)\s*([a-z%]*)/i.exec(text);
    return match ? Number(match[1].replaceAll(",", "")) * (FACTORS[match[2].toLowerCase()] || 1) : NaN;
  };
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const named = (name, full) => {
    const made = element("span", name);
    made.title = full ?? name;
    return made;
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // --- tables ---

  const KERNEL = [
    ["kernel", "Kernel"], ["launches", "Launches", "count"], ["gpu_ns", "GPU time", "ns"], ["share", "Of all", "share"],
    ["mean_ns", "Mean", "ns"], ["p99_ns", "P99", "ns"], ["latency_ns", "Latency P50", "ns"], ["memory_ratio", "Sectors / least", "ratio"],
    ["wasted_bytes", "Wasted", "bytes"], ["efficiency", "Lanes busy", "share"], ["imbalance", "Imbalance", "ratio"],
    ["exits_ns", "Exit spread", "ns"],
  ];
  const FACTS = [
    ["instructions", "Instructions", "count"], ["efficiency", "Lanes busy", "share"], ["diverged", "Diverged", "share"],
    ["lost", "Lanes lost", "count"], ["requests", "Requests", "count"], ["memory_ratio", "Sectors / least", "ratio"],
    ["wasted_bytes", "Wasted", "bytes"], ["bank_ways", "Bank ways", "ratio"], ["wait_ns", "Barrier wait", "ns"], ["nans", "NaN, inf", "count"],
  ];
  const LINE = [["source", "Source"], ["kernel", "Kernel"], ...FACTS];
  const RUN = [
    ["tool", "Tool"], ["host", "Host"], ["day", "Day (UTC)"], ["run", "Run"], ["device", "Device"], ["launches_matched", "Launches", "count"],
    ["launches_instrumented", "Measured", "count"], ["lost", "Lost", "count"], ["duration_ns", "Duration", "ns"],
  ];
  const MISSING = [["tool", "Tool"], ["reason", "Reason"], ["launches", "Number", "count"], ["runs", "Runs", "count"]];

  function table(id, rows, columns, first, chosen) {
    if (!rows.length) return;
    const section = $(`#${id}`);
    section.hidden = false;
    const shown = columns.filter(([field]) => rows.some((row) => row[field] !== undefined && row[field] !== null));
    const made = new Tabulator($(".table", section), {
      data: rows,
      layout: "fitDataFill",
      pagination: rows.length > 15,
      paginationSize: 15,
      columnDefaults: { headerSortTristate: false, resizable: true },
      initialSort: first ? [{ column: shown.some(([field]) => field === first) ? first : shown[0][0], dir: "desc" }] : [],
      rowFormatter: chosen && ((row) => {
        const line = row.getElement();
        line.tabIndex = 0;
        line.onkeydown = (event) => event.key === "Enter" && chosen(row.getData());
      }),
      columns: shown.map(([field, title, unit]) => ({
        field, title,
        minWidth: unit ? 96 : 110,
        maxWidth: unit ? undefined : 420,
        hozAlign: unit ? "right" : "left",
        headerHozAlign: unit ? "right" : "left",
        sorter: unit ? "number" : "string",
        headerSortStartingDir: unit ? "desc" : "asc",
        headerFilter: rows.length > 5 ? "input" : undefined,
        headerFilterPlaceholder: unit ? "at least" : "contains",
        headerFilterFunc: unit ? (least, value) => Number.isNaN(quantity(least)) || (value ?? -Infinity) >= quantity(least) : "like",
        formatter: "plaintext",
        ...(field === "kernel" && { formatter: (cell) => named(cell.getValue(), cell.getData().full_name) }),
        ...(unit && { formatter: (cell) => { const value = cell.getValue(); return value === undefined || value === null ? "" : UNITS[unit](value); } }),
      })),
    });
    made.on("tableBuilt", () => {
      for (const title of section.querySelectorAll(".tabulator-col-sorter-element")) { // Tabulator sorts on clicks alone
        const inner = $(".tabulator-col-title", title);
        inner.tabIndex = 0;
        inner.setAttribute("role", "button");
        inner.onkeydown = (event) => { if (event.key === "Enter") title.click(); };
      }
      for (const input of section.querySelectorAll(".tabulator-header-filter input"))
        input.setAttribute("aria-label", `Filter by ${$(".tabulator-col-title", input.closest(".tabulator-col")).textContent}`);
    });
    if (chosen) made.on("rowClick", (_, row) => chosen(row.getData()));
  }

  // --- source ---

  const files = facts.files;
  function source(name, line) {
    const file = files.find((one) => one.name === name);
    if (!file) return;
    $("#file").value = name;
    $("#why").textContent = file.why;
    const known = FACTS.filter(([field]) => Object.values(file.facts).some((rows) => rows.some((row) => row[field] !== undefined && row[field] !== null)));
    const body = element("tbody");
    const own = Object.keys(file.facts).map(Number); // also of lines that the file does not have
    const numbers = [...new Set([...(file.text ?? []).map((_, at) => at + 1), ...own])].sort((a, b) => a - b);
    const largest = Object.fromEntries(known.map(([field]) => [field, Math.max(...Object.values(file.facts).flat().map((row) => row[field] ?? 0))]));
    for (const number of numbers) {
      const rows = file.facts[number] || [{}];
      rows.forEach((row, at) => {
        const tr = element("tr");
        if (row.kernel !== undefined) tr.className = "known";
        if (number === line && at === 0) { tr.classList.add("chosen"); tr.id = "chosen"; }
        tr.append(element("td", at ? "" : String(number), "number"));
        tr.append(element("td", row.kernel ?? "", "kernel"));
        for (const [field, , unit] of known) {
          const value = row[field];
          const cell = element("td", value === undefined || value === null ? "" : UNITS[unit](value));
          if (value && largest[field] && ["lost", "wasted_bytes", "instructions", "wait_ns", "requests"].includes(field))
            cell.style.background = `rgba(${color("--cell")}, ${(0.45 * value) / largest[field]})`;
          tr.append(cell);
        }
        tr.append(element("td", at ? "" : file.text?.[number - 1] ?? "", "code"));
        body.append(tr);
      });
    }
    const head = element("tr");
    head.append(element("th", ""), element("th", "Kernel", "kernel"), ...known.map(([, title]) => element("th", title)), element("th", "", "code"));
    const thead = element("thead");
    thead.append(head);
    const made = element("table");
    made.append(thead, body);
    const place = $("#files .source");
    place.replaceChildren(made);
    const chosen = $("#chosen");
    const aim = chosen || $("tr.known", place);
    place.scrollTop = aim ? Math.max(0, aim.offsetTop - 120) : 0;
  }
  function show(place) { // "memory.cu:66"
    const match = /^(.+):(\d+)$/.exec(place ?? "");
    if (!match) return;
    source(match[1], Number(match[2]));
    $("#files").scrollIntoView({ behavior: "smooth" });
    $("#files .source").focus({ preventScroll: true });
  }

  // --- plots ---

  const axis = (more) => ({ stroke: color("--soft"), grid: { stroke: color("--rule"), width: 1 }, ticks: { stroke: color("--rule") }, ...more });
  const DECADES = Array.from({ length: 12 }, (_, power) => 10 ** power);
  const plots = [];
  function timeline() {
    const one = facts.timelines[Number($("#run").value)];
    const place = $("#time .plots");
    plots.splice(0).forEach((plot) => plot.destroy());
    place.replaceChildren();
    if (!one) return;
    const bins = Math.min(BINS, Math.floor((one.end_ns - one.begin_ns) / one.bin_ns) + 1);
    const x = Array.from({ length: bins + 1 }, (_, bin) => bin * one.bin_ns);
    const names = [...new Set(facts.moments.map((row) => row.kernel))].sort((a, b) => (a === "other kernels") - (b === "other kernels"));
    const own = facts.moments.filter((row) => row.run === one.run);
    const sums = x.map(() => 0);
    const stacked = [];
    for (const name of names) {
      const ns = x.map(() => 0);
      for (const row of own) if (row.kernel === name) ns[row.bin] += row.ns;
      if (!ns.some(Boolean)) continue;
      ns.forEach((value, bin) => { sums[bin] += value / one.bin_ns; });
      stacked.push({ name, color: COLORS[names.indexOf(name) % COLORS.length], own: ns.map((value) => value / one.bin_ns), top: [...sums] });
    }
    const width = Math.max(280, place.clientWidth);
    const sync = uPlot.sync("time");
    const common = { width, cursor: { sync: { key: sync.key }, drag: { x: true, y: false } }, focus: { alpha: 1 } };
    const time = { label: "Time", value: (_, value) => (value === null ? "-" : UNITS.ns(value)) };
    const scale = { time: false, range: (_, low, high) => [low, high] };
    plots.push(new uPlot({
      ...common, height: 260, title: "Share of the time in which kernels ran",
      scales: { x: scale, y: { range: (_, low, high) => [0, Math.max(1, high)] } },
      axes: [axis({ values: (_, values) => values.map((value) => (value === 0 ? "0" : UNITS.ns(value))), space: 80 }), axis({ values: (_, values) => values.map((value) => `${Math.round(100 * value)} %`), size: 70 })],
      series: [time, ...[...stacked].reverse().map((part) => ({
        label: part.name, stroke: part.color, fill: part.color, width: 0.5, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }),
        value: (_, value, __, at) => (at === null ? "-" : UNITS.share(part.own[at])),
      }))],
    }, [x, ...[...stacked].reverse().map((part) => part.top)], place));
    const cells = facts.latencies.filter((row) => row.run === one.run);
    if (!cells.length) return;
    const most = Math.max(...cells.map((cell) => cell.launches));
    const low = Math.min(...cells.map((cell) => cell.half_octave)) - 1, high = Math.max(...cells.map((cell) => cell.half_octave)) + 2;
    const by_bin = new Map();
    for (const cell of cells) by_bin.set(cell.bin, (by_bin.get(cell.bin) || 0) + cell.launches);
    plots.push(new uPlot({
      ...common, height: 220, title: "Latency of launches, from the call to the start",
      scales: { x: scale, y: { range: () => [low, high] } },
      axes: [axis({ values: (_, values) => values.map((value) => (value === 0 ? "0" : UNITS.ns(value))), space: 80 }), axis({ splits: () => DECADES.map((ns) => 2 * Math.log2(ns)).filter((at) => at >= low && at <= high), values: (_, values) => values.map((value) => UNITS.ns(2 ** (value / 2))), size: 70 })],
      series: [time, { label: "Launches", paths: () => null, points: { show: false }, value: (_, __, ___, at) => (at === null ? "-" : UNITS.count(by_bin.get(at) || 0)) }],
      hooks: { draw: [(plot) => {
        const { ctx } = plot, rgb = color("--cell");
        ctx.save();
        ctx.beginPath();
        ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
        ctx.clip();
        for (const cell of cells) {
          const left = plot.valToPos(cell.bin * one.bin_ns, "x", true), right = plot.valToPos((cell.bin + 1) * one.bin_ns, "x", true);
          const top = plot.valToPos(cell.half_octave + 1, "y", true), bottom = plot.valToPos(cell.half_octave, "y", true);
          ctx.fillStyle = `rgba(${rgb}, ${0.25 + 0.75 * Math.sqrt(cell.launches / most)})`;
          ctx.fillRect(left, top, Math.max(2, right - left), Math.max(2, bottom - top));
        }
        ctx.restore();
      }] },
    }, [x, x.map(() => low)], place));
  }

  const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis
  const shade = (share) => {
    const at = Math.min(STOPS.length - 1.001, Math.max(0, share) * (STOPS.length - 1)), low = Math.floor(at);
    return `rgb(${STOPS[low].map((value, part) => Math.round(value + (STOPS[low + 1][part] - value) * (at - low))).join(",")})`;
  };
  const shape_of = (row) => `${row.kernel}, grid ${row.blocks}, block ${row.block_threads}, ${row.work_kind}`;
  function threads() {
    const name = $("#shape").value, place = $("#threads .plots");
    const own = facts.threads.filter((row) => shape_of(row) === name);
    if (!own.length) return;
    const columns = Math.max(...own.map((row) => row.x)) + 1, rows = Math.max(...own.map((row) => row.y)) + 1;
    const low = Math.min(...own.map((row) => row.work)), high = Math.max(...own.map((row) => row.work));
    const canvas = element("canvas");
    const size = Math.max(3, Math.min(18, Math.floor((place.clientWidth || 900) / columns)));
    const tall = Math.max(3, Math.min(28, Math.floor(320 / rows)));
    canvas.width = columns * size;
    canvas.height = rows * tall;
    canvas.style.maxWidth = "100%";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Work by block and thread of ${name}; the arrow keys read single values`);
    const context = canvas.getContext("2d"), cells = new Map();
    for (const row of own) {
      cells.set(`${row.y},${row.x}`, row);
      context.fillStyle = shade(high > low ? (row.work - low) / (high - low) : 0.5);
      context.fillRect(row.x * size, row.y * tall, size, tall);
    }
    const readout = element("p", "", "readout");
    readout.setAttribute("aria-live", "polite");
    let x = 0, y = 0;
    const range = (at, each) => (each > 1 ? `s ${at * each}–${(at + 1) * each - 1}` : ` ${at}`);
    const read = () => {
      const row = cells.get(`${y},${x}`);
      readout.textContent = row ? `block${range(y, row.blocks_each)}, thread${range(x, row.threads_each)}: ${UNITS.count(row.work)}${row.blocks_each * row.threads_each > 1 ? " on average" : ""}` : "";
    };
    canvas.onmousemove = (event) => {
      const box = canvas.getBoundingClientRect();
      x = Math.floor(((event.clientX - box.left) / box.width) * columns);
      y = Math.floor(((event.clientY - box.top) / box.height) * rows);
      read();
    };
    canvas.onkeydown = (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      x = Math.min(columns - 1, Math.max(0, x + move[0]));
      y = Math.min(rows - 1, Math.max(0, y + move[1]));
      read();
    };
    const scale = element("p", "", "scale"), ramp = element("i");
    ramp.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(shade).join(",")})`;
    scale.append(element("span", UNITS.count(low)), ramp, element("span", `${UNITS.count(high)} (${own[0].work_kind} of a thread)`));
    place.replaceChildren(canvas, scale, readout);
  }

  function choice(id, options, changed) {
    const select = $(id);
    options.forEach(([value, text]) => { const option = element("option", text); option.value = value; select.append(option); });
    select.onchange = changed;
  }

  // --- the page ---

  const of = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const [about] = facts.about, from = `from ${facts.directories.join(", ")}`;
  $("#about").textContent = about
    ? `${of(about.runs, "run")} of ${about.tools} on ${of(about.hosts, "host")}, ${about.first_day === about.last_day ? about.first_day : `${about.first_day} to ${about.last_day}`}; ${from}`
    : `${from}; the runs had not ended, or were killed`;
  if (about?.embedded) {
    const which = about.embedded === about.runs ? "Measured" : `${about.embedded.toLocaleString("en")} of the ${of(about.runs, "run")} measured`;
    $("#caution").textContent = `${which} on an embedded device: counts are exact, but times say nothing about a GPU.`;
    $("#caution").hidden = false;
  }
  const list = $("#findings .findings");
  $("#findings").hidden = false;
  if (!facts.findings.length) $("#findings .hint").textContent = "No tool found anything that stands out.";
  for (const one of facts.findings) {
    const item = element("li"), meter = element("div", undefined, "meter"), fill = element("i"), body = element("div"), where = element("div", undefined, "where");
    meter.title = one.share_of ? `${UNITS.share(Math.min(1, one.weight))} ${one.share_of}` : "a result that is wrong or missing";
    fill.style.width = `${Math.max(3, Math.min(100, 100 * one.weight))}%`;
    meter.append(fill);
    if (one.kernel) where.append(element("b", one.kernel));
    if (one.source) {
      const link = element("a", one.source);
      link.href = "#files";
      link.onclick = (event) => { event.preventDefault(); show(one.source); };
      where.append(one.kernel ? " at " : "", files.some((file) => one.source.startsWith(`${file.name}:`)) ? link : one.source);
    }
    where.append(element("span", one.tool, "tool"));
    body.append(where, element("div", one.finding));
    item.append(meter, body);
    list.append(item);
  }
  if (facts.findings.length > 8) {
    const more = $("#more");
    more.hidden = false;
    more.textContent = `Show all ${facts.findings.length} findings`;
    more.onclick = () => { list.classList.add("whole"); more.hidden = true; };
  }
  const short = facts.kernels.map((row) => row.kernel);
  const twice = new Set(short.filter((name, at) => short.indexOf(name) !== at)); // instances of a template
  for (const row of facts.kernels) if (twice.has(row.kernel)) row.kernel = row.full_name ?? row.kernel;
  const total = facts.kernels.reduce((sum, row) => sum + (row.gpu_ns || 0), 0);
  for (const row of facts.kernels) if (row.gpu_ns) row.share = row.gpu_ns / total;
  table("missing", facts.missing, MISSING);
  table("kernels", facts.kernels, KERNEL, facts.kernels.some((row) => row.gpu_ns) ? "gpu_ns" : "wasted_bytes");
  table("lines", facts.lines, LINE, facts.lines.some((row) => row.wasted_bytes) ? "wasted_bytes" : "instructions", (row) => show(row.source));
  table("runs", facts.runs, RUN);
  if (files.length) {
    $("#files").hidden = false;
    choice("#file", files.map((file) => [file.name, file.name]), () => source($("#file").value));
    const [first] = facts.findings.filter((one) => one.source).map((one) => /^(.+):(\d+)$/.exec(one.source)).filter(Boolean);
    source(first ? first[1] : files[0].name, first ? Number(first[2]) : undefined);
    if (!$("#files .source").childElementCount) source(files[0].name);
  }
  if (facts.timelines.length) {
    $("#time").hidden = false;
    choice("#run", facts.timelines.map((one, at) => [at, `${one.run} on ${one.host}, ${of(one.launches, "launch").replace("launchs", "launches")}`]), timeline);
    timeline();
  }
  if (facts.threads.length) {
    $("#threads").hidden = false;
    choice("#shape", [...new Set(facts.threads.map(shape_of))].map((name) => [name, name]), threads);
    threads();
  }
  const cut = Object.entries(facts.left_out).map(([name, most]) => `${name === "runs" ? "the newest" : "the most important"} ${most.toLocaleString("en")} ${name}`);
  $("#left_out").textContent = cut.length ? `Long lists are cut: this report has ${cut.join(", ")}. gpubpf query shows the others.` : "";
  for (const section of document.querySelectorAll("main section:not([hidden])")) {
    const link = element("a", $("h2", section).textContent);
    link.href = `#${section.id}`;
    $("#contents").append(link);
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = (name) => {
    document.documentElement.dataset.theme = name;
    timeline();
    if (files.length) { const line = $("#chosen .number"); source($("#file").value, line ? Number(line.textContent) : undefined); }
  };
  $("#theme").onclick = () => paint(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  dark.onchange = () => paint(dark.matches ? "dark" : "light");
  paint(dark.matches ? "dark" : "light");
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; timeline(); threads(); } });
  document.documentElement.dataset.ready = "yes";
})();
