"""Run one gateway as a process on this machine, and send it control requests.

`gateway_fleet` runs several of them, here or on the machines of a Ray cluster.
"""

import contextlib
import hashlib
import logging
import re
import secrets
import socket
import ssl
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from rollout_backend.base.addresses import host_port, is_loopback, local_address
from rollout_backend.base.disk import call_disk
from rollout_backend.config import GatewayConfig, RolloutConfig
from rollout_backend.config.gateway import AUTO
from rollout_backend.core.session_ends import HeartbeatReport
from rollout_backend.errors import ConfigError, ServingError, StartupError
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.run_secret import key_secret, revealed
from rollout_backend.model.serving.server_process import ServerProcess, free_port, require_port

_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=30)

log = logging.getLogger(__name__)


class GatewayProcess:
    """One gateway between agents and the engine (or router) at `engine_url`.

    `secret` signs the session keys. `seal_secret` seals trajectories; without it they carry no seal. `shard` is the
    gateway's number among `gateway.processes`: it refuses the sessions of other shards. `journal` is the folder from
    which a restarted gateway takes its address and its sessions. `node_ip` is this machine's address for other
    machines.

    The control requests, from `revoke` to `stats`, raise ServingError if the gateway does not answer.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engine_url: str,
        log: Path,
        secret: str,
        *,
        seal_secret: str | None,
        shard: int,
        journal: Path,
        trainer_incarnation: str,
        node_ip: str | None = None,
    ) -> None:
        self._trainer_incarnation = trainer_incarnation
        self._adopted: set[str] = set()
        self._paused = False
        self._adapters: dict[str, int] = {}
        self.journal_id = ""
        """Id of the journal for new sessions. Empty before the gateway has started, and if it has no journal."""
        self._journal = journal
        self._config = config
        self._engine_url = engine_url
        self._log = log
        self._secret = secret
        self._seal_secret = seal_secret
        self._control_key = secrets.token_urlsafe(48)
        self._authorization = {"Authorization": f"Bearer {self._control_key}"}
        self._shard = shard
        self._name = gateway_name(config.gateway, shard)
        listened = config.gateway.host
        self._host = node_ip if node_ip and is_loopback(listened) else listened
        self._address = node_ip or local_address(listened)
        self.url = ""
        """The gateway's URL on this machine; empty before `start`."""
        self._port = 0
        self._process: ServerProcess | None = None
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Start the gateway and wait until it is healthy.

        If the journal of a gateway that has served before cannot be opened, for example because the disk does not
        answer, the gateway has none: earlier sessions are lost, and new ones end with the process.

        Raises:
            StartupError: its port is taken, its certificate or journal cannot be used, or it did not become healthy;
                the message includes the end of its log.
        """
        await self.stop()
        config = self._config
        limit = config.gateway.startup_timeout_s
        # Prepare the journal first, because an earlier gateway may hold it and the port.
        try:
            certificate = await call_disk(lambda: check_certificate(config.gateway), limit)
            self.journal_id = await self._prepare_journal(limit)
            port = self._port = await call_disk(self._find_port, limit)
        except TimeoutError:
            raise StartupError(
                f"{self._name} could not read its files within {limit:g} s (gateway.startup_timeout_s): a file "
                "system does not answer"
            ) from None
        previous = revealed(config.gateway.previous_secret)
        settings = GatewaySettings(
            host=self._host,
            port=port,
            model=config.model,
            # Secrets are dumped as stars, and the gateway does not need its public address.
            gateway=config.gateway.model_copy(
                update={"secret": None, "previous_secret": None, "public_url": None},
            ),
            shard=self._shard,
            engine_name=config.serving.engine,
            router=config.router.kind,
            engine_url=self._engine_url,
            model_call_s=config.timeouts.model_call_s,
            max_result_bytes=config.storage.max_result_bytes,
            session_key_s=config.timeouts.session_key_s,
            otlp_endpoint=config.observe.otlp_endpoint,
            secret=self._secret,
            previous_secret=None if previous is None else key_secret(previous, config.run_id),
            control_key=self._control_key,
            seal_secret=self._seal_secret,
            journal=self._journal if self.journal_id else None,
            trainer_incarnation=self._trainer_incarnation,
            adopted=tuple(self._adopted),
            paused=self._paused,
            adapters=self._adapters,
            leave_out=config.training.leave_out,
        )
        self.url = f"{'https' if certificate else 'http'}://{host_port(self._address, port)}"
        # The process is a child of this one, so comparing the certificate is enough: its name does not matter.
        connector = aiohttp.TCPConnector(ssl=certificate) if certificate else None
        self._http = aiohttp.ClientSession(
            timeout=_CONTROL_TIMEOUT, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
        )
        self._process = ServerProcess(
            self._name,
            [sys.executable, "-m", "rollout_backend.model.gateway"],
            self._log,
            stdin=settings.model_dump_json().encode(),
        )
        try:
            await self._process.start()
            await self._process.wait_healthy(self._healthy, limit, "gateway.startup_timeout_s")
        except BaseException:
            await self.stop()
            raise
        try:
            await call_disk(lambda: journal_folder.write_port(self._journal, port))
        except OSError as error:
            log.warning(
                "%s: a restarted trainer may give it another port, because this one cannot be recorded: %s",
                self._name,
                error,
            )

    async def _prepare_journal(self, limit_s: float) -> str:
        """Return the journal's id; empty if it cannot be opened and the gateway has served before."""
        try:
            return await call_disk(lambda: journal_folder.prepare(self._journal), limit_s)
        except journal_folder.JournalHeld as error:
            raise StartupError(str(error)) from None
        except ConfigError as error:
            why = str(error)
        except TimeoutError:
            why = (
                f"{self._name} could not open its journal within {limit_s:g} s (gateway.startup_timeout_s): the file "
                f"system of {self._journal} does not answer"
            )
        # If this gateway has never served, a wrong setting is more likely than a failed disk.
        if not self.url:
            raise StartupError(why)
        log.error("%s. It restarts without a journal, and its earlier sessions are lost", why)
        return ""

    def _find_port(self) -> int:
        """Return the configured port, or else this gateway's previous port if it is free, or else a free one."""
        fixed = self._port or (self._config.gateway.port and self._config.gateway.port + self._shard)
        if fixed:
            return require_port(self._host, fixed, self._name, "gateway.port")
        try:
            return require_port(self._host, journal_folder.read_port(self._journal), self._name, "gateway.port")
        except StartupError:
            return free_port(self._host)

    async def stop(self) -> None:
        """Stop the gateway. Does nothing if it never ran."""
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await self._process.stop()

    async def wait(self) -> str:
        """Wait until the gateway has ended. Return how it ended, with the end of its log."""
        assert self._process is not None, "not started"
        return f"{self._name} {await self._process.wait_ended()}"

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Close these sessions: abort their calls and refuse their keys."""
        await self._control("POST", "/control/revoke", {"session_ids": list(session_ids)})

    async def adopt(self, session_ids: Iterable[str]) -> None:
        """Resume these sessions, which began before the trainer restarted."""
        wanted = list(session_ids)
        # A restarted gateway adopts them too.
        self._adopted.update(wanted)
        await self._control("POST", "/control/adopt", {"session_ids": wanted})

    async def heartbeats(self) -> HeartbeatReport:
        """Return the sessions that sent a heartbeat or call since the last request."""
        heard = await self._control("POST", "/control/heartbeats")
        return HeartbeatReport(frozenset(heard["beats"]), frozenset(heard["calls"]))

    async def reports(self) -> dict[str, Any]:
        """Return what agents of SageMaker's job runtime reported, by session and without the rewards."""
        reports: dict[str, Any] = await self._control("GET", "/control/reports")
        return reports

    async def report_of(self, session_id: str) -> dict[str, Any] | None:
        """Return what the session's agent has reported, or None."""
        report: dict[str, Any] | None = await self._control("GET", f"/control/reports/{quote(session_id)}")
        return report

    async def pause(self) -> None:
        """Hold model calls, even after a restart. Return once none is at an engine."""
        self._paused = True
        await self._control("POST", "/control/pause")

    async def resume(self) -> None:
        """Undo `pause`."""
        self._paused = False
        await self._control("POST", "/control/resume")

    async def set_adapters(self, versions: Mapping[str, int]) -> None:
        """Set the version of each LoRA adapter that model calls name from now on, even after a restart."""
        self._adapters = dict(versions)
        await self._control("POST", "/control/adapters", {"versions": self._adapters})

    async def stats(self) -> GatewayStats:
        """Return the gateway's statistics."""
        return GatewayStats.model_validate(await self._control("GET", "/control/stats"))

    async def _control(self, method: str, path: str, body: object = None) -> Any:
        if self._http is None or self._http.closed:
            raise ServingError(f"{self._name} is not running")
        url = self.url + path
        try:
            async with self._http.request(method, url, json=body, headers=self._authorization) as response:
                response.raise_for_status()
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServingError(f"{self._name} does not answer {path}: {error!r}. Its log is {self._log}") from None

    async def _healthy(self) -> bool:
        """Return whether the gateway answers a probe."""
        assert self._http is not None
        try:
            async with self._http.get(self.url + "/health", headers=self._authorization) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def gateway_name(config: GatewayConfig, shard: int) -> str:
    """Return the gateway's name for messages."""
    return "the gateway" if config.processes == 1 else f"gateway {shard} of {config.processes}"


