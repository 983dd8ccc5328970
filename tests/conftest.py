"""What the tests share: the embedded model, two small random models, a model that counts, and `alone`.

`alone` asks transformers' own `generate` what a prompt gets on its own. It knows nothing of our batches, so it is the
judge of them all.
"""

import functools
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two test processes on one machine would slow each other 20-fold
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network, and an error need not retry for 20 seconds
os.environ.pop("COURSE_MODEL", None)  # the tests are about the embedded model, whatever this shell works with

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from helpers import load_model

# Of unequal lengths, 2 to 18 words: prompts of one length need no padding, and every bug of padding stays hidden.
PROMPTS = [
    "The quick brown fox",
    "The rain in Spain falls",
    "What comes up",
    "Once upon a time there was a fox who lived in a den under the old oak and",
    "Question: What does the clever owl eat?\nAnswer:",
    "A rolling stone",
    "Still waters run",
    "There was once a poor miller called Jonas, and",
    "Question: What is two plus three?",
    "Look before",
]
LONGEST = 40  # tokens: the largest budget in most tests, and one `generate` of it answers for all smaller ones


@functools.cache
def random_pair(family: str):
    """A small model with random weights, and a tokenizer with a token for every byte.

    Large weights and a chosen seed keep the logits well apart, so that rounding flips no token. Random models hardly
    ever say EOS; its row in the head is enlarged until it wins about every tenth time. Nothing here depends on the
    embedded model, or the seeds would have to be chosen anew whenever that is trained anew.
    """
    tokenizer = byte_tokenizer()
    shared = dict(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    if family == "gpt2":  # positions are learned, and the first wrong one shows
        config = GPT2Config(n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, **shared)
    elif family == "llama":  # rotary positions, two query heads to a KV head
        config = LlamaConfig(
            max_position_embeddings=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            **shared,
        )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed({"gpt2": 33, "llama": 35}[family])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.lm_head.weight[tokenizer.eos_token_id] *= 2
    return model.to(load_model()[0].device), tokenizer


def byte_tokenizer():
    vocabulary = {"<eos>": 0} | {byte: id for id, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    bare = Tokenizer(BPE(vocabulary, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return wrapped(bare)


def wrapped(bare: Tokenizer) -> PreTrainedTokenizerFast:
    # transformers 4 would give token_type_ids, too, and GPT-2 adds an embedding for each.
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<eos>", pad_token="<eos>", padding_side="left", model_input_names=inputs
    )


@pytest.fixture(scope="module")
def one_thread():
    """Models of this size are faster without threads, all the more beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def embedded():
    return load_model()


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def random_pairs(request):
    """First a random GPT-2, then a random Llama."""
    return random_pair(request.param)


def spied(function, calls: list):
    """The same function; every call's arguments go to `calls`."""

    def call(*args):
        calls.append(args)
        return function(*args)

    return call


def alone(model, tokenizer, prompt: str, max_tokens: int) -> list[int]:
    """The token ids that `model.generate` gives to this prompt on its own, EOS included."""
    return _generated(model, tokenizer, prompt, max(max_tokens, LONGEST))[:max_tokens]


@functools.cache
def _generated(model, tokenizer, prompt: str, max_tokens: int) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id)
    return ids[0, inputs["input_ids"].size(1) :].tolist()


class CountingModel(torch.nn.Module):
    """Says the next letter after each: a, b, c, ... i, and after i comes EOS (0). All it does can be foretold.

    Its key for a token is the token's id, its value the negative id: a cache can be read like a text.
    """

    def __init__(self, context: int = 16, eos_token_id: int = 0):
        super().__init__()
        self.config = GPT2Config(n_positions=context, n_layer=1)
        self.generation_config = GenerationConfig(eos_token_id=eos_token_id)
        self.device = torch.device("cpu")

    def forward(self, input_ids, position_ids, attention_mask, past_key_values):
        assert input_ids.shape == position_ids.shape
        keys, _ = past_key_values.update(input_ids[:, None, :, None].float(), -input_ids[:, None, :, None].float(), 0)
        assert attention_mask.shape == (keys.size(0), keys.size(2))
        logits = torch.nn.functional.one_hot((input_ids + 1) % 10, 10).float()
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


@pytest.fixture(scope="session")
def letters():
    """The counting model and its tokenizer: one token a letter, a = 1, ... i = 9, EOS = 0."""
    return CountingModel(), letter_tokenizer()


def letter_tokenizer():
    bare = Tokenizer(WordLevel({"<eos>": 0} | {letter: id for id, letter in enumerate("abcdefghi", 1)}))
    letter_by_letter = pre_tokenizers.Split(Regex("."), "isolated")
    bare.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), letter_by_letter])
    bare.decoder = decoders.Fuse()
    return wrapped(bare)
