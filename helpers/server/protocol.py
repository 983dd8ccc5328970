"""OpenAI's requests, and what this server understands of them.

Everything that is accepted works. What is not supported is refused by name. Some of that (NEUTRAL) clients send as a
matter of course with a value that changes nothing, and then it is accepted. Types are strict ("5" is no number): a
server that guesses hides the mistakes of those who learn with it.

Beyond OpenAI's: `top_k`, `min_p`, `repetition_penalty` and `ignore_eos` as in `SamplingParams`, `priority` (the
smaller, the more urgent, with the policy of that name) and `deadline` (seconds until the answer is of no use any more).
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from ..sampling import SamplingParams

Text = Annotated[str, StringConstraints(min_length=1)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1, fail_fast=True)]  # a complaint about each item would take seconds
Zero = Annotated[float, Field(ge=0, le=0)]
TokenIds = Several[Annotated[int, Field(ge=0)]]
NEUTRAL = ("frequency_penalty", "presence_penalty", "logit_bias", "echo", "suffix", "best_of")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_is_enough(cls, given):
        """A complaint about each of a hundred thousand unknown parameters would take seconds."""
        if not isinstance(given, dict):
            return given
        others = set([name for name in given if name not in cls.model_fields][1:])
        return {name: value for name, value in given.items() if name not in others}


class StreamOptions(_Strict):
    include_usage: bool = Field(False, description="End the stream with a chunk that counts tokens.")


class _Request(_Strict):
    """What both kinds of request have in common. None is the default, as with OpenAI's."""

    model: str | None = Field(None, description="The model that this server runs, or nothing.")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="0 takes the best token; 1 if left out.")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, description="Answers to each prompt.")
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=0, description="0 for all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Beyond, logits overflow.")
    ignore_eos: bool | None = None
    priority: int = Field(0, description="The smaller, the more urgent.")
    deadline: float | None = Field(None, gt=0, le=86400, description="Seconds from now.")
    # Understood in the one value that changes nothing.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = Field(None, description="Who asks. It changes nothing.")

    @model_validator(mode="after")
    def _options_of_a_stream(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true, or leave it out.")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def params(self) -> SamplingParams:
        """Raises ValueError for settings that make no sense together."""
        temperature = 1.0 if self.temperature is None else self.temperature
        given = {"temperature": temperature, "max_tokens": self.longest, "logprobs": self.top}
        for name in ("top_p", "n", "stop", "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        return SamplingParams(**given)


class CompletionRequest(_Request):
    """`POST /v1/completions`: continue a prompt, or each of several."""

    prompt: Text | TokenIds | Several[Text] | Several[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=20, description="Of each token, and of so many best ones.")
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _of_all(cls, best_of: int | None, known: ValidationInfo) -> int | None:
        if best_of is not None and best_of != (known.data.get("n") or 1):
            raise ValueError("the best of more answers than n")
        return best_of

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    @property
    def longest(self) -> int:
        """How many tokens an answer has at most."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """Of how many best tokens the log-probabilities are wanted; None for those of no token at all."""
        return self.logprobs


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`: what the assistant says next."""

    messages: Several[Message]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _one_of_each(self):
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is the older name of max_completion_tokens: give one of them.")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: set logprobs to true, or leave it out.")
        return self

    @property
    def longest(self) -> int | None:
        """How many tokens the answer has at most; None for as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """Of how many best tokens the log-probabilities are wanted; None for those of no token at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class Pace(_Strict):
    """`POST /pace`: slow motion."""

    seconds: float = Field(ge=0, le=2, description="An iteration takes at least so long.")


def to_prompt(messages: list[Message], tokenizer) -> str | list[int]:
    """What the model has to continue: by its chat template, or the messages' texts one after another, a line each.

    Raises:
        ValueError: messages that the template refuses.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "\n".join(message.text for message in messages)
    spoken: list[dict[str, Any]] = [{"role": message.role, "content": message.text} for message in messages]
    try:
        return tokenizer.apply_chat_template(spoken, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # templates raise what they like, jinja2's errors among them
        raise ValueError(f"The model's chat template refuses these messages: {error}") from error


def complaint(errors: list[dict[str, Any]]) -> tuple[str, str | None]:
    """What pydantic found wrong with the first parameter that is wrong, in a sentence; and that parameter's name."""
    if errors[0]["type"] == "json_invalid":
        return f"The body is no JSON: {errors[0]['ctx']['error']}.", None
    if errors[0]["loc"] == ("body",) and errors[0]["type"] in ("missing", "model_attributes_type"):
        return "Send a JSON object, with Content-Type: application/json.", None
    # Where there may be several types, a step such as "list[TextPart]" says which one was tried.
    paths = [
        [str(step) for step in error["loc"] if step != "body" and not str(step).startswith("list[")] for error in errors
    ]
    name = paths[0][0] if paths[0] else None
    about = [error for error, path in zip(errors, paths, strict=True) if path[:1] == paths[0][:1]]
    kinds = {error["type"]: path for error, path in zip(errors, paths, strict=True) if error in about}
    if "extra_forbidden" in kinds:
        return f"This server does not know the parameter {'.'.join(kinds['extra_forbidden'])!a}: leave it out.", name
    if name in NEUTRAL:
        return f"This server does not support {name}: leave it out.", name
    if set(kinds) == {"missing"}:
        return f"The parameter {name!a} is missing.", name
    # One that may be of several types has an error for each of them.
    reasons = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in about)
    return (f"{name}: " if name else "") + "; or: ".join(reasons), name


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error is one of these."""

    error: Error
