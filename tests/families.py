"""The model families that the course supports: a small random model of each, and what is special about it.

Each row is built from a config in a fraction of a second, nothing is downloaded, and its sizes are chosen so that the
special thing bites: windows are shorter than the texts, kv heads fewer than query heads, and so on. `bites` says how
to take the special thing away, and the tests see to it that this changes the logits: a row whose feature made no
difference would prove nothing.

The page SUPPORT.md is written from this list (`make support-matrix`).
"""

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from helpers import (
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    filter_batch,
    generate_next_token,
    init_batch,
    kv_cache,
    merge_batches,
)
from helpers.models import EMBEDDED, run_model
from helpers.scheduler import FirstComeFirstServed
from helpers.tiny_model import corpus

CONTEXT, WINDOW = 64, 8  # tokens
# (prompt tokens, max_tokens): prompts shorter and longer than the window, texts that all outgrow it, no two alike.
SIZES = [(25, 8), (5, 30), (37, 6), (7, 20), (33, 16), (12, 24), (9, 1), (40, 20), (16, 24), (6, 13)]
FEWEST = 7  # requests with clear leads that a proof wants at least

# As parts of the logits' range: how clearly a best token leads (a hundred times what rounding moves in fp32), and how
# close two tokens are that take each other's place in bf16 (about seven of 1,864 are so close to the best).
LEAD, BF16_MARGIN = 1e-4, 0.1


@dataclass(frozen=True, eq=False)
class Family:
    """One row of the matrix.

    Attributes:
        name: of the row; the model type in transformers, with an addition where a type has several rows.
        stands_for: the published models of this architecture.
        bites: each special thing, with the question whether it makes a difference (asked of the family).
        config: model type and settings.
    """

    name: str
    stands_for: str
    bites: dict[str, Callable[["Family"], bool]]
    config: dict

    @property
    def feature(self) -> str:
        return ", ".join(self.bites)

    @property
    def window(self) -> int | None:
        """Tokens that a layer sees at most, where there is such a layer."""
        names = ("sliding_window", "window_size", "attention_chunk_size")
        return next((self.config[name] for name in names if name in self.config), None)

    @property
    def available(self) -> bool:
        """Whether this version of transformers knows the model type."""
        return self.config["model_type"] in CONFIG_MAPPING


# --- building ---------------------------------------------------------------------------------------------------------


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED, padding_side="left")


