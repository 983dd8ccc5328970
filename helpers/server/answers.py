"""OpenAI's answers, whole or in chunks, made from the engine's outputs."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from ..outputs import RequestOutput
from ..text_stream import BROKEN

DONE = "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass
class CompletionFormat:
    """The shapes of `/v1/completions`.

    Args:
        id: the answer's name.
        model: the model's.
        tokenizer: tells how a single token reads, for log-probabilities.
        top: how many best tokens to report beside each one, if log-probabilities are wanted.
    """

    id: str
    model: str
    tokenizer: Any
    top: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    kind = "text_completion"
    kind_of_chunk = "text_completion"

    def answer(self, outputs: list[RequestOutput], usage: dict[str, int]) -> dict[str, Any]:
        """All of it. `outputs` are the last ones, choice by choice."""
        choices = [self._choice(choice, output, 0) for choice, output in enumerate(outputs)]
        return self._frame(self.kind, choices) | {"usage": usage}

    def chunk(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        """What the last iteration added to a choice."""
        new = len(output.token_ids) - len(output.new_token_ids)
        return self._frame(self.kind_of_chunk, [self._new(choice, output, new)])

    def last_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._frame(self.kind_of_chunk, []) | {"usage": usage}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, choice: int, output: RequestOutput, first: int) -> dict[str, Any]:
        logprobs = self._logprobs(output, first)
        return {"index": choice, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _new(self, choice: int, output: RequestOutput, first: int) -> dict[str, Any]:
        return self._choice(choice, output, first) | {"text": output.new_text}

    def _logprobs(self, output: RequestOutput, first: int) -> dict[str, Any] | None:
        """Of the tokens from `first` on. The best ones, and the token itself if it is none of them."""
        if output.logprobs is None:
            return None
        ids, known = output.token_ids[first:], output.logprobs[first:]
        return {
            "tokens": [self._spelled(id) for id in ids],
            "token_logprobs": [one[id] for id, one in zip(ids, known, strict=True)],
            "top_logprobs": [{self._spelled(id): one[id] for id in self._best(one)} for one in known],
        }

    def _best(self, known: dict[int, float]) -> list[int]:
        return sorted(known, key=known.get, reverse=True)

    def _spelled(self, token_id: int) -> str:
        """As it reads; part of a character as the vocabulary has it, lest all of them read alike."""
        text = self.tokenizer.decode([token_id])
        return self.tokenizer.convert_ids_to_tokens(token_id) if BROKEN in text else text


class ChatFormat(CompletionFormat):
    """The shapes of `/v1/chat/completions`."""

    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"

    def _choice(self, choice: int, output: RequestOutput, first: int) -> dict[str, Any]:
        return self._said(choice, output, first, "message", {"role": "assistant", "content": output.text})

    def _new(self, choice: int, output: RequestOutput, first: int) -> dict[str, Any]:
        role = {"role": "assistant"} if first == 0 else {}
        return self._said(choice, output, first, "delta", role | {"content": output.new_text})

    def _said(self, choice: int, output: RequestOutput, first: int, name: str, said: dict[str, str]) -> dict[str, Any]:
        logprobs = self._logprobs(output, first)
        return {"index": choice, name: said, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _logprobs(self, output: RequestOutput, first: int) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        ids, known = output.token_ids[first:], output.logprobs[first:]
        content = []
        for id, one in zip(ids, known, strict=True):
            top = [self._token(best, one[best]) for best in self._best(one)[: self.top]]
            content.append(self._token(id, one[id]) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._spelled(token_id)
        whole = BROKEN not in self.tokenizer.decode([token_id])  # the bytes of part of a character are not known here
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
