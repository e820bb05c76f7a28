"use strict";
const form = document.querySelector("#weigh");
const rows = [...document.querySelectorAll("#front tbody tr")];
const weigh = () => {
  const weights = [...form.querySelectorAll("input")].map((input) => Number(input.value));
  form.querySelectorAll("output").forEach((output, at) => { output.textContent = weights[at]; });
  const scored = rows.map((row) => {
    const steps = JSON.parse(row.dataset.steps);
    return { row, score: steps.reduce((sum, step, at) => sum + weights[at] * step, 0) };
  });
  scored.sort((one, other) => (other.row.dataset.front > one.row.dataset.front) - (other.row.dataset.front < one.row.dataset.front)
    || one.score - other.score);
  scored.forEach(({ row }, at) => {
    row.className = at ? "" : "best";
    row.parentNode.append(row);
  });
  document.querySelector("#chosen").textContent = scored[0].row.dataset.command;
};
form.addEventListener("input", weigh);
