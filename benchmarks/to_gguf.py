"""A GPT-2 folder as a GGUF file, which is what llama.cpp loads. Runs in llama-cpp-python's environment.

Without a vocabulary: prompts and answers are token ids.
"""

import json
from pathlib import Path

import gguf
import numpy as np

TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
# transformers keeps these as [in, out] (Conv1D), llama.cpp as [out, in].
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def convert(folder: Path, dtype: str, file: Path) -> None:
    """Write the model in `folder` (float32 safetensors) to `file`, its matrices in dtype.

    Raises:
        ValueError: not GPT-2, or weights that are not float32.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "gpt2":
        raise ValueError(f"only GPT-2 is converted here, not {config['model_type']}")
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "gpt2")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config["n_layer"])
    for name, weight in read_safetensors(folder / "model.safetensors").items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask, in old files
            continue
        if name.endswith(TRANSPOSED):
            weight = np.ascontiguousarray(weight.T)
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        # As llama.cpp's own converter does: vectors and positions are added and stay in full precision.
        full = weight.ndim == 1 or new_name == "position_embd.weight"
        kind = gguf.GGMLQuantizationType.F32 if full else TYPES[dtype]
        writer.add_tensor(new_name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)  # whole or not at all


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Names and float32 arrays. The format is a length, a JSON header, and the bytes."""
    data = np.memmap(file, mode="r")
    length = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    kinds = {entry["dtype"] for entry in header.values()}
    if kinds != {"F32"}:
        raise ValueError(f"{file} holds {', '.join(sorted(kinds))}; only F32 is converted here")
    arrays = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        arrays[name] = np.array(data[start:end]).view("<f4").reshape(entry["shape"])
    return arrays
