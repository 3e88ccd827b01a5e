"""The sampler's two-level draw in two kernels. Twin and explanation: `nanovllm/layers/sampler.py`.

The first reads the logits once and leaves each chunk's maximum and mass; the second, a program a row, draws a chunk and
then a token in it. Greedy rows take the same way, with maxima in place of masses and without noise.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.sampler import CHUNK_SIZE, SamplingInputs

_CHUNKS_PER_PROGRAM = 8


@triton.jit
def _philox_gumbel(ids, level, position, sample_index, key_low, key_high):
    """Return Gumbel noise for ids; four ids share one call of Philox 4x32-10 and take a word each."""
    c0 = (ids // 4).to(tl.uint32)
    c1 = tl.zeros_like(c0) + level
    c2 = tl.zeros_like(c0) + position
    c3 = tl.zeros_like(c0) + sample_index
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        low0, high0 = c0 * 0xD2511F53, tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        low1, high1 = c2 * 0xCD9E8D57, tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    word = ids % 4
    bits = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    # v is kept below 1, as in the twin; near 0, 1 - v would lose v's digits: a series takes over.
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    exponential = tl.where(v < 0.0078125, v * (1.0 + v * (0.5 + v * (0.33333334 + v * 0.25))), -tl.log(1.0 - v))
    return -tl.log(exponential)


@triton.jit
def _chunk_kernel(logits, temperatures, maxima, masses, num_chunks, logits_stride, VOCAB: tl.constexpr,
                  CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(1)
    chunks = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    x = x / tl.where(temperature <= 1e-10, 1.0, temperature)
    top = tl.max(x, 1)
    mass = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    at = row * num_chunks + chunks
    tl.store(maxima + at, top, mask=chunks < num_chunks)
    tl.store(masses + at, mass, mask=chunks < num_chunks)


@triton.jit(do_not_specialize=["first_chunk"])
def _draw_kernel(logits, temperatures, keys, positions, sample_indices, maxima, masses, tokens, scores, num_chunks,
                 logits_stride, first_chunk, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
                 PAD_CHUNKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    is_greedy = temperature <= 1e-10
    key_low = tl.load(keys + 2 * row).to(tl.uint32)
    key_high = tl.load(keys + 2 * row + 1).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32)
    sample_index = tl.load(sample_indices + row).to(tl.uint32)
    chunks = tl.arange(0, PAD_CHUNKS)
    top = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    mass = tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=1.0)
    noise = _philox_gumbel(first_chunk + chunks, 0, position, sample_index, key_low, key_high)
    score, chunk = tl.max(tl.where(is_greedy, top, top + tl.log(mass) + noise), 0, return_indices=True)
    tl.store(scores + row, score)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    x = x / tl.where(is_greedy, 1.0, temperature)
    first_id = first_chunk * CHUNK
    noise = _philox_gumbel(first_id + ids, 1, position, sample_index, key_low, key_high)
    token = first_id + chunk * CHUNK + tl.argmax(tl.where(is_greedy, x, x + noise), 0)
    tl.store(tokens + row, token)


def sample(logits: torch.Tensor, inputs: SamplingInputs, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token a row; see `nanovllm.layers.sampler.Sampler`.

    Args:
        logits: [num_rows, vocabulary] or some chunks of it, any float type; rows contiguous.
        inputs: The rows' temperatures and noise streams; keys may be int32 with the bits of the halves.
        first_id: The first column's token, a multiple of `CHUNK_SIZE`.

    Returns:
        [num_rows] int64 token ids, and [num_rows] float32 scores to compare with those of other chunks.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab_size, CHUNK_SIZE)
    # Not halves of one tensor: where a half begins depends on the rows, and each alignment is a kernel of its own.
    maxima, masses = (torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device) for _ in range(2))
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    # That of one row may be anything, and each kind of stride is a kernel of its own.
    stride = logits.stride(0) if num_rows > 1 else vocab_size
    _chunk_kernel[(triton.cdiv(num_chunks, _CHUNKS_PER_PROGRAM), num_rows)](
        logits, inputs.temperatures, maxima, masses, num_chunks, stride, VOCAB=vocab_size,
        CHUNK=CHUNK_SIZE, CHUNKS=_CHUNKS_PER_PROGRAM, num_warps=8)  # fmt: skip
    assert inputs.keys.is_contiguous()
    _draw_kernel[(num_rows,)](
        logits, inputs.temperatures, inputs.keys, inputs.positions,
        inputs.sample_indices, maxima, masses, tokens, scores, num_chunks, stride,
        first_id // CHUNK_SIZE, VOCAB=vocab_size, CHUNK=CHUNK_SIZE, PAD_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=4)  # fmt: skip
    return tokens, scores
