"""The model on disk, where every engine can load it: GPT-2 124M with random weights unless another one is named.

Random weights take as long to compute as trained ones, and need no download and no licence. Their text has no meaning.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.nn import Embedding
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

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


def find_model(name: str = "gpt2", smoke: bool = False) -> ModelOnDisk:
    """Return the model of this name; one with random weights is first written to build/bench/models/ if necessary.

    Args:
        name: "gpt2" for GPT-2 124M with random weights, "large" for such a model of 1.0B parameters, "embedded" for the
            course's model, or a model folder.
        smoke: make "gpt2" tiny, for tests that measure nothing.

    Raises:
        ValueError: `name` is none of these.
    """
    if name == "embedded":
        return ModelOnDisk(EMBEDDED, "the course's embedded model (trained)")
    if name == "gpt2":
        return _tiny() if smoke else _gpt2()
    if name == "large":
        return _large()
    folder = Path(name).resolve()
    if not (folder / "config.json").exists():
        raise ValueError(f'There is no model in {folder}: name a model folder, "gpt2", "large" or "embedded".')
    return ModelOnDisk(folder, str(folder))


def _gpt2() -> ModelOnDisk:
    description = "GPT-2 124M with random weights (torch.manual_seed(0)): its text has no meaning"
    return _random("gpt2-random", GPT2Config(), description)


def _large() -> ModelOnDisk:
    config = GPT2Config(n_embd=2048, n_layer=18, n_head=16)
    return _random("large-random", config, "a GPT-2 of 1.0B parameters with random weights: its text has no meaning")


def _tiny() -> ModelOnDisk:
    # Large weights keep the best two tokens so far apart that rounding cannot swap them.
    config = GPT2Config(
        vocab_size=512,
        n_positions=640,
        n_embd=64,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
        bos_token_id=511,
        eos_token_id=511,
    )
    return _random(
        "tiny-random", config, "a tiny GPT-2 with random weights for a smoke test: its times have no meaning"
    )


def _random(name: str, config: GPT2Config, description: str) -> ModelOnDisk:
    folder = HOME / "models" / name
    if not (folder / "tokenizer.json").exists():  # written last
        with torch.random.fork_rng():
            torch.manual_seed(0)
            GPT2LMHeadModel(config).save_pretrained(folder)
        _tokenizer(config).save_pretrained(folder)
    return ModelOnDisk(folder, description)


def _tokenizer(config: GPT2Config) -> PreTrainedTokenizerFast:
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
