"""Check the address that agents are given: name, certificate, and whether it leads to this machine.

While no gateway listens, a stand-in answers at its ports, so that a load balancer or a tunnel can be tried before
anything is started.
"""

import asyncio
import ipaddress
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from rollout_backend.base import aws
from rollout_backend.base.addresses import host_port, is_everywhere, is_loopback, listen_addresses
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import AgentCoreConfig, GatewayConfig, RolloutConfig, is_placeholder
from rollout_backend.config.gateway import AUTO
from rollout_backend.model.serving.gateway_process import own_address, public_gateway_config, public_url

_TIMEOUT_S = 10.0
_SOON_DAYS = 14
# OpenSSL returns these codes for a chain that ends in no known CA.
_UNKNOWN_CA = frozenset({18, 19, 20, 21})
_BUSY = (502, 503, 504)
# The gateways' /health returns this name.
_SERVER = "rollout-backend"


async def check_public_address(config: RolloutConfig) -> list[CheckResult]:
    """Return what was found about the gateway's, or the relay's, public address. Empty if agents run here."""
    gateway = public_gateway_config(config).gateway
    if config.gateway.public_url == AUTO and config.relay is None and not gateway.port:
        # The port is chosen when the run starts.
        return []
    if gateway.public_url is None and (gateway.kind == "ray" or is_loopback(gateway.host)):
        return []
    setting = "relay.public_url" if config.relay is not None else "gateway.public_url"
    own = own_address() if is_everywhere(gateway.host) else gateway.host
    own_url = f"{'https' if gateway.tls_certificate else 'http'}://{host_port(own, gateway.port)}"
    urls = [public_url(gateway, shard, own_url) for shard in range(gateway.processes)]
    if config.relay is not None:
        urls = [config.relay.agents_url]
    host = urlsplit(urls[0]).hostname or ""
    found = [await _check_name(config, setting, host, plain=urls[0].startswith("http://"))]
    async with AsyncExitStack() as stack:
        token = await _stand_in(stack, config)
        if urls[0].startswith("https://"):
            found.append(await asyncio.to_thread(_check_certificate, setting, urls[0], gateway))
        if found[0].level != "problem":
            answers = await asyncio.gather(*[_ask(setting, url, token) for url in urls])
            found.append(min(answers, key=lambda each: ("problem", "warning", "ok").index(each.level)))
    code = f"import urllib.request as r; print(r.urlopen('{urls[0]}/health', timeout=10).read())"
    text = f'to see whether a container reaches it, run this in one during a run:\npython -c "{code}"'
    return [*found, CheckResult("unchecked", "gateway probe", text, "gateway-probe")]


async def _check_name(config: RolloutConfig, setting: str, host: str, *, plain: bool) -> CheckResult:
    try:
        answer = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        advice = "create its DNS record, or correct it"
        if is_placeholder(config.gateway.public_url):
            advice = "it is an example's. Set the address at which agents reach this machine"
        text = f"the name {host} cannot be resolved ({error.strerror or error}): {advice}"
        return CheckResult("problem", setting, text, "gateway-dns")
    addresses = sorted({str(address[0]) for *_, address in answer})
    text = f"{host} is {', '.join(addresses)}"
    private = all(ipaddress.ip_address(each.partition("%")[0]).is_private for each in addresses)
    runtime = config.runtime
    if private and isinstance(runtime, AgentCoreConfig) and runtime.image is not None and not runtime.subnets:
        text += ", a private address, and the agents are in the public network: set runtime.subnets, or use a relay"
        return CheckResult("warning", setting, text, "gateway-dns")
    if isinstance(runtime, AgentCoreConfig) and plain and not private:
        text += ": keys and conversations travel unencrypted. Use https: gateway.tls_certificate, or a proxy"
        return CheckResult("warning", setting, text, "gateway-dns")
    return CheckResult("ok", setting, text, "gateway-dns")


# --- the certificate --------------------------------------------------------------------------------------


