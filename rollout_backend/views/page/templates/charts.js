// The readout of charts over time or steps: the values at the pointer, or at the arrow keys' place.
(() => {
  for (const chart of document.querySelectorAll(".chart")) {
    const svg = chart.querySelector("svg"), line = chart.querySelector(".cursor"), points = JSON.parse(chart.dataset.points);
    let current = -1;
    const show = (i) => {
      current = Math.min(points.length - 1, Math.max(0, i));
      const [x, words] = points[current];
      line.setAttribute("x1", x); line.setAttribute("x2", x); line.setAttribute("visibility", "visible");
      chart.querySelector(".readout").textContent = words;
    };
    chart.addEventListener("mousemove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
      show(points.reduce((best, [x], i) => Math.abs(x - at) < Math.abs(points[best][0] - at) ? i : best, 0));
    });
    chart.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: points.length - 1 }[event.key];
      if (to !== undefined) { event.preventDefault(); show(to); }
    });
  }
})();
