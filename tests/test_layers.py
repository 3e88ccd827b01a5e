"""Each layer against a plain formula, its shards against the whole, and the torch attention backend against a loop."""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import SHAPES, TinyConfig, load_reference, reference_logits

from nanovllm.attention import create_backend, torch_backend
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, get_context, step_context
from nanovllm.utils.loader import load_model
from nanovllm.utils.parallel import TensorParallel


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ranks(size: int) -> list[TensorParallel]:
    return [TensorParallel(rank, size) for rank in range(size)]


class Meeting:
    """Where ranks that are threads add up their tensors."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)


@dataclasses.dataclass(eq=False)
class ThreadParallel(TensorParallel):
    """A rank that is a thread, so that layers can be run split without processes."""

    meeting: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.meeting.parts[self.rank] = x
        self.meeting.barrier.wait()
        total = sum(self.meeting.parts)
        self.meeting.barrier.wait()
        return total


def on_all_ranks(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """Return what ``work`` gives on each rank, all running at once."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadParallel(rank, size, meeting=meeting) for rank in range(size)]))


def load(param: torch.Tensor, *args: Any) -> None:
    param.weight_loader(param, *args)


# Activation, norm, rotary embedding


def test_silu_and_mul_gates_the_second_half_by_the_first() -> None:
    x = randn(5, 3, 14)
    gate, up = x[..., :7].double(), x[..., 7:].double()
    torch.testing.assert_close(SiluAndMul()(x), (gate / (1 + torch.exp(-gate)) * up).float())


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("shape", [(7, 13), (5, 3, 6)])
def test_rms_norm_equals_the_formula(shape: tuple[int, ...], eps: float) -> None:
    norm = RMSNorm(shape[-1], eps)
    norm.weight.copy_(1 + 0.3 * randn(shape[-1], seed=1))
    x, residual = randn(*shape, seed=2), 3 * randn(*shape, seed=3)
    torch.testing.assert_close(norm(x), plain_rms_norm(x, norm.weight, eps).float())
    y, total = norm(x, residual)
    torch.testing.assert_close(y, plain_rms_norm(x + residual, norm.weight, eps).float())
    assert torch.equal(total, x + residual)


def test_rms_norm_in_bfloat16_rounds_once() -> None:
    norm = RMSNorm(64, 1e-6)
    norm.weight.copy_(1 + 0.3 * randn(64, seed=1))
    norm = norm.bfloat16()
    x, residual = (randn(50, 64, seed=seed, dtype=torch.bfloat16) for seed in (2, 3))
    y = norm(x)
    assert y.dtype == torch.bfloat16
    # A result that was rounded once is the nearest bfloat16, but for ties that float32 cannot tell apart.
    assert (y != plain_rms_norm(x, norm.weight, 1e-6).bfloat16()).sum() <= 2
    y, total = norm(x, residual)
    exact = x.double() + residual.double()
    assert torch.equal(total, exact.bfloat16())
    assert (y != plain_rms_norm(exact, norm.weight, 1e-6).bfloat16()).sum() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_neither_changes_nor_returns_its_inputs(dtype: torch.dtype) -> None:
    # In float32 the cast to float32 is no copy: arithmetic in place would spoil the caller's residual.
    norm = RMSNorm(8).to(dtype)
    norm.weight.fill_(2.0)
    x, residual = randn(3, 8, seed=1, dtype=dtype), randn(3, 8, seed=2, dtype=dtype)
    before_x, before_residual = x.clone(), residual.clone()
    results = [norm(x), *norm(x, residual), norm(x[:, :]), norm(residual)]
    assert torch.equal(x, before_x) and torch.equal(residual, before_residual)
    storages = [t.untyped_storage().data_ptr() for t in (x, residual, *results)]
    assert len(set(storages)) == len(storages)
    results[2].zero_()  # the new residual is the caller's own
    assert torch.equal(x, before_x) and torch.equal(residual, before_residual)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10000.0), (6, 300.0), (128, 1e6)])
def test_rotary_embedding_is_the_rotate_half_of_transformers(head_dim: int, theta: float) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    positions = torch.tensor([0, 1, 2, 5, 4095, 17, 17, 1000])
    q, k = randn(8, 3, head_dim, seed=1), randn(8, 2, head_dim, seed=2)
    config = Qwen3Config(head_dim=head_dim, rope_theta=theta, hidden_size=8, num_attention_heads=3)
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions.unsqueeze(0))
    expected = apply_rotary_pos_emb(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin)
    for ours, theirs in zip(RotaryEmbedding(head_dim, 4096, theta)(positions, q, k), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=2e-6, rtol=2e-6)


