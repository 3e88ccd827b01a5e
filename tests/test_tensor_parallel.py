"""One model over several ranks: the answers of one rank, and nothing left of any trouble."""

import contextlib
import dataclasses
import functools
import gc
import operator
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from test_executor import Script
from tiny_models import TinyConfig, assert_greedy, reference_logits
from traces import SECONDS, Traces, watch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import executor, model_runner, parallel_runner
from nanovllm.engine.channel import encode
from nanovllm.engine.device import CpuDevice
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import DecodeInput, PrefillInput, from_arrays, to_arrays
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils import parallel, signals
from nanovllm.utils.loader import find_checkpoint, load_model
from nanovllm.utils.parallel import SINGLE, TensorParallel

Checkpoint = Callable[[TinyConfig], Path]
Reference = Callable[..., Any]

SHAPES = {
    # 2 KV heads: at 4 ranks each is on two of them. 1101 tokens: the last ranks have padding.
    "odd": TinyConfig(heads=4, kv_heads=2, intermediate=36, vocab=1101),
    "bias": TinyConfig(
        hidden=28, layers=3, heads=8, kv_heads=4, head_dim=6, intermediate=44, vocab=1024, tied=False, bias=True
    ),
    # Fewer tokens than one sampler chunk: all but rank 0 have none.
    "small": TinyConfig(hidden=36, heads=4, kv_heads=1, head_dim=6, intermediate=52, vocab=97, tied=False, eps=1e-6),
}  # fmt: skip
TIGHT = {"greedy_admission": True, "max_num_batched_tokens": 50}
# Shape, ranks, knobs; those with a tight pool preempt.
ENGINES: list[tuple[str, int, dict[str, Any]]] = [
    ("odd", 2, {"kvcache_block_size": 4, "num_kvcache_blocks": 40, "lookahead": 1, **TIGHT}),
    ("odd", 4, {"num_kvcache_blocks": 10, "lookahead": 0, **TIGHT}),
    ("bias", 2, {"num_kvcache_blocks": 500, "lookahead": 0}),
    ("bias", 4, {"kvcache_block_size": 1, "num_kvcache_blocks": 150, "lookahead": 1, **TIGHT}),
    ("small", 2, {"kvcache_block_size": 64, "num_kvcache_blocks": 3, "lookahead": 1, **TIGHT}),
    ("small", 4, {"num_kvcache_blocks": 12, "lookahead": 1, **TIGHT}),
]

CARDS = {"device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 24, "gpu_memory_utilization": 0.2}
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
on_two_cards = pytest.param("cuda", marks=[pytest.mark.gpu, two_cards])


def make_llm(folder: Path, size: int, **knobs: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "max_model_len": 600, "tensor_parallel_size": size} | knobs)


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **settings)


def make_prompts(num: int, vocab: int, seed: int = 0, most: int = 60) -> list[list[int]]:
    """Return prompts of random lengths, half of which begin alike."""
    rng = random.Random(seed)
    head = [rng.randrange(vocab) for _ in range(33)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, most))] for _ in range(num)]
    return [head + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]


def token_ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    assert all(out.error is None for out in outputs), outputs
    return [[sample.token_ids for sample in out.outputs] for out in outputs]


# The same answers.


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: f"{engine[0]}-{engine[1]}")
def pair(request: pytest.FixtureRequest, tiny_checkpoint: Checkpoint) -> Iterator[tuple[LLM, LLM, TinyConfig]]:
    """An engine of several ranks, one of one rank with the same knobs, and their shape."""
    name, size, knobs = request.param
    folder = tiny_checkpoint(SHAPES[name])
    with make_llm(folder, size, **knobs) as several, make_llm(folder, 1, **knobs) as one:
        yield several, one, SHAPES[name]


def test_greedy_output_is_that_of_one_rank_and_of_transformers(
    pair: tuple[LLM, LLM, TinyConfig], tiny_reference: Reference
) -> None:
    several, one, shape = pair
    prompts = make_prompts(24, shape.vocab)
    params = [greedy(10 + i % 15) for i in range(24)]
    outputs = several.generate(prompts, params, use_tqdm=False)
    assert [len(out.token_ids) for out in outputs] == [10 + i % 15 for i in range(24)]
    assert_greedy(tiny_reference(shape), outputs)
    assert token_ids(outputs) == token_ids(one.generate(prompts, params, use_tqdm=False))
    preemptions = [llm.engine.stats()["num_preemptions"] for llm in (several, one)]
    assert preemptions[0] == preemptions[1]
    assert (preemptions[0] > 0) == several.engine.config.greedy_admission
    assert several.engine.config.num_kvcache_blocks == one.engine.config.num_kvcache_blocks
    several.engine.scheduler.block_manager.check_invariants([])


def test_the_prefix_cache_holds_what_each_rank_needs(
    pair: tuple[LLM, LLM, TinyConfig], tiny_reference: Reference
) -> None:
    several, _, shape = pair
    block_size = several.engine.config.kvcache_block_size
    assert block_size
    prompt = [i * 7 % shape.vocab for i in range(2 * block_size + 1)]
    for num_cached in (0, 2 * block_size):
        outputs = several.generate([prompt], greedy(12), use_tqdm=False)
        assert outputs[0].num_cached_tokens == num_cached
        assert_greedy(tiny_reference(shape), outputs)


