"""The engine and the model with a student's functions: no token changes, and what is lost ends in an error."""

import pytest
import torch
from answers import solutions
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import EngineConfig, SamplingParams, generate_continuous, load_model, workloads
from helpers.checks import Reader, engine_with


@pytest.mark.parametrize("blocks, passes", [(48, 12), (12, 18)])
def test_a_student_s_blocks_run_the_engine_and_change_no_token(blocks, passes):
    requests = workloads.race(4, every=1, long=12)
    config = EngineConfig(num_blocks=blocks, block_size=4, max_batch_size=4)
    engine = engine_with(solutions.grow, solutions.release, solutions.slices_of, config)
    params = [SamplingParams(max_tokens=one.max_tokens) for one in requests]
    outputs = engine.generate([one.prompt for one in requests], params)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in generate_continuous(requests).outputs]
    assert engine.trace.forward_passes == passes
    assert sorted(engine.block_manager.free_blocks) == list(range(blocks)), "all of them are free again"


@pytest.mark.parametrize("forgetful", [lambda *arguments: None, lambda free, tables, *rest: free.clear()])
def test_a_function_that_refuses_every_request_does_not_run_the_engine_for_ever(forgetful):
    engine = engine_with(forgetful, solutions.release, solutions.slices_of, EngineConfig(num_blocks=8))
    with pytest.raises(ValueError, match="although no request has any of the 8 blocks"):
        engine.generate(["Look", "Many hands"], SamplingParams(max_tokens=2))


def check_logits(model, logits, texts):
    """Each request has the logits of its text alone."""
    for name, text in texts.items():
        with torch.no_grad():
            alone = model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(logits[name], alone, rtol=0, atol=1e-4)


def test_a_student_s_row_changes_no_token_and_not_the_model():
    model, tokenizer = load_model()
    reader = Reader(solutions.pack, solutions.attend_row)
    first, second = (tokenizer(text)["input_ids"] for text in ("The quick brown fox", "What comes up must come"))
    reader.read({"first": first[:-1], "second": second[:2]})
    logits = reader.read({"second": second[2:], "first": first[-1:], "third": second[:1]})
    check_logits(model, logits, {"first": first, "second": second, "third": second[:1]})
    assert reader.columns == [5, 1 + len(second) - 2 + 1]
    assert model.config._attn_implementation == "sdpa", "it is a copy that is changed"


def test_a_student_s_row_runs_a_model_whose_heads_share_keys(monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)).eval()
    monkeypatch.setattr("helpers.checks.reader.load_model", lambda: (model, None))
    reader = Reader(solutions.pack, solutions.attend_row)
    reader.read({"a": [3, 4, 5], "b": [6]})
    check_logits(model, reader.read({"b": [7, 8], "a": [9]}), {"a": [3, 4, 5, 9], "b": [6, 7, 8]})
