// Runs the page's script in a document that knows text alone, against a server whose names and answers are markup.
"use strict";
const assert = require("node:assert");
const fs = require("node:fs");
const vm = require("node:vm");

const EVIL = "<img src=x onerror=alert(1)>";
const made = [];

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], own: "", hidden: false, value: "", listeners: {}, selectedIndex: 0 });
    made.push(this);
  }
  set textContent(text) { this.own = String(text); this.children = []; }
  get textContent() { return this.own + this.children.map((each) => (typeof each === "string" ? each : each.textContent)).join(""); }
  set innerHTML(text) { throw new Error("markup: " + text); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.own = ""; this.children = nodes; }
  addEventListener(name, call) { this.listeners[name] = call; }
  focus() {}
}

const elements = {};
const byId = (id) => (elements[id] = elements[id] || new Element(id));
byId("as-chat").checked = true;

const asked = [];
const events = [{ role: "assistant", content: "" }, { content: EVIL }, { content: " </script>ü" }]
  .map((delta) => "data: " + JSON.stringify({ choices: [{ index: 0, delta }] }) + "\n\n").join("") + "data: [DONE]\n\n";

async function fetch(path, options) {
  asked.push({ path, options });
  if (!options.headers.Authorization) return { ok: false, status: 401, json: async () => ({ error: { message: EVIL } }) };
  const card = { id: EVIL, epsilon: 1.2345, delta: 1e-5, accuracy: 0.5, unit: "record", note: EVIL,
    tpr_at_fpr: { "0.01": 0.03391 }, risk_in_words: "An attacker finds few. " + EVIL };
  if (path === "/v1/models") {
    return { ok: true, json: async () => ({ base_model: EVIL, task: "CAUSAL_LM", data: [{ id: EVIL }, { id: "global" }] }) };
  }
  if (path === "/v1/chat/completions") {
    // Cut anywhere, within a character too.
    const bytes = Buffer.from(events);
    const parts = [bytes.subarray(0, 50), bytes.subarray(50, bytes.length - 25), bytes.subarray(bytes.length - 25)];
    const read = async () => (parts.length ? { done: false, value: parts.shift() } : { done: true });
    return { ok: true, body: { getReader: () => ({ read }) } };
  }
  return { ok: true, json: async () => ({ ...card, together: { epsilon: 2, delta: 1e-5 } }) };
}

const later = () => new Promise((resolve) => setTimeout(resolve, 20));
const document = { getElementById: byId, createElement: (tag) => new Element(tag) };
const event = { preventDefault() {} };

(async () => {
  vm.runInNewContext(fs.readFileSync(process.argv[2], "utf8"), { document, fetch, performance, TextDecoder, AbortController, console });
  await later();
  assert.equal(byId("sign-in").hidden, false, "without a token it asks for one");
  byId("token").value = "fedpriv-secret";
  byId("sign-in").listeners.submit(event);
  await later();
  assert.equal(byId("sign-in").hidden, true);
  assert.equal(byId("token").value, "", "the field is emptied");
  assert.equal(byId("base").textContent, EVIL);
  assert.deepEqual(byId("first").children.map((each) => each.textContent), [EVIL, "global"]);
  assert.deepEqual(byId("variants").children[0].children.map((each) => each.textContent),
    [EVIL, "50.0 %", "1.24", "0.00001", "3.4 %", "a record", EVIL]);
  assert.match(byId("reader").textContent, /^A reader of all 2 variants listed here pays ε = 1.24/);
  assert.ok(byId("reader").textContent.endsWith(". An attacker finds few. " + EVIL), "the risk in words, as text");
  byId("first").value = EVIL;
  byId("second").value = "global";
  byId("prompt").value = "what hurts?";
  await byId("ask").listeners.submit(event);
  await later();
  for (const index of [0, 1]) assert.equal(byId("text-" + index).textContent, EVIL + " </script>ü");
  assert.equal(byId("name-0").textContent, EVIL);
  assert.match(byId("together").textContent, /pays ε = 2 at/);
  assert.ok(asked.some((each) => each.path === "/v1/models/" + encodeURIComponent(EVIL) + "?with=global"));
  assert.ok(!asked.some((each) => each.path.includes("secret")), "the token is never in an address");
  assert.ok(!made.some((each) => ["script", "img"].includes(each.tag)), "no element was made of text");
})().catch((error) => { console.error(error); process.exitCode = 1; });
