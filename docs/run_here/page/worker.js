// Python, beside the page, so that the page stays alive: Stop ends it, whatever it does.
//
//   page ── {runtime, wheel} ──▶ load Pyodide, numpy, the package ── {ready, seconds} ──▶ page
//        ── {number, question} ─▶ in_page.answer(question) ──────── {number, answer} ───▶
//                                 what a program prints ─────────── {printed} ─────────▶
"use strict";

let python = null;

async function load({ runtime, archive }) {
  const begun = performance.now();
  importScripts(runtime + "pyodide.js");
  python = await loadPyodide({ indexURL: runtime, stdout: print, stderr: print });
  const bytes = fetch(archive).then((answer) => {
    if (!answer.ok) throw new Error(`${archive}: ${answer.status} ${answer.statusText}`);
    return answer.arrayBuffer();
  });
  await python.loadPackage("numpy", { messageCallback: () => {} });
  python.unpackArchive(await bytes, "zip", { extractDir: python.runPython("import site; site.getsitepackages()[0]") });
  await python.runPythonAsync("import in_page");
  return { ready: python.version, seconds: (performance.now() - begun) / 1000 };
}

function print(line) {
  postMessage({ printed: line + "\n" });
}

onmessage = async ({ data }) => {
  try {
    if (data.runtime) return postMessage(await load(data));
    python.globals.set("question", data.question);
    postMessage({ number: data.number, answer: JSON.parse(await python.runPythonAsync("in_page.answer(question)")) });
  } catch (error) {
    postMessage({ number: data.number, broken: String(error.message ?? error) });
  }
};
