"""Each Triton kernel against its torch twin: on a GPU compiled, elsewhere in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend, num_splits
from nanovllm.kernels import pointwise, small_batch
from nanovllm.kernels.pointwise import TritonQwen3Attention, TritonRMSNorm, TritonSiluAndMul
from nanovllm.kernels.sampler import sample
from nanovllm.kernels.store_kvcache import store_kvcache
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import Sampler, SamplingInputs
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from nanovllm.utils.context import Context, step_context
from nanovllm.utils.parallel import SINGLE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes bfloat16 dot products wrongly, so there is no bfloat16 attention without a GPU.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Cache:
    """A paged cache of random sequences in shuffled blocks; every other slot is poisoned with NaN."""

    def __init__(self, lens, num_kv_heads, head_dim, block_size, dtype):
        width = -(-max(lens) // block_size) + 1
        num_blocks = sum(-(-length // block_size) for length in lens) + 5
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.k = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
        self.v = self.k.clone()
        self.block_tables = torch.full((len(lens), width), -1, dtype=torch.int32, device=DEVICE)
        free = torch.randperm(num_blocks).tolist()
        for row, length in enumerate(lens):
            blocks = [free.pop() for _ in range(-(-length // block_size))]
            self.block_tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            positions = torch.arange(length)
            slots = torch.tensor(blocks)[positions // block_size] * block_size + positions % block_size
            for cache in (self.k, self.v):
                values = torch.randn(length, num_kv_heads, head_dim)
                cache.view(-1, num_kv_heads, head_dim)[slots.to(DEVICE)] = values.to(DEVICE, dtype)


def random_queries(num_tokens, num_heads, head_dim, dtype):
    """Queries as a view of a wider tensor, as the fused projection gives them."""
    wide = torch.randn(num_tokens, num_heads + 3, head_dim).to(DEVICE, dtype)
    return wide[:, :num_heads]


def cumulative(lens):
    return torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()


def assert_close(actual, expected, dtype):
    """Both finite, and apart by no more than the dtype's rounding explains."""
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


SHAPES = [(4, 2, 64), (2, 2, 20), (6, 2, 80), (3, 1, 96), (8, 2, 128)]  # query heads, KV heads, head_dim
ATTENTION_CASES = [(*shape, block_size, dtype) for shape in SHAPES for block_size in (16, 64, 256) for dtype in DTYPES]
if DEVICE == "cpu":  # the interpreter takes seconds a case
    ATTENTION_CASES = [
        (2, 2, 20, 16, torch.float32),
        (6, 2, 80, 64, torch.float32),
        (4, 2, 64, 256, torch.float16),
        (3, 1, 96, 16, torch.float16),
        (8, 2, 128, 64, torch.float16),
    ]
attention_cases = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"), ATTENTION_CASES
)


@attention_cases
def test_paged_prefill_equals_its_twin(num_heads, num_kv_heads, head_dim, block_size, dtype):
    lens_k, lens_q = [5, 70, 1, 133, 64], [5, 30, 1, 2, 64]
    cache = Cache(lens_k, num_kv_heads, head_dim, block_size, dtype)
    q = random_queries(sum(lens_q), num_heads, head_dim, dtype)
    context = Context(
        cu_seqlens_q=cumulative(lens_q),
        cu_seqlens_k=cumulative(lens_k),
        max_seqlen_q=max(lens_q),
        max_seqlen_k=max(lens_k),
        block_tables=cache.block_tables,
    )
    actual = TritonBackend().prefill(q, q, q, cache.k, cache.v, 0.3, context)
    expected = TorchBackend().prefill(q.float(), q, q, cache.k.float(), cache.v.float(), 0.3, context)
    assert_close(actual, expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("lens_q", [[4096], [100, 3000, 1]])
def test_long_prefill_equals_its_twin(lens_q):
    lens_k = [length + 700 for length in lens_q]
    cache = Cache(lens_k, 2, 128, 64, torch.bfloat16)
    q = random_queries(sum(lens_q), 4, 128, torch.bfloat16)
    context = Context(
        cu_seqlens_q=cumulative(lens_q),
        cu_seqlens_k=cumulative(lens_k),
        max_seqlen_q=max(lens_q),
        max_seqlen_k=max(lens_k),
        block_tables=cache.block_tables,
    )
    actual = TritonBackend().prefill(q, q, q, cache.k, cache.v, 0.088, context)
    expected = TorchBackend().prefill(q.float(), q, q, cache.k.float(), cache.v.float(), 0.088, context)
    assert_close(actual, expected, torch.bfloat16)


@attention_cases
def test_paged_decode_equals_its_twin_and_empty_rows_give_zeros(num_heads, num_kv_heads, head_dim, block_size, dtype):
    lens = [1, 70, 64, 133]
    cache = Cache(lens, num_kv_heads, head_dim, block_size, dtype)
    empty = torch.full_like(cache.block_tables[:1], -1)
    q = random_queries(5, num_heads, head_dim, dtype)
    context = Context(
        context_lens=torch.tensor([*lens, 0], dtype=torch.int32, device=DEVICE),
        block_tables=torch.cat((cache.block_tables, empty)),
    )
    actual = TritonBackend().decode(q, cache.k, cache.v, 0.3, context)
    context = Context(context_lens=context.context_lens[:4], block_tables=cache.block_tables)
    expected = TorchBackend().decode(q[:4].float(), cache.k.float(), cache.v.float(), 0.3, context)
    assert_close(actual[:4], expected, dtype)
    assert (actual[4] == 0).all()


def test_decode_without_splits_equals_its_twin():
    lens = [(7 * i) % 40 + 1 for i in range(150)]
    assert num_splits(len(lens), 2) == 1
    cache = Cache(lens, 2, 16, 16, torch.float32)
    q = random_queries(len(lens), 4, 16, torch.float32)
    context = Context(
        context_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE), block_tables=cache.block_tables
    )
    backend = TritonBackend()
    assert_close(
        backend.decode(q, cache.k, cache.v, 0.3, context),
        TorchBackend().decode(q, cache.k, cache.v, 0.3, context),
        torch.float32,
    )


