"""The contract of the four verbs: keys, shapes, masks, positions, purity, ends, text, errors, empty batches.

Most tests use the counting model, for which every token, mask and cache entry can be written out by hand.
test_batching_exactness.py shows that the tokens of real models are right, in whatever order rows join and leave.
"""

import copy
import itertools

import pytest
import torch
from conftest import CountingModel, alone

from helpers import Request, filter_batch, generate_next_token, init_batch, merge_batches

LISTS = ("request_ids", "responses", "token_ids", "tokens_remaining", "finish_reasons")
TENSORS = ("input_ids", "position_ids", "attention_mask")


def readable(batch: dict) -> dict:
    """Return a batch in plain Python, tensors with their shapes and dtypes: equal if and only if the batches are."""

    def plain(tensor):
        return tuple(tensor.shape), tensor.dtype, tensor.tolist()

    result = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            result[key] = plain(value)
        elif key == "past_key_values":
            result[key] = [(plain(layer.keys), plain(layer.values)) for layer in value.layers]
        else:
            result[key] = copy.deepcopy(value)
    return result


def keys_of(batch: dict) -> list:
    """Return the keys in the counting model's cache, which are the tokens that it has computed."""
    layer = batch["past_key_values"].layers[0]
    assert torch.equal(layer.values, -layer.keys)
    return layer.keys[:, 0, :, 0].tolist()


# --- keys, shapes and dtypes, written out -------------------------------------------------------------------------


def test_init_pads_on_the_left_and_numbers_each_row_from_its_own_first_token(letters):
    batch = init_batch([Request("bcd", 4, "x"), Request("f", 1, "y")], *letters)
    assert readable(batch) == {
        "request_ids": ["x", "y"],
        "input_ids": ((2, 3), torch.int64, [[2, 3, 4], [0, 0, 6]]),
        "position_ids": ((2, 3), torch.int64, [[0, 1, 2], [0, 0, 0]]),
        "attention_mask": ((2, 3), torch.int64, [[1, 1, 1], [0, 0, 1]]),
        "responses": ["bcd", "f"],
        "token_ids": [[], []],
        "tokens_remaining": [4, 1],
        "finish_reasons": [None, None],
    }


def test_prefill_yields_the_first_token_and_fills_the_cache(letters):
    batch = generate_next_token(init_batch([Request("bcd", 4, "x"), Request("f", 1, "y")], *letters), *letters)
    assert keys_of(batch) == [[2, 3, 4], [0, 0, 6]]
    del batch["past_key_values"]
    assert readable(batch) == {
        "request_ids": ["x", "y"],
        "input_ids": ((2, 1), torch.int64, [[5], [7]]),
        "position_ids": ((2, 1), torch.int64, [[3], [0]]),  # row 1 is finished: its position stays
        "attention_mask": ((2, 4), torch.int64, [[1, 1, 1, 1], [0, 0, 1, 1]]),
        "responses": ["bcde", "fg"],
        "token_ids": [[5], [7]],
        "tokens_remaining": [3, 0],
        "finish_reasons": [None, "length"],
    }


@pytest.fixture
def wide_and_narrow(letters):
    wide = init_batch([Request("bcd", 2, "x"), Request("f", 4, "y")], *letters)
    wide = generate_next_token(generate_next_token(wide, *letters), *letters)  # x is finished
    narrow = generate_next_token(init_batch([Request("ab", 3, "z")], *letters), *letters)
    return wide, narrow


def test_merge_pads_the_narrower_batch_on_the_left(wide_and_narrow):
    wide, narrow = wide_and_narrow
    merged = merge_batches(wide, narrow)
    assert keys_of(merged) == [[2, 3, 4, 5], [0, 0, 6, 7], [0, 0, 1, 2]]
    del merged["past_key_values"]
    assert readable(merged) == {
        "request_ids": ["x", "y", "z"],
        "input_ids": ((3, 1), torch.int64, [[6], [8], [3]]),
        "position_ids": ((3, 1), torch.int64, [[3], [2], [2]]),
        "attention_mask": ((3, 5), torch.int64, [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]),
        "responses": ["bcdef", "fgh", "abc"],
        "token_ids": [[5, 6], [7, 8], [3]],
        "tokens_remaining": [0, 2, 2],
        "finish_reasons": ["length", None, None],
    }


