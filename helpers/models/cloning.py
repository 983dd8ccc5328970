"""Clone a model without copying its weights, to change modules and config while the original stays as it is."""

import copy
from collections import OrderedDict


def clone_sharing_weights(model):
    """Return a copy of a model that has its own modules and config, but the same parameters and buffers.

    The copy takes no memory for weights. Replace its modules or set its attention implementation freely, but do not
    write into its tensors: they are the original's.
    """
    copies = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # Half of the time would go into the empty dictionaries, for hooks, of which each module has a dozen.
    for module in model.modules():
        empty = (value for value in vars(module).values() if type(value) in (dict, OrderedDict, set) and not value)
        copies |= {id(value): type(value)() for value in empty}
    return copy.deepcopy(model, copies)
