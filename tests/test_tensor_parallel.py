"""A model split over two processes gives the tokens of one, sends what a formula says, and survives its processes.

Where processes would do the same for each family, most families are split over threads, which start at once.
"""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
import torch

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast import kernels
from helpers.features.structured_outputs import StructuredOutputs
from helpers.features.tensor_parallel import group, runner, worker
from tests.support.families import (
    FAMILIES,
    SIZES,
    build,
    by_name,
    draw_weights,
    not_ragged_because,
    prompts,
    reference,
    serve_ragged,
    tokenizer,
)

REFUSED = {  # families that run ragged, but cannot be split over two processes
    "gpt_bigcode": "num_key_value_heads=1",
    "gemma": "num_key_value_heads=1",
    "opt": "has no plan of how to split its layers",
    "opt (350m)": "no plan",
    "stablelm": "no plan",
    "gpt_oss": "no plan",
    "olmo2": "plan calls for 'colwise_gather_output'",
    "gemma3n_text": "give other logits",
}
BLOCKS, HIDDEN = 2, 64
SHORT = SamplingParams(max_tokens=5)
PLAIN = {"kernels": False, "linear_backend": "pytorch"}  # the model's own modules
FAST = PLAIN if kernels.unavailable() else {"kernels": True, "linear_backend": "compiled"}


class GroupOfThreads(group.Group):
    """Its workers are threads of this process: a new process imports torch and transformers for seconds.

    Shares are pickled, as they are on their way to a process.
    """

    def start(self):
        self.end()
        self.threads = ThreadPoolExecutor(self.size, initializer=torch.set_num_threads, initargs=(1,))
        shares = [pickle.loads(pickle.dumps(group.share_of(self.model, rank, self.size))) for rank in range(self.size)]
        starts = [worker.Start(rank, self.size, "", 1, 0, share, self.make_fast) for rank, share in enumerate(shares)]
        self.processes = list(self.threads.map(worker.Worker, starts))

    def compute(self, forward_pass):
        answers = list(self.threads.map(worker.Worker.compute, self.processes, [forward_pass] * self.size))
        return torch.cat([torch.from_numpy(part) for part, _, _ in answers], dim=1), *answers[0][1:]

    def end(self):
        if self.processes:
            self.threads.shutdown()
        self.processes = []


class SumOfThreads:
    """Stands for `all_reduce`: every thread's tensor becomes the sum of them all."""

    def __init__(self, size: int):
        self.barrier, self.parts = threading.Barrier(size, timeout=20), {}

    def __call__(self, partial):
        self.parts[threading.get_ident()] = partial.clone()
        self.barrier.wait()
        total = sum(self.parts.values())
        self.barrier.wait()
        partial.copy_(total)


@pytest.fixture
def in_threads(request, monkeypatch):
    """Split models over threads instead of processes, unless the test's parameter is False."""
    if is_wanted := getattr(request, "param", True):
        monkeypatch.setattr(runner, "Group", GroupOfThreads)
        monkeypatch.setattr(worker.dist, "all_reduce", SumOfThreads(2))
    return is_wanted


def make_engine(name: str = "llama", **settings) -> Engine:
    settings = {"tensor_parallel_size": 2, "execution": "ragged", "block_size": 4, "num_blocks": 60} | settings
    return Engine(reference(by_name(name)).model, tokenizer(), EngineConfig(**settings))


@pytest.fixture(scope="module")
def split():
    """An engine of two processes."""
    engine = make_engine()
    yield engine
    engine.runner.group.end()


def check_serving(name: str, count: int = len(SIZES), **settings) -> Engine:
    alone = reference(by_name(name), num_requests=count)
    requests, expected = alone.requests * 2, alone.tokens * 2  # every request arrives twice
    tokens, engine = serve_ragged(alone.model, requests, seed=0, tensor_parallel_size=2, **settings)
    assert tokens == expected
    events = engine.scheduler
    assert events.num_preempted and events.num_partial_chunks > count and events.num_cached_tokens > 2 * count
    return engine


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("name", "sums", "settings", "in_threads"),
    [
        ("gpt2", 2 * BLOCKS + 1, FAST, False),
        ("gpt2", 2 * BLOCKS + 1, PLAIN, True),
        ("phi", 2 * BLOCKS + 1, PLAIN, True),
        ("llama", 2 * BLOCKS + 1, FAST, True),
        ("gpt_neox", 2 * BLOCKS, FAST, True),
    ],
    indirect=["in_threads"],
)
def test_tokens_equal_those_alone_and_each_block_takes_two_sums(name, sums, settings, in_threads):
    """One more sum is the embedding's, where the plan splits it."""
    engine = check_serving(name, **settings)
    for forward_pass in engine.trace.passes:
        assert forward_pass.traffic == (sums, sums * forward_pass.tokens * HIDDEN * 4)
    assert engine.trace.traffic.all_reduces == sums * engine.trace.forward_passes
    pids = [] if in_threads else [process.pid for process in engine.runner.group.processes]
    assert all(map(is_running, pids))
    del engine
    gc.collect()
    assert not any(map(is_running, pids)), "no process outlives its engine"


@pytest.mark.slow
@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_ragged_family_is_exact_or_refused(family):
    if not family.available or not_ragged_because(family):
        pytest.skip("does not run ragged")
    if family.name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family.name]):
            make_engine(family.name)
    else:
        check_serving(family.name, count=4)


