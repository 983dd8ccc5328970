"""The messages of a chat, and the prompt that a model's chat template makes of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from .strict import Strict
from .tools import Tool, ToolCall

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1, fail_fast=True)]  # an error for every item would take seconds
PER_MESSAGE = 20  # characters that a chat template adds to a message, about


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Several[ToolCall] | None = Field(None, description="What the assistant called.")
    tool_call_id: str | None = Field(None, description="The call of which this message of a tool is the result.")
    name: str | None = Field(None, description="The author's name. Only chat templates that know it use it.")
    # OpenAI's client adds these to the messages that it has received, and programs send such messages again.
    refusal: None = None
    annotations: Annotated[list, Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content_is_text(cls, given):
        for part in given if isinstance(given, list) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
                raise ValueError(f"Only text content is supported, not {kind!a}.")
        return given

    @model_validator(mode="after")
    def _parts_agree(self):
        if self.content is None and self.tool_calls is None:
            raise ValueError("A message needs content, unless it has tool_calls.")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"Only the assistant's messages have tool_calls, not those of the {self.role}.")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("A tool's message needs a tool_call_id, and no other message has one.")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        others = {name: value for name in ("tool_call_id", "name") if (value := getattr(self, name)) is not None}
        calls = {"tool_calls": [call.for_template for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": self.role, "content": self.text} | calls | others


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt for a chat: by the model's chat template or, without one, the messages' texts, one per line.

    Args:
        messages: the chat.
        tokenizer: has the template.
        check_length: raises a ValueError for a text that is too long to be tokenized.
        tools: what the template is given to describe to the model, if anything.
    """

    messages: list[Message]
    tokenizer: Any
    check_length: Callable[[str], None]
    tools: list[Tool] | None = None

    def __len__(self) -> int:
        """Return about how many characters the prompt has, without making it."""
        texts = sum(len(message.text) + PER_MESSAGE for message in self.messages)
        others = [one for one in self.messages if one.tool_calls or one.tool_call_id or one.name]
        return texts + sum(len(repr(one)) for one in (*others, *(self.tools or ())))

    def __call__(self) -> str | list[int]:
        """Make the prompt, which takes a while.

        Raises:
            ValueError: messages that are too long, or that the template refuses.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            if any(message.tool_calls or message.role == "tool" for message in self.messages):
                raise ValueError("The model has no chat template, so it cannot read tool calls and their results.")
            return "\n".join(message.text for message in self.messages)
        chat = [message.for_template for message in self.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None
        try:
            text = self.tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise errors of many classes, jinja2's among them
            raise ValueError(f"The model's chat template refuses these messages: {error}") from error
        self.check_length(text)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