def _check_certificate(setting: str, url: str, gateway: GatewayConfig) -> CheckResult:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 443

    def of_server(context: ssl.SSLContext) -> Any:
        with (
            socket.create_connection((host, port), _TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname=host) as tls,
        ):
            return tls.getpeercert()

    try:
        return _judge(setting, host, of_server)
    except OSError as error:
        if gateway.tls_certificate is None:
            text = f"{host_port(host, port)} shows no certificate ({error.strerror or error})"
            return CheckResult("unchecked", setting, text, "gateway-certificate")
    try:
        return _judge("gateway.tls_certificate", host, lambda context: _shake_hands(gateway, context, host))
    except OSError as error:
        text = f"{gateway.tls_certificate} cannot be used: {error}"
        return CheckResult("problem", "gateway.tls_certificate", text, "gateway-certificate")


def _judge(setting: str, host: str, show: Callable[[ssl.SSLContext], Any]) -> CheckResult:
    """Judge the certificate that `show` verifies and returns. Raises OSError if there is none."""
    name = "gateway-certificate"
    try:
        certificate = show(ssl.create_default_context())
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message
        if error.verify_code in _UNKNOWN_CA:
            text = (
                f"the certificate of {host} is signed by a CA that this machine does not know ({why}): the agents' "
            )
            return CheckResult("warning", setting, f"{text}image must trust it (SSL_CERT_FILE)", name)
        text = f"agents will refuse the certificate of {host}: {why}. Issue one for {host} that is valid"
        return CheckResult("problem", setting, text, name)
    ends = ssl.cert_time_to_seconds(certificate["notAfter"])
    days = (ends - time.time()) / 86400
    text = f"the certificate of {host} is valid until {certificate['notAfter']}, for {days:.0f} days"
    if days < _SOON_DAYS:
        return CheckResult("warning", setting, f"{text}: renew it before the run, which reads it once", name)
    return CheckResult("ok", setting, text, name)


def _shake_hands(gateway: GatewayConfig, client_context: ssl.SSLContext, host: str) -> Any:
    """Return the certificate in the gateway's file, verified as a client of `host` does, without a connection."""
    assert gateway.tls_certificate is not None
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(gateway.tls_certificate, gateway.tls_key, password=lambda: "")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client.getpeercert()


# --- what answers -----------------------------------------------------------------------------------------


async def _stand_in(stack: AsyncExitStack, config: RolloutConfig) -> str | None:
    """Answer at the gateways' ports until `stack` closes. Return the token in the answers, or None."""
    gateway = public_gateway_config(config).gateway
    if gateway.kind != "process" or not gateway.port or config.relay is not None:
        return None
    token = secrets.token_hex(8)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "server": _SERVER, "token": token})

    app = web.Application()
    app.router.add_get("/{path:.*}", health)
    context = None
    try:
        if gateway.tls_certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(gateway.tls_certificate, gateway.tls_key, password=lambda: "")
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for shard in range(gateway.processes):
            for address in listen_addresses(gateway.host):
                await web.TCPSite(runner, address, gateway.port + shard, ssl_context=context).start()
    except OSError:
        # A run's gateway listens there, or the check of the ports has reported why the port cannot be used.
        return None
    return token


async def _ask(setting: str, url: str, token: str | None) -> CheckResult:
    """Ask what answers at one public address. The certificate is checked separately, and not verified here."""
    name = "gateway-answer"
    outside = "From inside, an outside address may not answer: run the probe in a container"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), trust_env=True) as http,
            http.get(f"{url}/health", ssl=False) as reply,
        ):
            status, body = reply.status, await aws.read_up_to(reply, 4096)
    except (aiohttp.ClientError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        text = f"{url} gives no answer ({why}): open the way to the gateway's port. {outside}"
        return CheckResult("warning", setting, text, name)
    if status in _BUSY:
        text = (
            f"{url} answers {status}: the load balancer or tunnel there has reached no gateway yet. It must forward "
        )
        return CheckResult(
            "warning", setting, f"{text}to gateway.host and gateway.port, and check /health there", name
        )
    if token is not None and token.encode() in body:
        return CheckResult("ok", setting, f"{url} leads to this machine", name)
    if status == 200 and (_SERVER.encode() in body or b'"dialer"' in body):
        if token is None:
            what = "a relay" if b'"dialer"' in body else "a gateway that is running"
            return CheckResult("ok", setting, f"{what} answers at {url}", name)
        return CheckResult("problem", setting, f"{url} leads to the gateway of another machine: correct it", name)
    text = f"another server answers at {url} (status {status}): it must lead to gateway.host and gateway.port"
    return CheckResult("problem", setting, text, name)
