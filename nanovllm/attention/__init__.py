"""Attention backends, one file each. `create_backend` is the static rule that chooses one."""

import importlib.util

from nanovllm.layers.attention import AttentionBackend


def create_backend(name: str, device_type: str, block_size: int | None = None) -> AttentionBackend:
    """Return the backend that the knobs and the device ask for.

    "auto" is torch on a CPU; on CUDA triton where it is installed and takes the block size asked for, else flash_attn
    or torch.

    Args:
        name: "auto" or a backend's name.
        device_type: "cpu" or "cuda".
        block_size: The block size asked for, if any.

    Raises:
        ValueError: The backend does not run on the device, or its package is not installed.
    """
    if name == "auto":
        name = "torch" if device_type == "cpu" or not _is_power_of_two_from_16(block_size or 256) else "triton"
        if name == "triton" and importlib.util.find_spec("triton") is None:
            name = "flash_attn"
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


def _is_power_of_two_from_16(size: int) -> bool:
    return size >= 16 and size & (size - 1) == 0
