"""Every kernel compiles for a GPU, also where there is none: what the interpreter takes, the compiler may not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

capability, dtype, num_ranks = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


compiled = []


def compile_only(kernel, grid):
    def launch(*args, **options):
        metadata = kernel.warmup(*args, grid=grid, **options).metadata
        compiled.append((metadata.name, metadata.shared))

    return launch


triton.runtime.driver.set_active(Driver())
JITFunction.__getitem__ = compile_only

from contextlib import nullcontext

from nanovllm.attention import triton_backend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels import compile as compiling
from nanovllm.kernels import all_reduce, pointwise, small_batch
from nanovllm.kernels.decode_state import TritonDecodeState
from nanovllm.kernels.sampler import sample
from nanovllm.layers.attention import Attention
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.parallel import TensorParallel

shape = dict(architecture="Qwen3ForCausalLM", hidden_size=1024, intermediate_size=3072,
             num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936)
torch.set_default_dtype(dtype)
config = ModelConfig(**shape)
tp = TensorParallel(0, num_ranks)
if num_ranks > 1:
    tp.peers = all_reduce.PeerBuffers(0, [16] * num_ranks, 1024, 128, 512, dtype, torch.device("cpu"))
model = Qwen3ForCausalLM(config, 64, tp)
pointwise.install_kernels(model, tp)
small_batch.install_kernels(model)
options = {"PDL": True, "launch_pdl": True} if capability >= 90 else {"PDL": False}
for module in (all_reduce, pointwise, small_batch, triton_backend):
    module.dependent_launch = lambda x: options
for layer in model.modules():
    if isinstance(layer, Attention):
        layer.k_cache, layer.v_cache = torch.empty(2, 1, 64, layer.num_kv_heads, 128)
        layer.backend = TritonBackend()
runner = SimpleNamespace(backend=TritonBackend(), decode_state=TritonDecodeState(512, 64, 64), dtype=dtype, model=model,
                         tp=tp, device=torch.device("cpu"), max_blocks=64, model_config=config,
                         device_ops=SimpleNamespace(sample=sample, active=nullcontext))
for launch in compiling._launches(runner, 512, 4096):
    launch()
if num_ranks > 1:
    tp.all_reduce(torch.empty(1, 1024))
for name, shared in compiled:
    print(name, shared)
"""


@pytest.mark.parametrize(
    ("capability", "dtype", "num_ranks"),
    [(90, "bfloat16", 1), (80, "float16", 1), (90, "float32", 1), (90, "bfloat16", 4), (80, "float32", 2)],
)
def test_all_kernels_compile_for_a_gpu(tmp_path: Path, capability: int, dtype: str, num_ranks: int) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
    env.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability), dtype, str(num_ranks)],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    shared: dict[str, list[int]] = {}
    for line in result.stdout.splitlines():
        name, size = line.split()
        shared.setdefault(name, []).append(int(size))
    counts = {name: len(sizes) for name, sizes in shared.items()}
    assert counts.pop("_few_rows_kernel", 0) == (0 if dtype == "float32" else 4)
    num_sums = 1 if dtype == "float32" else 3  # of whole rows and, for few rows, of two numbers of parts
    assert counts.pop("_rms_norm_kernel") == (1 if num_ranks > 1 else 1 + num_sums)
    assert counts.pop("_all_reduce_rms_norm_kernel", 0) == (num_sums if num_ranks > 1 else 0)
    assert counts.pop("_all_reduce_kernel", 0) == (num_ranks > 1)
    assert counts.pop("_pick_kernel", 0) == (num_ranks > 1)
    num_splits = 6 if num_ranks == 1 else 7  # a rank with fewer heads splits more
    assert counts == {
        "_advance_kernel": 1,
        "_apply_kernel": 1,
        "_chunk_kernel": 2,
        "_decode_kernel": num_splits,
        "_draw_kernel": 2,
        "_lay_out_kernel": num_splits,
        "_merge_kernel": num_splits - 1,
        "_prefill_kernel": 2,
        "_prepare_qkv_kernel": 1,
        "_silu_and_mul_kernel": 1,
    }
    # A multiprocessor has 163 (sm_80) or 227 KB; K and V of decode are buffered, so that loads run ahead of the sums.
    assert max(max(sizes) for sizes in shared.values()) <= 163 << 10
    if dtype != "float32":
        assert min(shared["_decode_kernel"]) > 2 * 64 * 128 * 2 * 2 - 1
