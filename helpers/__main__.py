"""The command line of the engine: it prints a continuation of each prompt.

    python -m helpers "The quick brown fox"                 the text appears as it is generated
    python -m helpers --file prompts.txt --max-tokens 20    one prompt per line, all in one engine
    python -m helpers --file prompts.txt --json             one JSON object per output, for a program
    echo "What comes up" | python -m helpers                standard input, one prompt per line

The outputs are those of `Engine.generate`, in the order of the prompts. Each is printed as soon as it and all earlier
ones are finished. A prompt that fails does not affect the others. Every field of `SamplingParams` but
`structured_outputs` is an option, because the options are derived from that class.

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
from collections.abc import Callable
from typing import Annotated, Any, Literal

try:
    from cyclopts import Parameter

    # no torch yet: --help needs none
    from .command_line import FLAT, EngineOptions, fields_of, make_command, options_from, parse
    from .engine import EngineConfig, RequestOutput, SamplingParams
except KeyboardInterrupt:  # `main` cannot handle it yet, and these imports take a while
    sys.exit(130)

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
            lines = {location: line for location, line in numbered if line.strip()}
    except UnicodeDecodeError:
        raise ValueError(f"{file or 'standard input'} is not UTF-8 text: convert it to UTF-8.") from None
    if not lines:
        raise ValueError(f"There are no prompts in {file or 'standard input'}: write one per line.")
    return lines


def as_record(output: RequestOutput) -> dict[str, Any]:
    """Return an output as a JSON object with names of `RequestOutput` and `RequestMetrics`; times are in seconds."""
    names = ("prompt", "request_id", "index", "text", "token_ids", "finish_reason")
    record = {name: getattr(output, name) for name in names}
    record |= {name: getattr(output.metrics, name) if output.token_times else None for name in ("ttft", "e2e")}
    optional = ("logprobs", "prompt_logprobs", "error")
    return record | {name: value for name in optional if (value := getattr(output, name)) is not None}


def generate(engine, lines: dict[str, str], params: SamplingParams, as_json: bool, **options: Any) -> bool:
    """Print the outputs for all prompts in their order, and return whether none failed.

    Args:
        engine: an idle engine.
        lines: the prompts, by location; error messages name the location.
        params: for all prompts.
        as_json: whether to print a JSON object per output; otherwise the prompt and its continuation are printed.
        options: those of `add_request`, for all prompts.
    """
    finished: list[list[RequestOutput]] = []
    for number, prompt in enumerate(lines.values()):
        try:
            engine.add_request(prompt, params, number, **options)
            finished.append([])
        except ValueError as error:
            finished.append([RequestOutput(number, prompt, "", [], "error", error=str(error))])
    counts = [len(refused) or params.n for refused in finished]
    grows = len(lines) * params.n == 1 and not as_json and not finished[0]
    for (location, prompt), outputs, count in zip(lines.items(), finished, counts, strict=True):
        try:
            if grows:
                print(prompt, end="", flush=True)
            while len(outputs) < count:
                for output in engine.step():
                    if grows:
                        print(output.new_text, end="", flush=True)
                    if output.finish_reason is not None:
                        finished[output.request_id].append(output)
        finally:
            if grows:  # also after Ctrl-C: the shell's prompt gets a line of its own
                print(flush=True)
        print_outputs(location, outputs, as_json, grows)
    return not any(output.error for outputs in finished for output in outputs)


def print_outputs(location: str, outputs: list[RequestOutput], as_json: bool, is_shown: bool) -> None:
    """Print the finished outputs of a prompt. If the text `is_shown` already, only an error is left to print."""
    for output in sorted(outputs, key=lambda output: output.index):
        if as_json:
            print(json.dumps(as_record(output)))
        elif output.error is not None:
            print(f"{location}: {output.error}", file=sys.stderr)
        elif not is_shown:
            print(output.prompt + output.text)
    sys.stdout.flush()  # a program that reads from a pipe gets each output at once


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
    engine_options: Annotated[EngineOptions, FLAT] = DEFAULTS[0],
    sampling_options: Annotated[SamplingOptions, FLAT] = DEFAULTS[1],
) -> Callable[[], bool]:
    """Continue prompts with the engine.

    The text of one prompt appears as it is generated. Several prompts run together and are printed in their order.

    Args:
        prompts: texts to continue; without any, those in --file or on standard input.
        file: one prompt per line.
        as_json: print one JSON object per output.
        model: a folder or a Hub id; the embedded model if omitted.
        dtype: the precision of the weights and of the computation.
        weights: store the weights of linear layers as integers of 8 or 4 bits, so that decoding reads fewer bytes.
        device: cpu, cuda, ...; cuda where available if omitted.
        adapter: a folder with a LoRA adapter of the model, in PEFT's format, for all prompts.
    """
    sampling = SamplingParams(**fields_of(SamplingOptions, sampling_options))
    config = EngineConfig(**fields_of(EngineOptions, engine_options), weights=weights)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None and not as_json:
            raise ValueError(f"--{name.replace('_', '-')} needs --json: plain text has no room for them.")
    if prompts and file:
        raise ValueError("Give prompts or --file, not both.")
    lines = {f"prompt {number}": text for number, text in enumerate(prompts, start=1)} or read_prompts(file)

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
    return lambda: generate(engine, lines, sampling, as_json, adapter=name)


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
