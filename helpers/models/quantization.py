"""Quantize a model's linear layers: integers of 8 or 4 bits, with a scale for each group of weights.

A decode reads all weights to compute a few rows, so it takes about as long as reading them. Fewer bits per weight make
it faster. Only weights are quantized: activations keep the model's dtype, unless `integer_products.py` rounds them.

    int8    8 bits per weight and a float32 scale for each output
    int4    4 bits per weight and a bfloat16 scale for each GROUP of inputs of an output: 4.5 bits per weight

A weight is stored as the integer nearest to weight / scale, and the scale maps the largest weight of its group to about
the largest integer, 127 or 7. No weight changes by more than half a scale. A single outlier enlarges the scale of its
whole group. With the 255 values of int8 that hardly matters. With the 15 values of int4 it does, so groups are small:
32 weights share a scale of 16 bits, which costs half a bit per weight.

A scale of int4 is rounded to five binary digits. An integer has three, so a weight has at most eight and is exact in
bfloat16, in which matrix units multiply. The relative error of the embedded model's weights is 10.39%; with scales of
eight digits, it would be 10.37%.

All layers that only multiply and add a bias are quantized, including the LM head. A decode reads the head in full, and
in GPT-2 (124M) it has 31% of the weights that a decode reads. Where it is tied to the embedding, the embedding stays as
it is: a token reads one row of it. Layers with fewer than GROUP inputs or outputs, such as the router of a mixture of
experts, stay as they are, and so do weights outside of linear layers: transformers stores experts that way.

`dequantized` returns the reference: an ordinary model with the rounded weights. `compressed_tensors.py` loads integers
that were rounded elsewhere.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from .cloning import clone_sharing_weights

GROUP = 32  # inputs that share a scale in int4; sizes of weights are padded to a multiple
PANEL = 32  # outputs whose integers are neighbors in memory, as in fast/kernels/quantized.cpp
FLOAT32_DIGITS = 24
SLAB = 2**18  # weights that are quantized, or converted to floats, at a time, so that both take little memory


@dataclass(frozen=True)
class Format:
    """How weights are stored: bits per integer, inputs per scale (None for all), dtype and binary digits of scales."""

    bits: int
    group: int | None
    scale_dtype: torch.dtype
    scale_digits: int = FLOAT32_DIGITS

    @property
    def largest(self) -> int:
        """The largest integer. Its negative is the smallest, so that zero is in the middle."""
        return 2 ** (self.bits - 1) - 1


FORMATS = {"int8": Format(8, None, torch.float32), "int4": Format(4, GROUP, torch.bfloat16, 5)}


def round_to_integers(weight: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [out, in] and scales [out, groups] for a weight [out, in], whose sizes are multiples of GROUP."""
    groups = weight.float().unflatten(1, (-1, format.group or weight.shape[1]))
    largest = groups.abs().amax(dim=2)
    # Not below the smallest normal number: the scale of a group of zeros must not be zero.
    scales = (largest / format.largest).clamp(min=torch.finfo(torch.float32).tiny)
    if drop := FLOAT32_DIGITS - format.scale_digits:  # rounded in its bits, whose upper ones are the exponent
        scales = (scales.view(torch.int32) + (1 << drop - 1) >> drop << drop).view(torch.float32)
    scales = scales.to(format.scale_dtype)
    integers = (groups / scales.float()[..., None]).round_().clamp_(-format.largest, format.largest).nan_to_num_()
    return integers.to(torch.int8).flatten(1), scales


