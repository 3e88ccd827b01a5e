"""Fakes behind the engine's seam: a runner of integers, a naive oracle, and random workloads that compare the two.

The fake KV of a token is a hash of the token and of everything that its row reads from the cache before it, slot by
slot through the block table. So a wrong-prefix hit, a block offered before it is written, an overwritten slot or a
stale block changes the tokens that follow, or meets a slot that nobody has written.
"""

import dataclasses
import random
import unittest.mock
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import StepOutput
from nanovllm.llm import LLM
from nanovllm.models.config import ModelConfig
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE = 11
LOOKAHEADS = (0, 1)  # the synchronous loop and the overlapped one
Values = list[int]


class FakeCacheError(AssertionError):
    """The fake KV cache was used as no real one may be."""


def value_of(before: Values, token_id: int) -> int:
    """Return the fake KV of a token behind the tokens whose fake KV is ``before``."""
    return hash((*before, token_id))  # of ints: the same in every process


def token_after(value: int, vocab_size: int = VOCAB_SIZE, sample_index: int = 0) -> int:
    """Return what the fake model's sample draws after a token with this fake KV."""
    return (value ^ (value >> (29 - sample_index) % 64)) % vocab_size


def naive_completion(
    prompt: SequenceOf[int],
    params: SamplingParams,
    *,
    max_model_len: int = 4096,
    end_token_ids: Iterable[int] = (),
    num_slots: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    sample_index: int = 0,
) -> tuple[list[int], str]:
    """Return the tokens of a prompt and why they end, by a plain loop without cache, blocks or neighbours.

    ``num_slots`` is what the KV pool holds; a row ends with "error" once it has a token that finds no slot.
    """
    known, values = list(prompt), []
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    while True:
        for token_id in known[len(values) :]:
            values.append(value_of(values, token_id))
        known.append(token_after(values[-1], vocab_size, sample_index))
        if known[-1] in end_token_ids and not params.ignore_eos:
            return known[len(prompt) :], "stop"
        if len(known) >= limit:
            return known[len(prompt) :], "length"
        if num_slots is not None and len(known) > num_slots:
            return known[len(prompt) :], "error"


class FakePromise:
    """The tokens of one step; readable once."""

    def __init__(self, runner: "FakeRunner", token_ids: list[int | None]) -> None:
        self._runner = runner
        self._token_ids: list[int | None] | None = token_ids

    def wait(self) -> StepOutput:
        self._runner.num_waits += 1
        if self._runner.on_wait is not None:
            self._runner.on_wait(self._runner.num_waits)
        token_ids, self._token_ids = self._token_ids, None
        assert token_ids is not None, "a step was read twice"
        return StepOutput(token_ids)


