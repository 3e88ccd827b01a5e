"""LLMEngine: the step loop, and the steps under way.

It owns tokenizer, scheduler and model runner and works alone, request by request. Batches, order and progress are
`LLM`'s matter.
"""

import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models.config import ModelConfig
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.loader import find_checkpoint
from nanovllm.utils.tokenizer import end_token_ids, load_tokenizer

logger = logging.getLogger("nanovllm")

Prompt = str | SequenceOf[int]


class Promise(Protocol):
    """Tokens that may still be on their way."""

    def wait(self) -> list[int | None]:
        """Return the token of each of a step's sequences, None where none was sampled."""


class Runner(Protocol):
    """What the engine needs of a model runner."""

    num_blocks: int
    block_size: int

    def run(self, seqs: SequenceOf[Sequence], is_prefill: bool) -> Promise:
        """Launch one step."""

    def exit(self) -> None:
        """Let go of everything."""


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
        folder = find_checkpoint(config.model, config.revision)
        model_config = ModelConfig.from_folder(folder)
        config = settle_config(config, model_config)
        tokenizer_folder = find_checkpoint(config.tokenizer) if config.tokenizer else folder
        tokenizer = load_tokenizer(tokenizer_folder)
        self._assemble(config, model_config, tokenizer, ModelRunner(config, model_config, folder))

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
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.model_runner = runner
        self.end_token_ids = end_token_ids(tokenizer, model_config)
        self._request_ids = itertools.count()
        self._is_closed = False
        self.reset()

    def reset(self) -> None:
        """Forget all requests, steps under way and the prefix cache: a clean start, whatever state an error left."""
        self.scheduler = Scheduler(self.config, self.end_token_ids)
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[tuple[list[Sequence], bool, int, Promise]] = deque()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one request; may be called between steps, also from another thread.

        Args:
            prompt: Text or token ids.
            sampling_params: Defaults to `SamplingParams()`.

        Returns:
            The request's number, which its output carries as `request_id`.

        Raises:
            TypeError: A prompt or parameters of the wrong type.
            ValueError: An empty prompt, one that leaves no room for a token, ids outside the vocabulary, or a prompt
                that can never fit into KV memory.
            RuntimeError: The engine is closed.
        """
        self._check_open()
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {params!r}.")
        token_ids = self.encode([prompt])[0] if isinstance(prompt, str) else check_token_ids(prompt)
        if isinstance(token_ids, Exception):
            raise ValueError(f"The prompt cannot be tokenized: {token_ids}") from token_ids
        self._check_row(token_ids)
        seq_id = next(self._request_ids)
        seq = Sequence(token_ids, params, seq_id, request_key(params.seed, self.config.seed, seq_id, token_ids))
        self._sequences[seq_id] = seq
        try:
            self.scheduler.add(seq)
        except ValueError:
            del self._sequences[seq_id]
            raise
        return seq_id

    def step(self) -> tuple[list[RequestOutput], int]:
        """Launch what can run, then book the oldest step under way.

        Returns:
            The outputs of the requests that ended with it, and the tokens of a prefill step or minus the sequences of
            a decode step; ``([], 0)`` when idle.

        Raises:
            RuntimeError: The engine is closed.
        """
        self._check_open()
        try:
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
                self.scheduler.postprocess(seqs, promise.wait(), is_prefill)
            finished = self.scheduler.take_finished()
            if not num_tokens and not finished and not self.is_finished():
                raise RuntimeError("The scheduler can run nothing although requests wait; this is a fault of nanovllm.")
            return [self._output(seq) for seq in finished], num_tokens
        except BaseException:
            self.reset()
            raise

    def is_finished(self) -> bool:
        """Return whether no request waits, runs or has a step under way."""
        return not self._in_flight and not self.scheduler.finished and self.scheduler.is_finished()

    def abort(self, request_id: int) -> None:
        """Drop a request; it gives no output. Unknown and ended ids are ignored."""
        seq = self._sequences.pop(request_id, None)
        if seq is not None:
            self.scheduler.abort(seq)

    def exit(self) -> None:
        """Let go of weights, cache and requests; any number of times."""
        if not getattr(self, "_is_closed", True):
            self._is_closed = True
            self.reset()
            self.model_runner.exit()

    close = exit

    def encode(self, prompts: SequenceOf[str]) -> list[list[int] | Exception]:
        """Tokenize texts together; in the place of one that the tokenizer refuses stands its exception.

        Raises:
            ValueError: The model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model!r} has no tokenizer files: give prompts as token ids, not as text.")
        try:
            return list(self.tokenizer(list(prompts))["input_ids"]) if prompts else []
        except Exception as error:  # the tokenizer's errors are of no common kind
            if len(prompts) == 1:
                return [error]
            return [ids for prompt in prompts for ids in self.encode([prompt])]

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("This engine is closed; make a new one.")

    def _check_row(self, token_ids: SequenceOf[int]) -> None:
        limit, vocab_size = self.config.max_model_len, self.model_config.vocab_size
        if not token_ids:
            raise ValueError("The prompt is empty: it needs at least one token.")
        if len(token_ids) >= limit:
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens, which leaves no room for a completion within "
                f"max_model_len={limit}. Shorten it or raise max_model_len."
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"Token id {bad} is outside the vocabulary: ids run from 0 to {vocab_size - 1}.")

    def _output(self, seq: Sequence) -> RequestOutput:
        self._sequences.pop(seq.seq_id, None)
        token_ids = seq.completion_token_ids
        text = "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert seq.finish_reason is not None
        return RequestOutput(
            index=0,
            request_id=seq.seq_id,
            text=text,
            token_ids=token_ids,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            finish_reason=seq.finish_reason,
            num_cached_tokens=seq.num_prefix_hit_tokens or 0,
            error=seq.error,
        )


def settle_config(config: Config, model_config: ModelConfig) -> Config:
    """Return the config with device, dtype and length limit settled for this machine and model.

    Raises:
        ValueError: A device that this machine does not have, or a tensor-parallel size that it cannot serve.
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
    if config.tensor_parallel_size != 1:
        raise ValueError(f"tensor_parallel_size={config.tensor_parallel_size} is not supported yet; use 1.")
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
    return dataclasses.replace(config, device=device, dtype=dtype, max_model_len=max_model_len)


def check_token_ids(prompt: Any) -> list[int]:
    """Return a prompt of token ids as a list of ints; TypeError if it is anything else."""
    ids = np.asarray(prompt) if isinstance(prompt, list | tuple | np.ndarray) else None
    if ids is None or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"A prompt must be a str or a list of ints, not {shorten(prompt)}.")
    return ids.tolist()


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
