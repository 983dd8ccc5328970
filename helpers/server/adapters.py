"""Adapters as models: clients name one in `model`, and may load and unload them where the operator allows it.

A client that loads an adapter names a folder on the server's machine. So it may do that only if the operator has named
a folder for it, and only below that folder: everything else is refused before any file is looked at.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse

from ..engine import EngineCore
from .http_errors import APIError
from .protocol import Text
from .strict import Strict

if TYPE_CHECKING:
    from ..features.adapters.peft_folder import Adapter


class LoadAdapter(Strict):
    """`POST /v1/load_lora_adapter`, in vLLM's format."""

    lora_name: Text
    lora_path: Text


class UnloadAdapter(Strict):
    """`POST /v1/unload_lora_adapter`, in vLLM's format."""

    lora_name: Text


def loaded_adapters(engine: EngineCore) -> dict[str, "Adapter"]:
    """Return the adapters that new requests can name, by name. Any thread may ask."""
    features = getattr(engine.validator, "features", ())  # a simulator's validator has none
    return next((dict(feature.loaded) for feature in features if feature.name == "adapters"), {})


def add_addresses(app: FastAPI) -> None:
    """Add the addresses that load and unload adapters."""
    app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)(load)
    app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)(unload)


async def load(body: LoadAdapter, request: Request) -> PlainTextResponse:
    """Load an adapter while the server runs."""
    state = request.app.state
    if body.lora_name == state.model_name:
        raise APIError(400, f"The model itself is called {body.lora_name!a}: choose another name.", "lora_name")
    root = Path(state.adapter_folder).resolve()
    try:
        folder = folder_below(root, body.lora_path)
        await state.engine_client.run(lambda: state.engine.load_adapter(body.lora_name, folder))
    except ValueError as error:
        raise APIError(400, str(error).replace(f"{root}/", "")) from error
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!a} added successfully.")


async def unload(body: UnloadAdapter, request: Request) -> PlainTextResponse:
    """Unload an adapter; requests that run finish with it."""
    state, name = request.app.state, body.lora_name
    try:
        await state.engine_client.run(lambda: state.engine.unload_adapter(name))
    except ValueError as error:
        raise APIError(404, str(error), "lora_name", "model_not_found") from error
    return PlainTextResponse(f"Success: LoRA adapter {name!a} removed successfully.")


def folder_below(root: Path, path: str) -> Path:
    """Return a folder whose files all lie below a folder, links followed. Raise a ValueError if it does not."""
    try:
        folder = (root / path).resolve()
        inside = folder != root and root in folder.parents
        if inside and folder.is_dir():
            inside = all(folder in file.resolve().parents for file in folder.iterdir())
    except (OSError, RuntimeError, ValueError):  # a null character, or links in a circle
        inside = False
    if not inside:
        raise ValueError("lora_path must be a folder below the server's folder of adapters, without links out of it.")
    return folder
