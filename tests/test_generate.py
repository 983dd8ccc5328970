"""The command line: the engine's own answers, in order and in time, whatever some of the prompts are like."""

import argparse
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
import transformers
from conftest import PROMPTS, alone

from helpers import Engine, EngineConfig, SamplingParams, generate
from helpers.generate import main
from helpers.sampling import Sampler

ROOT = Path(__file__).parents[1]
TOO_LONG = "word " * 600


def json_lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def no_model(monkeypatch):
    """Whoever loads a model fails."""
    monkeypatch.setattr(generate, "load_model", None)


@pytest.fixture
def seen(monkeypatch, capsys):
    """What could be read on stdout before each step of the engine; the last call of `seen.now()` is the whole."""

    class Seen(list):
        text = ""

        def now(self):
            self.text += capsys.readouterr().out
            return self.text

    seen, step = Seen(), Engine.step

    def watched_step(engine):
        seen.append(seen.now())
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched_step)
    return seen


# --- where prompts come from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [["--rows", "2", "--policy", "longest_first"], ["--rows", "9", "--max-tokens-per-step", "9"]]
)
def test_prompts_in_the_arguments_get_what_the_engine_gives_them_in_their_order(embedded, capsys, settings):
    assert main([*PROMPTS, "--max-tokens", "12", *settings]) == 0
    answers = Engine(*embedded).generate(PROMPTS, SamplingParams(max_tokens=12))
    assert len({answer.text for answer in answers}) > 5  # or a wrong order might look right
    output = capsys.readouterr()
    assert output.out == "".join(f"{answer.prompt}{answer.text}\n" for answer in answers)
    assert output.err == ""


def test_an_answer_has_the_tokens_that_transformers_would_generate(embedded, capsys):
    main([*PROMPTS, "--json", "--max-tokens", "12"])
    assert [line["token_ids"] for line in json_lines(capsys)] == [alone(*embedded, prompt, 12) for prompt in PROMPTS]


def test_options_may_stand_anywhere_between_prompts(capsys):
    assert main(["What comes up", "--max-tokens", "2", "The quick brown fox"]) == 0
    assert capsys.readouterr().out == "What comes up must come\nThe quick brown fox jumped over\n"


def test_settings_reach_the_model_and_the_engine(embedded, monkeypatch, capsys):
    asked, configs = [], []
    monkeypatch.setattr(generate, "load_model", lambda *args: asked.append(args) or embedded)
    monkeypatch.setattr(generate, "Engine", lambda *args: configs.append(args[-1]) or Engine(*args))
    main(["What comes up"])
    for_model = ["--model", "m", "--device", "cpu", "--dtype", "bfloat16"]
    for_engine = ["--rows", "2", "--max-tokens-per-step", "9", "--policy", "static"]
    main(["What comes up", *for_model, *for_engine])
    assert asked == [(None, None, None), ("m", "cpu", torch.bfloat16)]
    assert configs == [EngineConfig(), EngineConfig(max_batch_size=2, max_tokens_per_step=9, policy="static")]


