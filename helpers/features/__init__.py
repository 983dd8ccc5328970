"""What attaches to the core by its hooks (`engine/hooks.py`): a feature is a file or a folder here.

parallel_sampling.py   several outputs of one prompt, which is computed once
beam_search.py         the most probable continuations, found side by side
token_rules/           stop tokens, bad words, allowed tokens, biases and penalties
structured_outputs/    outputs that match a JSON schema, a regular expression, a list of choices or a grammar
prompt_scoring.py      log-probabilities of the tokens of prompts
adapters/              many fine-tuned models in one batch
speculation/           several guessed tokens, verified in one pass
tensor_parallel/       one model on several processes
quantized_kv_cache/    keys and values as integers of 8 bits
resumption.py          continues outputs that another engine has begun

The core runs without this folder, and without any part of it: a setting that needs a missing feature is an error. To
add a feature, put a module here that defines `attach(engine)`, which returns a `Feature`, or None if the engine does
not need it.
"""

import importlib
import pkgutil
from collections.abc import Callable


def installed() -> list[Callable]:
    """Return the function `attach` of every feature in this folder, in the order of their names.

    A feature that builds on a missing one is left out, too: beam search builds on parallel sampling.
    """
    found = []
    for module in pkgutil.iter_modules(__path__):
        try:
            found.append(importlib.import_module(f".{module.name}", __name__).attach)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"{__name__}."):
                raise
    return found
