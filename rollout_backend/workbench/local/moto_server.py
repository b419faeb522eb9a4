"""Serve moto: `python -m rollout_backend.workbench.local.moto_server 127.0.0.1 5000 < KEY`.

Every user of the machine can reach the port, so requests need the access key that it reads from stdin; an empty line
allows any key.

It takes half the CPU time of `python -m moto.server`, which lists its own folder and opens a connection and a thread
for each request.
"""

import io
import sys
from collections.abc import Callable
from typing import Any

from cheroot.wsgi import Server
from moto import backends
from moto.s3.models import FakeKey
from moto.server import DomainDispatcherApplication, create_backend_app

from rollout_backend.base.local_keys import names_key

# A long poll occupies one thread.
_THREADS = 64
_IDLE_S = 20


def _lock_etags() -> None:
    """Compute an object's ETag under the lock of its readers. Otherwise a concurrent reader may get no bytes."""
    of_key = FakeKey.etag.fget

    def etag(key: FakeKey) -> Any:
        with key.lock:
            return of_key(key)

    FakeKey.etag = property(etag)


_DENIED = b"<Error><Code>InvalidAccessKeyId</Code><Message>This local cloud has another key</Message></Error>"


def serve(host: str, port: int, access_key: str) -> None:
    """Serve until the process ends."""
    _lock_etags()
    modules = frozenset(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: modules
    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        signature = environ.get("HTTP_AUTHORIZATION") or environ.get("QUERY_STRING", "")
        if access_key and not names_key(signature, access_key):
            start_response("403 Forbidden", [("Content-Type", "application/xml"), ("Connection", "close")])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else _DENIED]
        if length := int(environ.get("CONTENT_LENGTH") or 0):
            body = environ["wsgi.input"].read(length)
            if len(body) < length:
                # The client disconnected. Like S3, store nothing.
                start_response("400 Bad Request", [])
                return [b""]
            environ["wsgi.input"] = io.BytesIO(body)
        # moto reads the path as it was sent from RAW_URI.
        environ["RAW_URI"] = environ["REQUEST_URI"]
        return moto(environ, start_response)

    Server((host, port), application, numthreads=_THREADS, request_queue_size=1024, timeout=_IDLE_S).start()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.stdin.readline().strip())
