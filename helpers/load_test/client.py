"""One request over HTTP, and the time of every chunk of its streamed answer.

Whatever happens to a request becomes part of its `Answer`; nothing is sent a second time. A refusal (429) is a figure
of the load test, not something to hide by trying again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..metrics import RequestMetrics

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Answer(RequestMetrics):
    """What became of one request. All times are seconds since the load test's first request was due.

    `arrival` is the intended send time, `token_times` are those of the chunks that hold tokens. Servers may send
    several tokens in a chunk: gaps (`itl`) are those between chunks, `tpot` divides by the tokens the server counted.

    Attributes:
        sent: when the request really went out. Later than `arrival` if the load generator could not keep up.
        ended: when the answer was complete, or was given up.
        text: all of the answer that came.
        error: why there is no complete answer; None if there is one.
        http_status: None if there was not even one.
        retry_after: seconds after which a server that refused wants to be asked again.
        finish_reason: "stop" or "length", or whatever else the server says.
        prompt_tokens, output_tokens: as counted by the server, else None and the number of chunks.
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

    @property
    def tpot(self) -> float | None:
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Client:
    """Sends requests to one server. Use it as `async with Client(url) as client`.

    Args:
        url: the server's, with or without "/v1".
        model: its name there; the server's first one if left out.
        api_key: for servers that want one.
        chat: send prompts as a user's message to chat/completions, rather than to completions.
        body: more fields of the request's JSON, as in {"temperature": 0, "ignore_eos": True}.
        timeout: a user's patience in seconds: then the connection is closed, and the request has failed.

    Raises:
        ConnectionError: no server there (when entered, as the next two).
        PermissionError: the server wants a key, or another one.
        ValueError: the server does not have that model; no http address.
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
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.model, self.chat, self.body, self.timeout = model, chat, body or {}, timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> "Client":
        # No limit of connections: one user's request never waits for another's answer. An idle connection is given up
        # before usual servers do so (after 5 seconds), or a request might be sent into one that is just being closed.
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
                    raise PermissionError(f"{self.url} wants an API key, or another one ({response.status}).")
                listed = json.loads(await response.read()) if response.status == 200 else {"data": []}
                served = [one["id"] for one in listed["data"]]
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise ConnectionError(f"No server answers at {self.url}: is it running? ({error})") from None
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            raise ConnectionError(f"What answers at {self.url} is no OpenAI-compatible server ({error!r}).") from None
        if self.model is None and not served:
            raise ValueError(f"{self.url}/models lists no model: name one, and see that the address ends with /v1.")
        if self.model is not None and served and self.model not in served:
            raise ValueError(f"The server has no model {self.model!r}; it has {', '.join(served)}.")
        self.model = self.model or served[0]

    async def ask(
        self, request_id: int, prompt: Prompt, max_tokens: int, arrival: float, now: Callable[[], float]
    ) -> Answer:
        """Send a request now, and read its answer to the end.

        Args:
            request_id: whatever the answer is to be known by.
            prompt: text, or (not for chat) token ids.
            max_tokens: of the answer.
            arrival: when it should have been sent.
            now: the clock.
        """
        content = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {"model": self.model, **content, "max_tokens": max_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.body}
        url = f"{self.url}/chat/completions" if self.chat else f"{self.url}/completions"
        reader, error, status, retry_after = ChunkReader(), None, None, None
        sent = now()
        try:
            async with self._session.post(url, json=body) as response:
                status = response.status
                if status == 200:
                    events = EventStream()
                    async for data in response.content.iter_any():
                        time = now()
                        for event in events.feed(data):
                            reader.read(event, time)
                    reader.end()
                else:
                    retry_after = _number(response.headers.get("Retry-After"))
                    error = f"{status}: {_message(await response.text())}"
        except TimeoutError:
            error = f"not complete after {self.timeout:g} s"
        except Exception as problem:  # whatever a server does, it is this request's fate, and the others go on
            error = f"{type(problem).__name__}: {problem}"
        return Answer(
            request_id,
            arrival,
            reader.times,
            sent,
            now(),
            reader.text,
            error,
            status,
            retry_after,
            reader.finish_reason,
            reader.prompt_tokens,
            reader.output_tokens,
        )


class EventStream:
    """The events of a server-sent stream, from bytes that the network may have split anywhere.

    Bytes become text only when a line is complete: a split inside a character does no harm.
    """

    def __init__(self):
        self._rest, self._data = b"", []

    def feed(self, data: bytes) -> list[str]:
        """The events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode())
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


class ChunkReader:
    """Puts an answer together from its chunks, of completions or of chats.

    Attributes:
        times: of the chunks that hold tokens. A token may have no text yet (half a character) or none at all (the end
            of the text), so chunks without text count, too, except one that only names the role.
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
        """Take in an event that came at that time.

        Raises:
            ValueError: the server says that it failed, or this is no chunk.
        """
        if event == "[DONE]":
            return
        chunk = json.loads(event)
        if chunk.get("error"):
            raise ValueError(_message(event))
        if usage := chunk.get("usage"):
            self.prompt_tokens, self._counted = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk["choices"]:
            said = {name: value for name, value in (choice.get("delta") or choice).items() if value}
            text = said.get("content") or said.get("text") or ""
            self.text += text
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if set(said) != {"role"} or self.finish_reason:
                self.times.append(time)
                self._last_is_empty = not text

    def end(self) -> None:
        """The stream is over.

        Raises:
            ValueError: it should not be.
        """
        # Some servers tell the reason in a chunk of its own; with others that chunk holds the token of the end.
        if self._last_is_empty and self._counted is not None and len(self.times) > max(1, self._counted):
            self.times.pop()
        self.output_tokens = len(self.times) if self._counted is None else self._counted
        if not self.times:
            raise ValueError("there was no token in the answer")
        if self.finish_reason is None:
            raise ValueError("the answer broke off")


def _message(text: str) -> str:
    """What a server says went wrong, whether in OpenAI's format or not."""
    try:
        error = json.loads(text)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split())[:200]


def _number(text: str | None) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):  # not there, or a date
        return None