def test_filter_removes_finished_rows_and_trims_the_padding_that_all_others_share(wide_and_narrow):
    batch, removed_indices = filter_batch(merge_batches(*wide_and_narrow))
    assert removed_indices == [0]
    assert keys_of(batch) == [[6, 7], [1, 2]]  # the two columns that only x needed are gone
    del batch["past_key_values"]
    assert readable(batch) == {
        "request_ids": ["y", "z"],
        "input_ids": ((2, 1), torch.int64, [[8], [3]]),
        "position_ids": ((2, 1), torch.int64, [[2], [2]]),
        "attention_mask": ((2, 3), torch.int64, [[1, 1, 1], [1, 1, 1]]),
        "responses": ["fgh", "abc"],
        "token_ids": [[7, 8], [3]],
        "tokens_remaining": [2, 2],
        "finish_reasons": [None, None],
    }


def test_a_request_without_an_id_gets_a_unique_one(letters):
    first = init_batch([("ab", 1), ("c", 2)], *letters)
    second = init_batch([("ab", 1), Request("c", 2, "mine"), ("d", 1)], *letters)
    ids = first["request_ids"] + second["request_ids"]
    assert len(set(ids)) == 5
    assert ids[3] == "mine"


# --- purity -------------------------------------------------------------------------------------------------------


def test_no_verb_changes_its_argument_and_each_can_be_called_twice(random_pairs):
    # A real model, because it grows the cache that it is given, in place.
    verbs = {
        "generate": lambda batch: generate_next_token(batch, *random_pairs),
        "merge as first": lambda batch: merge_batches(batch, other),
        "merge as second": lambda batch: merge_batches(other, batch),
        "filter": lambda batch: filter_batch(batch)[0],
    }
    other = init_batch([Request("Still waters run", 5, "other")], *random_pairs)
    fresh = init_batch([Request("The quick brown fox", 3, 1), Request("Look", 2, 2)], *random_pairs)
    before_prefill = readable(fresh)
    other, prefilled = verbs["generate"](other), verbs["generate"](fresh)
    assert readable(fresh) == before_prefill
    assert readable(verbs["generate"](fresh)) == readable(prefilled)
    one_finished = verbs["generate"](prefilled)
    assert 0 in one_finished["tokens_remaining"], "filter must have something to do"
    for batch, (name, verb) in itertools.product((prefilled, one_finished), verbs.items()):
        before, other_before = readable(batch), readable(other)
        result = readable(verb(batch))
        assert readable(batch) == before, name
        assert readable(other) == other_before, name
        assert readable(verb(batch)) == result, name


# --- how a row ends -----------------------------------------------------------------------------------------------


def run(requests, model, tokenizer, steps: int) -> dict:
    batch = init_batch(requests, model, tokenizer)
    for _ in range(steps):
        batch = generate_next_token(batch, model, tokenizer)
    return batch


def test_eos_ends_a_row_and_is_not_part_of_its_text_even_if_it_is_no_special_token(letters):
    # Chat models end a turn with ids that only their generation config names. Here it is an ordinary letter.
    _, tokenizer = letters
    batch = run([("ab", 9), ("f", 9)], CountingModel(eos_token_id=[0, 5]), tokenizer, steps=4)
    assert batch["token_ids"] == [[3, 4, 5], [7, 8, 9, 0]]
    assert batch["responses"] == ["abcd", "fghi"]
    assert batch["finish_reasons"] == ["stop", "stop"]


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "no requests"),
        ([("ab", 2), ("", 2)], "text of at least one character"),
        ([("ab", 1), (" ", 2)], "has no tokens"),  # this tokenizer drops spaces
        ([("ab", 2), ("c", 0)], "max_tokens is a whole number of at least 1, not 0"),
        ([("ab", 2), ("c", 2.0)], "max_tokens is a whole number of at least 1, not 2.0"),
        ([("ab", 2), ("abc", 14)], r"3 prompt tokens and max_tokens 14, 17 in all, but the model's context is 16"),
        ([Request("ab", 2, "x"), Request("c", 1, "y"), Request("d", 1, "x")], r"must be unique.*\['x'\]"),
        ([("ab", 2), "cde"], r"A request is a \(prompt, max_tokens\) tuple or a Request, not 'cde'"),
        (("ab", 2), "A request is a .* tuple or a Request, not 'ab'"),  # one request in place of a list
    ],
)
def test_init_reports_what_is_wrong_with_a_request(letters, requests, message):
    with pytest.raises(ValueError, match=message):
        init_batch(requests, *letters)


