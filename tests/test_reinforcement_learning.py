"""The engine in reinforcement learning: rollouts are scored to the last bit, and a policy learns from them."""

import copy
from pathlib import Path
from statistics import fmean

import nbformat
import pytest
from test_changed_weights import change, own_pair

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast import kernels

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "extra" / "reinforcement_learning.ipynb"
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")
PROMPTS = [
    "Once upon a time, a proud miller met",
    "Why does ice float?",
    "Many hands",
    "Once upon a time, a proud baker",
]


def rollouts(engine: Engine, seed: int, prompts: list[str] = PROMPTS):
    params = [
        SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=seed + 10 * PROMPTS.index(prompt), logprobs=0)
        for prompt in prompts
    ]
    return engine.generate(prompts, params)


def reported(outputs) -> list[float]:
    return [scores[id] for output in outputs for id, scores in zip(output.token_ids, output.logprobs, strict=True)]


def rescored(engine: Engine, outputs) -> list[float]:
    """Return the log-probability of each generated token, from one prefill of all texts."""
    texts = [engine.tokenizer(output.prompt)["input_ids"] + output.token_ids for output in outputs]
    scored = engine.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=0))
    pairs = [
        pair
        for scored_output, output in zip(scored, outputs, strict=True)
        for pair in zip(output.token_ids, scored_output.prompt_logprobs[-len(output.token_ids) :], strict=True)
    ]
    return [scores[id] for id, scores in pairs]


@needs_kernels
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("seed", [0, 1000])
def test_a_rollouts_log_probabilities_are_those_of_a_rescoring_pass_bit_for_bit(family, seed):
    model, tokenizer = own_pair(family)
    config = EngineConfig(5, max_tokens_per_step=9, block_size=4, batch_invariant=True)
    engine = Engine(model, tokenizer, config)
    kept = []
    for update in (0, 1, 2):
        if update:
            new = copy.deepcopy(model)
            change(new, seed + update)
            engine.update_weights(new)
        together = rollouts(engine, seed)
        alone = [output for prompt in PROMPTS for output in rollouts(engine, seed, [prompt])]
        assert [output.token_ids for output in together] == [output.token_ids for output in alone]
        assert reported(together) == reported(alone) == rescored(engine, together)
        kept.append(reported(together))
    assert kept[0] != kept[1] != kept[2]


@pytest.fixture(scope="module")
def trained():
    """The names of the notebook after its training and its engine with stale blocks."""
    names = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code" and cell.id not in ("bootstrap", "rounding", "headline"):
            source = cell.source.replace("STEPS = 16", "STEPS = 7")  # enough to learn
            exec(compile(source, f"cell {cell.id}", "exec"), names)
    return names


@pytest.mark.slow
def test_the_notebooks_policy_learns_its_rule(trained):
    history = trained["history"]
    assert len(history) == 7 and history[0] < 0.3
    assert fmean(history[-3:]) > fmean(history[:2]) + 0.3  # 0.7 more where it was written


@pytest.mark.slow
def test_only_the_engine_with_stale_blocks_reports_what_the_policy_does_not_say(trained):
    after, fresh, wrong = (trained["gaps"](trained[name]) for name in ("after", "fresh", "wrong"))
    assert max(after.max(), fresh.max()) < 1e-3
    assert (wrong > 1e-3).float().mean() > 0.05  # a quarter where it was written