def _shifts(bits: int, device) -> torch.Tensor:
    """Return for each input of a word the position of its lowest bit: even inputs are in the lower half."""
    inputs = torch.arange(32 // bits, dtype=torch.int32, device=device)
    return inputs % 2 * 16 + inputs // 2 * bits


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers [out, in] into int32 [panels, words, PANEL]: a word has the bits of 32 / bits inputs."""
    lanes = integers.view(-1, PANEL, integers.shape[1] * bits // 32, 32 // bits).transpose(1, 2)
    return ((lanes.int() & (2**bits - 1)) << _shifts(bits, integers.device)).sum(-1, dtype=torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers [out, in], int32, of words [panels, words, PANEL]."""
    lanes = words[..., None] << (32 - bits - _shifts(bits, words.device)) >> (32 - bits)  # shifts right keep the sign
    return lanes.transpose(1, 2).flatten(2).flatten(0, 1)


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is stored as integers.

    Two attributes of the class are replaced by `helpers.fast`: `multiply`, which computes [..., out] from x [..., in]
    while no gradient is needed, and `allocate`, which returns the memory of the integers.

    Args:
        layer: an `nn.Linear`, or GPT-2's `Conv1D`; its weight is read and not kept.
        weights: a name in `FORMATS`.

    Attributes:
        words: the integers, int32 [panels, words, PANEL]; see `pack`.
        scales: [panels, groups, PANEL].
        bias: [out] or None.
        dtype: of the layer's inputs and outputs.
        is_transposed: whether the model's checkpoints store the weight as [in, out], like GPT-2's `Conv1D`.
    """

    is_transposed = False

    def __init__(self, layer: nn.Linear | Conv1D, weights: str):
        super().__init__()
        self.weights, self.format, self.is_transposed = weights, FORMATS[weights], isinstance(layer, Conv1D)
        weight = weight_of(layer)
        self.out_features, self.in_features = weight.shape
        self._store(self._quantized_slabs(weight), layer.bias, layer.weight.dtype, weight.device)

    def requantize(self, weight: torch.Tensor) -> None:
        """Quantize another weight [out, in], of finite numbers, into the tensors of the old one."""
        self._fill(self._quantized_slabs(weight.to(self.words.device)), self.words, self.scales)

    @classmethod
    def from_integers(
        cls, integers: torch.Tensor, scales: torch.Tensor, bits: int, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> "QuantizedLinear":
        """Return a layer with weights that are already quantized. No value changes.

        Args:
            integers: int8 [out, in].
            scales: [out, groups]; a group is all inputs, or a multiple of GROUP of them. Scales are stored as
                bfloat16 if `bits` is 4 and bfloat16 holds them exactly, and otherwise as float32.
            bits: 8 or 4.
            bias: [out] or None.
            dtype: of the layer's inputs and outputs.

        Raises:
            ValueError: the sizes do not match, or a scale is infinite or not a number.
        """
        (outputs, inputs), groups = integers.shape, scales.shape[-1] if scales.ndim else 0
        fit = groups > 0 and scales.shape == (outputs, groups) and inputs % groups == 0
        if not fit or (groups > 1 and inputs // groups % GROUP):
            raise ValueError(
                f"Scales {list(scales.shape)} do not fit a weight {[outputs, inputs]}: a scale is for all inputs of an "
                f"output, or for a multiple of {GROUP}."
            )
        if not scales.isfinite().all():
            raise ValueError("A scale is infinite or not a number: copy the file again.")
        scales, short = scales.float(), scales.bfloat16()
        if bits == 4 and torch.equal(short.float(), scales):
            scales = short
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.weights = f"int{bits}"
        digits = FORMATS[self.weights].scale_digits  # of other weights, which may replace these
        self.format = Format(bits, inputs // groups if groups > 1 else None, scales.dtype, digits)
        self.out_features, self.in_features = integers.shape
        slabs = (tensor.split(self._panels_per_slab() * PANEL) for tensor in (integers, scales))
        self._store(zip(*slabs, strict=True), bias, dtype, integers.device)
        return self

    def _store(self, slabs: Iterable, bias: nn.Parameter | None, dtype: torch.dtype, device: torch.device) -> None:
        """Store integers [n, in] and scales [n, groups], a slab of outputs at a time, with zeros as padding."""
        self.bias, self.dtype = bias, dtype
        panels, inputs = -(-self.out_features // PANEL), -(-self.in_features // GROUP) * GROUP
        groups = inputs // (self.format.group or inputs)
        # Allocated first, so that what quantizing needs is contiguous and returns to the system afterwards.
        shape = panels, inputs * self.format.bits // 32, PANEL
        words = self.allocate(shape, dtype=torch.int32, device=device)
        scales = torch.empty(panels, groups, PANEL, dtype=self.format.scale_dtype, device=device)
        self._fill(slabs, words, scales)
        self.register_buffer("words", words)
        self.register_buffer("scales", scales)

    def _fill(self, slabs: Iterable, words: torch.Tensor, scales: torch.Tensor) -> None:
        n, inputs = self._panels_per_slab(), -(-self.in_features // GROUP) * GROUP
        for (integers, own), some_words, some_scales in zip(slabs, words.split(n), scales.split(n), strict=True):
            rows = (0, -len(integers) % PANEL)
            some_words.copy_(pack(pad(integers, (0, inputs - integers.shape[1], *rows)), self.format.bits))
            some_scales.copy_(pad(own, (0, 0, *rows)).unflatten(0, (-1, PANEL)).transpose(1, 2))

    def _panels_per_slab(self) -> int:
        return max(1, SLAB // (PANEL * self.in_features))

    def _quantized_slabs(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield integers and scales, a slab of outputs at a time."""
        return (self._quantize(slab) for slab in weight.split(self._panels_per_slab() * PANEL))

    @torch.no_grad()
    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return integers and scales of some outputs."""
        weight = pad(weight.detach().float(), (0, -weight.shape[1] % GROUP))
        if not weight.isfinite().all():
            raise ValueError("A weight is infinite or not a number, and has no nearest integer: check the model.")
        return round_to_integers(weight, self.format)

    def _slabs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield integers [n, padded in] and scales [n, groups], a slab of outputs at a time."""
        panels, rest = self._panels_per_slab(), self.out_features
        for words, scales in zip(self.words.split(panels), self.scales.split(panels), strict=True):
            integers = unpack(words, self.format.bits)[:rest]
            yield integers, scales.transpose(1, 2).flatten(0, 1)[:rest]
            rest -= len(integers)

    def integers_and_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `from_integers` takes: int8 [out, in] and scales [out, groups], without padding."""
        slabs = ((integers[:, : self.in_features].to(torch.int8), scales) for integers, scales in self._slabs())
        integers, scales = map(torch.cat, zip(*slabs, strict=True))
        return integers, scales

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weight [out, in], computed at every access."""
        return torch.cat(list(self._rounded_slabs()))

    def _rounded_slabs(self) -> Iterator[torch.Tensor]:
        """Yield the rounded weight, a slab of outputs [n, in] at a time."""
        for integers, scales in self._slabs():
            weight = integers.unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]
            yield weight.flatten(1)[:, : self.in_features].to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] by the rounded weight, add the bias and return [..., out]."""
        wants_gradient = torch.is_grad_enabled() and x.requires_grad
        return self.multiply_dequantized(x) if wants_gradient else self.multiply(x)

    def multiply_dequantized(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the rounded weight, slab by slab, and multiply with PyTorch."""
        y = torch.cat([linear(x, slab) for slab in self._rounded_slabs()], dim=-1)
        return y if self.bias is None else y + self.bias

    multiply = multiply_dequantized
    allocate = staticmethod(torch.empty)

    def _apply(self, fn, recurse=True):
        """Move or cast the layer, except for the dtype of the scales: rounding them would change all weights."""
        scales, self.dtype = self.scales, fn(torch.empty(0, dtype=self.dtype, device=self.words.device)).dtype
        super()._apply(fn, recurse)
        self.scales = scales.to(self.words.device)
        return self

    def extra_repr(self) -> str:
        """Describe the layer in the model's printed form."""
        return f"{self.weights}, in_features={self.in_features}, out_features={self.out_features}"


