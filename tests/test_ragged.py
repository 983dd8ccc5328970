"""Ragged execution, part by part: what a query sees, where keys lie, what a forward pass reads and writes.

That no token changes, on any family, is in test_ragged_exactness.py.
"""

import threading

import pytest
import torch
from conftest import PROMPTS, alone, random_pair
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import Engine, EngineConfig, SamplingParams, ragged
from helpers.block_manager import BlockManager
from helpers.padded import PaddedExecution
from helpers.ragged import Part, RaggedExecution, own_shell, places, supports_ragged
from helpers.scheduler import Chunk
from helpers.sequence import Sequence
from tests.families import FAMILIES, GROUPED, Family, build

pytestmark = pytest.mark.usefixtures("one_thread")
ON = {"execution": "ragged", "block_size": 4}


@pytest.fixture(scope="module")
def llama():
    return random_pair("llama")


def family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def execution(model, blocks: int = 16) -> RaggedExecution:
    return RaggedExecution(own_shell(model), BlockManager(blocks, block_size=4))


def sequence(*token_ids: int) -> Sequence:
    return Sequence(token_ids, list(token_ids), 20)


def read(one: RaggedExecution, *chunks: tuple[Sequence, int]) -> torch.Tensor:
    """One iteration; the logits of those who have read all of theirs."""
    for sequence, tokens in chunks:
        assert one.memory.allocate(sequence, tokens)
    (done,) = one.run([Chunk(*chunk) for chunk in chunks])
    for sequence, tokens in chunks:
        sequence.computed += tokens
    return done.logits


def expected(model, *texts: list[int]) -> torch.Tensor:
    """The model's logits behind each text, alone."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([text], device=model.device)).logits[0, -1:] for text in texts])


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To a hundred-thousandth of the logits' range: rounding, and nothing else."""
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-5 * (other.max() - other.min()))


# --- what a query sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("past", "tokens", "window", "seen"),
    [
        (0, 3, None, ["x..", "xx.", "xxx"]),
        (2, 2, None, ["xxx.", "xxxx"]),
        (0, 4, 2, ["x...", "xx..", ".xx.", "..xx"]),
        (3, 2, 2, ["..xx.", "...xx"]),
        (1, 3, 3, ["xx..", "xxx.", ".xxx"]),
        (0, 3, 3, ["x..", "xx.", "xxx"]),
        (4, 1, 2, ["...xx"]),
        (4, 1, 1, ["....x"]),
        (4, 1, 4, [".xxxx"]),
        (4, 1, 5, None),
        (4, 1, None, None),
        (0, 1, None, None),
        (0, 1, 1, None),
    ],
)
def test_a_query_sees_what_came_before_it_and_itself_within_its_window(past, tokens, window, seen):
    for start in (0, 5):  # wherever it is in the row
        mask = Part(start, tokens, past, slice(0, past + tokens)).mask(window, "cpu")
        drawn = None if mask is None else ["".join(".x"[see] for see in row) for row in mask.tolist()]
        assert drawn == seen


def test_a_part_has_a_mask_for_every_window_that_a_layer_asks_for():
    part = Part(0, 3, 0, slice(0, 3))
    for window in (None, 1, 2, None, 1):
        assert part.mask(window, "cpu").sum() == {None: 6, 1: 3, 2: 5}[window]


def reference_attention(query, key, value, mask, scaling, softcap, sinks) -> torch.Tensor:
    """Number by number, as it is defined."""
    heads, tokens, dim = query.shape
    answer = torch.zeros(heads, tokens, value.shape[2], dtype=torch.float64)
    for head in range(heads):
        kv_head = head * key.shape[0] // heads
        for token in range(tokens):
            weights = {}
            for place in range(key.shape[1]):
                if mask is None or mask[token, place]:
                    score = (query[head, token] @ key[kv_head, place]) * (dim**-0.5 if scaling is None else scaling)
                    weights[place] = (score if softcap is None else softcap * (score / softcap).tanh()).exp()
            total = sum(weights.values()) + (0 if sinks is None else sinks[head].exp())
            for place, weight in weights.items():
                answer[head, token] += weight / total * value[kv_head, place]
    return answer


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("scaling", "window", "tokens"), [(None, None, 3), (0.3, 4, 3), (0.3, 4, 1)])
def test_attention_of_a_request_is_what_its_definition_says(kv_heads, with_sinks, softcap, scaling, window, tokens):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((4, tokens, 8), (kv_heads, 7, 8), (kv_heads, 7, 6))
    )
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
    mask = Part(0, tokens, 7 - tokens, slice(0, 7)).mask(window, "cpu")
    got = ragged._attention(query, key, value, mask, scaling, softcap, sinks)
    assert torch.allclose(got, reference_attention(query, key, value, mask, scaling, softcap, sinks), atol=1e-6)


