"""Addresses of servers in IPv4 and IPv6: bind them, compare them, and write them into URLs."""

import socket
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from typing import Annotated

from pydantic import AfterValidator

# The loopback address that reaches a server on all addresses. The wildcard addresses are only compared.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def host_port(host: str, port: int | str) -> str:
    """Return `HOST:PORT`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_everywhere(host: str) -> bool:
    """Return whether a server that listens on `host` listens on all addresses of its machine."""
    return host in _EVERYWHERE


def local_address(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return _EVERYWHERE.get(host, host)


def listen_addresses(host: str) -> Sequence[str]:
    """Return the addresses for `asyncio`'s servers: `::` serves IPv4, too, as with most servers."""
    return ["::", "0.0.0.0"] if host == "::" else [host]  # noqa: S104


def bound_port(host: str, port: int, *, reuse: bool) -> int:
    """Bind `port`, or any port if it is 0, on each address of `host`; close the sockets and return the port.

    With `reuse`, connections that a former server left do not count. Raises OSError.
    """
    for address in listen_addresses(host):
        for family, kind, protocol, _, found in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((found[0], port, *found[2:]))
                port = int(probe.getsockname()[1])
    return port


def check_listen_address(host: str) -> str:
    """Return the address as `ipaddress` writes it, or the host name unchanged. Raises ValueError."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ip_address(bare)
    except ValueError:
        if not bare or set(bare) & set(":/[]@ "):
            raise ValueError(f"{host!r} is not an address to listen on, such as 127.0.0.1, 0.0.0.0 or ::") from None
        return bare
    if isinstance(address, IPv6Address) and address.scope_id:
        raise ValueError(f"{host!r} is a link-local address, which URLs cannot contain: choose another")
    return str(address)


ListenAddress = Annotated[str, AfterValidator(check_listen_address)]
