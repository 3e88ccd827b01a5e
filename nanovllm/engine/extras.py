"""From sequences to the flat tensors of `LogitsExtras`, once a step and only for those that ask for extras."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import ArrayLike

from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logits_processors import LogitsExtras


def build_extras(
    seqs: SequenceOf[Sequence],
    end_token_ids: Collection[int],
    vocab_size: int,
    upload: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy,
) -> LogitsExtras | None:
    """Return the extras of a step's rows, or None if no row has any.

    Args:
        seqs: The sequence of each row of the logits.
        end_token_ids: The tokens that `min_tokens` holds back.
        vocab_size: Number of logits a row.
        upload: Brings an array to the device, without waiting.
    """
    if not any(seq.sampling_params.has_extras for seq in seqs):
        return None
    rows = [(row, seq, seq.sampling_params) for row, seq in enumerate(seqs)]
    allowed = [(row, p.allowed_token_ids) for row, _, p in rows if p.allowed_token_ids]
    bias = [(row, i, v) for row, _, p in rows if p.logit_bias for i, v in p.logit_bias.items()]
    for row, seq, p in rows:
        if seq.num_completion_tokens < p.min_tokens:
            ends = set(p.stop_token_ids or ()) | (set() if p.ignore_eos else set(end_token_ids))
            bias += [(row, token_id, float("-inf")) for token_id in ends]
    penalized = [(row, seq, p) for row, seq, p in rows if p.has_penalties]
    seen_ids, seen_counts = _seen([seq for _, seq, _ in penalized])
    filtered = [(row, p) for row, _, p in rows if p.has_filters]
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for _, p in filtered]
    logprob = [(row, p.logprobs) for row, _, p in rows if p.logprobs is not None]

    def ints(values: ArrayLike) -> torch.Tensor:
        return upload(np.array(values, np.int64))

    def floats(values: ArrayLike) -> torch.Tensor:
        return upload(np.array(values, np.float32))

    return LogitsExtras(
        allowed_rows=ints([row for row, _ in allowed]),
        allowed_at=ints([[row for row, ids in allowed for _ in ids], [i for _, ids in allowed for i in ids]]),
        bias_at=ints([[row for row, _, _ in bias], [i for _, i, _ in bias]]),
        bias_values=floats([v for _, _, v in bias]),
        penalty_rows=ints([row for row, _, _ in penalized]),
        seen_ids=ints(seen_ids),
        seen_counts=floats(seen_counts),
        has_pending=ints([s.num_pending_tokens for _, s, _ in penalized]),
        penalties=floats(
            [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for _, _, p in penalized]
        ).T.unsqueeze(-1)
        if penalized
        else floats([]),
        filter_rows=ints([row for row, _ in filtered]),
        filter_temperatures=floats([[p.temperature] for _, p in filtered]),
        min_p=floats([[p.min_p] for _, p in filtered]),
        top_p=floats([[p.top_p] for _, p in filtered]),
        top_k=ints(top_k),
        max_top_k=max((k for k in top_k if k < vocab_size), default=0),
        has_top_p=any(p.top_p < 1 for _, p in filtered),
        logprob_rows=ints([row for row, _ in logprob]),
        num_logprobs=min(vocab_size, max((n for _, n in logprob), default=0)),
    )


def _seen(seqs: SequenceOf[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """Return the different tokens of each sequence and how often its completion has each, padded by the first."""
    found = []
    for seq in seqs:
        ids, where = np.unique(np.array(seq.token_ids), return_inverse=True)
        found.append((ids, np.bincount(where[seq.num_prompt_tokens :], minlength=len(ids))))
    width = max((len(ids) for ids, _ in found), default=0)
    seen_ids, seen_counts = np.zeros((len(found), width), np.int64), np.zeros((len(found), width), np.float32)
    for row, (ids, counts) in enumerate(found):
        seen_ids[row], seen_counts[row] = ids[0], counts[0]
        seen_ids[row, : len(ids)], seen_counts[row, : len(ids)] = ids, counts
    return seen_ids, seen_counts
