"""The command line of the engine: it prints a continuation of each prompt.

    python -m helpers "The quick brown fox"                 the text appears as it is generated
    python -m helpers --file prompts.txt --max-tokens 20    one prompt per line, all in one engine
    python -m helpers --file prompts.jsonl --json           each prompt with its own settings; output for a program
    echo "What comes up" | python -m helpers                standard input, one prompt per line

The outputs are those of `Engine.generate`, in the order of the prompts. Each is printed as soon as it and all earlier
ones are finished. Several outputs of one prompt are numbered. A prompt that fails does not affect the others. Every
field of `SamplingParams` is an option, because the options are derived from that class. Structured outputs have options
of their own.

The exit status is 0 on success; 1 if a prompt failed (stderr says why); 2 for an invalid setting; 130 after Ctrl-C; 141
if the program that reads the output has closed the pipe.
"""

import fileinput
import json
import logging
import os
import sys
import typing
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

try:
    from cyclopts import Parameter
    from tqdm import tqdm

    # no torch yet: --help needs none
    from .command_line import FLAT, EngineOptions, fields_of, make_command, options_from, parse
    from .engine import EngineConfig, Prompt, RequestOutput, SamplingParams
    from .features.structured_outputs import StructuredOutputs
except KeyboardInterrupt:  # `main` cannot handle it yet, and these imports take a while
    sys.exit(130)

STRUCTURED = Parameter(group="Structured outputs", negative_iterable=())
FIELDS = typing.get_type_hints(SamplingParams)
OPTIONS = {name: kind for name, kind in FIELDS.items() if name != "structured_outputs"}
SamplingOptions = options_from(SamplingParams, "Sampling", **OPTIONS)
DEFAULTS = EngineOptions(), SamplingOptions()


def read_prompts(file: str | None) -> dict[str, str]:
    """Return the non-blank lines of a file, or of standard input, by location ("prompts.txt:1").

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8, or it has no prompts.
    """
    if file is None and sys.stdin.isatty():
        print("Type one prompt per line; Ctrl-D ends the input. (--help lists the options.)", file=sys.stderr)
    try:
        # utf-8-sig: the byte order mark that Windows editors write is not part of the first prompt.
        with fileinput.FileInput(file or "-", encoding="utf-8-sig") as stream:
            numbered = ((f"{stream.filename()}:{stream.lineno()}", line.removesuffix("\n")) for line in stream)
            lines = {place: line for place, line in numbered if line.strip()}
    except UnicodeDecodeError:
        raise ValueError(f"{file or 'standard input'} is not UTF-8 text: convert it to UTF-8.") from None
    if not lines:
        raise ValueError(f"There are no prompts in {file or 'standard input'}: write one per line.")
    return lines


