"""OpenAI's requests, and which of their parameters this server understands.

Every parameter that is accepted works, and any other one is refused by name. Types are strict ("5" is not a number): a
server that guesses hides the mistakes of its users. docs/server.md says what each parameter does.

Beyond OpenAI's parameters: those of `SamplingParams` that OpenAI's API lacks (SHARED), `prompt_logprobs` for
completions, `priority` (the smaller, the more urgent, for the policy "priority") and `deadline` (in seconds).
"""

import math
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator, model_validator

from ..engine import SamplingParams
from ..sampling_params import BIAS, BOUNDS, MAX_BAD_WORDS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, checked_logit_bias
from .chat import Message, Several
from .strict import Strict
from .structured_fields import ResponseFormat, StructuredOutputsField, structured_outputs

Text = Annotated[str, StringConstraints(min_length=1)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Several[TokenId]
TokenIdText = Annotated[str, StringConstraints(pattern="^[0-9]{1,10}$")]  # a key of a JSON object is a text
Bias = Annotated[float, Field(ge=BIAS.low, le=BIAS.high)]
SHARED = (  # these have the name and the meaning of a sampling parameter
    "top_p", "n", "stop", "seed", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "ignore_eos", "stop_token_ids", "min_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip
MAX_LOGPROBS = 20


def _bounded(name: str, le: float = math.inf):
    """Make an optional field with the bounds of this parameter of `SamplingParams`, or a stricter upper bound."""
    bound, high = BOUNDS[name], min(le, BOUNDS[name].high)
    limits = {"gt" if bound.exclusive_low else "ge": bound.low} | ({} if math.isinf(high) else {"le": high})
    return Field(None, **limits)


class StreamOptions(Strict):
    include_usage: bool = False  # ends the stream with a chunk that has the token counts


class _Request(Strict):
    """The parameters of both kinds of request. None stands for the default, as in OpenAI's requests."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = _bounded("temperature", le=2)
    top_p: float | None = _bounded("top_p")
    n: int | None = _bounded("n")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = _bounded("seed")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = _bounded("top_k")
    min_p: float | None = _bounded("min_p")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)  # beyond 100, logits overflow
    presence_penalty: float | None = _bounded("presence_penalty")
    frequency_penalty: float | None = _bounded("frequency_penalty")
    logit_bias: dict[TokenIdText, Bias] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    min_tokens: int | None = _bounded("min_tokens")
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    priority: int = 0  # the smaller, the more urgent
    deadline: float | None = Field(None, gt=0, le=86400)  # seconds that the request may take
    user: str | None = None  # changes nothing; clients send it as a matter of course
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _one_error_for_all_biases(cls, given):
        checked_logit_bias(given)  # raises a ValueError for the first wrong entry
        return given

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires a stream: set stream to true, or leave stream_options out.")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def params(self) -> SamplingParams:
        """The engine's parameters. Raises ValueError for a combination that makes no sense."""
        temperature = 1.0 if self.temperature is None else self.temperature
        given = {"temperature": temperature, "max_tokens": self.max_new_tokens, "logprobs": self.num_logprobs}
        given["prompt_logprobs"] = self.num_prompt_logprobs
        for name in SHARED:
            if (value := getattr(self, name)) is not None:
                given[name] = value
        described = structured_outputs(self.response_format, self.structured_outputs)
        return SamplingParams(**given, structured_outputs=described)


class CompletionRequest(_Request):
    """`POST /v1/completions`: continue one prompt or several."""

    prompt: Text | TokenIds | Several[Text] | Several[TokenIds]
    max_tokens: int | None = _bounded("max_tokens")
    logprobs: int | None = _bounded("logprobs", le=MAX_LOGPROBS)
    echo: bool | None = None
    prompt_logprobs: int | None = _bounded("prompt_logprobs", le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    @property
    def max_new_tokens(self) -> int:
        """The most tokens per choice."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the best tokens to report beside each token; None for no log-probabilities at all."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt, which an echo reports, too."""
        if self.prompt_logprobs is not None or not self.echo:
            return self.prompt_logprobs
        return 0 if self.max_tokens == 0 and self.logprobs is None else self.logprobs


class ChatRequest(_Request):
    """`POST /v1/chat/completions`: continue a chat with the assistant's next message."""

    messages: Several[Message]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = _bounded("logprobs", le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _parameters_agree(self):
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is the older name of max_completion_tokens: give one of them.")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: set logprobs to true, or leave top_logprobs out.")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens per choice; None for as many as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the best tokens to report beside each token; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> None:
        """A chat reports nothing about its prompt."""
        return None


class Pace(Strict):
    """`POST /pace`: slow motion."""

    seconds: float = Field(ge=0, le=2)  # the least time per iteration


def describe_errors(errors: list[dict[str, Any]]) -> tuple[str, str | None]:
    """Turn pydantic's errors into a sentence about the first wrong parameter; return the sentence and the name."""
    if errors[0]["type"] == "json_invalid":
        return f"The body is not valid JSON: {errors[0]['ctx']['error']}.", None
    if errors[0]["loc"] == ("body",) and errors[0]["type"] in ("missing", "model_attributes_type"):
        return "Send a JSON object, with Content-Type: application/json.", None
    # In a parameter of several possible types, a step such as "list[TextPart]" names the type that was tried.
    paths = [
        [str(step) for step in error["loc"] if step != "body" and not str(step).startswith("list[")] for error in errors
    ]
    name = paths[0][0] if paths[0] else None
    relevant = [(error, path) for error, path in zip(errors, paths, strict=True) if path[:1] == paths[0][:1]]
    path_of = {error["type"]: path for error, path in relevant}
    if "extra_forbidden" in path_of:
        return f"This server does not know the parameter {'.'.join(path_of['extra_forbidden'])!a}: leave it out.", name
    if set(path_of) == {"missing"}:
        return f"The parameter {'.'.join(path_of['missing'])!a} is missing.", name
    # A parameter of several possible types has an error for each of them.
    reasons = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error, _ in relevant)
    return (f"{name}: " if name else "") + "; or: ".join(reasons), name
