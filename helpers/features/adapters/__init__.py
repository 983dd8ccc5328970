"""Adapters: many fine-tuned models in one batch, each of them the base model plus two small matrices per layer.

LoRA (Hu et al., 2021) leaves a weight W as it is and trains A [rank, inputs] and B [outputs, rank]: the layer computes
W x + scaling * B A x. Merging B A into W would make a model of its own for each adapter, and no two of them could share
a pass. Here, all rows share the product with W, which is read once, and each row adds the two small products of its own
adapter (Punica, Chen et al., 2023; S-LoRA, Sheng et al., 2023).

peft_folder.py       reads an adapter from a folder in the format of the library PEFT, or says why it cannot be used
adapted_runner.py    adds the adapters' products to the linear layers of a pass
grouped_products.py  computes them, for all rows of an adapter at once
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ...engine import EngineCore, Feature

if TYPE_CHECKING:
    from .peft_folder import Adapter

MAX_ADAPTERS, MAX_NAME = 256, 256  # how many may be loaded, and the most characters of a name


class Adapters(Feature):
    """Takes `adapter`: the name of the adapter whose model continues the prompt.

    Args:
        engine: an engine with a model.

    Attributes:
        loaded: the adapters that new requests can name.
    """

    name, options = "adapters", frozenset({"adapter"})

    def __init__(self, engine: EngineCore):
        self.engine = engine
        self.loaded: dict[str, Adapter] = {}
        self._users: dict[Adapter, int] = {}  # the unfinished sequences of each adapter

    def load(self, name: str, folder: str | Path) -> None:
        """Load an adapter; see `Engine.load_adapter`."""
        self.check_name(name)
        if len(self.loaded) >= MAX_ADAPTERS:
            raise ValueError(f"{MAX_ADAPTERS} adapters are loaded, and no more are allowed: unload one of them.")
        runner = self._adapted_runner()
        from .peft_folder import read_adapter  # only here: a simulator has no torch

        adapter = read_adapter(folder, self.engine.model, runner.layers)
        runner.adapt(adapter)
        self.loaded[name] = adapter

    def unload(self, name: str) -> None:
        """Forget an adapter; see `Engine.unload_adapter`."""
        adapter = self.find(name)
        del self.loaded[name]
        self._free_if_unused(adapter)

    def check_name(self, name: str) -> None:
        """Raise a ValueError unless a new adapter can have this name."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ValueError(f"An adapter's name must be a text of 1 to {MAX_NAME} printable characters, not {name!r}.")
        if name in self.loaded:
            raise ValueError(f"An adapter {name!r} is loaded already: unload it first, or choose another name.")

    def find(self, name: str) -> "Adapter":
        """Return a loaded adapter. Raise a ValueError if there is none of this name."""
        if not isinstance(name, str) or name not in self.loaded:
            known = ", ".join(map(repr, self.loaded)) or "none"
            raise ValueError(f"There is no adapter {name!r}: load it, or choose one that is loaded ({known}).")
        return self.loaded[name]

    def _adapted_runner(self):
        from .adapted_runner import AdaptedRunner  # only here: a simulator has no torch

        engine = self.engine
        if not isinstance(engine.runner, AdaptedRunner):
            if reason := engine.runner.not_ragged_because:
                raise ValueError(f"Adapters require ragged execution, but {reason}. Merge the adapter into the model.")
            if engine.config.tensor_parallel_size > 1:
                raise ValueError("Adapters cannot be split over processes: use tensor_parallel_size=1.")
            if engine.config.batch_invariant:
                raise ValueError(
                    "An adapter's products depend on the other rows in their last bits: use batch_invariant=False, or "
                    "merge the adapter into the model."
                )
            engine.runner = AdaptedRunner(engine.runner, engine.model)
        return engine.runner

    # --- hooks ----------------------------------------------------------------------------------------------------

    def check_options(self, options):
        self.find(options["adapter"])

    def prepare(self, request):
        request.notes[self.name] = adapter = self.find(request.options["adapter"])
        request.salt = adapter.digest + request.salt

    def joined(self, request):
        adapter = request.notes[self.name]
        self._users[adapter] = self._users.get(adapter, 0) + len(request.sequences)

    def finished(self, sequence):
        adapter = sequence.request.notes[self.name]
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._free_if_unused(adapter)

    def _free_if_unused(self, adapter: "Adapter") -> None:
        """Free the memory of an adapter that is unloaded, once no unfinished request uses it."""
        if adapter not in self._users and adapter not in self.loaded.values():
            self.engine.runner.forget(adapter)


def attach(engine: EngineCore) -> Adapters | None:
    return Adapters(engine) if hasattr(engine, "model") else None
