// Filters, sorts and compares the rows of the page's table; what it shows is text, never markup.
"use strict";
const table = document.getElementById("runs");
const body = table.tBodies[0];
const rows = Array.from(body.rows);
const form = document.getElementById("filters");
const compared = document.getElementById("compared");
const settings = JSON.parse(document.getElementById("settings").textContent);
const heads = Array.from(table.tHead.rows[0].cells);

function filter() {
  const chosen = new FormData(form);
  const words = chosen.get("text").toLowerCase().split(/\s+/);
  let count = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const fits = ["method", "data", "state"].every(
      (name) => !chosen.get(name) || chosen.get(name) === row.dataset[name]);
    row.hidden = !(fits && words.every((word) => text.includes(word)));
    count += row.hidden ? 0 : 1;
  }
  document.getElementById("shown").textContent = `${count} of ${rows.length} shown`;
}

// Rows without a figure stay last, whichever way the others go.
function order(a, b, at, sign) {
  const [x, y] = [a.cells[at], b.cells[at]];
  if (heads[at].classList.contains("figure")) {
    const [u, v] = [x.dataset.number, y.dataset.number];
    if (u === undefined || v === undefined) return (u === undefined) - (v === undefined);
    // Infinity minus infinity is no number.
    const [p, q] = [toNumber(u), toNumber(v)];
    return p === q ? 0 : sign * (p < q ? -1 : 1);
  }
  return sign * x.textContent.localeCompare(y.textContent, "en", { numeric: true });
}

const toNumber = (text) => (text === "inf" ? Infinity : Number(text));

function sort(at) {
  const head = heads[at];
  const up = head.getAttribute("aria-sort") !== "ascending";
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  rows.sort((a, b) => order(a, b, at, up ? 1 : -1));
  body.append(...rows);
}

function addLine(to, tag, texts) {
  const line = to.insertRow();
  for (const [at, text] of texts.entries()) {
    const cell = document.createElement(at === 0 ? "th" : tag);
    cell.textContent = text;
    line.append(cell);
  }
}

function compare() {
  const picked = rows.filter((row) => row.querySelector("input").checked);
  compared.hidden = picked.length < 2;
  const inner = compared.querySelector("table");
  inner.tHead.replaceChildren();
  inner.tBodies[0].replaceChildren();
  addLine(inner.tHead, "th", ["", ...picked.map((row) => row.cells[1].textContent)]);
  for (const [at, head] of heads.entries()) {
    if (!head.classList.contains("figure")) continue;
    addLine(inner.tBodies[0], "td",
      [head.textContent, ...picked.map((row) => row.cells[at].textContent)]);
  }
  const given = picked.map((row) => settings[row.dataset.at]);
  const names = Array.from(new Set(given.flatMap(Object.keys))).sort();
  for (const name of names) {
    const values = given.map((one) => one[name] ?? "");
    if (new Set(values).size > 1) addLine(inner.tBodies[0], "td", [name, ...values]);
  }
}

for (const cell of document.querySelectorAll(".pick")) cell.hidden = false;
form.hidden = false;
form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
body.addEventListener("change", compare);
heads.forEach((head, at) => {
  if (head.classList.contains("pick")) return;
  head.tabIndex = 0;
  head.addEventListener("click", () => sort(at));
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(at); });
});
filter();