class FakeRunner:
    """A model runner of integers, which checks what a device could not.

    Attributes:
        kv: The fake cache, a value a slot; None where nothing was ever written.
        on_run, on_wait: Called with the number of the run or wait (from 1) before it happens; may raise.
        log: Of each step `is_prefill` and per row (seq_id, first computed position, end).
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = VOCAB_SIZE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.num_runs = self.num_waits = 0
        self.on_run: Callable[[int], None] | None = None
        self.on_wait: Callable[[int], None] | None = None
        self.log: list[tuple[bool, list[tuple[int, int, int]]]] = []
        self._last_tokens: dict[int, int] = {}  # what the last step sampled, by sequence

    def run(self, seqs: SequenceOf[Sequence], is_prefill: bool) -> FakePromise:
        self.num_runs += 1
        if self.on_run is not None:
            self.on_run(self.num_runs)
        assert seqs and len({seq.seq_id for seq in seqs}) == len(seqs), "no sequence, or one twice"
        self.log.append((is_prefill, []))
        # As on a device: a row sees the cache as earlier steps left it and its own writes, never its neighbours'.
        written: dict[int, int] = {}
        read: set[int] = set()
        token_ids: list[int | None] = []
        last_value: dict[int, int] = {}
        forks = [seq for seq in seqs if not seq.num_scheduled_tokens]
        for seq in seqs:
            if seq in forks:
                assert is_prefill and seq.num_cached_tokens == seq.num_tokens == seq.num_prompt_tokens
                assert seq.forked_from in seqs, "nothing to compute"
                token_ids.append(token_after(last_value[seq.forked_from.seq_id], self.vocab_size, seq.sample_index))
                continue
            start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
            self.log[-1][1].append((seq.seq_id, start, end))
            assert start < end <= seq.num_tokens, "nothing to compute, or more than there is"
            assert is_prefill or (end - start == 1 and end == seq.num_tokens), "decode computes the newest token"
            slots = self.slots(seq, end)
            values = self._read(slots[:start])
            read.update(slots[:start])
            for position in range(start, end):
                values.append(value_of(values, self._token(seq, position, is_prefill)))
                if slots[position] in written:
                    raise FakeCacheError(f"slot {slots[position]} is written twice in one step")
                written[slots[position]] = values[-1]
            last_value[seq.seq_id] = values[-1]
            token = token_after(values[-1], self.vocab_size, seq.sample_index)
            token_ids.append(token if self.samples(seq, end) else None)
        if read & written.keys():
            raise FakeCacheError(f"slots {read & written.keys()} are read and written in one step")
        for slot, value in written.items():
            self.kv[slot] = value
        for fork in forks:  # a partly filled last block is copied once it is computed
            own, others = self.slots(fork, fork.num_tokens), self.slots(fork.forked_from, fork.num_tokens)
            num_full = fork.num_tokens // self.block_size * self.block_size
            assert own[:num_full] == others[:num_full] and not set(own[num_full:]) & set(others)
            for slot, other in zip(own[num_full:], others[num_full:], strict=True):
                self.kv[slot] = self.kv[other]
        self._last_tokens = {seq.seq_id: token for seq, token in zip(seqs, token_ids, strict=True) if token is not None}
        return FakePromise(self, token_ids)

    def samples(self, seq: Sequence, end: int) -> bool:
        """Return whether a row that is computed up to ``end`` gives a token."""
        return end == seq.num_tokens

    def slots(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Return the slots of a sequence's first tokens."""
        assert len(seq.block_table) * self.block_size >= num_tokens, "fewer blocks than tokens"
        assert all(0 <= block_id < self.num_blocks for block_id in seq.block_table), "a block that does not exist"
        return [
            seq.block_table[position // self.block_size] * self.block_size + position % self.block_size
            for position in range(num_tokens)
        ]

    def exit(self) -> None:
        self.kv.clear()

    def _read(self, slots: list[int]) -> Values:
        values = []
        for slot in slots:
            value = self.kv[slot]
            if value is None:
                raise FakeCacheError(f"slot {slot} is read but was never written")
            values.append(value)
        return values

    def _token(self, seq: Sequence, position: int, is_prefill: bool) -> int:
        if position < len(seq.token_ids):
            return seq.token_ids[position]
        assert not is_prefill and seq.num_pending_tokens == 1 and position == seq.num_tokens - 1, "unknown tokens"
        return self._last_tokens[seq.seq_id]


class LetterTokenizer:
    """A token a letter: "a" is 0, "b" is 1 and so on; it refuses whatever is no letter of its vocabulary."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, eos_token_id: int | None = None) -> None:
        self.letters = "abcdefghijklmnopqrstuvwxyz"[:vocab_size]
        self.eos_token_id = eos_token_id

    def __call__(self, texts: list[str], verbose: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[self.letters.index(letter) for letter in text] for text in texts]}

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        skipped = self.eos_token_id if skip_special_tokens else None
        return "".join(self.letters[token_id] for token_id in token_ids if token_id != skipped)


def make_engine(
    num_blocks: int,
    block_size: int,
    *,
    end_token_ids: SequenceOf[int] = (),
    tokenizer: Any = None,
    vocab_size: int = VOCAB_SIZE,
    **knobs: Any,
) -> LLMEngine:
    """Return an engine around a `FakeRunner`, by default in the overlapped loop."""
    knobs.setdefault("lookahead", LOOKAHEADS[-1])
    model_config = ModelConfig(
        architecture="FakeForCausalLM",
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        eos_token_ids=tuple(end_token_ids),
    )
    knobs = {"greedy_admission": True, **knobs}  # so that small pools lead to preemption
    config = Config("fake", device="cpu", **knobs)
    return LLMEngine.from_parts(config, model_config, tokenizer, FakeRunner(num_blocks, block_size, vocab_size))


def make_llm(num_blocks: int, block_size: int, **knobs: Any) -> LLM:
    """Return an LLM around the engine of `make_engine`."""
    engine = make_engine(num_blocks, block_size, **knobs)
    with unittest.mock.patch("nanovllm.llm.LLMEngine", return_value=engine):
        return LLM("fake")


def run_until_idle(engine: LLMEngine, most_steps: int = 10_000) -> dict[int, RequestOutput]:
    """Step until nothing is left; return the outputs by request id, each of which must come once."""
    outputs: dict[int, RequestOutput] = {}
    while not engine.is_finished():
        assert (most_steps := most_steps - 1) > 0, "the engine does not come to an end"
        for output in engine.step()[0]:
            assert output.request_id not in outputs, "a request ended twice"
            outputs[output.request_id] = output
    return outputs


class Watch:
    """Checks an engine's books at every call into its scheduler, so within steps too."""

    def __init__(self, engine: LLMEngine) -> None:
        self.scheduler = engine.scheduler
        self.seqs: list[Sequence] = []
        self.most_alive = 0
        for name in ("add", "schedule", "launched", "postprocess", "abort"):
            setattr(self.scheduler, name, self._checked(getattr(self.scheduler, name), name))

    def _checked(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            result = method(*args)
            if name == "add":
                self.seqs += [args[0], *args[0].forks]
            self.check()
            return result

        return checked

    def check(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        alive = [seq for seq in self.seqs if seq.block_table]
        self.most_alive = max(self.most_alive, len(alive))
        manager.check_invariants(alive)
        assert len(alive) <= scheduler.max_num_seqs, "more sequences alive than max_num_seqs"
        assert all(seq.block_table and seq.status is SequenceStatus.RUNNING for seq in scheduler.running)
        assert not any(seq.status is SequenceStatus.RUNNING for seq in scheduler.waiting)
        for seq in alive:
            assert not seq.is_finished, "an ended sequence holds blocks"
            assert seq.num_cached_tokens + seq.num_scheduled_tokens <= seq.num_tokens
            assert manager.blocks_needed(seq.num_cached_tokens + seq.num_scheduled_tokens) <= len(seq.block_table)


@dataclass(frozen=True)
class Request:
    """One request of a workload; it is handed in before step ``arrival`` and aborted before step ``abort``."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    abort: int | None


@dataclass(frozen=True)
class Workload:
    """An engine's settings and what it is asked to do."""

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    greedy_admission: bool
    end_token_ids: tuple[int, ...]
    requests: tuple[Request, ...]

    def naive(self, request: Request, sample_index: int = 0) -> tuple[list[int], str]:
        """Return the completion that a plain loop gives."""
        return naive_completion(
            request.prompt,
            request.params,
            max_model_len=self.max_model_len,
            end_token_ids=self.end_token_ids,
            num_slots=self.num_blocks * self.block_size,
            sample_index=sample_index,
        )

    def is_refused(self, request: Request) -> bool:
        """Return whether a request's prompt can never run, so that `add_request` refuses it."""
        return len(request.prompt) >= self.max_model_len or len(request.prompt) > self.num_blocks * self.block_size


def draw_workload(draw_int: Callable[[int, int], int]) -> Workload:
    """Draw a workload through ``draw_int(low, high)``, both ends included: hypothesis's, or `random_workload`'s."""

    def pick(options: SequenceOf[Any]) -> Any:
        return options[draw_int(0, len(options) - 1)]

    block_size = pick((1, 2, 3, 4, 16))
    shape = Workload(
        num_blocks=max(1, draw_int(8, 80) // block_size),
        block_size=block_size,
        max_num_batched_tokens=pick((64, 32, 16, 8, 5, 3, 2, 1)),
        max_num_seqs=draw_int(1, 5),
        max_model_len=pick((64, 64, 64, 30, 21, 9)),
        greedy_admission=pick((True, False)),
        end_token_ids=pick(((), (3,), (3, 7))),
        requests=(),
    )
    requests: list[Request] = []
    for _ in range(draw_int(1, 12)):
        # Streams of few different tokens: heads are shared, and equal blocks stand behind different prefixes.
        head = _stream(draw_int(0, 2), draw_int(0, 16))
        prompt = head + _stream(10 + draw_int(0, 3), draw_int(0 if head else 1, 4))
        kind = draw_int(0, 4)
        if kind == 1:  # exactly n blocks
            prompt = (prompt * block_size)[: max(1, len(prompt) // block_size) * block_size]
        elif kind == 2 and requests:  # equal prompts
            prompt = pick(requests).prompt
        elif kind == 3 and requests:  # the next turn of a dialog
            earlier = pick(requests)
            if not shape.is_refused(earlier):
                answer, _ = shape.naive(earlier)
                prompt = (*earlier.prompt, *answer[: draw_int(0, len(answer))], *prompt[:2])[:40]
        arrival = draw_int(0, 9)
        params = SamplingParams(
            temperature=float(draw_int(0, 1)),
            max_tokens=pick((None, 1, 2, 3, 5, 8, 13, 20)),
            ignore_eos=bool(draw_int(0, 1)),
        )
        if not params.is_greedy:
            params = dataclasses.replace(params, n=pick((1, 1, 1, 2, 3)))
        abort = arrival + draw_int(0, 12) if draw_int(0, 7) == 7 else None
        requests.append(Request(tuple(prompt), params, arrival, abort))
    return Workload(**{**vars(shape), "requests": tuple(requests)})


def random_workload(seed: int) -> Workload:
    """Return the workload of a seed."""
    return draw_workload(random.Random(seed).randint)


@dataclass
class Run:
    """What came of a workload."""

    engine: LLMEngine
    outputs: dict[int, RequestOutput]  # by place in the workload's requests
    refused: dict[int, str]
    aborted: set[int]


def run_workload(workload: Workload, lookahead: int, *, check_books: bool = True) -> Run:
    """Run a workload to its end, checking on the way whatever holds at every step."""
    engine = make_engine(
        workload.num_blocks,
        workload.block_size,
        end_token_ids=workload.end_token_ids,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_num_seqs=workload.max_num_seqs,
        max_model_len=workload.max_model_len,
        greedy_admission=workload.greedy_admission,
        lookahead=lookahead,
    )
    watch = Watch(engine) if check_books else None
    run = Run(engine, {}, {}, set())
    index_of: dict[int, int] = {}
    last_arrival = max(request.arrival for request in workload.requests)
    step = 0
    while step <= last_arrival or not engine.is_finished():
        assert step < 4000, "the engine does not come to an end"
        for index, request in enumerate(workload.requests):
            if request.arrival == step:
                try:
                    index_of[engine.add_request(list(request.prompt), request.params)] = index
                except ValueError as error:
                    run.refused[index] = str(error)
            if request.abort == step and index not in run.outputs and index not in run.refused:
                run.aborted.add(index)
                engine.abort(next(id_ for id_, other in index_of.items() if other == index))
        outputs, num_tokens = engine.step()
        assert -workload.max_num_seqs <= num_tokens <= workload.max_num_batched_tokens
        for output in outputs:
            index = index_of[output.request_id]
            assert index not in run.outputs, "a request ended twice"
            assert index not in run.aborted, "an aborted request gave an output"
            run.outputs[index] = output
        step += 1
    if watch is not None:
        watch.check()
        assert not engine.scheduler.block_manager.used_block_ids, "blocks in use although nothing runs"
        assert not engine._requests, "requests are remembered for ever"
    assert engine.step() == ([], 0)
    return run


def check_workload(workload: Workload, *, check_books: bool = True) -> list[Run]:
    """Run a workload in both loops; assert that every request ends once, as in the naive loop, and alike in both."""
    runs = [run_workload(workload, lookahead, check_books=check_books) for lookahead in LOOKAHEADS]
    for run in runs:
        for index, request in enumerate(workload.requests):
            if workload.is_refused(request):
                assert index in run.refused and index not in run.outputs
                continue
            assert index not in run.refused, run.refused
            assert (index in run.outputs) != (index in run.aborted), "a request is lost"
            if index in run.aborted:
                continue
            output = run.outputs[index]
            assert (output.token_ids, output.finish_reason) == workload.naive(request)
            assert output.prompt_token_ids == list(request.prompt)
            assert output.num_cached_tokens % workload.block_size == 0
            assert 0 <= output.num_cached_tokens < len(request.prompt)
            samples = [(sample.token_ids, sample.finish_reason) for sample in output.outputs]
            assert samples == [workload.naive(request, i) for i in range(request.params.n)]
            assert (output.error is None) == (output.finish_reason != "error")
            if output.error is not None:
                needed = f"need {workload.num_blocks + 1} KV blocks of {workload.block_size} tokens"
                assert needed in output.error and f"the pool has {workload.num_blocks}." in output.error
    ended = set.intersection(*(set(run.outputs) for run in runs))
    results = [{i: (run.outputs[i].token_ids, run.outputs[i].finish_reason) for i in ended} for run in runs]
    assert all(result == results[0] for result in results)
    return runs


def _stream(seed: int, num_tokens: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.choice((1, 1, 2, 3, 7)) for _ in range(num_tokens))
