"""The embedded model, two adapters for it, the grammar that wrote its training text, and the code that trains them."""

from pathlib import Path

ADAPTERS = Path(__file__).parent / "adapters"


def tiny_adapter(name: str) -> Path:
    """Return the folder of an adapter of the embedded model, for `Engine.load_adapter`.

    Args:
        name: "sea", which tells of sea animals, or "future", which tells what will happen.

    Raises:
        ValueError: there is no such adapter.
    """
    known = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
    if name not in known:
        raise ValueError(f"There is no adapter {name!r} of the embedded model: choose one of {', '.join(known)}.")
    return ADAPTERS / name