def public_url(config: GatewayConfig, shard: int, url: str) -> str:
    """Return the URL that agents use for the shard that the training side reaches at `url`."""
    template = config.public_url or url
    if "{host}" in template:
        host = urlsplit(url).hostname or ""
        address = own_address() if not host or is_loopback(host) else host
        template = template.replace("{host}", f"[{address}]" if ":" in address else address)
    # PORT stands for a free port that is not chosen yet.
    port = config.port + shard if config.port else urlsplit(url).port or "PORT"
    return template.replace("{shard}", str(shard)).replace("{port}", str(port)).rstrip("/")


def own_address() -> str:
    """Return this machine's network address, without sending anything; the loopback address if it has no network."""
    # Connecting UDP only looks up the route. These addresses are reserved for documentation.
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def everywhere() -> str:
    """Return the address on which a server for other machines listens: `::` on a machine without IPv4."""
    return "::" if ":" in own_address() else "0.0.0.0"  # noqa: S104


def check_certificate(config: GatewayConfig) -> aiohttp.Fingerprint | None:
    """Return the certificate's fingerprint; None for plain HTTP. Raises StartupError if it does not fit its key."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password function, OpenSSL would prompt on the terminal.
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=lambda: "")
    except OSError as error:
        raise StartupError(
            f"the gateway cannot serve HTTPS with gateway.tls_certificate={config.tls_certificate} and "
            f"gateway.tls_key={config.tls_key}: {error}. Both must be PEM files that fit each other, the key without "
            "a passphrase"
        ) from None
    # openssl writes a name before the certificate, in any encoding.
    text = config.tls_certificate.read_text(errors="replace")
    first = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.S)
    assert first is not None, "load_cert_chain has read it"
    return aiohttp.Fingerprint(hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[0])).digest())


def public_gateway_config(config: RolloutConfig) -> RolloutConfig:
    """Return the settings for the gateways: with a relay, their public URL is the relay's; `auto` is resolved."""
    gateway = config.gateway
    if config.relay is not None:
        changes = {"public_url": f"{config.relay.agents_url}/s/{{shard}}"}
    elif gateway.public_url == AUTO or "://{host}" in (gateway.public_url or ""):
        changes = {"public_url": "http://{host}:{port}"} if gateway.public_url == AUTO else {}
        if gateway.kind == "process" and is_loopback(gateway.host):
            changes["host"] = everywhere()
    else:
        return config
    return config.model_copy(update={"gateway": gateway.model_copy(update=changes)})