@pytest.mark.parametrize(("tokens", "keys", "window"), [(1, 64, None), (1, 65, None), (1, 200, 50), (3, 200, None)])
def test_in_bfloat16_attention_is_as_close_to_its_definition_as_rounding_allows(tokens, keys, window):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((4, tokens, 8), (2, keys, 8), (2, keys, 6))
    )
    mask = Part(0, tokens, keys - tokens, slice(0, keys)).mask(window, "cpu")
    got = ragged._attention(query, key, value, mask, None, None, None)
    exact = reference_attention(query.double(), key.double(), value.double(), mask, None, None, None)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), exact, atol=0.01)


# --- where keys and values lie ----------------------------------------------------------------------------------------


def test_neighbours_are_read_where_they_are_and_others_are_collected():
    assert places([2, 3, 4], 4, 10, "cpu") == slice(8, 18)
    assert places([5], 4, 3, "cpu") == slice(20, 23)
    assert places([2, 4, 3], 4, 10, "cpu").tolist() == [8, 9, 10, 11, 16, 17, 18, 19, 12, 13]
    assert places([1, 0], 2, 3, "cpu").tolist() == [2, 3, 0]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_it_does_not_matter_which_blocks_a_sequence_has(name):
    model = build(family(name))
    text = list(range(20, 42))
    answers = []
    for table in ([0, 1, 2, 3, 4, 5], [9, 10, 11, 12, 13, 14], [3, 2, 1, 0, 15, 9], [0, 2, 4, 6, 8, 10]):
        one, execute = sequence(*text), execution(model)
        assert execute.memory.allocate(one, 22)
        execute.memory.tables[one] = table
        read(execute, (one, 13))
        answers.append(read(execute, (one, 9)))
    assert all(close(answer, expected(model, text)) for answer in answers)


def test_a_pass_writes_into_the_slots_of_its_new_tokens_and_nowhere_else(llama):
    execute = execution(llama[0])
    one, other = sequence(*range(10, 17)), sequence(*range(30, 35))
    read(execute, (one, 7), (other, 3))
    before = {index: [tensor.clone() for tensor in layer] for index, layer in execute.store.layers.items()}
    one.token_ids.append(50)
    read(execute, (other, 2), (one, 1))
    written = {*execute.memory.slots(other, 3, 5), *execute.memory.slots(one, 7, 8)}
    assert set(before) == {0, 1}
    for index, layer in execute.store.layers.items():
        for old, new in zip(before[index], layer, strict=True):
            changed = (old != new).any(dim=2).any(dim=0)
            assert set(changed.nonzero().flatten().tolist()) == written


def test_keys_and_values_are_written_in_place_into_memory_that_is_allocated_once(llama):
    execute = execution(llama[0])
    one = sequence(*range(10, 17))
    read(execute, (one, 7))
    tensors = [tensor for layer in execute.store.layers.values() for tensor in layer]
    assert [tensor.shape for tensor in tensors] == [(2, 16 * 4, 8)] * 4  # two kv heads, two layers
    addresses = [tensor.data_ptr() for tensor in tensors]
    for token in range(20, 30):
        one.token_ids.append(token)
        read(execute, (one, 1))
    assert [tensor.data_ptr() for layer in execute.store.layers.values() for tensor in layer] == addresses


