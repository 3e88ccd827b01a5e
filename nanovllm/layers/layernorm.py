"""RMSNorm, optionally fused with the residual add before it."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 and rounded once.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def rms_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x``; the input is left as it is."""
        x32 = x.float()  # the same tensor if it is float32 already, so nothing below works in place
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)

    def add_rms_forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of ``x + residual``, and that sum as the next residual."""
        total = x.float() + residual.float()
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + self.eps)
        return (total * scale * self.weight.float()).to(x.dtype), total.to(x.dtype)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Norm ``x`` [..., hidden], after adding ``residual`` if there is one."""
        return self.rms_forward(x) if residual is None else self.add_rms_forward(x, residual)
