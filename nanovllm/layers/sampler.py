"""Exact sampling, with noise that depends on the request alone.

A draw from softmax(x) is the argmax of x plus Gumbel noise. Done in two levels it needs few random numbers: first a
chunk of the vocabulary is drawn by the chunks' total masses, then a token within it. That is the same distribution,
since P(token) = P(chunk) * P(token | chunk).

The noise comes from a counter-based generator (Philox 4x32 with 10 rounds: Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). Its key is the request's; its counter is made of output position, sample index, level and
id. Batch row, neighbours, step and preemption do not enter, so they change nothing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.sampling_params import GREEDY_TEMPERATURE

CHUNK_SIZE = 256  # vocabulary ids a chunk; part of the noise scheme, so a change of it changes every seeded draw

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_CHUNK_LEVEL, _TOKEN_LEVEL = 0, 1


class SamplingInputs(NamedTuple):
    """One row for each token to sample.

    Attributes:
        temperatures: [num_rows] float32; at or under 1e-10 the row is greedy.
        keys: [num_rows, 2] int64, low and high 32 bits of each request's key.
        positions: [num_rows] int64, how many tokens of the completion come before.
        sample_indices: [num_rows] int64, which of a request's samples this is.
    """

    temperatures: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    sample_indices: torch.Tensor


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return four words of random bits for each counter.

    Args:
        counter: Four int64 tensors that broadcast together, each holding 32-bit values.
        key: Two such tensors.

    Returns:
        Four int64 tensors of uniform values in 0..2**32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]  # wraps; the low 64 bits are right
        c0, c1, c2, c3 = (p1 >> 32 & _MASK32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32 & _MASK32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = k0 + _PHILOX_WEYL[0] & _MASK32, k1 + _PHILOX_WEYL[1] & _MASK32
    return c0, c1, c2, c3


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Map 32 random bits to standard Gumbel noise in float32.

    The uniform v = (bits + 0.5) / 2**32 would round to 1.0 at the top and is kept below it: noise of -inf would make a
    possible token no better than an impossible one, as +inf, from the usual -log(-log(v)), would make it no worse.
    """
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def gumbel_noise(inputs: SamplingInputs, level: int, first_ids: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Return noise for ``num_ids`` consecutive ids a row.

    Args:
        inputs: Names the rows' noise streams.
        level: 0 for chunks, 1 for tokens.
        first_ids: [num_rows] int64, first id of each row, a multiple of 4.
        num_ids: Ids a row.

    Returns:
        [num_rows, num_ids] float32.
    """
    groups = first_ids.unsqueeze(1) // 4 + torch.arange(-(-num_ids // 4), device=first_ids.device)  # 4 ids a call
    counter = (
        groups,
        torch.full_like(groups, level),
        inputs.positions.unsqueeze(1).expand_as(groups),
        inputs.sample_indices.unsqueeze(1).expand_as(groups),
    )
    low, high = inputs.keys.unsqueeze(1).unbind(-1)
    words = philox(counter, (low, high))
    return gumbel_from_bits(torch.stack(words, dim=-1).flatten(1)[:, :num_ids])


def sample_two_level(
    logits: torch.Tensor, inputs: SamplingInputs, first_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row from softmax(logits / temperature).

    Args:
        logits: [num_rows, vocabulary] float32, or some chunks of it; -inf excludes a token.
        inputs: The rows' temperatures, all above 1e-10, and noise streams.
        first_id: The first column's token, a multiple of `CHUNK_SIZE`.

    Returns:
        [num_rows] int64 token ids, and [num_rows] float32 scores of their chunks: of several parts of a vocabulary, the
        one with the highest score has the token that is drawn from the whole.
    """
    scaled = logits / inputs.temperatures.unsqueeze(1)
    padding = -scaled.size(1) % CHUNK_SIZE
    chunks = F.pad(scaled, (0, padding), value=float("-inf")).unflatten(1, (-1, CHUNK_SIZE))
    masses = chunks.logsumexp(dim=-1)  # [num_rows, num_chunks]
    first_chunk = first_id // CHUNK_SIZE
    skip = first_chunk % 4
    zeros = torch.zeros_like(inputs.positions)
    noise = gumbel_noise(inputs, _CHUNK_LEVEL, zeros + first_chunk - skip, skip + masses.size(1))[:, skip:]
    scores, chunk_ids = (masses + noise).max(dim=-1)
    first_ids = (first_chunk + chunk_ids) * CHUNK_SIZE
    candidates = chunks[torch.arange(len(chunk_ids), device=logits.device), chunk_ids]  # [num_rows, CHUNK_SIZE]
    noise = gumbel_noise(inputs, _TOKEN_LEVEL, first_ids, CHUNK_SIZE)
    return first_ids + (candidates + noise).argmax(dim=-1), scores


class Sampler(nn.Module):
    """Chooses one token a row; greedy and drawn rows mix freely."""

    def forward(
        self, logits: torch.Tensor, inputs: SamplingInputs, first_id: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map logits [num_rows, vocabulary] to tokens and scores as `sample_two_level` does; greedy: the largest."""
        scores, greedy = logits.max(dim=-1)
        scores, greedy = scores.float(), greedy + first_id
        is_greedy = inputs.temperatures <= GREEDY_TEMPERATURE
        if bool(is_greedy.all()):
            return greedy, scores
        safe = inputs._replace(temperatures=torch.where(is_greedy, 1.0, inputs.temperatures))
        drawn, drawn_scores = sample_two_level(logits.float(), safe, first_id)
        return torch.where(is_greedy, greedy, drawn), torch.where(is_greedy, scores, drawn_scores)