def parse_json(line: str) -> tuple[Prompt, dict[str, Any]]:
    """Return the prompt in a line of JSON, and the settings that the line has.

    Raises:
        ValueError: the line is not a JSON object with a prompt.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"This line is not JSON: {error}.") from None
    match request:
        case {"prompt": prompt, **settings}:
            return prompt, settings
    raise ValueError('A line must be an object with a prompt, as in {"prompt": "What comes up", "n": 1}.')


def with_settings(defaults: SamplingParams, settings: dict[str, Any]) -> SamplingParams:
    """Return `defaults`, except for the settings of a line.

    Raises:
        ValueError: a setting is unknown or invalid.
    """
    if unknown := settings.keys() - FIELDS:
        raise ValueError(f"There is no setting {min(unknown)!r}: use {', '.join(FIELDS)}.")
    if isinstance(described := settings.get("structured_outputs"), dict):
        try:
            settings["structured_outputs"] = StructuredOutputs(**described)
        except TypeError as error:
            raise ValueError(f"structured_outputs: {error}.") from None
    return replace(defaults, **settings)


def as_record(output: RequestOutput) -> dict[str, Any]:
    """Return an output as a JSON object with names of `RequestOutput` and `RequestMetrics`; times are in seconds."""
    names = ("prompt", "request_id", "index", "text", "token_ids", "finish_reason")
    record = {name: getattr(output, name) for name in names}
    record |= {name: getattr(output.metrics, name) if output.token_times else None for name in ("ttft", "e2e")}
    optional = ("logprobs", "prompt_logprobs", "error")
    return record | {name: value for name in optional if (value := getattr(output, name)) is not None}


@dataclass
class PromptOutputs:
    """A prompt, where it was read, how many outputs it gets (0 if it was refused), and those that are finished."""

    place: str
    prompt: Prompt
    num_outputs: int = 0
    finished: list[RequestOutput] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.finished) >= self.num_outputs


def generate(
    engine, lines: dict[str, str], defaults: SamplingParams, is_jsonl: bool, as_json: bool, **options: Any
) -> bool:
    """Print the outputs for all lines in order, and return whether none failed. Ctrl-C prints the finished ones.

    Args:
        engine: an idle engine.
        lines: one prompt each, by location; error messages name the location.
        defaults: the settings of prompts without settings of their own.
        is_jsonl: whether each line is a JSON object (see `parse_json`).
        as_json: whether to print a JSON object per output; otherwise the prompt and its continuation are printed.
        options: those of `add_request`, for all prompts.
    """
    prompts = [PromptOutputs(place, line) for place, line in lines.items()]
    for number, one in enumerate(prompts):
        try:
            one.prompt, settings = parse_json(one.prompt) if is_jsonl else (one.prompt, {})
            params = with_settings(defaults, settings)
            engine.add_request(one.prompt, params, number, **options)
            one.num_outputs = params.n
        except ValueError as error:
            one.finished.append(RequestOutput(number, one.prompt, "", [], "error", error=str(error)))
    if [one.num_outputs for one in prompts] == [1] and not as_json:
        print_while_it_grows(engine, prompts[0])
    else:
        print_in_order(engine, prompts, as_json)
    return not any(output.error for one in prompts for output in one.finished)


def print_while_it_grows(engine, one: PromptOutputs) -> None:
    """Print the text of a single output as it is generated: on a terminal, only the last line can grow."""
    try:
        print(text_before(one.prompt, engine.tokenizer), end="", flush=True)
        while not one.is_done:
            for output in engine.step():
                print(output.new_text, end="", flush=True)
                if output.finish_reason is not None:
                    one.finished.append(output)
    finally:
        print(flush=True)
    if (error := one.finished[0].error) is not None:
        print(f"{one.place}: {error}", file=sys.stderr)


def print_in_order(engine, prompts: list[PromptOutputs], as_json: bool) -> None:
    """Print the outputs of each prompt once they and all earlier ones are finished."""
    has_groups = not as_json and any(one.num_outputs > 1 for one in prompts)
    # None: no bar unless stderr is a terminal.
    with tqdm(total=sum(one.num_outputs for one in prompts), unit="output", leave=False, disable=None) as bar:
        turns = deque(prompts)

        def print_next() -> None:
            one = turns.popleft()
            print_outputs(one, as_json, engine.tokenizer)
            if has_groups and one.finished and turns:
                tqdm.write("", sys.stdout)  # a blank line after the outputs of one prompt
            sys.stdout.flush()  # a program that reads from a pipe gets each output at once

        try:
            while turns:
                while not turns[0].is_done:
                    for output in engine.step():
                        if output.finish_reason is not None:
                            prompts[output.request_id].finished.append(output)
                            bar.update()
                print_next()
        finally:  # after Ctrl-C, some prompts are left
            while turns:
                print_next()


def print_outputs(one: PromptOutputs, as_json: bool, tokenizer) -> None:
    """Print the finished outputs of a prompt. Unlike `print`, `tqdm.write` moves a bar out of the way."""
    for output in sorted(one.finished, key=lambda output: output.index):
        is_single = one.num_outputs <= 1
        name = one.place if is_single else f"{one.place}, output {output.index + 1} of {one.num_outputs}"
        if as_json:
            tqdm.write(json.dumps(as_record(output)), sys.stdout)
        elif output.error is not None:
            tqdm.write(f"{name}: {output.error}", sys.stderr)
        else:
            label = "" if is_single else f"[{name}] "
            tqdm.write(label + text_before(output.prompt, tokenizer) + output.text, sys.stdout)


def text_before(prompt: Prompt, tokenizer) -> str:
    """Return the text of a prompt, which may be token ids."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


