"""`rollout chaos`: simulated runs with faults."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_backend.cli.common import console, exit_codes
from rollout_backend.errors import ConfigError


def chaos(
    seeds: Annotated[int, typer.Option(min=1, help="Number of histories.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this seed, with its whole history.")] = None,
    mutant: Annotated[str | None, typer.Option(help="Break the code on purpose; `list` names the ways.")] = None,
) -> None:
    """Simulate runs with faults of every kind, and check the invariants."""
    with exit_codes():
        _chaos(range(first, first + seeds), seed, mutant)


def _chaos(seeds: range, one: int | None, mutant: str | None) -> None:
    from rich.progress import Progress

    from rollout_backend.simulation.chaos import chaos, play
    from rollout_backend.simulation.mutants import MUTANTS

    if mutant is not None and mutant not in MUTANTS:
        for name, make in MUTANTS.items():
            console.print(f"[bold]{name}[/] {make.__doc__}")
        if mutant == "list":
            return
        raise ConfigError(f"there is no mutant {mutant!r}: see above")
    if one is not None:
        verdict = play(one, mutant)
        console.print("\n".join(verdict.history), markup=False, highlight=False)
    else:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("seeds", total=len(seeds))
            tally = chaos(seeds, mutant, on_verdict=lambda _: progress.advance(bar))
        if tally.failed is None:
            counts = ", ".join(f"{count:,} {outcome}" for outcome, count in tally.outcomes.items() if count)
            console.print(
                f"{tally.seeds:,} seeds, {tally.trainers:,} trainer processes, no violation; rollouts: {counts}"
            )
            return
        verdict = tally.failed
    if verdict.violation is not None:
        extra = f" --mutant {mutant}" if mutant else ""
        console.print(f"[red]seed {verdict.seed}: {verdict.violation}[/]", highlight=False)
        if one is None:
            console.print(f"its history: rollout chaos --seed {verdict.seed}{extra}", highlight=False)
        raise typer.Exit(1)
