(() => {
  const ahead = NOW - Date.now() / 1000; // of the server's clock
  const line = document.body.appendChild(document.createElement("p"));
  line.id = "follow"; line.setAttribute("role", "status");
  line.style.cssText = "position:fixed;bottom:10px;right:14px;margin:0;z-index:9;font-size:13px";
  const busy = () => document.activeElement?.matches("input,select") || getSelection().toString()
    || location.hash.startsWith("#r=") || ["search", "outcome", "reward"].some((id) => document.getElementById(id)?.value);
  const count = () => document.querySelectorAll("[data-until]").forEach((cell) => {
    const left = Math.max(0, cell.dataset.until - Date.now() / 1000 - ahead);
    cell.textContent = left < 600 ? left.toFixed(0) + " s" : left < 7200 ? (left / 60).toFixed(0) + " min" : (left / 3600).toFixed(1) + " h";
  });
  const ask = async () => {
    try {
      const answer = await fetch("/version");
      if (!answer.ok) throw new Error(answer.status);
      if (await answer.text() === VERSION) { line.textContent = FOLLOWS; return; }
      if (!busy()) { renew(); return; }
      line.innerHTML = '<button type="button">New results: renew the page</button>';
      line.firstChild.addEventListener("click", renew);
    } catch { line.textContent = "The report's server does not answer; this page is not renewed."; }
  };
  const places = () => [...document.querySelectorAll("a,button,input,select,[tabindex]")];
  const renew = () => {
    sessionStorage.setItem("rollout-place", JSON.stringify([scrollY, places().indexOf(document.activeElement)]));
    location.reload();
  };
  const kept = JSON.parse(sessionStorage.getItem("rollout-place") || "null");
  if (kept) {
    sessionStorage.removeItem("rollout-place");
    places()[kept[1]]?.focus({ preventScroll: true });
    // The page scrolls smoothly by default, which would start at its top with each renewal.
    scrollTo({ top: kept[0], behavior: "instant" });
  }
  line.textContent = FOLLOWS;
  count(); setInterval(count, 1000); setInterval(ask, 2000);
})();
