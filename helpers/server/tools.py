"""Tools: functions that a client offers, and that the model may call in a chat.

A model calls tools in the notation of its chat template, and there is no standard: the template itself is asked. It
renders a chat with a call of a known name, and the text around this name and its arguments is the notation. From it
follow a grammar, which makes every call valid, and the search for calls in the text (tool_calls.py).
"""

import contextlib
import functools
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from ..features.structured_outputs import StructuredOutputs
from ..features.structured_outputs.compilation import JSON_OPTIONS
from .strict import Strict

MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; no arguments if left out.")
    strict: bool | None = Field(None, description="Arguments match the schema in any case.")


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class FunctionCall(Strict):
    name: Name
    arguments: str


class ToolCall(Strict):
    """A call in a message of the assistant, as this server or another one returned it."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    @property
    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it: its arguments are an object."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The arguments of tool call {self.id!r} are not JSON: {error}.") from error
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class CallNotation:
    """How a chat template writes calls: `begin NAME middle ARGUMENTS end`, with `between` from one call to the next.

    Attributes:
        begin, middle, end: the texts before the name, between name and arguments, and after the arguments.
        between: what follows the arguments of a call, up to the name of the next one; None if there is no second call.
    """

    begin: str
    middle: str
    end: str
    between: str | None

    @property
    def trigger(self) -> str:
        """The text by which a call is recognized: the part of `begin` before any JSON."""
        return self.begin.partition("{")[0].strip() or self.begin.strip()


def find_notation(tokenizer) -> CallNotation:
    """Return the notation of a tokenizer's chat template.

    Raises:
        ValueError: there is no template, or it does not know tools, or its notation is not understood.
    """
    template = tokenizer.chat_template  # a text, or several by name
    notation = _find_notation(tokenizer, str(template) if template else None)
    if isinstance(notation, str):
        raise ValueError(f"This model cannot call tools: {notation}. Leave tools out.")
    return notation


@functools.lru_cache(maxsize=8)
def _find_notation(tokenizer, template: str | None) -> CallNotation | str:
    """Return the notation, or why there is none."""
    if not template:
        return "it has no chat template"
    name, values = "a_tool_of_this_name", ("first value", "second value")
    calls = [{"type": "function", "id": f"call{i}abcd", "function": {"name": name, "arguments": {"key": value}}}
             for i, value in enumerate(values)]  # fmt: skip
    function = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}

    def render(*messages: dict[str, Any], **settings) -> str:
        chat = [{"role": "user", "content": "A question"}, *messages]
        return tokenizer.apply_chat_template(chat, tokenize=False, **settings)

    def rendered_calls(number: int) -> str:
        # The chat goes on, because some templates add thoughts to an answer to the newest question.
        results = [{"role": "tool", "name": name, "content": "A result", "tool_call_id": call["id"]} for call in calls]
        others = {"role": "assistant", "content": "A text"}, {"role": "user", "content": "Another question"}
        calling = {"role": "assistant", "content": "", "tool_calls": calls[:number]}
        return render(calling, *results[:number], *others).removeprefix(render(add_generation_prompt=True))

    try:
        if name not in render(tools=[{"type": "function", "function": function}]):
            return "its chat template does not know tools"
        one = rendered_calls(1)
        turn_end = render({"role": "assistant", "content": "A text"}).rpartition("A text")[2].strip()
    except Exception as error:  # templates raise errors of many classes
        return f"its chat template refuses a call ({error})"
    begin, found, rest = one.partition(name)
    middle, has_arguments, end = rest.partition(json.dumps({"key": values[0]}))
    if not (found and has_arguments and begin.strip() and middle and turn_end and turn_end in end):
        return "its chat template does not write calls as a name and a JSON object"
    end, between = end.partition(turn_end)[0], None
    with contextlib.suppress(Exception):  # of templates that allow only one call
        between = rendered_calls(2).partition(json.dumps({"key": values[0]}))[2].partition(name)[0]
    special = [token for token in tokenizer.all_special_tokens if token in begin + middle + end]
    if special:
        return f"its chat template writes calls with the special token {special[0]}"
    return CallNotation(begin, middle, end, between)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a chat, and which of them the model may or must call.

    Attributes:
        notation: how the model writes calls.
        tools: the functions that it may call.
        choice: "auto" for text or calls, "required" for at least one call, or the name of the function to call.
        parallel: whether it may call several.
    """

    notation: CallNotation
    tools: tuple[Function, ...]
    choice: str
    parallel: bool = True

    @property
    def is_named(self) -> bool:
        """Whether the request names the function."""
        return self.choice not in ("auto", "required")

    @property
    def structured_outputs(self) -> StructuredOutputs:
        """The grammar of the model's text.

        Raises:
            ValueError: the parameters of a function are not the schema of an object, or no function has the name.
        """
        notation, literal = self.notation, functools.partial(json.dumps, ensure_ascii=False)
        tools = [tool for tool in self.tools if not self.is_named or tool.name == self.choice]
        if not tools:
            raise ValueError(f"tool_choice names the function {self.choice!r}, which is not among the tools.")
        several = self.parallel and not self.is_named and notation.between is not None
        after_trigger = notation.begin.partition(notation.trigger)[2]
        more = f"({literal(notation.between)} call)*" if several else ""
        calls = [f"{literal(tool.name + notation.middle)} %json {_schema(tool)}" for tool in tools]
        lines = [f"call: {' | '.join(f'call_{place}' for place in range(len(calls)))}"]
        lines += [f"call_{place}: {call}" for place, call in enumerate(calls)]
        if self.choice == "auto":  # a lazy rule ends with the first trigger: from there on, the text is a call
            lines += [f"start: TEXT | trigger {literal(after_trigger)} call {more} {literal(notation.end)}"]
            lines += [f"trigger[lazy]: TEXT {literal(notation.trigger)}", "TEXT: /(.|\\n)*/"]
        else:
            lines += [f"start: {literal(notation.begin)} call {more} {literal(notation.end)}"]
        return StructuredOutputs(grammar="\n".join(lines))


def _schema(tool: Function) -> str:
    """Return the JSON schema of a function's arguments, for a grammar."""
    schema = NO_ARGUMENTS if tool.parameters is None else tool.parameters
    if schema.get("type") != "object":
        raise ValueError(f'The parameters of tool {tool.name} must be a JSON schema with "type": "object".')
    try:
        return json.dumps({"x-guidance": JSON_OPTIONS} | schema, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError(f"The parameters of tool {tool.name} are nested too deeply: simplify them.") from error