def test_a_request_may_fill_the_context_exactly(letters):
    assert init_batch([("abc", 13), ("a", 1)], *letters)["tokens_remaining"] == [13, 1]


def test_merging_a_batch_that_has_not_been_prefilled_raises_an_error_that_says_what_to_call(letters):
    fresh = init_batch([Request("abc", 3, "late"), Request("d", 2, "later")], *letters)
    prefilled = run([("ef", 3)], *letters, steps=1)
    for pair in ((fresh, prefilled), (prefilled, fresh)):
        with pytest.raises(ValueError, match=r"\['late', 'later'\] has not been prefilled: call generate_next_token"):
            merge_batches(*pair)


def test_merging_two_rows_of_one_request_names_the_request(letters):
    first = run([Request("abc", 5, "x"), Request("d", 5, "y")], *letters, steps=1)
    second = run([Request("ef", 5, "z"), Request("g", 5, "y")], *letters, steps=1)
    with pytest.raises(ValueError, match=r"unique in a batch; both batches have \['y'\]"):
        merge_batches(first, second)


# --- empty --------------------------------------------------------------------------------------------------------


def test_filtering_all_rows_leaves_an_empty_batch_which_can_be_run_and_filtered(letters):
    empty, removed_indices = filter_batch(run([("bcd", 1), ("f", 1)], *letters, steps=1))
    assert removed_indices == [0, 1]
    assert all(empty[key] == [] for key in LISTS)
    assert all(empty[key].shape == (0, 1) and empty[key].dtype == torch.int64 for key in TENSORS)
    layer = empty["past_key_values"].layers[0]
    assert layer.keys.shape == layer.values.shape == (0, 1, 0, 1)
    assert readable(generate_next_token(empty, *letters)) == readable(empty)
    batch, removed_indices = filter_batch(empty)
    assert (readable(batch), removed_indices) == (readable(empty), [])


# --- the loop of existing courses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_the_loop_of_existing_courses_runs_unchanged_and_gives_every_request_its_own_tokens(embedded, batch_size):
    prompts = ["The quick brown fox", "The rain in Spain falls", "What comes up must"]
    queue = [(prompts[i % 3], max_tokens) for i, max_tokens in enumerate([10, 1, 4, 2, 6, 1, 1, 3, 12, 5])]

    # Word for word as in existing course material, except for the line that collects finished rows.
    finished = []
    request_queue = queue
    cached_batch = init_batch(request_queue[:batch_size])
    cached_batch = generate_next_token(cached_batch)
    request_queue = request_queue[batch_size:]
    while len(request_queue) > 0 or cached_batch["input_ids"].size(0) > 0:
        batch_capacity = batch_size - cached_batch["input_ids"].size(0)
        if batch_capacity > 0 and len(request_queue) > 0:
            new_batch = init_batch(request_queue[:batch_capacity])
            new_batch = generate_next_token(new_batch)
            request_queue = request_queue[batch_capacity:]
            cached_batch = merge_batches(cached_batch, new_batch)
        cached_batch = generate_next_token(cached_batch)
        finished += finished_rows(cached_batch)
        cached_batch, removed_indices = filter_batch(cached_batch)
        assert all(isinstance(index, int) for index in removed_indices)

    finished.sort()  # by id: init_batch numbers requests in their order
    assert [tokens for _, _, tokens in finished] == [
        alone(*embedded, prompt, max_tokens) for prompt, max_tokens in queue
    ]
    for (prompt, max_tokens), (_, response, tokens) in zip(queue, finished, strict=True):
        assert response == embedded[1].decode(
            embedded[1](prompt)["input_ids"] + alone(*embedded, prompt, max_tokens), skip_special_tokens=True
        )
        assert len(tokens) <= max_tokens


def finished_rows(batch: dict) -> list:
    rows = zip(*(batch[key] for key in ("request_ids", "responses", "token_ids", "tokens_remaining")), strict=True)
    return [(id, response, tokens) for id, response, tokens, remaining in rows if remaining == 0]
