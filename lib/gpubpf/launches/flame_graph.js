// Zoom and search of a flame graph. The file is complete without: it shows all boxes, and their tooltips.
"use strict";
(() => {
  const WIDTH = 1200, CHARACTER = 7.25;  // as in flame_graph.py
  const $ = (id) => document.getElementById(id);
  const boxes = [...document.querySelectorAll(".box")].map((g) => {
    const rect = g.querySelector("rect"), text = g.querySelector("text");
    const [x, y, width] = ["x", "y", "width"].map((name) => Number(rect.getAttribute(name)));
    return {g, rect, text, x, y, width, name: g.querySelector("title").textContent.split("\n")[0]};
  });

  function zoom(to) {  // to: a box, or the whole picture
    const scale = WIDTH / to.width, rounding = 0.002;
    for (const box of boxes) {
      const inside = box.x < to.x + to.width - rounding && box.x + box.width > to.x + rounding;
      const x = Math.max((box.x - to.x) * scale, 0);
      const width = Math.min((box.x + box.width - to.x) * scale, WIDTH) - x;
      box.g.style.display = inside ? "" : "none";
      if (!inside) continue;
      box.g.classList.toggle("below", box.y > to.y);
      box.rect.setAttribute("x", x);
      box.rect.setAttribute("width", width);
      box.text.setAttribute("x", x + 3);
      const room = Math.floor((width - 6) / CHARACTER);
      box.text.textContent = room < 3 ? "" : box.name.length <= room ? box.name : box.name.slice(0, room - 2) + "..";
    }
    $("reset").setAttribute("visibility", to === whole ? "hidden" : "visible");
  }

  function search(pattern) {  // a regular expression, or a text
    let sought;
    try { sought = new RegExp(pattern, "i"); } catch { sought = {test: (name) => name.includes(pattern)}; }
    let found = 0, end = 0;  // boxes of a recursion are above each other, and count once
    for (const box of [...boxes].sort((a, b) => a.x - b.x || b.width - a.width)) {
      const match = pattern !== "" && sought.test(box.name);
      box.g.classList.toggle("match", match);
      if (!match) continue;
      found += Math.max(0, box.x + box.width - Math.max(end, box.x));
      end = Math.max(end, box.x + box.width);
    }
    $("found").textContent = pattern ? `${pattern}: ${(100 * found / WIDTH).toFixed(2)} %` : " ";
    $("search").textContent = pattern ? "Clear" : "Search";
  }

  const ask = () => search($("search").textContent === "Clear" ? "" : prompt("Search for functions (regular expression):") || "");
  const whole = {x: 0, y: Infinity, width: WIDTH};
  for (const box of boxes) box.g.addEventListener("click", () => zoom(box));
  $("reset").addEventListener("click", () => zoom(whole));
  $("search").addEventListener("click", ask);
  $("search").setAttribute("visibility", "visible");
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") zoom(whole);
    if (event.key === "f" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); }
  });
})();
