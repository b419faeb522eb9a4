"""S3, SQS and AgentCore's data plane by their wire protocols, on one port, with agents in the same process.

moto, which the local cloud runs, delivers 200 messages a second. The benchmarks need some thousand calls a second,
a fixed latency for each, and agents whose publishing costs no call. Signatures are not checked.
"""

import asyncio
import contextlib
import hashlib
import json
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, quote

from http_server import Answer, Request, Response, json_response, listen

from agent_wrapper.contract import REQUEST_FIELD

ACCOUNT, REGION = "000000000000", "us-east-1"
ARN = f"arn:aws:bedrock-agentcore:{REGION}:{ACCOUNT}:runtime/load-0123456789"
SESSION = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
_ENGINE_PATHS = {
    *("/health", "/get_model_info", "/model_info", "/get_server_info", "/server_info", "/v1/models", "/ping")
}


# --- S3 ---------------------------------------------------------------------------------------------------


class S3:
    """Objects by bucket and key. Buckets exist once they are named; there are no multipart uploads and versions."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[tuple[bytes, ...], str, float]] = {}  # body, ETag, time

    def put(self, bucket: str, key: str, *body: bytes) -> str:
        """Return the ETag."""
        etag = f'"{uuid.uuid4().hex}"'
        self._objects[f"{bucket}/{key}"] = body, etag, time.time()
        return etag

    def has(self, bucket: str, key: str) -> bool:
        return f"{bucket}/{key}" in self._objects

    def handle(self, request: Request) -> tuple[str, Response]:
        """Return the operation, and the answer."""
        place = request.path[1:]
        if not place.partition("/")[2]:
            return ("ListObjectsV2", self._list(request, place)) if request.method == "GET" else ("", Response())
        found = self._objects.get(place)
        match request.method:
            case "PUT":
                return "PutObject", self._put(request, place)
            case "DELETE":
                self._objects.pop(place, None)
                return "DeleteObject", Response(204)
            case method:
                response = _s3_error(404, "NoSuchKey") if found is None else _sent(request, *found)
                response.bodiless = method == "HEAD"
                return f"{method.title()}Object", response

    def _put(self, request: Request, place: str) -> Response:
        _, etag, _ = self._objects.get(place, ((), "", 0.0))
        wanted = request.headers.get("if-match", etag)
        if (etag and request.headers.get("if-none-match") == "*") or wanted != etag:
            return _s3_error(412 if etag else 404, "PreconditionFailed" if etag else "NoSuchKey")
        bucket, _, key = place.partition("/")
        return Response(headers=f"ETag: {self.put(bucket, key, request.body)}\r\n")

    def _list(self, request: Request, bucket: str) -> Response:
        """List up to 1,000 keys, without folders."""
        bucket, asked = bucket.rstrip("/"), dict(parse_qsl(request.query, keep_blank_values=True))
        prefix, limit = asked.get("prefix", ""), int(asked.get("max-keys", 1000))
        after = f"{bucket}/" + max(asked.get("start-after", ""), asked.get("continuation-token", ""))
        named = sorted(name for name in self._objects if name.startswith(f"{bucket}/{prefix}") and name > after)
        listed = named[:limit]
        token = (
            f"<NextContinuationToken>{_key(listed[-1])}</NextContinuationToken>" if named[limit:] and listed else ""
        )
        items = "".join(
            f"<Contents><Key>{_key(name)}</Key><LastModified>"
            f"{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(modified))}</LastModified>"
            f"<ETag>{etag}</ETag><Size>{sum(map(len, body))}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name in listed
            for body, etag, modified in [self._objects[name]]
        )
        return _xml(
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
            f"<Prefix>{quote(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys><KeyCount>{len(listed)}</KeyCount>"
            f"<EncodingType>url</EncodingType><IsTruncated>{'true' if token else 'false'}</IsTruncated>{token}{items}"
            "</ListBucketResult>",
        )


def _key(place: str) -> str:
    return quote(place.partition("/")[2])


def _sent(request: Request, body: tuple[bytes, ...], etag: str, modified: float) -> Response:
    headers = f"ETag: {etag}\r\nLast-Modified: {formatdate(modified, usegmt=True)}\r\n"
    if span := request.headers.get("range", "").removeprefix("bytes="):
        first, _, last = span.partition("-")
        whole = b"".join(body)
        headers += f"Content-Range: bytes {span}/{len(whole)}\r\n"
        return Response(206, (whole[int(first) : int(last) + 1 if last else None],), headers)
    return Response(200, body, headers)


def _s3_error(status: int, code: str) -> Response:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message><RequestId>1</RequestId></Error>", status)


def _xml(text: str, status: int = 200) -> Response:
    return Response(status, (text.encode(),), "Content-Type: application/xml\r\n")


# --- SQS --------------------------------------------------------------------------------------------------


Message = dict[str, Any]
"""A message as ReceiveMessage returns it."""


class Queue:
    """Messages in the order in which they were sent. There is no dead-letter queue."""

    def __init__(self, url: str, visibility_s: float) -> None:
        self.url, self.visibility_s = url, visibility_s
        self.visible: deque[Message] = deque()
        self.hidden: dict[str, tuple[Message, asyncio.TimerHandle]] = {}  # by receipt, until it is visible again
        self._arrived = asyncio.Event()

    def send(self, body: str) -> Message:
        message = {
            "MessageId": uuid.uuid4().hex,
            "MD5OfBody": hashlib.md5(body.encode(), usedforsecurity=False).hexdigest(),
            "Body": body,
            "Attributes": {"SentTimestamp": str(int(time.time() * 1000)), "ApproximateReceiveCount": "0"},
        }
        self._show(message)
        return message

    def _show(self, message: Message) -> None:
        self.visible.append(message)
        self._arrived.set()

    async def receive(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return messages as soon as there is one."""
        limit, wait_s = int(asked.get("MaxNumberOfMessages", 1)), float(asked.get("WaitTimeSeconds", 0))
        if wait_s and not self.visible:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not self.visible:
                        self._arrived.clear()
                        await self._arrived.wait()
        taken = []
        while self.visible and len(taken) < limit:
            message = self.visible.popleft()
            receives = int(message["Attributes"]["ApproximateReceiveCount"]) + 1
            message["Attributes"]["ApproximateReceiveCount"] = str(receives)
            message["ReceiptHandle"] = f"{message['MessageId']}.{receives}"
            self._hide(message, float(asked.get("VisibilityTimeout", self.visibility_s)))
            taken.append(message)
        return {"Messages": taken} if taken else {}

    def _hide(self, message: Message, seconds: float) -> None:
        receipt = message["ReceiptHandle"]
        timer = asyncio.get_running_loop().call_later(seconds, self.hide, receipt, 0.0)
        self.hidden[receipt] = message, timer

    def hide(self, receipt: str, seconds: float) -> None:
        """Hide a received message for some more time; 0 shows it."""
        if message := self.delete(receipt):
            if seconds:
                self._hide(message, seconds)
            else:
                self._show(message)

    def delete(self, receipt: str) -> Message | None:
        message, timer = self.hidden.pop(receipt, (None, None))
        if timer is not None:
            timer.cancel()
        return message


