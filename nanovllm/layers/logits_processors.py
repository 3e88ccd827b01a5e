"""What may change logits before a token is chosen, for the rows of a batch that ask for it.

It stands between the model and the sampler, so that a batch in which nobody asks runs neither more nor other code.
Excluded tokens become -inf; the sampler then draws exactly from what is left.
"""

from dataclasses import dataclass

import torch

_SORTED_HEAD = 1024  # top_p sorts only so many of a row's likeliest tokens, unless their mass does not suffice


@dataclass(frozen=True)
class LogitsExtras:
    """The extras of a step as flat tensors. `rows` are rows of the logits, int64; an absent extra has no rows.

    Attributes:
        allowed_rows: [A] rows with an allowed-token mask.
        allowed_at: [2, entries] row and token id of each allowed token.
        bias_at: [2, entries] row and token id of each bias.
        bias_values: [entries] float32; -inf forbids the token.
        penalty_rows: [P] rows with penalties.
        seen_ids: [P, U] int64, token ids of prompt and completion; equal ids have equal counts.
        seen_counts: [P, U] float32, how often each occurs in the completion.
        has_pending: [P], 1 where the host does not know the row's newest token yet, else 0.
        penalties: [3, P, 1] float32: repetition, presence, frequency.
        filter_rows: [F] rows with top_k, top_p or min_p.
        filter_temperatures, min_p, top_p: [F, 1] float32.
        top_k: [F] int64; vocabulary size where it is off.
        max_top_k: The largest top_k in use; 0: none.
        has_top_p: Whether any top_p is below 1.
        logprob_rows: [L] rows whose log-probabilities are wanted.
        num_logprobs: The most that any of them wants.
    """

    allowed_rows: torch.Tensor
    allowed_at: torch.Tensor
    bias_at: torch.Tensor
    bias_values: torch.Tensor
    penalty_rows: torch.Tensor
    seen_ids: torch.Tensor
    seen_counts: torch.Tensor
    has_pending: torch.Tensor
    penalties: torch.Tensor
    filter_rows: torch.Tensor
    filter_temperatures: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    max_top_k: int
    has_top_p: bool
    logprob_rows: torch.Tensor
    num_logprobs: int


def process_logits(logits: torch.Tensor, extras: LogitsExtras, newest_tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [num_rows, vocabulary] with the extras applied.

    Args:
        logits: [num_rows, vocabulary], left as they are.
        extras: What to apply.
        newest_tokens: [num_rows], each row's newest token; read where it is pending.
    """
    logits = logits.to(torch.float32, copy=True)
    if len(extras.allowed_rows):
        masked = torch.full_like(logits[extras.allowed_rows], float("-inf"))
        allowed = logits[tuple(extras.allowed_at)]
        logits[extras.allowed_rows] = masked
        logits[tuple(extras.allowed_at)] = allowed
    if len(extras.bias_values):
        logits.index_put_(tuple(extras.bias_at), extras.bias_values, accumulate=True)
    if len(extras.penalty_rows):
        logits[extras.penalty_rows] = _penalize(logits[extras.penalty_rows], extras, newest_tokens)
    if len(extras.filter_rows):
        rows = logits[extras.filter_rows]
        kept = filter_mask(
            rows / extras.filter_temperatures,
            extras.top_k,
            extras.max_top_k,
            extras.top_p,
            extras.has_top_p,
            extras.min_p,
        )
        logits[extras.filter_rows] = rows.masked_fill(~kept, float("-inf"))
    return logits


def _penalize(logits: torch.Tensor, extras: LogitsExtras, newest_tokens: torch.Tensor) -> torch.Tensor:
    """Apply repetition, presence and frequency penalties to the tokens seen so far."""
    ids, counts = extras.seen_ids, extras.seen_counts
    # A token that the host does not know yet counts as well. Equal ids need equal counts, since one of them is
    # scattered last; seen_ids may repeat its first id.
    is_pending = extras.has_pending.unsqueeze(1) > 0
    newest = torch.where(is_pending, newest_tokens[extras.penalty_rows].unsqueeze(1), ids[:, :1])
    is_newest = ids == newest
    before = torch.where(is_newest, counts, 0).amax(1, keepdim=True)
    ids = torch.cat((ids, newest), 1)
    counts = torch.cat((counts + (is_newest & is_pending), before + is_pending), 1)
    repetition, presence, frequency = extras.penalties
    seen = logits.gather(1, ids)
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    seen = seen - frequency * counts - presence * (counts > 0)
    return logits.scatter(1, ids, seen)


def filter_mask(
    scaled: torch.Tensor, top_k: torch.Tensor, max_top_k: int, top_p: torch.Tensor, has_top_p: bool, min_p: torch.Tensor
) -> torch.Tensor:
    """Return which tokens min_p, top_k and top_p leave, in this order; ties with the last one kept stay too.

    Args:
        scaled: [rows, vocabulary] float32 logits, already divided by temperature.
        top_k: [rows] int64, vocabulary size where it is off.
        max_top_k: The largest top_k in use; 0: none.
        top_p: [rows, 1] float32.
        has_top_p: Whether any top_p is below 1.
        min_p: [rows, 1] float32.
    """
    threshold = scaled.amax(1, keepdim=True) + min_p.log()  # log(0) = -inf keeps all
    if max_top_k:
        likeliest = scaled.topk(max_top_k, dim=1).values
        is_on = (top_k <= max_top_k).unsqueeze(1)
        kth = likeliest.gather(1, (top_k - 1).clamp(max=max_top_k - 1).unsqueeze(1))
        threshold = torch.maximum(threshold, kth.masked_fill(~is_on, float("-inf")))
    if has_top_p:
        left = scaled.masked_fill(scaled < threshold, float("-inf"))
        mass = left.logsumexp(1, keepdim=True)
        nucleus = _nucleus_threshold(left.topk(min(_SORTED_HEAD, left.size(1)), dim=1).values, mass, top_p)
        is_short = nucleus.isinf().squeeze(1)
        if bool(is_short.any()):
            rest = left[is_short].sort(dim=1, descending=True).values
            nucleus[is_short] = _nucleus_threshold(rest, mass[is_short], top_p[is_short])
        threshold = torch.maximum(threshold, nucleus.masked_fill(top_p >= 1, float("-inf")))
    return scaled >= threshold


def _nucleus_threshold(ordered: torch.Tensor, mass: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return [rows, 1] the smallest of ``ordered`` (descending) that top_p keeps; -inf if they do not reach top_p."""
    probabilities = (ordered - mass).exp()
    total = probabilities.cumsum(1)
    last_kept = (((total - probabilities) < top_p).sum(1, keepdim=True) - 1).clamp(min=0)  # the likeliest always stays
    threshold = ordered.gather(1, last_kept)
    is_complete = (total[:, -1:] >= top_p) | (ordered[:, -1:] == float("-inf"))
    return torch.where(is_complete, threshold, float("-inf"))


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return raw log-probabilities: those of the chosen token and of the ``num`` likeliest ones.

    Args:
        logits: [rows, vocabulary].
        chosen: [rows] int64.
        num: How many of the likeliest.

    Returns:
        Token ids [rows, 1 + num] int64 and their log-probabilities [rows, 1 + num] float32, the chosen first.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num, logprobs.size(1)), dim=1)
    chosen = chosen.unsqueeze(1)
    return torch.cat((chosen, ids), 1), torch.cat((logprobs.gather(1, chosen), values), 1)
