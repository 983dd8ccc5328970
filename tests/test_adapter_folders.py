"""Folders in PEFT's format: what is read, what is refused and why, and that the library PEFT computes the same."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import PROMPTS, alone, random_pair
from safetensors.torch import load_file, save_file

from helpers import Engine, EngineConfig, SamplingParams
from helpers.features.adapters import peft_folder
from tests.support.adapters import write_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIRST = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"


@pytest.fixture(scope="module")
def engine():
    return Engine(*random_pair("gpt2"), EngineConfig(max_batch_size=2))


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "adapter", random_pair("gpt2")[0], ["c_attn"], rank=4)


def set_config(folder: Path, **changes) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def set_tensors(folder: Path, **changes) -> None:
    """Add tensors, or remove those that are None."""
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def check_refused(engine, folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.load_adapter("a", folder)
    with pytest.raises(ValueError, match="no adapter 'a'"):
        engine.unload_adapter("a")


# --- what is refused --------------------------------------------------------------------------------------------------

NOT_SUPPORTED = "which is not supported: it may change more than a LoRA of linear layers does"
CONFIGS = {
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, rf"modules_to_save to \['lm_head'\], {NOT_SUPPORTED}"),
    "DoRA": ({"use_dora": True}, f"use_dora to True, {NOT_SUPPORTED}"),
    "another type": ({"peft_type": "IA3"}, "must describe a LoRA, .* not 'IA3'"),
    "an unknown setting": ({"use_magic": True}, f"use_magic to True, {NOT_SUPPORTED}"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha to a number"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_setting_that_is_not_supported_is_refused_with_the_reason(engine, folder, changes, message):
    set_config(folder, **changes)
    check_refused(engine, folder, message)


def of(shape, value=0.1):
    return torch.full(shape, value)


PREFIX = "base_model.model.transformer."
NO_LORA = "which no LoRA of linear layers has"
TENSORS = {
    "an embedding": ({PREFIX + "wte.weight": of((257, 32))}, NO_LORA),
    "the head": (
        {"base_model.model.lm_head.lora_A.weight": of((4, 32)), "base_model.model.lm_head.lora_B.weight": of((257, 4))},
        "changes lm_head, a Linear that GPT2LMHeadModel does not call with all tokens of a pass",
    ),
    "another model": (
        {f"base_model.model.model.layers.0.q_proj.lora_{kind}.weight": of((4, 4)) for kind in "AB"},
        r"model\.layers\.0\.q_proj, which GPT2LMHeadModel does not have: it was trained on another model",
    ),
    "other inputs": ({FIRST: of((4, 64))}, r"shapes \(\(4, 64\), \(96, 4\)\), .* trained on another model"),
    "no dimension": ({FIRST: torch.tensor(1.0)}, "trained on another model"),
    "too large a rank": ({FIRST: of((513, 32)), FIRST.replace("_A", "_B"): of((96, 513))}, "has rank 513 for .* 512"),
    "A without B": ({FIRST.replace("_A", "_B"): None}, "only one of the two matrices"),
    "NaN": ({FIRST: of((4, 32), float("nan"))}, "infinite or NaN"),
    "integers": ({FIRST: torch.ones(4, 32, dtype=torch.int64)}, "not floating-point numbers"),
}


@pytest.mark.parametrize(("changes", "message"), TENSORS.values(), ids=TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_with_the_reason(engine, folder, changes, message):
    set_tensors(folder, **changes)
    check_refused(engine, folder, message)


def cut_off(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-7])


def pipe(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


FILES = {
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), "There is no file .*adapter_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "There is no file .*safetensors"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "is not valid JSON"),
    "deep JSON": (lambda folder: (folder / CONFIG).write_text("[" * 100_000), "is not valid JSON"),
    "a large configuration": (
        lambda folder: (folder / CONFIG).write_text(" " * (2**20 + 1)),
        "more than 1048576 bytes",
    ),
    "no tensors": (lambda folder: save_file({}, folder / WEIGHTS), "has no tensors"),
    "weights cut off": (cut_off, "is damaged"),
    "a pipe": (pipe, "There is no file"),
}


@pytest.mark.parametrize(("change", "message"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(engine, folder, change, message):
    change(folder)
    check_refused(engine, folder, message)


def test_large_weights_are_refused(engine, folder, monkeypatch):
    monkeypatch.setattr(peft_folder, "MAX_WEIGHTS_BYTES", 1000)
    check_refused(engine, folder, "more than 1000 bytes")


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", None, 3, ["a"]], ids=repr)
def test_a_name_that_is_no_name_is_refused(engine, folder, name):
    with pytest.raises(ValueError, match="name must be a text"):
        engine.load_adapter(name, folder)
    with pytest.raises(ValueError, match="There is no adapter"):
        engine.unload_adapter(name)


# --- what the library PEFT writes and computes ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"r": 3, "lora_alpha": 5, "use_rslora": True},
        {"target_modules": "all-linear"},
        {"r": 4, "rank_pattern": {"0.*": 2}, "target_modules": "all-linear"},
        {"layers_to_transform": [1]},
        {"target_modules": r".*\.1\.(attn|self_attn)\.(c_attn|q_proj)"},
    ],
    ids=str,
)
def test_an_adapter_that_peft_has_written_gives_the_tokens_that_peft_gives(family, settings, tmp_path):
    peft = pytest.importorskip("peft")
    model, tokenizer = random_pair(family)
    targets = {"gpt2": ["c_attn", "mlp.c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}[family]
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**{"target_modules": targets} | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    wrapped.save_pretrained(tmp_path)
    engine = Engine(model, tokenizer, EngineConfig(max_batch_size=2))
    engine.load_adapter("a", tmp_path)
    outputs = engine.generate(PROMPTS[:4], SamplingParams(20), adapter="a")
    wrapped.eval()
    expected = [alone(wrapped, tokenizer, prompt, 20) for prompt in PROMPTS[:4]]
    assert [output.token_ids for output in outputs] == expected
    base = engine.generate(PROMPTS[:4], SamplingParams(20))
    assert [output.token_ids for output in base] != expected
