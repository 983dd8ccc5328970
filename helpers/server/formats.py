"""OpenAI's response bodies, complete or in chunks, made from the engine's outputs."""

import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..detokenizer import REPLACEMENT_CHARACTER
from ..server.output_delta import OutputDelta
from .text_offsets import EchoedPrompt, TextOffsets

DONE = "data: [DONE]\n\n"


def server_sent_event(data: str) -> str:
    """Format JSON as a server-sent event."""
    return f"data: {data}\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return a response's token counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass
class CompletionFormatter:
    """Formats the responses of `/v1/completions`.

    Args:
        id: the response's id.
        model: the model's name.
        tokenizer: spells single tokens, for log-probabilities.
        num_logprobs: how many of the most probable tokens to report beside each token; used for chats only, since a
            completion reports all that the engine returns.

    Attributes:
        echoes: the prompt of each choice, if the choices begin with it; otherwise empty.
    """

    id: str
    model: str
    tokenizer: Any
    num_logprobs: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    echoes: list[EchoedPrompt] = field(default_factory=list)
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)  # by choice, where its next tokens begin
    response_type = "text_completion"
    chunk_type = "text_completion"

    def response(self, outputs: list[OutputDelta], usage: dict[str, int]) -> str:
        """Return the JSON of the complete body for the outputs of all choices, in order, and the token counts."""
        # One choice after another, because no other thread runs while `json.dumps` does.
        choices = ", ".join(json.dumps(self._choice(choice, output)) for choice, output in enumerate(outputs))
        return f'{self._head(self.response_type)}{choices}], "usage": {json.dumps(usage)}}}'

    def event(self, choice: int, output: OutputDelta) -> str:
        """Return the event with what is new in a choice."""
        return server_sent_event(f"{self._event_head}{json.dumps(self._delta(choice, output))}]}}")

    def usage_event(self, usage: dict[str, int]) -> str:
        """Return a stream's last event, which has the token counts."""
        return server_sent_event(f'{self._event_head}], "usage": {json.dumps(usage)}}}')

    @cached_property
    def _event_head(self) -> str:
        return self._head(self.chunk_type)

    def _head(self, response_type: str) -> str:
        """Return the beginning of a body's JSON, which the choices continue."""
        body = {"id": self.id, "object": response_type, "created": self.created, "model": self.model, "choices": []}
        return json.dumps(body).removesuffix("]}")

    def _choice(self, choice: int, output: OutputDelta) -> dict[str, Any]:
        echo = self._echo(choice, output)
        entry = self._entry(choice, output, {"text": echo.text + output.new_text if echo else output.new_text})
        if output.prompt_logprobs is None:
            return entry
        return entry | {"prompt_logprobs": [logprobs and self._named(logprobs) for logprobs in output.prompt_logprobs]}

    _delta = _choice

    def _entry(self, choice: int, output: OutputDelta, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if output.new_logprobs is None else self._logprobs(choice, output)
        return {"index": choice} | content | {"logprobs": logprobs, "finish_reason": output.finish_reason}

    def _logprobs(self, choice: int, output: OutputDelta) -> dict[str, Any]:
        """Return the log-probabilities of the new tokens, each beside those of the most probable tokens."""
        ids, logprobs, offsets = output.new_token_ids, output.new_logprobs, []
        start = len(self.echoes[choice].text) if self.echoes else 0
        new_offsets = self._offsets.setdefault(choice, TextOffsets(self.tokenizer, start)).push(ids)
        if echo := self._echo(choice, output):
            ids, logprobs, offsets = echo.token_ids + ids, output.prompt_logprobs + logprobs, echo.offsets
        return {
            "tokens": [self.token_text(id) for id in ids],
            "token_logprobs": [by_id and by_id[id] for id, by_id in zip(ids, logprobs, strict=True)],
            "top_logprobs": [
                by_id and {self.token_text(id): by_id[id] for id in _best_first(by_id)} for by_id in logprobs
            ],
            "text_offset": offsets + new_offsets,
        }

    def _echo(self, choice: int, output: OutputDelta) -> EchoedPrompt | None:
        """Return the prompt that an output of a choice begins with, if any."""
        return self.echoes[choice] if self.echoes and _is_first(output) else None

    def _named(self, logprobs: dict[int, float]) -> dict[str, dict[str, Any]]:
        """Return log-probabilities in vLLM's format."""
        return {str(id): {"logprob": logprob, "decoded_token": self.token_text(id)} for id, logprob in logprobs.items()}

    def brings_prompt(self, output: OutputDelta) -> bool:
        """Return whether an output comes with a whole prompt or its log-probabilities, which are slow to format."""
        return _is_first(output) and (bool(self.echoes) or output.prompt_logprobs is not None)

    def token_text(self, token_id: int) -> str:
        """Return a token's text. Part of a character is spelled as in the vocabulary, which keeps such parts apart."""
        text = self.tokenizer.decode([token_id])
        return self.tokenizer.convert_ids_to_tokens(token_id) if REPLACEMENT_CHARACTER in text else text


class ChatFormatter(CompletionFormatter):
    """Formats the responses of `/v1/chat/completions`."""

    response_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    def _choice(self, choice: int, output: OutputDelta) -> dict[str, Any]:
        return self._entry(choice, output, {"message": {"role": "assistant", "content": output.new_text}})

    def _delta(self, choice: int, output: OutputDelta) -> dict[str, Any]:
        role = {"role": "assistant"} if _is_first(output) else {}
        return self._entry(choice, output, {"delta": role | {"content": output.new_text}})

    def _logprobs(self, choice: int, output: OutputDelta) -> dict[str, Any]:
        content = []
        for id, logprobs in zip(output.new_token_ids, output.new_logprobs, strict=True):
            top = [self.token_entry(best, logprobs[best]) for best in _best_first(logprobs)[: self.num_logprobs]]
            content.append(self.token_entry(id, logprobs[id]) | {"top_logprobs": top})
        return {"content": content}

    def token_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token as chats report it; `bytes` is None for part of a character, whose bytes are unknown here."""
        text = self.token_text(token_id)
        is_text = REPLACEMENT_CHARACTER not in self.tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_text else None}


def _is_first(output: OutputDelta) -> bool:
    """Return whether a choice begins with this output."""
    return output.num_tokens == len(output.new_token_ids)


def _best_first(logprobs: dict[int, float]) -> list[int]:
    return sorted(logprobs, key=logprobs.get, reverse=True)