def test_the_number_of_splits_follows_from_the_batch_size():
    assert [num_splits(rows, 8) for rows in (1, 2, 4, 8, 16, 32, 33, 256)] == [32, 16, 8, 4, 2, 1, 1, 1]
    assert num_splits(1, 1) == 64


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (3, 20), (8, 128)])
def test_kv_goes_to_its_slots_and_slot_minus_one_writes_nothing(num_kv_heads, head_dim, slot_dtype):
    k = torch.randn(6, num_kv_heads + 2, head_dim, device=DEVICE)[:, :num_kv_heads]
    v = torch.randn(6, num_kv_heads, head_dim, device=DEVICE)
    slots = torch.tensor([3, -1, 47, 5, -1, 0], device=DEVICE)
    caches = [torch.full((3, 16, num_kv_heads, head_dim), float("nan"), device=DEVICE) for _ in range(4)]
    store_kvcache(k, v, caches[0], caches[1], slots.to(slot_dtype))
    TorchBackend().store_kvcache(k, v, caches[2], caches[3], slots)
    torch.testing.assert_close(caches[0], caches[2], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(caches[1], caches[3], rtol=0, atol=0, equal_nan=True)
    written = ~caches[0].view(48, -1).isnan().any(1)
    assert written.nonzero().flatten().tolist() == [0, 3, 5, 47]


@pytest.mark.gpu
def test_kv_goes_to_slots_behind_two_to_the_31_elements():
    cache = torch.zeros(2**21 + 8, 16, 1, 80, dtype=torch.float16, device=DEVICE)  # 2.7e9 elements
    k = torch.randn(1, 1, 80, dtype=torch.float16, device=DEVICE)
    slot = cache.size(0) * 16 - 1
    assert slot * 80 > 2**31
    store_kvcache(k, k, cache, cache, torch.tensor([slot], device=DEVICE))
    assert torch.equal(cache.view(-1, 1, 80)[slot], k[0])
    assert cache[0].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 50, 1024, 2560])
def test_rms_norm_equals_its_twin_and_leaves_its_inputs(size, dtype):
    norm = RMSNorm(size).to(DEVICE)
    kernel = TritonRMSNorm(size).to(DEVICE)
    norm.weight.data = torch.randn(size).to(DEVICE, dtype)
    kernel.weight = norm.weight
    x, residual = (torch.randn(7, size).to(DEVICE, dtype) for _ in range(2))
    before = x.clone(), residual.clone()
    assert_close(kernel(x), norm.rms_forward(x), dtype)
    for actual, expected in zip(kernel(x, residual), norm.add_rms_forward(x, residual), strict=True):
        assert_close(actual, expected, dtype)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 130, 3072])
