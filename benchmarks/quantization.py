"""What quantized weights cost in quality, and what they gain in speed and memory.

    python -m benchmarks.quantization quality
    python -m benchmarks.quantization speed              GPT-2 124M with random weights
    python -m benchmarks.quantization speed --large      the same with 1.0B parameters, in bfloat16
    python -m benchmarks.quantization memory --large     while a model is loaded and quantized

`quality` uses the embedded model, which is trained: on random weights rounding has other effects. Perplexity is
measured on documents from a seed that training never used, and greedy tokens on the beginnings of such documents. Once
one token differs, the rest of a text differs for that reason alone. So tokens are counted at the positions of float32's
own texts: how often would another token come next?

In `speed` the engines take turns. It reports the tokens per second of iterations in which all rows decode, the share of
the memory bandwidth at which they read the weights, and the time of two prompts. llama.cpp joins where it is installed.
Its Q8_0 and Q4_0 quantize activations, too.
"""

import contextlib
import copy
import itertools
import math
import statistics
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cyclopts
import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers import Engine, EngineConfig, SamplingParams, dequantized, integer_reference, load_model
from helpers.fast.linear_backends import bytes_of
from helpers.hardware import memory_bandwidth
from helpers.models import EMBEDDED
from helpers.models.quantization import FORMATS, QuantizedLinear
from helpers.tiny_model import corpus
from helpers.tiny_model.train import held_out_loss

from .engines import ExternalEngine
from .in_turns import measured_on, seconds, table, take_turns
from .install import HOME
from .models import find_model
from .workloads import TokenRequest

HELD_OUT_SEED, NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 999_000_000, 100, 8, 48
ROWS, LENGTHS, DECODES = (1, 4, 8, 16), (64, 512), 24
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
CASES = {
    "float32": (FLOAT32, None, None),
    "bfloat16": (BFLOAT16, None, None),
    "int8, float32": (FLOAT32, "int8", None),
    "int4, float32": (FLOAT32, "int4", None),
    "int8 by int8, float32": (FLOAT32, "int8", "int8"),
    "int8, bfloat16": (BFLOAT16, "int8", None),
    "int4, bfloat16": (BFLOAT16, "int4", None),
    "int8 by int8, bfloat16": (BFLOAT16, "int8", "int8"),
}  # dtype of everything else, weights, and how products are computed
LLAMA = ("Q8_0", "Q4_0")  # its names for 8 and 4 bits in groups of 32
app = cyclopts.App(name="python -m benchmarks.quantization", help=__doc__.partition("\n")[0])


# --- quality ----------------------------------------------------------------------------------------------------------


def prompts(tokenizer, count: int = NUM_PROMPTS) -> Iterator[list[int]]:
    """Yield the first tokens of documents that training never used."""
    documents = itertools.chain.from_iterable(corpus.documents(count, HELD_OUT_SEED + n) for n in itertools.count())
    ids = (tokenizer(text)["input_ids"] for text in documents)
    return itertools.islice((prompt[:PROMPT_TOKENS] for prompt in ids if len(prompt) > PROMPT_TOKENS), count)


@app.command(name="quality")
def print_quality() -> None:
    """Print what rounding changes in the embedded model's texts."""
    print(quality(*load_model(EMBEDDED, "cpu")))


def quality(model, tokenizer, steps: int = 20, count: int = NUM_PROMPTS) -> str:
    """Return a Markdown table: perplexity, and how many greedy tokens and texts are not float32's."""
    texts = list(prompts(tokenizer, count))
    params = SamplingParams(max_tokens=OUTPUT_TOKENS)
    rows, expected = [], None
    for name, (dtype, weights, compute) in CASES.items():
        config = EngineConfig(weights=weights, compute=compute, dtype=dtype)
        outputs = [output.token_ids for output in Engine(model, tokenizer, config).generate(texts, params)]
        expected = expected or outputs
        plain = integer_reference(model) if compute else dequantized(model, weights) if weights else model
        plain = copy.deepcopy(plain).to(dtype)
        changed = sum(tokens_changed(plain, *pair) for pair in zip(texts, expected, strict=True))
        different = sum(token_ids != others for token_ids, others in zip(outputs, expected, strict=True))
        perplexity = math.exp(held_out_loss(plain, tokenizer, steps))
        tokens = sum(map(len, expected))
        share = f"{changed} of {tokens:,} ({changed / tokens:.2%})"
        rows.append([name, f"{perplexity:.4f}", share, f"{different} of {count}"])
    return table(["weights, dtype", "held-out perplexity", "greedy tokens changed", "texts changed"], rows)


