"""Measure every model family and write SUPPORT.md: `make support-matrix`, or `python -m tests.support_matrix`.

The rows come from families.py. The numbers are measured here, on the installed transformers and on the oldest that the
course supports, which `make test-oldest` installs into build/oldest. test_support_matrix.py compares the page with the
list, so that neither can change without the other.
"""

import argparse
import copy
import json
import logging
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig

from helpers import generate_continuous, generate_static
from tests.families import (
    BF16_MARGIN,
    CONTEXT,
    FAMILIES,
    REMOTE_CODE,
    SIZES,
    WINDOW,
    Family,
    build,
    first_difference,
    generate,
    logit_range,
    not_ragged_because,
    reference,
    serve_ragged,
    serve_through_verbs,
    set_eos,
    tokenizer,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "SUPPORT.md"
OLDEST = ROOT / "build" / "oldest"
NO_ERROR = "**no error**"
RAGGED, PADDED = "yes", "runs padded"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(family: Family, with_generate_batch: bool) -> dict[str, str]:
    """Return the measured cells of a row, for this version of transformers."""
    if not family.available:
        return {"fp32": "not in this version", "bf16": "–", "ragged": "–"}
    cells = {"fp32": exactness(family), "bf16": difference(family), "ragged": ragged_exactness(family)}
    if with_generate_batch:
        cells["generate_batch"] = compare_generate_batch(family)
    return cells


def exactness(family: Family) -> str:
    """Return how many requests get the tokens of `generate` from the verbs and the loops, in fp32."""
    alone = reference(family)
    pair = {"model": alone.model, "tokenizer": tokenizer()}
    runs = [serve_through_verbs(alone.model, alone.requests, seed) for seed in range(3)]
    for outputs in (
        generate_static(alone.requests, 4, **pair).outputs,
        generate_continuous(alone.requests, 3, **pair).outputs,
    ):
        runs.append([output.token_ids for output in outputs])
    equal = sum(all(run[row] == tokens for run in runs) for row, tokens in enumerate(alone.tokens))
    verdict = "exact" if equal == len(alone.tokens) else "**wrong**"
    return f"{verdict}: {equal} of {len(alone.tokens)}"


def difference(family: Family) -> str:
    """Return the earliest token that differs in bf16, and how far the two were apart at most."""
    alone = reference(family, torch.bfloat16)
    actual = serve_through_verbs(alone.model, alone.requests, seed=0)
    first, apart = None, 0.0
    for tokens, ids, logits in zip(alone.tokens, actual, alone.logits, strict=True):
        index = first_difference(tokens, ids)
        if index is not None:
            gap = (logits[index, tokens[index]] - logits[index, ids[index]]) / logit_range(logits[index])
            first, apart = min(index, first if first is not None else index), max(apart, gap.item())
    if first is None:
        return f"none in {sum(map(len, alone.tokens))} tokens"
    return f"token {first + 1}, {apart:.1%} apart"


def ragged_exactness(family: Family) -> str:
    """Return how many requests get the tokens of `generate` from a ragged engine, or that the family runs padded."""
    if not_ragged_because(family):
        return PADDED
    alone = reference(family)
    requests, tokens = alone.requests * 2, alone.tokens * 2
    runs = [serve_ragged(alone.model, requests, seed)[0] for seed in range(3)]
    equal = sum(all(run[row] == expected for run in runs) for row, expected in enumerate(tokens))
    return f"{RAGGED if equal == len(tokens) else '**wrong**'}: {equal} of {len(tokens)}"


def compare_generate_batch(family: Family) -> str:
    """Return how many of the same prompts get their own tokens from transformers' `generate_batch`.

    It has one limit of tokens for all requests, chosen to fit the longest prompt. It puts all requests into one row, so
    the model's context is made long enough for that row.
    """
    from transformers import ContinuousBatchingConfig

    longer = {key: 64 * CONTEXT for key in CONTEXT_KEYS if key in family.config}
    model = build(replace(family, config=family.config | longer))
    set_eos(model, None)
    limit = CONTEXT - max(size for size, _ in SIZES)
    requests = [replace(request, max_tokens=limit) for request in reference(family).requests]
    alone = [generate(model, request)[0] for request in requests]
    settings = GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=10**6, pad_token_id=0)
    cache = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=256)
    ids = [tokenizer()(request.prompt)["input_ids"] for request in requests]
    logging.disable(logging.CRITICAL)  # its results contain the errors, too
    try:
        results = copy.deepcopy(model).generate_batch(ids, settings, cache, warmup=False)
    except ValueError as error:
        return f"refuses: {short(error)}"
    finally:
        logging.disable(logging.NOTSET)
    results = [results[name] for name in sorted(results, key=lambda name: int(name.rsplit("_", 1)[-1]))]
    equal = sum(result.generated_tokens == tokens for result, tokens in zip(results, alone, strict=False))
    errors = [result.error for result in results if result.error]
    if equal == len(alone):
        return f"exact: {equal} of {len(alone)}"
    if len(results) < len(alone):
        return f"{equal} of {len(alone)}, no results"
    return f"{equal} of {len(alone)}, " + (f"error: {short(errors[0])}" if errors else NO_ERROR)


