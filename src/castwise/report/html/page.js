"use strict";
// The page's own script: themes, tables that sort, filter and page, and downloads.
// Whatever comes from records is put into text nodes.
(async () => {
  const unpacked = async (id) => {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  if (!window.DecompressionStream) return; // the page is complete without it
  const DATA = JSON.parse(await unpacked("data"));
  const PAGE_ROWS = 50;
  const MOST_ON_A_LINE = 14; // characters of a heading
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

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
  const toCsv = (table, rows = table.rows) => {
    const lines = [table.columns.map((column) => csvField(column.name)).join(",")];
    for (const row of rows) {
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
  const compareValues = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));

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
        this.clear = make("button", { type: "button", onclick: () => {
          for (const field of bar.querySelectorAll("input, select")) field.value = "";
          this.words = "";
          this.chosen.clear();
          this.page = 0;
          this.update();
        } }, "Clear");
        bar.append(this.clear);
      }
      bar.append(make("button", { type: "button", onclick: () => save(`${this.fileName}.csv`, "text/csv", toCsv(this.table, this.visible().map((place) => this.table.rows[place]))) }, "CSV"));
      bar.append(this.count);
      this.heads = columns.map((column, index) =>
        make("th", { scope: "col", class: [column.left ? "left" : "", column.title.length > MOST_ON_A_LINE ? "wide" : ""].join(" ").trim() },
          make("button", { type: "button", onclick: () => this.sortBy(index) }, column.title)));
      this.body = make("tbody");
      const table = make("table", {}, make("caption", { class: "unseen" }, this.caption),
        make("thead", {}, make("tr", {}, ...this.heads)), this.body);
      const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": this.caption }, table);
      this.back = make("button", { type: "button", onclick: () => this.turn(-1) }, "Previous");
      this.next = make("button", { type: "button", onclick: () => this.turn(1) }, "Next");
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
      this.sorted = again && this.sorted[1] !== first ? null : [index, again ? -first : first]; // third: as it was
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
        const searched = this.table.columns.map((column) => column.name !== "file"); // its names are full of digits
        this.texts ??= rows.map((row) => row.filter((_, index) => searched[index]).map(textOf).join("\n").toLowerCase());
        found = found.filter((place) => words.every((word) => this.texts[place].includes(word)));
      }
      if (this.sorted !== null) {
        const [index, direction] = this.sorted;
        found.sort((one, other) => {
          const a = valueOf(rows[one][index]), b = valueOf(rows[other][index]);
          if (a === null || b === null) return (a === null) - (b === null) || one - other; // missing values come last
          return direction * compareValues(a, b) || one - other;
        });
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
        const kind = [columns[index].left ? "left" : "", text.length > 45 && columns[index].name !== "file" ? "long" : "",
          this.best.get(index)?.has(place) ? "best" : ""].filter(Boolean).join(" ");
        return make("td", kind ? { class: kind } : {}, text);
      }))));
      if (!found.length) this.body.append(make("tr", {}, make("td", { class: "none", colspan: String(columns.length) }, "No row has all of these. Clear the filter to see all rows.")));
      if (this.clear) this.clear.disabled = !this.words && !this.chosen.size;
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

  // ---- downloads of charts: the drawing in light colours, below its title and what it is of
  const file = (figure) => {
    const drawing = figure.querySelector("svg.wide").cloneNode(true);
    const [, , width, height] = drawing.getAttribute("viewBox").split(" ").map(Number);
    const head = 56;
    const svg = (tag, attributes, ...children) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      element.append(...children);
      return element;
    };
    const whole = svg("svg", { viewBox: `0 0 ${width + 24} ${height + head + 12}`, width: width + 24, height: height + head + 12, "font-family": "Helvetica, Arial, sans-serif" },
      document.querySelector("#defs defs").cloneNode(true),
      svg("rect", { width: "100%", height: "100%", fill: "var(--page)" }),
      svg("text", { x: 12, y: 24, "font-size": 17, "font-weight": 700, fill: "var(--ink)" }, figure.dataset.title),
      svg("text", { x: 12, y: 44, "font-size": 13, fill: "var(--soft)" }, figure.dataset.context),
      svg("g", { transform: `translate(12 ${head})` }, ...drawing.childNodes));
    let text = new XMLSerializer().serializeToString(whole);
    for (const [name, colour] of Object.entries(DATA.light)) text = text.replaceAll(name, colour);
    return { text, width: width + 24, height: height + head + 12 };
  };
  const savePng = (name, { text, width, height }) => {
    const picture = new Image();
    picture.onload = () => {
      const canvas = make("canvas", { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
      canvas.toBlob((blob) => save(`${name}.png`, "image/png", blob));
    };
    picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  };

  // ---- lines to copy; a page that was opened as a file may have no clipboard but that of the selection
  const copy = async (button, code) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };

  // ---- what a mark of a chart says, for fingers and keys, too
  const tip = make("div", { class: "tip", role: "status", hidden: "" });
  document.body.append(tip);
  const tell = (mark) => {
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.querySelector("title").textContent;
    const place = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const above = place.top - own.height - 8;
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - own.width - 4))}px`;
    tip.style.top = `${above < 4 ? place.bottom + 8 : above}px`;
  };
  document.addEventListener("click", (event) => tell(event.target.closest("svg[role=img] :has(> title)")));
  document.addEventListener("scroll", () => tell(null), { capture: true, passive: true });
  document.addEventListener("keydown", (event) => {
    const marks = [...event.target.querySelectorAll("title")].map((title) => title.parentElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") tell(null);
    if (!step || event.target.role !== "img" || !marks.length) return;
    event.preventDefault();
    const last = Number(event.target.dataset.mark ?? (step > 0 ? -1 : 0));
    const next = (last + step + marks.length) % marks.length;
    event.target.dataset.mark = next;
    tell(marks[next]);
  });

  // ---- what a part of the page needs once it is there
  const prepare = (part) => {
    for (const place of part.querySelectorAll("[data-table]")) {
      new Table(place, DATA.tables[place.dataset.table], place.dataset.caption, place.dataset.table);
    }
    for (const figure of part.querySelectorAll("figure.chart")) {
      figure.querySelector(".tools").hidden = false;
      figure.addEventListener("click", (event) => {
        const kind = event.target.dataset.save;
        if (kind === "csv") save(`${figure.id}.csv`, "text/csv", toCsv(DATA.tables[figure.id]));
        if (kind === "svg") save(`${figure.id}.svg`, "image/svg+xml", file(figure).text);
        if (kind === "png") savePng(figure.id, file(figure));
      });
    }
    for (const svg of part.querySelectorAll("svg[role=img]:has(title)")) svg.setAttribute("tabindex", "0");
    for (const code of part.querySelectorAll("details.code code")) {
      const button = make("button", { type: "button", class: "copy", "aria-live": "polite", onclick: () => copy(button, code) }, "Copy");
      code.closest("details").append(button);
    }
  };
  const answers = document.getElementById("answers");
  if (answers && answers.tBodies[0].rows.length > 12) {
    const input = make("input", { type: "search", placeholder: "model, precision, words", oninput: () => {
      let shown = false;
      for (const row of answers.tBodies[0].rows) {
        if (row.className !== "limit") shown = row.textContent.toLowerCase().includes(input.value.trim().toLowerCase());
        row.hidden = !shown;
      }
    } });
    answers.parentElement.before(make("div", { class: "bar" }, make("label", {}, "Filter models", input)));
  }
  const fill = (details) => {
    if (!(details.id in DATA.later)) return;
    details.insertAdjacentHTML("beforeend", DATA.later[details.id]);
    delete DATA.later[details.id];
    prepare(details);
  };
  document.addEventListener("toggle", (event) => { if (event.target.open) fill(event.target); }, true);
  prepare(document);

  // ---- themes
  const theme = document.getElementById("theme");
  const themeName = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const nameButton = () => { theme.textContent = themeName() === "dark" ? "Light" : "Dark"; theme.setAttribute("aria-label", `${theme.textContent} theme`); };
  theme.addEventListener("click", () => { root.dataset.theme = themeName() === "dark" ? "light" : "dark"; nameButton(); });
  dark.addEventListener("change", nameButton);
  theme.hidden = false;
  nameButton();

  // ---- folded parts: links open them, and paper has what it should
  const unfold = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") { each.open = true; fill(each); }
    target.scrollIntoView();
  };
  window.addEventListener("hashchange", unfold);
  for (const link of document.querySelectorAll("a[href^='#']")) link.addEventListener("click", () => setTimeout(unfold));
  unfold();
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.paper:not([open]), details.taken:not([open]), .taken .why:not([open])")];
    for (const each of opened) { each.open = true; fill(each); }
  });
  window.addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
  root.dataset.ready = "yes";
})();