def test_silu_and_mul_equals_its_twin(size, dtype):
    x = torch.randn(5, 2 * size).to(DEVICE, dtype)
    assert_close(TritonSiluAndMul()(x), SiluAndMul()(x), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_norm_rotation_and_store_in_one_kernel_equal_their_twins(num_heads, num_kv_heads, head_dim, dtype):
    config = ModelConfig("Qwen3ForCausalLM", 100, 48, 64, 1, num_heads, num_kv_heads, head_dim)
    attention = Qwen3Attention(config, RotaryEmbedding(head_dim, 64, 10000.0), SINGLE).to(DEVICE)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data = torch.randn(head_dim).to(DEVICE, dtype)
    attention.attn.backend = TorchBackend()
    qkv = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim).to(DEVICE, dtype)
    positions = torch.tensor([0, 5, 63, 1, 2, 9], device=DEVICE)
    results = []
    for prepare in (Qwen3Attention.prepare_qkv, TritonQwen3Attention.prepare_qkv):
        cache = torch.full((2, 4, 16, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
        attention.attn.k_cache, attention.attn.v_cache = cache
        with step_context(Context(slot_mapping=torch.tensor([3, -1, 40, 0, 63, -1], device=DEVICE))):
            results.append((*prepare(attention, positions, qkv.clone()), cache))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(
            actual.float(), expected.float(), atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype], equal_nan=True
        )
    assert torch.equal(results[0][3].isnan(), results[1][3].isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [11, 256, 700, 5000])
def test_the_two_level_draw_equals_its_twin_row_by_row(vocab_size, dtype):
    num_rows = 60
    logits = (torch.randn(num_rows, vocab_size) * 3).to(DEVICE, dtype)
    logits[:, 5] = float("-inf")
    temperatures = (torch.rand(num_rows) + 0.3).to(DEVICE)
    temperatures[::5] = 0
    keys = torch.randint(0, 2**32, (num_rows, 2))
    inputs = SamplingInputs(
        temperatures=temperatures,
        keys=keys.to(DEVICE),
        positions=torch.arange(num_rows, device=DEVICE),
        sample_indices=torch.arange(num_rows, device=DEVICE) % 3,
    )
    tokens, scores = sample(logits, inputs)
    expected, expected_scores = Sampler()(logits, inputs)
    assert (tokens == expected).float().mean() >= 0.98  # equal but for draws within rounding
    assert torch.equal(tokens[::5], logits[::5].float().argmax(1))
    torch.testing.assert_close(scores, expected_scores, atol=1e-4, rtol=1e-4)
    narrow = SamplingInputs(  # as a captured step has them: the same bits in 32-bit words
        temperatures, keys.to(torch.int64).to(torch.uint32).view(torch.int32).to(DEVICE), inputs.positions.int(),
        inputs.sample_indices.int()
    )  # fmt: skip
    assert torch.equal(sample(logits, narrow)[0], tokens)


def test_the_stride_of_one_row_makes_no_kernel_of_its_own(monkeypatch):
    """A row alone keeps the stride of what it was cut from, which the compiler would specialise for."""
    strides = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: strides.extend(arg for arg in args if isinstance(arg, int) and arg > 1000)

    monkeypatch.setattr("nanovllm.kernels.sampler._chunk_kernel", Recorder())
    monkeypatch.setattr("nanovllm.kernels.sampler._draw_kernel", Recorder())
    for num_rows in (1, 2):
        logits = torch.zeros(num_rows, 5120, device=DEVICE)[:, :5003]
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
        sample(logits, SamplingInputs(zeros.float(), zeros.unsqueeze(1).repeat(1, 2), zeros, zeros))
    assert strides == [5003, 5003, 5120, 5120]


@pytest.mark.parametrize("first_chunk", [1, 2, 7, 297])
def test_a_part_of_the_vocabulary_is_drawn_from_as_the_twin_does(first_chunk):
    num_rows = 40
    logits = (torch.randn(num_rows, 1024) * 2).to(DEVICE)
    logits[:, 700:] = float("-inf")  # padding
    logits[::8] = float("-inf")  # a rank may have nothing but padding
    inputs = SamplingInputs(
        temperatures=torch.where(torch.arange(num_rows) % 3 == 0, 0.0, 0.8).to(DEVICE),
        keys=torch.randint(0, 2**32, (num_rows, 2)).to(DEVICE),
        positions=torch.arange(num_rows, device=DEVICE),
        sample_indices=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
    )
    tokens, scores = sample(logits, inputs, first_chunk * 256)
    expected, expected_scores = Sampler()(logits, inputs, first_chunk * 256)
    torch.testing.assert_close(scores, expected_scores, atol=1e-4, rtol=1e-4)
    is_real = torch.arange(num_rows) % 8 > 0
    assert torch.isinf(scores[::8]).all() and torch.isfinite(scores[is_real]).all()
    assert (tokens == expected)[is_real].float().mean() >= 0.97


@pytest.mark.gpu
def test_draws_on_the_card_follow_the_distribution_and_never_take_the_impossible():
    vocab_size, num_rows, rounds = 151_936, 256, 400
    logits = torch.full((vocab_size,), float("-inf"), device=DEVICE)
    likely = torch.randperm(vocab_size, device=DEVICE)[:40]
    logits[likely] = torch.randn(40, device=DEVICE)
    counts = torch.zeros(vocab_size, device=DEVICE)
    rows = logits.expand(num_rows, -1).contiguous()
    for i in range(rounds):
        inputs = SamplingInputs(
            temperatures=torch.full((num_rows,), 0.8, device=DEVICE),
            keys=torch.randint(0, 2**32, (num_rows, 2), device=DEVICE),
            positions=torch.full((num_rows,), i, device=DEVICE),
            sample_indices=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        )
        counts.index_add_(0, sample(rows, inputs)[0], torch.ones(num_rows, device=DEVICE))
    assert counts[logits == float("-inf")].sum() == 0
    expected = (logits / 0.8).softmax(0)[likely] * num_rows * rounds
    chi_square = ((counts[likely] - expected) ** 2 / expected).sum().item()
    assert chi_square < 39 + 4.5 * (2 * 39) ** 0.5  # 39 degrees of freedom


FEW_ROWS_DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float16]