def test_the_store_has_the_dtype_of_the_model(llama):
    engine = Engine(*llama, EngineConfig(**ON, dtype=torch.bfloat16))
    (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
    assert output.error is None and len(output.token_ids) == 4
    assert {one.dtype for layer in engine.execution.store.layers.values() for one in layer} == {torch.bfloat16}
    assert llama[0].dtype == torch.float32


def test_copied_blocks_are_copied_in_every_layer_before_anything_is_written(llama):
    # The second sample shares a block that is half full; the first goes on writing into it in the same pass.
    execute = execution(llama[0])
    first = sequence(*range(10, 16))
    read(execute, (first, 6))
    second = Sequence("second", list(first.token_ids), 20, parent=first)
    first.token_ids.append(60)
    assert execute.memory.cached_tokens(second) == 5
    logits = read(execute, (first, 1), (second, 1))
    assert close(logits, expected(llama[0], first.token_ids, second.token_ids))
    first.token_ids.append(61), second.token_ids.append(71)
    logits = read(execute, (second, 1), (first, 1))
    assert close(logits, expected(llama[0], second.token_ids, first.token_ids))
    assert execute.memory.copies == []


# --- what a pass computes ---------------------------------------------------------------------------------------------


def test_decodes_and_chunks_in_one_row_answer_as_they_do_alone(llama):
    execute = execution(llama[0])
    one, other, third = sequence(*range(10, 17)), sequence(*range(30, 41)), sequence(7)
    logits = read(execute, (one, 7), (other, 4))
    assert close(logits, expected(llama[0], one.token_ids))
    one.token_ids.append(55)
    logits = read(execute, (other, 3), (third, 1), (one, 1))
    assert close(logits, expected(llama[0], third.token_ids, one.token_ids))
    third.token_ids.append(8)
    logits = read(execute, (one_more := sequence(1, 2, 3), 3), (other, 4), (third, 1))
    assert close(logits, expected(llama[0], one_more.token_ids, other.token_ids, third.token_ids))


def test_the_head_is_computed_only_where_a_token_is_needed(random_pairs):
    model, _ = random_pairs
    execute, rows = execution(model), []
    hook = execute.model.get_output_embeddings().register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape))
    one, other = sequence(*range(10, 17)), sequence(*range(30, 41))
    assert read(execute, (one, 3), (other, 4)).shape == (0, model.config.vocab_size)
    read(execute, (one, 4), (other, 4))
    one.token_ids.append(5)
    read(execute, (one, 1), (other, 3))
    hook.remove()
    assert [shape[:-1].numel() for shape in rows] == [0, 1, 2]


def test_a_model_that_cannot_choose_rows_computes_all_and_the_right_ones_are_taken(llama):
    execute = execution(llama[0])
    execute._chooses_rows = False
    one, other = sequence(*range(10, 17)), sequence(*range(30, 41))
    assert close(read(execute, (other, 4), (one, 7)), expected(llama[0], one.token_ids))


