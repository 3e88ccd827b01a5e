"""SwiGLU's elementwise half."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """SiLU of the first half of the last dimension times the second half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., 2 * size] to [..., size]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
