"""Make the pictures of reports and of the live view in docs/img: `python docs/make_screenshots.py`.

The runs are made from a fixed seed, so the pictures change only with the report. It needs Chromium, and the small
model of `rollout engine install` for the text of its tokens.

The reward curve of a real training run is made from the folder that `make train` leaves in runs/:

    python docs/make_screenshots.py --training runs/train-arithmetic-train-arithmetic

Crop docs/img/reward-curve.png to its first chart, so that it is readable in the README, and copy `curve.csv` from
runs/train_arithmetic/ to docs/img/training-run.csv with it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console, Group

HERE = Path(__file__).absolute().parent
sys.path.append(str(HERE.parent / "tests" / "support"))

from agent_wrapper.contract import Outcome  # noqa: E402
from chromium import run_chromium  # noqa: E402
from made_runs import MadeRun, make_run  # noqa: E402
from rollout_backend.core.ledger import Phase  # noqa: E402
from rollout_backend.model.gateway.stats import GatewayStats  # noqa: E402
from rollout_backend.model.serving.engine_fleet import ServerState  # noqa: E402
from rollout_backend.model.serving.install import find_model  # noqa: E402
from rollout_backend.model.serving.model_serving import RunPhase  # noqa: E402
from rollout_backend.run.accounts.cost import Prices, Usage  # noqa: E402
from rollout_backend.run.accounts.findings import FailureCount  # noqa: E402
from rollout_backend.run.accounts.progress import LastResult, Progress  # noqa: E402
from rollout_backend.views.page.report import write_report  # noqa: E402
from rollout_backend.views.terminal.live_view import History, Snapshot, frame  # noqa: E402

WIDTH = 1280


def shoot(page: Path, name: str, height: int, *, only: str = "") -> None:
    """Take a picture of a page's first part, or of one section."""
    shown = page.with_name("shown.html")
    rest = f"<style>header,nav,footer,main>:not(#{only}){{display:none!important}}</style></head>"
    html = page.read_text().replace("<html ", '<html data-theme="light" ', 1)
    shown.write_text(html.replace("</head>", rest, 1) if only else html)
    picture = HERE / "img" / f"{name}.png"
    picture.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        address = shown.absolute().as_uri()
        run_chromium(Path(profile), f"--window-size={WIDTH},{height}", f"--screenshot={picture}", address)
    print(picture)


def progress(part: float) -> Progress:
    """Return a step of 384 rollouts of which this part has ended."""
    engines = [f"http://engine-{i}" for i in range(2)]
    ended = round(241 * part)
    lost = ended // 30
    served = {
        "sampled_tokens": round(118_000 * part**1.5),
        "prompt_tokens": 1_000,
        "cached_tokens": 880,
        "calls": 900,
        "calls_in_flight": 95,
        "engine_running": dict(zip(engines, (48, 47), strict=True)),
        "engine_waiting": dict(zip(engines, (0, 3), strict=True)),
    }
    servers = [ServerState(f"engine-{i}", url, serving=True, restarts=0) for i, url in enumerate(engines)]
    return Progress(
        phases={Phase.PLANNED: 47, Phase.DISPATCHING: 0, Phase.RUNNING: 96, Phase.SETTLED: ended},
        outcomes={Outcome.COMPLETED: ended - lost, Outcome.INFRA_ERROR: lost},
        open_sessions=96,
        gateway=GatewayStats(**served),
        rewards=ended - lost,
        mean_reward=0.25 + 0.3 * part,
        groups=39,
        groups_with_spread=34,
        turns=900,
        cut_replies=9,
        slowest="buy-9-fig.3",
        slowest_s=64.0,
        slowest_left_s=176.0,
        p95_s=41.0,
        failures=(FailureCount(Outcome.INFRA_ERROR, "throttled", lost, "buy-1-plum.0", "429"),),
        last=(
            LastResult("buy-4-melon.2", 0.2, 37.0, 693, "A melon costs 3, so four cost 12. The answer is 13."),
            LastResult("buy-2-lime.7", 1.0, 22.0, 310, "A lime costs 4, so 2 limes cost 8."),
        ),
        servers=(ServerState("router", "http://router", serving=True, restarts=0), *servers),
        trainable=Usage(8_000, 5_000, ended - lost),
        wasted=Usage(200, 90, 0),
    )


def shoot_live_view() -> None:
    """Take a picture of the live view on a terminal of 80 columns."""
    history = History()
    for second in range(46):
        history.add(float(second), progress(second / 45))
    shown = Snapshot(
        run_id="run-20261122-141205-9c1e",
        what="shop/agent.py on Qwen3-4B",
        phases={RunPhase.CHECK: 1.2, RunPhase.ENGINES: 22.8, RunPhase.GATEWAY: 3.0, RunPhase.ROLLOUTS: 45.0},
        progress=progress(1.0),
        history=history,
        limit_s=600.0,
        prices=Prices(session_s=6e-6, own_s=7.5e-6, result=6.6e-6, step_s=0.0),
        keys=True,
    )
    console = Console(record=True, width=80, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Group(*frame(shown, 80)))
    svg = console.export_svg(title="rollout run config.yaml --tasks tasks.jsonl", unique_id="live")
    picture = HERE / "img" / "live-view.svg"
    picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # the font is on another server
    print(picture)


def main() -> None:
    shoot_live_view()
    model = find_model()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runs = Path("runs")
        earlier = make_run(runs / "run-20261122-120101-8b2f", MadeRun(model=model, skill=0.44, seed=9))
        page = write_report(make_run(runs / "run-20261122-141205-9c1e", MadeRun(model=model)), earlier)
        shoot(page, "report-light", 1560)
        training = write_report(make_run(runs / "train-shop", MadeRun(model=model, tasks=24, steps=15, skill=0.08)))
        shoot(training, "report-training", 1900)


def shoot_training(run: Path) -> None:
    """Take a picture of the reward curve of a real training run."""
    run = run.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        copy = Path("runs") / run.name
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("report*"))
        shoot(write_report(copy), "reward-curve", 300, only="rewards")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=Path, metavar="RUN_DIR", help="take the picture of this training run only")
    if (training_run := parser.parse_args().training) is not None:
        shoot_training(training_run)
    else:
        main()
