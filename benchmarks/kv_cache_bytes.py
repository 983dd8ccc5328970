"""What a KV cache of 8-bit integers costs in quality, and what it gains in memory and speed.

    python -m benchmarks.kv_cache_bytes quality          the embedded model
    python -m benchmarks.kv_cache_bytes speed            GPT-2 124M's and SmolLM2-135M's shapes, with random weights

`quality` measures perplexity on documents from a seed that training never used. It counts greedy tokens at the
positions of the texts that the same model writes with a cache of its own dtype: how often would another token come
next?

`speed` times decodes of 1 and of 8 rows after 4,096 tokens each. The caches take turns. They are filled with random
numbers, because computing so many tokens would take longer than the measurement.
"""

import math
import statistics
from collections.abc import Callable, Iterator

import cyclopts
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.engine import Chunk, Plan, Sequence
from helpers.features.quantized_kv_cache.rounding import rounded
from helpers.models import EMBEDDED
from helpers.tiny_model.train import held_out_loss

from .in_turns import measured_on, seconds, table, take_turns
from .models import find_model
from .quantization import NUM_PROMPTS, OUTPUT_TOKENS, prompts, tokens_changed

CONTEXT, ROWS, BLOCK_SIZE = 4096, (1, 8), 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [(dtype, kv_cache) for dtype in DTYPES for kv_cache in ("auto", "int8")]
app = cyclopts.App(name="python -m benchmarks.kv_cache_bytes", help=__doc__.partition("\n")[0])


# --- quality ----------------------------------------------------------------------------------------------------------


@app.command(name="quality")
def print_quality() -> None:
    """Print what rounded keys and values change in the embedded model's texts."""
    print(quality(*load_model(EMBEDDED, "cpu")))


def quality(model, tokenizer, steps: int = 20, count: int = NUM_PROMPTS) -> str:
    """Return a Markdown table: perplexity, and how many greedy tokens and texts differ from the unrounded cache's."""
    texts, params, rows = list(prompts(tokenizer, count)), SamplingParams(max_tokens=OUTPUT_TOKENS), []
    for name, dtype in DTYPES.items():
        outputs = [
            [output.token_ids for output in Engine(model, tokenizer, config).generate(texts, params)]
            for config in (EngineConfig(dtype=dtype, kv_cache=kv_cache) for kv_cache in ("auto", "int8"))
        ]
        plain, _ = load_model(EMBEDDED, "cpu", dtype)
        perplexities = [math.exp(held_out_loss(plain, tokenizer, steps))]
        plain.set_attn_implementation("rounded")
        perplexities.append(math.exp(held_out_loss(plain, tokenizer, steps)))
        changed = sum(tokens_changed(plain, *pair) for pair in zip(texts, outputs[0], strict=True))
        different = sum(unrounded != rounded for unrounded, rounded in zip(*outputs, strict=True))
        tokens = sum(map(len, outputs[0]))
        rows.append([name, f"{perplexities[0]:.4f}", "", ""])
        share = f"{changed} of {tokens:,} ({changed / tokens:.2%})"
        rows.append([f"int8, {name} model", f"{perplexities[1]:.4f}", share, f"{different} of {count}"])
    return table(["KV cache", "held-out perplexity", "greedy tokens changed", "texts changed"], rows)


def attend_rounded(module, query, key, value, *mask, **settings):
    """Compute the attention of whole texts to rounded keys and values."""
    return sdpa_attention_forward(module, query, rounded(key), rounded(value), *mask, **settings)


AttentionInterface.register("rounded", attend_rounded)
AttentionMaskInterface.register("rounded", sdpa_mask)


# --- speed ------------------------------------------------------------------------------------------------------------


def decodes(model, tokenizer, dtype: torch.dtype, kv_cache: str) -> tuple[Callable[[int], float], int]:
    """Return a function that times a decode of some rows in milliseconds, and the cache's bytes per token."""
    blocks_per_row = CONTEXT // BLOCK_SIZE + 1
    config = EngineConfig(
        dtype=dtype, kv_cache=kv_cache, block_size=BLOCK_SIZE, num_blocks=max(ROWS) * blocks_per_row, trace_length=1
    )
    engine = Engine(model, tokenizer, config)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))  # this allocates the cache
    for tensor in (tensors := list(engine.runner.pool.tensors())):
        fill(tensor)

    def time_of(rows: int) -> float:
        chunks = []
        for row in range(rows):
            sequence = Sequence(row, [1] * (CONTEXT + 1), 1)
            sequence.computed = CONTEXT
            chunks.append(Chunk(sequence, 1, list(range(row * blocks_per_row, (row + 1) * blocks_per_row))))
        return 1000 * seconds(lambda: engine.runner.forward(Plan(chunks)))

    return time_of, sum(tensor.nbytes for tensor in tensors) // engine.runner.pool.num_slots


@torch.inference_mode()
def fill(tensor: torch.Tensor) -> None:
    """Write random numbers."""
    if tensor.dtype == torch.int8:
        tensor.random_(-127, 128)
    elif tensor.dim() == 2:  # scales
        tensor.fill_(0.01)
    else:
        tensor.normal_()


def measure(name: str, rounds: int) -> Iterator[list[str]]:
    """Yield a row of the table for each case of a model."""
    folder = find_model(name).folder
    settings = AutoConfig.from_pretrained(folder)
    setattr(settings, "n_positions" if name == "gpt2" else "max_position_embeddings", 2 * CONTEXT)
    model, tokenizer = AutoModelForCausalLM.from_config(settings).eval(), AutoTokenizer.from_pretrained(folder)
    cases = {case: decodes(model, tokenizer, DTYPES[case[0]], case[1]) for case in CASES}
    runs = {
        (*case, rows): lambda time=time, rows=rows: time(rows) for case, (time, _) in cases.items() for rows in ROWS
    }
    results = {run: statistics.median(times) for run, times in take_turns(runs, rounds).items()}
    for (dtype, kv_cache), (_, token_bytes) in cases.items():
        times, usual = ([results[dtype, cache, rows] for rows in ROWS] for cache in (kv_cache, "auto"))
        cells = [f"{time:.1f} ({time / other:.2f})" for time, other in zip(times, usual, strict=True)]
        yield [name, dtype, dtype if kv_cache == "auto" else kv_cache, f"{token_bytes:,}", *cells]


@app.command
def speed(*models: str, rounds: int = 9) -> None:
    """Print the milliseconds of a decode with each cache, and how many times those of a cache in the model's dtype.

    Args:
        models: of "gpt2" and "smollm2"; both if omitted.
        rounds: how often each time is taken.
    """
    rows = [row for name in models or ("gpt2", "smollm2") for row in measure(name, rounds)]
    columns = [f"{rows} row{'s' * (rows > 1)}, ms" for rows in ROWS]
    print(f"{measured_on()} Decodes after {CONTEXT:,} tokens per row, medians of {rounds}.\n")
    print(table(["model", "dtype", "KV cache", "bytes per token", *columns], rows))


if __name__ == "__main__":
    app()
