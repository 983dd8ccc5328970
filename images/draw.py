"""Draw every figure of this folder: `make images`. Runs are real runs of the embedded model.

The figures are for the README, the site and slides. The lessons do not link these files, because Colab cannot show
relative pictures; their cells draw the same pictures as outputs.
"""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers import (
    Trace,
    filter_batch,
    generate_continuous,
    generate_next_token,
    generate_static,
    init_batch,
    load_model,
    merge_batches,
    plots,
    workloads,
)


@functools.cache
def race_traces() -> tuple[Trace, Trace]:
    """Run lesson 3's race with static and with continuous batching; two figures draw it."""
    requests = workloads.race()
    return generate_static(requests, 8).trace, generate_continuous(requests, 8).trace


def race() -> plots.Picture:
    """Draw lesson 3's race: static batching above, continuous batching below."""
    return plots.slot_timeline(dict(zip(["static batching", "continuous batching"], race_traces(), strict=True)))


def slot_steps() -> plots.Picture:
    """Draw how the slot-steps of the race are spent."""
    return plots.work_bars(dict(zip(["static", "continuous"], race_traces(), strict=True)))


def left_padding() -> plots.Picture:
    """Draw three prompts of unequal length in one tensor, with the position ids of every row."""
    _, tokenizer = load_model()
    batch = init_batch(
        [("The rain in Spain falls", 1), ("The quick brown fox jumped over the", 1), ("What comes up", 1)]
    )
    mask = batch["attention_mask"].tolist()
    words = [
        [tokenizer.decode([token]) if real else "pad" for token, real in zip(ids, row, strict=True)]
        for ids, row in zip(batch["input_ids"].tolist(), mask, strict=True)
    ]
    title = "padded on the left, positions below"
    return plots.token_grid({title: words}, {title: mask}, {title: batch["position_ids"].tolist()})


def merge_and_filter() -> plots.Picture:
    """Draw a batch that two new requests join and a finished request leaves."""
    running = init_batch([("The rain in Spain", 4), ("The quick brown fox jumped", 2), ("What comes", 3)])
    running = generate_next_token(generate_next_token(running))
    newcomers = generate_next_token(init_batch([("Many hands make", 6), ("Look", 5)]))
    # The ids start at 0, whichever requests this process has numbered before.
    running["request_ids"], newcomers["request_ids"] = [0, 1, 2], [3, 4]
    merged = merge_batches(running, newcomers)
    filtered, _ = filter_batch(merged)
    return plots.batches(
        {"running": running, "newcomers": newcomers, "after merge_batches": merged, "after filter_batch": filtered}
    )


FIGURES = {
    figure.__name__: figure
    for figure in (
        race,
        slot_steps,
        left_padding,
        merge_and_filter,
        plots.system_map,
        plots.with_and_without_cache,
        plots.shared_pass,
        plots.static_and_continuous,
        plots.token_budget,
        plots.padded_and_ragged,
        plots.block_lookup,
        plots.life_of_a_request,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    out = parser.parse_args().out
    for name, figure in FIGURES.items():
        picture = figure()
        picture.save(out / f"{name}.svg")
        print(f"{name}.svg: {picture.alt}")


if __name__ == "__main__":
    main()
