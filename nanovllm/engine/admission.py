"""Admission: whether a waiting sequence may join the running ones now.

A free place and free blocks for its prompt do not suffice. If the running sequences then outgrow the pool, some are
preempted and their prefill is done twice; and if each place is filled as soon as it is free, every decode step is
followed by a prefill step of one prompt. So it forecasts what all will come to need, and lets places gather.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

_BATCH_SHARE = 32  # after a refusal, this part of the running sequences leaves before anyone is asked again
_PATIENCE = 64  # steps after which one is asked anyway: what runs needs less and less


class Admission:
    """Decides who joins, and learns from who ended.

    Args:
        config: `greedy_admission` turns all of this off.
        block_manager: The pool.
    """

    def __init__(self, config: Config, block_manager: BlockManager) -> None:
        self._is_greedy = config.greedy_admission
        self._pool = block_manager
        self._refused: Sequence | None = None
        self._batch = 1  # sequences to leave before it is asked again
        self._num_left = self._num_asked = 0  # sequences that gave up their place since then; times it was looked at
        self._forecasts: list[tuple[int, int, float]] = []  # of running sequences: blocks held, tokens, steps to come
        self._num_sampled, self._num_allowed = 1, 1  # by ended sequences that could stop early

    def left(self) -> None:
        """Note that a sequence gave up its place and blocks."""
        self._num_left += 1

    def ended(self, seq: Sequence) -> None:
        """Learn how much of what it was allowed a sequence has sampled."""
        if _may_stop_early(seq) and seq.max_num_tokens is not None:
            self._num_sampled += len(seq.token_ids) - seq.num_prompt_tokens
            self._num_allowed += seq.max_num_tokens - seq.num_prompt_tokens

    def refuse(self, seq: Sequence, num_running: int) -> None:
        """Note that there is no room for the head of the queue beside so many sequences."""
        self._refused, self._num_left, self._num_asked = seq, 0, 0
        self._batch = max(1, num_running // _BATCH_SHARE)

    def is_paused(self, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence]) -> bool:
        """Return whether too few places have become free since the head of the queue was refused."""
        if self._is_greedy or not running or waiting[0] is not self._refused:
            return False
        self._num_asked += 1
        return self._num_left < min(self._batch, len(waiting)) and self._num_asked <= _PATIENCE

    def begin(self) -> None:
        """Begin a step, in which `running` only grows at its end: what is known of its members is kept."""
        self._forecasts.clear()

    def has_headroom(self, running: SequenceOf[Sequence], seq: Sequence, num_shared: int) -> bool:
        """Return whether the pool will hold a sequence beside the running ones, each at its expected length.

        Args:
            running: What has been admitted so far.
            seq: The candidate.
            num_shared: Blocks of its prompt that others hold too.
        """
        if self._is_greedy or not running:
            return True
        size, num_blocks = self._pool.block_size, self._pool.num_blocks
        for other in running[len(self._forecasts) :]:
            self._forecasts.append((len(other.block_table), other.num_tokens, self._expected_steps(other)))
        held, lens, steps = np.array([*self._forecasts, (0, seq.num_tokens, self._expected_steps(seq))], float).T
        # Blocks that several hold are in the tables of all of them.
        held *= min(1.0, len(self._pool.used_block_ids) / max(1.0, held.sum()))
        held[-1] = -(-seq.num_tokens // size) - num_shared
        return peak_blocks(held, -lens % size, steps, size) <= num_blocks

    def _expected_steps(self, seq: Sequence) -> float:
        assert seq.max_num_tokens is not None
        steps: float = seq.max_num_tokens - seq.num_tokens
        if _may_stop_early(seq):
            allowed = seq.max_num_tokens - seq.num_prompt_tokens
            expected = allowed * self._num_sampled / self._num_allowed - seq.num_completion_tokens
            steps = min(steps, max(self._pool.block_size, expected))
        return steps


def peak_blocks(held: np.ndarray, slack: np.ndarray, steps: np.ndarray, block_size: int) -> float:
    """Return the most blocks that sequences hold at once while each grows by a token a step and then ends.

    Args:
        held: [n] blocks that each holds now.
        slack: [n] tokens that still fit into its last one.
        steps: [n] tokens that it will yet store.
        block_size: Tokens a block holds.

    Returns:
        The peak, right within half a block a sequence: a last block is counted as half filled.
    """
    order = np.argsort(-steps, kind="stable")
    alive = np.arange(1, len(steps) + 1)  # the peak comes just before one ends: then those with more steps are alive
    grown = np.cumsum((held - slack / block_size)[order]) + alive * (steps[order] / block_size + 0.5)
    return max(float(held.sum()), float(grown.max()))


def _may_stop_early(seq: Sequence) -> bool:
    params = seq.sampling_params
    return not params.ignore_eos or bool(params.stop or params.stop_token_ids)