@pytest.mark.parametrize("dtype", FEW_ROWS_DTYPES)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 64, 128), (5, 192, 256), (16, 64, 1024), (16, 6208, 128)])
def test_products_of_few_rows_equal_plain_ones(num_rows, n, k, dtype):
    wide = torch.randn(num_rows + 3, k).to(DEVICE, dtype)  # rows behind the last one are never read
    wide[num_rows:] = float("nan")
    x, weight = wide[:num_rows], (torch.randn(n, k) / k**0.5).to(DEVICE, dtype)
    assert small_batch.suits(weight)
    expected = x.float() @ weight.float().T
    assert_close(small_batch.few_rows_linear(x, weight), expected, dtype)
    parts = small_batch.few_rows_linear(x, weight, in_parts=True)
    assert parts.dtype == torch.float32 and parts.shape[1:] == (num_rows, n)
    assert (len(parts) > 1) == (k >= 256)
    torch.testing.assert_close(parts.sum(0), expected, atol=1e-4, rtol=1e-4)
    rounded = expected.to(dtype)
    both = SiluAndMul()(rounded)
    assert_close(small_batch.few_rows_linear(x, weight, silu_and_mul=True), both, dtype)


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_the_norm_adds_up_parts_of_its_input(num_parts):
    dtype = FEW_ROWS_DTYPES[0]
    plain, fast = RMSNorm(300).to(DEVICE, dtype), TritonRMSNorm(300).to(DEVICE, dtype)
    plain.weight.normal_()
    fast.weight.copy_(plain.weight)
    parts = torch.randn(num_parts, 7, 300, device=DEVICE)
    residual = torch.randn(7, 300).to(DEVICE, dtype)
    normed, total = fast(parts, residual)
    expected_normed, expected_total = plain(parts.sum(0), residual)
    assert normed.dtype == total.dtype == dtype
    assert_close(normed, expected_normed, dtype)
    assert_close(total, expected_total, dtype)


@pytest.mark.parametrize("num_rows", [1, 16, 17])
def test_a_layer_of_few_rows_equals_its_twin(num_rows):
    """Also where a batch is a row too large for the kernels."""
    dtype = FEW_ROWS_DTYPES[0]
    config = ModelConfig("Qwen3ForCausalLM", 100, 256, 384, 1, 4, 2, 64)
    rotary = RotaryEmbedding(64, 50, 1e4).to(DEVICE)
    layers = [Qwen3DecoderLayer(config, rotary, SINGLE).to(DEVICE, dtype) for _ in range(2)]
    for plain, fast in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        plain.normal_(0, 0.05)
        fast.copy_(plain)
    pointwise.install_kernels(layers[1])
    small_batch.install_kernels(layers[1])
    assert type(layers[1].mlp) is small_batch.FewRowsQwen3MLP
    assert type(layers[1].mlp.down_proj) is type(layers[1].self_attn.o_proj) is small_batch.FewRowsRowLinear
    x, residual = (torch.randn(num_rows, 256).to(DEVICE, dtype) for _ in range(2))
    context = Context(
        slot_mapping=torch.arange(num_rows, device=DEVICE),
        context_lens=torch.ones(num_rows, dtype=torch.int32, device=DEVICE),
        block_tables=torch.arange(num_rows, dtype=torch.int32, device=DEVICE).unsqueeze(1),
    )
    results = []
    for layer in layers:
        layer.self_attn.attn.k_cache, layer.self_attn.attn.v_cache = (
            torch.zeros(num_rows, 1, 2, 64, dtype=dtype, device=DEVICE) for _ in range(2)
        )
        layer.self_attn.attn.backend = TorchBackend()
        with step_context(context):
            hidden, total = layer(torch.arange(num_rows, device=DEVICE), x.clone(), residual.clone())
        results.append((hidden.float().sum(0) if hidden.dim() == 3 else hidden, total))
    assert (hidden.dim() == 3) == (num_rows <= 16)
    assert_close(results[1][0], results[0][0], dtype)
    assert_close(results[1][1], results[0][1], dtype)
