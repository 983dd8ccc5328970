"""Quantized models on disk: what is saved is loaded, other libraries read the same weights, and the rest is refused."""

import copy
import json
import shutil
import struct
import sys

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer
from safetensors.torch import load_file, save_file
from test_quantization import peak_bytes, quantized_layers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers import dequantized, load_model, save_quantized
from helpers.models import quantization, quantize
from helpers.models.quantization import QuantizedLinear

in_both_formats = pytest.mark.parametrize("weights", ["int8", "int4"])
SIZES = dict(vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
ROTARY = SIZES | dict(intermediate_size=96, num_key_value_heads=2, bos_token_id=None, eos_token_id=0)
CONFIGS = {
    "gpt2": dict(SIZES, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0),
    "llama": dict(ROTARY, tie_word_embeddings=False, rope_theta=5e4),
    "qwen2": dict(ROTARY, tie_word_embeddings=True),
    "qwen3": dict(ROTARY, tie_word_embeddings=False, head_dim=32),
}
IDS = torch.arange(1, 31)[None]


def model_of(kind: str, dtype=torch.float32, **settings):
    """Return a random model whose norms and biases are random, too."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind] | settings), dtype=dtype)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1, 0.1)
    return model.eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


# --- folders ----------------------------------------------------------------------------------------------------------


@in_both_formats
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_is_loaded_with_the_same_integers_scales_and_logits(kind, weights, dtype, tmp_path):
    model = quantize(model_of(kind, dtype), weights)
    model.generation_config.eos_token_id = [0, 7]
    save_quantized(model, byte_tokenizer(), tmp_path)
    loaded, tokenizer = load_model(tmp_path, dtype=dtype)
    assert tokenizer("The quick")["input_ids"] == byte_tokenizer()("The quick")["input_ids"]
    assert loaded.generation_config.eos_token_id == [0, 7] and not loaded.training
    expected, actual = model.state_dict(), loaded.state_dict()
    assert actual.keys() == expected.keys() and quantized_layers(loaded) == quantized_layers(model)
    for name, tensor in expected.items():
        assert actual[name].dtype is tensor.dtype and torch.equal(actual[name], tensor), name
    assert torch.equal(logits(loaded), logits(model))


@in_both_formats
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_compressed_tensors_decompresses_to_the_same_weights(kind, weights, tmp_path):
    """In bfloat16, scales in float32 give products in float32, so the last rounding is compared, too."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    model = quantize(model_of(kind), weights)
    save_quantized(model, byte_tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (scheme,) = schemes.QuantizationConfig.model_validate(config).config_groups.values()
    tensors = load_file(tmp_path / "model.safetensors")
    for path in quantized_layers(model):
        own = {name: tensors[f"{path}.{name}"] for name in ("weight_packed", "weight_scale", "weight_shape")}
        weight = compressors.PackedQuantizationCompressor.decompress(own, scheme)["weight"]
        expected = model.get_submodule(path).weight
        assert weight.dtype is expected.dtype and torch.equal(weight, expected), path


@in_both_formats
def test_transformers_reads_a_saved_llama_with_compressed_tensors(weights, tmp_path):
    pytest.importorskip("compressed_tensors")
    model = quantize(model_of("llama", tie_word_embeddings=True), weights)  # the head's integers are its own
    save_quantized(model, byte_tokenizer(), tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(read), logits(dequantized(model, weights)))


def compressed_elsewhere(model, folder, bits: int, group: int | None, scale_dtype: torch.dtype):
    """Save a model as the library compressed-tensors would, and return its rounded weights by layer."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    arguments = schemes.QuantizationArgs(num_bits=bits, symmetric=True, **strategy)
    scheme = schemes.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor, tensors, rounded = compressors.PackedQuantizationCompressor, {}, {}
    for name, tensor in model.state_dict().items():
        path, _, kind = name.rpartition(".")
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
def test_a_folder_of_another_library_keeps_its_numbers(bits, group, scale_dtype, tmp_path):
    rounded = compressed_elsewhere(model_of("llama", intermediate_size=128), tmp_path, bits, group, scale_dtype)
    loaded, _ = load_model(tmp_path)
    assert quantized_layers(loaded) == list(rounded) and type(loaded.lm_head) is nn.Linear
    for path, weight in rounded.items():
        assert torch.equal(loaded.get_submodule(path).weight, weight), path
    torch.testing.assert_close(logits(loaded), logits(dequantized(loaded, f"int{bits}")))
    save_quantized(loaded, byte_tokenizer(), tmp_path / "again")
    assert torch.equal(logits(load_model(tmp_path / "again")[0]), logits(loaded))


CHANGES = {
    "asymmetric weights": lambda config, weights: weights.update(symmetric=False),
    "quantized activations": lambda config, weights: config["config_groups"]["group_0"].update(
        input_activations={"num_bits": 8}
    ),
    "an activation order": lambda config, weights: weights.update(actorder="group"),
    "weights of the type int with 3 bits": lambda config, weights: weights.update(num_bits=3),
    "weights of the type float with 8 bits": lambda config, weights: weights.update(type="float", num_bits=8),
    "groups of 48 inputs": lambda config, weights: weights.update(group_size=48),
    "a scale per tensor": lambda config, weights: weights.update(strategy="tensor"),
    "dynamic scales": lambda config, weights: weights.update(dynamic=True),
    "the format 'marlin-24'": lambda config, weights: config.update(format="marlin-24"),
    "a quantized KV cache": lambda config, weights: config.update(kv_cache_scheme={"num_bits": 8}),
    "transformed weights": lambda config, weights: config.update(transform_config={"config_groups": {"u": {}}}),
    "sparse weights": lambda config, weights: config.update(sparsity_config={"format": "sparse-bitmask"}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_quantized(quantize(model_of("llama"), "int4"), byte_tokenizer(), folder)
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
    change_quantization(copied, lambda one: CHANGES[problem](one, one["config_groups"]["group_0"]["weights"]))
    with pytest.raises(ValueError, match=f"quantized with {problem}; load_model reads .*symmetric integers of 4 or 8"):
        load_model(copied)


QUANTIZATIONS = {
    "no config_groups": {"config_groups": None},
    "a group without weights": {"config_groups": {"group_0": {}}},
    "a group that is null": {"config_groups": {"group_0": None}},
    "a transform that is text": {"transform_config": "u"},
}
Q_PROJ = "model.layers.0.self_attn.q_proj"
TENSORS = {
    "no weight_packed": {"weight_packed": None},
    "no weight_scale": {"weight_scale": None},
    "no weight_shape": {"weight_shape": None},
    "a weight_shape of one number": {"weight_shape": torch.tensor([64])},
    "a weight_shape of floats": {"weight_shape": torch.tensor([torch.nan, torch.nan])},
    "a weight_shape of zeros": {"weight_shape": torch.tensor([0, 0])},
    "a negative weight_shape": {"weight_shape": torch.tensor([64, -64])},
    "a weight_scale of one dimension": {"weight_scale": torch.ones(64)},
    "a weight_scale without groups": {"weight_scale": torch.ones(64, 0)},
    "a weight_scale of no dimension": {"weight_scale": torch.tensor(1.0)},
    "a weight_scale of integers": {"weight_scale": torch.ones(64, 2, dtype=torch.int32)},
    "a weight_packed of one dimension": {"weight_packed": torch.zeros(64, dtype=torch.int32)},
    "a weight_packed of floats": {"weight_packed": torch.zeros(64, 8)},
    "a weight_packed of complex numbers": {"weight_packed": torch.zeros(64, 8, dtype=torch.complex64)},
}


@pytest.mark.parametrize("damage", [*QUANTIZATIONS, *TENSORS])
def test_a_damaged_folder_is_refused_with_its_name(damage, copied):
    change_quantization(copied, lambda quantization: quantization.update(QUANTIZATIONS.get(damage, {})))
    tensors = load_file(copied / "model.safetensors")
    tensors |= {f"{Q_PROJ}.{kind}": tensor for kind, tensor in TENSORS.get(damage, {}).items()}
    save_file({name: one for name, one in tensors.items() if one is not None}, copied / "model.safetensors")
    with pytest.raises(ValueError, match=rf"Cannot load .*copied.*\(.*{Q_PROJ if damage in TENSORS else ''}"):
        load_model(copied)


def test_a_float_model_and_groups_that_do_not_divide_the_inputs_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not quantized. Load it with load_model"):
        save_quantized(model_of("llama"), byte_tokenizer(), tmp_path)
    odd = quantize(model_of("llama", intermediate_size=72), "int4")
    with pytest.raises(ValueError, match="down_proj has 72 inputs, which the format cannot divide into groups of 32"):
        save_quantized(odd, byte_tokenizer(), tmp_path)


def test_weights_in_another_format_than_the_folders_are_refused(saved):
    assert quantized_layers(load_model(saved, weights="int4")[0])
    with pytest.raises(ValueError, match="The weights are int4 already, not int8"):
        load_model(saved, weights="int8")


def test_loading_never_holds_more_than_the_quantized_weights_and_one_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(
        quantization, "SLAB", 2**16
    )  # small beside the layers here, as it is beside those of large models
    sizes = dict(vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6)
    save_quantized(quantize(model_of("llama", **sizes), "int4"), byte_tokenizer(), tmp_path)
    loaded = []
    peak = peak_bytes(lambda: loaded.append(load_model(tmp_path)[0]))
    integers = sum(buffer.nbytes for buffer in loaded[0].buffers())
    layer = 4 * sizes["vocab_size"] * sizes["hidden_size"]
    # The file is mapped. Its pages count here, the embedding among them, and the operating system can drop them.
    most = (tmp_path / "model.safetensors").stat().st_size + integers + layer
    assert peak < most < sum(parameter.nbytes for parameter in dequantized(loaded[0], "int4").parameters()) / 2


# --- GGUF -------------------------------------------------------------------------------------------------------------

gguf = pytest.importorskip("gguf")
BITS = {"Q8_0": 8, "Q4_0": 4}


def write_gguf(model, file, kind: str, settings: dict = {}, tensors: dict = {}) -> None:  # noqa: B006
    """Write a model and the byte tokenizer as llama.cpp's converter does."""
    config, tokenizer = model.config, byte_tokenizer()
    architecture = config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        if config.num_key_value_heads != config.num_attention_heads:
            writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(model.base_model.rotary_emb.config.rope_parameters["rope_theta"])
        writer.add_key_length(model.base_model.layers[0].self_attn.head_dim)
    for name, value in settings.items():
        writer.add_float32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * 256)
    writer.add_token_scores([0.0] * 257)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        path = name.rpartition(".")[0]
        array = tensor.numpy()
        if isinstance(model.get_submodule(path), Conv1D) and name.endswith("weight"):
            array = array.T
        if architecture == "llama" and path.endswith(("q_proj", "k_proj")):  # RoPE rotates neighbors in llama.cpp
            heads = config.num_attention_heads if path.endswith("q_proj") else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        full = array.ndim == 1 or own == "position_embd.weight"
        stored = gguf.GGMLQuantizationType.F32 if full else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(own, gguf.quants.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded_by_gguf(weight: torch.Tensor, kind: str) -> torch.Tensor:
    stored = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), stored), stored))


