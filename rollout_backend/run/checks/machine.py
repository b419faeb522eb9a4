"""Check what a run needs of this machine: engines, ports, addresses, folders, the model, versions of packages, and
open files.

Invariants:

- The checks start nothing and leave nothing behind.
- Other machines are not checked: with gateways on a Ray cluster, only they need the model.
"""

import contextlib
import importlib.util
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from rollout_backend.base.addresses import host_port, is_loopback, local_address
from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.child_process import run_child
from rollout_backend.base.formats import count, size
from rollout_backend.base.tracing import check_installed
from rollout_backend.config import AgentCoreConfig, RolloutConfig
from rollout_backend.core.reasons import NOT_SERVING, NOT_SERVING_TEXT
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.gateway.access import needed_files
from rollout_backend.model.serving.gateway_process import (
    check_certificate,
    gateway_name,
    public_gateway_config,
    public_url,
)
from rollout_backend.model.serving.install import CPU_ENGINES
from rollout_backend.model.serving.local_engine import interpreter
from rollout_backend.model.serving.router import check_installed as check_router_installed
from rollout_backend.model.serving.server_process import require_port
from rollout_backend.run.accounts.local_copies import budget, reserve
from rollout_backend.run.checks.model import check_model

_LOW_BYTES, _FULL_BYTES = 1 << 30, 100 << 20
_CONNECT_S = 3.0
_PACKAGE = "rollout-backend"
_SHOWN = ("renderers", "sglang-router", "smg", "verl")
# The process also opens logs, pipes of child processes and modules.
_OTHER_FILES = 256
_ASK_SGLANG = "import importlib.metadata as m; print(m.version('sglang'))"
_INSTALL_ENGINE = (
    "without a GPU, run `rollout engine install --engine {engine}` and set serving.device=cpu. On GPUs, install it "
    "in another environment by this command, and set serving.python=engine/bin/python:\n"
    "uv venv engine && uv pip install --python engine/bin/python {engine}=={version}"
)
_INSTALL = f"uv pip install -c constraints/trainer.txt '{_PACKAGE}[trainer]'"


def check_machine(config: RolloutConfig, *, engines: bool = True) -> list[CheckResult]:
    """Return what was found. Takes some seconds, because it loads the tokenizer."""
    checks: tuple[Callable[[RolloutConfig], Iterator[CheckResult]], ...] = (
        check_model,
        *([_check_engines] if engines else []),
        _check_router,
        _check_ports,
        _check_addresses,
        _check_collector,
        _check_output_dir,
    )
    return [finding for check in checks for finding in check(config)]


# --- the agent --------------------------------------------------------------------------------------------

_START_AGENT = """
import gc, os, runpy, sys, threading
from pathlib import Path
from agent_wrapper import RolloutApp

apps = [RolloutApp]
try:
    from agent_wrapper.bedrock_agentcore import BedrockAgentCoreApp
except ImportError:
    pass
else:
    apps.append(BedrockAgentCoreApp)
apps = tuple(apps)

def finish(how):
    print(f"\\n{how}", flush=True)
    os._exit(0)

def run(app, *args, **options):
    app.asgi
    finish("an app serves")

def watch(event, args):
    # Port 0 is how a program looks for a free port.
    binds = event == "socket.bind" and isinstance(args[1], tuple) and args[1][1]
    if not binds and event != "os.exec":
        return
    if not any(isinstance(each, apps) for each in gc.get_objects()):
        finish("another server serves")
    # Another server may serve the app, or the file starts a server of metrics before the app.
    timer = threading.Timer(5, finish, ["an app serves"])
    timer.daemon = True
    timer.start()

for app in apps:
    app.run = run
sys.addaudithook(watch)
script = sys.argv[1]
sys.argv = [script]
sys.path.insert(0, str(Path(script).parent))
found = runpy.run_path(script, run_name="__main__")
finish("an app was made" if any(isinstance(value, apps) for value in found.values()) else "no app was made")
"""
_START_S = 120.0
_APPS = "and no BedrockAgentCoreApp of agent_wrapper.bedrock_agentcore"


