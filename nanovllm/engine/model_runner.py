"""ModelRunner: one rank's weights, KV cache, inputs, forward and sampling.

Sequences become flat arrays here, once a step; everything after that sees arrays only. It decides nothing about which
sequences run.
"""

import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.attention import create_backend
from nanovllm.config import Config
from nanovllm.engine.decode_state import DecodeRows
from nanovllm.engine.device import create_device, is_out_of_memory
from nanovllm.engine.extras import build_extras
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import DecodeInput, HostTensors, PendingStep, PrefillInput, Promise
from nanovllm.layers.attention import Attention
from nanovllm.layers.logits_processors import LogitsExtras, process_logits, top_logprobs
from nanovllm.layers.sampler import SamplingInputs
from nanovllm.models import model_class
from nanovllm.models.config import ModelConfig
from nanovllm.utils.context import Context, step_context
from nanovllm.utils.loader import fill_with_random_weights, load_model
from nanovllm.utils.parallel import SINGLE, TensorParallel

logger = logging.getLogger("nanovllm")

_LOGITS_SLICE = 64  # prompt tokens whose logits exist at once

Logprobs = tuple[torch.Tensor, torch.Tensor]  # token ids and values, as from `top_logprobs`


class PromptSlice(NamedTuple):
    """Prompt tokens whose log-probabilities are wanted: index of their sequence, how many others to list, the ids."""

    seq_index: int
    num_logprobs: int
    token_ids: list[int]


