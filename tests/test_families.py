"""Every model family, on the installed transformers: in a batch, each request gets the tokens that it gets alone.

`make test` runs these tests on the newest transformers, `make test-oldest` on the oldest that the course supports. They
also run on the GPU, if there is one. The families are in families.yaml, and SUPPORT.md shows the results.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from helpers import Request, generate_static, init_batch, load_model
from helpers.models import context_length, require_exact_batching
from tests.support import families
from tests.support.families import (
    BF16_MARGIN,
    CONTEXT,
    FAMILIES,
    MIN_REQUESTS,
    SIZES,
    Family,
    build,
    by_name,
    logit_range,
    not_ragged_because,
    prompts,
    reference,
    tokenizer,
)
from tests.tools.support_matrix import MEASURED, PADDED, PAGE, RAGGED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
on_every_device = pytest.mark.parametrize("device", DEVICES)
of_every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture(autouse=True)
def known_to_this_transformers(request):
    family = request.node.callspec.params.get("family") if hasattr(request.node, "callspec") else None
    if isinstance(family, Family):
        families.skip_unless_known(family)


# --- exactness --------------------------------------------------------------------------------------------------------


@on_every_device
@of_every_family
def test_random_joins_and_leaves_change_no_token(family, device):
    alone = reference(family, device=device)
    assert families.serve_through_verbs(alone.model, alone.requests, seed=0) == alone.tokens


@of_every_family
def test_the_requests_are_long_and_short_and_some_end_early(family):
    alone = reference(family)
    stopped = [len(ids) < request.max_tokens for request, ids in zip(alone.requests, alone.tokens, strict=True)]
    assert len(alone.requests) >= MIN_REQUESTS
    assert any(stopped) and not all(stopped)
    assert families.generate(alone.model, alone.requests[stopped.index(True)])[0] == alone.tokens[stopped.index(True)]
    assert len({token for ids in alone.tokens for token in ids}) > 5
    if family.window:
        prompts = [len(tokenizer()(request.prompt)["input_ids"]) for request in alone.requests]
        assert min(prompts) < family.window < max(prompts)
        lengths = [size + len(ids) for size, ids in zip(prompts, alone.tokens, strict=True)]
        assert sum(length > 2 * family.window for length in lengths) >= MIN_REQUESTS


@on_every_device
@of_every_family
def test_a_static_batch_may_grow_wider_than_the_context(family, device):
    # The long prompt finishes early and the short one continues: 40 + 30 columns. GPT-Neo and MPT can attend to 64.
    model = build(family, device=device)
    families.set_eos(model, None)  # neither request ends early
    long, short = prompts()[SIZES.index((40, 20))], prompts()[SIZES.index((5, 30))]
    requests = [Request(long, 6, "long"), Request(short, 30, "short")]
    expected = [families.generate(model, request) for request in requests]
    outputs = generate_static(requests, 2, model, tokenizer()).outputs
    for output, (tokens, logits) in zip(outputs, expected, strict=True):
        index = families.first_difference(tokens, output.token_ids)
        assert index is None or families.lead(logits[index : index + 1]) < families.LEAD
        assert output.finish_reason == "length"


@on_every_device
@of_every_family
def test_in_bf16_only_near_ties_change(family, device):
    alone = reference(family, torch.bfloat16, device, num_requests=2)
    actual = families.serve_through_verbs(alone.model, alone.requests, seed=0)
    for tokens, ids, logits in zip(alone.tokens, actual, alone.logits, strict=True):
        index = families.first_difference(tokens, ids)
        if index is None:
            assert tokens == ids
        else:
            difference = logits[index, tokens[index]] - logits[index, ids[index]]
            assert difference / logit_range(logits[index]) < BF16_MARGIN


# --- what cannot be exact is refused ----------------------------------------------------------------------------------

REASONS = yaml.safe_load(Path(families.__file__).with_name("refused_models.yaml").read_text("utf-8"))
SMALL = REASONS.pop("all")
REFUSED = {
    model_type: (reason, settings) for reason, models in REASONS.items() for model_type, settings in models.items()
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_cannot_be_batched_exactly_is_refused(model_type):
    reason, settings = REFUSED[model_type]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {model_type}")
    config = AutoConfig.for_model(model_type, **SMALL | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    families.draw_weights(model)
    with pytest.raises(ValueError, match=reason):
        require_exact_batching(model)
    with pytest.raises(ValueError, match=reason):
        init_batch([("The quick brown fox", 5)], model, tokenizer())


@pytest.mark.parametrize(
    "settings",
    [REFUSED["bart"][1] | {"model_type": "bart"}, {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 64}],
)
def test_an_encoder_decoder_is_refused_by_name_and_by_model(settings, tmp_path):
    config = AutoConfig.for_model(**SMALL | {"num_layers": 2, "num_heads": 4} | settings)
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        require_exact_batching(AutoModelForSeq2SeqLM.from_config(config))
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("phi3 (longrope)", {"original_max_position_embeddings": CONTEXT}), ("llama4_text", {"floor_scale": CONTEXT + 1})],
)
def test_a_row_so_long_that_it_would_change_other_rows_is_refused(name, settings):
    # Both architectures treat long texts differently, and look at the whole batch to tell whether a text is long.
    family = by_name(name)
    model = build(replace(family, config=family.config | {"max_position_embeddings": 4 * CONTEXT} | settings))
    assert context_length(model) == CONTEXT
    with pytest.raises(ValueError, match=f"the model's context is {CONTEXT}"):
        init_batch([(prompts()[0], CONTEXT)], model, tokenizer())


def test_texts_may_be_of_any_length_in_bloom_but_not_in_mpt():
    assert context_length(build(by_name("bloom"))) is None
    assert context_length(build(by_name("mpt"))) == CONTEXT


# --- SUPPORT.md, whose table agrees with families.yaml ----------------------------------------------------------------

OUTDATED = "run `make support-matrix`"


@pytest.fixture(scope="module")
def table():
    families = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in families.splitlines() if line.startswith("|")]
    return rows[0], rows[2:]


def pinned(file: str) -> str:
    return re.search(r"^transformers==(.+)$", (PAGE.parent / file).read_text(), re.MULTILINE).group(1)


def test_the_page_has_all_families_and_was_measured_on_the_pinned_versions(table):
    static = [[f"`{family.name}`", family.stands_for, family.features] for family in FAMILIES]
    assert [row[:3] for row in table[1]] == static, OUTDATED
    newest, oldest = pinned("constraints.txt"), pinned("requirements-oldest.txt")
    assert table[0][3:9] == [f"{name}, {version}" for name in MEASURED for version in (newest, oldest)], OUTDATED


@of_every_family
def test_a_family_runs_ragged_where_the_page_says_so(family, table):
    """test_ragged_exactness.py shows that it is exact then."""
    header, rows = table
    column = f"ragged, {transformers.__version__}"
    if column not in header:
        pytest.skip(f"SUPPORT.md was not measured on transformers {transformers.__version__}")
    cell = dict(zip(header, next(row for row in rows if row[0] == f"`{family.name}`"), strict=True))[column]
    assert cell.startswith(PADDED if not_ragged_because(family) else RAGGED), OUTDATED
