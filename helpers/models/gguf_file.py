"""Read a GGUF file, the format of llama.cpp: its configuration and its weights.

A GGUF file stores each tensor in one of many types. Two types keep their integers here, without a second rounding:

    Q8_0   groups of 32 inputs: a float16 scale and 32 integers of 8 bits
    Q4_0   groups of 32 inputs: a float16 scale and 32 integers of 4 bits; input i shares a byte with input i + 16

Linear layers of other types, and all other tensors, become floats with the exact value that the file defines. An LM
head that is tied to the embedding keeps the integers, and the embedding becomes floats.

The architectures below are read as llama.cpp converts them. A setting or tensor that the transformers model would
ignore raises an error, because the model would compute something else.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig

from .assembly import Integers

GROUP = 32
BITS = {"Q8_0": 8, "Q4_0": 4}
ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3")

# What a configuration in transformers calls a setting; None if other settings determine it.
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": None,
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": None,
    "rope.freq_base": "rope_theta",
    "vocab_size": None,
}
TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")  # GPT-2's Conv1D
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3 divides the frequencies of RoPE by these


class GGUFFile:
    """The settings and tensors of a GGUF file; see `assembly.Checkpoint`.

    Raises:
        ValueError: the package gguf is missing, or the architecture is not supported.
    """

    def __init__(self, file: str | Path):
        try:
            import gguf
        except ImportError as error:
            raise ValueError("GGUF files need the package gguf: pip install gguf") from error
        self._dequantize = gguf.dequantize
        reader = _bounded(gguf.GGUFReader)(file)
        self.metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if "." in name and (not name.startswith("tokenizer.") or name.endswith("_token_id"))
        }
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.metadata["general.architecture"]
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"the architecture {self.architecture!r} is not one of {', '.join(ARCHITECTURES)}")
        layers = self._setting("block_count")
        if not isinstance(layers, int) or not 0 < layers <= len(self.tensors):
            raise ValueError(f"it has {layers} layers, but only {len(self.tensors)} tensors")
        if self.architecture != "gpt2":
            heads = self._setting("attention.head_count")
            self.metadata.setdefault(f"{self.architecture}.attention.head_count_kv", heads)
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(kinds[self.architecture], layers)
        self._read = {ROPE_FACTORS}

    def _setting(self, name: str):
        return self.metadata.get(f"{self.architecture}.{name}")

    def config(self) -> PretrainedConfig:
        """Return the configuration of the model in transformers."""
        settings, prefix = {}, f"{self.architecture}."
        for key, value in self.metadata.items():
            if not key.startswith(prefix):
                continue
            if (name := key.removeprefix(prefix)) not in SETTINGS:
                raise ValueError(f"its setting {key} = {value} is not supported")
            settings[SETTINGS[name]] = value
        settings.pop(None, None)
        if self.architecture == "gpt2":
            settings["n_inner"] = settings.pop("intermediate_size")
        size = self._setting("rope.dimension_count")
        if size is not None and size != settings.setdefault("head_dim", size):
            raise ValueError(f"RoPE rotates only {size} of the {settings['head_dim']} dimensions of a head")
        if ROPE_FACTORS in self.tensors:  # this type of RoPE is the one that takes any factors
            factors = torch.tensor(self.tensors[ROPE_FACTORS].data).tolist()
            settings["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": settings["max_position_embeddings"],
            }
        embedding, eos = self.tensors["token_embd.weight"], ("eos", "eot", "eom")
        special = {name: self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", *eos)}
        return AutoConfig.for_model(
            self.architecture,
            **settings,
            vocab_size=int(embedding.shape[1]),
            tie_word_embeddings="output.weight" not in self.tensors and embedding.tensor_type.name not in BITS,
            bos_token_id=special["bos"],
            eos_token_id=list(dict.fromkeys(special[name] for name in eos if special[name] is not None)) or None,
        )

    def integers(self, path: str) -> Integers | None:
        tensor = self._find(f"{path}.weight")
        if tensor is None or tensor.tensor_type.name not in BITS:
            return None
        bits, outputs = BITS[tensor.tensor_type.name], int(tensor.shape[1])
        blocks = self._ordered(tensor.name, torch.tensor(tensor.data).view(outputs, -1, 2 + GROUP * bits // 8))
        scales = blocks[..., :2].contiguous().view(torch.float16).flatten(1)
        codes = blocks[..., 2:]
        if bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=2) - 8
        return Integers(codes.contiguous().view(torch.int8).flatten(1), scales, bits)

    def tensor(self, name: str) -> torch.Tensor | None:
        if (tensor := self._find(name)) is None:
            return None
        values = self._ordered(tensor.name, torch.tensor(self._dequantize(tensor.data, tensor.tensor_type)))
        return values.T if self.architecture == "gpt2" and tensor.name.endswith(TRANSPOSED) else values

    def _find(self, name: str):
        """Return a tensor of the file by its name in transformers."""
        path, _, kind = name.rpartition(".")
        own = self._names.get_name(path)
        if own == "output" and "output.weight" not in self.tensors:
            own = "token_embd"
        tensor = self.tensors.get(f"{own}.{kind}")
        if tensor is not None:
            self._read.add(tensor.name)
        return tensor

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor as in transformers: Llama files interleave the halves that RoPE rotates."""
        if self.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
            return rows
        heads = self._setting("attention.head_count_kv" if ".attn_k." in name else "attention.head_count")
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def check_all_read(self) -> None:
        """Raise a ValueError if a tensor was not read."""
        if unread := sorted(self.tensors.keys() - self._read):
            raise ValueError(f"the model in transformers has no tensors for {', '.join(unread[:5])}")


def _bounded(reader_class: type) -> type:
    """Return a GGUFReader that raises an error at the end of the file, where gguf would read on, array item by item."""

    class BoundedReader(reader_class):
        def _get(self, offset, dtype, count=1, *arguments, **options):
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("the file ends early")
            return super()._get(offset, dtype, count, *arguments, **options)

    return BoundedReader
