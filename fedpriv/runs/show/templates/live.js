"use strict";
// Pieces come as HTML in which the server has escaped every name; the page's policy runs no other script than this one.
let source = null;

function put(name, html) {
  const place = document.getElementById("piece-" + name);
  if (!place) return;
  const key = (element) => element.getAttribute("data-key") || element.getAttribute("aria-label");
  const opened = [...place.querySelectorAll("details[open]")].map(key);
  const scrolled = new Map([...place.querySelectorAll(".scroll")].map((box) => [key(box), [box.scrollLeft, box.scrollTop]]));
  place.innerHTML = html;
  for (const details of place.querySelectorAll("details")) details.open = opened.includes(key(details));
  for (const box of place.querySelectorAll(".scroll")) [box.scrollLeft, box.scrollTop] = scrolled.get(key(box)) || [0, 0];
}

function tell(text) { document.getElementById("link").textContent = text; }

function connect() {
  if (source || document.hidden) return;
  source = new EventSource("events");
  source.onopen = () => tell("live");
  source.onmessage = (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) put(name, html);
    age();
  };
  source.onerror = () => {
    tell("no connection to fedpriv watch; trying again");
    if (source.readyState === EventSource.CLOSED) {  // refused, which the browser does not try again
      source = null;
      setTimeout(connect, 5000);
    }
  };
}

// A browser has few connections to one server: pages in the background give theirs to the one in front.
function turn() {
  if (document.hidden && source) { source.close(); source = null; tell("paused"); }
  connect();
}

function age() {
  for (const element of document.querySelectorAll("[data-since]")) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(element.dataset.since)));
    const minutes = Math.floor(seconds / 60);
    element.textContent = seconds < 60 ? seconds + " s" : minutes < 60 ? minutes + " min " + (seconds % 60) + " s"
      : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
  }
}

document.addEventListener("visibilitychange", turn);
setInterval(age, 1000);
connect();
