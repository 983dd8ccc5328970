"""Measure every model family and write SUPPORT.md: `make support-matrix`, or `python -m tests.tools.support_matrix`.

The rows come from families.py. The numbers are measured here, on the installed transformers and on the oldest that the
course supports, which `make test-oldest` installs into build/oldest. test_families.py compares the page with the
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
from tests.support.families import (
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

ROOT = Path(__file__).resolve().parents[2]
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
    command = [sys.executable, "-m", "tests.tools.support_matrix", "--measure"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


# --- the page ---------------------------------------------------------------------------------------------------------

TEMPLATE = Path(__file__).with_suffix(".md")
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
    header = [*HEADER, *(f"{name}, {version}" for name in MEASURED for version in versions), "`generate_batch`"]
    lines = [header, ["---"] * len(header)]
    for family in FAMILIES:
        new, old = newest["rows"][family.name], oldest["rows"][family.name]
        measured = [row[name] for name in MEASURED for row in (new, old)]
        lines.append([*static_cells(family), *measured, new.get("generate_batch", "–")])
    prompt_tokens, max_tokens = zip(*SIZES, strict=True)
    cells = {name: row["generate_batch"] for name, row in newest["rows"].items() if "generate_batch" in row}
    right = [name for name, cell in cells.items() if cell.startswith("exact")]
    silent = [f"`{name}`" for name, cell in cells.items() if NO_ERROR in cell]
    return TEMPLATE.read_text(encoding="utf-8").format(
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
