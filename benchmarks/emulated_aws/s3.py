"""S3: objects and their listings."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import quote
from xml.sax.saxutils import escape

from emulated_aws.http_server import Answer, Request, Response


@dataclass(slots=True)
class Object:
    body: tuple[bytes, ...]
    etag: str
    modified: float

    @property
    def size(self) -> int:
        return sum(map(len, self.body))


class S3:
    """Buckets, which exist once they are named. Multipart uploads and versions are not supported."""

    def __init__(self, latency_s: float, calls: Counter[str]) -> None:
        self._latency_s = latency_s
        self._calls = calls
        self._objects: dict[str, dict[str, Object]] = defaultdict(dict)
        self._sorted: dict[str, list[str]] = defaultdict(list)
        self._etags = itertools.count(1)

    def put(self, bucket: str, key: str, *body: bytes) -> Object:
        stored = Object(body, f'"{next(self._etags):032x}"', time.time())
        if key not in self._objects[bucket]:
            insort(self._sorted[bucket], key)
        self._objects[bucket][key] = stored
        return stored

    def has(self, bucket: str, key: str) -> bool:
        return key in self._objects[bucket]

    def handle(self, request: Request, answer: Answer) -> None:
        bucket, _, key = request.path[1:].partition("/")
        operation, response = self._respond(request, bucket, key)
        self._calls[operation] += 1
        response.headers += f"Date: {formatdate(usegmt=True)}\r\nServer: AmazonS3\r\n"
        answer(response, self._latency_s)

    def _respond(self, request: Request, bucket: str, key: str) -> tuple[str, Response]:
        match request.method, bool(key):
            case "GET", True:
                return "GetObject", self._get(request, bucket, key)
            case "HEAD", True:
                found = self._get(request, bucket, key)
                return "HeadObject", Response(found.status, headers=found.headers, length=sum(map(len, found.body)))
            case "PUT", True:
                return "PutObject", self._put(request, bucket, key)
            case "DELETE", True:
                return "DeleteObject", self._delete(bucket, key)
            case "GET", False:
                return "ListObjectsV2", self._list(request, bucket)
            case "HEAD" | "PUT", False:
                return "HeadBucket" if request.method == "HEAD" else "CreateBucket", Response()
        return request.method, _s3_error(501, "NotImplemented")

    def _get(self, request: Request, bucket: str, key: str) -> Response:
        found = self._objects[bucket].get(key)
        if found is None:
            return _s3_error(404, "NoSuchKey")
        modified = formatdate(found.modified, usegmt=True)
        headers = f"ETag: {found.etag}\r\nLast-Modified: {modified}\r\nContent-Type: binary/octet-stream\r\n"
        span = request.text(b"range").removeprefix("bytes=")
        if not span:
            return Response(200, found.body, headers)
        first, _, last = span.partition("-")
        body = b"".join(found.body)[int(first) : int(last) + 1 if last else None]
        return Response(206, (body,), f"{headers}Content-Range: bytes {span}/{found.size}\r\n")

    def _put(self, request: Request, bucket: str, key: str) -> Response:
        before = self._objects[bucket].get(key)
        wanted = request.text(b"if-match")
        if before is not None and request.text(b"if-none-match") == "*":
            return _s3_error(412, "PreconditionFailed")
        if wanted and before is None:
            return _s3_error(404, "NoSuchKey")
        if wanted and before is not None and before.etag != wanted:
            return _s3_error(412, "PreconditionFailed")
        return Response(headers=f"ETag: {self.put(bucket, key, request.body).etag}\r\n")

    def _delete(self, bucket: str, key: str) -> Response:
        if self._objects[bucket].pop(key, None) is not None:
            self._sorted[bucket].remove(key)
        return Response(204)

    def _list(self, request: Request, bucket: str) -> Response:
        """List up to 1,000 keys, without folders."""
        asked = request.arguments()
        prefix, limit = asked.get("prefix", ""), int(asked.get("max-keys", 1000))
        after = max(asked.get("start-after", ""), asked.get("continuation-token", ""))
        keys = self._sorted[bucket]
        at = max(bisect_left(keys, prefix), bisect_right(keys, after) if after else 0)
        found = list(itertools.takewhile(lambda key: key.startswith(prefix), keys[at : at + limit + 1]))
        listed, more = found[:limit], len(found) > limit
        token = f"<NextContinuationToken>{quote(listed[-1])}</NextContinuationToken>" if more and listed else ""
        items = "".join(_listed(key, self._objects[bucket][key]) for key in listed)
        xml = (
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
            f"<Prefix>{quote(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys><KeyCount>{len(listed)}</KeyCount>"
            f"<EncodingType>url</EncodingType><IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{items}"
            "</ListBucketResult>"
        )
        return Response(200, (xml.encode(),), "Content-Type: application/xml\r\n")


def _listed(key: str, stored: Object) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
    return (
        f"<Contents><Key>{quote(key)}</Key><LastModified>{modified}</LastModified><ETag>{escape(stored.etag)}</ETag>"
        f"<Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _s3_error(status: int, code: str) -> Response:
    xml = f"<Error><Code>{code}</Code><Message>{code}</Message><RequestId>1</RequestId></Error>"
    return Response(status, (xml.encode(),), "Content-Type: application/xml\r\n")
