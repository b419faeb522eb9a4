"""A stand-in for an SGLang server: `fake_engine.py HOST PORT [healthy|sick|broken]`.

`sick` never becomes healthy, `broken` ends at once with a last word. /generate answers with this process's id, so a
test sees which engine served it.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

host, port = sys.argv[1], int(sys.argv[2])
mode = sys.argv[3] if len(sys.argv) > 3 else "healthy"
if mode == "broken":
    sys.exit("RuntimeError: weights are made of cheese")

MODEL = {"model_path": "fake", "served_model_name": "fake", "is_generation": True, "tokenizer_path": ""}
PAGES = {
    "/model_info": MODEL,
    "/get_model_info": MODEL,
    "/server_info": {**MODEL, "tp_size": 1, "dp_size": 1, "version": "0.0"},
    "/v1/models": {"object": "list", "data": [{"id": "fake", "object": "model"}]},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path in ("/health", "/health_generate"):
            self.answer(503 if mode == "sick" else 200, {})
        elif self.path in PAGES:
            self.answer(200, PAGES[self.path])
        else:
            self.answer(404, {"error": self.path})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer(200, {"text": "", "output_ids": [1], "meta_info": {"id": "x"}, "pid": os.getpid()})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        if os.environ.get("FAKE_ENGINE_LOG"):
            super().log_message(format, *args)


class Server(ThreadingHTTPServer):
    request_queue_size = 128


Server((host, port), Handler).serve_forever()
