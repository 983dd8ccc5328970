"""What quantized weights cost in quality and gain in speed: `python -m benchmarks.quantization quality` or `speed`.

`quality` uses the embedded model, which is trained: on random weights rounding has other effects. Perplexity is
measured on documents from a seed that training never used, and greedy tokens on the beginnings of such documents. Once
one token differs, the rest of a text differs for that reason alone. So tokens are counted at the positions of float32's
own texts: how often would another token come next?

`speed` uses GPT-2 124M with random weights. The engines take turns. It reports the tokens per second of iterations in
which all rows decode, the share of the memory bandwidth at which they read the weights, and the time of a long prompt.
llama.cpp joins where it is installed. Its Q8_0 and Q4_0 quantize what flows through the layers, too.
"""

import argparse
import copy
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers import Engine, EngineConfig, SamplingParams, dequantized, load_model
from helpers.hardware import memory_bandwidth
from helpers.models import EMBEDDED
from helpers.models.quantization import QuantizedLinear
from helpers.tiny_model import corpus
from helpers.tiny_model.train import held_out_loss

from .engines import ExternalEngine
from .machine import processor
from .models import find_model
from .workloads import TokenRequest

HELD_OUT_SEED, NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 999_000_000, 100, 8, 48
ROWS, LONG_PROMPT, DECODES, ROUNDS = (1, 4, 8, 16), 384, 24, 3
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
CASES = {
    "float32": (FLOAT32, None),
    "bfloat16": (BFLOAT16, None),
    "int8, float32": (FLOAT32, "int8"),
    "int4, float32": (FLOAT32, "int4"),
    "int8, bfloat16": (BFLOAT16, "int8"),
    "int4, bfloat16": (BFLOAT16, "int4"),
}  # weights, dtype of everything else
LLAMA = ("Q8_0", "Q4_0")  # its names for 8 and 4 bits in groups of 32


# --- quality ----------------------------------------------------------------------------------------------------------


def prompts(tokenizer, count: int = NUM_PROMPTS) -> Iterator[list[int]]:
    """Yield the first tokens of documents that training never used."""
    documents = itertools.chain.from_iterable(corpus.documents(count, HELD_OUT_SEED + n) for n in itertools.count())
    ids = (tokenizer(text)["input_ids"] for text in documents)
    return itertools.islice((one[:PROMPT_TOKENS] for one in ids if len(one) > PROMPT_TOKENS), count)


def quality(model, tokenizer, steps: int = 20, count: int = NUM_PROMPTS) -> str:
    """Return a Markdown table: perplexity, and how many greedy tokens and texts are not float32's."""
    texts = list(prompts(tokenizer, count))
    params = SamplingParams(max_tokens=OUTPUT_TOKENS)
    lines = [
        "| weights, dtype | held-out perplexity | greedy tokens changed | texts changed |",
        "| --- | --- | --- | --- |",
    ]
    expected = None
    for name, (dtype, weights) in CASES.items():
        outputs = Engine(model, tokenizer, EngineConfig(weights=weights, dtype=dtype)).generate(texts, params)
        outputs = [output.token_ids for output in outputs]
        expected = expected or outputs
        plain = copy.deepcopy(model if weights is None else dequantized(model, weights)).to(dtype)
        changed = sum(tokens_changed(plain, *pair) for pair in zip(texts, expected, strict=True))
        different = sum(one != other for one, other in zip(outputs, expected, strict=True))
        perplexity = math.exp(held_out_loss(plain, tokenizer, steps))
        tokens = sum(map(len, expected))
        lines.append(
            f"| {name} | {perplexity:.4f} | {changed} of {tokens:,} ({changed / tokens:.2%}) | {different} of {count} |"
        )
    return "\n".join(lines)


@torch.no_grad()
def tokens_changed(model, prompt: list[int], output: list[int]) -> int:
    """Return at how many positions of a text the model's best token is another one."""
    logits = model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
    return int((logits.argmax(-1) != torch.tensor(output)).sum())


