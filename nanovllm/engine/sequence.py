"""Sequence: one request's truth.

It owns the tokens known so far, how far their KV is computed, and the blocks that hold it. Everything else (blocks
needed, phase, what to compute next) is derived from these by whoever asks; block size and limits are not its matter.
"""

from collections.abc import Sequence as SequenceOf
from enum import Enum, auto
from typing import Any

from nanovllm.outputs import Logprobs
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """WAITING for (more of) its prefill, RUNNING from its last prompt token on, FINISHED for good."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One request on its way through the engine.

    A token is *known* once it is in `token_ids`, *pending* while sampled by a step whose result has not been read,
    *computed* when a step that writes its KV was launched.

    Args:
        token_ids: The prompt's token ids, at least one.
        sampling_params: How tokens are chosen and when the request ends.
        seq_id: Number, unique in its engine.
        request_key: 64 random-looking bits that name this request's noise (see `layers/sampler.py`).
        sample_index: Which of its prompt's samples this is.
    """

    __slots__ = (
        "block_hashes",
        "block_prints",
        "block_table",
        "error",
        "finish_reason",
        "forked_from",
        "forks",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_pending_tokens",
        "num_prefix_hit_tokens",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_unfinished",
        "prompt_logprobs",
        "request_id",
        "request_key",
        "sample_index",
        "sampling_params",
        "seq_id",
        "status",
        "stop_finder",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: SequenceOf[int],
        sampling_params: SamplingParams | None = None,
        seq_id: int = 0,
        request_key: int = 0,
        sample_index: int = 0,
    ) -> None:
        assert token_ids, "a sequence needs at least one token"
        self.seq_id = seq_id
        self.status = SequenceStatus.WAITING
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_cached_tokens = 0  # KV present: prefix hits plus computed
        self.num_scheduled_tokens = 0  # to compute in a step that is decided but not yet launched
        self.num_pending_tokens = 0  # sampled on the device, not yet known here
        self.num_prefix_hit_tokens: int | None = None  # prefix hits at first admission
        self.max_num_tokens: int | None = None  # prompt and completion together; set by Scheduler.add
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # chained hashes of its full blocks, kept so that none is computed twice
        self.block_prints: list[bytes] = []  # see `Block.prefix_print`
        self.sampling_params = sampling_params or SamplingParams()
        self.request_id = seq_id
        self.request_key = request_key
        self.sample_index = sample_index
        self.forks: list[Sequence] = []  # other samples of its prompt, which wait for its prefill
        self.num_unfinished = 1  # samples of its prompt that have not ended; kept at the first of them
        self.forked_from: Sequence | None = None  # the sequence whose prefill it shares
        self.stop_finder: Any = None  # looks for stop strings, if it has any
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs | None] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.status.name}, {self.num_cached_tokens}/{self.num_tokens} computed)"

    @property
    def num_tokens(self) -> int:
        """Prompt tokens plus tokens sampled so far, the pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Tokens sampled so far, the pending ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are still to be computed (a preempted sequence has them)."""
        return self.sampling_params.prompt_logprobs is not None and not self.num_completion_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        """The known sampled tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def last_token(self) -> int:
        """The last known token."""
        return self.token_ids[-1]

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    @property
    def reached_limit(self) -> bool:
        """Whether its last token is sampled, though perhaps not yet known: an end by length is foreseeable."""
        return self.max_num_tokens is not None and self.num_tokens >= self.max_num_tokens

    def append_token(self, token_id: int) -> None:
        """Book a pending token as known."""
        self.token_ids.append(token_id)
        self.num_pending_tokens -= 1
