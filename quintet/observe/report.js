// Reading a chart under the pointer. The page is complete without it.
for (const figure of document.querySelectorAll("figure[data-series]")) {
  const series = JSON.parse(figure.dataset.series);
  const [left, right, x0, x1, width] = JSON.parse(figure.dataset.frame);
  const svg = figure.querySelector(":scope > svg"), cursor = svg.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const hide = () => { tip.style.display = "none"; cursor.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = width / box.width;
    const at = x0 + ((event.clientX - box.left) * scale - left) / (right - left) * (x1 - x0);
    let best = null;
    for (const s of series) for (const p of s.points) if (best === null || Math.abs(p[0] - at) < Math.abs(best - at)) best = p[0];
    if (best === null) return hide();
    const rows = series.flatMap((s) => s.points.filter((p) => p[0] === best).map((p) => (series.length > 1 ? s.name + " " : "") + Number(p[1].toPrecision(4))));
    const x = x1 > x0 ? left + (best - x0) / (x1 - x0) * (right - left) : (left + right) / 2;
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.style.visibility = "visible";
    tip.textContent = "step " + best + (rows.length > 2 ? "\n" + rows.join("\n") : ":  " + rows.join("  ·  "));
    tip.style.display = "block";
    const frame = figure.getBoundingClientRect();
    tip.style.left = Math.max(0, Math.min(event.clientX - frame.left + 12, frame.width - tip.offsetWidth)) + "px";
    tip.style.top = event.clientY - frame.top - tip.offsetHeight - 10 + "px";
  });
}
