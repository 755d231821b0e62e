"use strict";
// Loads the page again while its run goes on, and keeps its place; the page's policy runs no other script than this one.
const written = Number(document.body.dataset.written), due = Number(document.body.dataset.due);
const late = Date.now() / 1000 - due, patience = due - written;
const isOver = late > Number(document.body.dataset.silence);
if (late > 0) {
  for (const element of document.querySelectorAll(".alive")) element.hidden = true;
  document.getElementById("overdue").hidden = false;
  document.getElementById("over").hidden = !isOver;
}
if (!isOver) setTimeout(() => location.reload(), 1000 * (late > 0 ? patience : Number(document.body.dataset.every)));

const opened = document.querySelectorAll("details"), boxes = document.querySelectorAll(".scroll");
addEventListener("pagehide", () => sessionStorage.setItem(location.pathname, JSON.stringify({
  top: scrollY, opened: [...opened].map((each) => each.open), boxes: [...boxes].map((each) => each.scrollTop),
})));
const kept = JSON.parse(sessionStorage.getItem(location.pathname) || '{"top": 0, "opened": [], "boxes": []}');
opened.forEach((each, place) => { each.open = kept.opened[place] === true; });
boxes.forEach((each, place) => { each.scrollTop = kept.boxes[place] || 0; });
scrollTo(0, kept.top);
