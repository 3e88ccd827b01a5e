"""Config: every knob of an engine, its unit, its default and its check.

Frozen after construction. Knows numbers and names, not tensors: what depends on the machine or the checkpoint
is settled once by `LLMEngine`, which replaces "auto" and None by what it chose.
"""

import re
from dataclasses import dataclass

from nanovllm.utils.checks import check_bool, check_choice, check_float, check_int, strict_keywords

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "torch")


@strict_keywords
@dataclass(frozen=True)
class Config:
    """Settings of one engine.

    Args:
        model: A folder with a checkpoint, a hub id, or "embedded" for the model inside the package.
        max_num_batched_tokens: Token budget of a prefill step.
        max_num_seqs: Sequences alive (holding KV memory) at once.
        max_model_len: Tokens of a prompt and its completion together; capped by the model's own limit.
        gpu_memory_utilization: Share of the card's total memory that the engine may take (no meaning on a CPU).
        tensor_parallel_size: Ranks, each a process, that weights and KV cache are split over.
        enforce_eager: True: no CUDA graphs.
        kvcache_block_size: Tokens a KV block holds; None: chosen by the attention backend.
        num_kvcache_blocks: KV blocks in the pool; None or -1: measured.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on a CPU, elsewhere the checkpoint's), "float32", "bfloat16" or "float16".
        attention_backend: "auto", "flash_attn", "triton" or "torch".
        load_format: "auto", or "dummy" for random weights from config.json alone.
        greedy_admission: True: a prompt is admitted as soon as there is a place and room for its tokens, as in
            nano-vLLM. False: also only if the pool is expected to hold what all will grow to, and some at a time.
        lookahead: Steps that the host prepares while an earlier one is still running: 0 or 1.
        seed: Engine seed, from which requests without a seed of their own draw.
        tokenizer: Folder or hub id of the tokenizer; None: the model's.
        revision: Branch, tag or commit on the hub.

    Raises:
        TypeError: Unknown keyword (the nearest known name is offered) or a value of the wrong type.
        ValueError: A value out of range.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    load_format: str = "auto"
    greedy_admission: bool = False
    lookahead: int = 1
    seed: int = 0
    tokenizer: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "model")):
                raise TypeError(f"{name} must be a string (a folder or a hub id), not {value!r}.")
            if value is not None and not value.strip():
                raise ValueError(f"{name}={value!r} is empty; give a folder, a hub id or 'embedded'.")
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1, 65535)  # a launch on a GPU has no more rows
        check_int("max_model_len", self.max_model_len, 2)
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, above=True)
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_bool("enforce_eager", self.enforce_eager)
        check_bool("greedy_admission", self.greedy_admission)
        if self.kvcache_block_size is not None:
            check_int("kvcache_block_size", self.kvcache_block_size, 1)
        if self.num_kvcache_blocks is not None and self.num_kvcache_blocks != -1:
            check_int("num_kvcache_blocks", self.num_kvcache_blocks, 1, 2**31 - 1)  # block tables are int32
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(
                f"device={self.device!r} is unknown. Known: 'auto', 'cpu', 'cuda', 'cuda:0', 'cuda:1', ..."
            )
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        check_int("lookahead", self.lookahead, 0, 1)
        check_int("seed", self.seed, -(2**63), 2**64 - 1)
