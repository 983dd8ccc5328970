"""Measure every model family and write SUPPORT.md: `make support-matrix`, or `python -m tests.support_matrix`.

The page's rows are families.py's, its numbers are measured here: on the installed transformers, and on the oldest that
the course supports where `make test-oldest` has put it into build/oldest. test_support_matrix.py compares the page with
the list, so that neither can change without the other.
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
from helpers.ragged import supports_ragged
from tests.families import (
    BF16_MARGIN,
    CONTEXT,
    FAMILIES,
    REMOTE_CODE,
    SIZES,
    WINDOW,
    Family,
    build,
    extent,
    first_difference,
    generate,
    reference,
    say_eos,
    serve_at_random,
    serve_ragged,
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
    """The measured cells of a row, on this transformers."""
    if not family.available:
        return {"fp32": "not in this version", "bf16": "–", "ragged": "–"}
    cells = {"fp32": exactness(family), "bf16": difference(family), "ragged": ragged_exactness(family)}
    if with_generate_batch:
        cells["generate_batch"] = compare_generate_batch(family)
    return cells


def exactness(family: Family) -> str:
    alone = reference(family)
    pair = {"model": alone.model, "tokenizer": tokenizer()}
    runs = [serve_at_random(alone.model, alone.requests, seed) for seed in range(3)]
    for outputs in (
        generate_static(alone.requests, 4, **pair).outputs,
        generate_continuous(alone.requests, 3, **pair).outputs,
    ):
        runs.append([output.token_ids for output in outputs])
    equal = sum(all(run[row] == tokens for run in runs) for row, tokens in enumerate(alone.tokens))
    verdict = "exact" if equal == len(alone.tokens) else "**wrong**"
    return f"{verdict}: {equal} of {len(alone.tokens)}"


def difference(family: Family) -> str:
    """The earliest token that turns out otherwise in bf16, and how far the two were apart at most."""
    alone = reference(family, torch.bfloat16)
    given = serve_at_random(alone.model, alone.requests, seed=0)
    first, apart = None, 0.0
    for tokens, ids, logits in zip(alone.tokens, given, alone.logits, strict=True):
        at = first_difference(tokens, ids)
        if at is not None:
            gap = (logits[at, tokens[at]] - logits[at, ids[at]]) / extent(logits[at])
            first, apart = min(at, first if first is not None else at), max(apart, gap.item())
    if first is None:
        return f"none in {sum(map(len, alone.tokens))} tokens"
    return f"token {first + 1}, {apart:.1%} apart"


def ragged_exactness(family: Family) -> str:
    alone = reference(family)
    if not supports_ragged(alone.model):
        return PADDED
    requests, tokens = alone.requests * 2, alone.tokens * 2
    runs = [serve_ragged(alone.model, requests, seed)[0] for seed in range(3)]
    equal = sum(all(run[row] == expected for run in runs) for row, expected in enumerate(tokens))
    return f"{RAGGED if equal == len(tokens) else '**wrong**'}: {equal} of {len(tokens)}"


def compare_generate_batch(family: Family) -> str:
    """How many of the same prompts get their own tokens from transformers' `generate_batch`.

    It takes one budget for all and puts all requests into one row, so the budget is one that fits the longest prompt,
    and the model's context is longer by so much that the row fits, too.
    """
    from transformers import ContinuousBatchingConfig

    longer = {key: 64 * CONTEXT for key in CONTEXT_KEYS if key in family.config}
    model = build(replace(family, config=family.config | longer))
    say_eos(model, None)
    budget = CONTEXT - max(size for size, _ in SIZES)
    requests = [replace(request, max_tokens=budget) for request in reference(family).requests]
    alone = [generate(model, request)[0] for request in requests]
    settings = GenerationConfig(max_new_tokens=budget, do_sample=False, eos_token_id=10**6, pad_token_id=0)
    cache = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=256)
    ids = [tokenizer()(request.prompt)["input_ids"] for request in requests]
    logging.disable(logging.CRITICAL)  # it reports its errors in results, too
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
    text = str(error).split(". ")[0].split(" at non-singleton")[0].replace("|", "\\|").strip().rstrip(".")
    return text if len(text) < 70 else text[:67] + "..."


def measure_all(with_generate_batch: bool) -> dict:
    torch.set_num_threads(1)  # models of this size are faster without threads
    transformers.logging.set_verbosity_error()
    rows = {}
    for family in FAMILIES:
        rows[family.name] = measure(family, with_generate_batch)
        print(f"transformers {transformers.__version__}  {family.name:16} {rows[family.name]}", file=sys.stderr)
    return {"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows}


def measure_oldest() -> dict | None:
    if not OLDEST.is_dir():
        return None
    path = os.pathsep.join([str(OLDEST), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.support_matrix", "--measure"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


# --- the page ---------------------------------------------------------------------------------------------------------

TEXT = """# Which models work, and how that is known

