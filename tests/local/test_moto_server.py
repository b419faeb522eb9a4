"""Where moto alone is kinder than S3."""

import socket
from urllib.parse import urlsplit

import httpx


def test_a_write_whose_body_is_cut_stores_nothing(storage, run_id):
    url = urlsplit(storage.endpoint_url)
    path = f"/{storage.bucket}/{run_id}/cut"
    with socket.create_connection((url.hostname, url.port)) as client:
        client.sendall(f"PUT {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 9\r\n\r\nfour".encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{storage.endpoint_url}{path}", timeout=60).status_code == 404
