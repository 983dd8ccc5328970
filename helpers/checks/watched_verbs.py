"""Run a student's verbs and loop on a watched model, and return what it computed as data.

The output does not tell a server that refills its rows from one that waits. The forward passes do: this file says
which requests took part in each.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..models import load_model
from .watch import Pass, model_named, other_model, quiet, watched

OTHER_PAD = 7
# With EOS and the pad, these are as many tokens as the model's vocabulary has.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?'"


@cache
def other_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for `other_model`: one token per letter. Its pad is not its EOS, and id 0 is a letter."""
    tokens = list(LETTERS)
    tokens.insert(other_model().config.eos_token_id, "<eos>")
    tokens.insert(OTHER_PAD, "<pad>")
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def tokenizer_named(name: str):
    """Return the tokenizer of the "course" model or of the "other" one."""
    return load_model()[1] if name == "course" else other_tokenizer()


def verb_on_model(function: Callable, argument, model_name: str, tokenizer_name: str):
    """Run a verb; return its batch, with (rows, cached columns, tokens per row) of each forward pass."""
    model = model_named(model_name)
    with quiet(), watched(model) as passes:
        batch = function(argument, model, tokenizer_named(tokenizer_name))
    if not isinstance(batch, Mapping):
        return batch
    return {**batch, "forward passes": [(one.rows, one.cached, one.tokens) for one in passes]}


def outputs_on_model(function: Callable, first: list, second: list, model_name: str, tokenizer_name: str) -> dict:
    """Run a loop over two groups of requests; return its outputs, and the rows of its largest forward pass."""
    model = model_named(model_name)
    with quiet(), watched(model) as passes:
        outputs = function(first, second, model, tokenizer_named(tokenizer_name))
    return {"the list of outputs": outputs, "most rows": max((one.rows for one in passes), default=0)}


def loop_in_words(function: Callable, requests: list[tuple[str, int, int]], max_batch_size: int) -> dict:
    """Run a serving loop on the course's model; return its outputs, and which requests each forward pass computes."""
    model, tokenizer = load_model()
    with quiet(), watched(model) as passes:
        outputs = function(requests, max_batch_size)
    prompts = [tokenizer(prompt)["input_ids"] for prompt, *_ in requests]
    return {"the list of outputs": outputs, "forward passes": _participants(passes, prompts)}


def _participants(passes: Sequence[Pass], prompts: list[list[int]]) -> list[tuple[str, list]]:
    """Return ("prefill" or "decode step", the numbers of its requests) for each pass; None stands for an unknown row.

    The requests of a prefill are known by their prompts, those of a decode step by the tokens of the previous pass.
    """
    awaited: dict[int, tuple[int, int]] = {}  # per request: tokens in its row in the next pass, and the newest one
    described, prefilled = [], set()
    for one in passes:
        numbers: list[int | None] = []
        for ids, mask, token in zip(one.input_ids, one.attention_mask, one.next_ids, strict=True):
            row = sum(mask), ids[-1]
            if one.cached:
                known = (number for number, state in awaited.items() if state == row)
            else:
                known = (n for n, prompt in enumerate(prompts) if prompt == ids[-row[0] :] and n not in prefilled)
            number = next((number for number in known if number not in numbers), None)
            numbers.append(number)
            if number is not None:
                awaited[number] = row[0] + 1, token
        if one.cached:  # other requests have left: a later one with the same prompt may get the same tokens
            awaited = {number: awaited[number] for number in numbers if number is not None}
        prefilled.update(numbers)
        kind = "decode step" if one.cached else "prefill"
        described.append((kind, sorted(numbers, key=lambda number: (number is None, number))))
    return described