class ModelRunner:
    """Runs steps on one device, perhaps as one of several ranks.

    `run` lays out a step on rank 0. `run_prefill` and `run_decode` are what every rank does with it, down to the tokens
    on its own device.

    Args:
        config: Knobs, with `device`, `dtype` and the lengths settled.
        model_config: The checkpoint's shape.
        folder: The checkpoint's folder.
        tp: This rank's place among those that share the model.

    Raises:
        ValueError: Weights that do not fit, a backend that does not run here, a block size that it cannot take.
    """

    def __init__(self, config: Config, model_config: ModelConfig, folder: Path, tp: TensorParallel = SINGLE) -> None:
        self.tp = tp
        self._pid = os.getpid()
        self._exiting = threading.RLock()
        self.model_config = model_config
        self.end_token_ids: Collection[int] = ()  # the tokens that `min_tokens` holds back; set by the engine
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.backend = create_backend(
            config.attention_backend, config.device.partition(":")[0], config.kvcache_block_size
        )
        self.block_size = config.kvcache_block_size or self.backend.default_block_size
        self.backend.check(self.block_size, self.dtype)
        self.max_blocks = -(-config.max_model_len // self.block_size)  # of one sequence
        self.is_eager = config.enforce_eager or not self.backend.can_capture
        self.startup_s: dict[str, float] = {}  # seconds of each part of the start
        self.device_ops = create_device(config)
        self.device = self.device_ops.torch_device
        try:
            with torch.inference_mode(), self.device_ops.active(), _defaults(self.device, self.dtype):
                self._build(config, folder)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"{config.model!r} in {config.dtype} with max_num_batched_tokens={config.max_num_batched_tokens} and "
                f"max_num_seqs={config.max_num_seqs} does not fit on {self.device}: {str(error).splitlines()[0]} "
                "Free the card, lower these, or take a smaller model."
            ) from error

    def _build(self, config: Config, folder: Path) -> None:
        self.decode_state = self.device_ops.decode_state(config.max_num_seqs, self.max_blocks, self.block_size)
        self._last_rows: dict[int, int] = {}  # where each sequence stands in the last step's samples
        with self.timed("weights"):
            self.model = model_class(self.model_config.architecture)(self.model_config, config.max_model_len, self.tp)
            if config.load_format == "dummy":
                fill_with_random_weights(self.model, config.seed % 2**32)
            else:
                load_model(self.model, folder)
        weight_mb = sum(p.numel() * p.element_size() for p in self.model.parameters()) / 1e6
        self.device_ops.optimize(self, config)
        self.num_blocks = self.allocate_kv_cache(config)
        self.device_ops.capture(self, config)
        blocks = f"{self.num_blocks} KV blocks of {self.block_size} tokens ({self.kv_cache.nbytes / 1e6:.1f} MB)"
        logger.info(
            f"{self.model_config.architecture} on {self.device}: {weight_mb:.1f} MB of weights, {blocks}, "
            f"attention backend {self.backend.name}{self.device_ops.describe()}"
        )

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long a part of the start takes."""
        start = time.perf_counter()
        yield
        self.startup_s[part] = time.perf_counter() - start

    def allocate_kv_cache(self, config: Config) -> int:
        """Allocate the KV pool, give each attention layer its view, and return the number of blocks."""
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        shape = (self.block_size, layers[0].num_kv_heads, layers[0].head_dim)
        block_bytes = 2 * len(layers) * int(np.prod(shape)) * self.dtype.itemsize

        def allocate(num_blocks: int) -> None:
            # Left uninitialised: nothing reads a slot before it is written, and untouched pages cost no memory.
            try:
                self.kv_cache = torch.empty(2, len(layers), num_blocks, *shape)
            except RuntimeError as error:
                raise ValueError(
                    f"{num_blocks} KV blocks of kvcache_block_size={self.block_size} tokens, {block_bytes} bytes each, "
                    f"cannot be allocated on {self.device}. Lower num_kvcache_blocks or kvcache_block_size."
                ) from error
            for i, layer in enumerate(layers):
                layer.k_cache, layer.v_cache = self.kv_cache[0, i], self.kv_cache[1, i]
                layer.backend = self.backend

        allocate(1)  # for the warm-up
        num_blocks = self.device_ops.num_kvcache_blocks(self, config, block_bytes)
        if config.num_kvcache_blocks is not None and config.num_kvcache_blocks != -1:
            num_blocks = config.num_kvcache_blocks
        num_blocks = self.tp.least(num_blocks)
        allocate(num_blocks)
        return num_blocks

    def warmup_model(self, config: Config) -> tuple[int, int]:
        """Run the largest steps once on a GPU, which compiles kernels; return the peak bytes of prefill and decode."""
        from nanovllm.engine.cuda_device import peak_bytes

        num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * (config.max_model_len - 1))
        # Few long sequences compile the kernels for long contexts, many short ones need the most logits.
        counts = (-(-num_tokens // (config.max_model_len - 1)), min(config.max_num_seqs, num_tokens))
        lens = [np.full(n, num_tokens // n) + (np.arange(n) < num_tokens % n) for n in counts]
        prefill = max(peak_bytes(functools.partial(self.run_prefill, self.idle_prefill(n))) for n in lens)
        return prefill, peak_bytes(functools.partial(self.decode_rows, config.max_num_seqs))

    def idle_prefill(self, lens: np.ndarray) -> PrefillInput:
        """Return a step of sequences with these many new tokens that writes nothing: all slots are -1."""
        ends, num_seqs = np.cumsum(lens), len(lens)
        cu_seqlens = np.concatenate(([0], ends)).astype(np.int32)
        return PrefillInput(
            input_ids=np.zeros(ends[-1], np.int64),
            positions=np.concatenate([np.arange(length) for length in lens]),
            slot_mapping=np.full(ends[-1], -1, np.int64),
            block_tables=np.zeros((num_seqs, self.max_blocks), np.int32) if self.backend.always_paged else None,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            **_sampling_arrays([Sequence([0])] * num_seqs, ends - 1),
        )

    @torch.inference_mode()
    def run(self, seqs: SequenceOf[Sequence], is_prefill: bool) -> Promise:
        """Launch one step and return its results as a promise.

        Args:
            seqs: The step's sequences: `num_scheduled_tokens` behind `num_cached_tokens` are computed.
            is_prefill: Whether more than one token a sequence may be due.

        Raises:
            RuntimeError: The device's memory does not suffice; names what to lower.
        """
        try:
            with self.device_ops.active():
                return self._prefill(seqs) if is_prefill else self._decode(seqs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"Out of memory on {self.device} in a {'prefill' if is_prefill else 'decode'} step of {len(seqs)} "
                f"sequences: {str(error).splitlines()[0]} All requests are dropped"
                f"{'' if self.tp.size > 1 else '; the engine can go on'}. Lower gpu_memory_utilization, "
                "max_num_batched_tokens or max_num_seqs, or free the device."
            ) from error

    def _prefill(self, seqs: SequenceOf[Sequence]) -> PendingStep:
        self.decode_state.forget(seqs)
        step = self.prepare_prefill(seqs)
        sampled = [seq for seq in seqs if seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens]
        extras = self._extras(sampled)
        places, slices = _prompt_slices(seqs)
        step = dataclasses.replace(step, has_extras=extras is not None, prompt_slices=places)
        self.tell("run_prefill", step)
        tokens, logprobs, prompt_logprobs = self.run_prefill(step, extras, slices)
        self._last_rows = {seq.seq_id: row for row, seq in enumerate(sampled)}
        rows = [self._last_rows.get(seq.seq_id) for seq in seqs]
        return self._promise(seqs, rows, tokens, logprobs, prompt_logprobs)

    def _decode(self, seqs: SequenceOf[Sequence]) -> PendingStep:
        state = self.decode_state
        step = self.prepare_decode(seqs)
        if step.order is not None:
            self._last_rows = {seq.seq_id: row for row, seq in enumerate(state.seqs)}
        extras = self._extras(state.seqs)
        if extras is not None:
            step = dataclasses.replace(step, has_extras=True)
        self.tell("run_decode", step)
        tokens, logprobs = self.run_decode(step, extras)
        return self._promise(seqs, state.rows, tokens, logprobs, {})

    def tell(self, command: str, step: PrefillInput | DecodeInput) -> None:
        """Have the other ranks, where there are any, run one of the two methods below; see `ParallelRunner`."""

    def prepare_prefill(self, seqs: SequenceOf[Sequence]) -> PrefillInput:
        """Lay out a prefill step: the scheduled tokens of all sequences in one row."""
        forks = [seq for seq in seqs if not seq.num_scheduled_tokens]
        seqs = [seq for seq in seqs if seq.num_scheduled_tokens]
        starts = [seq.num_cached_tokens for seq in seqs]
        ends = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs]
        lens = [seq.num_scheduled_tokens for seq in seqs]
        positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        tables = _block_tables(seqs)
        blocks = tables[np.repeat(np.arange(len(seqs)), lens), positions // self.block_size].astype(np.int64)
        cu_seqlens_q = np.concatenate(([0], np.cumsum(lens)))
        rows: list[tuple[Sequence, int]] = []
        copies: list[tuple[int, int]] = []
        for seq, end, last in zip(seqs, ends, cu_seqlens_q[1:] - 1, strict=True):
            if end == seq.num_tokens:
                rows.append((seq, last))
            for fork in forks:  # it samples from the same logits as the sequence whose prefill it shares
                if fork.forked_from is seq:
                    rows.append((fork, last))
                    if end % self.block_size:
                        copies.append((seq.block_table[-1], fork.block_table[-1]))
        return PrefillInput(
            input_ids=np.array(
                [token for seq, a, b in zip(seqs, starts, ends, strict=True) for token in seq.token_ids[a:b]], np.int64
            ),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            block_tables=tables if any(starts) or self.backend.always_paged else None,
            cu_seqlens_q=cu_seqlens_q.astype(np.int32),
            cu_seqlens_k=np.concatenate(([0], np.cumsum(ends))).astype(np.int32),
            block_copies=np.array(copies, np.int64) if copies else None,
            **_sampling_arrays([seq for seq, _ in rows], [last for _, last in rows]),
        )

    def prepare_decode(self, seqs: SequenceOf[Sequence]) -> DecodeInput:
        """Return what the device does not know yet of a decode step: the newest token of each sequence."""
        return self.decode_state.prepare(seqs, self._last_rows)

    def run_decode(self, step: DecodeInput, extras: LogitsExtras | None = None) -> tuple[torch.Tensor, Logprobs | None]:
        """Run a decode step; returns its tokens, and log-probabilities if a row asks for them.

        Args:
            step: What has changed since the last step.
            extras: On rank 0, if the step has extras.
        """
        if any(part.size for part in step.parts):
            self.decode_state.apply(self._to_device(step.packet), step)
        replayed = self.device_ops.replay(step.num_rows)
        if replayed is None:
            return self.decode_rows(step.num_rows, step.has_extras, extras)[-2:]
        rows, logits, tokens = replayed
        if not step.has_extras:
            return tokens, None
        rows = rows.first(step.num_rows)
        tokens, logprobs = self._sample(logits, rows.sampling, True, extras, rows.input_ids)
        self.decode_state.replace_tokens(tokens)
        return tokens, logprobs

    def decode_rows(
        self,
        num_rows: int,
        has_extras: bool = False,
        extras: LogitsExtras | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[DecodeRows, torch.Tensor, torch.Tensor, Logprobs | None]:
        """Compute the next token of the first rows of `decode_state` and advance them.

        Without extras this is what a CUDA graph captures. Returns the rows, this rank's part of their logits [num_rows,
        vocabulary] (in ``out`` if it is given), tokens [num_rows], and log-probabilities if a row asks for them.
        """
        rows = self.decode_state.lay_out(num_rows)
        with step_context(rows.context):
            logits = self.model.compute_logits(self.model(rows.input_ids, rows.positions), out)
        tokens, logprobs = self._sample(logits, rows.sampling, has_extras, extras, rows.input_ids)
        self.decode_state.advance(tokens)
        return rows, logits, tokens, logprobs

    def exit(self) -> None:
        """Let go of weights and cache; any number of times, in any thread."""
        for name in ("model", "kv_cache", "decode_state"):
            self.__dict__.pop(name, None)
        if hasattr(self, "device_ops") and os.getpid() == self._pid:  # not if it could not be built, nor in a fork
            with self._exiting:
                self.device_ops.graphs = None  # before the group, which waits until no graph holds its collectives
                try:
                    self.tp.close()
                    self.tp.group = None  # its sockets and threads end with it
                finally:
                    self.device_ops.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.exit()

    def run_prefill(
        self, step: PrefillInput, extras: LogitsExtras | None = None, slices: SequenceOf[PromptSlice] = ()
    ) -> tuple[torch.Tensor, Logprobs | None, dict[int, list[Logprobs]]]:
        """Run a prefill step; returns tokens and log-probabilities of its rows, and those of prompts by sequence.

        Args:
            step: The arrays.
            extras: On rank 0, if the step has extras.
            slices: On rank 0, what the step's prompt slices hold.
        """
        context = Context(
            slot_mapping=self._to_device(step.slot_mapping),
            cu_seqlens_q=self._to_device(step.cu_seqlens_q),
            cu_seqlens_k=self._to_device(step.cu_seqlens_k),
            max_seqlen_q=int(np.diff(step.cu_seqlens_q).max()),
            max_seqlen_k=int(np.diff(step.cu_seqlens_k).max()),
            block_tables=None if step.block_tables is None else self._to_device(step.block_tables),
            logits_indices=self._to_device(step.logits_indices),
        )
        with step_context(context):
            input_ids = self._to_device(step.input_ids)
            hidden_states = self.model(input_ids, self._to_device(step.positions))
            prompt_logprobs = self._prompt_logprobs(step, slices, hidden_states, context)
            logits = self.model.compute_logits(hidden_states)  # of no row in the first chunks of a long prompt
        tokens, logprobs = torch.empty(0, dtype=torch.int64, device=self.device), None
        if len(logits):
            sampling = SamplingInputs(
                self._to_device(step.temperatures),
                self._to_device(step.keys),
                self._to_device(step.output_positions),
                self._to_device(step.sample_indices),
            )
            newest_tokens = input_ids[context.logits_indices]
            tokens, logprobs = self._sample(logits, sampling, step.has_extras, extras, newest_tokens)
        if step.block_copies is not None:
            source, target = self._to_device(step.block_copies).unbind(1)
            self.kv_cache[:, :, target] = self.kv_cache[:, :, source]
        self.decode_state.last_tokens[: len(tokens)] = tokens
        return tokens, logprobs, prompt_logprobs

    def _extras(self, seqs: SequenceOf[Sequence]) -> LogitsExtras | None:
        return build_extras(seqs, self.end_token_ids, self.model_config.vocab_size, self._to_device)

    def _sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingInputs,
        has_extras: bool,
        extras: LogitsExtras | None,
        newest_tokens: torch.Tensor,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Return the tokens sampled from the ranks' logits, and log-probabilities if a row asks for them."""
        if not has_extras:
            return self.tp.pick(*self.device_ops.sample(logits, sampling, self.model.lm_head.vocab_start)), None
        logits = self.tp.whole_logits(logits, self.model_config.vocab_size)
        tokens, logprobs = torch.zeros_like(newest_tokens), None
        if extras is not None:  # on rank 0, which knows what the rows ask for
            tokens, _ = self.device_ops.sample(process_logits(logits, extras, newest_tokens), sampling, 0)
            if len(rows := extras.logprob_rows):
                logprobs = top_logprobs(logits[rows], tokens[rows], extras.num_logprobs)
        return self.tp.of_rank_0(tokens), logprobs

    def _promise(
        self,
        seqs: SequenceOf[Sequence],
        rows: SequenceOf[int | None],
        tokens: torch.Tensor,
        logprobs: Logprobs | None,
        prompt_logprobs: dict[int, list[Logprobs]],
    ) -> PendingStep:
        """Start the copies of a step's results to the host."""
        return PendingStep(
            seqs=seqs,
            rows=rows,
            tokens=self._download(tokens),
            logprobs=None if logprobs is None else self._download(*logprobs),
            prompt_logprobs={i: [self._download(*s) for s in slices] for i, slices in prompt_logprobs.items()}
            if prompt_logprobs
            else None,
        )

    def _prompt_logprobs(
        self, step: PrefillInput, slices: SequenceOf[PromptSlice], hidden_states: torch.Tensor, context: Context
    ) -> dict[int, list[Logprobs]]:
        """Return log-probabilities of prompt tokens by index of their sequence; on rank 0 alone."""
        found: dict[int, list[Logprobs]] = {}
        for i, (first, count) in enumerate(() if step.prompt_slices is None else step.prompt_slices.tolist()):
            rows = torch.arange(first, first + count, device=self.device)
            with step_context(dataclasses.replace(context, logits_indices=rows)):
                logits = self.tp.whole_logits(self.model.compute_logits(hidden_states), self.model_config.vocab_size)
            if slices:
                index, num, token_ids = slices[i]
                chosen = self._to_device(np.array(token_ids, np.int64))
                found.setdefault(index, []).append(top_logprobs(logits, chosen, num))
        return found

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return self.device_ops.upload(array)

    def _download(self, *tensors: torch.Tensor) -> HostTensors:
        """Start copying tensors to the host; the result waits and returns them as lists."""
        waits = [self.device_ops.download(tensor) for tensor in tensors]
        return lambda: tuple(wait().tolist() for wait in waits)


