"""Any server with OpenAI's chat completions API: vLLM, SGLang, Ollama, llama.cpp, or a proxy."""

import asyncio
import contextlib
import json
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from rlm_broker.broker.clients import failures
from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest, call_headers, with_finish_reason
from rlm_broker.broker.clients.failures import words_of
from rlm_broker.broker.clients.providers import Served, served
from rlm_broker.errors import ConfigurationError, FailureCause, ModelFailed, UnknownModel, require_kind
from rlm_broker.events.redaction import secrets_in
from rlm_broker.usage import Usage
from sandbox_worker.wire.text_json import encode_written_out

MAX_CONCURRENT = 256
MAX_REPLY_BYTES = 64 << 20
"""Maximum bytes of one reply after decompression; a longer one fails the call."""
CONNECT_TIMEOUT_S = 10.0
PREFLIGHT_TIMEOUT_S = 10.0
_CHUNK_BYTES = 1 << 16


class OpenAICompatibleClient(BaseClient):
    """One model of one server. It works on several event loops, each with its own connections.

    Example:
        ```python
        RLM(OpenAICompatibleClient("http://localhost:8000/v1", "qwen3", options={"temperature": 0.2}))
        ```

    Args:
        base_url: Address such as `https://host:port/v1`; `/chat/completions` is added.
        model: Name of the model at the server.
        api_key: Sent as a bearer token; None sends none. No environment variable is read.
        headers: Sent with each request.
        options: Further fields of the request's body, for example `temperature`, `top_p`, `seed`.
        timeout_s: Seconds of one request; None leaves the time to the limit of the call.
        max_concurrent: Maximum concurrent requests; further calls wait.
        usd_per_million_tokens: Prices of input and output in US dollars; None means that they are not known.
        context_tokens: Size of the model's context window in tokens; None asks the server, in `preflight`.
        model_name: Name in reports; None is `model`.

    Raises:
        ConfigurationError: `base_url` is not an HTTP address, the model has no name, or an argument is of the wrong
            type.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        max_concurrent: int = MAX_CONCURRENT,
        usd_per_million_tokens: tuple[float, float] | None = None,
        context_tokens: int | None = None,
        model_name: str | None = None,
    ) -> None:
        require_kind("base_url", base_url, str)
        require_kind("model", model, str)
        for name, value in (("headers", headers), ("options", options)):
            require_kind(name, value, Mapping, type(None))
        for text in (each for pair in (headers or {}).items() for each in pair):
            require_kind("the name or value of a header", text, str)
        if not model:
            raise ConfigurationError(f"the model's name is empty: give the name that it has at {base_url}")
        if "stream" in (options or {}):
            raise ConfigurationError(f"{model}: leave out the option stream: replies of followed runs are streamed")
        self.model_name = model_name or model
        self.max_concurrent = max_concurrent
        self.is_priced = usd_per_million_tokens is not None
        self._base_url = _checked_url(base_url)
        self._model = model
        self._options = dict(options or {})
        self._headers = {"content-type": "application/json"}
        self._headers |= {name.lower(): value for name, value in (headers or {}).items()}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._secrets = secrets_in({"api_key": api_key, "headers": headers})
        self._timeout_s = timeout_s
        self._prices = usd_per_million_tokens
        self.context_tokens = context_tokens
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]
        self._sessions = weakref.WeakKeyDictionary()
        weakref.finalize(self, _abandon, self._sessions)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Text on which replies depend besides the request: the address, the model and the options."""
        return json.dumps([self._base_url, self._model, self._options], sort_keys=True, default=str)

    async def preflight(self) -> None:
        """Check with `GET /models` that the server is up and has the model.

        A server without a list of models passes: a key may be allowed to call a model, and not to list any.

        Example:
            ```python
            client = OpenAICompatibleClient("http://localhost:8000/v1", "qwen3")
            await client.preflight()
            print(client.context_tokens)
            ```

        Raises:
            UnknownModel: The list lacks the model; the message names others.
            ModelFailed: The server cannot be reached, or answers with status 401.
        """
        listed = await self._listed()
        for entry in listed:
            if self._model in (entry.id, entry.id.removesuffix(":latest")):  # Ollama lists "NAME:latest"
                self.context_tokens = self.context_tokens or _count(entry.max_model_len) or None
                return
        if listed and not any("*" in entry.id for entry in listed):  # a proxy may list patterns such as "openai/*"
            names = ", ".join(entry.id for entry in listed[:20])
            raise UnknownModel(f"{self._base_url} has no model {self._model!r}; it has: {failures.one_line(names)}")

    async def models(self) -> list[str]:
        """Return the names in the server's list of models, each as one line without secrets; none without a list.

        Example:
            ```python
            print(await OpenAICompatibleClient("http://localhost:8000/v1", "qwen3").models())
            ```

        Raises:
            ModelFailed: It cannot be reached, or wants another key.
        """
        return [failures.one_line(entry.id, self._secrets) for entry in await self._listed()]

    async def _listed(self) -> list[Served]:
        async with self._request("GET", "/models", None, PREFLIGHT_TIMEOUT_S) as response:
            if response.status == 401:
                raise self._refused(response, await self._body(response))
            return served(await self._body(response)) if response.status == 200 else []

    async def complete(self, request: LMRequest) -> LMReply:
        """Send one request. Cancelling closes the connection.

        Example:
            ```python
            client = OpenAICompatibleClient("http://localhost:8000/v1", "qwen3")
            print((await client.complete(request)).text)
            ```

        Raises:
            ModelFailed: The call failed; the message has the server's own words in one line, without secrets.
        """
        body = encode_written_out(self._fields(request))
        async with self._request("POST", "/chat/completions", body, self._timeout_s) as response:
            is_stream = response.content_type == "text/event-stream"
            if response.status == 200 and is_stream and request.on_text is not None:
                return await self._streamed(response, request.on_text)
            if response.status != 200:  # no variable: a traceback would show a key that the body repeats
                raise self._refused(response, await self._body(response))
            answer = await self._body(response)
        return self._reply(answer)

    def _fields(self, request: LMRequest) -> dict[str, Any]:
        """Return the body of a request."""
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        body: dict[str, Any] = {"model": self._model, "messages": messages, **self._options}
        if request.max_completion_tokens is not None:
            body["max_tokens"] = _smaller(body.get("max_tokens"), request.max_completion_tokens)
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if request.sample and isinstance(body.get("seed"), int):  # else all samples would be one
            body["seed"] += request.sample
        if request.on_text is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def aclose(self) -> None:
        """Close the connections of this event loop. A second call has no effect; a later request opens new ones."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make one HTTP exchange. Each of its failures is a `ModelFailed`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {**call_headers.get(), **self._headers}
        try:
            # Redirects are not followed: they would carry the key and the conversation to another server.
            async with self._session().request(
                method, self._base_url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                yield response
        except TimeoutError:
            limit_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
            raise self._failed(f"no answer within {limit_s:g} s", "transient") from None
        except aiohttp.ClientSSLError as error:
            raise self._failed(f"no secure connection to {self._base_url}: {error}", "provider") from None
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno or 0  # `strerror` does not know the negative ones of name resolution
            why = os.strerror(number) if number > 0 else str(error.os_error)
            is_lasting = isinstance(error, aiohttp.ClientConnectorDNSError)
            raise self._failed(
                f"cannot connect to {self._base_url}: {why}", "transient", is_lasting=is_lasting
            ) from None
        except aiohttp.ClientConnectionError as error:
            raise self._failed(f"the connection to {self._base_url} broke: {words_of(error)}", "transient") from None
        except aiohttp.ClientPayloadError:
            raise self._failed("the server broke off in the middle of its answer", "transient") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise self._failed(f"the answer of {self._base_url} is malformed: {words_of(error)}", "provider") from None

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for other in [each for each in self._sessions if each.is_closed()]:
                self._sessions.pop(other).detach()  # its loop has ended and closed the sockets
            connector = _Connector(limit=0)  # no limit of its own: the handler's queue bounds calls, in fair turns
            session = self._sessions[loop] = aiohttp.ClientSession(connector=connector)
        return session

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body, at most `MAX_REPLY_BYTES` after decompression; that of an error is cut after about 64 KB."""
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body += chunk
            if response.status != 200 and len(body) >= _CHUNK_BYTES:
                break
            if len(body) > MAX_REPLY_BYTES:
                raise self._failed(f"the answer is longer than {MAX_REPLY_BYTES:,} bytes", "provider")
        return bytes(body)

    async def _streamed(self, response: aiohttp.ClientResponse, on_text: Callable[[str], None]) -> LMReply:
        """Read server-sent events, and return their reply."""
        texts: list[str] = []
        total = 0
        finish_reason, usage, ended = None, None, False
        extra: dict[str, Any] = {}
        async for line in response.content:
            total += len(line)
            if total > MAX_REPLY_BYTES:
                raise self._failed(f"the answer is longer than {MAX_REPLY_BYTES:,} bytes", "provider")
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                ended = True
                break
            part = self._decoded(data)
            usage = part.usage or usage
            for choice in part.choices or ():
                finish_reason = _text(choice.finish_reason) or finish_reason
                _gathered(extra, choice, part.prompt_token_ids)
                if choice.delta is not None and (text := _text_of(choice.delta.content, between="")):
                    texts.append(text)
                    on_text(text)
        if not ended and finish_reason is None:
            raise self._failed("the server broke off in the middle of its answer", "transient")
        reply = self._lm_reply("".join(texts) if texts else None, finish_reason, usage)
        return msgspec.structs.replace(reply, extra=with_finish_reason(extra, finish_reason))

    # -- what it says ------------------------------------------------------------------------------------------------

    def _reply(self, answer: bytes) -> LMReply:
        body = self._decoded(answer)
        if not body.choices:
            raise self._failed("the provider's answer has no choices", "provider")
        choice = body.choices[0]
        message = choice.message or _SaidMessage()
        content = _text_of(message.content)
        refusal = _text(message.refusal)
        reply = self._lm_reply(refusal if not content and refusal else content, _text(choice.finish_reason), body.usage)
        extra = with_finish_reason(_gathered({}, choice, body.prompt_token_ids), choice.finish_reason)
        return reply if extra is None else msgspec.structs.replace(reply, extra=extra)

    def _decoded(self, answer: bytes) -> "_Body":
        try:
            body = msgspec.json.decode(answer, type=_Body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._failed(f"the server's answer is not a chat completion: {error}", "provider") from None
        if body.error:
            code = body.error.get("code") if isinstance(body.error, dict) else None
            cause = failures.cause_of(code) if type(code) is int else "provider"
            raise self._failed(_error_in(answer) or str(body.error), cause)
        return body

    def _lm_reply(self, text: str | None, finish_reason: str | None, usage: Any) -> LMReply:
        counted = usage if isinstance(usage, dict) else {}
        inputs, outputs = (_count(counted.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        cost = None
        if self._prices is not None and (inputs or outputs or not any(self._prices)):
            cost = (inputs * self._prices[0] + outputs * self._prices[1]) / 1e6
        details = counted.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
        used = Usage(1, inputs, outputs, cost, 0, min(cached, inputs))
        return LMReply(text or "", used, failures.no_text(text, finish_reason))

    def _refused(self, response: aiohttp.ClientResponse, answer: bytes) -> ModelFailed:
        status = response.status
        if 300 <= status < 400:
            where = response.headers.get("location", "elsewhere")
            return self._failed(f"the server redirects to {where}: name that address", "provider")
        said = _error_in(answer) or answer[:2000].decode(errors="replace")
        if status == 401 and "authorization" not in self._headers:
            said += " (no key was sent: if the server wants one, give it as api_key)"
        after_s, is_lasting = failures.retry_after_s(response.headers), failures.is_lasting(status)
        why = f"HTTP status {status}: {said}"
        return self._failed(why, failures.cause_of(status), after_s, is_lasting=is_lasting)

    def _failed(
        self, why: str, cause: FailureCause, after_s: float | None = None, *, is_lasting: bool = False
    ) -> ModelFailed:
        told = f"{self.model_name}: {failures.one_line(why, self._secrets)}"
        return ModelFailed(told, cause, after_s, is_lasting=is_lasting)


class _Connector(aiohttp.TCPConnector):
    def __del__(self, *_: object) -> None:
        """Omit aiohttp's warning on stderr: sockets are closed with their transports."""


# Fields beside the text are of type Any: a malformed one must not fail the call.


class _SaidMessage(msgspec.Struct):
    content: str | list[Any] | None = None
    refusal: Any = None


class _Choice(msgspec.Struct):
    message: _SaidMessage | None = None
    delta: _SaidMessage | None = None
    finish_reason: Any = None
    logprobs: Any = None
    token_ids: Any = None
    prompt_token_ids: Any = None


class _Body(msgspec.Struct):
    """A reply, or one event of a streamed reply. Other fields are ignored."""

    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    prompt_token_ids: Any = None


def _gathered(extra: dict[str, Any], choice: _Choice, prompt_token_ids: Any) -> dict[str, Any]:
    """Add what a trainer needs of an answer, or of a piece of a streamed one."""
    if (ids := choice.prompt_token_ids or prompt_token_ids) is not None:
        extra["prompt_token_ids"] = ids
    for name, value in (("token_ids", choice.token_ids), ("logprobs", choice.logprobs)):
        before = extra.get(name)
        if isinstance(before, list) and isinstance(value, list):
            before += value
        elif isinstance(before, dict) and isinstance(value, dict):
            for key, more in value.items():
                before[key] = (
                    before[key] + more if isinstance(before.get(key), list) and more else before.get(key, more)
                )
        elif value is not None:
            extra[name] = value
    return extra


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int:
    """Return a number of tokens, or 0 if the value is not one."""
    return max(0, int(value)) if type(value) in (int, float) and value < float("inf") else 0


def _smaller(option: Any, limit: int) -> int:
    return min(option, limit) if type(option) is int else limit


def _text_of(content: str | list[Any] | None, between: str = "\n") -> str | None:
    """Return the text of a message. Some servers answer in content parts, each with a text of its own.

    Args:
        content: Text, content parts, or None.
        between: Text between two parts; empty in a streamed piece.
    """
    if not isinstance(content, list):
        return content
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return between.join(text for text in texts if isinstance(text, str) and text)


def _error_in(answer: bytes) -> str | None:
    """Return the message in an error's body, in any of the servers' shapes."""
    try:
        body = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if isinstance(body, dict):
        body = body.get("error") or body.get("detail") or body.get("message")
    if isinstance(body, dict):
        body = body.get("message") or body
    return body if isinstance(body, str) else json.dumps(body) if body else None


def _checked_url(text: str) -> str:
    try:
        url = URL(text.rstrip("/"))
        is_one = url.scheme in ("http", "https") and _is_host(url.host)
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigurationError(f"{text!r} is not the address of a server; give one such as http://localhost:8000/v1")
    if url.user or url.password:
        raise ConfigurationError("base_url must not contain a password; give it as api_key or in headers")
    if url.query_string or url.fragment or "?" in text:
        raise ConfigurationError("base_url must not contain `?` or `#`; give keys as api_key or in headers")
    return text.rstrip("/").removesuffix("/chat/completions")


def _is_host(host: str | None) -> bool:
    if host is None:
        return False
    labels = host.rstrip(".").split(".")
    return ":" in host or all(label and "%" not in label and not any(map(str.isspace, label)) for label in labels)


def _abandon(sessions: Mapping[asyncio.AbstractEventLoop, aiohttp.ClientSession]) -> None:
    """Close the connections of an abandoned client, on each running event loop."""
    for loop, session in sessions.items():
        connector = session.connector
        session.detach()  # else it warns on stderr that it was not closed
        if connector is not None and loop.is_running():
            with contextlib.suppress(RuntimeError):  # the loop ended in the meantime
                loop.call_soon_threadsafe(_close_soon, loop, connector)


def _close_soon(loop: asyncio.AbstractEventLoop, connector: aiohttp.BaseConnector) -> None:
    async def close() -> None:
        await connector.close()

    closing = loop.create_task(close())
    closing.add_done_callback(lambda _: closing)  # the callback keeps the task alive: a loop has weak references only
