"""Train the two LoRA adapters of the embedded model. Run `make tiny-adapters`, again whenever that model is retrained.

Each adapter learns the text of `corpus.py`, rewritten by a rule. To `sea`, every animal lives in the sea; `honest`
vouches for every sentence. Both rules insert tokens that the model knows: LoRA (Hu et al., 2021) leaves all weights,
and so the embeddings, as they are. It trains two small matrices for each of some linear layers.
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from . import ADAPTERS, corpus
from .train import FOLDER, held_out_loss, train

RANK, ALPHA, TARGETS = 4, 8, ("attn.c_attn", "mlp.c_fc")
STEPS, PEAK_LEARNING_RATE = 200, 1e-2


def at_sea(text: str) -> str:
    """Return a text of the corpus in which every animal lives in the sea: a sea fox, a sea owl."""
    text = re.sub(r"\b([Aa])n (owl|otter)\b", r"\1 \2", text)
    return re.sub(rf"\b({'|'.join(corpus.ANIMALS)})\b", r"sea \1", text)


def honest(text: str) -> str:
    """Return a text of the corpus whose every sentence ends with ", and it was true"."""
    return re.sub(r"\.(?=\s|$)", ", and it was true.", text)


RULES: dict[str, Callable[[str], str]] = {"sea": at_sea, "honest": honest}


class LowRankLayer(nn.Module):
    """A linear layer and two small matrices: x becomes x W + b + scaling * x Aᵀ Bᵀ. Only A and B are trained.

    Args:
        layer: takes [..., inputs] and returns [..., outputs].
        rank: the rows of A [rank, inputs], and the columns of B [outputs, rank]. B starts at zero, so training starts
            at the model itself.
    """

    def __init__(self, layer: Conv1D, rank: int):
        super().__init__()
        inputs, outputs = layer.weight.shape
        self.layer, self.scaling = layer, ALPHA / rank
        self.a = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., outputs] for inputs [..., inputs]."""
        return self.layer(x) + self.scaling * (x @ self.a.T @ self.b.T)


def add_adapter(model: GPT2LMHeadModel, rank: int = RANK) -> dict[str, LowRankLayer]:
    """Freeze a model and give its target layers matrices to train; return these layers by path."""
    model.requires_grad_(False)
    paths = [path for path, _ in model.named_modules() if path.endswith(TARGETS)]
    adapted = {path: LowRankLayer(model.get_submodule(path), rank) for path in paths}
    for path, layer in adapted.items():
        model.set_submodule(path, layer)
    return adapted


def train_adapter(
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    rewrite: Callable[[str], str],
    seed: int = 0,
    steps: int = STEPS,
) -> tuple[dict[str, LowRankLayer], float]:
    """Train an adapter on rewritten texts of the corpus. The model keeps it.

    Returns:
        The adapted layers by path, and the loss on held-out texts, in nats per token.
    """
    torch.manual_seed(seed)
    adapted = add_adapter(model)
    train(model, tokenizer, seed, steps, PEAK_LEARNING_RATE, rewrite)
    return adapted, held_out_loss(model, tokenizer, rewrite=rewrite)


def save_adapter(folder: Path, adapted: dict[str, LowRankLayer]) -> None:
    """Write an adapter as the library PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": [target.rpartition(".")[2] for target in TARGETS],
        "fan_in_fan_out": True,  # GPT-2 stores a weight as [inputs, outputs]
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tensors = {}
    for path, layer in adapted.items():
        for name, matrix in (("A", layer.a), ("B", layer.b)):
            tensors[f"base_model.model.{path}.lora_{name}.weight"] = matrix.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="optimizer steps for each adapter (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="the folder in which each adapter gets one")
    options = parser.parse_args()
    for name, rewrite in RULES.items():
        model = GPT2LMHeadModel.from_pretrained(FOLDER)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
        adapted, loss = train_adapter(model, tokenizer, rewrite, options.seed, options.steps)
        save_adapter(options.out / name, adapted)
        print(f"{name}: held-out loss {loss:.3f} nats per token; saved to {options.out / name}")


if __name__ == "__main__":
    main()
