"""Convert a GPT-2 folder to a GGUF file, the format that llama.cpp loads. Runs in llama-cpp-python's environment.

The file has no vocabulary: prompts and outputs are token ids.
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
# transformers stores these as [in, out] (Conv1D), llama.cpp as [out, in].
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def convert(folder: Path, dtype: str, file: Path) -> None:
    """Write the model in `folder` (float32 safetensors) to `file`, with its matrices in `dtype`.

    Raises:
        ValueError: the model is not GPT-2, or its weights are not float32.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "gpt2":
        raise ValueError(f"Only GPT-2 can be converted, not {config['model_type']}: name --engines without llama.")
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
        # As in llama.cpp's own converter: vectors and position embeddings stay in full precision.
        full = weight.ndim == 1 or new_name == "position_embd.weight"
        kind = gguf.GGMLQuantizationType.F32 if full else TYPES[dtype]
        writer.add_tensor(new_name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)  # an interrupted conversion leaves no file


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
