"""The messages of a chat, and the prompt that a model's chat template makes of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from .strict import Strict

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1, fail_fast=True)]  # an error for every item would take seconds
PER_MESSAGE = 20  # characters that a chat template adds to a message, about


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given):
        """Drop unset fields: OpenAI's client adds many to a message, and programs send messages again."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    @field_validator("content", mode="before")
    @classmethod
    def _content_is_text(cls, given):
        for part in given if isinstance(given, list) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
                raise ValueError(f"Only text content is supported, not {kind!a}.")
        return given

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt for a chat: by the model's chat template or, without one, the messages' texts, one per line.

    Args:
        messages: the chat.
        tokenizer: has the template.
        check_length: raises a ValueError for a text that is too long to be tokenized.
    """

    messages: list[Message]
    tokenizer: Any
    check_length: Callable[[str], None]

    def __len__(self) -> int:
        """Return about how many characters the prompt has, without making it."""
        return sum(len(message.text) + PER_MESSAGE for message in self.messages)

    def __call__(self) -> str | list[int]:
        """Make the prompt, which takes a while.

        Raises:
            ValueError: messages that are too long, or that the template refuses.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return "\n".join(message.text for message in self.messages)
        chat = [{"role": message.role, "content": message.text} for message in self.messages]
        try:
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise errors of many classes, jinja2's among them
            raise ValueError(f"The model's chat template refuses these messages: {error}") from error
        self.check_length(text)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
