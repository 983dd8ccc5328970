"""Fixtures that the tests share: the embedded model, two small random models, a model that counts, and `alone`.

`alone` returns what transformers' own `generate` gives a prompt by itself. It does not use the course's batches, so it
can judge them.
"""

import copy
import functools
import gc
import os
import re
import signal
import ssl
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # otherwise two test processes slow each other down 20-fold
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network; offline, errors come at once
os.environ.pop("COURSE_MODEL", None)  # the tests use the embedded model, whatever the shell is set to

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

import helpers.loops
import helpers.model_engine
from helpers import load_model
from helpers.checks import calling
from helpers.features.speculation import speculation
from tests.support.browsing import browser, window  # noqa: F401  (fixtures)
from tests.support.building import build_wheel

# A copy for students has no solutions (INSTRUCTOR.md), so it cannot run the tests of exercises and of grading.
HERE = Path(__file__).parent
collect_ignore = []
if not (HERE / "answers").exists():
    needs_solutions = re.compile(r"^(?:from|import) (?:answers|grade|grading|handing_in)\b", re.MULTILINE)
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if needs_solutions.search(path.read_text("utf-8"))]
    collect_ignore.append("test_instructor.py")


def pytest_report_header():
    return "This copy has no solutions: the tests of exercises and of grading are left out." if collect_ignore else None


# A shell starts what it runs in the background with interrupts ignored, and processes inherit that. Tests that
# interrupt themselves or a process would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each HTTP client makes a context, which reads all certificates for 30 ms. No test connects by TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Models of this size are faster with one thread, even more so beside other processes.
torch.set_num_threads(1)

# A busy machine may be many times slower. What takes longer than these seconds hangs.
calling.SECONDS = 100
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(dict.fromkeys(("connect", "read", "write", "pool"), 120.0))

# Every run draws the same examples, however long each takes.
settings.register_profile(
    "course", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("course")

# What these imports have loaded, before any test loads more.
LOADED_MODULES, LOADED_MODELS = set(sys.modules), helpers.models.loading._load_default.cache_info().misses

# 2 to 18 words. Prompts of equal length would need no padding and would hide every bug in it.
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
LONGEST = 40  # tokens: the largest max_tokens in most tests; its output contains all shorter ones


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage():
    """Let no search for garbage look at the 370,000 objects that imports made, which takes 0.2 seconds each time."""
    gc.collect()
    gc.freeze()


# These files test threads, connections and processes, and their tests wait. How long depends on what else the machine
# does, so one that fails is run once more, and reported. One that got a wrong text or wrong tokens is not.
WAITING = (
    "benchmarks cli cluster_options course engine_thread live_view load_test prompt_tokenizer replica_client "
    "replica_connection replica_operation response_stream server_access server_connections server_faults "
    "server_operation server_shutdown"
)
WRONG_OUTPUT = r"assert ['\"\[{]"  # as messages begin if texts differ, or lists or dicts


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in WAITING.split():
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=WRONG_OUTPUT))


def pytest_runtest_setup(item):
    """Skip the slow tests for which CI has no time left. pytest prints their number; faster processors run them all."""
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("CI_SLOW_TESTS_UNTIL", "inf")):
        pytest.skip("CI has no time left for this slow test")


@functools.cache
def random_pair(family: str):
    """Return a small model with random weights and a tokenizer with one token per byte.

    Large weights and a chosen seed keep the logits well apart, so that rounding flips no token. Random models hardly
    ever generate EOS, so its row in the LM head is enlarged until it wins about every tenth time. Nothing here depends
    on the embedded model: retraining that must not require new seeds.
    """
    tokenizer = byte_tokenizer()
    shared = dict(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    if family == "gpt2":  # learned positions: the first wrong one shows
        config = GPT2Config(n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, **shared)
    elif family == "llama":  # rotary positions, two query heads per KV head
        config = LlamaConfig(
            max_position_embeddings=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **shared,
        )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed({"gpt2": 33, "llama": 35}[family])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.lm_head.weight[tokenizer.eos_token_id] *= 2
    return model.to(load_model()[0].device), tokenizer


def byte_tokenizer():
    """Return a tokenizer with one token per byte, and EOS = 0."""
    vocabulary = {"<eos>": 0} | {byte: id for id, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    bare = Tokenizer(BPE(vocabulary, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return wrapped(bare)


def wrapped(bare: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer around one of the tokenizers library."""
    # transformers 4 would also return token_type_ids, and GPT-2 adds an embedding for each.
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<eos>", pad_token="<eos>", padding_side="left", model_input_names=inputs
    )


@pytest.fixture(scope="module")
def two_threads():
    """Let PyTorch and the kernels divide their work among two threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def always_drafts(monkeypatch):
    """Let every decode have drafts, however bad they are."""
    monkeypatch.setattr(speculation, "FREE_TOKENS", 1e9)
    monkeypatch.setattr(speculation, "EXPLORED", 1.0)


@pytest.fixture(scope="session")
def embedded():
    """The embedded model, whose chats are the texts of their messages: without its chat template."""
    model, tokenizer = load_model()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    return model, tokenizer


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def random_pairs(request):
    """First a random GPT-2, then a random Llama."""
    return random_pair(request.param)


def spied(function, calls: list):
    """Return the same function, which also appends the arguments of every call to `calls`."""

    def call(*args):
        calls.append(args)
        return function(*args)

    return call


def alone(model, tokenizer, prompt: str, max_tokens: int) -> list[int]:
    """Return the token ids that `model.generate` gives this prompt by itself, including EOS."""
    return _generated(model, tokenizer, prompt, max(max_tokens, LONGEST))[:max_tokens]


@functools.cache
def _generated(model, tokenizer, prompt: str, max_tokens: int) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id)
    return ids[0, inputs["input_ids"].size(1) :].tolist()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("build"))


class CountingModel(torch.nn.Module):
    """Generates the letter that follows the newest one: a, b, c, ... i, and EOS (0) after i.

    Its key for a token is the token's id, and its value the negated id, so a cache can be read like a text.
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
    """The counting model and its tokenizer: one token per letter, a = 1, ... i = 9, EOS = 0."""
    return CountingModel(), letter_tokenizer()


def letter_tokenizer():
    """Return a tokenizer with one token per letter from a to i, and EOS = 0."""
    bare = Tokenizer(WordLevel({"<eos>": 0} | {letter: id for id, letter in enumerate("abcdefghi", 1)}))
    letter_by_letter = pre_tokenizers.Split(Regex("."), "isolated")
    bare.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), letter_by_letter])
    bare.decoder = decoders.Fuse()
    return wrapped(bare)
