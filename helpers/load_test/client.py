"""Send one request over HTTP, and measure when each chunk of its streamed response arrives.

Errors become part of the request's `RequestResult`, and no request is sent twice. A refusal (429) is a result of the
load test, which a retry would hide.
"""

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import aiohttp

from ..metrics import RequestMetrics

Prompt = str | Sequence[int]
AT_ONCE = 128  # lines of a response, two per event, that are read before others get their turn: that takes half a ms


@dataclass(frozen=True)
class RequestResult(RequestMetrics):
    """The result of one request. All times are in seconds since the load test's first intended send time.

    `arrival` is the intended send time; `token_times` are the times at which chunks with tokens arrived. A server may
    send several tokens in one chunk. `itl` therefore holds the gaps between chunks, while `tpot` divides by the number
    of tokens that the server counted.

    Attributes:
        sent: the actual send time, which is later than `arrival` if the load generator could not keep up.
        ended: when the response was complete or the request failed.
        text: the generated text that arrived.
        error: why the response is incomplete; None if it is complete.
        http_status: the HTTP status; None if there was no response.
        retry_after: the seconds to wait before a retry, as stated by a server that refused the request.
        finish_reason: "stop", "length", or another reason that the server gives.
        prompt_tokens, output_tokens: as counted by the server; if it sends no counts, None and the number of chunks.
    """

    sent: float
    ended: float
    text: str = ""
    error: str | None = None
    http_status: int | None = None
    retry_after: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0

    @property
    def status(self) -> str:
        if self.error is None:
            return "ok"
        return "refused" if self.http_status == 429 else "failed"


