"""The report in headless Chromium: links, filters, search, keyboard and themes."""

import asyncio
import base64
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chromium import find_chromium, run_chromium
from made_runs import MadeRun, make_run, reopen_last_step
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.views.page.report import ReportServer, serve_report, write_report

pytestmark = [
    pytest.mark.slow,
    # Continuous integration sets REQUIRE_CHROMIUM, so that these tests fail where there is none.
    pytest.mark.skipif(
        find_chromium() is None and not os.environ.get("REQUIRE_CHROMIUM"),
        reason="no chromium, chromium-browser or google-chrome in PATH",
    ),
]
ERRORS = "<script>window.failed=[];addEventListener('error',(event)=>failed.push(event.message))</script>"


def play(page: Path, steps: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """Run a script in a copy of the page. It fills `result`; errors of the page are an error."""
    script = """<script>(async () => {
const result = {}, byId = (id) => document.getElementById(id);
const settle = () => new Promise((done) => setTimeout(done, 50));
const enter = (id, value) => { byId(id).value = value; byId(id).dispatchEvent(new Event("input")); };
const press = (id, key) => byId(id).dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const rows = () => [...document.querySelectorAll("#table tbody tr")].map((row) => row.cells[0].textContent);
try { STEPS } catch (error) { failed.push(String(error)); }
result.failed = failed;
document.body.append(Object.assign(document.createElement("pre"), { id: "result", textContent: btoa(unescape(encodeURIComponent(JSON.stringify(result)))) }));
})();</script>""".replace("STEPS", steps)  # noqa: E501
    copy = tmp_path / "played.html"
    copy.write_text(page.read_text().replace("<head>", f"<head>{ERRORS}").replace("</body>", f"{script}</body>"))
    html = run_chromium(tmp_path / "profile", "--virtual-time-budget=4000", *flags, "--dump-dom", copy.as_uri())
    found = re.search(r'<pre id="result">([^<]*)</pre>', html)
    assert found is not None, html[-500:]
    result: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    assert result.pop("failed") == []
    return result


@pytest.fixture(scope="module")
def report(made: Path) -> Path:
    return write_report(made)


def test_search_filters_and_sorting(report: Path, tmp_path: Path):
    long = tmp_path / "long.html"  # the first rollout sampled 12,345 tokens
    long.write_text(re.sub(r'"tokens":\[[^,]+', '"tokens":[12345', report.read_text(), count=1))
    result = play(
        long,
        """
        result.all = rows().length;
        result.tokens = document.querySelector("#table tbody tr").cells[5].textContent;
        enter("search", "buy-3-pear"); result.found = rows();
        enter("search", ""); enter("reward", "missing");
        result.missing = [...document.querySelectorAll("#table tbody tr")].map((row) => row.cells[3].textContent);
        enter("reward", ""); enter("outcome", byId("outcome").options[1].value);
        result.outcomes = [...new Set([...document.querySelectorAll("#table tbody tr")].map((row) => row.cells[1].textContent))];
        enter("outcome", "");
        document.querySelectorAll("#table th button")[4].click();
        const seconds = [...document.querySelectorAll("#table tbody tr")].map((row) => +row.cells[4].textContent);
        result.sorted = seconds.every((value, i) => !i || seconds[i - 1] <= value);
        result.aria = document.querySelectorAll("#table th")[4].getAttribute("aria-sort");
        document.querySelector("[data-filter]").click(); result.filter = byId("search").value;
        """,  # noqa: E501
        tmp_path,
    )
    assert (result["all"], result["tokens"]) == (72, "12345")
    assert result["found"] == [f"buy-3-pear.{i}" for i in range(6)]
    assert set(result["missing"]) == {"missing"}
    assert result["outcomes"] == ["completed"]
    assert result["sorted"]
    assert result["aria"] == "ascending"
    assert result["filter"] in ("agent_deadline", "container_error", "agent_exception")


def test_links_the_heatmap_and_the_keyboard_open_rollouts(report: Path, tmp_path: Path):
    result = play(
        report,
        """
        const title = () => byId("viewer-title").firstChild.textContent.trim();
        location.hash = "#r=buy-3-pear.2"; await settle(); result.linked = title();
        result.tokens = document.querySelectorAll("#viewer .t").length;
        press("viewer", "ArrowRight"); await settle(); result.next = title();
        const map = byId("heatmap"); map.focus();
        for (const key of ["ArrowRight", "ArrowDown"]) press("heatmap", key);
        result.readout = byId("heatmap-readout").textContent;
        press("heatmap", "Enter"); await settle(); result.entered = title();
        const box = map.querySelector("path").getBoundingClientRect();
        map.dispatchEvent(new MouseEvent("click", { clientX: box.left + 3, clientY: box.top + 3, bubbles: true }));
        await settle(); result.clicked = location.hash;
        const line = byId("timeline").querySelector("svg").getBoundingClientRect();
        byId("timeline").dispatchEvent(new MouseEvent("click", { clientX: line.left + 60, clientY: line.top + 30 }));
        await settle(); result.timeline = location.hash;
        result.about = byId("viewer-body").textContent;
        """,
        tmp_path,
    )
    assert re.search(r" · 1 attempt · (can|cannot) be trained", result["about"])
    assert (result["linked"], result["next"]) == ("buy-3-pear.2", "buy-3-pear.3")
    assert result["tokens"] > 20
    assert result["readout"].startswith(f"{result['entered']}: ")
    assert result["clicked"].startswith("#r=buy-")
    assert result["timeline"].startswith("#r=buy-")


READ_CHARTS = """
const charts = [...document.querySelectorAll(".chart")];
const words = (chart) => chart.querySelector(".readout").textContent;
result.shown = charts.map((chart) => {
  const box = chart.querySelector("svg").getBoundingClientRect(), points = JSON.parse(chart.dataset.points);
  const move = (part) => {
    const clientX = box.left + part * box.width, clientY = box.top + 20;
    chart.dispatchEvent(new MouseEvent("mousemove", { clientX, clientY }));
    return [words(chart), +chart.querySelector(".cursor").getAttribute("x1")];
  };
  const key = (key) => { chart.dispatchEvent(new KeyboardEvent("keydown", { key })); return words(chart); };
  const [left, right] = [move(0), move(1)];
  return { points, left, right, keys: ["ArrowLeft", "Home", "ArrowLeft", "ArrowRight", "End"].map(key) };
});
"""


def test_charts_read_out_the_values_at_the_pointer_and_by_keys(report: Path, tmp_path: Path):
    result = play(report, READ_CHARTS, tmp_path)
    for chart in result["shown"]:
        points = chart["points"]
        words = [each for _, each in points]
        assert chart["left"] == [words[0], points[0][0]]
        assert chart["right"] == [words[-1], points[-1][0]]
        assert chart["keys"] == [words[-2], words[0], words[0], words[1], words[-1]]
    first, second = (chart["points"] for chart in result["shown"])
    assert first[0] == [0, "after 0 s: at work 0, finished 0"]
    assert len(first) == len(second) == 161
    assert first[-1][1].endswith(" s: at work 0, finished 72")


NARROW = """
const width = (node) => node.getBoundingClientRect().width;
const widths = (css) => [...document.querySelectorAll(css)].map(width);
result.page = [document.documentElement.scrollWidth, innerWidth];
result.menu = document.querySelector("nav").getBoundingClientRect().height;
result.tracebacks = widths("#failures pre");
result.texts = widths("#failures td, #settings td, #time td.text, #table td.text");
result.lines = [...document.querySelectorAll("#table td.id, #failures .link, #failures a.id")].map((node) => node.getClientRects().length);
"""  # noqa: E501


def test_on_a_phone_every_column_can_be_read(report: Path, tmp_path: Path):
    result = play(report, NARROW, tmp_path, "--window-size=390,844")
    wide, inner = result["page"]
    assert inner <= 500  # no browser makes it narrower without a device
    assert wide <= inner
    assert result["menu"] <= 60
    assert len(result["tracebacks"]) > 0
    assert min(result["tracebacks"]) > 0.7 * inner
    assert min(result["texts"]) >= 150
    assert set(result["lines"]) == {1}  # ids and reasons are on one line each


MEASURE = """<script>addEventListener("load", () => {
const small = [], large = [], cut = [], scrolls = (node) => {
  for (let at = node.parentElement; at; at = at.parentElement) if (getComputedStyle(at).overflowX !== "visible") return true;
  return false;
};
for (const node of document.body.querySelectorAll("*")) {
  const says = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  const box = node.getBoundingClientRect(), matrix = (says && node.ownerSVGElement && node.getScreenCTM?.()) || { a: 1, b: 0 };
  if (says && box.width && parseFloat(getComputedStyle(node).fontSize) * Math.hypot(matrix.a, matrix.b) < 9.99) small.push(node.textContent);
  if (says && node.ownerSVGElement && box.width && parseFloat(getComputedStyle(node).fontSize) * Math.hypot(matrix.a, matrix.b) > 20) large.push(node.textContent);
  if (box.width && box.right > innerWidth + 1 && !scrolls(node)) cut.push(node.tagName + node.textContent.slice(0, 40));
  if (node.tagName === "TD" && box.width && box.width < 100 && node.textContent.length > 40) cut.push("narrow: " + node.textContent);
  if (node.matches(".stack.named > div") && node.scrollWidth > node.clientWidth + 1) cut.push("stack: " + node.textContent);
  if (node.matches(".stack span") && box.right > node.parentElement.getBoundingClientRect().right + 1) cut.push("stack: " + node.textContent);
}
const theme = document.getElementById("theme").getBoundingClientRect();
window.measured = { small, large, cut, page: document.documentElement.scrollWidth, theme: theme.right };
});</script>"""  # noqa: E501


@pytest.mark.parametrize("width", [400, 800, 1300])
@pytest.mark.parametrize("kind", ["good", "failed", "running", "training"])
def test_no_text_is_small_or_cut_at_any_width(tmp_path: Path, kind: str, width: int):
    lost, steps = {"failed": 1.0}.get(kind, 0.1), 5 if kind == "training" else 1
    folder = make_run(tmp_path / "run", MadeRun(tasks=12, group=4, lost=lost, steps=steps))
    if kind == "running":
        reopen_last_step(folder, still_open=12)
    page = write_report(folder)
    (tmp_path / "page.html").write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    # Only a frame can be narrower than Chromium's window.
    (tmp_path / "frame.html").write_text(
        f'<body><iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe><script>'
        'addEventListener("load", () => setTimeout(() => document.body.append(Object.assign('
        'document.createElement("pre"), { id: "result", textContent: '
        "btoa(unescape(encodeURIComponent(JSON.stringify(frames[0].measured)))) })), 300));</script>"
    )
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=4000", "--window-size=1400,900", "--dump-dom")
    html = run_chromium(tmp_path / "profile", *flags, (tmp_path / "frame.html").as_uri())
    found = re.search(r'<pre id="result">([^<]*)</pre>', html)
    assert found is not None, html[-500:]
    result = json.loads(base64.b64decode(found[1]))
    assert (result["small"], result["large"], result["cut"], result["page"]) == ([], [], [], width)
    assert 0 < result["theme"] <= width


class FirstPage(ReportServer):
    """Says when a browser has the page as it was first."""

    def __init__(self, run_dir: Path, newest: Callable[[], Path] | None = None) -> None:
        super().__init__(run_dir, renew_s=0, share=1, newest=newest)
        self.sent = asyncio.Event()

    async def page(self, request: Any) -> Any:
        page = await super().page(request)
        self.sent.set()
        return page


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_served_page_renews_itself_when_its_step_ends(tmp_path: Path, steps: int):
    folder = make_run(tmp_path / "run", MadeRun(tasks=4, group=3, steps=steps))
    step, records = reopen_last_step(folder, still_open=5)
    server = FirstPage(folder)

    async def look(budget_ms: int) -> str:
        flags = (f"--virtual-time-budget={budget_ms}", "--window-size=390,844", "--dump-dom")
        return await asyncio.to_thread(run_chromium, tmp_path / "profile", *flags, url)

    async with serve_report(server, "127.0.0.1", 0) as url:
        html = await look(500)
        assert len(re.findall(r'data-until="[0-9.]+">(?:[0-9]+ s|[0-9]+ min)<', html)) == 5
        assert "running" in html
        wide = "result.page = [document.documentElement.scrollWidth, innerWidth];"
        shown = await asyncio.to_thread(play, folder / "report.html", wide, tmp_path, "--window-size=390,844")
        assert shown["page"][0] <= shown["page"][1]
        server.sent.clear()
        looking = asyncio.create_task(look(60_000))
        await server.sent.wait()
        archive = RunArchive(folder)
        archive.write_records(step, records)
        archive.close()
        html = await looking
    assert "data-until=" not in html
    assert "Open rollouts" not in html


async def test_a_served_page_follows_the_newest_run_and_keeps_its_focus_and_scroll(tmp_path: Path):
    folders = [make_run(tmp_path / name, MadeRun(tasks=4, group=3)) for name in ("earlier", "newest")]
    newest = folders[:1]

    class Served(FirstPage):
        async def page(self, request: Any) -> Any:
            page = await super().page(request)
            # The first page takes the focus and scrolls; the next one shows where both are after its own script.
            script = """<script>setTimeout(() => {
            if (!sessionStorage.seen) { sessionStorage.seen = 1;
            document.querySelector("#table th button").focus(); scrollTo({ top: 900, behavior: "instant" }); }
            else document.body.dataset.kept = [document.activeElement === document.querySelector("#table th button"), scrollY];
            }, 100)</script>"""  # noqa: E501
            page.text = page.text.replace("</body>", f"{script}</body>")
            return page

    server = Served(folders[0], newest=lambda: newest[-1])
    async with serve_report(server, "127.0.0.1", 0) as url:
        flags = ("--virtual-time-budget=60000", "--window-size=1300,800", "--dump-dom")
        looking = asyncio.create_task(asyncio.to_thread(run_chromium, tmp_path / "profile", *flags, url))
        await server.sent.wait()
        newest.append(folders[1])
        html = await looking
    assert "<title>newest" in html
    assert "This page follows the newest run." in html
    assert re.findall(r'data-kept="([^"]*)"', html) == ["true,900"]
