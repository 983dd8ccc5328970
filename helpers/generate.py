"""Answer prompts from the command line, with the engine.

    python -m helpers.generate "The quick brown fox"                 the text appears as it comes
    python -m helpers.generate --file prompts.txt --max-tokens 20    one prompt a line, answered together
    python -m helpers.generate --file prompts.jsonl --json           settings of its own for each, answers for a program
    echo "What comes up" | python -m helpers.generate                standard input, one prompt a line

The claim: answers are what `Engine.generate` gives, in the order of the prompts, each shown as soon as it and all
before it are there. A prompt that cannot be answered costs the others nothing. Every field of `SamplingParams` is an
option, because the options are made from that class.

The exit status is 0; 1 if a prompt has no answer (stderr says why); 2 for a setting that has no meaning.
"""

import argparse
import contextlib
import inspect
import json
import os
import re
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from .admission import Prompt
from .engine import Engine
from .engine_config import EngineConfig
from .models import load_model
from .outputs import RequestOutput
from .sampling import SamplingParams
from .scheduler import POLICIES

FIELDS = [field.name for field in fields(SamplingParams)]


@dataclass(frozen=True)
class Line:
    """A prompt as it was given, not yet understood: one of the arguments, or a line of the input."""

    source: str  # where it is, for messages
    text: str
    is_json: bool = False

    def read(self) -> tuple[Prompt, dict[str, Any]]:
        """The prompt, and the settings that are its own.

        Raises:
            ValueError: no JSON object with a prompt, or a setting that does not exist.
        """
        prompt, settings = self.text, {}
        if self.is_json:
            try:
                settings = json.loads(self.text)
            except ValueError as error:
                raise ValueError(f"This is not JSON: {error}.") from None
            if not isinstance(settings, dict) or not isinstance(settings.get("prompt"), str | list):
                raise ValueError('A line is an object with a prompt, as in {"prompt": "What comes up", "n": 1}.')
            prompt = settings.pop("prompt")
            if unknown := [name for name in settings if name not in FIELDS]:
                raise ValueError(f"There is no setting {unknown[0]!r}; there are {', '.join(FIELDS)}.")
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:  # half a character, or a byte that is none, which tokenizers refuse
                raise ValueError(f"Character {error.start + 1} is no text: {prompt[error.start]!a}.") from None
        return prompt, settings


def lines_of(prompts: Seq[str], file: str | None) -> list[Line]:
    """The prompts in the arguments, else in the file, else on standard input, where blank lines do not count.

    Raises:
        OSError: the file cannot be read.
        ValueError: both prompts and a file, none at all, or bytes that are no text.
    """
    if prompts and file:
        raise ValueError("Give prompts or --file, not both.")
    if prompts:
        return [Line(f"prompt {number}", text) for number, text in enumerate(prompts, start=1)]
    if not file and sys.stdin.isatty():
        print("Prompts, one a line; Ctrl-D ends them (--help: what else there is).", file=sys.stderr)
    name = file or "<stdin>"
    try:
        # utf-8-sig: what Windows writes in front of a text is not part of the first prompt.
        with open(file, encoding="utf-8-sig") if file else contextlib.nullcontext(sys.stdin) as stream:
            texts = [text.removesuffix("\n") for text in stream]
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text.") from None
    lines = [Line(f"{name}:{number}", text, name.endswith(".jsonl")) for number, text in enumerate(texts, start=1)]
    lines = [line for line in lines if line.text.strip()]
    if not lines:
        raise ValueError(f"There are no prompts in {name}.")
    return lines


