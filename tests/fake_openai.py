"""An OpenAI-compatible server on loopback that says what a test tells it to. Real HTTP, no provider."""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Answer:
    """One scripted HTTP answer.

    Attributes:
        body: Sent as it is if bytes, else as JSON.
        never: No answer: the connection stays open until the client leaves.
    """

    status: int = 200
    body: Any = field(default_factory=dict)
    never: bool = False


def completion(content: str | None, input_tokens: int = 3, output_tokens: int = 5) -> Answer:
    """A chat completion with one choice."""
    message = {"role": "assistant", "content": content}
    return Answer(
        body=_completion_body([{"index": 0, "message": message, "finish_reason": "stop"}], input_tokens, output_tokens)
    )


def without_choices() -> Answer:
    """A chat completion whose list of choices is empty."""
    return Answer(body=_completion_body([], 3, 0))


def failure(status: int, message: str) -> Answer:
    """An error in the shape of OpenAI's API."""
    return Answer(status, {"error": {"message": message, "type": "test", "code": None}})


class FakeOpenAI:
    """The server, for the length of a `with`. Answers are given in order, the last one again and again.

    Attributes:
        requests: The body of each request.
        connections: Connections accepted so far.
        arrived: A request has been read.
        disconnected: A client left while it waited for an answer that never comes.
    """

    def __init__(self, *answers: Answer) -> None:
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.arrived = threading.Event()
        self.disconnected = threading.Event()
        self._answers = list(answers)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    @property
    def base_url(self) -> str:
        """What a client takes as `api_base`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _next(self, request: dict[str, Any]) -> Answer:
        with self._lock:
            self.requests.append(request)
            self.arrived.set()
            return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                with fake._lock:
                    fake.connections += 1

            def do_POST(self) -> None:
                answer = fake._next(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                if answer.never:
                    # Nothing more is due from the client: what arrives is the end of its connection.
                    assert self.rfile.read(1) == b""
                    fake.disconnected.set()
                    self.close_connection = True
                    return
                body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
                self.send_response(answer.status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Quiet: a test's output is its own."""

        return Handler


def _completion_body(choices: list[dict[str, Any]], input_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 1,
        "model": "test-model",
        "choices": choices,
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
    }
