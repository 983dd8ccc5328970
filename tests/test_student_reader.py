"""The model with a student's row: packing requests changes no logits, and the model itself stays as it was."""

import torch
from answers import solutions
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import load_model
from helpers.checks import Reader


def logits_alone(model, text):
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, -1]


def test_a_student_s_row_changes_no_token():
    model, tokenizer = load_model()
    reader = Reader(solutions.pack, solutions.attend_row)
    first, second = (tokenizer(text)["input_ids"] for text in ("The quick brown fox", "What comes up must come"))
    reader.read({"first": first[:-1], "second": second[:2]})
    logits = reader.read({"second": second[2:], "first": first[-1:], "third": second[:1]})
    for name, text in {"first": first, "second": second, "third": second[:1]}.items():
        torch.testing.assert_close(logits[name], logits_alone(model, text), rtol=0, atol=1e-4)
    assert reader.columns == [5, 1 + len(second) - 2 + 1]
    assert model.config._attn_implementation == "sdpa", "it is a copy that is changed"


def test_a_student_s_row_runs_a_model_whose_heads_share_keys(monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)).eval()
    monkeypatch.setattr("helpers.checks.reader.load_model", lambda: (model, None))
    reader = Reader(solutions.pack, solutions.attend_row)
    reader.read({"a": [3, 4, 5], "b": [6]})
    logits = reader.read({"b": [7, 8], "a": [9]})
    for name, text in {"a": [3, 4, 5, 9], "b": [6, 7, 8]}.items():
        torch.testing.assert_close(logits[name], logits_alone(model, text), rtol=0, atol=1e-4)
