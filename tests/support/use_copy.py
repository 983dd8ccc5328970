"""Use copies of the package from which parts are missing, and write what works as JSON into each copy's folder.

    python use_copy.py FOLDER...

This runs as a process of its own, so that `helpers` is the copy. torch and most of transformers, which imports its
parts when they are needed, are imported once, for all copies.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: F401

PROMPT = "The quick brown fox"
START = "Once upon a time there was a fox who lived in a den"
PROMPTS = [f"{START} under the old oak", f"{START} and", PROMPT, "What comes up", f"{START} by the river"]
ARRIVALS, MAX_TOKENS = [0, 2, 0, 1, 9], 12
SLOW_AND_SURE = {"kernels": False, "linear_backend": "pytorch"}
FAST = [{"kernels": True}, {"batch_invariant": True}, {"linear_backend": "compiled"}]

USES = {  # parameters that need a feature
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 1.0},
    "stop_token_ids": [5], "min_tokens": 2, "allowed_token_ids": [5, 6], "bad_words": ["fox"], "prompt_logprobs": 1,
    "n": 2, "structured_outputs": None,
}  # fmt: skip


def plain_requests(execution: str) -> dict:
    """Return the tokens of plain requests that arrive, are preempted and share prefixes, and those of a stream."""
    from helpers import Engine, EngineConfig, SamplingParams
    from helpers.engine import Scheduler

    counts = {"preempted": 0, "shared": 0}

    class Counting(Scheduler):
        def preempt(self, sequence):
            counts["preempted"] += 1
            super().preempt(sequence)

        def schedule(self):
            plan = super().schedule()
            tables = [block for chunk in plan.chunks for block in dict.fromkeys(chunk.block_table)]
            counts["shared"] += len(tables) - len(set(tables))
            return plan

    memory = {"num_blocks": 10, "block_size": 4} if execution == "ragged" else {}
    config = EngineConfig(
        execution=execution, max_batch_size=3, scheduler_cls=Counting, max_tokens_per_step=32, **memory, **SLOW_AND_SURE
    )
    engine, params = Engine(config=config), SamplingParams(max_tokens=MAX_TOKENS)
    outputs = engine.generate(PROMPTS, params, ARRIVALS)
    stream = [token for output in engine.stream(PROMPTS[0], params) for token in output.new_token_ids]
    return {"tokens": [output.token_ids for output in outputs], "stream": stream} | counts


def attempt(use) -> str:
    """Return "works", or the text of the error."""
    try:
        outputs = use()
    except ValueError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    assert all(output.finish_reason in ("stop", "length", None) for output in outputs), outputs
    return "works"


def with_params(engine, **settings) -> str:
    """Use a parameter of a request."""
    from helpers import SamplingParams

    if "structured_outputs" in settings:
        try:
            from helpers import StructuredOutputs

            settings = {"structured_outputs": StructuredOutputs(choice=["yes", "no"])}
        except ImportError:
            settings = {"structured_outputs": {"choice": ["yes", "no"]}}
    temperature = 1.0 if "n" in settings else 0.0
    params = SamplingParams(max_tokens=4, temperature=temperature, **settings)
    return attempt(lambda: engine.generate(PROMPT, params))


def with_config(**settings) -> str:
    """Use a setting of an engine."""
    from helpers import Engine, EngineConfig, SamplingParams

    config = EngineConfig(**SLOW_AND_SURE | settings)
    return attempt(lambda: Engine(config=config).generate(PROMPT, SamplingParams(max_tokens=4)))


def adapter_folder() -> str:
    """Return a new folder with an adapter of the embedded model that changes one layer, by nothing."""
    from helpers import load_model

    layer, folder = "transformer.h.0.attn.c_attn", tempfile.mkdtemp(dir=".")
    inputs, outputs = load_model()[0].get_submodule(layer).weight.shape
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [layer]}
    Path(folder, "adapter_config.json").write_text(json.dumps(config))
    shapes = {"A": (1, inputs), "B": (outputs, 1)}
    tensors = {f"base_model.model.{layer}.lora_{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    return folder


def report(is_bare: bool) -> dict:
    """Return everything about one copy."""
    from helpers import Engine, EngineConfig, SamplingParams

    torch.set_num_threads(1)
    found = {execution: plain_requests(execution) for execution in ("ragged", "padded")}
    engine = Engine(config=EngineConfig(**SLOW_AND_SURE))
    found |= {name: with_params(engine, **{name: value}) for name, value in USES.items()}
    found["kv_cache"] = with_config(kv_cache="int8")
    found["speculative"] = with_config(speculative="ngram")
    found["beam_search"] = attempt(lambda: engine.beam_search(PROMPT, 2, 4) and [])
    found["generated"] = attempt(lambda: [engine.add_request(PROMPT, generated={0: [5]})] and engine.step())
    found["load_adapter"] = attempt(lambda: engine.load_adapter("adapter", adapter_folder()) or [])
    found["adapter"] = attempt(lambda: engine.generate(PROMPT, SamplingParams(max_tokens=4), adapter="adapter"))
    if is_bare:
        for setting in FAST:
            found[str(setting)] = with_config(**setting)
        found["weights"] = with_config(weights="int8")
    return found


def main() -> None:
    """Divide the process for each copy."""
    for folder in map(Path, sys.argv[1:]):
        if (child := os.fork()) == 0:
            try:
                sys.path.insert(0, str(folder))
                (folder / "report.json").write_text(json.dumps(report(is_bare=not (folder / "helpers/fast").exists())))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
