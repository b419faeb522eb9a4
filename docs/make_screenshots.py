"""Make the pictures of reports in docs/img: `python docs/make_screenshots.py`.

The runs are made from a fixed seed, so the pictures change only with the report. It needs Chromium, and the small
model of `rollout engine install` for the text of its tokens.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).absolute().parent
sys.path.append(str(HERE.parent / "tests" / "support"))

from chromium import run_chromium  # noqa: E402
from made_runs import MadeRun, make_run  # noqa: E402
from rollout_backend.report.files import write_report  # noqa: E402
from rollout_backend.serving.install import find_model  # noqa: E402

WIDTH = 1280


def shoot(page: Path, name: str, height: int, *, dark: bool = False, only: str = "", link: str = "") -> None:
    """Take a picture of a page's first part, or of one section after following a link."""
    shown = page.with_name("shown.html")
    theme = "dark" if dark else "light"
    rest = f"<style>header,nav,footer,main>:not(#{only}){{display:none!important}}</style></head>"
    html = page.read_text().replace("<html ", f'<html data-theme="{theme}" ', 1)
    shown.write_text(html.replace("</head>", rest, 1) if only else html)
    picture = HERE / "img" / f"{name}.png"
    picture.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        address = shown.absolute().as_uri() + link
        run_chromium(Path(profile), f"--window-size={WIDTH},{height}", f"--screenshot={picture}", address)
    print(picture)


def main() -> None:
    model = find_model()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runs = Path("runs")
        earlier = make_run(runs / "run-20261122-120101-8b2f", MadeRun(model=model, skill=0.44, seed=9))
        page = write_report(make_run(runs / "run-20261122-141205-9c1e", MadeRun(model=model)), earlier)
        shoot(page, "report-light", 1560)
        shoot(page, "report-light-top", 1010)
        shoot(page, "report-dark", 1560, dark=True)
        shoot(page, "report-conversation", 640, only="viewer", link="#r=buy-4-plum.3")
        failed = make_run(runs / "run-20261122-150000-0f0f", MadeRun(model=model, tasks=6, group=4, outage=True))
        shoot(write_report(failed), "report-failed", 1300)
        large = make_run(runs / "run-20261122-160000-1b1b", MadeRun(model=model, tasks=1250, stored=400))
        shoot(write_report(large), "report-10000", 2000)
        training = write_report(make_run(runs / "train-shop", MadeRun(model=model, tasks=24, steps=15, skill=0.08)))
        shoot(training, "report-training", 1900)
        shoot(training, "report-training-top", 1010)


if __name__ == "__main__":
    main()
