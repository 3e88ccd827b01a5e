"""Attention backends, one file each. `create_backend` is the static rule that chooses one."""

import importlib.util

from nanovllm.layers.attention import AttentionBackend


def create_backend(name: str, device_type: str) -> AttentionBackend:
    """Return the backend that the knob and the device ask for.

    "auto" is torch on a CPU; on CUDA triton where it is installed, else flash_attn.

    Args:
        name: "auto" or a backend's name.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: The backend does not run on the device, or its package is not installed.
    """
    if name == "auto":
        has_triton = importlib.util.find_spec("triton") is not None
        name = "torch" if device_type == "cpu" else "triton" if has_triton else "flash_attn"
    if name == "torch":
        from nanovllm.attention.torch_backend import TorchBackend

        return TorchBackend()
    if device_type == "cpu":
        raise ValueError(f"attention_backend={name!r} does not run on device 'cpu'; use 'torch' or 'auto'.")
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"attention_backend={name!r} needs the package {name!r}, which is not installed; use 'auto'.")
    if name == "triton":
        from nanovllm.attention.triton_backend import TritonBackend

        return TritonBackend()
    from nanovllm.attention.flash_attn_backend import FlashAttnBackend

    return FlashAttnBackend()