def check_agent(script: Path, *, runs_file: bool = True) -> CheckResult:
    """Run an agent's file in another process, as a container does, until it serves.

    Without `runs_file`, the runtime imports the app from the file and runs it itself, so the file need not serve."""
    argv = [sys.executable, "-c", _START_AGENT, str(script.absolute())]
    folder = script.absolute().parent
    if not script.is_file():
        return CheckResult("problem", "agent", f"there is no agent at {script}")
    try:
        done = subprocess.run(
            argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_S, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"{script} does not serve within {_START_S:.0f} s: import and prepare less before `app.run()`"
        return CheckResult("problem", "agent", text)
    how = (done.stdout.splitlines() or [""])[-1]
    if done.returncode == 0 and (how == "an app serves" or (how == "an app was made" and not runs_file)):
        return CheckResult("ok", "agent", f"{script} can be imported{' and serves' if runs_file else ''}")
    if done.returncode == 0 and how == "another server serves":
        return CheckResult("warning", "agent", f"{script} serves, but it makes no RolloutApp, {_APPS}")
    if done.returncode == 0:
        made = f" It makes no RolloutApp, {_APPS}" if how == "no app was made" else ""
        return CheckResult("problem", "agent", f"{script}: {NOT_SERVING_TEXT}{made}", NOT_SERVING)
    silent = f"it exits with code {done.returncode} before it serves"
    last = (done.stderr.strip().splitlines() or [silent])[-1]
    lines = re.findall(rf'File "{re.escape(str(script.absolute()))}", line (\d+)', done.stderr)
    where = f", line {lines[-1]}" if lines else ""
    return CheckResult("problem", "agent", f"{script}{where}: {last}")


# --- engines ----------------------------------------------------------------------------------------------


def _check_engines(config: RolloutConfig) -> Iterator[CheckResult]:
    serving = config.serving
    if serving.kind == "external":
        with ThreadPoolExecutor(16) as pool:
            yield from pool.map(lambda url: _check_listens("serving.urls", url), serving.urls)
    elif serving.kind == "process":
        try:
            python = interpreter(serving)
        except ConfigError as error:
            yield CheckResult("problem", "serving.python", str(error))
            return
        if serving.python is not None and not os.access(serving.python, os.X_OK):
            yield CheckResult("problem", "serving.python", f"{python} is no program that can be run")
        elif serving.python is None and serving.device == "cuda" and importlib.util.find_spec(serving.engine) is None:
            yield CheckResult(
                "problem",
                "serving.python",
                f"{CPU_ENGINES[serving.engine].title} is not installed in this environment: "
                + _INSTALL_ENGINE.format(engine=serving.engine, version=CPU_ENGINES[serving.engine].version),
            )
        else:
            yield CheckResult("ok", "serving.python", f"engines run with {python}")
        if serving.device == "cuda":
            assert serving.servers != "auto", "the settings refuse it"
            yield _check_gpus(serving.servers * serving.gpus_per_server)


def _check_router(config: RolloutConfig) -> Iterator[CheckResult]:
    if config.router.kind == "smg":
        try:
            check_router_installed(config.router)
        except ConfigError as error:
            yield CheckResult("problem", "router.kind", str(error))
        else:
            yield CheckResult("ok", "router.kind", "smg is installed")


def _check_listens(setting: str, url: str) -> CheckResult:
    """Connect without a request, which could reach an engine whose memory a trainer has taken."""
    parts = urlsplit(url)
    address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError as error:
        why = error.strerror or error
        return CheckResult("warning", setting, f"nothing listens at {url} yet ({why}): start that server")
    return CheckResult("ok", setting, f"something listens at {url}")


def _check_gpus(wanted: int) -> CheckResult:
    found = _count_gpus()
    if found < wanted:
        return CheckResult(
            "problem",
            "serving.device",
            f"the engines need {count(wanted, 'GPU')} (serving.servers and the parallel sizes), and this machine "
            f"shows {found:g}: lower those settings, or set serving.device=cpu",
        )
    return CheckResult("ok", "serving.device", f"the engines use {count(wanted, 'GPU')}")


def _count_gpus() -> float:
    """Return the number of GPUs that an engine sees; infinity if that is not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return math.inf if Path("/dev/nvidia0").exists() else 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return math.inf
    return sum(line.startswith("GPU ") for line in listed.splitlines())


# --- ports and addresses ----------------------------------------------------------------------------------


def _check_ports(config: RolloutConfig) -> Iterator[CheckResult]:
    """Bind the ports. Those of a run that resumes may still be held by its earlier servers, which are ending."""
    gateway, router = config.gateway, config.router
    wanted = [("router.port", "the router", router.host, [router.port])]
    if gateway.kind == "process":
        ports = [gateway.port and gateway.port + shard for shard in range(gateway.processes)]
        wanted.append(("gateway.port", gateway_name(gateway, 0), gateway.host, ports))
    observe = config.observe
    if observe.metrics_port is not None:
        wanted.append(("observe.metrics_port", "the metrics endpoint", observe.metrics_host, [observe.metrics_port]))
    if (config.run_dir / "gateway").exists():
        return
    for setting, name, host, ports in wanted:
        try:
            for port in ports:
                require_port(host, port, name, setting)
        except StartupError as error:
            host_setting = setting.replace("port", "host")
            free = str(error).startswith("no port is free")
            text = f"{error}: set {host_setting} to an address of this machine" if free else str(error)
            yield CheckResult("problem", host_setting if free else setting, text)
        else:
            numbers = ", ".join(str(port) for port in ports if port) or "any port"
            yield CheckResult("ok", setting, f"{name} can listen on {host}, {numbers}")
    if gateway.kind == "process":
        try:
            check_certificate(gateway)
        except StartupError as error:
            yield CheckResult("problem", "gateway.tls_certificate", str(error))


def _check_addresses(config: RolloutConfig) -> Iterator[CheckResult]:
    """Check the address that agents are given, as far as it can be judged from here."""
    if config.gateway.kind != "process" and config.gateway.public_url is None and config.relay is None:
        # Each gateway's machine has its own address.
        return
    setting = "relay.public_url" if config.relay is not None else "gateway.public_url"
    gateway = public_gateway_config(config).gateway
    url = public_url(gateway, 0, f"http://{host_port(local_address(gateway.host), gateway.port)}".removesuffix(":0"))
    if not is_loopback(urlsplit(url).hostname or ""):
        yield CheckResult("ok", setting, f"agents reach the gateway at {url}")
        return
    agents = config.runtime.agents_host
    if agents is None:
        text = f"agents are told to call {url}, which works only on this machine: for others, set it to auto"
        yield CheckResult("warning", setting, text)
    elif _is_here(agents):
        yield CheckResult("ok", setting, "agents run on this machine and reach the gateway by its loopback address")
    else:
        tunnel = gateway.public_url is not None and not isinstance(config.runtime, AgentCoreConfig)
        yield CheckResult(
            "warning" if tunnel else "problem",
            setting,
            f"agents run at {agents} and would call {url}, which is their own loopback address. Set gateway.host to "
            "0.0.0.0, gateway.port, and gateway.public_url to an address that leads here; or use a relay",
        )


def _check_collector(config: RolloutConfig) -> Iterator[CheckResult]:
    if config.observe.otlp_endpoint is None:
        return
    try:
        check_installed()
    except ConfigError as error:
        yield CheckResult("problem", "observe.otlp_endpoint", str(error))
    else:
        yield _check_listens("observe.otlp_endpoint", config.observe.otlp_endpoint)


def _is_here(host: str) -> bool:
    """Return whether a name or an address is one of this machine."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


# --- folders ----------------------------------------------------------------------------------------------


def _check_output_dir(config: RolloutConfig) -> Iterator[CheckResult]:
    folder = config.output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        disk = shutil.disk_usage(folder)
        free = disk.free
    except OSError as error:
        why = f"{config.output_dir} cannot be written ({folder}: {error.strerror or error})"
        yield CheckResult("problem", "output_dir", f"{why}: change its permissions, or set another folder")
        return
    kept = size(min(budget(disk.total, config.storage.local_copies_gb), max(0, free - reserve(disk.total))))
    text = f"{config.output_dir} can be written, with {size(free)} free, and up to {kept} for copies of results"
    if free >= _LOW_BYTES:
        yield CheckResult("ok", "output_dir", text)
        return
    full = free < _FULL_BYTES
    text = f"the disk of {config.output_dir} is {'full' if full else 'nearly full'}: {size(free)} free. Free space"
    yield CheckResult("problem" if full else "warning", "output_dir", f"{text}, or set a folder on another disk")


# --- versions ---------------------------------------------------------------------------------------------


def check_packages() -> CheckResult:
    """Compare what is installed here with what this package requires."""
    wrong, shown = [], [f"Python {platform.python_version()}"]
    for needed, optional in _requirements():
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            if not optional:
                wrong.append(f"{needed.name} is not installed, and {needed.name}{needed.specifier} is needed")
            continue
        if needed.name in _SHOWN:
            shown.append(f"{needed.name} {version}")
        if not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} {version} is installed, and {needed.name}{needed.specifier} is needed")
    if wrong:
        return CheckResult("problem", "versions", f"{'; '.join(sorted(wrong))}: {_INSTALL}")
    return CheckResult("ok", "versions", ", ".join(shown))


