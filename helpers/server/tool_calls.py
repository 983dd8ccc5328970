"""Tool calls in the text of a chat, found while it grows.

The grammar of `tools.py` has made the text, so the calls in it are valid: this parser only has to see where the parts
of a call begin and end. Text that may be the beginning of a call is held back until it is certain.
"""

import uuid
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from ..server.output_delta import OutputDelta
from .formats import ChatFormatter
from .tools import ToolUse


class JSONEnd:
    """Finds the end of a JSON object in a text that grows."""

    def __init__(self):
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """Read the next part of a text, and return how many of its characters belong to the object; None if all do."""
        for place, character in enumerate(text, start=1):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place
        return None


class ToolCallParser:
    """Splits the text of one choice into what it says and the calls that it makes.

    Args:
        use: the tools and their notation.

    Attributes:
        num_calls: how many calls have begun.
    """

    def __init__(self, use: ToolUse):
        notation = use.notation
        self.num_calls, self._notation, self._unread = 0, notation, ""
        is_auto = use.choice == "auto"
        self._read = self._read_text if is_auto else self._read_name
        # What is before the name of the next call; a text may take white space before the trigger.
        self._opening = notation.begin[notation.begin.index(notation.trigger) if is_auto else 0 :]
        self._json_end = JSONEnd()

    def push(self, text: str, is_last: bool) -> dict[str, Any]:
        """Read the next part of the text.

        Args:
            text: the part.
            is_last: whether no text follows.

        Returns:
            What is new, as in OpenAI's chunks: "content" if there is text, and "tool_calls" if there are calls.
        """
        self._unread += text
        content, calls = "", defaultdict(dict)
        while (new := self._read()) is not None:
            if isinstance(new, str):
                content += new
            else:
                _add(calls[self.num_calls - 1], new)
        if is_last and self._read == self._read_text:
            content += self._unread  # it could have been the beginning of a call
        delta = {"content": content} if content else {}
        return delta | ({"tool_calls": [{"index": index} | call for index, call in calls.items()]} if calls else {})

    # Each of these reads one part and returns what is new, or None if it needs more text.

    def _read_text(self) -> str | None:
        trigger = self._notation.trigger
        content, found, rest = self._unread.partition(trigger)
        if found:
            self._unread, self._read = trigger + rest, self._read_name
            return content
        held_back = next(number for number in reversed(range(len(trigger))) if content.endswith(trigger[:number]))
        end = len(content) - held_back
        content, self._unread = content[:end], content[end:]
        return content or None

    def _read_name(self) -> dict[str, Any] | None:
        name, found, rest = self._unread.removeprefix(self._opening).partition(self._notation.middle)
        if not found or not self._unread.startswith(self._opening):
            return None
        self._unread, self._read, self._json_end = rest, self._read_arguments, JSONEnd()
        self.num_calls += 1
        function = {"name": name, "arguments": ""}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

    def _read_arguments(self) -> dict[str, Any] | None:
        end = self._json_end.find(self._unread)
        if not self._unread:
            return None
        arguments, self._unread = self._unread[:end], "" if end is None else self._unread[end:]
        if end is not None:
            self._read, self._opening = self._read_name, self._notation.between or self._notation.end
        return {"function": {"arguments": arguments}}


def _add(call: dict[str, Any], new: dict[str, Any]) -> None:
    """Add a part of a call to the parts before it."""
    arguments = call.get("function", {}).get("arguments", "") + new["function"]["arguments"]
    function = call.get("function", {}) | new["function"] | {"arguments": arguments}
    call.update(new | {"function": function})


@dataclass
class ToolCallFormatter(ChatFormatter):
    """Formats the responses of chats with tools. The model's calls are separate from its text.

    Args:
        use: the tools and their notation.
    """

    use: ToolUse | None = None
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)  # by choice

    def _choice(self, choice: int, output: OutputDelta) -> dict[str, Any]:
        delta, output = self._parse(choice, output)
        message = {"role": "assistant", "content": delta.get("content") or (None if "tool_calls" in delta else "")}
        for call in delta.get("tool_calls", ()):
            del call["index"]
            message.setdefault("tool_calls", []).append(call)
        return self._entry(choice, output, {"message": message})

    def _delta(self, choice: int, output: OutputDelta) -> dict[str, Any]:
        is_first = choice not in self._parsers
        delta, output = self._parse(choice, output)
        role = {"role": "assistant"} if is_first else {}
        return self._entry(choice, output, {"delta": role | delta})

    def _parse(self, choice: int, output: OutputDelta) -> tuple[dict[str, Any], OutputDelta]:
        """Return what is new in a choice, and the output with OpenAI's finish reason."""
        parser = self._parsers.setdefault(choice, ToolCallParser(self.use))
        delta = parser.push(output.new_text, output.finish_reason is not None)
        # OpenAI's reason for a call that the request names is "stop".
        if output.finish_reason == "stop" and parser.num_calls and not self.use.is_named:
            output = replace(output, finish_reason="tool_calls")
        return delta, output
