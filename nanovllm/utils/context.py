"""The per-step facts that attention and the LM head read, set around a forward and reset after it.

The package's only module-level state. One per thread, so that two engines may step side by side.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Context:
    """Where each token of a step stands. All tensors live on the model's device.

    A prefill step has `cu_seqlens_*`; a decode step has `context_lens` instead.

    Attributes:
        slot_mapping: [num_tokens] int64, slot in the KV cache for each token; -1: written nowhere.
        cu_seqlens_q: [num_seqs + 1] int32, running total of each sequence's new tokens.
        cu_seqlens_k: [num_seqs + 1] int32, running total of its tokens up to the end of this step.
        max_seqlen_q: Most new tokens of a sequence.
        max_seqlen_k: Most tokens of a sequence.
        context_lens: [num_seqs] int32, tokens of each sequence, the new one included.
        block_tables: [num_seqs, max_blocks] int32, padded with -1; None if all K and V are new in this step.
        logits_indices: [num_rows] int64, the tokens whose logits are wanted; None: all.
    """

    slot_mapping: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    context_lens: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    logits_indices: torch.Tensor | None = None

    @property
    def is_prefill(self) -> bool:
        """Whether this is a prefill step."""
        return self.cu_seqlens_q is not None


_EMPTY = Context()
_STATE = threading.local()


def get_context() -> Context:
    """Return the facts of the step under way, or an empty Context."""
    context: Context = getattr(_STATE, "context", _EMPTY)
    return context


def set_context(context: Context) -> None:
    """Make ``context`` the current one; prefer `step_context`, which also takes it away again."""
    _STATE.context = context


def reset_context() -> None:
    """Forget the current step's facts."""
    _STATE.context = _EMPTY


@contextmanager
def step_context(context: Context) -> Iterator[None]:
    """Set ``context`` around a forward and bring back what was there before, whatever happens."""
    outer = get_context()
    set_context(context)
    try:
        yield
    finally:
        set_context(outer)
