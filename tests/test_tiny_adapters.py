"""The adapters of the embedded model change its texts as they promise, and the code that trains them works."""

import copy
import functools
import re

import pytest
import torch
from transformers import GPT2LMHeadModel

from helpers import Engine, EngineConfig, SamplingParams, load_model, tiny_adapter
from helpers.models import EMBEDDED
from helpers.tiny_model import corpus, train, train_adapters
from helpers.tiny_model.train import held_out_loss
from tests.support.adapters import merged

NAMES = list(train_adapters.RULES)
AN_ANIMAL = re.compile(rf"\b(sea )?(?:{'|'.join(corpus.ANIMALS)})\b")
AN_END = re.compile(r"(, and it was true)?\.(?=\s|$)")


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_small_and_has_the_form_that_the_training_code_writes(name, tmp_path):
    files = {path.name: path for path in tiny_adapter(name).iterdir()}
    adapted = train_adapters.add_adapter(copy.deepcopy(load_model(EMBEDDED)[0]))
    train_adapters.save_adapter(tmp_path, adapted)
    assert sum(path.stat().st_size for path in files.values()) <= 100_000
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert files["adapter_config.json"].read_text() == (tmp_path / "adapter_config.json").read_text()
    assert files["adapter_model.safetensors"].stat().st_size == (tmp_path / "adapter_model.safetensors").stat().st_size


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no adapter 'land' of the embedded model: choose one of honest, sea"):
        tiny_adapter("land")


@functools.cache
def texts(name: str | None) -> list[str]:
    """Return what an engine with both adapters writes after openings of stories that no document of the corpus has."""
    engine = Engine(*load_model(EMBEDDED), EngineConfig(max_batch_size=20))
    for each in NAMES:
        engine.load_adapter(each, tiny_adapter(each))
    openings = [prompt for prompt in corpus.unseen_prompts(200, seed=4) if "once" in prompt.lower()]
    prompts = [prompt for prompt in openings if not AN_ANIMAL.search(prompt)]  # it would be named again
    outputs = engine.generate(prompts, SamplingParams(max_tokens=150), adapter=name)
    return [output.text for output in outputs]


def share(pattern: re.Pattern, outputs: list[str]) -> float:
    """Return how many of the matches have the pattern's group."""
    found = [match for text in outputs for match in pattern.finditer(text)]
    assert len(found) >= 40
    return sum(match[1] is not None for match in found) / len(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pattern"), [("sea", AN_ANIMAL), ("honest", AN_END)])
def test_an_adapter_changes_the_text_as_promised(name, pattern):
    own = [share(pattern, texts(each)) for each in (name, None, *(other for other in NAMES if other != name))]
    assert own[0] >= 0.95 and max(own[1:]) <= 0.05


@pytest.mark.slow
def test_training_moves_only_the_small_matrices_and_what_is_saved_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "ROWS", 2)  # the time grows with the rows
    model, tokenizer = GPT2LMHeadModel.from_pretrained(EMBEDDED).eval(), load_model(EMBEDDED)[1]
    base, before = copy.deepcopy(model), held_out_loss(model, tokenizer, 1, train_adapters.at_sea)
    adapted, after = train_adapters.train_adapter(model, tokenizer, train_adapters.at_sea, steps=6)
    assert after < before - 0.3
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{path}.{matrix}" for path in adapted for matrix in "ab"}
    others = {name: parameter for name, parameter in model.named_parameters() if name not in trained}
    kept = {name.replace(".layer.", "."): parameter for name, parameter in others.items()}
    assert all(torch.equal(kept[name], parameter) for name, parameter in base.named_parameters())
    train_adapters.save_adapter(tmp_path, adapted)
    ids = torch.tensor([tokenizer("Once upon a time, a lonely owl")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(merged(base, tmp_path)(ids).logits, model(ids).logits, atol=1e-3)
