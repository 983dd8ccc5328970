"""Quantized models on disk: they are loaded with the numbers that their own library reads, and the rest is refused."""

import json
import shutil

import pytest
import torch
from conftest import byte_tokenizer
from safetensors.torch import load_file, save_file
from test_quantization import peak_bytes, quantized_layers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import dequantized, load_model
from helpers.models import quantization

compressors = pytest.importorskip("compressed_tensors.compressors")
schemes = pytest.importorskip("compressed_tensors.quantization")

SIZES = dict(
    vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0,
)  # fmt: skip
IDS = torch.arange(1, 31)[None]


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def save_compressed(folder, bits: int, group: int | None, scale_dtype=torch.float16, **sizes) -> dict:
    """Save a random Llama as the library compressed-tensors would, and return its rounded weights by layer."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES | sizes), dtype=torch.float32)
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    arguments = schemes.QuantizationArgs(num_bits=bits, symmetric=True, **strategy)
    scheme = schemes.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor, tensors, rounded = compressors.PackedQuantizationCompressor, {}, {}
    for name, tensor in model.state_dict().items():
        path, _, kind = name.rpartition(".")
        if path == "lm_head" and model.config.tie_word_embeddings:
            continue
        if not isinstance(model.get_submodule(path), nn.Linear) or path == "lm_head" or kind != "weight":
            tensors[name] = tensor
            continue
        largest = tensor.unflatten(1, (-1, group or tensor.shape[1])).abs().amax(2)
        scale = (largest / (2 ** (bits - 1) - 0.5)).to(scale_dtype)  # the smallest integer is in use
        packed = compressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        tensors |= {f"{path}.{kind}": value for kind, value in packed.items()}
        exact = packed | {"weight_scale": scale.float()}
        rounded[path] = compressor.decompress(exact, scheme)["weight"]
    config = schemes.QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed", ignore=["lm_head"]
    )
    model.config.quantization_config = config.to_dict()
    model.config.save_pretrained(folder)
    model.generation_config.eos_token_id = [0, 7]
    model.generation_config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    return rounded


SCHEMES = [
    (4, 64, torch.float16),
    (4, 32, torch.bfloat16),
    (4, None, torch.float32),
    (8, 32, torch.float16),
    (8, None, torch.bfloat16),
]


@pytest.mark.parametrize("bits, group, scale_dtype", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_keeps_its_numbers(bits, group, scale_dtype, tied, tmp_path):
    rounded = save_compressed(tmp_path, bits, group, scale_dtype, tie_word_embeddings=tied)
    loaded, tokenizer = load_model(tmp_path)
    assert tokenizer("The quick")["input_ids"] == byte_tokenizer()("The quick")["input_ids"]
    assert loaded.generation_config.eos_token_id == [0, 7] and not loaded.training
    assert quantized_layers(loaded) == list(rounded) and type(loaded.lm_head) is nn.Linear
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for path, weight in rounded.items():
        assert torch.equal(loaded.get_submodule(path).weight, weight), path
    torch.testing.assert_close(logits(loaded), logits(dequantized(loaded, f"int{bits}")))


CHANGES = {
    "asymmetric weights": lambda config, weights: weights.update(symmetric=False),
    "quantized activations": lambda config, weights: config["config_groups"]["group_0"].update(
        input_activations={"num_bits": 8}
    ),
    "an activation order": lambda config, weights: weights.update(actorder="group"),
    "weights of the type int with 3 bits": lambda config, weights: weights.update(num_bits=3),
    "groups of 48 inputs": lambda config, weights: weights.update(group_size=48),
    "a scale per tensor": lambda config, weights: weights.update(strategy="tensor"),
    "the format 'marlin-24'": lambda config, weights: config.update(format="marlin-24"),
    "a quantized KV cache": lambda config, weights: config.update(kv_cache_scheme={"num_bits": 8}),
    "transformed weights": lambda config, weights: config.update(transform_config={"config_groups": {"u": {}}}),
    "sparse weights": lambda config, weights: config.update(sparsity_config={"format": "sparse-bitmask"}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_compressed(folder, 4, 32)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """A folder that a test may change."""
    return shutil.copytree(saved, tmp_path / "copied")


def change_quantization(folder, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("problem", CHANGES)
def test_another_scheme_is_refused_with_the_list_of_supported_ones(problem, copied):
    change_quantization(copied, lambda config: CHANGES[problem](config, config["config_groups"]["group_0"]["weights"]))
    with pytest.raises(ValueError, match=f"quantized with {problem}; load_model reads .*symmetric integers of 4 or 8"):
        load_model(copied)


QUANTIZATIONS = {"no config_groups": {"config_groups": None}, "a group that is null": {"config_groups": {"a": None}}}
Q_PROJ = "model.layers.0.self_attn.q_proj"
TENSORS = {
    "no weight_packed": {"weight_packed": None},
    "a negative weight_shape": {"weight_shape": torch.tensor([64, -64])},
    "a weight_scale without groups": {"weight_scale": torch.ones(64, 0)},
    "a weight_packed of one dimension": {"weight_packed": torch.zeros(64, dtype=torch.int32)},
}


@pytest.mark.parametrize("damage", [*QUANTIZATIONS, *TENSORS])
def test_a_damaged_folder_is_refused_with_its_name(damage, copied):
    change_quantization(copied, lambda quantization: quantization.update(QUANTIZATIONS.get(damage, {})))
    tensors = load_file(copied / "model.safetensors")
    tensors |= {f"{Q_PROJ}.{kind}": tensor for kind, tensor in TENSORS.get(damage, {}).items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, copied / "model.safetensors")
    with pytest.raises(ValueError, match=rf"Cannot load .*copied.*\(.*{Q_PROJ if damage in TENSORS else ''}"):
        load_model(copied)


def test_weights_in_another_format_than_the_folders_are_refused(saved):
    assert quantized_layers(load_model(saved, weights="int4")[0])
    with pytest.raises(ValueError, match="The weights are int4 already, not int8"):
        load_model(saved, weights="int8")


def test_loading_never_holds_more_than_the_quantized_weights_and_one_layer(tmp_path, monkeypatch):
    # Small beside the layers here, as it is beside those of large models.
    monkeypatch.setattr(quantization, "SLAB", 2**16)
    sizes = dict(vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6)
    save_compressed(tmp_path, 4, 32, **sizes)
    loaded = []
    peak = peak_bytes(lambda: loaded.append(load_model(tmp_path)[0]))
    integers = sum(buffer.nbytes for buffer in loaded[0].buffers())
    layer = 4 * sizes["vocab_size"] * sizes["hidden_size"]
    # The file is mapped. Its pages count here, the embedding among them, and the operating system can drop them.
    most = (tmp_path / "model.safetensors").stat().st_size + integers + layer
    assert peak < most < sum(parameter.nbytes for parameter in dequantized(loaded[0], "int4").parameters()) / 1.5
