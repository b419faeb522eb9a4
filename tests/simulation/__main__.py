"""`make chaos`: simulated runs with faults of every kind. Run in the repository as `python -m tests.simulation`."""

from __future__ import annotations

from random import randrange
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tests.simulation.chaos import chaos, play
from tests.simulation.mutants import MUTANTS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: Annotated[int, typer.Option(min=1, help="Number of histories.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    new: Annotated[bool, typer.Option("--new", help="Draw the first seed at random, and print it.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this seed, with its whole history.")] = None,
    mutant: Annotated[str | None, typer.Option(help="Break the code on purpose; `list` names the ways.")] = None,
) -> None:
    """Simulate runs with faults of every kind, and check the invariants."""
    console = Console(highlight=False)
    if mutant is not None and mutant not in MUTANTS:
        for name, make in MUTANTS.items():
            console.print(f"[bold]{name}[/] {make.__doc__}")
        if mutant == "list":
            return
        raise typer.BadParameter(f"there is no mutant {mutant!r}: see above")
    if seed is not None:
        verdict = play(seed, mutant)
        console.print("\n".join(verdict.history), markup=False)
    else:
        if new:
            first = randrange(10_000, 10**9)
        console.print(f"seeds {first} to {first + seeds - 1}")
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("seeds", total=seeds)
            tally = chaos(range(first, first + seeds), mutant, on_verdict=lambda _: progress.advance(bar))
        if tally.failed is None:
            counts = ", ".join(f"{count:,} {outcome}" for outcome, count in tally.outcomes.items() if count)
            console.print(
                f"{tally.seeds:,} seeds, {tally.trainers:,} trainer processes, no violation; rollouts: {counts}"
            )
            return
        verdict = tally.failed
    if verdict.violation is not None:
        console.print(f"[red]seed {verdict.seed}: {verdict.violation}[/]")
        if seed is None:
            console.print(f"its history: make chaos SEED={verdict.seed}" + (f" MUTANT={mutant}" if mutant else ""))
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