def test_every_step_is_one_forward_pass_over_all_its_tokens_without_padding(llama):
    engine, read = Engine(*llama, EngineConfig(**ON, max_batch_size=3, max_tokens_per_step=20)), []
    hook = engine.execution.model.register_forward_hook(
        lambda _module, _args, kwargs, _output: read.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    engine.generate(PROMPTS[:6], SamplingParams(max_tokens=8), arrivals=[0, 0, 1, 2, 5, 5])
    hook.remove()
    trace = engine.trace
    assert read == [(1, iteration.tokens) for iteration in trace.iterations]
    assert trace.steps == trace.forward_passes
    assert trace.prompt_padding == 0
    works = [{slot.work for slot in iteration.slots} for iteration in trace.iterations]
    assert any({"prefill", "decode"} <= work for work in works)


# --- the model that is handed in --------------------------------------------------------------------------------------


def test_the_original_stays_as_it_was(llama):
    model, tokenizer = llama
    before = expected(model, [1, 2, 3, 4])
    implementation, pad = model.config._attn_implementation, model.config.pad_token_id
    weights = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    engine = Engine(model, tokenizer, EngineConfig(**ON))
    engine.generate(PROMPTS[:2], SamplingParams(max_tokens=5))
    assert model.config._attn_implementation == implementation not in ("ragged", "paged")
    assert model.config.pad_token_id == pad
    assert engine.execution.model.config._attn_implementation in ("ragged", "paged")
    assert torch.equal(expected(model, [1, 2, 3, 4]), before)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == weights[name][0] and torch.equal(tensor, weights[name][1])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_an_own_shell_has_the_same_weights_and_other_modules(name):
    model = build(family(name))
    shell = own_shell(model)
    mine, theirs = dict(shell.named_parameters()), dict(model.named_parameters())
    assert mine.keys() == theirs.keys() and all(mine[name] is theirs[name] for name in mine)
    assert all(one is other for one, other in zip(shell.buffers(), model.buffers(), strict=True))
    assert not set(shell.modules()) & set(model.modules())
    assert shell.config is not model.config


@pytest.mark.parametrize(
    ("name", "supported"),
    [
        ("gpt2", True),
        ("llama", True),
        ("mistral", True),  # layers are told their window
        ("gemma2", True),  # and the soft cap, and every other one no window
        ("gpt_oss", True),  # and the attention sinks
        ("gptj", False),  # attention of its own, without the interface
        ("gpt_neo", False),
        ("bloom", False),  # ALiBi, without the interface
        ("falcon", False),
        ("llama4_text", False),  # attends in chunks, which only the mask knows
    ],
)
def test_a_model_is_asked_whether_it_can_be_run_ragged(name, supported):
    model = build(family(name))
    implementation = model.config._attn_implementation
    assert supports_ragged(model) is supported
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("model_type", ["qwen2_moe", "phimoe"])
def test_a_window_that_only_the_mask_knows_is_found_however_long_it_is(model_type):
    # Without the question these two pass every short probe, and answer wrongly once a text is longer than the window.
    sizes = {"vocab_size": 50, "max_position_embeddings": 10_000, "num_local_experts": 2, "num_experts": 2}
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
    config = AutoConfig.for_model(model_type, **GROUPED | sizes | windows)
    assert not supports_ragged(AutoModelForCausalLM.from_config(config).eval())


def test_what_is_no_model_of_transformers_cannot_be_run_ragged(letters):
    assert not supports_ragged(letters[0])


WRONG = {
    "a query sees the token behind it": lambda seen: seen.roll(1, dims=1) | seen,
    "a query does not see itself": lambda seen: seen & ~seen.roll(-1, dims=0).roll(-1, dims=1),
    "everybody sees everything": lambda seen: torch.ones_like(seen),
    "a query does not see the first token": lambda seen: torch.cat(
        [seen[:, :1] & (seen.sum(1) < 2)[:, None], seen[:, 1:]], 1
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mask_is_found_out_by_the_question_to_the_model(llama, wrong, monkeypatch):
    right = Part.mask

    def mask(self, window, device):
        seen = right(self, window, device)
        if seen is None:
            seen = torch.ones(self.end - self.start, self.past + self.end - self.start, dtype=torch.bool)
        return WRONG[wrong](seen)

    assert supports_ragged(llama[0])
    monkeypatch.setattr(Part, "mask", mask)
    assert not supports_ragged(llama[0])


def test_wrong_positions_are_found_out_by_the_question_to_the_model(llama, monkeypatch):
    class Shifted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden, position_ids):
            return self.inner(hidden, torch.arange(position_ids.shape[1])[None])

    def shell(model):
        shell = own_shell(model)
        shell.model.rotary_emb = Shifted(shell.model.rotary_emb)
        return shell

    monkeypatch.setattr(ragged, "own_shell", shell)
    assert not supports_ragged(llama[0])


# --- in the engine ----------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_run_ragged_runs_padded_unless_ragged_was_asked_for():
    from tests.families import tokenizer

    model = build(family("gptj"))
    assert isinstance(Engine(model, tokenizer(), EngineConfig(execution="auto")).execution, PaddedExecution)
    with pytest.raises(ValueError, match=r'GPTJForCausalLM does not .* cannot be run ragged: use execution="padded"'):
        Engine(model, tokenizer(), EngineConfig(execution="ragged"))


def test_a_model_that_can_runs_ragged_unless_padded_was_asked_for(llama):
    assert isinstance(Engine(*llama, EngineConfig(execution="auto")).execution, RaggedExecution)
    assert isinstance(Engine(*llama, EngineConfig(execution="padded")).execution, PaddedExecution)


def test_a_request_that_the_pool_can_never_hold_is_refused(llama):
    engine = Engine(*llama, EngineConfig(**ON, num_blocks=5))
    prompt = [1] * 13
    with pytest.raises(ValueError, match=r"13 prompt tokens and 9 new ones need 6 blocks of 4 tokens, .* has 5 in all"):
        engine.add_request(prompt, SamplingParams(max_tokens=9))
    assert not engine.has_unfinished_requests()
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))  # 20 of 21 tokens are read
    assert len(output.token_ids) == 8 and output.error is None


