"""An OpenTelemetry collector in a thread, which keeps the spans that it receives."""

from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from stub_server import StubServer


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    error: str
    links: tuple[tuple[str, str], ...]


class OtlpReceiver(StubServer):
    """Accepts OTLP over HTTP, as protobuf."""

    def __init__(self) -> None:
        super().__init__(self._receive)
        self.spans: list[ReceivedSpan] = []

    def _receive(self, request: Any) -> tuple[int, bytes]:
        assert request.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
            service = _plain(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_received(service, span) for span in scope.spans]
        return 200, b""


def _received(service: str, span: Any) -> ReceivedSpan:
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
    links = tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links)
    error = span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else ""
    return ReceivedSpan(service, span.name, *ids, *times, _plain(span.attributes), error, links)


def _plain(attributes: list[KeyValue]) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, str(kind))
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found
