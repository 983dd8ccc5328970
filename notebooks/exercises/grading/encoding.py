"""Outcomes as JSON: a submission's process encodes them, and the grader decodes them without running any code.

Pickle would run code, so it is used in the other direction only. An object that has no encoding arrives as an `Opaque`
of the same type name: it is equal to nothing, and a message can still say "is a generator".
"""

import base64
import dataclasses
import json
import math
import sys
from collections import deque
from collections.abc import Mapping
from numbers import Integral, Real
from random import Random

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from helpers.checks.calling import Failure, Outcome
from helpers.engine import Sequence

MAX_BYTES = 32 * 2**20  # of an encoded outcome
MAX_PARTS = 10**6  # of a decoded one: a value can occur in many places
MAX_KEYS = 5000  # of its mappings and sets together: keys of equal hashes take time that is quadratic in their number
COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
OBJECTS = ("dict", "bytes", "random", "tensor", "cache", "sequence", "record", "opaque")  # with a method each
SHARED = ("request_id", "max_tokens", "priority")  # what a sequence has of its request
OWN = sorted(vars(Sequence("", [], 1)).keys() - {"request", "detokenizer"})
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
TOO_LARGE = Failure("", "", "returned more data than any task asks for.", is_final=True)


class Opaque:
    """An object that cannot be sent; subclasses have the names of its type."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def encode(outcome: Outcome) -> bytes:
    """Return an outcome as JSON. What a student's object raises on the way becomes the failure."""
    encoder = _Encoder()
    failure = outcome.failure and dataclasses.asdict(outcome.failure)
    try:
        parts = [encoder.encode(list(outcome.arguments)), encoder.encode(outcome.result)]
        text = json.dumps({"arguments": parts[0], "result": parts[1], "failure": failure}).encode()
    except Exception as error:
        name = type(error).__name__
        text = encode(Outcome(failure=Failure(name, "", f"returned something that cannot be compared ({name}).")))
    return text if len(text) <= MAX_BYTES else encode(Outcome(failure=TOO_LARGE))


def decode(data: bytes) -> Outcome:
    """Return the outcome that a submission's process sent.

    Raises:
        ValueError: it is no outcome.
    """
    try:
        parts, decoder = json.loads(data), _Decoder()
        arguments, result = tuple(decoder.decode(parts["arguments"])), decoder.decode(parts["result"])
        failure = parts["failure"]
        if failure is not None:
            texts = [str(failure[name])[:2000] for name in ("error", "said", "message")]
            failure = Failure(*texts, is_final=failure["is_final"] is True)
        return Outcome(result, arguments, failure)
    except Exception as error:
        raise ValueError(f"not an outcome ({type(error).__name__}: {str(error)[:200]})") from None


class _Encoder:
    """Encodes values as plain JSON values and [tag, content]; what occurs twice is a reference the second time."""

    def __init__(self):
        self.numbers: dict[int, int] = {}  # of the objects that are done, by id
        self.kept: list = []  # so that no id is used again

    def encode(self, value):
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.generic):
            return self.encode(value.item())
        if isinstance(value, str | Real):
            return str(value) if isinstance(value, str) else int(value) if isinstance(value, Integral) else float(value)
        if id(value) in self.numbers:
            return ["same", self.numbers[id(value)]]
        coded = self._object(value)
        if coded[0] != "opaque":
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return coded

    def _object(self, value):
        if isinstance(value, torch.Tensor) and not value.is_meta and value.layout == torch.strided:
            value = value.detach().resolve_conj().resolve_neg()
            # A clone, because `contiguous` keeps the stride of a single number, which has no view as bytes then.
            value = value.cpu().clone(memory_format=torch.contiguous_format)
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            return ["tensor", [str(value.dtype), list(value.shape), _text(data)]]
        if isinstance(value, Cache) and hasattr(value, "layers"):
            layers = [[self.encode(layer.keys), self.encode(layer.values)] for layer in value.layers]
            return ["cache", layers]
        if isinstance(value, Mapping):
            return ["dict", [[self.encode(key), self.encode(content)] for key, content in value.items()]]
        if isinstance(value, bytes):
            return ["bytes", _text(value)]
        if type(value) is Random:
            return ["random", self.encode(value.getstate())]
        for name, kind in COLLECTIONS.items():
            if isinstance(value, kind):
                return [name, [self.encode(part) for part in value]]
        if type(value) is Sequence:  # not a dataclass, and its request refers to it
            return ["sequence", [self.encode(getattr(value, name)) for name in (*SHARED, *OWN)]]
        if (name := _name(type(value))) and _record(name):
            fields = {field.name for field in dataclasses.fields(value)}
            return ["record", [name, {key: self.encode(part) for key, part in vars(value).items() if key in fields}]]
        return ["opaque", type(value).__name__]


