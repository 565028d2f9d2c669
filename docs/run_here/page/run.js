// The page that runs the package: editors, buttons, and what comes back from Python in `worker.js`.
"use strict";

(() => {
  const root = document.querySelector(".run-here");
  const says = (what) => root.querySelector(`[data-says=${what}]`);
  const files = JSON.parse(root.querySelector("script[data-files]").textContent);
  const assets = root.dataset.assets, MOST = 200000; // letters that a program may print
  let worker = null, ready = null, waiting = new Map(), number = 0, printing = null, begun = 0, ticking = null;

  function add(parent, name, text = null, attributes = {}) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return parent.appendChild(node);
  }

  // ---------------------------------------------------------------- Python

  // Why nothing can run here, or why ranks cannot; else nothing.
  function refusal() {
    if (location.protocol === "file:")
      return "This page cannot start Python when it is opened as a file. Serve its folder: python -m http.server, then open http://localhost:8000/run.html";
    if (typeof WebAssembly !== "object" || typeof Worker !== "function") return "This browser has no WebAssembly, or no workers: nothing can run here.";
    return "";
  }

  const SUSPENDS = typeof WebAssembly === "object" && "Suspending" in WebAssembly;
  const WITHOUT = "This browser lacks JavaScript Promise Integration (Chrome has it from 137, Firefox from 153, Safari from 27), by which ranks take turns: " +
    "programs and lessons cannot run here, schedules and plans can.";

  function start() {
    worker = new Worker(assets + "worker.js");
    const mine = worker;
    const ready = new Promise((resolve, reject) => waiting.set("ready", { resolve, reject }));
    worker.onerror = (event) => mine === worker && broken(event.message || "its worker could not be loaded");
    worker.onmessage = ({ data }) => {
      if (mine !== worker) return;
      if (data.printed !== undefined) return print(data.printed);
      if (data.broken !== undefined) return broken(data.broken);
      const key = data.ready === undefined ? data.number : "ready", told = waiting.get(key);
      waiting.delete(key);
      told.resolve(data.ready === undefined ? data.answer : data);
    };
    const runtime = new URL(root.dataset.runtime, document.baseURI).href;
    worker.postMessage({ runtime, archive: new URL(assets + "minidist.zip", document.baseURI).href });
    return ready;
  }

  async function ask(what, details) {
    if (worker === null) {
      say("Python is being loaded …", true);
      ready = start();
    }
    await ready;
    say("It runs …", true);
    return new Promise((resolve, reject) => {
      waiting.set(++number, { resolve, reject });
      worker.postMessage({ number, question: JSON.stringify({ do: what, with: details }) });
    });
  }

  function end() {
    worker?.terminate();
    worker = null, ready = null;
  }

  function broken(why) {
    end();
    const told = [...waiting.values()];
    waiting = new Map();
    for (const { reject } of told) reject(new Error(`Python has ended (${why.trim().split("\n").at(-1)}). The next button starts it again.`));
  }

  function say(text, counts = false) {
    clearInterval(ticking);
    says("status").textContent = text;
    begun = performance.now();
    const long = () => (says("status").textContent = `${text} for ${Math.round((performance.now() - begun) / 1000)} s. Stop ends it.`);
    if (counts) ticking = setInterval(() => performance.now() - begun > 10000 && long(), 5000);
  }

  function print(text) {
    if (printing === null) return;
    const left = MOST - printing.textContent.length;
    if (left > 0) printing.append(text.length < left ? text : text.slice(0, left) + "\n… and more, which is not shown");
  }

  // ---------------------------------------------------------------- what each part asks, and how it shows the answer

  const shown = {
    run(place, answer) {
      if (answer.said) add(place, "pre", answer.said);
      if (answer.player) place.append(document.createRange().createContextualFragment(answer.player)); // whose script runs as it comes in
    },
    grade(place, answer) {
      add(place, "p", `${+answer.score.toFixed(2)} of ${+answer.most.toFixed(2)} points`, { class: answer.score === answer.most ? "good" : "" });
      const rows = answer.tests.map((test) => [test.number, test.points, test.status, test.output ? `${test.what}\n${test.output}` : test.what]);
      table(place, ["check", "points", "verdict", "what is checked"], rows, (cell, column) => {
        if (column === 2) cell.className = { passed: "good", failed: "bad" }[cell.textContent] ?? "";
      });
      add(place, "p", answer.said, { class: "keys" });
    },
    write_schedule(place, answer, part) {
      fill(part.querySelector("textarea"), answer.text);
    },
    schedule(place, answer) {
      add(place, "p", `${answer.said} Its bubble is ${answer.bubble} of the step.`, { class: "good" });
      const wide = add(place, "div", null, { class: "wide", tabindex: "0", role: "img", "aria-label": "Your schedule on a clock: the same as text is below" });
      wide.innerHTML = answer.svg.slice(answer.svg.indexOf("<svg"));
      table(place, ["", "idle, in forwards", "activations held at most", "put off for W at most"], answer.rows);
      const more = add(place, "details");
      add(more, "summary", "the same as text");
      add(more, "pre", answer.drawn, { class: "drawn", tabindex: "0" });
    },
    plan(place, answer) {
      add(place, "p", answer.said, { class: "good" });
      table(place, ["", "layout", "step", "MFU", "days", "money", "a GPU holds"], answer.rows);
      const more = add(place, "details");
      add(more, "summary", "what a step is made of, why the others lose, and the command");
      add(more, "pre", answer.text, { class: "drawn", tabindex: "0" });
    },
  };

  function table(place, head, rows, each = () => {}) {
    const wide = add(place, "div", null, { class: "wide", tabindex: "0", role: "group", "aria-label": head.filter(Boolean).join(", ") });
    const made = add(wide, "table"), top = add(add(made, "thead"), "tr"), body = add(made, "tbody");
    for (const name of head) add(top, name ? "th" : "td", name, name ? { scope: "col" } : {});
    for (const row of rows) {
      const line = add(body, "tr");
      row.forEach((text, column) => each(add(line, column ? "td" : "th", text, column ? {} : { scope: "row" }), column));
    }
  }

  function details(part, what) {
    const value = (name) => part.querySelector(`[data-field=${name}]`).value.trim(), text = part.querySelector("textarea")?.value;
    return {
      run: () => ({ text, ranks: +value("ranks"), clock: value("clock") }),
      grade: () => ({ text, lesson: value("lesson"), task: +value("task") }),
      write_schedule: () => ({ name: value("name"), ranks: +value("ranks"), microbatches: +value("microbatches"), chunks: +value("chunks") }),
      schedule: () => ({ text, backward: +value("backward") }),
      plan: () => ({ model: value("model"), cluster: `${value("kind")}:${value("gpus")}`, tokens: value("tokens"), batch: value("batch"),
                     sequence: value("sequence"), budget: value("budget") }),
    }[what]();
  }

  async function go(part, what) {
    if (root.dataset.busy) return;
    const place = part.querySelector("[data-answer]");
    place.replaceChildren();
    if (!SUSPENDS && ["run", "grade"].includes(what)) return add(place, "p", WITHOUT, { class: "bad" });
    root.dataset.busy = what, busy(part, true);
    printing = add(place, "pre");
    try {
      const answer = await ask(what, details(part, what));
      if (answer.failed) add(place, "pre", answer.failed, { class: "bad" });
      else shown[what](place, answer, part);
      say(`${answer.failed ? "It ended with an error" : "Done"} after ${answer.seconds.toFixed(2)} s.`);
    } catch (error) {
      add(place, "p", error.message, { class: "bad" });
      say(error.message);
    }
    if (!printing.textContent) printing.remove();
    printing = null;
    delete root.dataset.busy, busy(part, false);
  }

  function busy(part, on) {
    for (const button of root.querySelectorAll("button[data-do]")) {
      const stop = button.dataset.do === "stop";
      button.disabled = stop ? !(on && part.contains(button)) : on;
    }
    part.setAttribute("aria-busy", on);
  }

  // ---------------------------------------------------------------- editors

  function fill(area, text) {
    area.value = text;
    area.dispatchEvent(new Event("input"));
  }

  function editor(area) {
    const gutter = area.previousElementSibling;
    let leaves = false, lines = 0;
    const follow = () => {
      const count = area.value.split("\n").length;
      if (count !== lines) gutter.textContent = Array.from({ length: lines = count }, (_, at) => at + 1).join("\n");
      gutter.scrollTop = area.scrollTop;
    };
    area.addEventListener("input", follow);
    area.addEventListener("scroll", follow);
    area.addEventListener("blur", () => (leaves = false));
    area.addEventListener("keydown", (event) => {
      const plain = !event.altKey && !event.ctrlKey && !event.metaKey;
      if (event.key === "Escape") leaves = true;
      else if (event.key === "Tab" && plain && !leaves) event.preventDefault(), indent(area, event.shiftKey);
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        const part = area.closest("[data-part]");
        go(part, part.dataset.part);
      } else if (event.key === "Enter" && plain && !event.shiftKey) {
        const before = area.value.slice(0, area.selectionStart).split("\n").at(-1);
        event.preventDefault();
        insert("\n" + before.match(/^ */)[0] + (/:\s*(#.*)?$/.test(before) ? "    " : ""));
      } else if (event.key !== "Shift") leaves = false;
    });
    follow();
  }

  // The one way that keeps what Ctrl+Z takes back.
  function insert(text) {
    document.execCommand(text ? "insertText" : "delete", false, text);
  }

  function indent(area, back) {
    const { selectionStart: from, selectionEnd: to, value } = area;
    if (from === to && !back) return insert(" ".repeat(4 - (from - value.lastIndexOf("\n", from - 1) - 1) % 4));
    const first = value.lastIndexOf("\n", from - 1) + 1, lines = value.slice(first, to);
    const moved = back ? lines.replace(/^ {1,4}/gm, "") : lines.replace(/^(?=.)/gm, "    ");
    if (moved === lines) return;
    area.setSelectionRange(first, to);
    insert(moved);
    area.setSelectionRange(from === to ? Math.max(first, to + moved.length - lines.length) : first, first + moved.length);
  }

  // A reader's text is kept in this browser, if it lets us.
  const kept = {
    get: (key) => { try { return localStorage.getItem("minidist " + key); } catch { return null; } },
    set: (key, text) => { try { localStorage.setItem("minidist " + key, text); } catch { /* it does not */ } },
    drop: (key) => { try { localStorage.removeItem("minidist " + key); } catch { /* it does not */ } },
  };

  function choose(part, field) {
    const select = part.querySelector(`[data-field=${field}]`), area = part.querySelector("textarea");
    const show = (again = false) => {
      const key = `${field} ${select.value}`;
      if (again) kept.drop(key);
      fill(area, kept.get(key) ?? files[field][select.value]);
    };
    select.addEventListener("change", () => show());
    area.addEventListener("change", () => kept.set(`${field} ${select.value}`, area.value));
    part.querySelector("[data-do=reset]").addEventListener("click", () => show(true));
    show();
  }

  // ---------------------------------------------------------------- begin

  for (const area of root.querySelectorAll("textarea")) editor(area);
  for (const part of root.querySelectorAll("[data-part]"))
    for (const button of part.querySelectorAll("button[data-do]")) {
      const what = button.dataset.do;
      if (what in shown) button.addEventListener("click", () => go(part, what));
      if (what === "stop") button.addEventListener("click", () => broken("you stopped it"));
    }
  choose(document.getElementById("a-program"), "example");
  choose(document.getElementById("a-lesson"), "lesson");
  root.querySelector("[data-do=save]").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([document.getElementById("run-exercise").value], { type: "text/x-python" }));
    link.download = "exercise.py", link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  const refused = refusal();
  if (refused || !SUSPENDS) says("refused").textContent = refused || WITHOUT, says("refused").hidden = false;
  if (refused) for (const button of root.querySelectorAll("button[data-do]")) button.disabled = button.dataset.do !== "save" && button.dataset.do !== "reset";
})();