@torch.no_grad()
def tokens_changed(model, prompt: list[int], output: list[int]) -> int:
    """Return at how many positions of a text the model's best token is another one."""
    logits = model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
    return int((logits.argmax(-1) != torch.tensor(output)).sum())


# --- speed ------------------------------------------------------------------------------------------------------------


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the linear layers' weights, which every decode reads."""
    layers = {module for module in model.modules() if isinstance(module, nn.Linear | Conv1D | QuantizedLinear)}
    return sum(map(bytes_of, layers))


def made_up_requests(rows: int, prompt_tokens: int, output_tokens: int) -> list[TokenRequest]:
    """Return a request for each row; with random weights any tokens will do."""
    return [TokenRequest([(7 * row + n) % 1000 for n in range(prompt_tokens)], output_tokens) for row in range(rows)]


class Course:
    """The course's engine: the seconds of its iterations come from its trace."""

    def __init__(self, model, tokenizer, rows: int, dtype: torch.dtype, weights: str | None, compute: str | None):
        config = EngineConfig(max_batch_size=rows, weights=weights, compute=compute, dtype=dtype, prefix_caching=False)
        self.engine = Engine(model, tokenizer, config)
        self.bytes_read = weight_bytes(self.engine.model)

    def decode_seconds(self, rows: int) -> float:
        """Return the median seconds of an iteration in which all rows decode."""
        passes = self._run(rows, 16, DECODES)[1:]
        return statistics.median(after.start - before.start for before, after in itertools.pairwise(passes))

    def prompt_seconds(self, tokens: int) -> float:
        """Return the seconds of the iteration that computes a prompt."""
        return self._run(1, tokens, 1)[0].seconds

    def _run(self, rows: int, prompt_tokens: int, output_tokens: int) -> list:
        prompts = [list(request.prompt) for request in made_up_requests(rows, prompt_tokens, output_tokens)]
        start = len(self.engine.trace.passes)
        self.engine.generate(prompts, SamplingParams(max_tokens=output_tokens, ignore_eos=True))
        return self.engine.trace.passes[start:]


class LlamaCpp:
    """llama.cpp in a process of its own: a long generation takes these seconds more per token than a short one."""

    def __init__(self, folder: Path, rows: int, kind: str):
        self.engine = ExternalEngine("llama")
        self.engine.load(folder, kind, rows)
        self.bytes_read = (HOME / "models" / f"{folder.name}-{kind}.gguf").stat().st_size

    def decode_seconds(self, rows: int) -> float:
        """Return the mean seconds of a step in which all rows decode."""
        return (self._seconds(rows, 16, DECODES) - self._seconds(rows, 16, 1)) / (DECODES - 1)

    def prompt_seconds(self, tokens: int) -> float:
        """Return the seconds that a prompt and one token take."""
        return self._seconds(1, tokens, 1)

    def _seconds(self, rows: int, prompt_tokens: int, output_tokens: int) -> float:
        requests = made_up_requests(rows, prompt_tokens, output_tokens)
        return seconds(lambda: self.engine.run(requests))


def engines_of(name: str) -> dict[str, Course | LlamaCpp]:
    """Return the engines that are compared, with a model each."""
    folder, cases = find_model(name).folder, CASES
    if name == "large":
        cases = {name: case for name, case in CASES.items() if case[0] is BFLOAT16}
    model, tokenizer = load_model(folder, "cpu", next(iter(cases.values()))[0])
    engines = {name: Course(model, tokenizer, max(ROWS), *case) for name, case in tqdm(cases.items(), "engines")}
    if ExternalEngine("llama").why_unavailable() is None:
        engines |= {f"llama.cpp {kind}": LlamaCpp(folder, max(ROWS), kind) for kind in LLAMA}
    return engines


