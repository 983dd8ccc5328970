"""The model on disk, where every engine can load it: GPT-2 124M with random weights unless another one is named.

Random weights take as long to compute as trained ones, and need no download and no licence. Their text has no meaning.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.nn import Embedding
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from helpers.models import EMBEDDED

from .install import HOME


@dataclass(frozen=True)
class ModelOnDisk:
    """A folder in the Hugging Face format, and its description for reports."""

    folder: Path
    description: str

    @property
    def config(self):
        """The config of its text model."""
        return AutoConfig.from_pretrained(self.folder).get_text_config()

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes that decoding one token must read: all parameters except the embeddings.

        Of an embedding, a token reads one row. One that is also the LM head, as in GPT-2, is read in full and counts.
        """
        with torch.device("meta"):  # shapes without weights
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(self.folder), dtype=getattr(torch, dtype)
            )
        model.tie_weights()
        head = model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, Embedding)} - {id(head)}
        return sum(weight.nbytes for weight in model.parameters() if id(weight) not in tables)


def _ends_with_eos(vocab_size: int) -> dict:
    """Return the vocabulary's settings: its last token ends a text, as in `_tokenizer`."""
    return {"vocab_size": vocab_size, "bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1}


# Models with random weights, by name: how to describe them, and their config.
RANDOM = {
    "gpt2": ("GPT-2 124M", GPT2Config()),
    "large": ("a GPT-2 of 1.0B parameters", GPT2Config(n_embd=2048, n_layer=18, n_head=16)),
    "smollm2": (
        "a Llama of SmolLM2-135M's shape",
        LlamaConfig(
            **_ends_with_eos(49_152),
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2.5": (
        "a Qwen 2 of Qwen2.5-0.5B's shape",
        Qwen2Config(
            **_ends_with_eos(151_936),
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
        ),
    ),
}
# Large weights keep the best two tokens so far apart that rounding cannot swap them.
TINY = GPT2Config(**_ends_with_eos(512), n_positions=640, n_embd=64, n_layer=2, n_head=2, initializer_range=0.2)


def find_model(name: str = "gpt2", smoke: bool = False) -> ModelOnDisk:
    """Return the model of this name; one with random weights is first written to build/bench/models/ if necessary.

    Args:
        name: a name in `RANDOM`, "embedded" for the course's model, or a model folder.
        smoke: make "gpt2" tiny, for tests that measure nothing.

    Raises:
        ValueError: `name` is none of these.
    """
    if name == "embedded":
        return ModelOnDisk(EMBEDDED, "the course's embedded model (trained)")
    if name == "gpt2" and smoke:
        description = "a tiny GPT-2 with random weights for a smoke test: its times have no meaning"
        return _random("tiny", TINY, description)
    if name in RANDOM:
        description, config = RANDOM[name]
        return _random(
            name, config, f"{description} with random weights (torch.manual_seed(0)): its text has no meaning"
        )
    folder = Path(name).resolve()
    if not (folder / "config.json").exists():
        names = ", ".join(f'"{known}"' for known in RANDOM)
        raise ValueError(f'There is no model in {folder}: name a model folder, "embedded", or one of {names}.')
    return ModelOnDisk(folder, str(folder))


def _random(name: str, config: PretrainedConfig, description: str) -> ModelOnDisk:
    folder = HOME / "models" / f"{name}-random"
    if not (folder / "tokenizer.json").exists():  # written last
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        _tokenizer(config).save_pretrained(folder)
    return ModelOnDisk(folder, description)


def _tokenizer(config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, invented words and EOS: engines need one although all prompts are token ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(config.vocab_size - len(letters) - 1)]
    bare = Tokenizer(BPE({token: id for id, token in enumerate([*letters, *words, "<|endoftext|>"])}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<|endoftext|>", bos_token="<|endoftext|>", model_input_names=inputs
    )
