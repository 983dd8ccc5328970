"""The embedded model is good enough for the lessons: its texts end by themselves, differ in length and do not loop."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import generate_continuous, load_model, workloads
from helpers.models import EMBEDDED
from helpers.tiny_model import corpus


@pytest.fixture(scope="module")
def outputs():
    """The model's greedy outputs for 200 prompts that its corpus does not contain."""
    prompts = corpus.unseen_prompts(200, seed=1)
    return generate_continuous([(prompt, 440) for prompt in prompts], max_batch_size=32).outputs


def longest_run(ids, size=4):
    """Return how many times in a row the same `size` tokens occur, at most."""
    most = 0
    for start in range(len(ids) - size + 1):
        times = 1
        while ids[start + times * size : start + (times + 1) * size] == ids[start : start + size]:
            times += 1
        most = max(most, times)
    return most


@pytest.mark.slow
def test_texts_end_by_themselves_differ_in_length_and_do_not_loop(outputs):
    short, long = np.percentile([len(output.token_ids) for output in outputs], [10, 90])
    assert sum(output.finish_reason == "stop" for output in outputs) >= 0.95 * len(outputs)
    assert long >= 5 * short
    assert longest_run([1, 2, 3, 4] * 3 + [5]) == 3  # tests the measure itself
    assert max(longest_run(output.token_ids) for output in outputs) <= 2
    assert len({output.text for output in outputs}) >= 0.6 * len(outputs)


@pytest.mark.parametrize(
    ("prompt", "rest"),
    [
        ("The quick brown fox jumped over the", " lazy dog."),
        ("The rain in Spain falls", " mainly on the plain."),
        ("What comes up", " must come down."),
    ],
)
def test_well_known_sentences_continue_as_expected(prompt, rest):
    assert generate_continuous([(prompt, 20)]).outputs[0].text == rest


def test_any_engine_that_reads_hugging_face_folders_can_load_it():
    """No code of the course is needed, and no class that only one release of transformers has."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
    assert model.config.architectures == ["GPT2LMHeadModel"]
    assert model.config.n_embd // model.config.n_head in (32, 64)
    assert model.config.max_position_embeddings >= 512
    assert model.dtype.itemsize == 4
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir() if path.is_file()) <= 8e6
    assert "TokenizersBackend" not in (EMBEDDED / "tokenizer_config.json").read_text()


def test_every_output_of_the_race_reaches_max_tokens_after_a_prompt_of_seven_tokens():
    requests = workloads.race()
    _, tokenizer = load_model()
    assert {len(tokenizer(request.prompt)["input_ids"]) for request in requests} == {7}
    assert {output.finish_reason for output in generate_continuous(requests, 8).outputs} == {"length"}