def test_unless_told_otherwise_there_are_blocks_for_all_rows_at_their_longest(llama):
    blocks = Engine(*llama, EngineConfig(execution="ragged", max_batch_size=3)).execution.blocks
    assert (blocks.blocks, blocks.block_size) == (3 * 128 // 16, 16)


def test_a_cached_prefix_is_not_read_again(llama):
    engine = Engine(*llama, EngineConfig(**ON))
    shared = list(range(10, 23))  # three full blocks and one token more
    engine.generate([[*shared, 40, 41]], SamplingParams(max_tokens=1))
    assert engine.trace.prompt_tokens == 15
    (output,) = engine.generate([[*shared, 50, 51, 52]], SamplingParams(max_tokens=1))
    assert engine.trace.prompt_tokens == 15 + 4
    assert output.token_ids == expected(llama[0], [*shared, 50, 51, 52]).argmax(dim=-1).tolist()


def test_without_prefix_caching_it_is_read_again(llama):
    engine = Engine(*llama, EngineConfig(**ON, prefix_caching=False))
    engine.generate([list(range(10, 25))] * 2, SamplingParams(max_tokens=1), arrivals=[0, 1])
    assert engine.trace.prompt_tokens == 30


def test_samples_read_their_prompt_once(llama):
    engine = Engine(*llama, EngineConfig(**ON, prefix_caching=False))
    prompt = list(range(10, 24))
    engine.generate([prompt], SamplingParams(max_tokens=2, temperature=1.0, seed=1, n=3, ignore_eos=True))
    assert engine.trace.prompt_tokens == 14 + 1 + 1  # each other sample reads the last token only


def test_two_engines_on_one_model_do_not_disturb_each_other(llama):
    engines = [Engine(*llama, EngineConfig(**ON, max_batch_size=rows, max_tokens_per_step=9)) for rows in (2, 3)]
    for engine, prompts in zip(engines, (PROMPTS[:4], PROMPTS[3:8]), strict=True):
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=12), request_id=prompt)
    answers = {}
    while any(engine.has_unfinished_requests() for engine in engines):
        for place, engine in enumerate(engines):
            answers |= {(place, output.request_id): output.token_ids for output in engine.step()}
    assert len(answers) == 9
    assert all(ids == alone(*llama, prompt, 12) for (_, prompt), ids in answers.items())


def test_two_engines_in_two_threads_do_not_disturb_each_other(llama):
    # Both are held in the middle of their first pass until the other one is there, too.
    engines = [Engine(*llama, EngineConfig(**ON)) for _ in range(2)]
    barrier, met, answers = threading.Barrier(2), threading.Event(), {}

    def meet(*_):
        if not met.is_set():
            barrier.wait(timeout=60)
            met.set()

    for engine in engines:
        engine.execution.model.model.layers[1].register_forward_pre_hook(meet)

    def work(place):
        answers[place] = engines[place].generate(PROMPTS[place : place + 1], SamplingParams(max_tokens=10))[0]

    threads = [threading.Thread(target=work, args=[place]) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(2):
        assert answers[place].token_ids == alone(*llama, PROMPTS[place], 10)


# --- when something fails ---------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def break_once(module, after: int):
    """The pass after so many calls of a module raises, and no other."""
    calls = iter(range(1000))

    def hook(*_):
        if next(calls) == after:
            raise Broken("on purpose")

    return module.register_forward_hook(hook)


@pytest.mark.parametrize("after", range(4))
def test_a_pass_that_fails_leaks_no_block_and_nobody_else_gets_other_tokens(llama, after):
    engine = Engine(*llama, EngineConfig(**ON, max_batch_size=3, max_tokens_per_step=40, num_blocks=40))
    layers = engine.execution.model.model.layers
    hook = break_once(layers[1], after)  # the first layer has stored its keys by then
    with pytest.warns(UserWarning, match="answers failed: Broken: on purpose"):
        outputs = engine.generate(PROMPTS[:6], SamplingParams(max_tokens=10))
    hook.remove()
    reasons = [output.finish_reason for output in outputs]
    assert 0 < reasons.count("error") <= 3 and reasons.count("error") < 6
    for prompt, output in zip(PROMPTS[:6], outputs, strict=True):
        ids = alone(*llama, prompt, 10)
        assert output.token_ids == (ids[: len(output.token_ids)] if output.error else ids)
    assert engine.execution.blocks.used == 0
    again = engine.generate(PROMPTS[:6], SamplingParams(max_tokens=10))
    assert [output.token_ids for output in again] == [alone(*llama, prompt, 10) for prompt in PROMPTS[:6]]


def test_samples_whose_copies_were_pending_when_a_pass_failed_leak_no_block(llama):
    engine = Engine(*llama, EngineConfig(**ON, max_batch_size=4))
    prompt = PROMPTS[0]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=4, ignore_eos=True)
    right = [output.token_ids for output in engine.generate([prompt], params)]
    hook = break_once(engine.execution.model.model.layers[0], 1)
    with pytest.warns(UserWarning, match="4 of 4 answers failed"):
        engine.generate([prompt], params)
    hook.remove()
    assert engine.execution.blocks.used == 0
    assert [output.token_ids for output in engine.generate([prompt], params)] == right


def test_after_a_failure_nothing_of_the_row_is_left_for_others_to_find(llama):
    execute = execution(llama[0])
    hook = break_once(execute.model.model.layers[0], 0)
    with pytest.raises(Broken):
        read(execute, (sequence(1, 2, 3), 3))
    hook.remove()
    with pytest.raises(LookupError), torch.no_grad():
        execute.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)  # nobody has said whose tokens these are
