"""The model families that the course supports: a small random model of each, and what is special about it.

Each model is built from a config in a fraction of a second; nothing is downloaded. Its sizes make the special features
matter: windows are shorter than the texts, there are fewer kv heads than query heads, and so on.

The rows are in families.yaml. The table in SUPPORT.md is written from them (`make support-matrix`).
"""

import functools
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from helpers import (
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    filter_batch,
    generate_next_token,
    init_batch,
    merge_batches,
)
from helpers.engine import Scheduler
from helpers.models import EMBEDDED
from helpers.runners import why_not_ragged
from helpers.tiny_model import corpus

CONTEXT, WINDOW = 64, 8  # tokens
# (prompt tokens, max_tokens): prompts shorter and longer than the window; all texts outgrow it, and no two are alike.
SIZES = [(25, 8), (5, 30), (37, 6), (7, 20), (33, 16), (12, 24), (9, 1), (40, 20), (16, 24), (6, 13)]
MIN_REQUESTS = 7  # a proof needs at least this many requests with clear leads

# Fractions of the logits' range: by how much a best token must lead (a hundred times what rounding moves in fp32), and
# how close two tokens are that bf16 may exchange (about seven of 1,864 are so close to the best).
LEAD, BF16_MARGIN = 1e-4, 0.1


@dataclass(frozen=True, eq=False)
class Family:
    """One row of the matrix.

    Attributes:
        name: the row's name: the model type in transformers, with an addition where a type has several rows.
        stands_for: the published models of this architecture.
        features: what is special about it.
        config: model type and settings.
    """

    name: str
    stands_for: str
    features: str
    config: dict

    @property
    def window(self) -> int | None:
        """The most tokens that a layer with a window attends to; None without such a layer."""
        names = ("sliding_window", "window_size", "attention_chunk_size")
        return next((self.config[name] for name in names if name in self.config), None)

    @property
    def available(self) -> bool:
        """Whether this version of transformers knows the model type."""
        return self.config["model_type"] in CONFIG_MAPPING


def by_name(name: str) -> Family:
    """Return a row of the matrix."""
    return next(family for family in FAMILIES if family.name == name)


# --- building ---------------------------------------------------------------------------------------------------------


@functools.cache
def tokenizer():
    """Return the tokenizer that all families share: the embedded model's."""
    return AutoTokenizer.from_pretrained(EMBEDDED, padding_side="left")


