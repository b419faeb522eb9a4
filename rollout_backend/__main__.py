"""The `rollout` command. Without the packages of a command, say which extra of this package installs them."""

from __future__ import annotations

import re
import sys
from importlib import metadata

_PACKAGE = "rollout-backend"
_EXTRAS = {"relay": "relay", "deploy": "deploy", "demo": "local", "dev": "local"}
"""The extra that a command needs besides `trainer`."""
_NAMES = {"PIL": "pillow", "yaml": "pyyaml"}


def main() -> None:
    try:
        from rollout_backend.cli import main as run

        run()
    except KeyboardInterrupt:
        # The user interrupted the import of the command.
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        package = _NAMES.get(module, module.replace("_", "-").lower())
        extras = [_EXTRAS.get(command, "trainer"), *metadata.metadata(_PACKAGE).get_all("Provides-Extra", [])]
        extra = next((each for each in extras if package in _packages(each)), None)
        if extra is None:
            raise
        name = f"rollout {command}".rstrip()
        # No package index has this package.
        install = f"install the extra {extra} from a checkout: pip install '.[{extra}]'"
        print(f"error: {name} needs {module}: {install}", file=sys.stderr)
        raise SystemExit(2) from None


def _packages(extra: str) -> set[str]:
    """Return the packages that an extra of this package installs, including those of the extras in it."""
    found: set[str] = set()
    for line in metadata.requires(_PACKAGE) or ():
        if re.search(rf"""extra == ['"]{extra}['"]""", line):
            name, others = re.findall(r"^([\w.-]+)(?:\[([\w,-]*)\])?", line)[0]
            if name == _PACKAGE:
                found.update(*map(_packages, others.split(",")))
            else:
                found.add(name.lower())
    return found


if __name__ == "__main__":
    main()
