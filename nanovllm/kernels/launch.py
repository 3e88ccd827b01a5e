"""Programmatic dependent launch (Hopper on): a kernel is set up on the device while the one before it still runs.

A step of few rows is some three hundred kernels of a few microseconds, between which the device would start anew each
time. A kernel with this option waits, before it touches anything, until what came before is done and seen.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernel before; from here on the next one may be set up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def warps_for(elements: int) -> int:
    """Return how many warps a program of pointwise work on so many elements takes."""
    return max(1, min(16, elements // 512))


def dependent_launch(x: torch.Tensor) -> dict[str, Any]:
    """Return the options of a launch on the device of ``x``, whose kernel calls `wait_for_inputs`."""
    return _options(x.device)


@functools.cache
def _options(device: torch.device) -> dict[str, Any]:
    has_it = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    if has_it and hasattr(tl.extra, "cuda") and hasattr(tl.extra.cuda, "gdc_wait"):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