class Client:
    """An HTTP client of one server, used as `async with Client(url) as client`.

    Args:
        url: the address of the server, with or without "/v1".
        model: the name of the model on the server; by default, the first one that the server lists.
        api_key: the API key, for servers that require one.
        chat: send prompts as a user's message to chat/completions instead of to completions.
        body: additional fields of the request's JSON, as in {"temperature": 0, "ignore_eos": True}.
        timeout: seconds after which the client closes the connection, and the request counts as failed.

    Raises:
        ValueError: `url` is not an http address; `timeout` is not above 0; or, on entry, the server lacks the model.
        ConnectionError: on entry, no OpenAI-compatible server answers at this address.
        PermissionError: on entry, the server requires an API key or rejects this one.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        chat: bool = False,
        body: dict[str, Any] | None = None,
        timeout: float = 600.0,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"A server's address looks like http://127.0.0.1:8000, not {url!r}.")
        if timeout <= 0:
            raise ValueError(f"timeout is more than 0 seconds, not {timeout}.")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.model, self.chat, self.body, self.timeout = model, chat, body or {}, timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> "Client":
        # Connections are not limited, so that no request waits for the response to another. Idle connections are closed
        # before most servers close them (after 5 seconds): a request on a connection that is being closed would fail.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers=self._headers,
        )
        try:
            await self._find_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_) -> None:
        await self._session.close()

    async def _find_model(self) -> None:
        try:
            async with self._session.get(f"{self.url}/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
                if response.status in (401, 403):
                    raise PermissionError(f"{self.url} requires a valid API key ({response.status}): pass one.")
                listed = json.loads(await response.read()) if response.status == 200 else {"data": []}
                served = [model["id"] for model in listed["data"]]
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise ConnectionError(f"No server answers at {self.url}: is it running? ({error})") from None
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            raise ConnectionError(f"The server at {self.url} is not OpenAI-compatible ({error!r}).") from None
        if self.model is None and not served:
            raise ValueError(f"{self.url}/models lists no model: name one, and check the address.")
        if self.model is not None and served and self.model not in served:
            raise ValueError(f"The server has no model {self.model!r}; it has {', '.join(served)}.")
        self.model = self.model or served[0]

    async def send(
        self, request_id: int, prompt: Prompt, max_tokens: int, arrival: float, now: Callable[[], float]
    ) -> RequestResult:
        """Send a request now and read its response to the end; errors become part of the result.

        Args:
            request_id: the id of the result.
            prompt: text, or token ids (except for chats).
            max_tokens: the most tokens of the output.
            arrival: the intended send time.
            now: returns the time in seconds, on the same clock as `arrival`.
        """
        content = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {"model": self.model, **content, "max_tokens": max_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.body}
        url = f"{self.url}/chat/completions" if self.chat else f"{self.url}/completions"
        arrived: list[tuple[float, bytes]] = []  # parsed later: that takes processor time, which a server may need
        error, status, retry_after = None, None, None
        sent = now()
        try:
            async with self._session.post(url, json=body) as response:
                status = response.status
                if status == 200:
                    async for data in response.content.iter_any():
                        arrived.append((now(), data))
                else:
                    retry_after = _number(response.headers.get("Retry-After"))
                    error = f"{status}: {_message(await response.text())}"
        except TimeoutError:
            error = f"timed out after {self.timeout:g} s"
        except Exception as problem:  # an error ends this request only; the others continue
            error = f"{type(problem).__name__}: {problem}"
        ended, reader = now(), ChunkReader()
        try:
            for number, (time, line) in enumerate(_lines(arrived), start=1):
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)  # otherwise the arrivals of others would be noticed late
                if line.startswith(b"data:") and (error is None or line.endswith(b"\n")):  # an error may cut a line off
                    reader.read(line.removeprefix(b"data:").decode().strip(), time)
            if status == 200 and error is None:
                reader.end()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        read = {name: getattr(reader, name) for name in ("text", "finish_reason", "prompt_tokens", "output_tokens")}
        failure = {"error": error, "http_status": status, "retry_after": retry_after}
        return RequestResult(request_id, arrival, reader.times, sent, ended, **read, **failure)


class ChunkReader:
    """A reader that assembles a response from its chunks, of completions or of chats.

    Attributes:
        times: when the chunks that hold tokens arrived. A token may have no text yet (half a character) or none at all
            (the end of the text). Chunks without text therefore count, too, except a chunk that only names the role.
    """

    def __init__(self):
        self.times: list[float] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens = 0
        self._counted: int | None = None
        self._last_is_empty = False

    def read(self, event: str, time: float) -> None:
        """Read an event that arrived at `time`.

        Raises:
            ValueError: the event reports an error of the server, or it is not a chunk.
        """
        if event == "[DONE]":
            return
        chunk = json.loads(event)
        if chunk.get("error"):
            raise ValueError(_message(event))
        if usage := chunk.get("usage"):
            self.prompt_tokens, self._counted = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk["choices"]:
            fields = {name: value for name, value in (choice.get("delta") or choice).items() if value}
            text = fields.get("content") or fields.get("text") or ""
            self.text += text
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if set(fields) != {"role"} or self.finish_reason:
                self.times.append(time)
                self._last_is_empty = not text

    def end(self) -> None:
        """Finish reading at the end of the stream.

        Raises:
            ValueError: the stream held no token, or it ended before the output was complete.
        """
        # Some servers send the finish reason in a chunk without a token; with others, that chunk holds the EOS token.
        if self._last_is_empty and self._counted is not None and len(self.times) > max(1, self._counted):
            self.times.pop()
        self.output_tokens = len(self.times) if self._counted is None else self._counted
        if not self.times:
            raise ValueError("the response held no token")
        if self.finish_reason is None:
            raise ValueError("the response broke off: it has no finish reason")


def _lines(arrived: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the lines of the data that arrived, each after the time at which its end arrived."""
    ends, end = list(accumulate(len(data) for _, data in arrived)), 0
    for line in b"".join(data for _, data in arrived).splitlines(keepends=True):
        end += len(line)
        yield arrived[bisect_left(ends, end)][0], line


def _message(text: str) -> str:
    """Return the error message in a server's response: the field in OpenAI's format, or the text itself."""
    try:
        error = json.loads(text)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split())[:200]


def _number(text: str | None) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):  # missing, or a date
        return None
