"""`rollout infra`: the files that describe the infrastructure of runs."""

from pathlib import Path
from typing import Annotated

import typer

from rollout_backend.cli.common import echo, exit_codes
from rollout_backend.errors import ConfigError


def infra(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")] = Path("infra"),
) -> None:
    """Write the CloudFormation templates, Kubernetes manifests and Grafana dashboard of this version into a folder.

    The documentation names them by their paths in a checkout, such as `infra/template.yaml`. Files that you have
    changed are not replaced.
    """
    from rollout_backend.deploy import INFRA

    with exit_codes():
        files = {
            folder / path.name: path.read_text()
            for path in sorted(INFRA.iterdir())
            if path.suffix in (".yaml", ".json")
        }
        if changed := [str(path) for path, text in files.items() if path.exists() and path.read_text() != text]:
            raise ConfigError(f"{', '.join(changed)} differs from this version's: move it, or name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
            echo(f"wrote {path}")
