"""`load_model` and its questions: the default pair, folders, a reason for every refused model, what a model can do."""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import LOADED_MODELS, LOADED_MODULES, byte_tokenizer, random_pair
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertForMaskedLM, MambaConfig, RobertaForMaskedLM

from helpers import generate_alone, init_batch, load_model
from helpers.models import EMBEDDED, bytes_per_token, clone_sharing_weights, default_pair, eos_token_ids
from tests.support.families import build, by_name

# --- the default pair ---------------------------------------------------------------------------------------------


def test_the_default_pair_is_the_embedded_model_and_is_loaded_only_once():
    model, tokenizer = load_model()
    assert model is load_model()[0] and tokenizer is load_model()[1]
    assert Path(model.config._name_or_path) == EMBEDDED
    assert default_pair()[0] is model


def test_importing_helpers_loads_neither_a_model_nor_matplotlib():
    assert LOADED_MODELS == 0
    assert "helpers.model_engine" in LOADED_MODULES and "matplotlib" not in LOADED_MODULES


def test_a_model_without_its_tokenizer_is_refused(embedded):
    model, tokenizer = embedded
    for pair in ((model, None), (None, tokenizer)):
        with pytest.raises(ValueError, match="both a model and its tokenizer, or neither"):
            init_batch([("What comes up", 3), ("Look", 1)], *pair)


def test_the_variable_course_model_names_another_default(tmp_path, monkeypatch):
    embedded = load_model()
    save(random_pair("llama")[0], tmp_path)
    monkeypatch.setenv("COURSE_MODEL", str(tmp_path))
    model, _ = load_model()
    assert model.config.model_type == "llama"
    assert load_model()[0] is model
    monkeypatch.delenv("COURSE_MODEL")
    assert load_model()[0] is embedded[0]


# --- folders ------------------------------------------------------------------------------------------------------