@app.command
def speed(*, large: bool = False, rounds: int = 3) -> None:
    """Print tokens per second, shares of the memory bandwidth, and milliseconds of prompts.

    Args:
        large: use the model of 1.0B parameters.
        rounds: how often each time is taken.
    """
    engines = engines_of("large" if large else "gpt2")
    runs = {(name, rows): partial(engine.decode_seconds, rows) for rows in ROWS for name, engine in engines.items()}
    runs |= {
        (name, -size): partial(engine.prompt_seconds, size) for size in LENGTHS for name, engine in engines.items()
    }
    first = memory_bandwidth()
    results = take_turns(runs | {"memory": memory_bandwidth}, rounds, warm_up=0)
    bandwidths = [first, *results["memory"]]
    lines = []
    for name, engine in engines.items():
        cells = [name, f"{engine.bytes_read / 1e6:.0f}"]
        for rows in ROWS:
            best = min(results[name, rows])
            share = engine.bytes_read / best / statistics.median(bandwidths)
            cells.append(f"{rows / best:.0f} ({share:.0%})")
        lines.append(cells + [f"{1000 * min(results[name, -size]):.0f} ms" for size in LENGTHS])
        if isinstance(engine, LlamaCpp):
            engine.engine.close()
    columns = [f"{rows} row{'s' * (rows > 1)}" for rows in ROWS] + [f"prompt of {size}" for size in LENGTHS]
    least, most = (bound(bandwidths) / 1e9 for bound in (min, max))
    print(f"{measured_on()} Memory was read at {least:.0f} to {most:.0f} GB/s.\n")
    print(table(["weights, dtype", "MB read per decode", *columns], lines))


# --- memory -----------------------------------------------------------------------------------------------------------


@app.command
def memory(*, large: bool = False) -> None:
    """Print how much memory this process takes while it loads and quantizes a model, and at the end.

    Args:
        large: use the model of 1.0B parameters.
    """
    folder = find_model("large" if large else "gpt2").folder
    with torch.device("meta"):  # shapes without weights
        sizes = [
            weight.nbytes
            for weight in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).parameters()
        ]
    for weights in FORMATS:
        load_model(EMBEDDED, "cpu", weights=weights)  # so that all modules and the kernels are loaded
        with sampled_memory() as samples:
            model, _ = load_model(folder, "cpu", weights=weights)
        own, pages = zip(*samples, strict=True)
        kept = sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))
        print(
            f"{weights}: {sum(sizes) / 1e6:.0f} MB of float32 weights, the largest {max(sizes) / 1e6:.0f} MB, become "
            f"{kept / 1e6:.0f} MB. Meanwhile the process had up to {max(own) / 1e6:.0f} MB of its own and up to "
            f"{max(pages) / 1e6:.0f} MB of pages of files; at the end {own[-1] / 1e6:.0f} and {pages[-1] / 1e6:.0f} MB."
        )


@contextlib.contextmanager
def sampled_memory() -> Iterator[list[tuple[int, int]]]:
    """Sample how many bytes of its own this process gains, and how many in pages of files that it maps."""
    start, samples, stopped = resident(), [], threading.Event()

    def sample() -> None:
        while not stopped.wait(0.001):
            samples.append(tuple(now - before for now, before in zip(resident(), start, strict=True)))

    thread = threading.Thread(target=sample)
    thread.start()
    yield samples
    stopped.set()
    thread.join()


def resident() -> tuple[int, int]:
    """Return the bytes of this process in memory: its own, and those of files. The system can drop the latter."""
    status = Path("/proc/self/status").read_text()
    own, pages = (int(status.partition(f"{field}:")[2].split(maxsplit=1)[0]) for field in ("RssAnon", "RssFile"))
    return own * 1024, pages * 1024


if __name__ == "__main__":
    app()