class Run:
    """Some lines on their way through the engine.

    Args:
        engine: one that is idle.
        lines: see `lines_of`.
        defaults: the settings of those lines that have none of their own.
        as_json: show a JSON object for each answer, else the prompt and what follows it.

    Attributes:
        failed: whether a prompt that was shown has no answer.
    """

    def __init__(self, engine: Engine, lines: Seq[Line], defaults: dict[str, Any], as_json: bool = False):
        self.engine, self.lines, self.as_json = engine, lines, as_json
        self.failed = False
        self._ended: list[list[RequestOutput]] = [[] for _ in lines]  # each line's answers
        self._missing: list[int] = []  # how many more each line waits for
        self._shown = 0  # how many lines
        for number, line in enumerate(lines):
            prompt = line.text
            try:
                prompt, settings = line.read()
                params = SamplingParams(**defaults | settings)
                engine.add_request(prompt, params, number)
                self._missing.append(params.n)
            except ValueError as error:
                self._missing.append(0)
                self._ended[number].append(RequestOutput(number, prompt, "", [], "error", error=str(error)))
        # Several answers grow at the same time, and only one of them could be at the end of the screen.
        self._streams = not as_json and self._missing == [1]

    def show(self) -> None:
        """Answer them, and show every answer as soon as its turn has come.

        Whoever interrupts sees all that are finished, still in order.
        """
        # No bar where an answer can be seen growing, nor (None) without a terminal.
        with tqdm(total=sum(self._missing), unit="answer", leave=False, disable=self._streams or None) as bar:
            try:
                if self._streams:
                    self._write(self._text_of(self.lines[0].read()[0]))
                self._show_next()
                while self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        if self._streams:
                            self._write(output.new_text)
                        if output.finish_reason is not None:
                            self._ended[output.request_id].append(output)
                            self._missing[output.request_id] -= 1
                            bar.update()
                    self._show_next()
            except KeyboardInterrupt:
                if self._streams:
                    self._write("\n")
                self._missing = [0] * len(self.lines)  # what is not there will not come
                self._show_next()
                raise

    def _show_next(self) -> None:
        """Show the lines whose turn has come: they and all before them are complete."""
        while self._shown < len(self.lines) and not self._missing[self._shown]:
            for output in sorted(self._ended[self._shown], key=lambda output: output.index):
                self._show_answer(output)
            self._ended[self._shown].clear()
            self._shown += 1
        sys.stdout.flush()  # a reader behind a pipe wants them now, too

    def _show_answer(self, output: RequestOutput) -> None:
        self.failed |= output.error is not None
        # By tqdm's `write`, because a bar that is on the screen has to move out of the way.
        if self.as_json:
            tqdm.write(json.dumps(as_record(output)), sys.stdout)
        elif self._streams:
            self._write("\n")
        elif output.error is None:
            tqdm.write(self._text_of(output.prompt) + output.text, sys.stdout)
        if output.error is not None and not self.as_json:
            sys.stdout.flush()
            tqdm.write(f"{self.lines[output.request_id].source}: {output.error}", sys.stderr)

    def _text_of(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(prompt)

    def _write(self, text: str) -> None:
        print(text, end="", flush=True)


def as_record(output: RequestOutput) -> dict[str, Any]:
    """An answer as a program wants it, in names of `RequestOutput` and `RequestMetrics`; times are in seconds.

    `request_id` counts the prompts from 0, `index` the answers to a prompt. `logprobs` are there if they were asked
    for, `error` is if there was one.
    """
    record = {name: getattr(output, name) for name in ("prompt", "request_id", "index", "text", "token_ids")}
    record["finish_reason"] = output.finish_reason
    record |= {name: getattr(output.metrics, name) if output.token_times else None for name in ("ttft", "e2e")}
    record |= {name: value for name in ("logprobs", "error") if (value := getattr(output, name)) is not None}
    return record


# --- the command line ---------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The command's options. Those for sampling are `SamplingParams`' fields, whichever there are."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers.generate",
        usage="%(prog)s [options] [prompt ...]",
        description="Answer prompts with the engine. One prompt's text appears as it comes; several are answered "
        "together, and printed in their order.",
        allow_abbrev=False,  # an abbreviation would stop working once there is another field
    )
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="what to continue; else --file; else stdin")
    parser.add_argument(
        "--file", help='one prompt a line, or in a .jsonl file {"prompt": ...} with any of the settings for sampling'
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line for each answer")

    group = parser.add_argument_group("model")
    group.add_argument("--model", help="a folder or Hub id (default: the model that comes with the course)")
    group.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="(default: float32)")
    group.add_argument("--device", type=_device, help="cpu, cuda, ... (default: cuda if there is one)")

    group = parser.add_argument_group("engine")
    default = EngineConfig()
    help_for = _help_for(default)
    for name, also in ("max_batch_size", ["--rows"]), ("max_tokens_per_step", []):
        options = {"type": int, "metavar": "N", "default": getattr(default, name), "help": help_for[name]}
        group.add_argument(*also, f"--{name.replace('_', '-')}", dest=name, **options)
    group.add_argument(
        "--policy", choices=list(POLICIES), default=default.policy, help=f"who goes first (default: {default.policy})"
    )

    add_options(parser.add_argument_group("sampling"), SamplingParams())
    return parser


