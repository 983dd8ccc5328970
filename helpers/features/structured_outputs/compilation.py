"""Compiles descriptions with llguidance. The same code runs in the engine's process, and as the program of a worker.

As a program, it reads a line of JSON per description and answers with one (`worker.py`). It imports nothing of the
package, so it starts in about a third of a second. Each description is compiled in a fork of it, whose end costs
nothing: a new process would have to read the vocabulary.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A regular expression of a few characters can describe billions of states. With these limits, one that is made to be
# slow costs tens of milliseconds per step instead of seconds, and tens of megabytes, and then an error.
LIMITS = dict(initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=100_000)
# White space as `json.dumps` writes it. If a grammar allows any, a model that is unsure can write nothing else until
# max_tokens. A schema can ask for other white space with llguidance's own keyword, "x-guidance".
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NUM_PROBED = 16  # tokens
SLICE = 0.1  # seconds of processor time in which a server compiles a description before others get a turn
DEADLINE = 3.0  # the most seconds for one description; most take a millisecond
MEMORY = 128 * 2**20  # bytes that a worker may take for descriptions
STACK = 2**20  # bytes; threads of an engine's process have more, so what a worker compiles cannot overflow there


def vocabulary(tokenizer_json: str, size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    """Return the bytes of every token, which takes up to a second to prepare.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: the tokenizer is neither byte-level nor has byte tokens.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=size, eos_token=eos_token_ids)


def compile_text(tokens: "LLTokenizer", eos_token_ids: frozenset[int], kind: str, text: str) -> "LLMatcher":
    """Return a matcher that has read nothing.

    Args:
        tokens: see `vocabulary`.
        eos_token_ids: the tokens that end an output.
        kind: "json", "regex", "choice" (as a JSON list) or "grammar".
        text: what an output must match.

    Raises:
        ValueError: the description is invalid or too complex, or no text matches it.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    start = LLMatcher(tokens, _source(kind, text), log_level=0, limits=limits)
    if start.is_error():
        raise ValueError(f"{kind} cannot be compiled: {reason(start)}")
    _probe(start.deep_copy(), eos_token_ids, kind)
    return start


def reason(matcher: "LLMatcher") -> str:
    """Return the message of a matcher that has failed, on one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:500]


def _source(kind: str, text: str) -> str:
    """Return a description in llguidance's own format."""
    from llguidance import LLMatcher, grammar_from

    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    return grammar_from("grammar", text)


def _probe(matcher: "LLMatcher", eos_token_ids: frozenset[int], kind: str) -> None:
    """Read a few tokens: most grammars that cannot be continued, or only slowly, show it at once."""
    for _ in range(NUM_PROBED):
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            if "NoExtension" in matcher.get_error():
                raise ValueError(f"No text of this model's tokens matches {kind}: change it.")
            raise ValueError(f"{kind} is too complex: {reason(matcher)}")
        allowed = (8 * index + bits[index].bit_length() - 1 for index in range(len(bits)) if bits[index])
        token_id = next((id for id in allowed if id not in eos_token_ids), None)
        if token_id is None:
            return
        matcher.consume_token(token_id)


def _serve(lines: TextIO, answers: TextIO) -> None:
    """Compile one description after the other.

    Answer what is wrong with it, null, or false if compiling it exceeds a limit.
    """
    tokenizer_json, size, eos_token_ids = json.loads(lines.readline())
    tokens = vocabulary(tokenizer_json, size, eos_token_ids)
    _limit_memory()
    print("ready", file=answers, flush=True)
    for line in lines:
        seconds, *description = json.loads(line)
        if (child := os.fork()) == 0:
            try:
                signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the fork
                _answer(answers, tokens, eos_token_ids, *description)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            print("false", file=answers, flush=True)


def _answer(answers: TextIO, tokens: "LLTokenizer", eos_token_ids: list[int], kind: str, text: str) -> None:
    try:
        compile_text(tokens, frozenset(eos_token_ids), kind, text)
        error = None
    except Exception as caught:
        error = str(caught) or type(caught).__name__
    signal.setitimer(signal.ITIMER_PROF, 0)  # an answer is never cut off
    print(json.dumps(error), file=answers, flush=True)


def _limit_memory() -> None:
    """Let this process take `MEMORY` more than it has, where the operating system can limit it (Linux)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends its workers
    threading.stack_size(STACK)
    thread = threading.Thread(target=_serve, args=(sys.stdin, sys.stdout))
    thread.start()
    thread.join()
