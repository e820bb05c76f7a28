// Updates the page of `python -m tune watch` in place: only what has changed is replaced, so that the scroll position,
// open details and the selection stay.
"use strict";

const EVERY_MS = 2000;
let version = "";

function follow(from, to) {
  if (from.nodeName !== to.nodeName) {
    from.replaceWith(document.importNode(to, true));
  } else if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.data !== to.data) from.data = to.data;
  } else if (!from.isEqualNode(to)) {
    for (const { name, value } of to.attributes) {
      if (from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
    for (const { name } of [...from.attributes]) {
      if (!to.hasAttribute(name) && !(name === "open" && from.nodeName === "DETAILS")) from.removeAttribute(name);
    }
    followChildren(from, to);
  }
}

function followChildren(from, to) {
  const known = new Map([...from.children].filter((child) => child.id).map((child) => [child.id, child]));
  let place = from.firstChild;
  for (const next of to.childNodes) {
    const match = next.id ? known.get(next.id) : place && !place.id ? place : null;
    if (!match) {
      from.insertBefore(document.importNode(next, true), place);
    } else {
      if (match === place) place = place.nextSibling;
      else from.insertBefore(match, place);
      follow(match, next);
    }
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch("./", { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
      if (answer.status !== 304) {
        if (!answer.ok) throw new Error(answer.status);
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (document.title !== page.title) document.title = page.title;
        follow(document.querySelector("main"), page.querySelector("main"));
        arrange(); // of table.js
        version = answer.headers.get("ETag");
      }
      document.body.classList.remove("unreached");
    } catch {
      document.body.classList.add("unreached");
    }
  }
  setTimeout(look, EVERY_MS);
}

setTimeout(look, EVERY_MS);

document.addEventListener("click", (event) => {
  const action = event.target.dataset.steer;
  if (!action) return;
  const words = [action];
  if (!["pause", "go-on"].includes(action)) words.push(document.getElementById("steer-trial").value);
  if (action === "clone") words.push(...document.getElementById("steer-keys").value.split(/\s+/).filter(Boolean));
  const headers = { Authorization: `Bearer ${event.target.parentElement.dataset.token}` };
  // The next update of the page shows the outcome.
  fetch("./steer", { method: "POST", headers, body: JSON.stringify(words) }).catch(() => {});
});
