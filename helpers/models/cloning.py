"""Clone a model without copying its weights, to change modules and config while the original stays as it is."""

import copy


def clone_sharing_weights(model):
    """Return a copy of a model that has its own modules and config, but the same parameters and buffers.

    The copy takes no memory for weights. Replace its modules or set its attention implementation freely, but do not
    write into its tensors: they are the original's.
    """
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in shared})