def short(error) -> str:
    """Return the beginning of an error's message, for a cell of the table."""
    text = str(error).split(". ")[0].split(" at non-singleton")[0].replace("|", "\\|").strip().rstrip(".")
    return text if len(text) < 70 else text[:67] + "..."


def measure_all(with_generate_batch: bool) -> dict:
    """Return all rows, measured on the installed transformers."""
    torch.set_num_threads(1)  # models of this size are faster without threads
    transformers.logging.set_verbosity_error()
    rows = {}
    for family in FAMILIES:
        rows[family.name] = measure(family, with_generate_batch)
        print(f"transformers {transformers.__version__}  {family.name:16} {rows[family.name]}", file=sys.stderr)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    return versions | {"python": platform.python_version(), "rows": rows}


def measure_oldest() -> dict | None:
    """Return all rows, measured on the oldest transformers in another process; None if it is not installed."""
    if not OLDEST.is_dir():
        return None
    path = os.pathsep.join([str(OLDEST), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.support_matrix", "--measure"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


# --- the page ---------------------------------------------------------------------------------------------------------

TEXT = """# Which models work, and how that is known

Every row below is a model family of transformers. `tests/families.py` builds a small random model of each from its
config, in a fraction of a second. The sizes make each family's special features matter: windows of {window} tokens
for texts of up to {context}, fewer kv heads than query heads, and so on. For every feature, a test takes it away and
checks that the logits change. `make test` runs the proof on transformers {newest} and `make test-oldest` on {oldest};
both also use the GPU, if there is one. `make support-matrix` writes this page.

- **fp32**: up to {requests} requests, with prompts of {shortest} to {longest} tokens and up to {most} output tokens,
  some of which end early with an EOS. They run five times: three times with random joins and leaves through the four
  verbs, and once each in static batches and with continuous batching. *Exact* counts the requests that got, in all of
  these runs, exactly the tokens that `model.generate` gives them alone. Requests in which two tokens nearly tie are
  left out, because the rounding of another machine could exchange them.
- **bf16**: rounding depends on the shape of a batch, so near ties can be decided differently. The cell names the
  earliest token in which an output differs from the one alone. It also gives the largest gap between the logits of
  two such tokens, as a fraction of the logits' range; the tests allow {margin:.0%}.
- **ragged**: whether the engine can compute all tokens of an iteration in one row, with keys and values in blocks.
  Every request arrives twice, at random times, in three runs with 7 to 12 tokens per iteration and too few blocks of
  four tokens. Prompts are computed in chunks and shared, and requests are preempted. *Yes* counts the requests that
  got exactly the tokens of `model.generate`. A family that *runs padded* uses the row operations of the four verbs,
  with the results in the other columns. The engine asks the model itself, by a few short passes, and logs the reason.
- **`generate_batch`**: transformers' own continuous batching, version {newest}, on the same models and prompts in
  fp32. Every request may have {limit} tokens, and the context is longer, since all requests are packed into one row.

{table}

`generate_batch` is exact for {right} of these {rows} rows. It fails for {failing}, and gives other tokens without an
error for {silent}: {silent_names}.
GPT-Neo, GPT-J, CodeGen, BLOOM, MPT and XGLM do not use transformers' attention interface, so its paged cache never
reaches them. Its paged attention ignores the soft cap of Gemma 2.

Why some families run padded:

- The six families named above and Falcon compute their attention without the interface. In the older version,
  StableLM and Qwen2-MoE do so, too.
- Llama 4 attends in chunks. Its masks show that, but its layers announce no window. The same is true of the windows
  of Qwen2-MoE and Phi-3.5-MoE, if they are switched on; the engine detects them and runs these models padded.
- In the older version, Gemma 3n shares keys only through the cache, which ragged execution does not use. OPT makes
  its own mask there, so the engine cannot ask which distant tokens it attends to.

## Quantized weights

`EngineConfig(weights="int8")` and `"int4"` store the weights of plain linear layers as integers
(`helpers/models/quantization.py`). The reference is then the model with the rounded weights, which
`helpers.dequantized(model, "int8")` returns. `tests/test_quantization.py` serves each family above in one of the two
formats, ragged where the family runs ragged and otherwise padded. In fp32, every token is the dequantized model's
best one, near ties excepted. Experts of mixtures and layers of a family's own class, such as Falcon's, stay in the
model's dtype.

What rounding changes depends on the model. For the embedded one, from `python -m benchmarks.quantization quality`:

| weights, dtype of the rest | perplexity of held-out text | greedy tokens changed | texts changed |
| --- | --- | --- | --- |
| fp32 | 1.2632 | | |
| bf16 | 1.2632 | 4 of 2,580 (0.16%) | 3 of 100 |
| int8, fp32 | 1.2632 | 1 of 2,580 (0.04%) | 1 of 100 |
| int4, fp32 | 1.2654 | 37 of 2,580 (1.43%) | 24 of 100 |
| int8, bf16 | 1.2633 | 3 of 2,580 (0.12%) | 4 of 100 |
| int4, bf16 | 1.2654 | 38 of 2,580 (1.47%) | 25 of 100 |

A token counts as changed if the model, given the fp32 output up to that position, would choose another one. The last
column compares whole outputs, in which one changed token changes what follows.

`load_model` also reads weights that were quantized elsewhere, and keeps their exact values.
`tests/test_quantized_files.py` compares them bit for bit with what each format's own library computes.

- **Folders of compressed-tensors** (`pack-quantized`), such as `save_quantized` writes: symmetric integers of
  4 or 8 bits, with a scale per output or per multiple of 32 inputs. Other schemes are refused, such as asymmetric ones
  and quantized activations.
- **GGUF files** of GPT-2, Llama, Qwen2 and Qwen3: Q8_0 and Q4_0 keep their integers, and other types become floats.
  Other architectures are refused, and so are settings that transformers would ignore.

A saved folder loads in transformers, too, if `compressed-tensors` is installed. GPT-2 is the exception, because the
format has no place for its `Conv1D` layers: only `load_model` reads it.

## What is refused or not covered

- **Models without keys and values for every token in every layer** are refused: Mamba, Mamba-2, RWKV, xLSTM,
  RecurrentGemma, and hybrids such as Jamba, Bamba, Zamba 2, Nemotron-H, Falcon-H1, LFM2, MiniMax, Qwen3-Next and
  Granite 4 (hybrid). So are GPT-1 and XLNet, which have no cache at all, and models that also cache an index of the
  keys, for sparse attention: DeepSeek-V3.2, GLM-MoE-DSA, MiniMax-M3.
- **Encoder-decoders** (T5, BART) are refused, and so are **decoders that count padding as positions** (those of BART
  and its relatives, Whisper, TrOCR and GIT, and RoFormer) and **encoders**, whose tokens attend to later ones (BERT,
  RoBERTa). These would run and give wrong tokens without an error. So would weights with NaN, which are refused, too.
- `load_model` and the verbs find this out by six short forward passes of the model itself and raise a `ValueError`
  with the reason. They use no list of names, so they also judge model types that are not in the table.
- Models with **longrope** scaling accept requests up to their original context only, and **Llama 4** up to the point
  where its attention temperature begins to rise. Both look at the whole batch to tell whether a text is long. Beyond
  that point, one long row would change the tokens of the others.
- Of a model's **generation config**, only the EOS tokens apply. `model.generate` and vLLM also apply its repetition
  penalty, for example that of Qwen2.5; here, each request's `SamplingParams` say what applies. `load_model` warns about
  settings that change greedy tokens.

These models exist only as remote code outside transformers, and are neither built nor tested here:

{remote}

Measured with transformers {newest} and {oldest}, torch {torch} and Python {python}, on the CPU.
"""
MEASURED = ("fp32", "bf16", "ragged")
HEADER = ["family", "published models", "special features"]


def static_cells(family: Family) -> list[str]:
    """Return the cells of a row that need no measurement."""
    return [f"`{family.name}`", family.stands_for, ", ".join(family.features)]


def remote_lines() -> list[str]:
    """Return the list of models that exist only as remote code."""
    return [f"- {names}" + (f" ({note})" if note else "") for names, note in REMOTE_CODE.items()]


def page(newest: dict, oldest: dict) -> str:
    """Return the text of SUPPORT.md, from the measurements on both versions of transformers."""
    versions = [run["transformers"] for run in (newest, oldest)]
    header = [
        *HEADER,
        *(f"{name}, {version}" for name in MEASURED for version in versions),
        "`generate_batch`",
    ]
    lines = [header, ["---"] * len(header)]
    for family in FAMILIES:
        new, old = newest["rows"][family.name], oldest["rows"][family.name]
        measured = [row[name] for name in MEASURED for row in (new, old)]
        lines.append([*static_cells(family), *measured, new.get("generate_batch", "–")])
    prompt_tokens, max_tokens = zip(*SIZES, strict=True)
    cells = {name: row["generate_batch"] for name, row in newest["rows"].items() if "generate_batch" in row}
    right = [name for name, cell in cells.items() if cell.startswith("exact")]
    silent = [f"`{name}`" for name, cell in cells.items() if NO_ERROR in cell]
    return TEXT.format(
        newest=versions[0],
        oldest=versions[1],
        table="\n".join(f"| {' | '.join(cells)} |" for cells in lines),
        remote="\n".join(remote_lines()),
        right=len(right),
        rows=len(cells),
        silent=len(silent),
        silent_names=", ".join(silent),
        failing=len(cells) - len(right) - len(silent),
        torch=newest["torch"],
        python=newest["python"],
        window=WINDOW,
        context=CONTEXT,
        requests=len(SIZES),
        shortest=min(prompt_tokens),
        longest=max(prompt_tokens),
        most=max(max_tokens),
        limit=CONTEXT - max(prompt_tokens),
        margin=BF16_MARGIN,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--measure", action="store_true", help="print this version's measurements as JSON, write nothing"
    )
    if parser.parse_args().measure:
        print(json.dumps(measure_all(with_generate_batch=False)))
        return
    oldest = measure_oldest()
    if oldest is None:
        raise SystemExit("There is no build/oldest yet: run `make support-matrix`, which installs it first.")
    PAGE.write_text(page(measure_all(with_generate_batch=True), oldest), encoding="utf-8")
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