def test_a_file_has_a_prompt_a_line_and_blank_lines_do_not_count(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfThe quick brown fox\r\n\r\n  \nWhat comes up")  # as an editor on Windows leaves it
    assert main(["--file", str(file), "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "The quick brown fox jumped over\nWhat comes up must come\n"


def test_a_line_of_json_has_settings_of_its_own_and_the_options_are_for_all_others(embedded, tmp_path, capsys):
    ids = embedded[1]("What comes up")["input_ids"]
    lines = [
        {"prompt": "The quick brown fox", "max_tokens": 3, "logprobs": 0},
        {"prompt": ids},
        {"prompt": "The quick\nbrown fox", "stop": "e", "max_tokens": None},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert main(["--file", str(file), "--json", "--max-tokens", "2"]) == 0
    first, second, third = json_lines(capsys)
    assert (len(first["token_ids"]), len(first["logprobs"])) == (3, 3)
    assert (second["prompt"], second["text"], second["finish_reason"]) == (ids, " must come", "length")
    assert third["prompt"] == "The quick\nbrown fox"
    assert third["finish_reason"] == "stop" and "e" not in third["text"]
    assert "logprobs" not in second and "logprobs" not in third


def test_a_prompt_of_token_ids_is_shown_as_text(embedded, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": embedded[1]("What comes up")["input_ids"], "max_tokens": 2}))
    assert main(["--file", str(file)]) == 0
    assert capsys.readouterr().out == "What comes up must come\n"


def test_without_prompts_and_file_standard_input_has_them(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The quick brown fox\n\nWhat comes up\n"))
    assert main(["--max-tokens", "2"]) == 0
    output = capsys.readouterr()
    assert output.out == "The quick brown fox jumped over\nWhat comes up must come\n"
    assert output.err == ""


def test_somebody_at_a_terminal_is_told_that_prompts_are_waited_for(monkeypatch, capsys):
    terminal = io.StringIO("What comes up\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["--max-tokens", "2"]) == 0
    output = capsys.readouterr()
    assert output.out == "What comes up must come\n"
    assert "Ctrl-D" in output.err


# --- how answers are shown -------------------------------------------------------------------------------------------


def test_one_answer_grows_in_sight_behind_its_prompt(embedded, seen):
    assert main(["The quick brown fox"]) == 0
    before_steps = [*seen, seen.now()]
    text = Engine(*embedded).generate("The quick brown fox")[0].text
    assert before_steps[0] == "The quick brown fox"
    assert before_steps[-1] == f"The quick brown fox{text}\n"
    assert len(before_steps) == len(set(before_steps)) > 5  # something new from every step
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(before_steps))


def test_each_of_several_answers_is_shown_once_it_and_all_before_it_are_there(seen):
    prompts = ["What comes up", "There was once a poor miller called Jonas, and", "The quick brown fox"]
    assert main([*prompts, "--max-tokens", "20"]) == 0
    first, second, third = seen.now().splitlines(keepends=True)
    assert (first, third) == ("What comes up must come down.\n", "The quick brown fox jumped over the lazy dog.\n")
    assert second.startswith(prompts[1])
    assert list(dict.fromkeys(seen)) == ["", first]  # the third is finished long before the second, and waits for it
    assert seen.index(first) < 10


def test_json_has_everything_about_an_answer(embedded, capsys):
    assert main(["The quick brown fox", "What comes up", "--json", "--logprobs", "2", "--max-tokens", "5"]) == 0
    params = SamplingParams(max_tokens=5, logprobs=2)
    lines = json_lines(capsys)
    answers = Engine(*embedded).generate(["The quick brown fox", "What comes up"], params)
    for number, (line, answer) in enumerate(zip(lines, answers, strict=True)):
        assert 0 < line.pop("ttft") < line.pop("e2e") < 60
        logprobs = [{int(id): value for id, value in one.items()} for one in line.pop("logprobs")]
        for ours, theirs in zip(logprobs, answer.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        assert line == {
            "prompt": answer.prompt,
            "request_id": number,
            "index": 0,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
        }
    assert [line["finish_reason"] for line in lines] == ["length", "stop"]


def test_a_bar_counts_answers_where_somebody_looks_at_stderr(monkeypatch, capsys):
    prompts = ["The quick brown fox", "What comes up", "--max-tokens", "2"]
    main(prompts)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(prompts)
    output = capsys.readouterr()
    assert "0/2" in output.err and "answer" in output.err
    assert output.out == "The quick brown fox jumped over\nWhat comes up must come\n"
    main(["The quick brown fox", "--max-tokens", "2"])  # this one can be seen growing
    assert capsys.readouterr().err == ""


# --- sampling --------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_again_in_other_company_and_another_seed_another(capsys):
    prompt, options = PROMPTS[3], ["--temperature", "1", "--max-tokens", "30", "--json"]

    def answer(*argv):
        main([prompt, *argv, *options])
        return json_lines(capsys)[0]["token_ids"]

    assert answer("--seed", "1") == answer("What comes up", "A rolling stone", "--seed", "1")
    assert answer("--seed", "1") != answer("--seed", "2")


def test_every_text_to_stop_at_does_stop_an_answer(capsys):
    prompts = ["The quick brown fox", "What comes up"]
    assert main([*prompts, "--stop", " lazy", "--stop", " come"]) == 0
    assert capsys.readouterr().out == "The quick brown fox jumped over the\nWhat comes up must\n"


def test_several_answers_to_a_prompt_come_one_after_the_other(embedded, capsys):
    options = ["--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "15"]
    prompts = PROMPTS[3:5]
    main([*prompts, *options, "--json"])
    lines = json_lines(capsys)
    assert [(line["request_id"], line["index"]) for line in lines] == [(n, i) for n in range(2) for i in range(3)]
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=15)
    assert [line["text"] for line in lines] == [one.text for one in Engine(*embedded).generate(prompts, params)]
    assert len({line["text"] for line in lines}) > 2
    main([prompts[0], *options])  # one prompt, but not one answer: they cannot all grow in the last line
    assert capsys.readouterr().out == "".join(f"{line['prompt']}{line['text']}\n" for line in lines[:3])


def test_every_field_of_sampling_params_has_an_option_that_says_what_it_does(no_model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for field in fields(SamplingParams):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "0 takes the best token; above, logits are divided by it before one is drawn (default: 0.0)" in shown
    assert "for as many as the model's context (or the engine's limit) has room for (default: None)" in shown
    assert "rows: how many sequences run at once (default: 8)" in shown


def test_an_option_reads_what_its_field_holds():
    @dataclass
    class Settings:
        """Anything.

        Attributes:
            count, share: 100% of
                two lines.
            words: some.
        """

        count: int | None = None
        share: float = 0.5
        name: str = "x"
        words: Sequence[str] = ()
        yes: bool = True
        bias: dict[str, float] | None = None

    parser = argparse.ArgumentParser()
    generate.add_options(parser, Settings())
    assert vars(parser.parse_args([])) == {}
    given = ["--count=3", "--share=1", "--name=y", "--words=a", "--words", "b c", "--no-yes", '--bias={"1": 2}']
    expected = dict(count=3, share=1.0, name="y", words=["a", "b c"], yes=False, bias={"1": 2})
    assert vars(parser.parse_args(given)) == expected
    shown = " ".join(parser.format_help().split())
    assert "100% of two lines (default: None)" in shown and "100% of two lines (default: 0.5)" in shown


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a", "--temperature", "-1"], "temperature is a number of at least 0, not -1.0"),
        (["a", "--temperature", "warm"], "--temperature"),
        (["a", "--n", "2"], "2 greedy answers would all be the same"),
        (["a", "--policy", "luck"], "longest_first"),
        (["a", "--rows", "0"], "max_batch_size is a whole number of at least 1, not 0"),
        (["a", "--dtype", "int8"], "bfloat16"),
        (["a", "--device", "abacus"], "'abacus' cannot be used"),
        (["a", "--logprobs", "1"], "--logprobs goes with --json"),
        (["a", "--temp", "1"], "unrecognized arguments: --temp"),  # no abbreviations
        (["a", "--file", "b"], "not both"),
        (["--file", "no/such/file"], "no/such/file"),
        (["--file", "EMPTY"], "There are no prompts in"),
        (["--file", "LATIN-1"], "is not UTF-8 text"),
    ],
)
def test_a_bad_setting_is_refused_before_a_model_is_loaded(no_model, tmp_path, capsys, argv, said):
    (tmp_path / "EMPTY").write_text("\n \n")
    (tmp_path / "LATIN-1").write_bytes("Caf\xe9".encode("latin-1"))
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / word) if word.isupper() else word for word in argv])
    output = capsys.readouterr()
    assert end.value.code == 2
    assert said in output.err and output.out == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--model", "no/such/model"], "Cannot load 'no/such/model'"), (["--rows", "600"], "600 rows")],
)
def test_a_model_or_an_engine_that_cannot_be_is_an_error_of_one_line(capsys, argv, said):
    with pytest.raises(SystemExit) as end:
        main(["a", *argv])
    usage, error = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert usage.startswith("usage: ") and said in error


def assert_only_the_second_of_three_fails(capsys, argv, place, said):
    assert main([*argv, "--max-tokens", "2"]) == 1
    output = capsys.readouterr()
    assert output.out == "The quick brown fox jumped over\nWhat comes up must come\n"
    assert output.err.startswith(f"{place}: ") and said in output.err and output.err.count("\n") == 1

    assert main([*argv, "--max-tokens", "2", "--json"]) == 1
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["text"] for line in lines] == [" jumped over", "", " must come"]
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"]
    assert [said in line.get("error", "") for line in lines] == [False, True, False]
    assert output.err == ""


@pytest.mark.parametrize(
    ("bad", "said"),
    [(TOO_LONG, "the model's context is 512"), ("", "has no tokens"), ("Caf\udce9", "Character 4 is no text")],
)
def test_a_prompt_that_cannot_be_answered_does_not_lose_the_others(capsys, bad, said):
    argv = ["The quick brown fox", bad, "What comes up"]
    assert_only_the_second_of_three_fails(capsys, argv, "prompt 2", said)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (json.dumps({"prompt": TOO_LONG}), "the model's context is 512"),
        (json.dumps({"prompt": TOO_LONG, "n": 3, "temperature": 1}), "the model's context is 512"),
        ("The quick brown fox", "This is not JSON"),
        ('{"text": "a"}', "an object with a prompt"),
        ('["a"]', "an object with a prompt"),
        ('{"prompt": 5}', "an object with a prompt"),
        ('{"prompt": []}', "has no tokens"),
        ('{"prompt": [-1]}', "Token ids are whole numbers"),
        ('{"prompt": "a\\ud83d"}', "Character 2 is no text"),
        ('{"prompt": "a", "max_token": 1}', "There is no setting 'max_token'"),
        ('{"prompt": "a", "max_tokens": "1"}', "max_tokens is a whole number"),
        ('{"prompt": "a", "stop": 5}', "stop is a text"),
    ],
)
def test_a_line_that_cannot_be_answered_does_not_lose_the_others(tmp_path, capsys, bad, said):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\n{"prompt": "The quick brown fox"}\n' + bad + '\n{"prompt": "What comes up"}')
    assert_only_the_second_of_three_fails(capsys, ["--file", str(file)], f"{file}:3", said)


