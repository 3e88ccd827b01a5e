"""Attention backends, one file each. `create_backend` is the static rule that chooses one."""

from nanovllm.layers.attention import AttentionBackend


def create_backend(name: str, device_type: str) -> AttentionBackend:
    """Return the backend that the knob and the device ask for.

    Args:
        name: "auto" or a backend's name.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: The backend does not run on the device.
    """
    if name not in ("auto", "torch"):
        raise ValueError(f"attention_backend={name!r} is not available on device {device_type!r}; use 'torch'.")
    from nanovllm.attention.torch_backend import TorchBackend

    return TorchBackend()
