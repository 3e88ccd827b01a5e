"""Fixtures that all tests share."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Models this small spend more time waiting for a second thread than computing, above all on a busy machine.
# Set before torch is imported; threads change no result that a test may rely on.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tiny_models import TinyConfig, load_reference

from nanovllm.config import Config
from nanovllm.engine.llm_engine import settle_config
from nanovllm.models.config import ModelConfig

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when triton is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where engines of tests that name no device run, in float32")


@pytest.fixture(scope="session", autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Settle "auto" to one device and float32, so that a machine with a GPU runs the same tests as one without."""
    device = request.config.getoption("--device")

    def settle(config: Config, model_config: ModelConfig) -> Config:
        chosen: dict[str, Any] = {"device": device} if config.device == "auto" else {}
        if config.dtype == "auto" and chosen:
            chosen["dtype"] = "float32"
        if device != "cpu" and config.max_num_seqs == Config("model").max_num_seqs:
            chosen["max_num_seqs"] = 24  # few graphs to capture in each of many engines
        return settle_config(dataclasses.replace(config, **chosen), model_config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.engine.llm_engine.settle_config", settle)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyConfig], Path]:
    """A function from a shape to the folder of its checkpoint, written once a session; not to be changed."""
    folders: dict[TinyConfig, Path] = {}

    def build(shape: TinyConfig) -> Path:
        if shape not in folders:
            folders[shape] = shape.save(tmp_path_factory.mktemp("tiny"))
        return folders[shape]

    return build


@pytest.fixture(scope="session")
def tiny_reference(tiny_checkpoint: Callable[[TinyConfig], Path]) -> Callable[..., Any]:
    """A function from a shape (and dtype) to transformers' model of it, loaded once a session."""
    models: dict[tuple[TinyConfig, str], Any] = {}

    def load(shape: TinyConfig, dtype: str = "float32") -> Any:
        if (shape, dtype) not in models:
            models[shape, dtype] = load_reference(tiny_checkpoint(shape), dtype)
        return models[shape, dtype]

    return load