def test_an_answer_that_fails_on_its_way_is_reported_and_the_others_come(monkeypatch, embedded, capsys):
    prompt, choose = embedded[1]("The quick brown fox")["input_ids"], Sampler.choose

    def choose_or_fail(sampler, token_ids, logits, best):
        if len(token_ids) == len(prompt) + 2 and token_ids[: len(prompt)] == prompt:
            raise RuntimeError("no luck")
        return choose(sampler, token_ids, logits, best)

    monkeypatch.setattr(Sampler, "choose", choose_or_fail)
    assert main(["What comes up", "The quick brown fox", "--max-tokens", "3"]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("What comes up must come down\n", "prompt 2: RuntimeError: no luck\n")
    assert main(["The quick brown fox"]) == 1  # what was seen growing stays
    output = capsys.readouterr()
    assert (output.out, output.err) == ("The quick brown fox jumped over\n", "prompt 1: RuntimeError: no luck\n")


def test_ctrl_c_shows_what_is_finished(monkeypatch, capsys):
    prompts = [PROMPTS[3], "What comes up", PROMPTS[7], "The quick brown fox"]
    step, steps = Engine.step, []

    def interrupted(engine):
        steps.append(engine)
        if len(steps) == 15:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert main(prompts) == 130
    output = capsys.readouterr()
    assert output.out == "What comes up must come down.\nThe quick brown fox jumped over the lazy dog.\n"
    assert output.err == ""

    steps.clear()
    assert main([PROMPTS[3]]) == 130
    output = capsys.readouterr().out
    assert output.startswith(PROMPTS[3] + " ") and output.endswith("\n")  # the shell's prompt gets a line of its own


@pytest.mark.parametrize("argv", [["What comes up"], ["What comes up", "A rolling stone"], ["What comes up", "--json"]])
def test_a_reader_who_has_gone_is_no_error(monkeypatch, capsys, argv):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(argv) == 141  # and leaving the block flushes, as Python does in the end
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verbosity", [transformers.logging.INFO, transformers.logging.ERROR])
def test_libraries_are_as_talkative_as_before(verbosity):
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(verbosity)
    try:
        main(["What comes up", "--max-tokens", "1"])
        assert transformers.logging.get_verbosity() == verbosity
    finally:
        transformers.logging.set_verbosity(before)


def test_as_a_program_it_says_nothing_but_the_answers_and_what_went_wrong():
    result = subprocess.run(
        [sys.executable, "-m", "helpers.generate", "--max-tokens", "2"],
        input=f"The quick brown fox\n{TOO_LONG}\nWhat comes up\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert result.returncode == 1
    assert result.stdout == "The quick brown fox jumped over\nWhat comes up must come\n"
    assert result.stderr.startswith("<stdin>:2: ") and result.stderr.count("\n") == 1
