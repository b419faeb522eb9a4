"""Which folder may import which, and what a gateway process loads."""

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "rollout_backend"
LAYERS = (
    {"errors"},
    {
        "base.addresses",
        "base.atomic_file",
        "base.fair_queue",
        "base.garbage_collection",
        "base.giving_way",
        "base.local_keys",
        "base.logs",
        "base.names",
    }
    | {"base.retry", "base.waiting_connections", "base.check_result", "base.dockerignore", "base.formats"},
    {"base.disk", "base.connection_pace", "base.aws", "config"},
    {"base.child_process"},
    {"core", "model.images"},
    {"model.model_call"},
    {"model.rendering", "agents.runtimes", "base.tracing"},
    {"model.dialects", "run.dispatch"},
    {"model.gateway", "model.relay", "run.collect"},
    {"model.serving", "run.lease", "run.scoring", "agents.protocols"},
    {"run.accounts"},
    {"run.step"},
    {"run.janitor"},
    {"run.checks"},
    {"run.services"},
    {"manager"},
    {"views"},
    {"training", "verl"},
    {"workbench.local"},
    {"workbench.deploy", "testing"},
    {"cli"},
    {"__main__"},
)
"""From the bottom up: a room, or a module of the package itself, imports only from the layers below its own."""
WINGS = {room.partition(".")[0] for layer in LAYERS for room in layer if "." in room}


def room_of(path: Sequence[str]) -> str:
    """Return the room of a module's path within the package: a wing's folder or module, else what the package has."""
    return ".".join(path[: 1 + (path[0] in WINGS)])


def layer_of(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


@functools.cache
def imported_names(module: Path) -> list[str]:
    """Return the dotted names that the module imports anywhere."""
    names = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def imported_by(module: Path) -> Iterator[str]:
    """Return the rooms of this package that the module imports anywhere."""
    return (room_of(name.split(".")[1:]) for name in imported_names(module) if name.startswith("rollout_backend."))


def imports() -> Iterator[tuple[str, str, str]]:
    for module in sorted(PACKAGE.rglob("*.py")):
        place = module.relative_to(PACKAGE)
        if place == Path("__init__.py"):
            continue  # the public names come from every layer
        importer = room_of(place.with_suffix("").parts)
        for imported in imported_by(module):
            if imported != importer:
                yield importer, imported, str(place)


def test_each_folder_has_one_layer():
    names = {room_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    names -= {"__init__", *(f"{wing}.__init__" for wing in WINGS)}
    assert sorted(names) == sorted(name for layer in LAYERS for name in layer)


def test_no_module_imports_a_layer_above_its_own():
    upward = {
        (importer, imported): place
        for importer, imported, place in imports()
        if layer_of(imported) >= layer_of(importer)
    }
    assert upward == {}


def test_the_training_side_takes_only_what_both_sides_share_from_the_wrapper():
    """`local` runs the wrapper, `agents.protocols` does its work for agents without it, and `deploy` packs it."""
    whole, shared = ("workbench.local", "agents.protocols", "workbench.deploy"), ("contract", "shared")
    beyond = [
        (str(module.relative_to(PACKAGE)), name)
        for module in PACKAGE.rglob("*.py")
        if room_of(module.relative_to(PACKAGE).parts) not in whole
        for name in imported_names(module)
        if name.split(".")[0] == "agent_wrapper" and name.split(".")[1:2] not in ([each] for each in shared)
    ]
    assert beyond == []


def test_agent_wrapper_imports_nothing_of_the_training_side():
    for module in (PACKAGE.parent / "agent_wrapper").rglob("*.py"):
        assert list(imported_by(module)) == [], module


def test_no_client_that_serves_several_sessions_keeps_cookies():
    """A load balancer's cookie binds a client to one server. Clients of one `async with` are brief."""
    keeping = []
    for module in PACKAGE.rglob("*.py"):
        tree = ast.parse(module.read_text())
        brief = {
            item.context_expr for node in ast.walk(tree) if isinstance(node, ast.AsyncWith) for item in node.items
        }
        keeping += [
            f"{module}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("ClientSession")
            and node not in brief
            and "cookie_jar" not in {keyword.arg for keyword in node.keywords}
        ]
    assert keeping == []


def test_gateway_process_loads_nothing_that_starts_gateways(tmp_path):
    (tmp_path / "torch.py").touch()  # the trainer's environment has torch, which transformers import if it is there
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    (tmp_path / "torch-2.13.0.dist-info" / "top_level.txt").write_text("torch\n")
    code = "import sys; from rollout_backend.model.gateway.__main__ import import_server; import_server(); "
    code += "print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    loaded = run.stdout.split()
    assert {"rollout_backend.model.gateway.server", "renderers"} <= {*loaded}
    packages = {name.partition(".")[0] for name in loaded}  # `openai.types` stays if `openai` alone is taken out
    assert "rollout_backend.model.serving" not in loaded
    assert {"ray", "boto3", "torch", "openai"}.isdisjoint(packages)


def test_the_command_line_loads_only_what_the_relays_image_has():
    code = "import sys; from rollout_backend.cli import main; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = {"numpy", "orjson", "boto3", "aioboto3", "PIL", "pyarrow", "ray", "renderers", "transformers", "jinja2"}
    assert others.isdisjoint(run.stdout.split())
