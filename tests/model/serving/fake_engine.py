"""A stand-in for an SGLang server on a GPU: `fake_engine.py HOST PORT [MODE]`.

The mode `sick` never becomes healthy, `broken` exits at once with an error. Other modes fail to load new weights:
`refuses` (400), `lies` (200 with success false), `hangs`, `dies`, or `mislabels` (loads them, keeps the version).
`refuses` refuses adapters too. Each mode refuses a folder named `bad`, and closes the connection once it has loaded
an adapter from a folder named `lost`. After `/fail_probes`, probes are answered 503.
`/generate` returns the process id and the folders of the weights and of the adapter, so a test sees what served a
request, and takes 10 ms per token. Every start serves the original weights. As on a GPU:

- `/health` generates a token, unless SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0;
- a request that generates while the memory is released kills the server;
- releasing the memory while a request runs kills the server.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

host, port = sys.argv[1], int(sys.argv[2])
mode = sys.argv[3] if len(sys.argv) > 3 else "healthy"
if mode == "broken":
    sys.exit("RuntimeError: weights are made of cheese")

HEALTH_GENERATES = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1") not in ("0", "false")
TOKEN_S = 0.01
MODEL = {"model_path": "fake", "served_model_name": "fake", "is_generation": True, "tokenizer_path": ""}


def die(why):
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


def say(line):
    sys.stdout.write(f"{line}\n")  # at once: with `print`, another thread may write before the line ends
    sys.stdout.flush()


class Scheduler:
    """The running requests, and the state of the memory."""

    def __init__(self):
        self.changed = threading.Condition()
        self.running = 0
        self.aborts = 0
        self.paused = False
        self.asleep = False
        self.fails_probes = False
        self.version = "0"
        self.folder = "original"
        self.adapters = {}

    def generate(self, tokens, wait_s=None):
        """Generate; return how it ended, with which version and weights, or None after a pause of `wait_s`."""
        with self.changed:
            if not self.changed.wait_for(lambda: not self.paused, wait_s):
                return None
            if self.asleep:
                die("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
            self.running += 1
            say(f"generates {tokens}")
            aborts, until = self.aborts, time.monotonic() + tokens * TOKEN_S
            while self.aborts == aborts and (left := until - time.monotonic()) > 0:
                self.changed.wait(left)
            self.running -= 1
            self.changed.notify_all()
            return "abort" if self.aborts > aborts else "length", self.version, self.folder

    def abort_all(self):
        with self.changed:
            self.aborts += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.running)

    def pause(self, paused):
        with self.changed:
            self.paused = paused
            self.changed.notify_all()
        if paused:
            self.abort_all()

    def load(self, body):
        """Load new weights; return the status and the answer. A failed load leaves weights that are of no version."""
        with self.changed:
            if self.running:  # SGLang has the new weights then, and a cache of the old ones
                return 400, {"success": False, "message": "the cache was not flushed"}
            self.folder = body["model_path"]
            if mode == "hangs":
                self.changed.wait_for(lambda: False)
            if mode == "dies":
                die("RuntimeError: The size of tensor a must match the size of tensor b")
            if mode in ("refuses", "lies") or self.folder.endswith("/bad"):
                self.folder = "half loaded"
                return 200 if mode == "lies" else 400, {"success": False, "message": "Failed to update weights"}
            if mode != "mislabels":
                self.version = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}

    def load_adapter(self, name, folder):
        with self.changed:
            if mode == "refuses" or folder.endswith("/bad") or name in self.adapters:
                return 400, {"success": False, "error_message": "Failed to load"}
            self.adapters[name] = folder
            return 200, {"success": True}

    def unload_adapter(self, name):
        with self.changed:
            if self.adapters.pop(name, None) is None:
                return 400, {"success": False, "error_message": "does not exist"}
            self.changed.wait_for(lambda: not self.running)
            return 200, {"success": True}

    def sleep(self, asleep):
        with self.changed:
            if asleep and self.running:
                die("AssertionError: release_memory_occupation should be called only when server is idle.")
            if asleep == self.asleep:
                die("KeyError: 'weights'")
            self.asleep = asleep


scheduler = Scheduler()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if scheduler.fails_probes and self.path in ("/health", "/health_generate", "/model_info"):
            self.answer(503, {})
        elif self.path in ("/health", "/health_generate"):
            ok = mode != "sick" and (not HEALTH_GENERATES or scheduler.generate(1, wait_s=20) is not None)
            self.answer(200 if ok else 503, {})
        elif self.path in ("/model_info", "/get_model_info"):
            say(f"{self.path} {'fleet' if 'aiohttp' in self.headers.get('user-agent', '') else 'router'}")
            self.answer(200, {**MODEL, "weight_version": scheduler.version})
        elif self.path == "/server_info":
            self.answer(200, {**MODEL, "tp_size": 1, "dp_size": 1, "version": "0.0"})
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        else:
            self.answer(404, {"error": self.path})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        status, reply = 200, {}
        match self.path:
            case "/generate":
                name = body.get("lora_path")
                adapter = scheduler.adapters.get(name)
                if name is not None and adapter is None:
                    self.answer(400, {"error": {"message": f"adapters are not loaded: {name}"}})
                    return
                tokens = body.get("sampling_params", {}).get("max_new_tokens", 1)
                say(f"called for {tokens}")
                ended, version, weights = scheduler.generate(tokens)
                meta = {"id": "x", "weight_version": version, "finish_reason": {"type": ended}}
                reply = {"text": "", "output_ids": [1], "meta_info": meta, "pid": os.getpid(), "weights": weights}
                reply["adapter"] = adapter
            case "/fail_probes":
                scheduler.fails_probes = body["fail"]
            case "/pause_generation":
                scheduler.pause(True)
            case "/continue_generation":
                scheduler.pause(False)
            case "/abort_request":
                scheduler.abort_all()
            case "/flush_cache":
                status = 400 if scheduler.running else 200
            case "/update_weight_version":
                scheduler.version = body["new_version"]
            case "/update_weights_from_disk":
                status, reply = scheduler.load(body)
            case "/load_lora_adapter":
                status, reply = scheduler.load_adapter(body["lora_name"], body["lora_path"])
                if body["lora_path"].endswith("/lost"):
                    self.close_connection = True
                    return
            case "/unload_lora_adapter":
                status, reply = scheduler.unload_adapter(body["lora_name"])
            case "/release_memory_occupation":
                scheduler.sleep(True)
            case "/resume_memory_occupation":
                scheduler.sleep(False)
            case _:
                status = 404
        self.answer(status, reply)

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