@pytest.mark.parametrize(
    ("architecture", "kind"),  # each kind is read as one of 8, 4 or no bits, whatever the architecture
    [*(("llama", kind) for kind in ("Q8_0", "Q4_0", "Q5_0", "F16", "F32")), ("gpt2", "Q8_0"), ("gpt2", "F32"),
     ("qwen2", "Q4_0"), ("qwen2", "F32"), ("qwen3", "Q4_0"), ("qwen3", "F32")],
)  # fmt: skip
def test_a_gguf_file_is_loaded_with_the_weights_that_gguf_dequantizes(architecture, kind, tmp_path):
    model, file = model_of(architecture), tmp_path / "model.gguf"
    write_gguf(model, file, kind)
    loaded, tokenizer = load_model(file)
    assert len(quantized_layers(loaded)) == (0 if kind not in BITS else 9 if architecture == "gpt2" else 15)
    assert tokenizer("The quick")["input_ids"] == byte_tokenizer()("The quick")["input_ids"]
    assert loaded.generation_config.eos_token_id == [0]
    for path, layer in model.named_modules():
        own = loaded.get_submodule(path)
        if isinstance(layer, Conv1D):
            actual = own.weight if isinstance(own, QuantizedLinear) else own.weight.T
            assert torch.equal(actual, rounded_by_gguf(layer.weight.detach().T.contiguous(), kind)), path
            assert torch.equal(own.bias, layer.bias), path
        elif isinstance(layer, nn.Linear | nn.Embedding) and not path.endswith("wpe"):
            assert torch.equal(own.weight, rounded_by_gguf(layer.weight.detach(), kind)), path
        else:
            for name, parameter in layer.named_parameters(recurse=False):
                assert torch.equal(getattr(own, name), parameter), (path, name)
    reference = loaded if kind not in BITS else dequantized(loaded, f"int{BITS[kind]}")
    torch.testing.assert_close(logits(loaded), logits(reference), rtol=1e-4, atol=1e-5)
    if kind == "F32":
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_without_a_number_of_kv_heads_there_are_as_many_as_query_heads(architecture, tmp_path):
    model = model_of(architecture, num_key_value_heads=4)
    write_gguf(model, tmp_path / "model.gguf", "F32")
    loaded, _ = load_model(tmp_path / "model.gguf")
    assert loaded.config.num_key_value_heads == 4
    assert torch.equal(logits(loaded), logits(model))


