"""Scheduler: decides each step and books its outcome.

It owns the two queues, admission, chunking and preemption. It sees sequences and counts, never tensors, and works
the same whether a step's tokens are known at once or one step late.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from nanovllm.config import Config
from nanovllm.engine.admission import Admission
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Scheduler:
    """Iteration-level scheduling: prefill first, then decode, first come first served.

    Args:
        config: A config whose `num_kvcache_blocks` and `kvcache_block_size` are numbers.
        end_token_ids: Tokens that end a sequence unless it ignores them.
    """

    def __init__(self, config: Config, end_token_ids: Iterable[int] = ()) -> None:
        assert config.num_kvcache_blocks and config.kvcache_block_size
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.end_token_ids = frozenset(end_token_ids)
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.admission = Admission(config, self.block_manager)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival: the youngest is last
        self.finished: list[Sequence] = []  # ended since the last `take_finished`
        self.num_preemptions = 0

    def is_finished(self) -> bool:
        """Return whether nothing is left to schedule (steps under way are the engine's to count)."""
        # A copy, made in one go: another thread may add to the queue, which would end an iteration over it.
        return not self.running and all(seq.is_finished for seq in tuple(self.waiting))

    def check_prompt(self, num_tokens: int) -> None:
        """Raise ValueError for a prompt that can never fit into the pool."""
        if self.block_manager.blocks_needed(num_tokens) > self.block_manager.num_blocks:
            raise ValueError(self._pool_error(num_tokens))

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; safe to call from another thread while a step runs.

        Raises:
            ValueError: Its prompt can never fit into the pool.
        """
        self.check_prompt(seq.num_tokens)
        max_tokens = seq.sampling_params.max_tokens
        limit = self.max_model_len
        for sample in (seq, *seq.forks):
            sample.max_num_tokens = limit if max_tokens is None else min(limit, seq.num_prompt_tokens + max_tokens)
        self.waiting.append(seq)

    def schedule(self) -> tuple[list[Sequence], bool]:
        """Decide the next step.

        Returns:
            The step's sequences, each with `num_scheduled_tokens` to compute behind its `num_cached_tokens` (none for a
            further sample of a prompt, which starts from the KV and logits of the first), and whether it is a prefill
            step. No sequences: nothing can run before a step under way is booked.
        """
        seqs = self._schedule_prefill()
        if seqs:
            return seqs, True
        return self._schedule_decode(), False

    def launched(self, seqs: SequenceOf[Sequence]) -> None:
        """Book a scheduled step as launched: its KV counts as computed, its samples as pending.

        A sequence whose last token is now sampled gives up its place and blocks at once, though that token is not known
        yet: whatever is launched next on the device runs after this step. If the token before is not known either, it
        waits for that one, which may complete a block for the prefix cache.
        """
        some_released = False
        for seq in seqs:
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if seq.num_cached_tokens == seq.num_tokens:
                seq.num_pending_tokens += 1
                if seq.reached_limit and seq.num_pending_tokens == 1:
                    self._release(seq)
                    some_released = True
        if some_released:
            self.running = [seq for seq in self.running if seq.block_table]

    def postprocess(self, seqs: SequenceOf[Sequence], token_ids: SequenceOf[int | None], is_prefill: bool) -> None:
        """Book a step's tokens: append them, offer filled blocks, end what is at its end.

        Args:
            seqs: The step's sequences, as `schedule` returned them.
            token_ids: The sampled token of each; None where a chunk did not reach the end of what is known.
            is_prefill: As `schedule` returned it.
        """
        self.launched(seqs)  # for callers that run step by step; a no-op once booked
        for seq, token_id in zip(seqs, token_ids, strict=True):
            if seq.is_finished:
                continue  # it ended while this step was under way: the extra token is dropped
            if token_id is not None:
                seq.append_token(token_id)
            if seq.block_table:
                self.block_manager.hash_blocks(seq)
            if token_id is not None:
                self._finish_if_ended(seq, token_id)
        if not all(seq.block_table for seq in seqs):
            self.running = [seq for seq in self.running if seq.block_table]

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits at the front and recomputes its KV later.

        The caller has removed it from `running`.
        """
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def abort(self, seq: Sequence, error: str | None = None) -> None:
        """Drop a sequence wherever it is, with its tokens under way; with ``error`` it counts as one that failed."""
        if seq.is_finished:
            return
        if error is not None:
            seq.error, seq.finish_reason = error, "error"
            self.finished.append(seq)
        self._release(seq)
        seq.status = SequenceStatus.FINISHED
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def take_finished(self) -> list[Sequence]:
        """Return the sequences that ended since the last call, in the order in which they ended."""
        finished, self.finished = self.finished, []
        return finished

    def _schedule_prefill(self) -> list[Sequence]:
        seqs: list[Sequence] = []
        self.admission.begin()
        budget = self.max_num_batched_tokens
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.is_finished:  # ended while it waited: by abort, or by a token that was pending at its preemption
                self.waiting.popleft()
                continue
            if seq.num_pending_tokens:
                break  # preempted with a token not yet known; it cannot be recomputed before that is booked
            num_hits = 0
            if not seq.block_table:
                if self._exceeds_pool(seq):  # grown too long since it was preempted
                    self.waiting.popleft()
                    self._fail(seq)
                    continue
                if self.admission.is_paused(self.running, self.waiting):
                    break
                num_hits = -1
                if len(self.running) < self.max_num_seqs:
                    num_hits = self.block_manager.can_allocate(seq)
                num_shared = self.block_manager.num_used_hits(seq, num_hits)
                if num_hits < 0 or not self.admission.has_headroom(self.running, seq, num_shared):
                    self.admission.refuse(seq, len(self.running))
                    break
            num_cached = seq.num_cached_tokens or num_hits * self.block_manager.block_size
            num_new = seq.num_tokens - num_cached
            if num_new > budget and seqs:
                break  # only the first of a step is cut into chunks
            if not seq.block_table:
                self.block_manager.allocate(seq, num_hits)
                if seq.num_prefix_hit_tokens is None:
                    seq.num_prefix_hit_tokens = seq.num_cached_tokens
            seq.num_scheduled_tokens = min(num_new, budget)
            budget -= seq.num_scheduled_tokens
            seqs.append(seq)
            if seq.num_scheduled_tokens < num_new:
                break  # half-prefilled: it stays at the head and keeps its blocks
            seq.status = SequenceStatus.RUNNING
            self.waiting.popleft()
            self.running.append(seq)
            seqs += self._start_forks(seq)
        return seqs

    def _start_forks(self, seq: Sequence) -> list[Sequence]:
        """Start the other samples of a prompt from its KV, as far as places and blocks go; the rest wait."""
        forks = [fork for fork in seq.forks if not fork.is_finished]
        seq.forks = []
        started: list[Sequence] = []
        for fork in forks:
            num_shared = seq.num_tokens // self.block_manager.block_size
            if (
                len(self.running) >= self.max_num_seqs
                or not self.block_manager.can_fork(seq)
                or not self.admission.has_headroom(self.running, fork, num_shared)
            ):
                self.waiting.extendleft(reversed(forks[len(started) :]))
                break
            self.block_manager.fork(seq, fork)
            fork.status = SequenceStatus.RUNNING
            self.running.append(fork)
            started.append(fork)
        return started

    def _schedule_decode(self) -> list[Sequence]:
        seqs: list[Sequence] = []
        for seq in tuple(self.running):
            # A younger one may have been preempted meanwhile, to make room for an older one.
            if seq.status is SequenceStatus.RUNNING and self._make_room(seq):
                self.block_manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                seqs.append(seq)
        return seqs

    def _make_room(self, seq: Sequence) -> bool:
        """Return whether the running sequence can compute its next token, preempting the youngest for it if need be."""
        if not self.block_manager.needs_block(seq):
            return True
        if self._exceeds_pool(seq):
            if not seq.num_pending_tokens:  # else it ends with that token, once it is known
                self.running.remove(seq)
                self._fail(seq)
            return False
        while not self.block_manager.free_block_ids:
            victim = self.running.pop()
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _exceeds_pool(self, seq: Sequence) -> bool:
        return self.block_manager.blocks_needed(seq.num_tokens) > self.block_manager.num_blocks

    def _fail(self, seq: Sequence) -> None:
        seq.error = "Out of KV memory: " + self._pool_error(seq.num_tokens)
        self._finish(seq, "error")

    def _pool_error(self, num_tokens: int) -> str:
        needed, owned = self.block_manager.blocks_needed(num_tokens), self.block_manager.num_blocks
        return (
            f"{num_tokens} tokens need {needed} KV blocks of {self.block_manager.block_size} tokens, but the pool "
            f"has {owned}. Shorten the request or raise num_kvcache_blocks (or the memory that it is sized by)."
        )

    def _finish_if_ended(self, seq: Sequence, token_id: int) -> None:
        params = seq.sampling_params
        if token_id in self.end_token_ids and not params.ignore_eos:
            self._finish(seq, "stop")
            return
        if params.stop_token_ids and token_id in params.stop_token_ids:
            seq.stop_reason = token_id
        elif seq.stop_finder is not None:
            seq.stop_reason = seq.stop_finder.find(seq.token_ids, seq.num_prompt_tokens)
        if seq.stop_reason is not None:
            self._finish(seq, "stop")
        elif seq.reached_limit:
            if seq.num_pending_tokens:  # its last token is still under way
                self._release(seq)
            else:
                self._finish(seq, "length")

    def _release(self, seq: Sequence) -> None:
        if seq.block_table:
            self.admission.left()
            self.block_manager.hash_blocks(seq)
            self.block_manager.deallocate(seq)

    def _finish(self, seq: Sequence, reason: str) -> None:
        self._release(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        self.admission.ended(seq)
        self.finished.append(seq)