def _requirements(*extras: str) -> Iterator[tuple[Requirement, bool]]:
    """Yield what this package requires for training, and whether a run works without it."""
    for text in metadata.requires(_PACKAGE) or ():
        needed = Requirement(text)
        for extra in extras or ("trainer", "smg", "verl"):
            applies = needed.marker is None or needed.marker.evaluate({"extra": extra})
            if applies and needed.name != _PACKAGE:
                yield needed, extra != "trainer"
                break


async def check_engine_version(config: RolloutConfig) -> list[CheckResult]:
    """Compare the SGLang of the engines' interpreter with those that this package, or verl, names."""
    if config.serving.kind != "process" or config.serving.engine != "sglang":
        return []
    try:
        asked = await run_child([str(interpreter(config.serving)), "-c", _ASK_SGLANG])
        version = asked.stdout.decode().strip()
    except (ConfigError, OSError):
        version = ""
    if not version:
        # The check of serving.python has reported it.
        return []
    known = {str(needed.specifier) for needed, _ in _requirements("sglang") if needed.name == "sglang"}
    with contextlib.suppress(metadata.PackageNotFoundError):
        of_verl = [Requirement(text) for text in metadata.requires("verl") or ()]
        known |= {str(needed.specifier) for needed in of_verl if needed.name == "sglang"}
    if any(Requirement(f"sglang{each}").specifier.contains(version, prereleases=True) for each in known):
        return [CheckResult("ok", "serving.python", f"sglang {version}", "sglang-version")]
    text = f"sglang {version} has not been tried with this package: install sglang{' or sglang'.join(sorted(known))}"
    return [CheckResult("warning", "serving.python", text, "sglang-version")]


# --- open files -------------------------------------------------------------------------------------------


def check_open_files(config: RolloutConfig) -> CheckResult:
    """Compare the limit of open files with the connections of this process and of a gateway."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in limits)
    calls = config.gateway.max_concurrent_calls
    if config.gateway.kind == "process" and hard < needed_files(calls):
        text = (
            f"gateway.max_concurrent_calls={calls} takes {needed_files(calls):,} open files, and this machine allows "
            f"a process {hard:,.0f}: raise that (`ulimit -Hn`), or lower the setting and raise gateway.processes"
        )
        return CheckResult("problem", "gateway.max_concurrent_calls", text, "open-files")
    invokes = min(256, config.runtime.max_sessions)
    if config.runtime.invokes_last:
        # The run raises the limit.
        soft, invokes = hard, invokes + config.runtime.max_sessions
    own = invokes + config.collect.max_fetches + config.queue.receivers + _OTHER_FILES
    if soft < own:
        text = f"this process may open {soft:,.0f} files, and a run takes {own:,}: raise that (`ulimit -n {own}`)"
        return CheckResult("problem", "open files", text, "open-files")
    return CheckResult(
        "ok", "open files", f"this process may open {soft:,.0f}, and a run takes {own:,}", "open-files"
    )