# --- speed ------------------------------------------------------------------------------------------------------------


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the linear layers' weights, which every decode reads."""
    layers = {module for module in model.modules() if isinstance(module, nn.Linear | Conv1D | QuantizedLinear)}
    return sum(
        layer.words.nbytes + layer.scales.nbytes if isinstance(layer, QuantizedLinear) else layer.weight.nbytes
        for layer in layers
    )


def made_up_prompts(rows: int, tokens: int) -> list[list[int]]:
    """Return a prompt for each row; with random weights any tokens will do."""
    return [[(7 * row + n) % 1000 for n in range(tokens)] for row in range(rows)]


def llama_seconds_of(engine: ExternalEngine, rows: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return the same for llama.cpp: a long generation takes these seconds more per token than a short one."""

    def seconds(output_tokens: int) -> float:
        requests = [TokenRequest(prompt, output_tokens) for prompt in made_up_prompts(rows, prompt_tokens)]
        start = time.perf_counter()
        engine.run(requests)
        return time.perf_counter() - start

    return seconds(1) if output_tokens == 1 else (seconds(output_tokens) - seconds(1)) / (output_tokens - 1)


def seconds_of(engine: Engine, rows: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return the median seconds of an iteration in which all rows decode, or of the prompts' if nothing is decoded."""
    prompts = made_up_prompts(rows, prompt_tokens)
    start = len(engine.trace.passes)
    engine.generate(prompts, SamplingParams(max_tokens=output_tokens, ignore_eos=True))
    passes = engine.trace.passes[start:]
    if output_tokens == 1:
        return passes[0].seconds
    return statistics.median(after.start - before.start for before, after in itertools.pairwise(passes[1:]))


def speed(folder: Path, rows: tuple[int, ...] = ROWS, rounds: int = ROUNDS) -> str:
    """Return a Markdown table of tokens per second, shares of the bandwidth, and milliseconds of a long prompt."""
    model, tokenizer = load_model(folder, "cpu")
    engines = {}
    for name, (dtype, weights) in CASES.items():
        config = EngineConfig(max_batch_size=max(rows), weights=weights, dtype=dtype, prefix_caching=False)
        engines[name] = Engine(model, tokenizer, config)
    llama = {f"llama.cpp {kind}": ExternalEngine("llama") for kind in LLAMA}
    llama = {name: engine for name, engine in llama.items() if engine.why_unavailable() is None}
    for name, engine in llama.items():
        engine.load(folder, name.split()[-1], max(rows))
    bandwidths, times = [memory_bandwidth()], {}
    for _ in range(rounds):
        for number, name in itertools.product([*rows, 0], [*engines, *llama]):
            case = (number, 16, DECODES) if number else (1, LONG_PROMPT, 1)
            measured = seconds_of(engines[name], *case) if name in engines else llama_seconds_of(llama[name], *case)
            times.setdefault((name, number), []).append(measured)
        bandwidths.append(memory_bandwidth())
    for engine in llama.values():
        engine.close()
    bandwidth = statistics.median(bandwidths)
    lines = [
        f"{processor()}; memory was read at {min(bandwidths) / 1e9:.0f} to {max(bandwidths) / 1e9:.0f} GB/s.\n",
        "| weights, dtype | MB read per decode | "
        + " | ".join(f"{number} rows" for number in rows)
        + f" | prompt of {LONG_PROMPT} tokens |",
        "| --- | --- |" + " --- |" * (len(rows) + 1),
    ]
    for name in [*engines, *llama]:
        read = weight_bytes(engines[name].model) if name in engines else None
        cells = [f"{read / 1e6:.0f}" if read else ""]
        for number in rows:
            seconds = min(times[name, number])
            cells.append(f"{number / seconds:.0f}" + (f" ({read / seconds / bandwidth:.0%})" if read else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {min(times[name, 0]) * 1e3:.0f} ms |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["quality", "speed"])
    if parser.parse_args().what == "quality":
        print(quality(*load_model(EMBEDDED, "cpu")))
    else:
        print(speed(find_model().folder))
