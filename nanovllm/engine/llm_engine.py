"""LLMEngine: the step loop, and the steps under way.

It owns tokenizer, scheduler and model runner and works alone, request by request. Batches, order and progress are
`LLM`'s matter.
"""

import contextlib
import dataclasses
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.parallel_runner import ParallelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Promise, StepOutput
from nanovllm.models.config import ModelConfig, faults_of
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool, check_int
from nanovllm.utils.loader import find_checkpoint
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.tokenizer import StopStringFinder, decode, end_token_ids, has_tokenizer, load_tokenizer

logger = logging.getLogger("nanovllm")

Prompt = str | SequenceOf[int]


class Runner(Protocol):
    """What the engine needs of a model runner; see `ModelRunner`."""

    num_blocks: int
    block_size: int

    def run(self, seqs: SequenceOf[Sequence], is_prefill: bool) -> Promise: ...  # noqa: D102
    def exit(self) -> None: ...  # noqa: D102  # any number of times


class LLMEngine:
    """Continuous batching over one model.

    Args:
        model: A folder with a checkpoint, a hub id, or "embedded".
        **knobs: Fields of `Config`.

    Raises:
        TypeError, ValueError: A knob that is unknown or out of range, or a checkpoint that cannot be run.
        OSError: A hub id that cannot be fetched.
    """

    def __init__(self, model: str, **knobs: Any) -> None:
        config = Config(model, **knobs)
        folder = find_checkpoint(config.model, config.revision, with_weights=config.load_format != "dummy")
        model_config = ModelConfig.from_folder(folder)
        with faults_of(folder / "generation_config.json"):
            default_sampling_params(model_config)  # a fault shows before the weights are read
        config = settle_config(config, model_config)
        tokenizer_folder = find_checkpoint(config.tokenizer, what="tokenizer") if config.tokenizer else folder
        if config.tokenizer and not has_tokenizer(tokenizer_folder):
            raise ValueError(f"tokenizer={config.tokenizer!r} has no tokenizer files, such as tokenizer.json.")
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:  # a tokenizer imports for seconds, in which the weights can be read
            loading = pool.submit(load_tokenizer, tokenizer_folder)
            kind = ModelRunner if config.tensor_parallel_size == 1 else ParallelRunner
            runner = kind(config, model_config, folder)
            try:
                waited = time.perf_counter()
                tokenizer = loading.result()
                self._assemble(config, model_config, tokenizer, runner)
                runner.end_token_ids = self.end_token_ids
            except BaseException:  # whoever keeps the error would keep weights, cache and ranks
                with contextlib.suppress(Exception):  # of a lost card, say; the first error is to be told
                    runner.exit()
                raise
        self.startup_s = {**runner.startup_s, "tokenizer": time.perf_counter() - waited}
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.startup_s.items())
        logger.info("Ready after %.2f s: %s", time.perf_counter() - start, parts)

    @classmethod
    def from_parts(cls, config: Config, model_config: ModelConfig, tokenizer: Any, runner: Runner) -> "LLMEngine":
        """Build an engine around another runner, such as a fake one in tests."""
        engine = cls.__new__(cls)
        engine._assemble(config, model_config, tokenizer, runner)
        return engine

    def _assemble(self, config: Config, model_config: ModelConfig, tokenizer: Any, runner: Runner) -> None:
        self.config = dataclasses.replace(
            config, num_kvcache_blocks=runner.num_blocks, kvcache_block_size=runner.block_size
        )
        self.startup_s = dict[str, float]()  # seconds of each part of the start
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.model_runner = runner
        self.end_token_ids: frozenset[int] = end_token_ids(tokenizer, model_config)
        self.default_sampling_params = default_sampling_params(model_config)
        self._request_ids, self._seq_ids = itertools.count(), itertools.count()
        self._stats = dict.fromkeys(
            ("num_prompt_tokens", "num_completion_tokens", "num_prefill_steps", "num_decode_steps", "num_preemptions",
             "num_prefix_hit_tokens"), 0
        ) | {"prefill_s": 0.0, "decode_s": 0.0, "wait_s": 0.0}  # fmt: skip
        self._is_closed = False
        self.scheduler: Scheduler
        self.reset()

    def reset(self) -> None:
        """Forget all requests, steps under way and the prefix cache: a clean start, whatever state an error left."""
        if hasattr(self, "scheduler"):  # statistics go on
            self._count("num_preemptions", self.scheduler.num_preemptions)
        self.scheduler = Scheduler(self.config, self.end_token_ids)
        self._requests: dict[int, list[Sequence]] = {}  # the samples of each request that has not ended
        self._in_flight: deque[tuple[list[Sequence], bool, int, Promise]] = deque()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one request; may be called between steps, also from another thread.

        Args:
            prompt: Text or token ids.
            sampling_params: Defaults to `default_sampling_params`.

        Returns:
            The request's number, which its output carries as `request_id`.

        Raises:
            TypeError: A prompt or parameters of the wrong type.
            ValueError: An empty prompt, one that leaves no room for a token, ids outside the vocabulary, or a prompt
                that can never fit into KV memory.
            RuntimeError: The engine is closed.
        """
        seqs = self.new_request(prompt, sampling_params)
        self.queue(seqs)
        return seqs[0].request_id

    def new_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[Sequence]:
        """Check and number a request without queueing it; returns its samples. Errors as in `add_request`."""
        self.check_open()
        params = self.default_sampling_params if sampling_params is None else sampling_params
        self.check_params(params)
        token_ids = self.encode([prompt])[0] if isinstance(prompt, str) else check_token_ids(prompt)
        if isinstance(token_ids, ValueError):
            raise token_ids
        self._check_row(token_ids)
        self.scheduler.check_prompt(len(token_ids))
        request_id = next(self._request_ids)
        key = request_key(params.seed, self.config.seed, request_id, token_ids)
        seqs = [Sequence(token_ids, params, next(self._seq_ids), key, index) for index in range(params.n)]
        for seq in seqs:
            seq.request_id = request_id
            if params.stop:
                seq.stop_finder = StopStringFinder(self.tokenizer, params)
        for fork in seqs[1:]:
            fork.forked_from = seqs[0]
        seqs[0].forks = seqs[1:]
        seqs[0].num_unfinished = len(seqs)
        return seqs

    def queue(self, seqs: list[Sequence]) -> None:
        """Queue a request of `new_request`."""
        self._requests[seqs[0].request_id] = seqs
        self.scheduler.add(seqs[0])

    def step(self) -> tuple[list[RequestOutput], int]:
        """Launch what can run, then book the oldest step under way.

        Returns:
            The outputs of the requests that ended with it, and the tokens of a prefill step or minus the sequences of
            a decode step; ``([], 0)`` when idle.

        Raises:
            RuntimeError: The engine is closed, or was meanwhile.
        """
        self.check_open()
        start = time.perf_counter()
        try:
            head = self.scheduler.waiting[0] if self.scheduler.waiting else None
            while len(self._in_flight) <= self.config.lookahead:
                seqs, is_prefill = self.scheduler.schedule()
                if not seqs:
                    break
                num_tokens = sum(seq.num_scheduled_tokens for seq in seqs) if is_prefill else -len(seqs)
                promise = self.model_runner.run(seqs, is_prefill)
                self.scheduler.launched(seqs)
                self._in_flight.append((seqs, is_prefill, num_tokens, promise))
            num_tokens = 0
            if self._in_flight:
                seqs, is_prefill, num_tokens, promise = self._in_flight.popleft()
                waited = time.perf_counter()
                result = promise.wait()
                self._count("wait_s", time.perf_counter() - waited)
                _book_logprobs(seqs, result)
                kept = (t is not None and not s.is_finished for s, t in zip(seqs, result.token_ids, strict=True))
                self._count("num_completion_tokens", sum(kept))
                self.scheduler.postprocess(seqs, result.token_ids, is_prefill)
                self._count("num_prompt_tokens", max(num_tokens, 0))
                kind = "prefill" if is_prefill else "decode"
                self._count(f"num_{kind}_steps", 1)
                self._count(f"{kind}_s", time.perf_counter() - start)
            finished = self.scheduler.take_finished()
            self._drop_vain_steps()
            # Another thread may add requests meanwhile: only what was there before can be stuck.
            is_stuck = self.scheduler.running or (self.scheduler.waiting and self.scheduler.waiting[0] is head)
            if not num_tokens and not finished and is_stuck:
                raise RuntimeError("The scheduler can run nothing although requests wait; this is a fault of nanovllm.")
            outputs = [output for seq in finished if (output := self._output_if_complete(seq))]
        except BaseException as error:
            self.reset()
            if self._is_closed and isinstance(error, Exception):
                raise RuntimeError("This engine was closed in the midst of a step.") from error
            raise
        self.check_open()
        return outputs, num_tokens

    def stats(self) -> dict[str, float]:
        """Return counts and seconds since the engine started.

        `num_prompt_tokens` were computed in prefill steps (recomputed ones included), `num_completion_tokens` sampled
        and kept; `prefill_s` and `decode_s` are the time of such steps, `wait_s` the part in which the host waited.
        """
        return dict(self._stats, num_preemptions=self._stats["num_preemptions"] + self.scheduler.num_preemptions)

    def _count(self, name: str, more: float) -> None:
        self._stats[name] += more

    def is_finished(self) -> bool:
        """Return whether no request waits, runs or has a step under way."""
        return not self._in_flight and not self.scheduler.finished and self.scheduler.is_finished()

    def abort(self, request_id: int, error: str | None = None) -> None:
        """Drop a request between steps; ``error`` gives it an output. Unknown and ended ids are ignored."""
        seqs = self._requests.get(request_id, ()) if error else self._requests.pop(request_id, ())
        for seq in seqs:
            self.scheduler.abort(seq, error)
        self._drop_vain_steps()

    def exit(self) -> None:
        """Let go of weights, cache and requests; any number of times."""
        if not hasattr(self, "_is_closed"):  # an engine that could not be built has nothing to close
            return
        if not self._is_closed:
            self._is_closed = True
            self.reset()
        self.model_runner.exit()  # also if an earlier call was interrupted

    close = exit

    def check_params(self, params: SamplingParams) -> None:
        """Check what `SamplingParams` cannot know: the model's vocabulary.

        Raises:
            TypeError: Not SamplingParams.
            ValueError: A token id outside the vocabulary, stop strings without a tokenizer, or no token that may come.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {shorten(params)}.")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_vocabulary(getattr(params, name) or (), f"{name}: token id")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop} needs a tokenizer, and {self.config.model!r} has none.")
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self.end_token_ids)
        if params.min_tokens and params.allowed_token_ids and ends >= set(params.allowed_token_ids):
            raise ValueError(
                f"min_tokens={params.min_tokens} forbids all of allowed_token_ids, which only end requests."
            )
        if params.min_tokens and len(ends) >= self.model_config.vocab_size:
            raise ValueError(f"min_tokens={params.min_tokens} forbids all tokens, since each of them ends the request.")

    def encode(self, prompts: SequenceOf[str], **kwargs: Any) -> list[list[int] | ValueError]:
        """Tokenize texts together; in the place of one that the tokenizer refuses stands an exception.

        Raises:
            ValueError: The model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model!r} has no tokenizer files: give prompts as token ids, not as text.")
        try:
            # verbose=False: how long a prompt may be is checked here, and told as a row's error, not as a warning.
            return list(self.tokenizer(list(prompts), verbose=False, **kwargs)["input_ids"]) if prompts else []
        except Exception as error:  # the tokenizer's errors are of no common kind
            if len(prompts) == 1:
                lone = re.search("[\ud800-\udfff]", prompts[0])
                why = f"character {lone.start()} is {lone[0]!r}, a lone surrogate. Replace it." if lone else error
                return [ValueError(f"The prompt cannot be tokenized: {why}")]
            return [ids for prompt in prompts for ids in self.encode([prompt], **kwargs)]

    def check_open(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self._is_closed:
            raise RuntimeError("This engine is closed; make a new one.")

    def _check_row(self, token_ids: SequenceOf[int]) -> None:
        limit = self.config.max_model_len
        if not token_ids:
            raise ValueError("The prompt is empty: it needs at least one token.")
        if len(token_ids) >= limit:
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens, which leaves no room for a completion within "
                f"max_model_len={limit}. Shorten it or raise max_model_len."
            )
        self._check_vocabulary(token_ids, "Token id")

    def _check_vocabulary(self, token_ids: Collection[int], what: str) -> None:
        vocab_size = self.model_config.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            bad = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise ValueError(f"{what} {bad} is outside the vocabulary: ids run from 0 to {vocab_size - 1}.")

    def _drop_vain_steps(self) -> None:
        """Forget steps under way of which nobody awaits a token."""
        while self._in_flight and all(seq.is_finished for seq in self._in_flight[0][0]):
            self._in_flight.popleft()

    def _output_if_complete(self, seq: Sequence) -> RequestOutput | None:
        """Return the output of an ended sequence's request once all its samples have ended; None before, and after."""
        seqs = self._requests.get(seq.request_id)
        if seqs is None:
            return None
        first = seqs[0]
        first.num_unfinished -= 1
        if first.num_unfinished:
            return None
        del self._requests[seq.request_id]
        self._count("num_prefix_hit_tokens", first.num_prefix_hit_tokens or 0)
        prompt_logprobs = None
        if first.sampling_params.prompt_logprobs is not None:
            prompt_logprobs = [None, *first.prompt_logprobs]  # nothing predicts the first token
        return RequestOutput.of(
            [self._completion(sample) for sample in seqs],
            index=0,
            request_id=seq.request_id,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            num_cached_tokens=first.num_prefix_hit_tokens or 0,
            prompt_logprobs=prompt_logprobs,
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        params, token_ids = seq.sampling_params, seq.completion_token_ids
        if seq.stop_finder is not None and seq.stop_finder.end is not None:
            text = seq.stop_finder.text[: seq.stop_finder.end]
        else:
            text = decode(self.tokenizer, token_ids, params.skip_special_tokens)
        assert seq.finish_reason is not None
        return CompletionOutput(
            index=seq.sample_index,
            text=text,
            token_ids=token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if params.logprobs is None else seq.logprobs,
            error=seq.error,
        )


def _book_logprobs(seqs: SequenceOf[Sequence], result: StepOutput) -> None:
    """Hand a step's log-probabilities to its sequences; those that have ended meanwhile get none."""
    for i, seq in enumerate(seqs):
        if seq.is_finished:
            continue
        logprobs = result.logprobs[i] if result.logprobs else None
        if logprobs is not None:
            seq.logprobs.append(logprobs)
        if result.prompt_logprobs:
            seq.prompt_logprobs += result.prompt_logprobs[i]


def default_sampling_params(model_config: ModelConfig) -> SamplingParams:
    """Return what a request without parameters gets: `SamplingParams()` with what generation_config.json says."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "max_new_tokens")
    given = {name: model_config.generation[name] for name in names if model_config.generation.get(name) is not None}
    if not check_bool("do_sample", given.pop("do_sample", True)):
        given["temperature"] = 0.0
    if "max_new_tokens" in given:
        given["max_tokens"] = check_int("max_new_tokens", given.pop("max_new_tokens"), 1)
    return SamplingParams(**given)


def settle_config(config: Config, model_config: ModelConfig) -> Config:
    """Return the config with device, dtype and length limit settled for this machine and model.

    Raises:
        ValueError: A device that this machine does not have, or a tensor-parallel or block size that it cannot serve.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        count = torch.cuda.device_count()
        if int(device.partition(":")[2] or 0) >= count:
            raise ValueError(
                f"device={config.device!r} is not there: this machine has {count} CUDA devices. Use 'cpu'."
            )
    _check_tensor_parallel(config.tensor_parallel_size, device, model_config)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else model_config.dtype.replace("float32", "bfloat16")
    max_model_len = config.max_model_len
    if max_model_len > model_config.max_position_embeddings:
        max_model_len = model_config.max_position_embeddings
        logger.warning(
            "max_model_len=%d is more than the model was made for; it is capped at %d.",
            config.max_model_len,
            max_model_len,
        )
    most = -(-max_model_len // 256) * 256  # flash_attn's blocks are multiples of 256
    if (config.kvcache_block_size or 1) > most:
        raise ValueError(
            f"kvcache_block_size={config.kvcache_block_size} is out of range: with max_model_len={max_model_len} it "
            f"must be at most {most}, since no sequence is longer."
        )
    return dataclasses.replace(config, device=device, dtype=dtype, max_model_len=max_model_len)


def _check_tensor_parallel(size: int, device: str, model_config: ModelConfig) -> None:
    """Raise ValueError if the machine has fewer cards than ranks, or the model cannot be split among them."""
    if size == 1:
        return
    if device.startswith("cuda") and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size={size} needs as many CUDA devices; this machine has {torch.cuda.device_count()}."
        )
    if ":" in device:
        raise ValueError(
            f"device={device!r} is one card; with tensor_parallel_size={size} use 'cuda': rank r has cuda:r."
        )
    tp = TensorParallel(0, size)
    for name in ("num_attention_heads", "intermediate_size"):
        tp.split(getattr(model_config, name), name)
    tp.split_kv_heads(model_config.num_key_value_heads)


def check_token_ids(prompt: Any) -> list[int]:
    """Return a prompt of token ids as a list of ints; TypeError if it is anything else."""
    if isinstance(prompt, list | tuple | np.ndarray) and {bool, np.bool_}.isdisjoint(map(type, prompt)):
        try:
            ids = np.asarray(prompt)
        except ValueError:  # nested lists of different lengths
            ids = np.empty(1)
        if ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu"):
            return ids.tolist()
        if all(isinstance(token_id, int) for token_id in prompt):
            return list(prompt)  # beyond 64 bits: a matter of range, not of type
    raise TypeError(f"A prompt must be a str or a list of ints, not {shorten(prompt)}.")


def shorten(value: Any, most: int = 60) -> str:
    """Return a value's repr, cut to fit into an error message."""
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."


def request_key(seed: int | None, engine_seed: int, request_id: int, token_ids: SequenceOf[int]) -> int:
    """Return the 64 bits that name a request's noise.

    A request's own seed is mixed with its prompt, so that one seed over a batch does not give all rows the same noise.
    Without one the engine's seed and the request's number make every row differ and a whole run repeatable.
    """
    if seed is None:
        return xxhash.xxh64_intdigest(np.array([engine_seed % 2**64, request_id], "<u8").tobytes(), seed=0)
    prompt = np.asarray(token_ids, "<i8").tobytes()
    return xxhash.xxh64_intdigest((seed % 2**64).to_bytes(8, "little") + prompt, seed=1)
