"""The model on disk, where every engine can load it: GPT-2 124M with random weights unless another one is named.

Random weights compute as long as trained ones. They need no download, and no licence; what they say means nothing.
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
    """A folder in the Hugging Face format, and what it is in words: part of every report."""

    folder: Path
    description: str

    @property
    def config(self):
        return AutoConfig.from_pretrained(self.folder).get_text_config()

    def weight_bytes(self, dtype: str) -> int:
        """Bytes that decoding one token has to read: all parameters but the embeddings, of which it reads one row each.

        An embedding that is the head as well (GPT-2's) is read in full, and counts.
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
    """The model of that name, written to build/bench/models/ first if need be.

    Args:
        name: "gpt2" for GPT-2 124M with random weights, "embedded" for the course's model, or a model folder.
        smoke: for "gpt2", a tiny one: for tests, whose times mean nothing.

    Raises:
        ValueError: neither of these.
    """
    if name == "embedded":
        return ModelOnDisk(EMBEDDED, "the course's embedded model (trained)")
    if name == "gpt2":
        return _tiny() if smoke else _gpt2()
    folder = Path(name).resolve()
    if not (folder / "config.json").exists():
        raise ValueError(f'There is no model folder {folder}: name one, or "gpt2" or "embedded".')
    return ModelOnDisk(folder, str(folder))


def _gpt2() -> ModelOnDisk:
    description = "GPT-2 124M with random weights (torch.manual_seed(0)): its text means nothing"
    return _random("gpt2-random", GPT2Config(), description)


def _tiny() -> ModelOnDisk:
    # Large weights keep the best two tokens apart, so that rounding flips none.
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
    return _random("tiny-random", config, "a tiny GPT-2 with random weights, for a smoke test: its times mean nothing")


def _random(name: str, config: GPT2Config, description: str) -> ModelOnDisk:
    folder = HOME / "models" / name
    if not (folder / "tokenizer.json").exists():  # what is written last
        with torch.random.fork_rng():
            torch.manual_seed(0)
            GPT2LMHeadModel(config).save_pretrained(folder)
        _tokenizer(config).save_pretrained(folder)
    return ModelOnDisk(folder, description)


def _tokenizer(config: GPT2Config) -> PreTrainedTokenizerFast:
    """A token for every byte, made-up words, and EOS: engines want a tokenizer although all prompts are token ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(config.vocab_size - len(letters) - 1)]
    bare = Tokenizer(BPE({token: id for id, token in enumerate([*letters, *words, "<|endoftext|>"])}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<|endoftext|>", bos_token="<|endoftext|>", model_input_names=inputs
    )
