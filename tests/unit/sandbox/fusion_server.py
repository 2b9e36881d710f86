"""A small server with the HTTP API of SandboxFusion. It runs programs of tests, and isolates nothing."""

import base64
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def run_code(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of `POST /run_code`."""
    if request["code"] == "fail":
        return {"status": "SandboxError", "message": "no free pod", "run_result": None, "files": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        interpreter = {"python": [sys.executable, "-c"], "bash": ["bash", "-c"]}[request["language"]]
        try:
            done = subprocess.run(
                [*interpreter, request["code"]],
                cwd=folder,
                input=request["stdin"],
                capture_output=True,
                text=True,
                timeout=request["run_timeout"],
                check=False,
            )
        except subprocess.TimeoutExpired:
            result = {"status": "TimeLimitExceeded", "execution_time": request["run_timeout"], "return_code": None}
            return {"status": "Failed", "message": "", "run_result": result, "files": {}}
        result = {
            "status": "Finished",
            "execution_time": 0.1,
            "return_code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
        }
        paths = {name: Path(folder, name) for name in request["fetch_files"]}
        files = {name: base64.b64encode(path.read_bytes()).decode() for name, path in paths.items() if path.is_file()}
        status = "Failed" if done.returncode else "Success"
        return {"status": status, "message": "", "run_result": result, "files": files}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(run_code(request)).encode() if self.path == "/run_code" else b"not found"
        self.send_response(200 if self.path == "/run_code" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""


@contextmanager
def fusion_server() -> Iterator[str]:
    """Serve on this machine; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
