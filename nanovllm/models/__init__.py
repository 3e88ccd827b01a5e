"""The supported architectures, by the names that config.json uses."""

import importlib
from typing import Any

from nanovllm.models.config import SUPPORTED_ARCHITECTURES


def model_class(architecture: str) -> Any:
    """Return the model class for an architecture that `ModelConfig` has accepted."""
    module_name, class_name = SUPPORTED_ARCHITECTURES[architecture].split(":")
    return getattr(importlib.import_module(module_name), class_name)
