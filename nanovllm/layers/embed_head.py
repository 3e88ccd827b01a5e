"""Token embedding and LM head, both split over the ranks by vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import Shard, ShardId, load_shard
from nanovllm.layers.sampler import CHUNK_SIZE
from nanovllm.utils.context import get_context
from nanovllm.utils.parallel import SINGLE, TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Embedding rows split over the ranks; a rank yields zeros for ids that it does not hold.

    Slices are padded to whole sampler chunks, so that any number of ranks draws the same tokens.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.tp = tp
        self.num_embeddings = num_embeddings
        num_rows = num_embeddings
        if tp.size > 1:
            num_rows = -(-num_embeddings // (tp.size * CHUNK_SIZE)) * CHUNK_SIZE
        self.vocab_start = min(tp.rank * num_rows, num_embeddings)
        self.vocab_end = min(self.vocab_start + num_rows, num_embeddings)
        self.weight = nn.Parameter(torch.empty(num_rows, embedding_dim), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: torch.Tensor, source: Any, shard_id: ShardId = None) -> None:
        """Load this rank's rows of the checkpoint tensor; padding rows become zero."""
        size = self.vocab_end - self.vocab_start
        load_shard(param, source, Shard(self.num_embeddings, self.vocab_start, size, 0))
        param[size:].zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ids [num_tokens] to [num_tokens, embedding_dim]."""
        if self.tp.size == 1:
            return F.embedding(x, self.weight)
        is_mine = (x >= self.vocab_start) & (x < self.vocab_end)
        y = F.embedding(torch.where(is_mine, x - self.vocab_start, 0), self.weight)
        return self.tp.all_reduce(y.masked_fill(~is_mine.unsqueeze(-1), 0))


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states to logits, for the rows that the step's context asks for."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearBase.multiply`."""
        return F.linear(x, self.weight)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [num_tokens, hidden] to this rank's part of [num_rows, vocabulary], in ``out`` if it is given.

        Columns from `vocab_start` on; all ranks have equally many.
        """
        rows = get_context().logits_indices
        x = x if rows is None else x[rows]
        logits = self.multiply(x) if out is None else torch.mm(x, self.weight.T, out=out)
        logits[:, self.vocab_end - self.vocab_start :] = float("-inf")  # no token is behind a row of padding
        return logits
