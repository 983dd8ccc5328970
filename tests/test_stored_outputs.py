"""What the lessons store, token ids, texts and lengths, hangs on no near tie.

Another processor adds up its numbers in another order, and logits differ by about 1e-5. Where the best token leads
by less than that, a stored output would fail on another machine; so every prompt whose output is stored
must be chosen such that the best token leads clearly in every step.

Lessons 11 and 12 draw tokens. A drawn token changes if its random number is too close to the border of its share. So
each lesson runs again with a model whose logits differ a little, and must print the same.
"""

import copy
import functools
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import nbformat
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import helpers
from helpers import dequantized, generate_continuous, integer_reference, kv_cache, load_model, tiny_adapter, workloads
from tests.support.adapters import merged

CLEAR = 0.01
CLEAR_INTEGERS = 0.1  # where rounded inputs turn a last bit into a step
CLEAR_ENOUGH = 0.002  # for lesson 14, whose tokens change where the lead is small; ten times what a processor changes
THAT_DRAW = [
    Path(__file__).parents[1] / "notebooks" / f"{name}.ipynb" for name in ("11_sampling", "12_structured_output")
]

# Lesson 6 runs requests of lessons 2 and 3 again, beside the workloads; lesson 9 some of lessons 1 and 2.
LESSON_1 = ["What goes up", "Question: How do you bake bread?\nAnswer:", "Once upon a time, a lonely"]
LESSON_2 = ["The rain in Spain falls", "The quick brown fox jumped over the", "What comes up"]
LESSON_3 = [
    *("The rain in Spain", "The quick brown fox jumped", "What comes", "Many hands make", "Look"),
    *("Many hands", "What comes up must", "A rolling stone"),
]
LESSON_15 = ["The quick brown", "There was once a brave"]
LESSON_15 += [f"Once upon a time, {hero}" for hero in ("a brave", "a quiet", "a curious", "a stubborn")]
LESSON_15_LIVE = [f"Once upon a time, {hero}" for hero in ("a proud gardener", "a small weaver", "a poor sailor")]
LESSON_16 = LESSON_15_LIVE


def generated(model, requests):
    return generate_continuous(requests, 16, model=model, tokenizer=load_model()[1]).outputs


def unclear(model, outputs, least):
    """Return each (prompt, lead) at whose tightest position the best token's logit leads by less than `least`."""
    leads = []
    for output in outputs:
        prompt = load_model()[1](output.prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids], device=model.device)).logits[0]
        best, second = logits[len(prompt) - 1 : -1].topk(2).values.unbind(1)
        leads.append((output.prompt, (best - second).min().item()))
    return [pair for pair in leads if pair[1] < least]


def merged_model(name):
    return merged(load_model()[0], tiny_adapter(name)) if name else load_model()[0]


STORED = {
    "lessons": [(prompt, 400) for prompt in [*LESSON_1, *LESSON_2, *LESSON_3]],
    "mixed": workloads.mixed(32),
    "pages": workloads.pages(8),
    "one_beginning": workloads.one_beginning(),
    "stories": workloads.race(4, every=1, long=40),  # lesson 7 lets them run out of memory
    "4 stories": workloads.race(5, every=1, long=100)[1:],
    "told_again": workloads.told_again(),
    "lesson 15": [(prompt, 40) for prompt in LESSON_15],
    "lesson 16": [(prompt, 40) for prompt in LESSON_16],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adapter"), [*((name, None) for name in STORED), ("lesson 15", "sea"), ("lesson 15", "honest")]
)
def test_the_best_token_of_a_stored_output_leads_clearly_at_every_step(name, adapter):
    model = merged_model(adapter)
    assert unclear(model, generated(model, STORED[name]), CLEAR) == []


@functools.cache
def clear_stories():
    return generated(load_model()[0], workloads.clear_stories())


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_lesson_14_stores_no_near_tie_of_the_model_or_of_its_quantized_versions(weights):
    model = dequantized(load_model()[0], weights) if weights else load_model()[0]
    own = generated(model, workloads.clear_stories()) if weights else []
    assert unclear(model, [*own, *clear_stories()], CLEAR_ENOUGH) == []


def test_the_notebook_on_integers_compares_texts_whose_leads_exceed_a_step_of_rounding():
    notebook = Path(__file__).parents[1] / "notebooks" / "extra" / "integers_all_the_way.ipynb"
    source = next(cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.id == "engine")
    numbers = [int(number) for number in re.search(r"in \(([\d, ]+)\)\]", source)[1].split(",")]
    model = integer_reference(load_model()[0])
    outputs = generated(model, [workloads.clear_stories()[number] for number in numbers])
    assert len(outputs) == 11 and unclear(model, outputs, CLEAR_INTEGERS) == []


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_lesson_15_stores_no_near_tie_where_the_weights_change(keeps_cache):
    tokenizer = load_model()[1]
    for story in LESSON_15_LIVE[: 1 if keeps_cache else None]:
        ids, cache = tokenizer(story)["input_ids"], kv_cache.new()
        for tokens, model in ((24, load_model()[0]), (30, merged_model("honest"))):
            for _ in range(tokens):
                with torch.no_grad():
                    new = torch.tensor([ids[kv_cache.length(cache) :]])
                    best = model(input_ids=new, past_key_values=cache, use_cache=True).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > CLEAR
                ids.append(int(best.indices[0]))
            cache = cache if keeps_cache else kv_cache.new()


def perturbed_pair(pair):
    """Return a copy of a model whose logits differ by about 1e-4, ten times what processors differ by."""
    model, tokenizer = copy.deepcopy(pair[0]), pair[1]
    norm = model.transformer.ln_f
    noise = torch.randn(norm.weight.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight *= 1 + 2e-5 * noise
        text = torch.tensor([tokenizer("Once upon a time, a lonely")["input_ids"]])
        change = (model(text).logits - pair[0](text).logits).abs().max().item()
    assert 5e-5 < change < 2e-4
    return model, tokenizer


def printed(shell, source):
    """Run a cell; return what it prints, and its last value as text."""
    with redirect_stdout(io.StringIO()) as stdout:
        result = shell.run_cell(source, silent=False)
    result.raise_error()
    return stdout.getvalue().partition("Out[")[0].rstrip("\n"), repr(result.result) if result.result else ""


@pytest.mark.slow
@pytest.mark.parametrize("path", THAT_DRAW, ids=lambda path: path.stem)
def test_a_lesson_that_draws_prints_the_same_with_slightly_different_logits(path, monkeypatch):
    pair = perturbed_pair(load_model())
    monkeypatch.setattr(helpers, "load_model", lambda: pair)
    shell, different = InteractiveShell(), []
    for cell in nbformat.read(path, as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and not {"bootstrap", "nbval-ignore-output"} & set(tags):
            stored = "".join(output.get("text", "") for output in cell.outputs).rstrip("\n")
            values = "".join(output.get("data", {}).get("text/plain", "") for output in cell.outputs)
            text, value = printed(shell, cell.source)
            if (text, value) != (stored, values):
                different.append((cell.id, text, stored, value, values))
    assert different == []