def test_rotary_embedding_turns_each_pair_by_position_times_frequency() -> None:
    head_dim, theta = 6, 50.0
    positions = torch.tensor([3, 0, 11])
    q = randn(3, 2, head_dim, seed=1)
    rotated, _ = RotaryEmbedding(head_dim, 12, theta)(positions, q, q[:, :1])
    for token, position in enumerate(positions.tolist()):
        for pair in range(head_dim // 2):
            angle = position * theta ** (-2 * pair / head_dim)
            turned = torch.view_as_complex(q[token][:, [pair, pair + 3]]) * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(torch.view_as_complex(rotated[token][:, [pair, pair + 3]]), turned)


def test_rotary_embedding_in_bfloat16_rounds_once() -> None:
    q = randn(40, 2, 32, seed=1, dtype=torch.bfloat16)
    rotary = RotaryEmbedding(32, 40, 10000.0)
    exact, _ = rotary(torch.arange(40), q.float(), q.float())
    rounded, _ = rotary(torch.arange(40), q, q)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16())


# Linear layers and their shards


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_replicated_layer_is_whole_on_every_rank(size: int, bias: bool) -> None:
    weight, b, x = randn(12, 7), randn(12, seed=1), randn(5, 7, seed=2)
    for tp in ranks(size):
        layer = ReplicatedLinear(7, 12, bias, tp)
        load(layer.weight, weight)
        if bias:
            load(layer.bias, b)
        torch.testing.assert_close(layer(x), x @ weight.T + (b if bias else 0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_shards_concatenate_to_the_whole(size: int, bias: bool) -> None:
    weight, b, x = randn(12, 7), randn(12, seed=1), randn(5, 7, seed=2)
    parts = []
    for tp in ranks(size):
        layer = ColumnParallelLinear(7, 12, bias, tp)
        assert layer.weight.shape == (12 // size, 7)
        load(layer.weight, weight)
        if bias:
            load(layer.bias, b)
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, -1), x @ weight.T + (b if bias else 0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_columns_hold_a_rank_s_part_of_each_layer(size: int, bias: bool) -> None:
    sizes = [8, 20, 4]
    weights = [randn(n, 7, seed=n) for n in sizes]
    biases = [randn(n, seed=n + 1) for n in sizes]
    x = randn(5, 7)
    parts = []
    for tp in ranks(size):
        layer = MergedColumnParallelLinear(7, sizes, bias, tp)
        for i in (2, 0, 1):  # in any order
            load(layer.weight, weights[i], i)
            if bias:
                load(layer.bias, biases[i], i)
        parts.append(layer(x).split([n // size for n in sizes], -1))
    for i, part in enumerate(zip(*parts, strict=True)):
        torch.testing.assert_close(torch.cat(part, -1), x @ weights[i].T + (biases[i] if bias else 0))


@pytest.mark.parametrize(
    ("size", "starts", "total"), [(1, (0, 2048, 2560), 3072), (2, (0, 1024, 1280), 1536), (4, (0, 512, 768), 1024)]
)
def test_qkv_rows_of_8_query_and_2_kv_heads_of_256_stand_where_they_should(
    size: int, starts: tuple[int, int, int], total: int
) -> None:
    for tp in ranks(size):
        layer = QKVParallelLinear(1, 256, 8, 2, tp=tp)
        assert layer.weight.shape == (total, 1)
        assert tuple(layer.shard(name).target_start for name in "qkv") == starts
        assert layer.num_heads == 8 // size
        assert layer.num_kv_heads == max(1, 2 // size)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"), [(1, 6, 3), (2, 4, 4), (2, 8, 2), (4, 8, 2), (4, 4, 1), (2, 6, 1), (6, 12, 3)]
)
def test_qkv_shards_are_whole_heads_and_replicate_kv_heads_that_are_too_few(
    size: int, heads: int, kv_heads: int, bias: bool
) -> None:
    head_dim, x = 5, randn(3, 7)
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    weights = {name: randn(n, 7, seed=i) for i, (name, n) in enumerate(rows.items())}
    biases = {name: randn(n, seed=9 + i) for i, (name, n) in enumerate(rows.items())}
    whole = {
        name: (x @ weights[name].T + (biases[name] if bias else 0)).unflatten(-1, (-1, head_dim)) for name in weights
    }
    for tp in ranks(size):
        layer = QKVParallelLinear(7, head_dim, heads, kv_heads, bias, tp)
        for name in "vqk":
            load(layer.weight, weights[name], name)
            if bias:
                load(layer.bias, biases[name], name)
        out = layer(x).unflatten(-1, (-1, head_dim))
        q, k, v = out.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), 1)
        own_queries = range(tp.rank * heads // size, (tp.rank + 1) * heads // size)
        # The KV heads that this rank's queries read, in order and without repetition.
        own_kv = list(dict.fromkeys(query * kv_heads // heads for query in own_queries))
        assert layer.num_kv_heads == len(own_kv)
        torch.testing.assert_close(q, whole["q"][:, list(own_queries)])
        torch.testing.assert_close(k, whole["k"][:, own_kv])
        torch.testing.assert_close(v, whole["v"][:, own_kv])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_partial_sums_add_up_to_the_whole(size: int) -> None:
    weight, x = randn(5, 12), randn(3, 12, seed=1)
    total = torch.zeros(3, 5)
    for tp, part in zip(ranks(size), x.chunk(size, -1), strict=True):
        layer = RowParallelLinear(12, 5, tp=tp)
        assert layer.weight.shape == (5, 12 // size)
        load(layer.weight, weight)
        total += part @ layer.weight.T
    torch.testing.assert_close(total, x @ weight.T)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_row_parallel_bias_is_whole_on_every_rank_and_added_once(size: int) -> None:
    weight, bias, x = randn(5, 12), 10 * randn(5, seed=1), randn(3, 12, seed=2)

    def work(tp: TensorParallel) -> torch.Tensor:
        layer = RowParallelLinear(12, 5, True, tp)
        load(layer.weight, weight)
        load(layer.bias, bias)
        assert torch.equal(layer.bias, bias)
        return layer(x.chunk(size, -1)[tp.rank])

    for out in on_all_ranks(size, work):
        torch.testing.assert_close(out, x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_load_from_a_file_as_from_memory(size: int, tmp_path: Path) -> None:
    tensors = {"w": randn(8, 12), "b": randn(8, seed=1), "e": randn(300, 12, seed=2)}
    save_file(tensors, tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        for tp in ranks(size):
            for make in (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear):
                from_file, from_memory = make(12, 8, True, tp), make(12, 8, True, tp)
                for layer, source in ((from_file, file.get_slice), (from_memory, tensors.__getitem__)):
                    load(layer.weight, source("w"))
                    load(layer.bias, source("b"))
                assert torch.equal(from_file.weight, from_memory.weight)
                assert torch.equal(from_file.bias, from_memory.bias)
            from_file, from_memory = VocabParallelEmbedding(300, 12, tp), VocabParallelEmbedding(300, 12, tp)
            load(from_file.weight, file.get_slice("e"))
            load(from_memory.weight, tensors["e"])
            assert torch.equal(from_file.weight, from_memory.weight)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(size: int) -> None:
    tp = TensorParallel(size - 1, size)
    column = ColumnParallelLinear(6, 8, True, tp)
    merged = MergedColumnParallelLinear(6, [4, 8], tp=tp)
    qkv = QKVParallelLinear(6, 3, 4, 2, tp=tp)
    row = RowParallelLinear(6, 8, True, tp)
    embedding = VocabParallelEmbedding(10, 6, tp)
    cases: list[tuple[LinearBase | VocabParallelEmbedding, str, tuple[Any, ...], list[int], list[int]]] = [
        (column, "weight", (), [7, 6], [8, 6]),
        (column, "weight", (), [8, 5], [8, 6]),
        (column, "bias", (), [16], [8]),
        (merged, "weight", (1,), [4, 6], [8, 6]),
        (qkv, "weight", ("q",), [6, 6], [12, 6]),
        (qkv, "weight", ("v",), [12, 6], [6, 6]),
        (row, "weight", (), [8, 3], [8, 6]),
        (row, "weight", (), [4, 6], [8, 6]),
        (row, "bias", (), [4], [8]),
        (ReplicatedLinear(6, 8, tp=tp), "weight", (), [6, 8], [8, 6]),
        (embedding, "weight", (), [12, 6], [10, 6]),
        (embedding, "weight", (), [10, 6, 1], [10, 6]),
    ]
    for layer, name, shard_id, wrong, right in cases:
        param = getattr(layer, name)
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
            param.weight_loader(param, torch.zeros(wrong), *shard_id)
        assert str(wrong) in str(error.value) and str(right) in str(error.value)


def test_sizes_that_do_not_divide_by_the_ranks_are_refused_by_name() -> None:
    tp = TensorParallel(0, 4)
    with pytest.raises(ValueError, match="output size=6 does not divide by tensor_parallel_size=4"):
        ColumnParallelLinear(3, 6, tp=tp)
    with pytest.raises(ValueError, match="output size=6 does not divide by tensor_parallel_size=4"):
        MergedColumnParallelLinear(3, [6, 2], tp=tp).shard(0)
    with pytest.raises(ValueError, match="input size=6 does not divide by tensor_parallel_size=4"):
        RowParallelLinear(6, 3, tp=tp)
    with pytest.raises(ValueError, match="num_attention_heads=6 does not divide by tensor_parallel_size=4"):
        QKVParallelLinear(3, 2, 6, 2, tp=tp)
    with pytest.raises(ValueError, match="num_key_value_heads=3 neither divides by tensor_parallel_size=4"):
        QKVParallelLinear(3, 2, 12, 3, tp=tp)


# Embedding and head


@pytest.mark.parametrize(("vocab", "size"), [(300, 1), (300, 2), (300, 4), (1100, 2), (1024, 4), (5, 2)])
def test_a_vocabulary_that_does_not_divide_is_padded_with_zero_rows(vocab: int, size: int) -> None:
    weight = randn(vocab, 6)
    held = []
    for tp in ranks(size):
        embedding = VocabParallelEmbedding(vocab, 6, tp)
        embedding.weight.fill_(math.nan)
        load(embedding.weight, weight)
        num_real = embedding.vocab_end - embedding.vocab_start
        assert not embedding.weight[num_real:].any()
        if size > 1:
            assert len(embedding.weight) % 256 == 0  # whole chunks of the sampler
        held.append(embedding.weight[:num_real])
    assert torch.equal(torch.cat(held), weight)


def test_151937_ids_are_split_in_two_at_a_whole_chunk() -> None:
    first, second = (VocabParallelEmbedding(151937, 1, tp) for tp in ranks(2))
    assert (first.vocab_start, first.vocab_end) == (0, 76032)
    assert (second.vocab_start, second.vocab_end) == (76032, 151937)
    assert first.weight.shape == second.weight.shape == (76032, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_split_embedding_adds_up_to_the_whole_and_ids_of_others_give_zeros(size: int) -> None:
    weight, ids = randn(1100, 6), torch.tensor([0, 1099, 511, 512, 767, 768, 3, 3])

    def work(tp: TensorParallel) -> torch.Tensor:
        embedding = VocabParallelEmbedding(1100, 6, tp)
        load(embedding.weight, weight)
        out = embedding(ids)
        if size > 1:
            own = (ids >= embedding.vocab_start) & (ids < embedding.vocab_end)
            assert torch.equal(tp.meeting.parts[tp.rank], weight[ids] * own.unsqueeze(1))
        return out

    for out in on_all_ranks(size, work):
        assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_head_gives_logits_for_the_wanted_rows_only(size: int) -> None:
    weight, x = randn(700, 6), randn(9, 6, seed=1)
    rows = torch.tensor([8, 0, 3])
    parts, all_parts = [], []
    for tp in ranks(size):
        head = ParallelLMHead(700, 6, tp)
        load(head.weight, weight)
        num_real = head.vocab_end - head.vocab_start
        with step_context(Context(logits_indices=rows)):
            parts.append(head(x)[:, :num_real])
        all_parts.append(head(x)[:, :num_real])
    torch.testing.assert_close(torch.cat(parts, -1), x[rows] @ weight.T)
    torch.testing.assert_close(torch.cat(all_parts, -1), x @ weight.T)


@pytest.mark.parametrize("name", ["tied", "bias", "one_kv_head"])
def test_a_model_split_over_ranks_gives_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPES[name], vocab=600)
    folder = shape.save(tmp_path / name)
    config = ModelConfig.from_folder(folder)
    rows = [[5, 599, 256, 3], [511], [7, 512, 255, 17, 80, 31, 6]]
    expected = torch.cat(reference_logits(load_reference(folder), rows))
    lens = torch.tensor([0] + [len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    context = Context(
        slot_mapping=torch.arange(12),
        cu_seqlens_q=lens.cumsum(0).int(),
        cu_seqlens_k=lens.cumsum(0).int(),
        max_seqlen_q=7,
        max_seqlen_k=7,
    )

    def work(tp: TensorParallel) -> torch.Tensor:
        with torch.inference_mode():
            model = Qwen3ForCausalLM(config, 16, tp)
            load_model(model, folder)
            for layer in model.modules():
                if isinstance(layer, Attention):
                    layer.backend = create_backend("torch", "cpu")
                    layer.k_cache, layer.v_cache = torch.empty(2, 3, 4, layer.num_kv_heads, layer.head_dim)
            with step_context(context):
                logits = model.compute_logits(model(torch.tensor([*itertools.chain(*rows)]), positions))
            return logits[:, : model.lm_head.vocab_end - model.lm_head.vocab_start]

    for size in (1, 2, 4):
        if shape.heads % size == 0 and shape.intermediate % size == 0:
            logits = torch.cat(on_all_ranks(size, work), -1)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_the_context_is_reset_after_a_step_and_its_own_in_each_thread() -> None:
    def fail() -> None:
        with step_context(Context(max_seqlen_q=3)):
            assert get_context().max_seqlen_q == 3
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(get_context).result() == Context()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert get_context() == Context()


# Attention


@dataclasses.dataclass
class Ragged:
    """Sequences of different lengths in a shuffled paged cache whose unused slots hold NaN."""

    lens: list[int]
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        draw = functools.partial(torch.randn, generator=generator)
        self.scale = 0.8 * self.head_dim**-0.5  # not what torch would take by itself
        self.q = [draw(n, self.heads, self.head_dim).to(self.dtype) for n in self.lens]
        self.k = [draw(n, self.kv_heads, self.head_dim).to(self.dtype) for n in self.lens]
        self.v = [draw(n, self.kv_heads, self.head_dim).to(self.dtype) for n in self.lens]
        needed = [-(-n // self.block_size) for n in self.lens]
        self.num_blocks = sum(needed) + 3
        order = torch.randperm(self.num_blocks, generator=generator).tolist()
        self.tables = torch.full((len(self.lens), max(needed) + 1), -1, dtype=torch.int32)
        for row, n in zip(self.tables, needed, strict=True):
            row[:n] = torch.tensor([order.pop() for _ in range(n)])
        shape = (self.num_blocks, self.block_size, self.kv_heads, self.head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, math.nan, dtype=self.dtype) for _ in "kv")

    def slots(self, starts: list[int], ends: list[int]) -> list[int]:
        size = self.block_size
        return [
            int(table[position // size]) * size + position % size
            for table, start, end in zip(self.tables, starts, ends, strict=True)
            for position in range(start, end)
        ]

    def store(self, starts: list[int], ends: list[int]) -> torch.Tensor:
        """Store the tokens start..end of each sequence through the backend and return their slots."""
        slots = torch.tensor(self.slots(starts, ends))
        k, v = (self.flat(x, starts, ends) for x in (self.k, self.v))
        create_backend("torch", "cpu").store_kvcache(k, v, self.k_cache, self.v_cache, slots)
        return slots

    @staticmethod
    def flat(x: list[torch.Tensor], starts: list[int], ends: list[int]) -> torch.Tensor:
        return torch.cat([row[a:b] for row, a, b in zip(x, starts, ends, strict=True)])

    def naive(self, row: int, position: int) -> torch.Tensor:
        """Attend from one token to all up to itself, head by head, in float64: [heads, head_dim]."""
        out = torch.empty(self.heads, self.head_dim, dtype=torch.float64)
        for head in range(self.heads):
            kv_head = head * self.kv_heads // self.heads
            k = self.k[row][: position + 1, kv_head].double()
            scores = k @ self.q[row][position, head].double() * self.scale
            weights = torch.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ self.v[row][: position + 1, kv_head].double()
        return out

    def expected(self, starts: list[int], ends: list[int]) -> torch.Tensor:
        tokens = [(i, p) for i, (a, b) in enumerate(zip(starts, ends, strict=True)) for p in range(a, b)]
        return torch.stack([self.naive(i, p) for i, p in tokens])

    def prefill(self, starts: list[int], ends: list[int], *, paged: bool) -> torch.Tensor:
        """Store and attend from the tokens start..end of each sequence."""
        slots = self.store(starts, ends)
        lens = [b - a for a, b in zip(starts, ends, strict=True)]
        context = Context(
            slot_mapping=slots,
            cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).int(),
            cu_seqlens_k=torch.tensor([0, *ends]).cumsum(0).int(),
            max_seqlen_q=max(lens),
            max_seqlen_k=max(ends),
            block_tables=self.tables if paged else None,
        )
        q, k, v = (self.flat(x, starts, ends) for x in (self.q, self.k, self.v))
        backend = create_backend("torch", "cpu")
        return backend.prefill(q, k, v, self.k_cache, self.v_cache, self.scale, context)

    def decode(self) -> torch.Tensor:
        """Attend from the last token of each sequence to all of it, everything being stored."""
        context = Context(context_lens=torch.tensor(self.lens, dtype=torch.int32), block_tables=self.tables)
        q = torch.stack([row[-1] for row in self.q])
        return create_backend("torch", "cpu").decode(q, self.k_cache, self.v_cache, self.scale, context)


RAGGED = [
    Ragged([1], 1, 1, 1, 2),
    Ragged([5, 1, 17, 16, 33], 16, 4, 2, 6, seed=1),
    Ragged([7, 3, 12, 1, 1, 9], 3, 6, 2, 10, seed=2),
    Ragged([40, 2, 23], 1, 8, 1, 4, seed=3),
    Ragged([70, 11, 65], 64, 3, 3, 34, seed=4),
    Ragged([260, 255, 256, 257], 256, 2, 1, 8, seed=5),
]


def fresh(ragged: Ragged, **changes: Any) -> Ragged:
    return dataclasses.replace(ragged, **changes)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("ragged", RAGGED, ids=lambda r: f"block{r.block_size}-{r.heads}q{r.kv_heads}kv{r.head_dim}")
class TestAttention:
    def test_prefill_of_whole_prompts_equals_the_naive_loop(self, ragged: Ragged) -> None:
        zeros = [0] * len(ragged.lens)
        expected = ragged.expected(zeros, ragged.lens)
        assert_close(fresh(ragged).prefill(zeros, ragged.lens, paged=False), expected)
        assert_close(fresh(ragged).prefill(zeros, ragged.lens, paged=True), expected)

    def test_prefill_behind_a_paged_prefix_equals_the_unchunked_run(self, ragged: Ragged) -> None:
        data = fresh(ragged)
        zeros = [0] * len(data.lens)
        cuts = sorted({0, max(data.lens) // 4, max(data.lens) // 2, max(data.lens)})
        pieces: list[list[torch.Tensor]] = [[] for _ in data.lens]
        for start, end in itertools.pairwise(cuts):
            # Rows that are shorter than the cut have nothing left to compute: they leave the step.
            rows = [i for i, n in enumerate(data.lens) if n > start]
            part = fresh(data)
            for name in ("q", "k", "v"):
                setattr(part, name, [getattr(data, name)[i] for i in rows])
            part.tables, part.k_cache, part.v_cache = data.tables[rows], data.k_cache, data.v_cache
            ends = [min(end, data.lens[i]) for i in rows]
            out = part.prefill([start] * len(rows), ends, paged=start > 0)
            for i, piece in zip(rows, out.split([b - start for b in ends]), strict=True):
                pieces[i].append(piece)
        assert_close(torch.cat([torch.cat(row) for row in pieces]), ragged.expected(zeros, ragged.lens))

    def test_prefill_mixes_rows_with_and_without_a_prefix(self, ragged: Ragged) -> None:
        data = fresh(ragged)
        starts = [n // 2 if i % 2 == 0 else 0 for i, n in enumerate(data.lens)]
        held = [i for i, start in enumerate(starts) if start]
        for i in held:
            others = [0] * len(starts)
            others[i] = starts[i]
            data.store([0] * len(starts), others)
        assert_close(data.prefill(starts, data.lens, paged=True), data.expected(starts, data.lens))

    @pytest.mark.parametrize("limit", [1 << 24, 1500, 1])
    def test_decode_equals_the_naive_loop_in_one_group_or_many(
        self, ragged: Ragged, limit: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch_backend, "_MAX_GATHERED_ELEMENTS", limit)
        data = fresh(ragged)
        data.store([0] * len(data.lens), data.lens)
        assert_close(data.decode(), data.expected([n - 1 for n in data.lens], data.lens))

    def test_storing_touches_no_slot_but_its_own(self, ragged: Ragged) -> None:
        data = fresh(ragged)
        slots = data.store([0] * len(data.lens), data.lens)
        for cache, rows in ((data.k_cache, data.k), (data.v_cache, data.v)):
            flat = cache.flatten(0, 1)
            assert torch.equal(flat[slots], torch.cat(rows))
            flat[slots] = math.nan
            assert flat.isnan().all()


def test_bfloat16_attention_is_the_exact_result_up_to_rounding() -> None:
    data = fresh(RAGGED[2], dtype=torch.bfloat16)
    zeros = [0] * len(data.lens)
    out = data.prefill(zeros, data.lens, paged=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), data.expected(zeros, data.lens), atol=0.02, rtol=0.02)
    decoded = data.decode()
    assert decoded.dtype == torch.bfloat16
    expected = data.expected([n - 1 for n in data.lens], data.lens)
    torch.testing.assert_close(decoded.double(), expected, atol=0.02, rtol=0.02)


def test_slot_minus_one_writes_nothing() -> None:
    backend = create_backend("torch", "cpu")
    k, v = randn(4, 2, 3, seed=1), randn(4, 2, 3, seed=2)
    caches = torch.full((2, 5, 4, 2, 3), math.nan)
    backend.store_kvcache(k, v, caches[0], caches[1], torch.tensor([-1, 19, -1, 2]))
    for cache, rows in zip(caches, (k, v), strict=True):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[19], rows[1]) and torch.equal(flat[2], rows[3])
        assert flat.isnan().flatten(1).all(1).sum() == 18
    before = caches.clone()
    backend.store_kvcache(k, v, caches[0], caches[1], torch.full((4,), -1))
    assert torch.equal(caches.nan_to_num(7.0), before.nan_to_num(7.0))


def test_the_attention_layer_attends_by_the_context() -> None:
    data = fresh(RAGGED[2])
    layer = Attention(data.heads, data.head_dim, data.scale, data.kv_heads)
    layer.backend = create_backend("torch", "cpu")
    layer.k_cache, layer.v_cache = data.k_cache, data.v_cache
    zeros, all_but_last = [0] * len(data.lens), [max(1, n - 1) for n in data.lens]

    def step(starts: list[int], ends: list[int], context: Context) -> torch.Tensor:
        slots = data.store(starts, ends)
        with step_context(dataclasses.replace(context, slot_mapping=slots)):
            return layer(*(data.flat(x, starts, ends) for x in (data.q, data.k, data.v)))

    cu_seqlens = torch.tensor([0, *all_but_last]).cumsum(0).int()
    prefill = Context(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=12, max_seqlen_k=12)
    assert_close(step(zeros, all_but_last, prefill), data.expected(zeros, all_but_last))
    last = [n - 1 for n in data.lens]
    decode = Context(context_lens=torch.tensor(data.lens, dtype=torch.int32), block_tables=data.tables)
    assert_close(step(last, data.lens, decode), data.expected(last, data.lens))


def test_a_backend_that_does_not_run_on_a_cpu_is_refused_by_name() -> None:
    for name in ("flash_attn", "triton"):
        with pytest.raises(ValueError, match=f"attention_backend='{name}'.*'cpu'"):
            create_backend(name, "cpu")
    assert create_backend("auto", "cpu").name == create_backend("torch", "cpu").name == "torch"


def test_shapes_of_the_test_models_cover_what_the_layers_distinguish() -> None:
    shapes: list[TinyConfig] = list(SHAPES.values())
    assert {shape.heads // shape.kv_heads for shape in shapes} >= {1, 2, 4}
    assert {shape.tied for shape in shapes} == {shape.bias for shape in shapes} == {False, True}
    assert any(shape.head_dim * shape.heads != shape.hidden for shape in shapes)
    assert any(shape.vocab > 256 for shape in shapes) and any(shape.vocab % 2 for shape in shapes)
