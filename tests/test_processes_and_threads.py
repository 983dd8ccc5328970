"""Engines in forked processes and in several threads: each request gets the tokens that it gets alone."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import PROMPTS, alone, random_pair

from helpers import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.usefixtures("two_threads")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300  # seconds

FORK = """
import os, signal, torch
from helpers import Engine, EngineConfig, SamplingParams

torch.set_num_threads(2)
prompts = [f"Once upon a time there was a fox who lived in {place}" for place in ("a den", "the oak", "a hole", "town")]

def generate(engine):
    return [output.token_ids for output in engine.generate(prompts, SamplingParams(10))]

for execution in ("padded", "ragged"):
    engine = Engine(config=EngineConfig(execution=execution))
    before = generate(engine)
    child = os.fork()
    if child == 0:
        signal.alarm(200)  # ends the child if it hangs
        os._exit(0 if generate(engine) == before == generate(Engine()) else 1)
    assert os.waitpid(child, 0)[1] == 0, f"{execution}: the child hangs, or its tokens differ"
    assert torch.get_num_threads() == 2 and generate(engine) == before
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_generates_the_same_tokens_instead_of_hanging():
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # otherwise tokenizers warns of the fork
    command = [sys.executable, "-c", FORK]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("execution", ["padded", "ragged"])
def test_engines_in_several_threads_give_every_request_its_own_tokens(execution):
    """The engines share the weights of one model, and the prompts differ in length."""
    model, tokenizer = random_pair("llama")
    outputs = {}

    def generate(name: int) -> None:
        engine = Engine(model, tokenizer, EngineConfig(max_batch_size=2 + name, execution=execution))
        prompts = PROMPTS[name:] + PROMPTS[:name]
        outputs[name] = {output.prompt: output.token_ids for output in engine.generate(prompts, SamplingParams(20))}

    threads = [threading.Thread(target=generate, args=[name], daemon=True) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    expected = {prompt: alone(model, tokenizer, prompt, 20) for prompt in PROMPTS}
    assert outputs == dict.fromkeys(range(3), expected)