def mixed_params(vocab: int) -> list[SamplingParams]:
    """Return parameters of all kinds, so that plain rows and rows with extras share steps."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.2},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 9, "seed": 1},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
        {"temperature": 1.1, "presence_penalty": 1.0, "logprobs": 3},
        {"temperature": 1.0, "n": 3, "seed": 2},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
        {"temperature": 1.0, "logit_bias": {vocab - 1: 4.0, 3: -100.0}, "prompt_logprobs": 0},
        {"temperature": 1.0, "allowed_token_ids": [1, vocab // 2, vocab - 1]},
    ]
    return [SamplingParams(max_tokens=6 + i, **kind) for i, kind in enumerate(kinds)]


def assert_close(ours: Any, expected: Any) -> None:
    """Compare log-probabilities: a dict a token, or None."""
    assert (ours is None) == (expected is None)
    for a, b in zip(ours or (), expected or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a == pytest.approx(b, abs=1e-3)


@pytest.mark.parametrize("has_extras", [False, True])
def test_draws_and_extras_are_those_of_one_rank(has_extras: bool, tiny_checkpoint: Checkpoint) -> None:
    """New engines, as a request without a seed draws by its number."""
    shape = SHAPES["odd"]
    prompts = make_prompts(44, shape.vocab, seed=1)
    params = mixed_params(shape.vocab) if has_extras else mixed_params(shape.vocab)[:3]
    params = [params[i % len(params)] for i in range(44)]
    knobs = {"kvcache_block_size": 4, "num_kvcache_blocks": 120, "max_num_batched_tokens": 90, "greedy_admission": True}
    results = []
    for size in (1, 4 if has_extras else 2):
        with make_llm(tiny_checkpoint(shape), size, **knobs) as llm:
            results.append(llm.generate(prompts, params, use_tqdm=False))
            assert llm.engine.stats()["num_preemptions"]
    expected, ours = results
    assert token_ids(ours) == token_ids(expected)
    drawn = {token for row in token_ids(ours) for sample in row for token in sample}
    assert {token // 512 for token in drawn} == {0, 1, 2}  # every rank of 2, or 3 of 4, drew some
    for a, b in zip(ours, expected, strict=True):
        assert_close(a.prompt_logprobs, b.prompt_logprobs)
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert_close(x.logprobs, y.logprobs)


@pytest.fixture(scope="module")
def two_ranks(tiny_checkpoint: Checkpoint) -> Iterator[LLM]:
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 2, max_num_batched_tokens=100_000, num_kvcache_blocks=8000) as llm:
        yield llm


def test_hundreds_of_long_prompts_in_one_step_arrive_whole(
    two_ranks: LLM, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, sizes = SHAPES["odd"], list[int]()
    runner: Any = two_ranks.engine.model_runner
    tell = runner.tell

    def measure(command: str, step: PrefillInput | DecodeInput) -> None:
        sizes.append(len(encode(command, to_arrays(step), False)))
        tell(command, step)

    monkeypatch.setattr(runner, "tell", measure)
    prompts = make_prompts(400, shape.vocab, seed=2, most=380)
    outputs = two_ranks.generate(prompts, greedy(5), use_tqdm=False)
    assert max(sizes) > parallel_runner._SLOT_BYTES  # in several pieces
    assert_greedy(tiny_reference(shape), outputs)
    assert [len(out.token_ids) for out in outputs] == [5] * 400


def test_only_changes_travel_and_whole_logits_for_extras_alone(two_ranks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    wholes: list[int] = []
    runner: Any = two_ranks.engine.model_runner
    tell, whole_logits = runner.tell, TensorParallel.whole_logits

    def record(command: str, step: PrefillInput | DecodeInput) -> None:
        told.append((command, len(encode(command, to_arrays(step), False))))
        tell(command, step)

    def count(tp: TensorParallel, part: torch.Tensor, vocab_size: int) -> torch.Tensor:
        wholes.append(len(part))
        return whole_logits(tp, part, vocab_size)

    monkeypatch.setattr(runner, "tell", record)
    monkeypatch.setattr(TensorParallel, "whole_logits", count)
    prompts = make_prompts(200, 1101, seed=3)
    two_ranks.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert [command for command, _ in told] == ["run_prefill"] + ["run_decode"] * 11
    assert min(size for _, size in told) < 400 < 8 * 200  # not a word for each of the 200 rows
    assert wholes == []
    two_ranks.generate(prompts[:3], [greedy(4), greedy(4), greedy(4, logprobs=1)], use_tqdm=False)
    assert wholes == [3] * 4
    wholes.clear()
    two_ranks.generate([[1] * 100], greedy(2, prompt_logprobs=1), use_tqdm=False)
    assert wholes[:2] == [64, 35]


def test_a_step_survives_its_way_through_arrays() -> None:
    decode = DecodeInput(3, None, *(np.zeros((2, n), np.int32) for n in (8, 5, 3)), has_extras=True)
    copy = from_arrays(DecodeInput, to_arrays(decode))
    assert (copy.num_rows, type(copy.num_rows), copy.order, copy.has_extras) == (3, int, None, True)
    assert copy.new_tables is decode.new_tables
    prefill = PrefillInput(*(np.arange(i) for i in range(11)), prompt_slices=np.array([[4, 2]]))
    again = from_arrays(PrefillInput, to_arrays(prefill))
    assert (again.block_copies, again.has_extras) == (None, False)
    assert all(a is b for a, b in zip(to_arrays(again)[:13], to_arrays(prefill)[:13], strict=True))


@dataclasses.dataclass(eq=False)
class Gathered(TensorParallel):
    """A rank whose gathering gives what a test says."""

    gathered: Any = None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x if part is None else part for part in self.gathered])


def test_the_highest_score_wins_and_the_lowest_rank_among_equals() -> None:
    inf = float("inf")
    other = torch.tensor([[1.0, 2.0, -inf, 5.0, 3.0], [600, 601, 602, 603, 2**24 + 1]], dtype=torch.float64)
    tokens, scores = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1.0, 1.5, -9.0, 4.0, 2.0])
    for gathered, expected in (
        ((None, other), [0, 601, 2, 603, 2**24 + 1]),
        ((other, None), [600, 601, 2, 603, 2**24 + 1]),
    ):
        picked = Gathered(0, 2, gathered=gathered).pick(tokens, scores)
        assert picked.tolist() == expected
        assert picked.dtype == torch.int64
    assert SINGLE.pick(tokens, scores) is tokens
    few = Gathered(0, 2, gathered=(None, other), peers=SimpleNamespace(max_draws=4))
    assert few.pick(tokens, scores).tolist() == [0, 601, 2, 603, 2**24 + 1]  # it has too few places for five draws


def test_parts_of_logits_stand_in_order_of_ranks_without_padding() -> None:
    whole = torch.arange(21.0).reshape(3, 7)
    parts = torch.nn.functional.pad(whole, (0, 2)).split(3, 1)
    assert torch.equal(Gathered(1, 3, gathered=parts).whole_logits(parts[1], 7), whole)
    assert SINGLE.whole_logits(whole, 7) is whole
    assert torch.equal(Gathered(1, 2, gathered=[whole, None]).of_rank_0(-whole), whole)
    assert (SINGLE.least(5), Gathered(0, 2, gathered=[torch.tensor([3]), None]).least(5)) == (5, 3)


class ReadBytes:
    """A slice of a file that counts what is read of it."""

    def __init__(self, source: Any, counts: list[int]) -> None:
        self.source, self.counts = source, counts
        self.get_shape, self.get_dtype = source.get_shape, source.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.source[index]
        self.counts.append(part.nbytes)
        return part


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_the_weights_alone(
    rank: int, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, counts = SHAPES["bias"], list[int]()

    @contextlib.contextmanager
    def open_counting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with safe_open(*args, **kwargs) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda name: ReadBytes(file.get_slice(name), counts))

    monkeypatch.setattr("nanovllm.utils.loader.safe_open", open_counting)
    folder = tiny_checkpoint(shape)
    load_model(Qwen3ForCausalLM(ModelConfig.from_folder(folder), 16, TensorParallel(rank, 2)), folder)
    expected = 0
    for name, tensor in shape.tensors().items():
        expected += tensor.nbytes if "norm" in name or "o_proj.bias" in name else tensor.nbytes // 2
    assert sum(counts) == expected


# Settings.


@pytest.mark.parametrize(
    ("size", "changes", "knobs", "words"),
    [
        (3, {}, {}, "num_attention_heads=4 does not divide by tensor_parallel_size=3"),
        (8, {}, {}, "num_attention_heads=4 does not divide by tensor_parallel_size=8"),
        (2, {"intermediate": 35}, {}, "intermediate_size=35 does not divide by tensor_parallel_size=2"),
        (4, {"heads": 12, "kv_heads": 3}, {}, "num_key_value_heads=3 neither divides by tensor_parallel_size=4 nor"),
        (4, {"heads": 12, "kv_heads": 6}, {}, "num_key_value_heads=6 neither divides by tensor_parallel_size=4 nor"),
        (2, {}, {"device": "cuda"}, "tensor_parallel_size=2 needs as many CUDA devices; this machine has 1"),
        (0, {}, {}, "tensor_parallel_size=0 is out of range"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_starts(
    size: int, changes: dict, knobs: dict, words: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_runner, "Executor", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=words):
        make_llm(tiny_checkpoint(dataclasses.replace(SHAPES["odd"], **changes)), size, **knobs)


def test_one_card_by_its_number_is_refused_for_several_ranks(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"device='cuda:1' is one card; with tensor_parallel_size=2 use 'cuda'"):
        make_llm(tiny_checkpoint(SHAPES["odd"]), 2, device="cuda:1")


def test_ranks_share_the_cores_and_get_an_absolute_folder(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told, counts = tiny_checkpoint(SHAPES["odd"]), list[Any](), list[int]()
    make = parallel_runner.Executor
    monkeypatch.setattr(parallel_runner, "Executor", lambda *args, **kwargs: told.append(args) or make(*args, **kwargs))
    monkeypatch.setattr(ModelRunner, "run_prefill", ModelRunner.run_prefill)
    spoil(ModelRunner, "run_prefill", 1, lambda: counts.append(torch.get_num_threads()))
    monkeypatch.chdir(folder.parent)
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        with make_llm(Path(folder.name), 2) as llm:
            llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)
            assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
    assert counts == [2]
    assert told[0][2][2:] == (folder, 2)


def test_ranks_have_a_card_each() -> None:
    config = parallel_runner.Config("m", device="cuda", tensor_parallel_size=2)
    assert [parallel_runner._config_of(rank, config).device for rank in (0, 1)] == ["cuda:0", "cuda:1"]


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[Traces]:
    """Assert after a test that nothing is left of it."""
    with watch(tmp_path / "temp") as traces:
        yield traces


# Trouble. What the ranks run here is `faulty_rank`, in the new process.


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_connections_and_die() -> None:
    """Let the others fail before this process ends."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(fd)))
                connection.getpeername()  # not of one that listens: gloo's own thread would abort, as if it were closed
                connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.5)
    kill()


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def spoil(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Have a method ``act`` at its n-th call, before it does its work."""
    method, calls = getattr(owner, name), list[int]()

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return method(*args, **kwargs)

    setattr(owner, name, spoilt)


@contextlib.contextmanager
def spoilt_all_reduce(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Have rank 0 ``act`` at its n-th all-reduce inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorParallel, "all_reduce", TensorParallel.all_reduce)  # so that it comes back
        spoil(TensorParallel, "all_reduce", number, act)
        yield


def faulty_rank(faults: Any, rank: int, *args: Any) -> None:
    """Be a rank, of which the last has these faults: owner, method, call and act of each."""
    if rank == args[0].tensor_parallel_size - 1:
        for fault in faults:
            spoil(*fault)
    parallel_runner_run_rank(rank, *args)


parallel_runner_run_rank = parallel_runner.run_rank


def inject(monkeypatch: pytest.MonkeyPatch, *faults: Any) -> None:
    monkeypatch.setattr(parallel_runner, "run_rank", functools.partial(faulty_rank, faults))


@pytest.mark.parametrize(
    ("fault", "cause", "text"),
    [
        ((TensorParallel, "join", 1, kill), "SIGKILL", ""),
        ((TensorParallel, "join", 1, run_out_of_memory), "exit code 1", "OutOfMemoryError: CUDA out of memory"),
        ((ModelRunner, "timed", 1, kill), "SIGKILL", ""),
        ((ModelRunner, "allocate_kv_cache", 1, run_out_of_memory), "exit code 1", "does not fit on cpu"),
        ((TensorParallel, "least", 1, kill), "SIGKILL", ""),
    ],
    ids=["killed at start", "fails at start", "killed in loading", "out of memory", "killed in a collective"],
)  # fmt: skip
def test_a_rank_that_cannot_start_is_named(
    fault: Any, cause: str, text: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch,
    traces: Traces, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    inject(monkeypatch, fault)
    with pytest.raises(RuntimeError, match=rf"Tensor-parallel rank 1 died \({cause}\)") as error:
        make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    assert text in str(error.value)
    assert ("Traceback" in str(error.value)) == bool(text)
    assert not caplog.records
    traces.assert_none()


def test_of_several_dead_ranks_the_first_is_blamed(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    inject(monkeypatch, (TensorParallel, "all_reduce", 8, lose_connections_and_die))
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 4) as llm, pytest.raises(RuntimeError) as error:
        llm.generate([[1, 2, 3]], greedy(9), use_tqdm=False)
    assert str(error.value) == "Tensor-parallel rank 3 died (SIGKILL)."


IN_A_STEP = {
    "killed before a step": ((ModelRunner, "run_decode", 3, kill), "SIGKILL", ""),
    "killed in a collective of a step": ((TensorParallel, "all_reduce", 12, kill), "SIGKILL", ""),
    "killed in a pick": ((TensorParallel, "pick", 2, kill), "SIGKILL", ""),
    "out of memory": ((ModelRunner, "run_prefill", 2, run_out_of_memory), "exit code 1", "OutOfMemoryError: CUDA out"),
    "killed in a step with extras": ((TensorParallel, "whole_logits", 2, kill), "SIGKILL", ""),
}


@pytest.mark.parametrize("place", IN_A_STEP)
def test_a_rank_that_dies_in_a_step_is_named(
    place: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    fault, cause, text = IN_A_STEP[place]
    inject(monkeypatch, fault)
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2, max_num_batched_tokens=50)
    params = greedy(20, logprobs=1 if "extras" in place else None)
    begin = time.monotonic()
    for _ in range(2):  # and again, when all is over
        with pytest.raises(RuntimeError, match=rf"Tensor-parallel rank 1 died \({cause}\)") as error:
            llm.generate([[1] * 80, [2, 3]], params, use_tqdm=False)
        assert text in str(error.value)
        assert ("Traceback" in str(error.value)) == bool(text)
        traces.assert_none()
    assert time.monotonic() - begin < SECONDS + 3
    llm.close()


def test_a_rank_that_dies_between_calls_is_named(tiny_checkpoint: Checkpoint, traces: Traces) -> None:
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 2) as llm:
        llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
        os.kill(llm.engine.model_runner.executor._workers.processes[0].pid, signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match=r"rank 1 died \(SIGTERM\)"):
            llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
        traces.assert_none()


def test_a_rank_that_dies_in_close_is_logged(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    inject(monkeypatch, (ModelRunner, "exit", 1, kill))
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    llm.close()
    assert ["rank 1 died (SIGKILL)" in record.message for record in caplog.records] == [True]
    traces.assert_none()


def test_an_error_of_rank_0_in_a_step_stops_all_ranks(tiny_checkpoint: Checkpoint, traces: Traces) -> None:
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    with spoilt_all_reduce(4, run_out_of_memory):
        with pytest.raises(RuntimeError, match="Out of memory on cpu in a prefill step of 1 sequences") as error:
            llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
        assert "can go on" not in str(error.value)
    traces.assert_none()
    with pytest.raises(
        RuntimeError, match=r"Rank 0 failed, so all ranks were stopped; make a new engine. It was: .*Out"
    ):
        llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    llm.close()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


def interrupt_twice() -> None:
    interrupt()
    interrupt()


def stop(number: int, frame: Any) -> None:
    raise TimeoutError


@pytest.fixture
def timeout() -> Iterator[None]:
    """Have an alarm raise TimeoutError, as callers do to limit the time of a call."""
    previous = signal.signal(signal.SIGALRM, stop)
    yield
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("timeout")
@pytest.mark.parametrize("lookahead", [0, 1])
def test_ctrl_c_or_an_alarm_in_a_step_leaves_the_ranks_in_step(
    lookahead: int, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape, kinds = SHAPES["odd"], (signal.SIGINT, signal.SIGALRM)
    handlers = [signal.getsignal(kind) for kind in kinds]
    prompts = make_prompts(12, shape.vocab, seed=4)
    with make_llm(tiny_checkpoint(shape), 2, lookahead=lookahead, max_num_batched_tokens=50) as llm:
        for number in (1, 4, 6, 23, 40):  # in a chunk, in a decode step
            act, error = (alarm, TimeoutError) if number % 2 else (interrupt, KeyboardInterrupt)
            with spoilt_all_reduce(number, act), pytest.raises(error):
                llm.generate(prompts, greedy(15), use_tqdm=False)
            assert [signal.getsignal(kind) for kind in kinds] == handlers
            assert llm.is_finished()
            assert_greedy(tiny_reference(shape), llm.generate(prompts[number % 5 :], greedy(9), use_tqdm=False))


def test_a_second_ctrl_c_does_not_wait_and_ends_all_ranks(tiny_checkpoint: Checkpoint, traces: Traces) -> None:
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    with spoilt_all_reduce(4, interrupt_twice), pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    traces.assert_none()
    with pytest.raises(RuntimeError, match=r"make a new engine. It was: KeyboardInterrupt"):
        llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    llm.close()


def alarm_around_a_block(delay_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    with signals.interrupts_at_end():
        pass
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:  # asleep, it might be missed
        pass


def test_an_alarm_at_any_point_of_holding_back_leaves_the_handlers_in_their_place() -> None:
    kinds = signal.SIGINT, signal.SIGTERM, signal.SIGALRM
    previous = [signal.getsignal(kind) for kind in kinds]
    came: list[int] = []
    try:
        signal.signal(signal.SIGALRM, stop)
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
        gc.disable()  # Python drops what a handler raises in a callback of the collector
        for number in range(3000):
            with pytest.raises(TimeoutError):
                alarm_around_a_block(random.uniform(5e-6, 5e-5))
            signal.raise_signal(signal.SIGTERM)  # whatever stands in its handler's place passes it on
            assert len(came) == number + 1
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in zip(kinds, previous, strict=True):
            signal.signal(kind, handler)


def test_of_two_signals_in_a_step_neither_is_lost() -> None:
    came: list[int] = []
    numbers = signal.SIGALRM, signal.SIGTERM
    previous = [signal.signal(number, lambda number, frame: came.append(number)) for number in numbers]
    try:
        with signals.interrupts_at_end():
            for number in numbers:
                signal.raise_signal(number)
            assert came == []
            signal.raise_signal(numbers[0])
            assert came == [numbers[0]]  # a second of a kind does not wait
        assert came == [numbers[0], *numbers]
        came.clear()
        with pytest.raises(RuntimeError), signals.interrupts_at_end():  # noqa: PT012
            signal.raise_signal(numbers[1])
            raise RuntimeError
        assert came == [numbers[1]]
        signal.signal(numbers[0], stop)
        with pytest.raises(TimeoutError), signals.interrupts_at_end():  # noqa: PT012
            for number in numbers:
                signal.raise_signal(number)
        assert came == [numbers[1]] * 2  # though the first handler raised
        assert signal.getsignal(numbers[0]) is stop
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def test_ctrl_c_before_the_first_rank_starts_leaves_nothing(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    channel = executor.Channel

    def interrupted_channel(*args: Any) -> Any:
        made = channel(*args)
        interrupt()
        return made

    monkeypatch.setattr(executor, "Channel", interrupted_channel)
    with pytest.raises(KeyboardInterrupt) as error:
        make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    traces.assert_none()
    assert error.value.__traceback__ is not None  # which holds what was made


def test_a_close_that_was_interrupted_can_be_called_again(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_join", lambda *args: interrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    assert hasattr(llm.engine.model_runner, "model")
    llm.close()
    assert not hasattr(llm.engine.model_runner, "model")
    traces.assert_none()


@pytest.mark.parametrize(
    ("owner", "name"), [(ModelRunner, "run"), (Scheduler, "postprocess"), (LLMEngine, "is_finished")]
)
def test_a_call_in_which_the_engine_is_closed_says_so(
    owner: Any, name: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 1)
    monkeypatch.setattr(owner, name, getattr(owner, name))
    spoil(owner, name, 1, llm.close)
    llm.add_request([1, 2, 3], greedy(5))
    with pytest.raises(RuntimeError, match="closed"):
        llm.step() if owner is Scheduler else llm.generate([[1, 2, 3]], greedy(5), use_tqdm=False)


@pytest.mark.parametrize("size", [1, 2])
def test_closing_in_another_thread_ends_a_call(size: int, tiny_checkpoint: Checkpoint, traces: Traces) -> None:
    for delay_s in (0.0, 0.01, 0.02, 0.03, 0.05, 0.1):
        llm = make_llm(tiny_checkpoint(SHAPES["odd"]), size)
        timer = threading.Timer(delay_s, llm.close)
        timer.start()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([[1, 2, 3]] * 20, greedy(500), use_tqdm=False)
        timer.join()
        traces.assert_none()


@pytest.mark.parametrize("act", [interrupt, run_out_of_memory])
def test_what_ends_the_start_of_rank_0_leaves_nothing(
    act: Callable[[], None], tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(model_runner, "load_model", model_runner.load_model)
    spoil(model_runner, "load_model", 1, act)
    with pytest.raises(KeyboardInterrupt if act is interrupt else ValueError):
        make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    traces.assert_none()
    assert not caplog.records


@pytest.mark.parametrize("delay_s", [0, 3], ids=["at once", "when another rank has found it, and is dead"])
def test_a_fault_of_the_checkpoint_is_the_error_that_one_rank_gives(
    delay_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    shape = SHAPES["odd"]
    monkeypatch.setattr(model_runner, "load_model", model_runner.load_model)
    spoil(model_runner, "load_model", 1, functools.partial(time.sleep, delay_s))
    folder = shape.save(tmp_path / "model", {k: v for k, v in shape.tensors().items() if "layers.1.mlp.up" not in k})
    with pytest.raises(ValueError, match=r"Missing \(1\): model.layers.1.mlp.up_proj.weight"):
        make_llm(folder, 2)
    traces.assert_none()
    assert not caplog.records


PLACES = [  # where a rank may die, and at which call at most
    (TensorParallel, "join", 1),
    (ModelRunner, "timed", 1),
    (ModelRunner, "allocate_kv_cache", 1),
    (TensorParallel, "least", 1),
    (ModelRunner, "run_prefill", 4),
    (ModelRunner, "run_decode", 20),
    (TensorParallel, "all_reduce", 150),
    (TensorParallel, "pick", 29),
    (ModelRunner, "exit", 1),
]
DEATHS = [(kill, "SIGKILL"), (lose_connections_and_die, "SIGKILL"), (run_out_of_memory, "exit code 1")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_wherever_a_rank_dies_it_is_named_and_nothing_is_left(
    seed: int, tiny_checkpoint: Checkpoint, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    rng = random.Random(seed)
    size = rng.choice((2, 2, 4))
    owner, name, most = rng.choice(PLACES)
    act, cause = rng.choice(DEATHS)
    inject(monkeypatch, (owner, name, rng.randint(1, most), act))
    shape, begin, llm, is_done = SHAPES["odd"], 0.0, None, False
    prompts = make_prompts(6, shape.vocab, seed=seed)
    try:
        llm = make_llm(tiny_checkpoint(shape), size, max_num_batched_tokens=100)
        for _ in range(2):
            begin = time.monotonic()
            outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
            assert_greedy(tiny_reference(shape), outputs)
        is_done = True
    except RuntimeError as error:
        assert f"Tensor-parallel rank {size - 1} died ({cause})" in str(error)  # noqa: PT017
        assert not begin or time.monotonic() - begin < SECONDS + 3
    if llm is not None:
        llm.close()
    assert is_done == (name == "exit")
    traces.assert_none()


def rank_that_dies_connecting(*args: Any) -> None:
    spoil(parallel, "_while_checking", 1, kill)
    parallel_runner_run_rank(*args)


def test_a_rank_that_dies_while_the_ranks_connect_is_named_at_once(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    begin: list[float] = []
    monkeypatch.setattr(parallel, "_MEETING_S", 4)
    monkeypatch.setattr(parallel, "_while_checking", parallel._while_checking)
    spoil(parallel, "_while_checking", 1, lambda: begin.append(time.monotonic()))
    monkeypatch.setattr(parallel_runner, "run_rank", rank_that_dies_connecting)
    with pytest.raises(RuntimeError, match=r"rank 1 died \(SIGKILL\)"):
        make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    assert time.monotonic() - begin[0] < 2.5
    traces.assert_none()
    for thread in threading.enumerate():  # connecting ends by its own time limit alone
        if thread.name == "nanovllm-connect":
            thread.join(SECONDS)


def test_a_fault_of_the_tokenizer_ends_the_ranks_though_the_error_is_kept(tmp_path: Path, traces: Traces) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_checkpoint("embedded"), folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer") as error:
        make_llm(folder, 2)
    traces.assert_none()
    assert error.value.__traceback__ is not None


@pytest.mark.parametrize("device", ["cpu", on_two_cards])
def test_closing_leaves_neither_sockets_nor_threads(device: str, tiny_checkpoint: Checkpoint) -> None:
    def left() -> tuple[int, int]:
        links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        sockets = [link for link in links if link.is_symlink() and "socket" in str(link.readlink())]
        num_kept = len(llms) if device == "cuda" else 0  # NCCL keeps one of some ten for each group
        return len(sockets) - num_kept, len(os.listdir("/proc/self/task"))

    llms, counts = [], []
    for _ in range(3):
        llms.append(make_llm(tiny_checkpoint(SHAPES["odd"]), 2, **(CARDS if device == "cuda" else {})))
        llms[-1].generate([[1, 2]], greedy(3), use_tqdm=False)
        llms[-1].close()
        deadline = time.monotonic() + SECONDS
        while counts and time.monotonic() < deadline and any(map(operator.gt, left(), counts[0])):
            time.sleep(0.05)
        counts.append(left())
    assert not any(map(operator.gt, counts[-1], counts[0])), counts


def few_blocks(*args: Any) -> int:
    return 9


def rank_of_few_blocks(rank: int, *args: Any) -> None:
    CpuDevice.num_kvcache_blocks = few_blocks  # type: ignore[method-assign]
    parallel_runner_run_rank(rank, *args)


def test_the_pool_is_the_least_of_all_ranks(
    tiny_checkpoint: Checkpoint, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES["odd"]
    monkeypatch.setattr(parallel_runner, "run_rank", rank_of_few_blocks)
    prompts = make_prompts(20, shape.vocab, seed=5)
    with make_llm(tiny_checkpoint(shape), 2, greedy_admission=True) as llm:
        assert llm.engine.config.num_kvcache_blocks == 9
        assert_greedy(tiny_reference(shape), llm.generate(prompts, greedy(12), use_tqdm=False))
        assert llm.engine.stats()["num_preemptions"]


# Cards.


def go_on(llm: LLM) -> None:
    while True:
        llm.generate([[1, 2, 3]] * 20, greedy(200), use_tqdm=False)


@pytest.mark.gpu
@two_cards
@pytest.mark.parametrize("name", ["odd", "bias", "small"])
@pytest.mark.parametrize("knobs", [{}, {"enforce_eager": True}, {"attention_backend": "torch"}, {"lookahead": 0}])
def test_two_cards_answer_as_transformers_and_as_one_card(
    name: str, knobs: dict[str, Any], tiny_checkpoint: Checkpoint, tiny_reference: Reference, traces: Traces
) -> None:
    shape = SHAPES[name]
    prompts = make_prompts(44, shape.vocab, seed=6)
    pressure = {"kvcache_block_size": 16, "num_kvcache_blocks": 60, "max_num_batched_tokens": 90}
    results = []
    for size in (1, 2):
        with make_llm(tiny_checkpoint(shape), size, **CARDS, **pressure, greedy_admission=True, **knobs) as llm:
            outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
            assert_greedy(tiny_reference(shape), outputs)
            assert llm.engine.stats()["num_preemptions"]
            params = (mixed_params(shape.vocab) * 4)[:44]
            results.append(llm.generate(prompts, params, use_tqdm=False))
    # Draws within rounding of each other may differ: few rows do.
    same = [a == b for a, b in zip(*map(token_ids, results), strict=True)]
    assert sum(same) >= 40


@pytest.mark.gpu
@two_cards
@pytest.mark.parametrize("fault", [None, "no memory", "no handle", "wrong sums"])
def test_cards_that_cannot_write_each_others_memory_leave_all_to_nccl(
    fault: str | None, tiny_checkpoint: Checkpoint, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if fault is None and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the two cards cannot write each other's memory")
    # One rank finds out, and it is so for both.
    device = pytest.importorskip("nanovllm.engine.cuda_device").CudaDevice
    memory = pytest.importorskip("nanovllm.kernels.peer_memory").PeerMemory
    if fault == "wrong sums":
        is_right = device._is_right
        monkeypatch.setattr(device, "_is_right", lambda *args: is_right(*args) and False)
    elif fault is not None:
        call, name = memory._call, {"no memory": "cuMemAlloc_v2", "no handle": "cuIpcOpenMemHandle_v2"}[fault]

        def failing(self: Any, function: str, *args: Any) -> None:
            if function == name:
                raise OSError(f"{function} gave CUDA error 217")
            call(self, function, *args)

        monkeypatch.setattr(memory, "_call", failing)
    caplog.set_level("INFO", logger="nanovllm")
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 2, **CARDS, max_num_batched_tokens=4096) as llm:
        assert (llm.engine.model_runner.tp.peers is None) == (fault is not None)
        prompts = make_prompts(300, SHAPES["odd"].vocab, seed=7)
        outputs = llm.generate(prompts, greedy(9), use_tqdm=False)
        assert_greedy(tiny_reference(SHAPES["odd"]), outputs)
    assert ("so NCCL does all of their exchange" in caplog.text) == (fault is not None)
    assert ("gave CUDA error 217" in caplog.text) == (fault in ("no memory", "no handle"))


def limit_launches(as_of_many: bool) -> None:
    """Have a launch add up 20 rows, and leave more of them to several launches or, as with many ranks, to NCCL."""
    module = pytest.importorskip("nanovllm.engine.cuda_device")
    module._SENT_BYTES_OF_TWO = 20 * SHAPES["odd"].hidden * 4
    if as_of_many:
        TensorParallel.sums_in_norm = (  # type: ignore[method-assign]
            lambda self, num_rows: self.peers is not None and num_rows <= self.peers.max_rows
        )


def limited_rank(as_of_many: bool, rank: int, *args: Any) -> None:
    limit_launches(as_of_many)
    parallel_runner_run_rank(rank, *args)


@pytest.mark.gpu
@two_cards
@pytest.mark.parametrize("as_of_many", [False, True])
def test_rows_beyond_one_launch_are_added_up_too(
    as_of_many: bool, tiny_checkpoint: Checkpoint, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("nanovllm.engine.cuda_device")
    monkeypatch.setattr(module, "_SENT_BYTES_OF_TWO", module._SENT_BYTES_OF_TWO)  # so that they come back
    monkeypatch.setattr(TensorParallel, "sums_in_norm", TensorParallel.sums_in_norm)
    monkeypatch.setattr(parallel_runner, "run_rank", functools.partial(limited_rank, as_of_many))
    limit_launches(as_of_many)
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 2, **CARDS | {"max_num_seqs": 50}) as llm:
        tp = llm.engine.model_runner.tp
        assert tp.peers is None or (tp.peers.max_rows, tp.sums_in_norm(21)) == (20, not as_of_many)
        outputs = llm.generate(make_prompts(70, SHAPES["odd"].vocab, seed=8), greedy(20), use_tqdm=False)
        assert_greedy(tiny_reference(SHAPES["odd"]), outputs)


@pytest.mark.gpu
@two_cards
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_few_rows_in_16_bits_are_added_up_from_parts(
    dtype: str, enforce_eager: bool, tiny_checkpoint: Checkpoint, tiny_reference: Reference
) -> None:
    shape = TinyConfig(hidden=256, layers=3, intermediate=512, head_dim=64, vocab=1101)
    parts_of = pytest.importorskip("nanovllm.kernels.small_batch").FewRowsRowLinear
    with make_llm(tiny_checkpoint(shape), 2, **CARDS | {"dtype": dtype}, enforce_eager=enforce_eager) as llm:
        runner = llm.engine.model_runner
        num_installed = sum(isinstance(module, parts_of) for module in runner.model.modules())
        assert num_installed == (0 if runner.tp.peers is None else 6)
        outputs = llm.generate(make_prompts(9, shape.vocab, seed=9), greedy(20), use_tqdm=False)
    behind: list[float] = []
    rows = [out.prompt_token_ids + out.token_ids for out in outputs]
    for out, logits in zip(outputs, reference_logits(tiny_reference(shape), rows), strict=True):
        chosen = logits[len(out.prompt_token_ids) - 1 : -1]
        tokens = torch.tensor(out.token_ids).unsqueeze(1)
        behind += (chosen.amax(1) - chosen.gather(1, tokens).squeeze(1)).tolist()
    assert len(behind) == 180
    # Near ties may fall otherwise; without a part of the sums nearly every token is another, and far behind.
    assert max(behind) < (0.3 if dtype == "float16" else 1.5), sorted(behind)[-10:]
    assert sum(x == 0 for x in behind) > 150


@pytest.mark.gpu
@two_cards
@pytest.mark.parametrize("is_dead", [False, True])
def test_trouble_in_the_first_exchange_of_the_cards_ends_the_start(
    is_dead: bool, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    device = pytest.importorskip("nanovllm.engine.cuda_device").CudaDevice
    monkeypatch.setattr(device, "_is_right", device._is_right)
    begin: list[float] = []

    def note() -> None:
        begin.append(time.monotonic())
        if not is_dead:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    spoil(device, "_is_right", 1, note)
    inject(monkeypatch, (device, "_is_right", 1, kill if is_dead else functools.partial(time.sleep, 60)))
    with pytest.raises(RuntimeError if is_dead else KeyboardInterrupt) as error:
        make_llm(tiny_checkpoint(SHAPES["odd"]), 2, **CARDS)
    assert time.monotonic() - begin[0] < SECONDS + 3
    assert not is_dead or "Tensor-parallel rank 1 died (SIGKILL)" in str(error.value)
    traces.assert_none()


@pytest.mark.gpu
@two_cards
def test_closing_gives_the_memory_of_both_cards_back(tiny_checkpoint: Checkpoint) -> None:
    free = []
    for _ in range(3):
        with make_llm(tiny_checkpoint(SHAPES["odd"]), 2, **CARDS) as llm:
            llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
        free.append([torch.cuda.mem_get_info(card)[0] for card in range(2)])
    assert all(now > first - (32 << 20) for first, now in zip(free[0], free[-1], strict=True)), free


@pytest.mark.gpu
@two_cards
def test_a_script_that_ends_with_a_step_under_way_on_its_cards_ends_well(tmp_path: Path, traces: Traces) -> None:
    under_way = """
llm.add_request("1 + 1 =", SamplingParams(ignore_eos=True))
for _ in range(5): llm.step()
"""
    script = Script(LLM_SCRIPT.replace('"cpu"', '"cuda"') + under_way, tmp_path)
    assert [script.read_line() for _ in range(3)] == ["begin", "start", "68, sixty-eight."]
    assert script.wait() == (0, "")  # NCCL would complain of a group that is not closed
    traces.assert_none()


@pytest.mark.gpu
@two_cards
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("delay_s", [0.0, 0.4])
def test_a_rank_that_dies_on_its_card_is_named(
    enforce_eager: bool, delay_s: float, tiny_checkpoint: Checkpoint, traces: Traces
) -> None:
    for _ in range(2):  # the cards can be used again
        llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2, **CARDS, enforce_eager=enforce_eager)
        pid = llm.engine.model_runner.executor._workers.processes[0].pid
        threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)).start()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"Tensor-parallel rank 1 died \(SIGKILL\)"):
            go_on(llm)
        assert time.monotonic() - begin < 2 * SECONDS
        traces.assert_none()
        llm.close()


@pytest.mark.gpu
@two_cards
def test_ctrl_c_leaves_the_cards_in_step(
    tiny_checkpoint: Checkpoint, tiny_reference: Reference, traces: Traces
) -> None:
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 2, **CARDS) as llm:
        for delay_s in (0.01, 0.03, 0.1, 0.2, 0.3):
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                go_on(llm)
            assert_greedy(tiny_reference(SHAPES["odd"]), llm.generate([[4, 5], [6]], greedy(9), use_tqdm=False))


# Life.


def test_two_engines_and_a_group_of_the_callers_do_not_meet(
    tiny_checkpoint: Checkpoint, tiny_reference: Reference, tmp_path: Path, traces: Traces
) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/mine", rank=0, world_size=1)
    num_threads = torch.get_num_threads()
    try:
        llms = [make_llm(tiny_checkpoint(SHAPES[name]), 2) for name in ("odd", "small")]
        for _ in range(2):
            for llm, name in zip(llms, ("odd", "small"), strict=True):
                outputs = llm.generate([[1, 2, 3], [4]], greedy(8), use_tqdm=False)
                assert_greedy(tiny_reference(SHAPES[name]), outputs)
        llms[0].close()
        assert_greedy(tiny_reference(SHAPES["small"]), llms[1].generate([[5, 6]], greedy(8), use_tqdm=False))
        assert torch.get_num_threads() == num_threads
        del llm, llms
        traces.assert_none()
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_meet_in_a_folder_of_any_name(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: Traces
) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff \xc3#%20")
    os.mkdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 2) as llm:
        assert len(llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)[0].token_ids) == 3
    assert os.listdir(folder) == []


def test_one_rank_needs_neither_group_nor_processes(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_runner, "Executor", None)
    monkeypatch.setattr(TensorParallel, "join", None)
    with make_llm(tiny_checkpoint(SHAPES["odd"]), 1) as llm:
        assert type(llm.engine.model_runner) is ModelRunner
        assert llm.engine.model_runner.tp is SINGLE


def test_del_and_close_end_the_ranks(
    tiny_checkpoint: Checkpoint, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    llm.generate([[1, 2, 3]], greedy(3), use_tqdm=False)
    assert len(traces.found()) >= 1
    del llm
    traces.assert_none(2.0)
    llm = make_llm(tiny_checkpoint(SHAPES["odd"]), 2)
    llm.add_request([1, 2, 3], greedy(30))
    llm.step()
    llm.close()  # with a request under way
    traces.assert_none(2.0)
    llm.close()
    with pytest.raises(RuntimeError, match="engine is closed"):
        llm.step()
    assert not caplog.records


LLM_SCRIPT = """
from nanovllm import LLM, SamplingParams
print('start', flush=True)
llm = LLM("embedded", device="cpu", tensor_parallel_size=2)
print(llm.generate(["23 + 45 ="], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].text, flush=True)
"""


def test_a_script_without_the_guard_is_told_so(tmp_path: Path, traces: Traces) -> None:
    script = Script(LLM_SCRIPT, tmp_path, guard=False)
    code, errors = script.wait()
    assert code == 1
    assert "\nRuntimeError: Each rank of tensor_parallel_size > 1 imports the script anew" in errors
    assert errors.rstrip().endswith('the script must create its LLM under\n    if __name__ == "__main__":')
    traces.assert_none()


@pytest.mark.parametrize("ending", ["del llm", "llm.close()"])
@pytest.mark.parametrize(
    ("device", "size", "refusal"),
    [
        ("cpu", 2, "The ranks belong to process"),
        pytest.param("cuda", 1, "Cannot re-initialize CUDA i", marks=pytest.mark.gpu),
        pytest.param("cuda", 2, "The ranks belong to process", marks=[pytest.mark.gpu, two_cards]),
    ],
)
def test_a_fork_may_exit_and_the_engine_goes_on(
    device: str, size: int, refusal: str, ending: str, tmp_path: Path, traces: Traces
) -> None:
    body = f"""
pid = os.fork()
if pid == 0:
    try:
        llm.generate(["1 + 1 ="], use_tqdm=False)
    except RuntimeError as error:
        print(str(error)[:27], flush=True)
    {ending}
    sys.exit(7)
print(os.waitpid(pid, 0)[1], flush=True)
print(llm.generate(["23 + 45 ="], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].text, flush=True)
"""
    llm = LLM_SCRIPT.replace('"cpu", tensor_parallel_size=2', f'"{device}", tensor_parallel_size={size}')
    script = Script(llm + body, tmp_path)
    lines = [script.read_line() for _ in range(6)]
    assert lines == ["begin", "start", "68, sixty-eight.", refusal, str(7 << 8), "68, sixty-eight."]
    assert script.wait() == (0, "")
    traces.assert_none()


def test_a_script_that_never_closes_ends_well(tmp_path: Path, traces: Traces) -> None:
    at_exit = """
from nanovllm.engine.parallel_runner import ParallelRunner
end = ParallelRunner.exit
ParallelRunner.exit = lambda runner: print(hasattr(runner, 'model'), end(runner), flush=True)
"""
    script = Script(LLM_SCRIPT + at_exit, tmp_path)
    assert [script.read_line() for _ in range(4)] == ["begin", "start", "68, sixty-eight.", "True None"]
    assert script.wait() == (0, "")
    traces.assert_none()


@pytest.mark.parametrize("place", ["at the start", "in a step"])
def test_ctrl_c_ends_a_script_and_its_ranks(place: str, tmp_path: Path, traces: Traces) -> None:
    endless = "\nwhile True: llm.generate(['1 + 1 ='], SamplingParams(ignore_eos=True), use_tqdm=False)"
    script = Script(LLM_SCRIPT + endless, tmp_path)
    for _ in range(2 if place == "at the start" else 3):
        script.read_line()
    time.sleep(1.0)
    os.killpg(script.process.pid, signal.SIGINT)
    code, errors = script.wait()
    assert code == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    traces.assert_none()