def _prompt_slices(seqs: SequenceOf[Sequence]) -> tuple[np.ndarray | None, list[PromptSlice]]:
    """Return the prompt tokens that this step's chunks predict, for those that ask: where they are, and what."""
    places: list[tuple[int, int]] = []
    slices: list[PromptSlice] = []
    first_index = 0
    for i, seq in enumerate(seqs):
        if seq.num_scheduled_tokens and seq.wants_prompt_logprobs:
            start = seq.num_cached_tokens
            targets = seq.token_ids[start + 1 : min(start + 1 + seq.num_scheduled_tokens, seq.num_prompt_tokens)]
            for at in range(0, len(targets), _LOGITS_SLICE):
                part = targets[at : at + _LOGITS_SLICE]
                places.append((first_index + at, len(part)))
                slices.append(PromptSlice(i, seq.sampling_params.prompt_logprobs or 0, part))
        first_index += seq.num_scheduled_tokens
    return np.array(places, np.int64) if places else None, slices


def _sampling_arrays(seqs: SequenceOf[Sequence], logits_indices: Iterable[int]) -> dict[str, Any]:
    """Return the fields of `PrefillInput` that have one entry for each sampled row."""
    keys = np.array([seq.request_key for seq in seqs], np.uint64)
    return {
        "logits_indices": np.array(list(logits_indices), np.int64),
        "temperatures": np.array([seq.sampling_params.temperature for seq in seqs], np.float32),
        "keys": np.stack((keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)), axis=-1).astype(np.int64),
        "output_positions": np.array([seq.num_completion_tokens for seq in seqs], np.int64),
        "sample_indices": np.array([seq.sample_index for seq in seqs], np.int64),
    }


def _block_tables(seqs: SequenceOf[Sequence]) -> np.ndarray:
    """Return the sequences' block tables, [num_seqs, max_blocks] int32, padded with -1."""
    tables = np.full((len(seqs), max(len(seq.block_table) for seq in seqs)), -1, np.int32)
    for row, seq in zip(tables, seqs, strict=True):
        row[: len(seq.block_table)] = seq.block_table
    return tables


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Create tensors with this device and dtype inside the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