def add_options(group, settings) -> None:
    """Add an option for each field of a dataclass to a parser or a group. One not given leaves no attribute behind."""
    help_for, hints = _help_for(settings), typing.get_type_hints(type(settings))
    for field in fields(settings):
        options = _as_argument(hints[field.name]) | {"help": help_for[field.name], "default": argparse.SUPPRESS}
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _as_argument(hint) -> dict[str, Any]:
    """How argparse reads a value of that type: a flag, one text after the other, a number or text, else JSON."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # None is what it is when it is left out
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Seq:
        return {"action": "append", "metavar": "TEXT"}
    metavar = {int: "N", float: "X", str: "TEXT"}
    return {"type": hint if hint in metavar else json.loads, "metavar": metavar.get(hint, "JSON")}


def _help_for(settings) -> dict[str, str]:
    """What a dataclass says about its fields under "Attributes" in its docstring, and their defaults."""
    section = (inspect.getdoc(type(settings)) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    help_for = {field.name: "" for field in fields(settings)}
    for names, text in re.findall(r"^(\w[\w, ]*): (.*(?:\n .*)*)", textwrap.dedent(section), re.MULTILINE):
        help_for |= {name: " ".join(text.split()).replace("%", "%%").rstrip(".") for name in names.split(", ")}
    return {
        name: text if getattr(settings, name) == () else f"{text} (default: {getattr(settings, name)})"
        for name, text in help_for.items()
    }


def _device(name: str) -> str:
    try:
        torch.empty(1, device=name).cpu()
    except Exception as error:  # torch has a kind of its own for each way in which a device can be missing
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What libraries have to remark stays with them: that a text is long, that the network is away, that it was slow.

    Whatever keeps an answer from coming is an exception, and is told. Downloads show their bars where somebody looks.
    """
    libraries = transformers_logging, hub_logging
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity(library.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)


def main(argv: Seq[str] | None = None) -> int:
    """Do what the arguments say.

    Returns:
        The exit status: 0, or 1 if a prompt has no answer, 130 after Ctrl-C, 141 if the reader has gone.

    Raises:
        SystemExit: 2 for a setting that has no meaning, 0 after --help.
    """
    try:
        with _quiet():
            return _main(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads any more. Python flushes stdout once more at the end, and that shall not complain, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(argv: Seq[str] | None) -> int:
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)  # options may stand between prompts
    if "logprobs" in args and not args.json:
        parser.error("--logprobs goes with --json: a text has no room for them.")
    defaults = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    try:
        SamplingParams(**defaults)  # this, like the next two, before a model is loaded for nothing
        lines = lines_of(args.prompts, args.file)
        config = EngineConfig(args.max_batch_size, args.max_tokens_per_step, policy=args.policy)
        model, tokenizer = load_model(args.model, args.device, args.dtype and getattr(torch, args.dtype))
        engine = Engine(model, tokenizer, config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    run = Run(engine, lines, defaults, args.json)
    run.show()
    return int(run.failed)


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the letter ö is no reason to stop
    sys.exit(main())
