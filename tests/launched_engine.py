"""A process that is launched as an engine: it listens, and behaves as badly as it is told to.

    python launched_engine.py --port PORT [--seconds S] [--dies] [--never] [--deaf] [--children]

It runs without draftquant.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WAITING = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            print("the engine met an error", flush=True)
            os._exit(7)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.environ.get('SAID')} {' '.join(sys.argv[3:])}".encode())

    def log_message(self, *_: object) -> None:
        print("asked", self.path, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft")
    parser.add_argument("--seconds", type=float, default=0, help="until it listens")
    parser.add_argument("--dies", action="store_true", help="instead of listening")
    parser.add_argument("--never", action="store_true", help="listens")
    parser.add_argument("--deaf", action="store_true", help="to SIGTERM")
    parser.add_argument("--children", action="store_true", help="which are deaf, one elsewhere")
    options = parser.parse_args()
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.children:
        child = [sys.executable, "-c", WAITING]
        here = subprocess.Popen(child)
        # Without its environment, as those that rewrite their title; and in a session of its own.
        untitled = subprocess.Popen(child, env={})
        elsewhere = subprocess.Popen(child, start_new_session=True)
        print("children", here.pid, untitled.pid, elsewhere.pid, flush=True)
    print("loading", flush=True)
    time.sleep(options.seconds)
    if options.dies:
        print("\x1b[31mno such draft\x1b[0m", file=sys.stderr, flush=True)
        sys.exit(3)
    if options.never:
        time.sleep(600)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