class Sqs:
    """Queues by name. They exist once they are created."""

    def __init__(self) -> None:
        self._queues: dict[str, Queue] = {}

    def send(self, url: str, body: str) -> None:
        """Send a message of an agent in this process, which costs no call."""
        self._queues[url.rpartition("/")[2]].send(body)

    def handle(self, operation: str, asked: dict[str, Any], host: str) -> Response:
        """Answer any call but ReceiveMessage."""
        name = asked.get("QueueName") or asked["QueueUrl"].rpartition("/")[2]
        if operation == "CreateQueue" and name not in self._queues:
            visibility_s = float(asked.get("Attributes", {}).get("VisibilityTimeout", 30))
            self._queues[name] = Queue(f"http://{host}/{ACCOUNT}/{name}", visibility_s)
        queue = self._queues.get(name)
        if queue is None:
            return _no_queue()
        if operation.endswith("Batch"):
            one = operation.removesuffix("Batch")
            made = [{"Id": entry["Id"], **self._do(queue, one, entry)} for entry in asked["Entries"]]
            return json_response({"Successful": made, "Failed": []})
        return json_response(self._do(queue, operation, asked))

    async def receive(self, asked: dict[str, Any]) -> Response:
        queue = self._queues.get(asked["QueueUrl"].rpartition("/")[2])
        return _no_queue() if queue is None else json_response(await queue.receive(asked))

    def _do(self, queue: Queue, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "SendMessage":
                message = queue.send(asked["MessageBody"])
                return {"MessageId": message["MessageId"], "MD5OfMessageBody": message["MD5OfBody"]}
            case "DeleteMessage":
                queue.delete(asked["ReceiptHandle"])
            case "ChangeMessageVisibility":
                queue.hide(asked["ReceiptHandle"], float(asked["VisibilityTimeout"]))
            case "DeleteQueue":
                del self._queues[queue.url.rpartition("/")[2]]
            case "GetQueueAttributes":
                attributes = {
                    "QueueArn": f"arn:aws:sqs:{REGION}:{ACCOUNT}:{queue.url.rpartition('/')[2]}",
                    "ApproximateNumberOfMessages": str(len(queue.visible)),
                    "ApproximateNumberOfMessagesNotVisible": str(len(queue.hidden)),
                    "ApproximateNumberOfMessagesDelayed": "0",
                    "VisibilityTimeout": f"{queue.visibility_s:g}",
                }
                names = asked.get("AttributeNames", [])
                # An attribute that is unset is left out.
                wanted = attributes if "All" in names else attributes.keys() & names
                return {"Attributes": {name: attributes[name] for name in wanted}}
            case _:
                return {"QueueUrl": queue.url}
        return {}


def _no_queue() -> Response:
    error = "QueueDoesNotExist"
    return json_response({"__type": f"com.amazonaws.sqs#{error}", "message": error}, 400)


# --- AgentCore, and all of it on one port -------------------------------------------------------------------


class Cloud:
    """The services, and a runtime. Latencies are in seconds.

    A call takes effect when it arrives. A long poll is answered as soon as a message is visible, plus the latency.

    A subclass has the sessions: `begin_ours`, `begin_by_s3` and `call_by_http` for agents of this project and for the
    toolkit's by S3 and by HTTP, `stop`, which returns whether the session was open, and `control`, which returns what
    `/_emulator/NAME` answers.
    """

    def __init__(self, *, s3_s: float = 0.0, sqs_s: float = 0.0, runtime_s: float = 0.0) -> None:
        self.calls: Counter[str] = Counter()
        self.s3, self.sqs = S3(), Sqs()
        self._latencies_s = s3_s, sqs_s, runtime_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def invoke(self, session_id: str, payload: Any) -> Any:
        """Return the answer of the session's container."""
        if call := payload.get("_agentcore_runtime"):
            name = call["invocation_id"]
            state = self.call_by_http(session_id, name, call["operation"] == "start", payload)
            return {"version": 1, "invocation_id": name, **state}
        asked = payload[REQUEST_FIELD]
        if "rollout_id" in asked:
            self.begin_ours(session_id, asked)
            return {"status": "accepted"}
        key = f"{asked['exp_id']}/{asked['input_id']}/{session_id}.json"
        self.begin_by_s3(session_id, key, payload)
        return {"status": "processing", "s3_bucket": asked["s3_bucket"], "result_key": key}

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Yield the URL."""
        server = await listen(self._handle, port)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    def _handle(self, request: Request, answer: Answer) -> None:
        path, (s3_s, sqs_s, runtime_s) = request.path, self._latencies_s
        if target := request.headers.get("x-amz-target"):
            operation, asked = target.partition(".")[2], json.loads(request.body or b"{}")
            self.calls[operation] += 1
            if operation == "ReceiveMessage":
                self._answer_later(self.sqs.receive(asked), answer, sqs_s)
            else:
                answer(self.sqs.handle(operation, asked, request.headers["host"]), sqs_s)
        elif path.startswith("/runtimes/"):
            self._answer_later(self._run(request), answer, runtime_s)
        elif path.startswith("/_emulator/"):
            answer(json_response(self.control(path.rpartition("/")[2])), 0)
        elif path in _ENGINE_PATHS:
            answer(json_response({}), 0)
        else:
            operation, response = self.s3.handle(request)
            self.calls[operation] += 1
            answer(response, s3_s)

    def _answer_later(self, response: Awaitable[Response], answer: Answer, latency_s: float) -> None:
        async def run() -> None:
            found = _refused(500, "InternalServerException")
            try:
                found = await response
            finally:
                answer(found, latency_s)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: Request) -> Response:
        session_id = request.headers.get(SESSION.lower(), "")
        if request.path.endswith("/invocations"):
            self.calls["InvokeAgentRuntime"] += 1
            found = await self.invoke(session_id, json.loads(request.body))
            return json_response(found, headers=f"{SESSION}: {session_id}\r\n")
        if request.path.endswith("/stopruntimesession"):
            self.calls["StopRuntimeSession"] += 1
            if await self.stop(session_id):
                return json_response({"runtimeSessionId": session_id, "statusCode": 200})
            return _refused(404, "ResourceNotFoundException")
        return _refused(403, "AccessDeniedException")  # the control plane


def _refused(status: int, code: str) -> Response:
    return json_response({"message": code}, status, f"x-amzn-ErrorType: {code}\r\n")
