"""The three loops: equal outputs in the order of the requests, the counts that the lessons state, and errors."""

import itertools

import pytest
from conftest import PROMPTS, CountingModel, alone

from helpers import Request, generate_alone, generate_continuous, generate_static
from helpers.models import require_exact_batching

LOOPS = {
    "alone": lambda requests, rows, *pair, **options: generate_alone(requests, *pair, **options),
    "static": generate_static,
    "continuous": generate_continuous,
}


@pytest.mark.parametrize(  # 50: a queue shorter than the rows
    ("loop", "rows"), [("alone", 1), *itertools.product(["static", "continuous"], [1, 4, 50])]
)
def test_every_loop_gives_every_request_its_own_tokens_in_the_order_of_the_requests(random_pairs, loop, rows):
    model, tokenizer = random_pairs
    requests = [Request(prompt, 1 + 7 * row % 20, f"request {row}") for row, prompt in enumerate(PROMPTS)]
    outputs = LOOPS[loop](requests, rows, model, tokenizer).outputs
    assert [output.request_id for output in outputs] == [request.request_id for request in requests]
    for request, output in zip(requests, outputs, strict=True):
        ids = alone(model, tokenizer, request.prompt, request.max_tokens)
        assert output.token_ids == ids
        assert output.finish_reason == ("stop" if ids[-1] == tokenizer.eos_token_id else "length")
        assert output.prompt == request.prompt
        whole = tokenizer.decode(tokenizer(request.prompt)["input_ids"] + ids, skip_special_tokens=True)
        assert request.prompt + output.text == whole
    assert {output.finish_reason for output in outputs} == {"stop", "length"}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_accepts_tuples_and_uses_the_default_pair(embedded, loop):
    requests = [("The quick brown fox", 8), ("The rain in Spain falls", 1), ("What comes up", 3)]
    outputs = LOOPS[loop](requests, 2).outputs
    assert [output.token_ids for output in outputs] == [alone(*embedded, *request) for request in requests]
    assert [output.request_id for output in outputs] == [0, 1, 2]


# --- the race: 32 requests, 8 rows, every 8th with a long output ----------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "passes", "prefills", "finished"),
    [
        (generate_static, 400, 4, 4 * 7 * 90),  # 4 batches, each with a request of 100 tokens
        (generate_continuous, 6 + 126, 6, 0),  # the same work in a third of the forward passes
    ],
)
def test_the_race_takes_the_expected_numbers_of_forward_passes_and_slot_steps(
    letters, loop, passes, prefills, finished
):
    model = CountingModel(context=128, eos_token_id=99)  # no request ends early
    trace = loop([("abcdefg", 100 if row % 8 == 0 else 10) for row in range(32)], 8, model, letters[1]).trace
    assert (trace.forward_passes, trace.slot_steps) == (passes, 8 * passes)
    with_prefill = [any(row.work == "prefill" for row in forward_pass.row_steps) for forward_pass in trace.passes]
    assert sum(with_prefill) == prefills
    assert (trace.output_tokens, trace.prompt_tokens) == (680, 32 * 7)
    assert (trace.work["prefill"], trace.work["decode"], trace.work["finished"]) == (32, 648, finished)
    assert trace.work.total() == trace.slot_steps


# --- errors and the progress bar ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_that_cannot_fit_is_refused_before_any_other_runs(letters, loop, monkeypatch):
    model, tokenizer = letters
    require_exact_batching(model)  # runs the model, but only the first time

    def forward(**_):
        raise AssertionError("the model ran")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(ValueError, match="the model's context is 16"):
        LOOPS[loop]([("ab", 2), ("c", 3), ("abc", 14)], 2, model, tokenizer)


@pytest.mark.parametrize("loop", ["static", "continuous"])
@pytest.mark.parametrize("rows", [0, -1])
def test_a_loop_needs_at_least_one_row(letters, loop, rows):
    with pytest.raises(ValueError, match=f"max_batch_size is at least 1, not {rows}"):
        LOOPS[loop]([("ab", 2), ("c", 1)], rows, *letters)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_progress_bar_is_shown_on_request_and_nothing_otherwise(letters, loop, capsys):
    requests = [("ab", 2), ("c", 3), ("def", 1)]
    LOOPS[loop](requests, 2, *letters)
    assert capsys.readouterr() == ("", "")
    LOOPS[loop](requests, 2, *letters, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err and "3/3" in err