class _Decoder:
    """Decodes what `_Encoder` writes, from a process that may send anything."""

    def __init__(self):
        self.objects: list = []
        self.sizes: list[int] = []  # parts of each object, those of its parts included
        self.parts = self.keys = 0

    def decode(self, data):
        self._count(1)
        if data is None or type(data) in (bool, int, float, str):
            return data
        tag, content = data
        if tag == "same":
            self._count(self.sizes[content])
            return self.objects[content]
        before = self.parts
        if tag in ("dict", "set", "frozenset"):
            self.keys += len(content)
            if self.keys > MAX_KEYS:
                raise ValueError("too many keys")
        if tag in COLLECTIONS:
            value = COLLECTIONS[tag](map(self.decode, content))
        elif tag in OBJECTS:
            value = getattr(self, f"_{tag}")(content)
        else:
            raise ValueError(f"no such tag: {tag}")
        if tag != "opaque":
            self.objects.append(value)
            self.sizes.append(self.parts - before)
        return value

    def _count(self, parts: int) -> None:
        self.parts += parts
        if self.parts > MAX_PARTS:
            raise ValueError("too many parts")

    def _dict(self, content):
        return {self.decode(key): self.decode(value) for key, value in content}

    def _bytes(self, content):
        return base64.b64decode(content)

    def _random(self, content):
        random = Random()
        random.setstate(self.decode(content))
        return random

    def _tensor(self, content):
        dtype, shape, text = content
        dtype, data = DTYPES[dtype], bytearray(base64.b64decode(text))
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError("a tensor of the wrong size")
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        flat = flat != 0 if dtype == torch.bool else flat.view(dtype)
        return flat.reshape(shape)

    def _cache(self, content):
        cache = DynamicCache()
        cache.layers = []
        for keys, values in content:
            layer = DynamicLayer()
            layer.keys, layer.values = self.decode(keys), self.decode(values)
            layer.is_initialized = layer.keys is not None
            cache.layers.append(layer)
        return cache

    def _sequence(self, content):
        values = dict(zip((*SHARED, *OWN), map(self.decode, content), strict=True))
        sequence = Sequence(values["request_id"], [], values["max_tokens"], priority=values["priority"])
        for name in OWN:
            setattr(sequence, name, values[name])
        return sequence

    def _record(self, content):
        name, fields = content
        kind = _record(name)
        known = {field.name for field in dataclasses.fields(kind)} if kind else set()
        if not known or not set(fields) <= known or not all(name in fields or hasattr(kind, name) for name in known):
            raise ValueError(f"no dataclass of the course: {name}")
        record = object.__new__(kind)  # no code of the class runs
        for field, value in fields.items():
            object.__setattr__(record, field, self.decode(value))
        return record

    def _opaque(self, content):
        name = content if isinstance(content, str) and content.isidentifier() and len(content) < 60 else "object"
        return type(name, (Opaque,), {})()


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _record(name: str) -> type | None:
    """Return the dataclass of the course that has this name; None if there is none."""
    module, _, path = name.partition(":")
    found = getattr(sys.modules.get(module), path, None) if module.startswith("helpers.") else None
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