def sizes_of(layer: "nn.Linear | Conv1D | QuantizedLinear") -> tuple[int, int]:
    """Return the numbers of a layer's outputs and inputs, in either order of its weight."""
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)


def weight_of(layer: nn.Linear | Conv1D) -> torch.Tensor:
    """Return a layer's weight as a view [out, in]; GPT-2's `Conv1D` stores [in, out]."""
    return layer.weight.detach().T if isinstance(layer, Conv1D) else layer.weight.detach()


def _layers_to_quantize(model: nn.Module) -> Iterator[tuple[list[str], nn.Linear | Conv1D]]:
    """Yield the layers that are quantized, each with all its paths: it may have several parents.

    A subclass or a hook may do more than multiply, and a weight of another class may be quantized already.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        plain = type(module) in (nn.Linear, Conv1D) and not (module._forward_hooks or module._forward_pre_hooks)
        if plain and type(module.weight) is nn.Parameter and min(module.weight.shape) >= GROUP:
            paths.setdefault(module, []).append(path)
    while paths:  # without references to layers that have been yielded
        layer = next(iter(paths))
        yield paths.pop(layer), layer
        del layer


def quantize(model: nn.Module, weights: str) -> nn.Module:
    """Replace the linear layers of a model, one after the other, with quantized ones; return the model.

    A layer's float weight is freed as soon as it is quantized, unless something else uses it. So memory never holds
    more than the float weights and one quantized layer.

    Args:
        weights: a name in `FORMATS`. A model that is already quantized this way stays as it is.

    Raises:
        ValueError: there is no such format, the model is quantized in another one, or it has no layer to quantize.
    """
    check_format(weights)
    if is_quantized(model, weights):
        return model
    num_layers = 0
    for paths, layer in _layers_to_quantize(model):
        try:
            quantized = QuantizedLinear(layer, weights)
        except ValueError as error:
            raise ValueError(f"{type(model).__name__} cannot be quantized: {paths[0]}: {error}") from error
        for path in paths:
            model.set_submodule(path, quantized)
        num_layers += 1
        del layer
    if not num_layers:
        raise ValueError(f"{type(model).__name__} has no plain linear layers to quantize. Use weights=None.")
    return model


def is_quantized(model: nn.Module, weights: str) -> bool:
    """Return whether a model has quantized layers. Raise a ValueError if they are in another format."""
    found = {module.weights for module in model.modules() if isinstance(module, QuantizedLinear)}
    if found - {weights}:
        raise ValueError(f"The weights are {' and '.join(sorted(found))} already, not {weights}: load the model anew.")
    return bool(found)


def dequantized(model: nn.Module, weights: str) -> nn.Module:
    """Return an ordinary model with the rounded weights: integers times scales, in the model's dtype.

    It is the reference for an engine with `EngineConfig(weights=...)`. In float32 both generate the same tokens, except
    for near ties. All other tensors are the given model's.

    Args:
        weights: "int8" or "int4". A model that is quantized this way already keeps its integers.

    Raises:
        ValueError: see `quantize`.
    """
    check_format(weights)
    model = clone_sharing_weights(model)
    if is_quantized(model, weights):
        for path, layer in list(model.named_modules()):
            if isinstance(layer, QuantizedLinear):
                rounded = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                rounded.weight, rounded.bias = nn.Parameter(layer.weight), layer.bias
                model.set_submodule(path, rounded)
        return model.eval()
    for _, layer in _layers_to_quantize(model):
        weight = QuantizedLinear(layer, weights).weight
        layer.weight = nn.Parameter(weight.T.contiguous() if isinstance(layer, Conv1D) else weight.contiguous())
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False  # the embedding is not rounded
    return model.eval()


def check_format(weights: str) -> None:
    """Raise a ValueError unless weights can be stored this way."""
    if weights not in FORMATS:
        raise ValueError(f'weights must be "int8" or "int4", not {weights!r}.')