def test_seeds_logprobs_and_structured_outputs_are_those_of_one_process(split):
    choices = StructuredOutputs(choice=["the fox", "a bird of the north"])
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, seed=5),
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=6, n=2),
        SamplingParams(max_tokens=20, structured_outputs=choices),
        SamplingParams(max_tokens=8, logprobs=2, repetition_penalty=1.3),
    ]
    whole = make_engine(tensor_parallel_size=1, **PLAIN)
    expected, actual = whole.generate(prompts()[:4], params), split.generate(prompts()[:4], params)
    assert [output.token_ids for output in actual] == [output.token_ids for output in expected]
    for ours, theirs in zip(actual[-1].logprobs, expected[-1].logprobs, strict=True):
        assert ours.keys() == theirs.keys()
        assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-3)


def test_beams_are_those_of_one_process(split):
    whole = make_engine(tensor_parallel_size=1, **PLAIN)
    for prompt in prompts()[:2]:
        ours, theirs = (engine.beam_search(prompt, beam_width=3, max_tokens=6) for engine in (split, whole))
        assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("quantized", [{"weights": "int4", "kv_cache": "int8"}, {"weights": "int8"}])
def test_quantized_models_give_the_tokens_of_one_process(quantized):
    ours, theirs = make_engine(**quantized, **FAST), make_engine(**quantized, tensor_parallel_size=1, **PLAIN)
    found = [engine.generate(prompts()[:4], SamplingParams(max_tokens=10)) for engine in (ours, theirs)]
    assert [output.token_ids for output in found[0]] == [output.token_ids for output in found[1]]


@pytest.mark.usefixtures("in_threads")
def test_changed_weights_reach_the_processes():
    model = build(by_name("llama"))
    engine = Engine(model, tokenizer(), EngineConfig(tensor_parallel_size=2))
    before = engine.generate(prompts()[:2], SHORT)
    draw_weights(model, seed=1)
    expected = Engine(model, tokenizer()).generate(prompts()[:2], SHORT)
    after = engine.generate(prompts()[:2], SHORT)
    assert [output.token_ids for output in after] == [output.token_ids for output in expected]
    assert [output.token_ids for output in before] != [output.token_ids for output in expected]


# --- failures ---------------------------------------------------------------------------------------------------------


def kill(engine):
    os.kill(engine.runner.group.processes[1].pid, signal.SIGKILL)


def stop(engine):
    os.kill(engine.runner.group.processes[0].pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (kill, "Process 1 of 2 of the model has ended, with exit status -9."),
        (stop, "Process 0 of 2 of the model has given no sign of life for 2 seconds."),
    ],
    ids=["killed", "stopped"],
)
def test_a_failed_process_fails_its_pass_within_seconds_and_the_engine_goes_on(harm, message, split, monkeypatch):
    """A request that is not in the pass computes its keys again, in the new processes."""
    alone = reference(by_name("llama"))
    monkeypatch.setattr(group, "SILENCE_LIMIT", 2)
    ours = [(request.prompt, SamplingParams(max_tokens=request.max_tokens)) for request in alone.requests[:3]]
    for id, (prompt, params) in enumerate(ours):
        split.add_request(prompt, params, id)
    outputs = {}
    for _ in range(2):
        outputs |= {output.request_id: output for output in split.step()}
    bystander = split.scheduler.requests[2][0]
    split.scheduler.hold(bystander)  # it has keys, and is not in the pass
    old = list(split.runner.group.processes)
    harm(split)
    begin = time.monotonic()
    outputs |= {output.request_id: output for output in split.step()}
    assert time.monotonic() - begin < 10
    assert all(message in outputs[id].error and "Send the request again" in outputs[id].error for id in (0, 1))
    assert all(process.poll() is not None for process in old)
    split.scheduler.resume(bystander)
    for id, (prompt, params) in enumerate(ours[:2]):
        split.add_request(prompt, params, f"again {id}")
    while split.has_unfinished_requests():
        outputs |= {output.request_id: output for output in split.step()}
    assert [outputs[id].token_ids for id in ("again 0", "again 1", 2)] == alone.tokens[:3]


PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from helpers import Engine, EngineConfig, SamplingParams, load_model
engine = Engine(*load_model(sys.argv[1]), EngineConfig(tensor_parallel_size=2))
print(*(process.pid for process in engine.runner.group.processes), flush=True)
while True:
    engine.generate(["The quick brown fox"], SamplingParams(max_tokens=40))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    reference(by_name("llama")).model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_no_process_outlives_the_engines_own(folder, number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM, folder], stdout=-1, stderr=-3, text=True) as program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        program.send_signal(number)
        program.wait(20)
    end = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("gpt2", {"tensor_parallel_size": 3}, "num_attention_heads=4, which 3 processes cannot share equally"),
        ("llama", {"tensor_parallel_size": 4}, "num_key_value_heads=2, which 4 processes cannot share equally"),
        ("llama", {"execution": "padded"}, "requires ragged execution"),
        ("llama", {"batch_invariant": True}, "use batch_invariant=False"),
        ("llama", {"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(name, settings, reason):
    with pytest.raises(ValueError, match=reason):
        make_engine(name, **settings)


def test_adapters_are_refused(split, tmp_path):
    with pytest.raises(ValueError, match="use tensor_parallel_size=1"):
        split.load_adapter("one", tmp_path)
