"""Measure every model family, and write the table of SUPPORT.md: `make support-matrix`.

The rows come from families.py. The numbers are measured here, on the installed transformers and on the oldest that the
course supports, which `make test-oldest` installs into build/oldest.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from helpers import generate_continuous, generate_static
from tests.support.families import (
    FAMILIES,
    Family,
    first_difference,
    logit_range,
    not_ragged_because,
    reference,
    serve_ragged,
    serve_through_verbs,
    tokenizer,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "SUPPORT.md"
OLDEST = ROOT / "build" / "oldest"
RAGGED, PADDED = "yes", "runs padded"


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(family: Family) -> dict[str, str]:
    """Return the measured cells of a row, for this version of transformers."""
    if not family.available:
        return {"fp32": "not in this version", "bf16": "–", "ragged": "–"}
    return {"fp32": exactness(family), "bf16": difference(family), "ragged": ragged_exactness(family)}


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


def measure_all() -> dict:
    """Return all rows, measured on the installed transformers."""
    torch.set_num_threads(1)  # models of this size are faster without threads
    transformers.logging.set_verbosity_error()
    rows = {}
    for family in FAMILIES:
        rows[family.name] = measure(family)
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

MEASURED = ("fp32", "bf16", "ragged")


def table(newest: dict, oldest: dict) -> str:
    """Return the table of SUPPORT.md, from the measurements on both versions of transformers."""
    columns = [f"{name}, {run['transformers']}" for name in MEASURED for run in (newest, oldest)]
    header = ["family", "published models", "special features", *columns]
    lines = [header, ["---"] * len(header)]
    for family in FAMILIES:
        measured = [run["rows"][family.name][name] for name in MEASURED for run in (newest, oldest)]
        lines.append([f"`{family.name}`", family.stands_for, family.features, *measured])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--measure", action="store_true", help="print this version's measurements as JSON, write nothing"
    )
    if parser.parse_args().measure:
        print(json.dumps(measure_all()))
        return
    oldest = measure_oldest()
    if oldest is None:
        raise SystemExit("There is no build/oldest yet: run `make support-matrix`, which installs it first.")
    newest = measure_all()
    versions = "Measured with transformers {}, torch {torch} and Python {python}, on the CPU.".format(
        f"{newest['transformers']} and {oldest['transformers']}", **newest
    )
    page = re.sub(r"^\| family (?:.*\n\|)*.*\n", lambda _: table(newest, oldest), PAGE.read_text("utf-8"), flags=re.M)
    PAGE.write_text(re.sub(r"^Measured with .*", versions, page, flags=re.M), encoding="utf-8")
    print(f"wrote the table of {PAGE.name}")


if __name__ == "__main__":
    main()
