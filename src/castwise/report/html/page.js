"use strict";
// The page's own script: themes, charts that are drawn when they come into view, tables that sort, filter and page.
// Whatever comes from records is put into text nodes, or into plotly as text that was escaped before.
(async () => {
  const unpacked = async (id) => {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  if (!window.DecompressionStream) {
    document.getElementById("too-old").hidden = false;
    return;
  }
  const DATA = JSON.parse(await unpacked("data"));
  const PAGE_ROWS = 50;
  const PAPER = 660, HALF_PAPER = 305; // pixels of a chart on A4, alone and next to another
  const MOST_NARROW_TEXTS = 10; // bars with their figures in them on a narrow screen
  const MOST_ON_A_LINE = 14; // characters of a heading
  const NARROW = 520; // pixels of a chart, below which two panels do not fit next to each other
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  // ---- small parts
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };
  const textOf = (cell) => (Array.isArray(cell) ? cell[1] : cell);
  const valueOf = (cell) => (Array.isArray(cell) ? cell[0] : cell);
  const csvField = (value) => (/[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const toCsv = (table) => {
    const lines = [table.columns.map((column) => csvField(column.name)).join(",")];
    for (const row of table.rows) {
      lines.push(row.map((cell) => {
        const value = valueOf(cell);
        return value === null ? "" : csvField(String(value));
      }).join(","));
    }
    return lines.join("\n") + "\n";
  };
  const save = (name, type, text) => {
    const url = URL.createObjectURL(new Blob([text], { type }));
    const link = make("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };

  // ---- tables
  const collator = new Intl.Collator("en", { numeric: true });
  const compareCells = (one, other) => {
    const a = valueOf(one), b = valueOf(other);
    const noA = a === null || a === "–", noB = b === null || b === "–";
    if (noA || noB) return noA - noB; // missing values come last, in both directions
    if (typeof a === "number" && typeof b === "number") return a - b;
    return collator.compare(a, b);
  };

  class Table {
    constructor(place, table, caption, fileName) {
      this.place = place;
      this.table = table;
      this.caption = caption;
      this.fileName = fileName;
      this.sorted = null; // [column, 1 or -1]
      this.page = 0;
      this.words = "";
      this.chosen = new Map();
      this.texts = null;
      this.best = new Map(Object.entries(table.best || {}).map(([index, places]) => [Number(index), new Set(places)]));
      this.build();
    }

    build() {
      const { columns, rows } = this.table;
      this.count = make("span", { class: "count", "aria-live": "polite" });
      const bar = make("div", { class: "bar" });
      if (rows.length > 5) {
        const input = make("input", { type: "search", placeholder: "words in any column" });
        let waiting = 0;
        input.addEventListener("input", () => {
          clearTimeout(waiting);
          waiting = setTimeout(() => { this.words = input.value; this.page = 0; this.update(); }, 60);
        });
        bar.append(make("label", {}, "Filter", input));
        for (const index of this.table.choices || []) this.addChoice(bar, index);
      }
      bar.append(make("button", { type: "button", onclick: () => save(`${this.fileName}.csv`, "text/csv", toCsv(this.table)) }, "CSV"));
      bar.append(this.count);
      this.heads = columns.map((column, index) =>
        make("th", { scope: "col", class: [column.left ? "left" : "", column.title.length > MOST_ON_A_LINE ? "wide" : ""].join(" ").trim() },
          make("button", { type: "button", onclick: () => this.sortBy(index) }, column.title)));
      this.body = make("tbody");
      const table = make("table", {}, make("caption", { class: "unseen" }, this.caption),
        make("thead", {}, make("tr", {}, ...this.heads)), this.body);
      const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": this.caption }, table);
      this.back = make("button", { type: "button", onclick: () => this.turn(-1) }, "Back");
      this.next = make("button", { type: "button", onclick: () => this.turn(1) }, "More");
      this.where = make("span", { "aria-live": "polite" });
      this.pager = make("div", { class: "bar" }, this.back, this.next, this.where);
      this.place.replaceChildren(bar, scroll, this.pager);
      this.update();
    }

    addChoice(bar, index) {
      const values = [...new Set(this.table.rows.map((row) => textOf(row[index])))];
      if (values.length < 2 || values.length > 60) return;
      values.sort(collator.compare);
      const column = this.table.columns[index];
      const select = make("select", {}, make("option", { value: "" }, "all"),
        ...values.map((value, place) => make("option", { value: String(place + 1) }, value)));
      select.addEventListener("change", () => {
        if (select.value === "") this.chosen.delete(index);
        else this.chosen.set(index, values[Number(select.value) - 1]);
        this.page = 0;
        this.update();
      });
      bar.append(make("label", {}, column.title, select));
    }

    sortBy(index) {
      const numbers = this.table.rows.some((row) => typeof valueOf(row[index]) === "number");
      const first = numbers ? -1 : 1; // figures: the largest first
      const again = this.sorted !== null && this.sorted[0] === index;
      this.sorted = [index, again ? -this.sorted[1] : first];
      this.page = 0;
      this.update();
    }

    turn(by) {
      this.page += by;
      this.update();
    }

    visible() {
      const { rows } = this.table;
      const words = this.words.toLowerCase().split(/\s+/).filter(Boolean);
      let found = rows.map((_, place) => place);
      for (const [index, value] of this.chosen) found = found.filter((place) => textOf(rows[place][index]) === value);
      if (words.length) {
        this.texts ??= rows.map((row) => row.map(textOf).join("\n").toLowerCase());
        found = found.filter((place) => words.every((word) => this.texts[place].includes(word)));
      }
      if (this.sorted !== null) {
        const [index, direction] = this.sorted;
        const absent = (place) => { const value = valueOf(rows[place][index]); return value === null || value === "–"; };
        found.sort((a, b) => (absent(a) || absent(b) ? 1 : direction) * compareCells(rows[a][index], rows[b][index]) || a - b);
      }
      return found;
    }

    update() {
      const { columns, rows } = this.table;
      const found = this.visible();
      const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
      this.page = Math.min(Math.max(0, this.page), pages - 1);
      const shown = found.slice(this.page * PAGE_ROWS, (this.page + 1) * PAGE_ROWS);
      this.body.replaceChildren(...shown.map((place) => make("tr", {}, ...rows[place].map((cell, index) => {
        const text = textOf(cell);
        const kind = [columns[index].left ? "left" : "", columns[index].name === "file" ? "file" : text.length > 70 ? "long" : "",
          this.best.get(index)?.has(place) ? "best" : ""].filter(Boolean).join(" ");
        return make("td", kind ? { class: kind } : {}, text);
      }))));
      this.heads.forEach((head, index) => {
        if (this.sorted !== null && this.sorted[0] === index) head.setAttribute("aria-sort", this.sorted[1] > 0 ? "ascending" : "descending");
        else head.removeAttribute("aria-sort");
      });
      const all = rows.length.toLocaleString("en");
      this.count.textContent = found.length === rows.length ? `${all} row${rows.length === 1 ? "" : "s"}` : `${found.length.toLocaleString("en")} of ${all} rows`;
      this.pager.hidden = pages < 2;
      this.back.disabled = this.page === 0;
      this.next.disabled = this.page === pages - 1;
      this.where.textContent = `page ${this.page + 1} of ${pages}`;
    }
  }

  for (const place of document.querySelectorAll("[data-table]")) {
    new Table(place, DATA.tables[place.dataset.table], place.dataset.caption, place.dataset.table);
  }

  // ---- charts
  const library = document.createElement("script");
  library.textContent = await unpacked("plotly");
  document.head.append(library);
  const themeName = () => (printing ? "light" : root.dataset.theme || (dark.matches ? "dark" : "light"));
  const themed = (value, theme) => {
    if (typeof value === "string") return DATA.themes[theme][value] ?? value;
    if (Array.isArray(value)) return value.map((each) => themed(each, theme));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, themed(each, theme)]));
    }
    return value;
  };
  // On a narrow screen the figures of upright bars are written upwards, where bars are wide enough for a line: in
  // narrower bars they would be too small to read.
  const onNarrow = (traces) => {
    const upright = traces.filter((trace) => trace.type === "bar" && trace.orientation !== "h" && trace.text);
    const bars = upright.reduce((sum, trace) => sum + trace.x.length, 0);
    const changed = bars > MOST_NARROW_TEXTS ? { text: null } : { textangle: -90 };
    return traces.map((trace) => (upright.includes(trace) ? { ...trace, ...changed } : trace));
  };
  const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false };
  const onPaper = (figure) => (figure.closest(".charts") ? HALF_PAPER : PAPER);
  const drawn = new Map(); // figure → the theme it was drawn in

  const draw = (figure) => {
    const theme = themeName();
    const chart = DATA.charts[figure.dataset.chart];
    const plot = figure.querySelector(".plot");
    const narrow = printing ? onPaper(figure) < NARROW : plot.clientWidth < NARROW;
    const look = `${theme}, ${narrow}, ${printing}`;
    if (drawn.get(figure) === look) return;
    drawn.set(figure, look);
    const layout = { ...chart.layout, ...(narrow ? chart.narrow : {}), ...(printing ? { width: onPaper(figure) } : {}) };
    plot.style.minHeight = `${layout.height}px`;
    const traces = narrow ? onNarrow(chart.traces) : chart.traces;
    Plotly.react(plot, themed(traces, theme), themed(layout, theme), CONFIG);
    figure.dataset.drawn = theme;
  };
  const figures = [...document.querySelectorAll("[data-chart]")];
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "300px" });
  figures.forEach((figure) => watcher.observe(figure));
  const redraw = () => { for (const figure of drawn.keys()) draw(figure); };
  let resizing = 0;
  window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 150); });

  for (const figure of figures) {
    const name = figure.dataset.chart;
    const chart = DATA.charts[name];
    figure.addEventListener("click", (event) => {
      const kind = event.target.dataset.save;
      if (!kind) return;
      if (kind === "csv") save(`${name}.csv`, "text/csv", toCsv(chart.table));
      else {
        const layout = { ...themed(chart.layout, "light"), paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", title: { text: chart.title, x: 0.02 }, width: 900, height: chart.layout.height + 60 };
        layout.margin = { ...layout.margin, t: 70 };
        Plotly.downloadImage({ data: themed(chart.traces, "light"), layout }, { format: kind, filename: name, width: 900, height: layout.height, scale: 2 });
      }
    });
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => {
      const place = details.querySelector("[data-chart-table]");
      if (details.open && !place.hasChildNodes()) new Table(place, chart.table, `${chart.title}: table`, name);
    });
  }

  // ---- themes
  const button = document.getElementById("theme");
  const nameButton = () => { button.textContent = themeName() === "dark" ? "Light" : "Dark"; button.setAttribute("aria-label", `${button.textContent} theme`); };
  button.addEventListener("click", () => {
    root.dataset.theme = themeName() === "dark" ? "light" : "dark";
    nameButton();
    redraw();
  });
  dark.addEventListener("change", () => { nameButton(); redraw(); });
  nameButton();

  // ---- groups that are folded, because there are many
  const groups = [...document.querySelectorAll("details.group")];
  const unfold = () => {
    const group = groups.find((each) => `#${each.id}` === location.hash);
    if (group) {
      group.open = true;
      group.scrollIntoView();
    }
  };
  window.addEventListener("hashchange", unfold);
  for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => setTimeout(unfold));
  document.getElementById("unfold")?.addEventListener("click", (event) => {
    const open = groups.some((group) => !group.open);
    for (const group of groups) group.open = open;
    event.target.textContent = open ? "Fold all" : "Unfold all";
  });
  unfold();

  // ---- paper: all charts, in light colours, as wide as the page or its half
  let folded = [];
  window.addEventListener("beforeprint", () => {
    printing = true;
    folded = groups.filter((group) => !group.open);
    for (const group of folded) group.open = true;
    figures.forEach(draw);
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    for (const group of folded) group.open = false;
    redraw();
    for (const figure of drawn.keys()) if (figure.checkVisibility()) Plotly.Plots.resize(figure.querySelector(".plot"));
  });
  root.dataset.ready = "yes";
})();
