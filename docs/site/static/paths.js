// A path through the course, followed from its page: `?path=weekend` behind an address says which.
// Without it, or without this script, a page shows the lines of all paths that go through it.
(() => {
  const page = location.pathname.split("/").pop();
  const rows = [...document.querySelectorAll(".path-stops li")];
  const pageOf = (row) => row.querySelector("a.path").getAttribute("href").split("/").pop();
  const name = document.querySelector(".path-table") ? page.replace(/\.html$/, "")
    : new URLSearchParams(location.search).get("path");
  if (!name) return;

  const follow = (link) => {
    const [address, place] = link.getAttribute("href").split("#");
    if (/(^|\/)(lessons\/.*\/index|notebooks\/.*)\.html$/.test(address))
      link.setAttribute("href", `${address}?path=${name}${place ? "#" + place : ""}`);
  };
  document.querySelectorAll(".path-table a, .lesson-bar a").forEach(follow);
  const mine = rows.find((row) => pageOf(row) === `${name}.html`);
  if (!mine) return;

  for (const row of rows) if (row !== mine) row.remove();
  for (const link of document.querySelectorAll(".lesson-bar a")) // to lessons before and after in the course
    if (/^\.\.\/\d\d_/.test(link.getAttribute("href"))) link.closest("li").remove();
  mine.querySelectorAll("a").forEach(follow);
  const title = document.querySelector("article h1"), line = document.createElement("p");
  line.className = "on-path";
  line.innerHTML = mine.querySelector("p").innerHTML;
  title.after(line);

  // The footer leads to the stops of the path, and after the last one back to its page.
  const turn = (selector, link, words) => {
    const there = document.querySelector(`.related-pages ${selector}`);
    if (!there) return;
    there.href = (link ?? mine.querySelector("a.path")).getAttribute("href");
    there.querySelector(".context span").textContent = words;
    there.querySelector(".title").textContent = (link ?? mine.querySelector("a.path")).textContent;
  };
  turn(".next-page", mine.querySelector("a.onwards"), "Next on this path");
  turn(".prev-page", mine.querySelector("a.backwards"), "Before on this path");
})();
