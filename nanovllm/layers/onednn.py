"""Linear weights in oneDNN's blocked layout: the matrix product of the CPU path.

torch multiplies float32 matrices on a CPU with MKL, which leaves the wide vector units of non-Intel processors idle and
lays out the weight anew in every call. oneDNN does neither, if it is given the weight once in a layout of its own.
"""

from collections.abc import Callable

import torch
from torch import nn

from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase

_BATCH_HINT = 64  # rows that the layout is chosen for; any number of rows works


def packed_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function that maps x [..., input] to x @ weight.T, or None where this torch build has no oneDNN."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        multiply = torch.ops.mkldnn._linear_pointwise

        def linear(x: torch.Tensor) -> torch.Tensor:
            return multiply(x, packed, None, "none", [], "")

        linear(weight.new_zeros(2, weight.size(1)))
    except (AttributeError, RuntimeError):
        return None
    return linear


def pack_linear_weights(model: nn.Module) -> None:
    """Let every linear layer and the LM head of a CPU model multiply by a packed weight.

    The plain weight of a linear layer is given up; the LM head's stays, since the embedding may share it.
    """
    for module in model.modules():
        if isinstance(module, LinearBase | ParallelLMHead):
            multiply = packed_linear(module.weight)
            if multiply is None:
                return
            module.multiply = multiply  # type: ignore[assignment,method-assign]
            if isinstance(module, LinearBase):
                module.weight = None  # type: ignore[assignment]