def read_text(file: str) -> str:
    """Return the text of a file, without the byte order mark that Windows editors write."""
    return Path(file).read_text(encoding="utf-8-sig")


command = make_command("helpers", __doc__)


@command.default
def prepare(
    *prompts: str,
    file: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    model: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    weights: Literal["int8", "int4"] | None = None,
    device: str | None = None,
    adapter: str | None = None,
    json_schema: Annotated[str | None, STRUCTURED] = None,
    regex: Annotated[str | None, STRUCTURED] = None,
    choice: Annotated[list[str] | None, STRUCTURED] = None,
    grammar: Annotated[str | None, STRUCTURED] = None,
    engine_options: Annotated[EngineOptions, FLAT] = DEFAULTS[0],
    sampling_options: Annotated[SamplingOptions, FLAT] = DEFAULTS[1],
) -> Callable[[], bool]:
    """Continue prompts with the engine.

    The text of one prompt appears as it is generated. Several prompts run together and are printed in their order.

    Args:
        prompts: texts to continue; without any, those in --file or on standard input.
        file: one prompt per line; in a .jsonl file, {"prompt": ...} with any of the sampling settings.
        as_json: print one JSON object per output.
        model: a folder or a Hub id; the embedded model if omitted.
        dtype: the precision of the weights and of the computation.
        weights: store the weights of linear layers as integers of 8 or 4 bits, so that decoding reads fewer bytes.
        device: cpu, cuda, ...; cuda where available if omitted.
        adapter: a folder with a LoRA adapter of the model, in PEFT's format, for all prompts.
        json_schema: a file with a JSON schema that every text must match.
        regex: a regular expression that every text must match.
        choice: every text is one of these; give the option once for each.
        grammar: a file with a grammar for every text, in the notation of Lark or of llama.cpp (GBNF).
    """
    sampling = SamplingParams(**fields_of(SamplingOptions, sampling_options))
    config = EngineConfig(**fields_of(EngineOptions, engine_options), weights=weights)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None and not as_json:
            raise ValueError(f"--{name.replace('_', '-')} needs --json: plain text has no room for them.")
    if prompts and file:
        raise ValueError("Give prompts or --file, not both.")
    if any(given is not None for given in (json_schema, regex, choice, grammar)):
        files = [None if file is None else read_text(file) for file in (json_schema, grammar)]
        sampling = replace(sampling, structured_outputs=StructuredOutputs(files[0], regex, choice, files[1]))
    lines = {f"prompt {number}": text for number, text in enumerate(prompts, start=1)} or read_prompts(file)
    is_jsonl = file is not None and file.endswith(".jsonl")

    import torch

    from .model_engine import Engine
    from .models import load_model

    try:
        torch.empty(1, device=device).cpu()
    except Exception as error:  # each kind of missing device has its own exception
        raise ValueError(f"Device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    engine = Engine(*load_model(model, device, getattr(torch, dtype), weights), config)
    if adapter is not None:
        engine.load_adapter("adapter", adapter)
    name = None if adapter is None else "adapter"
    return lambda: generate(engine, lines, sampling, is_jsonl, as_json, adapter=name)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    disabled = logging.root.manager.disable
    logging.disable()  # logs and warnings of libraries; errors arrive as exceptions
    try:
        with warnings.catch_warnings(action="ignore"):
            return 1 - parse(command, argv)()
    except SystemExit as end:  # after --help or invalid settings
        return end.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 141
    finally:
        logging.disable(disabled)


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the letter ö shows a question mark
    sys.exit(main())
