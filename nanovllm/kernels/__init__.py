"""Triton kernels other than attention. Each has a torch twin in `layers/` that its tests compare it with."""
