"""The command line: the engine's own outputs, in order and in time, even if some of the prompts fail."""

import io
import json
import os
import sys

import pytest
import torch
from conftest import PROMPTS

from helpers import Engine, EngineConfig, SamplingParams, model_engine, models
from helpers.__main__ import SamplingOptions, command, main
from tests.support.adapters import merged, write_adapter

TOO_LONG = "word " * 600


def json_lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails."""
    monkeypatch.setattr(models, "load_model", None)


# --- where prompts come from -----------------------------------------------------------------------------------------


def test_prompts_in_the_arguments_get_the_engines_outputs_in_their_order(embedded, capsys):
    assert main([*PROMPTS, "--max-tokens", "12", "--rows", "2", "--policy", "longest_first"]) == 0
    outputs = Engine(*embedded).generate(PROMPTS, SamplingParams(max_tokens=12))
    assert len({output.text for output in outputs}) > 5  # or a wrong order might look right
    printed = capsys.readouterr()
    assert printed.out == "".join(f"{output.prompt}{output.text}\n" for output in outputs)
    assert printed.err == ""


def test_an_adapter_continues_all_prompts_or_is_refused_with_the_reason(embedded, tmp_path, capsys):
    folder = write_adapter(tmp_path / "adapter", embedded[0], ["c_attn", "c_fc"])
    assert main([*PROMPTS[:3], "--max-tokens", "12", "--adapter", str(folder)]) == 0
    outputs = Engine(merged(embedded[0], folder), embedded[1]).generate(PROMPTS[:3], SamplingParams(max_tokens=12))
    assert capsys.readouterr().out == "".join(f"{output.prompt}{output.text}\n" for output in outputs)
    assert main([*PROMPTS[:3], "--adapter", str(tmp_path)]) == 2
    assert "There is no file" in capsys.readouterr().err


def test_settings_reach_the_model_and_the_engine(embedded, monkeypatch, capsys):
    asked, configs = [], []
    monkeypatch.setattr(models, "load_model", lambda *args: asked.append(args) or embedded)
    monkeypatch.setattr(model_engine, "Engine", lambda *args: configs.append(args[-1]) or Engine(*args))
    main(["What comes up"])
    for_model = ["--model", "m", "--device", "cpu", "--dtype", "bfloat16", "--weights", "int8"]
    for_engine = ["--rows", "2", "--max-tokens-per-step", "9", "--policy", "static", "--compute", "int8"]
    for_speculation = ["--speculative", "ngram", "--num-speculative-tokens", "3"]
    main(["What comes up", *for_model, *for_engine, *for_speculation])
    assert asked == [(None, None, torch.float32, None), ("m", "cpu", torch.bfloat16, "int8")]
    others = {"weights": "int8", "compute": "int8", "speculative": "ngram", "num_speculative_tokens": 3}
    expected = EngineConfig(max_batch_size=2, max_tokens_per_step=9, policy="static", **others)
    assert configs == [EngineConfig(), expected]


def test_a_file_or_stdin_has_one_prompt_per_line_and_blank_lines_do_not_count(tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfThe quick brown fox\r\n\r\n  \nWhat comes up")  # as editors on Windows write it
    monkeypatch.setattr(sys, "stdin", io.StringIO("The quick brown fox\n\nWhat comes up\n"))
    for argv in (["--file", str(file)], []):
        assert main([*argv, "--max-tokens", "2"]) == 0
        assert capsys.readouterr() == ("The quick brown fox jumped over\nWhat comes up must come\n", "")


# --- how outputs are printed -----------------------------------------------------------------------------------------


def test_a_single_output_grows_on_the_screen_after_its_prompt(embedded, monkeypatch, capsys):
    printed, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: printed.append(capsys.readouterr().out) or step(engine))
    assert main(["The quick brown fox"]) == 0
    printed.append(capsys.readouterr().out)
    assert printed[0] == "The quick brown fox" and len(printed) > 5 and all(printed), "each step adds something"
    assert "".join(printed) == f"The quick brown fox{Engine(*embedded).generate('The quick brown fox')[0].text}\n"


def test_json_has_everything_about_an_output(embedded, capsys):
    assert main(["The quick brown fox", "What comes up", "--json", "--logprobs", "2", "--max-tokens", "5"]) == 0
    params = SamplingParams(max_tokens=5, logprobs=2)
    lines = json_lines(capsys)
    outputs = Engine(*embedded).generate(["The quick brown fox", "What comes up"], params)
    for number, (line, output) in enumerate(zip(lines, outputs, strict=True)):
        assert 0 < line.pop("ttft") < line.pop("e2e") < 60
        logprobs = [{int(id): value for id, value in scores.items()} for scores in line.pop("logprobs")]
        for ours, theirs in zip(logprobs, output.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        names = ("prompt", "text", "token_ids", "finish_reason")
        assert line == {name: getattr(output, name) for name in names} | {"request_id": number, "index": 0}
    assert [line["finish_reason"] for line in lines] == ["length", "stop"]


# --- sampling --------------------------------------------------------------------------------------------------------


def test_the_outputs_of_a_prompt_are_printed_together(embedded, capsys):
    options = ["--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "15"]
    prompts = PROMPTS[3:5]
    main([*prompts, *options, "--json"])
    lines = json_lines(capsys)
    assert [(line["request_id"], line["index"]) for line in lines] == [(n, i) for n in range(2) for i in range(3)]
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=15)
    assert [line["text"] for line in lines] == [output.text for output in Engine(*embedded).generate(prompts, params)]
    assert len({line["text"] for line in lines}) > 2
    main([*prompts[:1], *options])  # one prompt, but several outputs: they cannot all grow on the last line
    assert capsys.readouterr().out == "".join(line["prompt"] + line["text"] + "\n" for line in lines[:3])


def test_an_option_reads_what_its_field_holds():
    def sampling(*argv: str) -> SamplingParams:
        options = command.parse_args([*argv], exit_on_error=False)[1].kwargs.get("sampling_options", SamplingOptions())
        return SamplingParams(**vars(options))

    assert sampling() == SamplingParams()
    given = ["--temperature=1.5", "--stop=a", "--stop", "b c", "--ignore-eos", "--logit-bias.7=-1.5"]
    given += ["--logit-bias.8", "3"]
    expected = SamplingParams(temperature=1.5, stop=("a", "b c"), ignore_eos=True, logit_bias={7: -1.5, 8: 3})
    assert sampling(*given) == expected


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a", "--temperature", "-1"], "--temperature must be a number of at least 0, not -1.0"),
        (["a", "--rows", "0"], "--rows must be an integer of at least 1, not 0"),
        (["a", "--compute", "int8"], 'compute="int8" needs weights="int8"'),
        (["a", "--logprobs", "1"], "--logprobs needs --json"),
        (["a", "--logit-bias.5=101"], "The bias of token 5 in --logit-bias must be a number from -100 to 100"),
        (["a", "--temp", "1"], "--temp"),  # no abbreviations
        (["a", "--file", "b"], "not both"),
        (["--file", "no/such/file"], "no/such/file"),
        (["--file", "LATIN-1"], "is not UTF-8 text"),
    ],
)
def test_a_bad_setting_is_refused_before_a_model_is_loaded(no_model, tmp_path, capsys, argv, said):
    (tmp_path / "LATIN-1").write_bytes("Caf\xe9".encode("latin-1"))
    assert main([str(tmp_path / word) if word.isupper() else word for word in argv]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("bad", "said"), [(TOO_LONG, "the model's context is 512"), ("", "has no tokens"), ("Caf\udce9", "udce9")]
)
def test_a_prompt_that_fails_costs_the_others_nothing(capsys, bad, said):
    argv = ["The quick brown fox", bad, "What comes up"]
    assert main([*argv, "--max-tokens", "2"]) == 1
    output = capsys.readouterr()
    assert output.out == "The quick brown fox jumped over\nWhat comes up must come\n"
    assert output.err.startswith("prompt 2: ") and said in output.err and output.err.count("\n") == 1

    assert main([*argv, "--max-tokens", "2", "--json"]) == 1
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["text"] for line in lines] == [" jumped over", "", " must come"]
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"]
    assert [said in line.get("error", "") for line in lines] == [False, True, False]
    assert output.err == ""

    for options in ([], ["--n", "3", "--temperature", "1"]):  # an output alone would grow after its prompt
        assert main([bad, *options]) == 1
        output = capsys.readouterr()
        assert output.out == "" and said in output.err and output.err.count("\n") == 1


def test_ctrl_c_leaves_what_is_printed(monkeypatch, capsys):
    step, steps = Engine.step, []

    def interrupted(engine):
        steps.append(engine)
        if len(steps) == 15:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert main(["What comes up", PROMPTS[3], "The quick brown fox"]) == 130
    output = capsys.readouterr()
    assert (output.out, output.err) == ("What comes up must come down.\n", "")


def test_a_reader_that_has_closed_the_pipe_is_not_an_error(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["What comes up"]) == 141  # and leaving the block flushes, as Python does in the end
    assert capsys.readouterr().err == ""
