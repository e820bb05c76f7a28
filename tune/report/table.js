// Sorts and filters the table of trials by its columns, and shows the first fifty rows.
"use strict";

const MOST_ROWS = 50;
let sortedBy = -1;
let isRising = true;
let isWhole = false;

function trials(body) {
  const found = [];
  for (const row of body.rows) {
    if (row.id.startsWith("note-") && found.length) found.at(-1).push(row);
    else found.push([row]);
  }
  return found;
}

function compare(first, second) {
  const [a, b] = [first, second].map(([row]) => row.cells[sortedBy]);
  const areFigures = "value" in a.dataset || "value" in b.dataset;
  const [x, y] = [a, b].map((cell) => (areFigures ? parseFloat(cell.dataset.value) : Number(cell.textContent || NaN)));
  if (!areFigures && (isNaN(x) || isNaN(y))) return a.textContent.localeCompare(b.textContent);
  if (isNaN(x) || isNaN(y)) return (isNaN(x) - isNaN(y)) * (isRising ? 1 : -1); // cells without a value come last
  return x - y;
}

function arrange() {
  const table = document.getElementById("trials");
  if (!table) return;
  const body = table.tBodies[0];
  const [headers, filters] = table.tHead.rows;
  filters.hidden = false;
  const wanted = [...filters.cells].map((cell) => cell.firstElementChild.value.trim().toLowerCase());
  const rows = trials(body);
  if (sortedBy >= 0) {
    rows.sort((first, second) => compare(first, second) * (isRising ? 1 : -1));
    body.append(...rows.flat());
  }
  for (const [at, header] of [...headers.cells].entries()) {
    header.setAttribute("aria-sort", at !== sortedBy ? "none" : isRising ? "ascending" : "descending");
  }
  let numMatching = 0;
  for (const [row, ...notes] of rows) {
    const matches = wanted.every((text, at) => row.cells[at].textContent.toLowerCase().includes(text));
    numMatching += matches;
    for (const part of [row, ...notes]) part.hidden = !matches || (!isWhole && numMatching > MOST_ROWS);
  }
  const all = document.getElementById("all-trials");
  all.hidden = isWhole || numMatching <= MOST_ROWS;
  all.textContent = `Show all ${numMatching} rows`;
}

document.addEventListener("click", (event) => {
  const header = event.target.closest("#trials thead tr:first-child th");
  if (header) {
    isRising = header.cellIndex !== sortedBy || !isRising;
    sortedBy = header.cellIndex;
  } else if (event.target.id === "all-trials") {
    isWhole = true;
  } else {
    return;
  }
  arrange();
});
document.addEventListener("input", (event) => event.target.closest("#trials thead") && arrange());
arrange();
