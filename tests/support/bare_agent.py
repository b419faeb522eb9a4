"""An agent that starts within milliseconds: a web server of the standard library, without the wrapper.

With an argument, the name of its image, it answers an invoke with that and with GREETING of its environment.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def answer(self, code, **body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(200, status="HealthyBusy", time_of_last_update=1)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"fail" in body:
            self.answer(500)
        elif sys.argv[1:]:
            self.answer(200, image=sys.argv[1], greeting=os.environ.get("GREETING"))
        else:
            self.answer(200, status="accepted")

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Handler).serve_forever()