def test_the_rope_factors_of_llama_3_are_applied_and_saved(tmp_path):
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    rope = scaling | dict(original_max_position_embeddings=64, rope_theta=1e4)
    model = model_of("llama", rope_theta=1e4)
    scaled = model_of("llama", rope_parameters=rope, rope_scaling=rope)
    assert not torch.allclose(logits(scaled), logits(model), atol=1e-3), "otherwise this would prove nothing"
    factors = model.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    write_gguf(scaled, tmp_path / "model.gguf", "F32", tensors={"rope_freqs.weight": factors.numpy()})
    loaded, tokenizer = load_model(tmp_path / "model.gguf")
    torch.testing.assert_close(logits(loaded), logits(scaled), rtol=1e-4, atol=1e-5)
    int8 = quantize(copy.deepcopy(loaded), "int8")
    save_quantized(int8, tokenizer, tmp_path / "folder")
    assert torch.equal(logits(load_model(tmp_path / "folder")[0]), logits(int8))


REFUSED = {
    "its setting llama.rope.scaling.factor = 2.0 is not supported": dict(settings={"llama.rope.scaling.factor": 2.0}),
    "no tensors for blk.0.attn_q.bias": dict(tensors={"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_gguf_file_with_more_than_the_model_can_use_is_refused(problem, tmp_path):
    write_gguf(model_of("llama"), tmp_path / "model.gguf", "Q8_0", **REFUSED[problem])
    with pytest.raises(ValueError, match=problem):
        load_model(tmp_path / "model.gguf")


def write_header(file, architecture: str, num_layers: int) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(num_layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_gguf_file_that_counts_more_than_it_contains_is_refused_at_once(tmp_path):
    """Each of these would be read, or built, for hours."""
    file, key = tmp_path / "model.gguf", b"general.architecture"
    header = struct.pack(f"<4sIQQQ{len(key)}s", b"GGUF", 3, 0, 1, len(key), key)
    array, uint8, string, nested = 9, 0, 8, 9
    arrays = [header + struct.pack("<IIQ", array, item, 2**60) for item in (uint8, string, nested)]
    for content in (*arrays, struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="the file ends early"):
            load_model(file)
    write_header(file, "llama", num_layers=2**31)
    with pytest.raises(ValueError, match="2147483648 layers, but only 0 tensors"):
        load_model(file)


def test_other_architectures_damaged_files_and_missing_ones_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="there is no such file"):
        load_model(file)
    write_header(file, "bloom", num_layers=1)
    with pytest.raises(ValueError, match="the architecture 'bloom' is not one of gpt2, llama, qwen2, qwen3"):
        load_model(file)
    file.write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"Cannot load .*model.gguf"):
        load_model(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="GGUF files need the package gguf: pip install gguf"):
        load_model(file)
