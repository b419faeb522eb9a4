(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const show = () => { button.textContent = dark() ? "Light" : "Dark"; };
  try { const kept = localStorage.getItem("rollout-theme"); if (kept) root.dataset.theme = kept; } catch { /* a file may have no storage */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("rollout-theme", root.dataset.theme); } catch { /* as above */ }
    show();
  });
  show();
  document.addEventListener("click", (event) => {
    const chip = event.target.closest("code");
    if (!chip) return;
    getSelection().selectAllChildren(chip); // where a file may not write the clipboard, Ctrl-C copies it
    navigator.clipboard?.writeText(chip.textContent).then(() => {
      chip.classList.add("copied"); setTimeout(() => chip.classList.remove("copied"), 800);
    }, () => {});
  });
  const links = [...document.querySelectorAll("nav a[href^='#']")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting)
      links.forEach((link) => link.classList.toggle("on", link.hash === "#" + entry.target.id));
  }, { rootMargin: "-10% 0px -75% 0px" });
  links.forEach((link) => { const part = document.querySelector(link.hash); if (part) seen.observe(part); });
})();
