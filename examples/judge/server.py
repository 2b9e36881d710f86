"""A stand-in for a judge: a server in the form of OpenAI's that compares the two numbers of its question."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        expected, given = re.findall(r"<(.*?)>", question, re.DOTALL)
        verdict = "right" if given.strip() == expected else "wrong"
        message = {"role": "assistant", "content": f"{expected} was expected.\nverdict: {verdict}"}
        usage = {"prompt_tokens": len(question) // 4, "completion_tokens": 8}
        reply = json.dumps({"choices": [{"message": message}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8011), Judge).serve_forever()