def build(family: Family, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """The family's model: same weights at every call."""
    sizes = {key: len(tokenizer()) for key in ("vocab_size", *family.config) if key.startswith("vocab_size")}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = AutoConfig.for_model(**family.config | sizes | ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    draw_weights(model)
    return model.to(device).eval()


def draw_weights(model, seed: int = 0) -> None:
    """Weights large enough for the logits to be well apart, and for what was said before to matter for what comes next.

    Embeddings are small, so that the layers outweigh the newest token: with a tied head it would repeat itself.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms, biases and sinks stay close to where they are
                parameter += 0.05 * noise.to(parameter.dtype)
            elif parameter in embeddings:
                parameter.copy_(0.03 * noise)
            else:
                parameter.copy_(3.0 * noise / min(parameter.shape[-2:]) ** 0.5)


@functools.cache
def prompts() -> list[str]:
    """One text for each of SIZES, of that many tokens."""
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
        logits: [tokens, vocabulary] of each request, as `generate` saw them.
    """

    model: torch.nn.Module
    requests: list[Request]
    tokens: list[list[int]]
    logits: list[torch.Tensor]


def reference(family: Family, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Reference:
    """Requests of SIZES. In fp32 about half of them end early, by an EOS; in bf16 there are six, and none does.

    In fp32, a request in which a best token hardly leads is left out: another machine's rounding could flip it, and
    what is to be tested is exactness, not luck.
    """
    return _reference(family, dtype, device)


@functools.cache
def _reference(family: Family, dtype: torch.dtype, device: str) -> Reference:
    model = build(family, dtype, device)
    requests = [Request(prompt, most, id) for id, (prompt, (_, most)) in enumerate(zip(prompts(), SIZES, strict=True))]
    requests = requests if dtype == torch.float32 else requests[:6]
    say_eos(model, None)
    answers = [(request, *generate(model, request)) for request in requests]
    if dtype == torch.float32:
        answers = [answer for answer in answers if lead(answer[2]) > LEAD]
        # A random model hardly ever says the tokenizer's EOS. What it often says before its last word becomes its EOS.
        said = Counter(token for _, tokens, _ in answers for token in set(tokens[:-1]))
        eos = min(said, key=lambda token: (abs(said[token] - len(answers) / 2), token))
        say_eos(model, eos)
        answers = [
            (request, *generate(model, request)) if eos in tokens else (request, tokens, logits)
            for request, tokens, logits in answers
        ]
    return Reference(model, *map(list, zip(*answers, strict=True)))


def say_eos(model, token: int | None) -> None:
    """The model's EOS; None is a token that it cannot say."""
    model.generation_config.eos_token_id = 10**6 if token is None else token


def generate(model, request: Request) -> tuple[list[int], torch.Tensor]:
    """What transformers' own `generate` gives a request alone: token ids, and logits [tokens, vocabulary]."""
    inputs = tokenizer()(request.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=request.max_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[0, inputs["input_ids"].size(1) :].tolist(), torch.cat(output.logits).float()


def lead(logits: torch.Tensor) -> float:
    """How far the best token is ahead of the next, where it is least, as a part of the logits' range."""
    best = logits.topk(2, dim=-1).values
    return ((best[:, 0] - best[:, 1]) / extent(logits)).min().item()


def extent(logits: torch.Tensor) -> torch.Tensor:
    return logits.amax(dim=-1) - logits.amin(dim=-1)


def serve_at_random(model, requests: list[Request], seed: int) -> list[list[int]]:
    """Random joins and leaves through the four verbs; the token ids of each request.

    Joining batches come prefilled or some tokens further, before the running rows or behind them; finished rows leave
    at once or stay for a while; halfway everybody leaves, and the batch which that empties is filled again.
    """
    rng = random.Random(seed)
    verbs = {"model": model, "tokenizer": tokenizer()}
    waiting, running, done = rng.sample(requests, len(requests)), {"request_ids": []}, {}

    def step(batch):
        batch = generate_next_token(batch, **verbs)
        for id, ids, left in zip(batch["request_ids"], batch["token_ids"], batch["tokens_remaining"], strict=True):
            if left == 0:
                done.setdefault(id, ids)
        return batch

    halfway = len(requests) // 2
    while waiting or running["request_ids"]:
        everybody_leaves = len(waiting) == halfway and running["request_ids"]
        if waiting and not everybody_leaves and rng.random() < 0.5:
            until = halfway if len(waiting) > halfway else 0
            count = rng.randint(1, min(3, len(waiting) - until))
            joining = init_batch([waiting.pop() for _ in range(count)], **verbs)
            for _ in range(rng.randint(1, 4)):
                joining = step(joining)
            pair = rng.sample([running, joining], 2)
            running = merge_batches(*pair)
        if running["request_ids"]:
            running = step(running)
            if rng.random() < 0.7:
                running, _ = filter_batch(running)
    return [done[request.request_id] for request in requests]


class Watching(FirstComeFirstServed):
    """Counts what makes ragged execution interesting.

    Attributes:
        preempted: sequences that had to give up their memory.
        chunks: parts of prompts that were read, the last part not counted.
        cached: tokens that did not have to be read by a sequence that joined, since they were there.
    """

    preempted = chunks = cached = 0

    def schedule(self, waiting, running, budget):
        plan = super().schedule(waiting, running, budget)
        self.preempted += len(plan.preempted)
        self.chunks += sum(chunk.tokens < chunk.sequence.unread for chunk in plan.chunks)
        self.cached += sum(chunk.sequence.computed for chunk in plan.chunks if chunk.sequence not in running)
        return plan


def serve_ragged(
    model, requests: list[Request], seed: int, kernels: bool | None = None
) -> tuple[list[list[int]], Engine]:
    """Random arrivals at an engine that reads few tokens an iteration and has too few blocks of four tokens.

    Returns:
        The token ids of each request, and the engine; its `scheduler` is `Watching`.
    """
    rng = random.Random(seed)
    longest = max(len(tokenizer()(request.prompt)["input_ids"]) + request.max_tokens for request in requests)
    config = EngineConfig(
        max_batch_size=4,
        max_tokens_per_step=rng.randint(7, 12),
        policy=Watching(),
        execution="ragged",
        block_size=4,
        num_blocks=-(-longest // 4) + rng.randint(0, 3),
        kernels=kernels,
    )
    engine = Engine(model, tokenizer(), config)
    outputs = engine.generate(
        [request.prompt for request in requests],
        [SamplingParams(max_tokens=request.max_tokens) for request in requests],
        arrivals=[rng.randint(0, 3 * len(requests)) for _ in requests],
    )
    return [output.token_ids for output in outputs], engine


def first_difference(expected: list[int], given: list[int]) -> int | None:
    """At which token two answers part; None if they do not."""
    pairs = enumerate(zip(expected, given, strict=False))
    return next((at for at, (one, other) in pairs if one != other), None)


# --- how to take a feature away ---------------------------------------------------------------------------------------


def logits(model, move: Callable[[torch.Tensor], torch.Tensor] = lambda positions: positions) -> torch.Tensor:
    """Of one pass over some text of 40 tokens, whose positions may be moved: [1, 40, vocabulary]."""
    ids = tokenizer()(prompts()[SIZES.index((40, 20))], return_tensors="pt")["input_ids"]
    positions = move(torch.arange(ids.size(1))[None])
    return run_model(model, input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By a hundredth of their range or more, a thousand times what rounding does."""
    return bool((one - other).abs().max() > 0.01 * extent(one).max())


def config(**changes):
    """The same weights with another config."""

    def bites(family: Family) -> bool:
        model, changed = build(family), build(replace(family, config=family.config | changes))
        changed.load_state_dict(model.state_dict(), strict=False)
        return differ(logits(model), logits(changed))

    return bites


def edit(change: Callable[[torch.nn.Module], None]):
    """The same model with a part changed."""

    def bites(family: Family) -> bool:
        model = build(family)
        changed = copy.deepcopy(model)
        with torch.no_grad():
            change(changed)
        return differ(logits(model), logits(changed))

    return bites


def parts(name: str, new: Callable[[torch.nn.Module], torch.nn.Module]):
    """The same model with every part of this name replaced."""

    def change(model):
        owners = [owner for owner in model.modules() if hasattr(owner, name)]
        assert owners, f"no part is called {name}"
        for owner in owners:
            setattr(owner, name, new(getattr(owner, name)))

    return edit(change)


def absolute_positions(family: Family) -> bool:
    """Counting three pads as positions changes the logits."""
    model = build(family)
    return differ(logits(model), logits(model, lambda positions: positions + 3))


def relative_positions(family: Family) -> bool:
    """Three pads before all tokens change nothing, three pads in the middle do: distances count, not places."""
    model = build(family)
    shifted = logits(model, lambda positions: positions + 3)
    torn = logits(model, lambda positions: positions + 3 * (positions > 20))
    return not differ(logits(model), shifted) and differ(logits(model), torn)


def cached(ask: Callable[[list, AutoConfig], bool]):
    """A question about the layers of the cache, and the config."""

    def bites(family: Family) -> bool:
        model, cache = build(family), kv_cache.new()
        one = torch.ones(1, 1, dtype=torch.long)
        run_model(model, input_ids=one, attention_mask=one, past_key_values=cache, use_cache=True)
        return ask(cache.layers, model.config)

    return bites


fewer_kv_heads = cached(lambda layers, config: all(la.keys.size(1) < config.num_attention_heads for la in layers))
narrower_values = cached(lambda layers, _: all(layer.values.size(3) < layer.keys.size(3) for layer in layers))
shared_keys = cached(lambda layers, config: len(layers) < config.num_hidden_layers)


def tied_head(family: Family) -> bool:
    model = build(family)
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def own_head(family: Family) -> bool:
    return not tied_head(family)


def no_alibi(model) -> None:
    """BLOOM and MPT have no setting for it."""
    base = model.transformer
    name = next(name for name in dir(base) if name.startswith("build_") and name.endswith("alibi_tensor"))
    build_alibi = getattr(base, name)
    setattr(base, name, lambda *args, **kwargs: 0 * build_alibi(*args, **kwargs))


def offset_of_two(family: Family) -> bool:
    """The first two rows of the position table are nobody's: without them all positions would be two off."""
    model = build(family)
    table = model.model.decoder.embed_positions
    moved = logits(model, lambda positions: positions + 2)
    return table.num_embeddings == CONTEXT + 2 and differ(logits(model), moved)


# --- the matrix -------------------------------------------------------------------------------------------------------

GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
PLAIN = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": CONTEXT,
}
GROUPED = PLAIN | {"num_key_value_heads": 2, "head_dim": 16}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
NO_WINDOW = 10 * CONTEXT


def family(name: str, stands_for: str, bites: dict, *settings: dict, **more) -> Family:
    merged = {"model_type": name.split(" ")[0]}
    for setting in (*settings, more):
        merged |= setting
    return Family(name, stands_for, bites, merged)


FAMILIES = [
    family(
        "gpt2",
        "GPT-2, DistilGPT2, DialoGPT, the embedded model",
        {"learned positions": absolute_positions, "tied head": tied_head},
        GPT,
    ),
    family(
        "gpt_bigcode",
        "StarCoder, SantaCoder",
        {"multi-query attention": fewer_kv_heads, "learned positions": absolute_positions},
        GPT,
        multi_query=True,
    ),
    family(
        "starcoder2",
        "StarCoder2",
        {"sliding window": config(sliding_window=None), "grouped queries": fewer_kv_heads},
        PLAIN,
        num_key_value_heads=2,
        sliding_window=WINDOW,
    ),
    family(
        "gpt_neo",
        "GPT-Neo, TinyStories",
        {
            "every other layer local": config(attention_types=[[["global"], 2]]),
            "learned positions": absolute_positions,
        },
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=CONTEXT,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
    ),
    family(
        "gpt_neox",
        "GPT-NeoX, Pythia, Dolly 2, RedPajama-INCITE",
        {"partial RoPE": config(rotary_pct=1.0), "parallel block": config(use_parallel_residual=False)},
        PLAIN,
        rotary_pct=0.25,
    ),
    family(
        "gptj", "GPT-J", {"partial RoPE, interleaved": config(rotary_dim=16), "own head": own_head}, GPT, rotary_dim=8
    ),
    family("codegen", "CodeGen", {"partial RoPE, interleaved": config(rotary_dim=16)}, GPT, rotary_dim=8),
    family(
        "opt",
        "OPT, Galactica",
        {"positions offset by two": offset_of_two},
        {key: value for key, value in PLAIN.items() if key != "intermediate_size"},
        word_embed_proj_dim=64,
        ffn_dim=128,
    ),
    family(
        "opt (350m)",
        "OPT-350M",
        {"norm after the block": config(do_layer_norm_before=True), "narrower embeddings": absolute_positions},
        {key: value for key, value in PLAIN.items() if key != "intermediate_size"},
        word_embed_proj_dim=32,
        ffn_dim=128,
        do_layer_norm_before=False,
    ),
    family("bloom", "BLOOM, BLOOMZ", {"ALiBi": edit(no_alibi)}, hidden_size=64, n_layer=2, n_head=4),
    family("mpt", "MPT", {"ALiBi": edit(no_alibi)}, d_model=64, n_layers=2, n_heads=4, max_seq_len=CONTEXT),
    family(
        "falcon",
        "Falcon-7B",
        {
            "multi-query attention": fewer_kv_heads,
            "RoPE": relative_positions,
            "parallel block": config(parallel_attn=False),
        },
        FALCON,
        multi_query=True,
        parallel_attn=True,
        bias=False,
    ),
    family(
        "falcon (40b)",
        "Falcon-40B, Falcon-180B",
        {"two norms before one block": parts("ln_mlp", lambda _: torch.nn.Identity())},
        FALCON,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    family(
        "falcon (rw)",
        "Falcon-RW",
        {"ALiBi": config(alibi=False)},
        FALCON,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    family(
        "llama",
        "LLaMA, Llama 2, CodeLlama, Solar, Magicoder, Vicuna, Yi, TinyLlama",
        {"RoPE": relative_positions, "grouped queries": fewer_kv_heads, "own head": own_head},
        GROUPED,
    ),
    family(
        "llama (3.1)",
        "Llama 3.1 to 3.3",
        {"RoPE scaled by frequency": config(rope_scaling=None), "tied head": tied_head},
        GROUPED,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        tie_word_embeddings=True,
    ),
    family(
        "llama4_text",
        "Llama 4 Scout and Maverick, each up to 8,191 tokens",
        {
            "attention in chunks": config(attention_chunk_size=NO_WINDOW),
            "no RoPE in every fourth layer": config(no_rope_layers=[1, 1, 1, 1]),
            "mixture of experts": config(num_experts_per_tok=2),
        },
        GROUPED,
        num_hidden_layers=4,
        intermediate_size_mlp=128,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 1, 1, 0],
        num_local_experts=4,
        num_experts_per_tok=1,
    ),
    family(
        "mistral",
        "Mistral-7B, Neural-Chat, Zephyr",
        {"sliding window": config(sliding_window=None), "grouped queries": fewer_kv_heads},
        GROUPED,
        sliding_window=WINDOW,
    ),
    family(
        "mixtral",
        "Mixtral",
        {"mixture of experts": config(num_experts_per_tok=1), "sliding window": config(sliding_window=None)},
        GROUPED,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    family(
        "qwen2",
        "Qwen1.5, Qwen2, Qwen2.5",
        {"window in the upper layers": config(use_sliding_window=False), "grouped queries": fewer_kv_heads},
        PLAIN,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    family(
        "qwen2_moe",
        "Qwen1.5-MoE, Qwen2-MoE",
        {"mixture of experts beside a shared one": config(num_experts_per_tok=1)},
        PLAIN,
        num_key_value_heads=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    family(
        "qwen3",
        "Qwen3",
        {"normed queries and keys": parts("q_norm", lambda _: torch.nn.Identity())},
        GROUPED,
    ),
    family(
        "qwen3_moe",
        "Qwen3-MoE, Qwen3-Coder",
        {"mixture of experts": config(num_experts_per_tok=1)},
        GROUPED,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    family(
        "phi",
        "Phi-1, Phi-1.5, Phi-2",
        {"partial RoPE": config(partial_rotary_factor=1.0)},
        PLAIN,
        partial_rotary_factor=0.5,
    ),
    family(
        "phi3",
        "Phi-3 (4k), Phi-4",
        {"sliding window": config(sliding_window=None), "grouped queries": fewer_kv_heads},
        PLAIN,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        original_max_position_embeddings=CONTEXT,
    ),
    family(
        "phi3 (longrope)",
        "Phi-3 (128k), Phi-3.5, Phi-4-mini, each up to its original context of 4,096 tokens",
        {"another RoPE past the original context": config(original_max_position_embeddings=16)},
        PLAIN,
        num_key_value_heads=2,
        max_position_embeddings=4 * CONTEXT,
        original_max_position_embeddings=CONTEXT,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
    ),
    family(
        "stablelm",
        "StableLM",
        {"partial RoPE": config(partial_rotary_factor=1.0), "parallel block": config(use_parallel_residual=False)},
        PLAIN,
        num_key_value_heads=2,
        partial_rotary_factor=0.25,
        use_parallel_residual=True,
    ),
    family(
        "gemma",
        "Gemma, CodeGemma",
        {"multi-query attention": fewer_kv_heads, "tied head": tied_head},
        GROUPED,
        num_key_value_heads=1,
        head_dim=32,
    ),
    family(
        "gemma2",
        "Gemma 2",
        {
            "soft-capped attention": config(attn_logit_softcapping=None),
            "soft-capped logits": config(final_logit_softcapping=None),
            "every other layer local": config(sliding_window=NO_WINDOW),
        },
        GROUPED,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_implementation="eager",  # SDPA cannot cap, and transformers 4 drops the cap without a word (#31887)
    ),
    family(
        "gemma3_text",
        "Gemma 3",
        {
            "most layers local": config(sliding_window=NO_WINDOW),
            "normed queries and keys": parts("q_norm", lambda _: torch.nn.Identity()),
        },
        GROUPED,
        num_hidden_layers=3,
        layer_types=[LOCAL, LOCAL, GLOBAL],
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
    ),
    family(
        "gemma3n_text",
        "Gemma 3n",
        {"last layers share earlier ones' keys": shared_keys, "most layers local": config(sliding_window=NO_WINDOW)},
        GROUPED,
        num_hidden_layers=4,
        layer_types=[LOCAL, GLOBAL] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=...,  # the tokenizer's
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        sliding_window=WINDOW,
    ),
    family(
        "gemma4_text",
        "Gemma 4",
        {
            "last layers share earlier ones' keys": shared_keys,
            "every other layer local": config(sliding_window=NO_WINDOW),
        },
        GROUPED,
        num_hidden_layers=4,
        layer_types=[LOCAL, GLOBAL] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=...,  # the tokenizer's
        hidden_size_per_layer_input=16,
        global_head_dim=32,
        sliding_window=WINDOW,
    ),
    family(
        "gpt_oss",
        "gpt-oss",
        {
            "attention sinks": edit(lambda model: [layer.self_attn.sinks.fill_(-1e4) for layer in model.model.layers]),
            "every other layer local": config(sliding_window=NO_WINDOW),
            "mixture of experts": config(num_experts_per_tok=1),
        },
        GROUPED,
        layer_types=[LOCAL, GLOBAL],
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    family(
        "olmo2",
        "OLMo 2",
        {"norms after the layers": parts("post_attention_layernorm", lambda _: torch.nn.Identity())},
        PLAIN,
        num_key_value_heads=2,
    ),
    family(
        "smollm3",
        "SmolLM3",
        {"no RoPE in every fourth layer": config(no_rope_layers=[1, 1, 1, 1])},
        PLAIN,
        num_hidden_layers=4,
        num_key_value_heads=2,
        no_rope_layers=[1, 1, 1, 0],
    ),
    family(
        "glm",
        "GLM-4 (9B), GLM-Edge: ChatGLM's line in transformers",
        {"partial RoPE, interleaved": config(partial_rotary_factor=1.0), "grouped queries": fewer_kv_heads},
        GROUPED,
        partial_rotary_factor=0.5,
    ),
    family(
        "glm4",
        "GLM-4-0414, GLM-Z1",
        {
            "partial RoPE, interleaved": config(partial_rotary_factor=1.0),
            "norms around the layers": parts("post_self_attn_layernorm", lambda _: torch.nn.Identity()),
        },
        GROUPED,
        partial_rotary_factor=0.5,
    ),
    family(
        "deepseek_v3",
        "DeepSeek-V3, DeepSeek-R1",
        {
            "latent attention, values narrower than keys": narrower_values,
            "mixture of experts": config(num_experts_per_tok=1),
        },
        PLAIN,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    family(
        "cohere",
        "Command R",
        {"scaled logits": config(logit_scale=1.0), "RoPE, interleaved": relative_positions},
        PLAIN,
        num_key_value_heads=2,
    ),
    family(
        "cohere2",
        "Command R7B, Command A",
        {"most layers local": config(sliding_window=NO_WINDOW)},
        PLAIN,
        num_hidden_layers=4,
        num_key_value_heads=2,
        layer_types=[LOCAL, LOCAL, LOCAL, GLOBAL],
        sliding_window=WINDOW,
    ),
    family(
        "granite",
        "Granite 3",
        {"scaled residuals": config(residual_multiplier=1.0)},
        PLAIN,
        num_key_value_heads=2,
        residual_multiplier=0.3,
    ),
    family(
        "xglm",
        "XGLM",
        {"sinusoidal positions, offset by two": absolute_positions},
        d_model=64,
        ffn_dim=128,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=CONTEXT,
    ),
]

REMOTE_CODE = {
    "ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B": "their successors are `glm` and `glm4`",
    "Baichuan, Baichuan 2": "",
    "Qwen (1)": "its successors are `qwen2` and `qwen3`",
}
