"""Convert a folder with a GPT-2, Llama or Qwen 2 to a GGUF file, which llama.cpp loads.

Runs in llama-cpp-python's environment. The file has no vocabulary: prompts and outputs are token ids.
"""

import json
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}
ARCHITECTURES = {"gpt2": gguf.MODEL_ARCH.GPT2, "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
# transformers stores GPT-2's as [in, out] (Conv1D), llama.cpp as [out, in].
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def convert(folder: Path, dtype: str, file: Path) -> None:
    """Write the model in `folder` (float32 safetensors) to `file`, with its matrices in `dtype`.

    Raises:
        ValueError: the model is of another type, or its weights are not float32.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"Only {', '.join(ARCHITECTURES)} can be converted, not {kind}: name --engines without llama.")
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, kind)
    (_describe_gpt2 if kind == "gpt2" else _describe_llama)(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config.get("n_layer") or config["num_hidden_layers"])
    for name, weight in read_safetensors(folder / "model.safetensors").items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask, in old files
            continue
        if name.endswith(TRANSPOSED):
            weight = np.ascontiguousarray(weight.T)
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weight = _interleaved(weight, heads)
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        # As in llama.cpp's own converter: vectors and position embeddings stay in full precision.
        full = weight.ndim == 1 or new_name == "position_embd.weight"
        stored = gguf.GGMLQuantizationType.F32 if full else TYPES[dtype]
        writer.add_tensor(new_name, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)  # an interrupted conversion leaves no file


def _describe_gpt2(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _describe_llama(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a weight of queries or keys whose outputs are in the order of the original Llama.

    Rotary positions turn pairs of numbers. transformers takes a pair from both halves of a head, and llama.cpp's Llama
    takes neighbors.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name, as float32 arrays. The format is a length, a JSON header, and the bytes."""
    data = np.memmap(file, mode="r")
    length = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    kinds = {entry["dtype"] for entry in header.values()}
    if kinds != {"F32"}:
        raise ValueError(f"{file} holds {', '.join(sorted(kinds))} and not F32: save the model in float32.")
    arrays = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        arrays[name] = np.array(data[start:end]).view("<f4").reshape(entry["shape"])
    return arrays