Every row below is a model family of transformers. For each there is a small random model, built in a moment from its
config (`tests/families.py`), with sizes chosen so that the family's special feature bites: windows of {window} tokens
for texts of up to {context}, fewer kv heads than query heads, and so on; a test takes each feature away and sees the
logits change. `make test` runs the proof on transformers {newest}, `make test-oldest` on {oldest}, and both on the
GPU, too, where there is one. This page is written by `make support-matrix`.

- **fp32**: up to {requests} requests, prompts of {shortest} to {longest} tokens, up to {most} output tokens, EOS within
  some; three runs of random joins and leaves through the four verbs, static batches and continuous batching. *Exact*
  means: in all of these runs a request got the very tokens that `model.generate` gives it alone. (Requests in which two
  tokens nearly tie are left out: that would test luck.)
- **bf16**: rounding depends on the shape of a batch, so near ties may turn out otherwise: the earliest token at which
  an answer parts from the one alone, and how far the two tokens' logits are apart, as a part of the logits' range (the
  largest such gap; the tests allow {margin:.0%}).
- **ragged**: whether the engine can run it with all tokens of an iteration in one row, over keys and values in blocks.
  Three runs in which every request comes twice, at random times, with 7 to 12 tokens an iteration and too few blocks of
  four tokens: prompts are read in chunks and shared, requests are preempted, and *yes* means that all got the tokens of
  `model.generate`. What *runs padded* is run by the four verbs, exactly as the other columns say. The engine asks the
  model itself, with a few short passes.
- **`generate_batch`**: transformers' own continuous batching, on the same models and prompts in fp32, version
  {newest}; {budget} tokens a request, and a context that is longer, since it packs all requests into one row.

{table}

`generate_batch` is exact for {right} of these {rows} rows, fails for {failing}, and gives other tokens without an error
for {silent}: {silent_names}.
GPT-Neo, GPT-J, CodeGen, BLOOM, MPT and XGLM do not go through transformers' attention interface, so that the paged
cache never reaches them; Gemma 2's soft-cap is left out of the paged attention.

Why some families run padded: these six and Falcon (in the older version StableLM and Qwen2-MoE, too) compute their
attention without the interface. Llama 4 attends in chunks, which is written in its masks and not told to the attention
(so are the windows of Qwen2-MoE and Phi-3.5-MoE, where they are switched on: found and run padded, too).
In the older version Gemma 3n shares keys through the cache only, which ragged execution does not use, and OPT makes its
mask itself, so that it cannot be asked what is far behind.

## What else is refused or left out

- **No keys and values for every token in every layer**: Mamba, Mamba-2, RWKV, xLSTM, RecurrentGemma, and hybrids such
  as Jamba, Bamba, Zamba 2, Nemotron-H, Falcon-H1, LFM2, MiniMax, Qwen3-Next, Granite 4 (hybrid); GPT-1 and XLNet, which
  have no cache at all.
- **Encoder-decoders** (T5, BART), and **decoders that count the padding as positions** (BART's and its relatives',
  Whisper's, TrOCR's, GIT's, RoFormer): these would run, and give wrong tokens without an error.
- `load_model` and the verbs find this out by asking the model itself, with five short forward passes, and raise a
  `ValueError` that says why. No list of names is involved, so it works for a model type that is not in the table, too.
- Models with **longrope** scaling take requests up to their original context only, and **Llama 4** up to where its
  attention temperature begins to rise: both look at the whole batch to see whether a text is long, so beyond that point
  one long row would change what the others get.

These exist as remote code only, outside transformers, and are neither built nor tested here:

{remote}

Measured with transformers {newest} and {oldest}, torch {torch} and Python {python}, on the CPU.
"""
MEASURED = ("fp32", "bf16", "ragged")
HEADER = ["family", "models it stands for", "what is special"]


def static_cells(family: Family) -> list[str]:
    """What the page says of a family without measuring anything."""
    return [f"`{family.name}`", family.stands_for, family.feature]


def remote_lines() -> list[str]:
    return [f"- {names}" + (f" ({note})" if note else "") for names, note in REMOTE_CODE.items()]


def page(newest: dict, oldest: dict) -> str:
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
    sizes, budgets = zip(*SIZES, strict=True)
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
        torch=newest["torch"].split("+")[0],
        python=platform.python_version(),
        window=WINDOW,
        context=CONTEXT,
        requests=len(SIZES),
        shortest=min(sizes),
        longest=max(sizes),
        most=max(budgets),
        budget=CONTEXT - max(sizes),
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