def build(family: Family, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """Return a new model of the family, with the same weights at every call."""
    sizes = {key: len(tokenizer()) for key in ("vocab_size", *family.config) if key.startswith("vocab_size")}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = AutoConfig.for_model(**family.config | sizes | ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    draw_weights(model)
    return model.to(device).eval()


def draw_weights(model, seed: int = 0) -> None:
    """Draw weights large enough to keep logits well apart and to make the next token depend on all tokens before it.

    Embeddings are small, so that the layers outweigh the newest token: a model with a tied head would repeat it.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms, biases and sinks stay near their initial values
                parameter += 0.05 * noise.to(parameter.dtype)
            elif parameter in embeddings:
                parameter.copy_(0.03 * noise)
            else:
                parameter.copy_(3.0 * noise / min(parameter.shape[-2:]) ** 0.5)


@functools.cache
def prompts() -> list[str]:
    """Return one text for each of SIZES, with that many tokens."""
    texts = (text for text in corpus.documents(500, seed=7) if len(tokenizer()(text)["input_ids"]) >= CONTEXT)
    return [
        tokenizer().decode(tokenizer()(text)["input_ids"][:size]) for (size, _), text in zip(SIZES, texts, strict=False)
    ]


# --- what a family must reproduce -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A family's model, requests, and what `model.generate` gives each request alone.

    Attributes:
        tokens: the ids, with the EOS that ended them.
        logits: [tokens, vocabulary] for each request, as `generate` returned them.
    """

    model: torch.nn.Module
    requests: list[Request]
    tokens: list[list[int]]
    logits: list[torch.Tensor]


def reference(
    family: Family, dtype: torch.dtype = torch.float32, device: str = "cpu", num_requests: int | None = None
) -> Reference:
    """Return requests of SIZES with their tokens, computed once per process.

    In fp32, about half of them end early with an EOS. A request in which a best token hardly leads is left out: the
    rounding of another machine could flip that token, and the tests are about exactness, not luck. In bf16 there are
    the first six requests (or `num_requests`), and none ends early.
    """
    return _reference(family, dtype, device, num_requests or (len(SIZES) if dtype == torch.float32 else 6))


@functools.cache
def _reference(family: Family, dtype: torch.dtype, device: str, num_requests: int) -> Reference:
    model = build(family, dtype, device)
    sizes = zip(prompts()[:num_requests], SIZES[:num_requests], strict=True)
    requests = [Request(prompt, max_tokens, id) for id, (prompt, (_, max_tokens)) in enumerate(sizes)]
    set_eos(model, None)
    results = [(request, *generate(model, request)) for request in requests]
    if dtype == torch.float32:
        results = [result for result in results if lead(result[2]) > LEAD]
        # A random model hardly ever generates the tokenizer's EOS. A token that it often generates becomes its EOS.
        counts = Counter(token for _, tokens, _ in results for token in set(tokens[:-1]))
        eos = min(counts, key=lambda token: (abs(counts[token] - len(results) / 2), token))
        set_eos(model, eos)
        ends = [tokens.index(eos) + 1 if eos in tokens else len(tokens) for _, tokens, _ in results]
        results = [
            (request, tokens[:end], logits[:end]) for (request, tokens, logits), end in zip(results, ends, strict=True)
        ]
    return Reference(model, *map(list, zip(*results, strict=True)))


def set_eos(model, token: int | None) -> None:
    """Set the model's EOS; None for one that it cannot generate."""
    model.generation_config.eos_token_id = 10**6 if token is None else token


def generate(model, request: Request, **settings) -> tuple[list[int], torch.Tensor]:
    """Return what transformers' own `generate` gives a request alone: token ids, and logits [tokens, vocabulary].

    `settings` are further arguments of `generate`.
    """
    inputs = tokenizer()(request.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=request.max_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return output.sequences[0, inputs["input_ids"].size(1) :].tolist(), torch.cat(output.logits).float()


def lead(logits: torch.Tensor) -> float:
    """Return the smallest lead of a best token over the second best, as a fraction of the logits' range."""
    best = logits.topk(2, dim=-1).values
    return ((best[:, 0] - best[:, 1]) / logit_range(logits)).min().item()


def logit_range(logits: torch.Tensor) -> torch.Tensor:
    """Return the difference between the largest and the smallest logit of every token."""
    return logits.amax(dim=-1) - logits.amin(dim=-1)


@functools.cache
def not_ragged_because(family: Family) -> str | None:
    """Return why the family runs padded; None if it runs ragged. Asked once per process."""
    return why_not_ragged(build(family))


def skip_unless_known(family: Family) -> None:
    """Skip a test of a family that this version of transformers does not know."""
    if not family.available:
        pytest.skip(f"transformers {transformers.__version__} does not know {family.config['model_type']}")


def skip_unless_ragged(family: Family) -> None:
    """Skip a test of a family that is unknown or runs padded. SUPPORT.md lists them; test_families.py compares."""
    skip_unless_known(family)
    if reason := not_ragged_because(family):
        pytest.skip(f"runs padded: {reason}")


def serve_through_verbs(model, requests: list[Request], seed: int) -> list[list[int]]:
    """Let requests join and leave at random through the four verbs; return each one's token ids.

    A batch joins prefilled or some tokens further, before or behind the running rows. Finished rows leave at once or
    stay for a while. Once, halfway, all running rows leave, and the emptied batch is filled again.
    """
    rng = random.Random(seed)
    verbs = {"model": model, "tokenizer": tokenizer()}
    waiting, running, finished = rng.sample(requests, len(requests)), {"request_ids": []}, {}

    def step(batch):
        batch = generate_next_token(batch, **verbs)
        for id, token_ids, left in zip(
            batch["request_ids"], batch["token_ids"], batch["tokens_remaining"], strict=True
        ):
            if left == 0:
                finished.setdefault(id, token_ids)
        return batch

    halfway = len(requests) // 2
    while waiting or running["request_ids"]:
        draining = len(waiting) == halfway and running["request_ids"]
        if waiting and not draining and rng.random() < 0.5:
            until = halfway if len(waiting) > halfway else 0
            count = rng.randint(1, min(3, len(waiting) - until))
            joining = init_batch([waiting.pop() for _ in range(count)], **verbs)
            for _ in range(rng.randint(1, 4)):
                joining = step(joining)
            running = merge_batches(*rng.sample([running, joining], 2))
        if running["request_ids"]:
            running = step(running)
            if rng.random() < 0.7:
                running, _ = filter_batch(running)
    return [finished[request.request_id] for request in requests]


class CountingScheduler(Scheduler):
    """A scheduler that counts the events that ragged execution has to survive.

    Attributes:
        num_preempted: sequences that lost their row and memory.
        num_partial_chunks: chunks that did not complete a prompt.
        num_cached_tokens: tokens that a sequence need not compute when it is admitted, since a block holds them.
    """

    num_preempted = num_partial_chunks = num_cached_tokens = 0

    def schedule(self):
        running = set(self.running)
        plan = super().schedule()
        self.num_preempted += len(plan.preempted)
        self.num_partial_chunks += sum(not chunk.samples_token for chunk in plan.chunks)
        self.num_cached_tokens += sum(chunk.start for chunk in plan.chunks if chunk.sequence not in running)
        return plan


def serve_ragged(model, requests: list[Request], seed: int, **settings) -> tuple[list[list[int]], Engine]:
    """Serve requests that arrive at random in an engine with few tokens per iteration and few blocks of four tokens.

    Args:
        settings: more fields of the engine's config.

    Returns:
        Each request's token ids, and the engine; its `scheduler` is a `CountingScheduler`.
    """
    rng = random.Random(seed)
    longest = max(len(tokenizer()(request.prompt)["input_ids"]) + request.max_tokens for request in requests)
    config = EngineConfig(
        max_batch_size=4,
        max_tokens_per_step=rng.randint(7, 12),
        execution="ragged",
        block_size=4,
        num_blocks=-(-longest // 4) + rng.randint(0, 3),
        scheduler_cls=CountingScheduler,
        **settings,
    )
    engine = Engine(model, tokenizer(), config)
    outputs = engine.generate(
        [request.prompt for request in requests],
        [SamplingParams(max_tokens=request.max_tokens) for request in requests],
        arrivals=[rng.randint(0, 3 * len(requests)) for _ in requests],
    )
    return [output.token_ids for output in outputs], engine


def serve_in_company(family: Family, model, requests: list[Request], **settings) -> tuple[list[list[int]], Engine]:
    """Serve requests ragged, with chunks, preemptions and shared prefixes; padded where the family runs padded."""
    if not not_ragged_because(family):
        outputs, engine = serve_ragged(model, requests, seed=0, **settings)
        assert engine.scheduler.num_partial_chunks > 2
        return outputs, engine
    engine = Engine(model, tokenizer(), EngineConfig(max_batch_size=3, **settings))
    params = [SamplingParams(max_tokens=request.max_tokens) for request in requests]
    outputs = engine.generate([request.prompt for request in requests], params)
    return [output.token_ids for output in outputs], engine


def count_near_ties(model, prompt: str, output: list[int], margin: float) -> int:
    """Assert that each token's logit is close to the best one's, by the logits' range; return how many are not best."""
    prompt_ids = tokenizer()(prompt)["input_ids"]
    ids = torch.tensor([prompt_ids + output[:-1]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt_ids) - 1 :]
    chosen = logits[torch.arange(len(output)), output]
    assert (logits.amax(-1) - chosen <= margin * logit_range(logits)).all()
    return int((logits.argmax(-1) != torch.tensor(output)).sum())


def first_difference(expected: list[int], actual: list[int]) -> int | None:
    """Return the index of the first token in which two outputs differ; None if there is none."""
    pairs = enumerate(zip(expected, actual, strict=False))
    return next((index for index, (expected_token, token) in pairs if expected_token != token), None)


# --- the matrix -------------------------------------------------------------------------------------------------------


ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))["families"]
FAMILIES = [Family(**row | {"config": {"model_type": row["name"].split(" ")[0]} | row["config"]}) for row in ROWS]
