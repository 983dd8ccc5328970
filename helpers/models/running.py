"""Call a model, whatever its family: the one place where the verbs and the padded runner do."""

import inspect

import torch


def run_model(model, **inputs):
    """Call the model, without gradients, with those of the inputs that its `forward` accepts.

    BLOOM and MPT take no `position_ids` (ALiBi reads the mask); some families take no `logits_to_keep`.
    """
    accepted = inspect.signature(model.forward).parameters
    with torch.no_grad():
        return model(**{name: value for name, value in inputs.items() if name in accepted})