def save(model, folder: Path) -> None:
    """Save a model with the byte tokenizer, as a folder in the Hugging Face format."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = None, "right"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(("family", "as_type"), [("gpt2", str), ("llama", Path)])
def test_a_folder_is_loaded_with_left_padding_and_a_pad_token(family, as_type, tmp_path):
    save(random_pair(family)[0], tmp_path)
    model, tokenizer = load_model(as_type(tmp_path))
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == tokenizer.eos_token == "<eos>"
    assert not model.training
    requests = [("The quick brown fox", 6), ("Look", 3)]
    outputs = [generate_alone(requests, *pair).outputs for pair in ((model, tokenizer), random_pair(family))]
    assert outputs[0] == outputs[1]


def test_weights_in_half_precision_are_loaded_as_fp32_unless_a_dtype_is_given(tmp_path):
    model = AutoModelForCausalLM.from_config(random_pair("gpt2")[0].config, dtype=torch.bfloat16)
    save(model, tmp_path)
    assert load_model(tmp_path)[0].dtype == torch.float32
    assert load_model(tmp_path, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_model_without_keys_and_values_is_refused_with_the_name_of_one_that_has_them(tmp_path):
    # test_families.py has more of them, and encoder-decoders and decoders that count pads.
    config = MambaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2, state_size=4)
    save(AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(ValueError, match=r"Mamba.* does not keep keys and values.*load_model\(\) without a name"):
        load_model(tmp_path)


@pytest.mark.parametrize("family", [BertForMaskedLM, RobertaForMaskedLM])
@pytest.mark.parametrize("weights", [0.02, 0.3])  # with small ones, attention is so weak that few tokens change
def test_an_encoder_whose_tokens_attend_to_later_ones_is_refused(tmp_path, family, weights):
    sizes = dict(vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    save(family(family.config_class(**sizes, initializer_range=weights)), tmp_path)
    with pytest.raises(ValueError, match=rf"{family.__name__[:4]}\w+ is no causal language model"):
        load_model(tmp_path)


def test_a_model_whose_logits_are_not_numbers_is_refused(tmp_path):
    model = copy.deepcopy(random_pair("llama")[0])
    model.model.norm.weight.data.fill_(float("nan"))
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM gives logits that are not numbers .*float32"):
        load_model(tmp_path)


def test_the_error_for_a_model_in_training_mode_says_so():
    model = copy.deepcopy(random_pair("gpt2")[0]).train()
    with pytest.raises(ValueError, match=r"in training mode.*: call model\.eval\(\)"):
        default_pair(model, byte_tokenizer())


def test_a_model_that_needs_code_from_its_folder_is_refused_without_a_question_and_the_code_does_not_run(tmp_path):
    settings = {"model_type": "chatglm", "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "configuration_chatglm.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match=r"needs code from its own folder, .*SUPPORT\.md"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_folder_without_one_of_the_weights_is_refused_since_transformers_would_draw_it_at_random(tmp_path, missing):
    save(random_pair("llama")[0], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"Cannot load '{tmp_path}' \(llama\).*no tensor for {missing}"):
        load_model(tmp_path)


def test_settings_of_the_generation_config_that_change_greedy_tokens_cause_a_warning(tmp_path, caplog):
    save(random_pair("llama")[0], tmp_path)
    load_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.0, "suppress_tokens": []}))
    load_model(tmp_path)
    assert not caplog.records
    changing = {"no_repeat_ngram_size": 3, "repetition_penalty": 1.1}
    others = {"eos_token_id": 0, "temperature": 0.7, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(changing | others))
    load_model(tmp_path)
    assert f"sets {' and '.join(changing)}, which `model.generate` applies" in caplog.text


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def filled(text: str):
    """Return a function that gives a file this content."""
    return lambda file: file.write_text(text)


WRONG_VALUE = "config.json has a wrong value"
DAMAGES = {  # what happens to the files of a pattern, and the words of the error
    "config.json is not JSON": ("config.json", cut_in_half, r"config\.json .*valid JSON"),
    WRONG_VALUE: ("config.json", filled('{"model_type": "gpt2", "n_head": "x"}'), r"config\.json .*n_head"),
    "there is no config.json": ("config.json", Path.unlink, r"config\.json .*does not exist"),
    "the weights are cut off": ("model.safetensors", cut_in_half, r"\(gpt2\)"),
    "there is no tokenizer": ("tokenizer*", Path.unlink, r"tokenizer .*tokenizer\.json.*save_pretrained"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_error_for_a_damaged_folder_names_the_file_and_does_not_blame_the_network(tmp_path, damage):
    save(random_pair("gpt2")[0], tmp_path)
    pattern, change, message = DAMAGES[damage]
    if damage == WRONG_VALUE and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 does not check the values of a config")
    for file in list(tmp_path.glob(pattern)):
        change(file)
    with pytest.raises(ValueError, match=f"Cannot load '{tmp_path}'.*{message}") as refused:
        load_model(tmp_path)
    assert "Hub" not in str(refused.value) and "\n" not in str(refused.value)


# conftest.py sets HF_HUB_OFFLINE. Without it, the Hub would be asked repeatedly for more than 20 seconds.
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{folder}", r"Cannot load '{folder}'.*load_model\(\) without a name"),
        ("{folder}/none", "Cannot load '{folder}/none': there is no such folder"),
        ("no-one/no-such-model", r"Cannot load 'no-one/no-such-model'.*load_model\(\) without a name"),
    ],
)
def test_the_error_for_a_name_or_folder_without_a_model_says_what_works(name, message, tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ValueError, match=message.replace("{folder}", str(tmp_path))):
        load_model(name.replace("{folder}", str(tmp_path)))


# --- questions to a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("named", "expected"), [(7, {7}), ([5, 7], {5, 7}), (None, {0})])
def test_eos_is_the_generation_configs_or_else_the_tokenizers(random_pairs, monkeypatch, named, expected):
    model, tokenizer = random_pairs
    monkeypatch.setattr(model.generation_config, "eos_token_id", named)
    assert eos_token_ids(model, tokenizer) == expected


def test_bytes_per_token_counts_kv_heads_and_not_query_heads(random_pairs):
    model, _ = random_pairs
    # Both: 2 layers x (keys + values) x 4 bytes. GPT-2: 2 heads of 16. Llama: 2 kv heads (of 4 heads) of 8.
    expected = {"gpt2": 2 * 2 * 2 * 16 * 4, "llama": 2 * 2 * 2 * 8 * 4}
    assert bytes_per_token(model) == expected[model.config.model_type]


# --- clones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_a_clone_has_the_same_weights_and_other_modules(name):
    model = build(by_name(name))
    clone = clone_sharing_weights(model)
    cloned, original = dict(clone.named_parameters()), dict(model.named_parameters())
    assert cloned.keys() == original.keys() and all(cloned[name] is original[name] for name in cloned)
    assert all(cloned_buffer is buffer for cloned_buffer, buffer in zip(clone.buffers(), model.buffers(), strict=True))
    assert not set(clone.modules()) & set(model.modules())
    assert clone.config is not model.config
