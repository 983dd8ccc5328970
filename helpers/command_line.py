"""What the command lines share: options from the fields of dataclasses, and errors of one line."""

import dataclasses
import json
import math
import re
import sys
import textwrap
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn

from cyclopts import App, CoercionError, CycloptsError, Parameter
from docstring_parser import parse as parse_docstring

from .engine import POLICIES, EngineConfig
from .metrics import LIMITS

FLAT = Parameter(name="*", negative_iterable=())  # the fields of a dataclass are the options
_OPTIONS: dict[str, str] = {}  # what `options_from` made: the name of a field's option, by the name of the field


def options_from(source: type, group: str, /, **kinds: Any) -> type:
    """Make a dataclass whose fields are command-line options: some fields of a dataclass, with their defaults.

    The help of an option is what the docstring of `source` says about the field, with values instead of the names of
    constants.

    Args:
        source: the dataclass.
        group: under which `--help` lists the options.
        kinds: the fields by name, each with the type that its option has; `Annotated` with a `Parameter` for other
            settings of the option.
    """
    module = sys.modules[source.__module__]
    about = {documented.arg_name: documented.description for documented in parse_docstring(source.__doc__).params}
    defaults = {field.name: field.default for field in dataclasses.fields(source)}

    def value(name: re.Match) -> str:
        found = getattr(module, name[0], None)
        return str(found) if isinstance(found, int | float) else name[0]

    options = []
    for name, kind in kinds.items():
        words = re.sub(r"\b[A-Z][A-Z_]+\b", value, " ".join(about[name].split()))
        kind, *own = typing.get_args(kind) if typing.get_origin(kind) is Annotated else (kind,)
        names = [name for parameter in own for name in parameter.name or ()]
        _OPTIONS[name] = names[0] if names else f"--{name.replace('_', '-')}"
        option = Annotated[kind, Parameter(help=words, group=group, negative_iterable=()), *own]
        options.append((name, option, dataclasses.field(default=defaults[name])))
    made = dataclasses.make_dataclass(f"{source.__name__}Options", options, frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts knows no fields of classes of the standard library
    return made


EngineOptions = options_from(
    EngineConfig,
    "Engine",
    max_batch_size=Annotated[int, Parameter(name=("--rows", "--max-batch-size"))],
    max_tokens_per_step=Annotated[int, Parameter(name=("--tokens-per-step", "--max-tokens-per-step"))],
    policy=Annotated[Literal[*POLICIES], Parameter(help="which waiting requests are admitted first.")],
    num_blocks=Annotated[int | None, Parameter(name=("--blocks", "--num-blocks"))],
    block_size=int,
    compute=Annotated[
        Literal["int8"] | None,
        Parameter(help="with --weights int8: round the inputs of linear layers, too, and multiply integers."),
    ],
    kv_cache=Literal["auto", "int8"],
    tensor_parallel_size=int,
    speculative=Annotated[
        Literal["ngram", "draft"] | None,
        Parameter(help="guess tokens ahead, from the text itself or with a draft model; no token changes."),
    ],
    num_speculative_tokens=int,
    draft_model=Annotated[
        str | None, Parameter(help="a folder or Hub id of a model with the same tokenizer, for --speculative draft.")
    ],
)


def fields_of(options_type: type, options: Any) -> dict[str, Any]:
    """Return the values of the fields that `options_from` made, to make an object of their source."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options_type)}


def make_command(program: str, description: str, options: type | None = None) -> App:
    """Make the command of a module, which returns its options.

    Args:
        program: the module.
        description: for `--help`; its indented lines are examples.
        options: the dataclass of the options; if omitted, the caller gives the command a function.
    """
    examples = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
    shown = examples.sub(lambda found: f"```text\n{textwrap.dedent(found[0])}```\n", description)
    settings = {"version_flags": (), "help_format": "markdown", "config": refuse_rounding}
    settings["default_parameter"] = Parameter(allow_repeating=True)  # the last value counts
    app = App(f"python -m {program}", help=shown, **settings)
    if options is not None:

        @app.default
        def given(chosen: Annotated[options | None, FLAT] = None):
            return chosen or options()

    return app


def refuse_rounding(app, commands, arguments) -> None:
    """Refuse a value such as 1.5 for an integer option, because cyclopts would round it."""
    for argument in arguments:
        for token in argument.tokens:
            if int in (argument.hint, *typing.get_args(argument.hint)) and "." in token.value:
                raise CoercionError(argument=argument, token=token, target_type=int)


def parse(app: App, arguments: list[str] | None) -> Any:
    """Return what the application's function returns for the arguments.

    Raises:
        SystemExit: 2 for invalid arguments, after one line on stderr that says why; 0 after `--help`.
    """
    try:
        parsed = app(arguments, print_error=False, exit_on_error=False, result_action="return_value")
    except (CycloptsError, OSError, ValueError) as error:
        refuse(
            app, re.sub(r"^\w+(?= must )|\b[a-z]+_[a-z_]+\b", lambda name: _OPTIONS.get(name[0], name[0]), str(error))
        )
    if parsed is None:
        raise SystemExit(0)
    return parsed


def refuse(app: App, reason: str) -> NoReturn:
    """Exit with status 2 after one line on stderr that says what is wrong with the arguments."""
    print(f"{app.name[0]}: {reason}", file=sys.stderr)
    raise SystemExit(2)


def one_value(convert: Callable[[str], Any]) -> Parameter:
    """Return the settings of an option that takes one value, which a function converts or refuses by a ValueError."""
    return Parameter(
        converter=lambda _, tokens: convert(tokens[0].value), n_tokens=1, accepts_keys=False, negative_iterable=()
    )


def latency_limits(text: str) -> dict[str, float]:
    """Return the limits in a text such as "ttft=1,e2e=10", in seconds."""
    try:
        limits = {name: float(seconds) for name, seconds in (limit.split("=") for limit in text.split(","))}
        if set(limits) <= set(LIMITS) and all(0 < limit < math.inf for limit in limits.values()):
            return limits
    except ValueError:
        pass
    known = ",".join(f"{name}=SECONDS" for name in LIMITS)
    raise ValueError(f"limits are some of {known}, not {text!r}.")


def json_object(text: str) -> dict:
    """Return the JSON object in a text."""
    try:
        if isinstance(found := json.loads(text), dict):
            return found
    except ValueError:
        pass
    raise ValueError(f"give a JSON object, such as '{{\"temperature\": 1}}', not {text!r}.")
