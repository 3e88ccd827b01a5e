"""Compiling the kernels of a model side by side, which is most of a first start and can share the cores.

Each is launched once on a few rows. What is missing here, or compiled for other types, the warm-up steps compile too,
one after the other: that costs time, never correctness.
"""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.attention.triton_backend import num_splits
from nanovllm.engine.step import DecodeInput
from nanovllm.kernels.pointwise import TritonQwen3Attention, TritonRMSNorm, TritonSiluAndMul
from nanovllm.kernels.small_batch import FewRowsQKVLinear, FewRowsQwen3MLP, FewRowsRowLinear, few_rows_linear
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.models.qwen3 import Qwen3MLP
from nanovllm.utils.context import Context, step_context

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


def compile_kernels(runner: "ModelRunner", max_num_seqs: int, max_model_len: int) -> None:
    """Launch every kernel that steps of at most ``max_num_seqs`` rows and ``max_model_len`` tokens will need."""

    def run(launch: Callable[[], Any]) -> None:
        with torch.inference_mode(), runner.device_ops.active(), runner.device:
            launch()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for result in [pool.submit(run, launch) for launch in _launches(runner, max_num_seqs, max_model_len)]:
            result.result()


def _launches(runner: "ModelRunner", max_num_seqs: int, max_model_len: int) -> Iterator[Callable[[], Any]]:
    state, dtype, device = runner.decode_state, runner.dtype, runner.device
    modules: dict[type, Any] = {type(module): module for module in runner.model.modules()}  # of each kind the last
    attention = modules[TritonQwen3Attention]
    heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def qkv(num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)

    def attend(num_rows: int, context: Context) -> None:
        with step_context(context):
            attention.attn(*qkv(num_rows).split((heads, kv_heads, kv_heads), dim=1))

    def decode(num_rows: int) -> None:
        attend(num_rows, state.lay_out(num_rows).context)

    def prefill(length: int) -> None:
        ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
        tables = torch.zeros(1, runner.max_blocks, dtype=torch.int32, device=device)
        attend(1, Context(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1, max_seqlen_k=length,
                          block_tables=tables if runner.backend.always_paged else None))  # fmt: skip

    def prepare_qkv() -> None:
        zeros = torch.zeros(1, dtype=torch.int64, device=device)
        with step_context(Context(slot_mapping=zeros - 1)):
            attention.prepare_qkv(zeros, qkv(1))

    def sample(width: int, logits_dtype: torch.dtype) -> None:
        zeros = torch.zeros(1, dtype=torch.int64, device=device)
        logits = torch.zeros(1, width, dtype=logits_dtype, device=device)
        inputs = SamplingInputs(zeros.float(), torch.zeros(1, 2, dtype=torch.int64, device=device), zeros, zeros)
        runner.device_ops.sample(logits, inputs)

    def add_up() -> None:
        """Launch what may wait for other ranks, which is why all of them do so in this order."""
        norm(x, x)
        for layer in (attention.o_proj, mlp.down_proj):
            if isinstance(layer, FewRowsRowLinear):
                y = torch.zeros(1, layer.weight.size(1), dtype=dtype, device=device)
                norm(few_rows_linear(y, layer.weight, in_parts=True), x)
        if runner.tp.peers is not None:
            runner.tp.pick(torch.zeros(1, dtype=torch.int64, device=device), x.new_zeros(1).float())

    # One batch size for each number of splits of decode attention; the slowest to compile come first.
    sizes = {num_splits(rows, kv_heads): rows for rows in range(max_num_seqs, 0, -1)}.values()
    yield from (functools.partial(decode, rows) for rows in sizes)
    yield from (functools.partial(prefill, length) for length in (1, max_model_len))
    yield prepare_qkv
    yield lambda: sample(len(runner.model.lm_head.weight), dtype)
    yield lambda: sample(runner.model_config.vocab_size, torch.float32)  # rows with extras
    norm, act_fn = modules[TritonRMSNorm], modules[TritonSiluAndMul]
    x = torch.zeros(1, len(norm.weight), dtype=dtype, device=device)
    wide = torch.zeros(1, len(modules[MergedColumnParallelLinear].weight), dtype=dtype, device=device)
    mlp = next(module for module in runner.model.modules() if isinstance(module, Qwen3MLP))
    if isinstance(attention.qkv_proj, FewRowsQKVLinear):
        yield lambda: few_rows_linear(x, attention.qkv_proj.weight)
    if isinstance(mlp, FewRowsQwen3MLP):
        yield lambda: few_rows_linear(x, mlp.gate_up_proj.weight, silu_and_mul=True)
    yield add_up
    yield lambda: norm(x)
    yield lambda: act_fn(wide)
    yield lambda: state.advance(torch.zeros(1, dtype=torch.int64, device=device))
    nothing = np.zeros((0, 0), np.int32)
    step = DecodeInput(1, np.array([-1], np.int32), nothing, nothing, nothing)
    yield lambda: state.apply(torch.from_numpy(step.packet).to(device), step)
