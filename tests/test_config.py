"""Mistakes raise at the edge, naming the value, the limit and the way out; an engine survives those of its callers."""

import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import SHAPES, TinyConfig, assert_greedy

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config

Checkpoint = Callable[[TinyConfig], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoint) -> str:
    return str(tiny_checkpoint(SHAPES["tied"]))


@pytest.fixture
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, max_model_len=64, kvcache_block_size=4, num_kvcache_blocks=40) as llm:
        yield llm


# Settings


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_batched_tokens", "max_num_batched_tokens"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("look_ahead", "lookahead"),
    ],
)
def test_an_unknown_knob_is_refused_with_the_nearest_name(wrong: str, right: str, folder: str) -> None:
    for make in (Config, LLM):
        with pytest.raises(TypeError, match=rf"no setting '{wrong}'\. Did you mean '{right}'\?"):
            make(folder, **{wrong: 1})


@pytest.mark.parametrize(("wrong", "right"), [("temprature", "temperature"), ("max_token", "max_tokens")])
def test_an_unknown_sampling_parameter_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"SamplingParams has no setting '{wrong}'\. Did you mean '{right}'\?"):
        SamplingParams(**{wrong: 1})


def test_an_unknown_name_that_is_near_to_none_lists_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"no setting 'zzz'\. Known: temperature, max_tokens, ignore_eos"):
        SamplingParams(zzz=1)
    with pytest.raises(TypeError, match=r"no setting 'zzz'\. Known: model, max_num_batched_tokens, max_num_seqs"):
        Config("model", zzz=1)


CONFIG_OUT_OF_RANGE = [
    ("max_num_batched_tokens", 0, "at least 1"),
    ("max_num_batched_tokens", -5, "at least 1"),
    ("max_num_seqs", 0, "between 1 and 65535"),
    ("max_num_seqs", 65536, "between 1 and 65535"),
    ("max_model_len", 1, "at least 2"),
    ("gpu_memory_utilization", 0.0, "above 0 and at most 1"),
    ("gpu_memory_utilization", -0.1, "above 0 and at most 1"),
    ("gpu_memory_utilization", 1.01, "above 0 and at most 1"),
    ("gpu_memory_utilization", float("nan"), "finite"),
    ("gpu_memory_utilization", float("inf"), "finite"),
    ("tensor_parallel_size", 0, "at least 1"),
    ("kvcache_block_size", 0, "at least 1"),
    ("num_kvcache_blocks", 0, f"between 1 and {2**31 - 1}"),
    ("num_kvcache_blocks", -2, f"between 1 and {2**31 - 1}"),
    ("num_kvcache_blocks", 2**31, f"between 1 and {2**31 - 1}"),
    ("lookahead", -1, "between 0 and 1"),
    ("lookahead", 2, "between 0 and 1"),
    ("seed", 2**64, f"between {-(2**63)} and {2**64 - 1}"),
    ("seed", -(2**63) - 1, f"between {-(2**63)} and {2**64 - 1}"),
]


@pytest.mark.parametrize(("name", "value", "limit"), CONFIG_OUT_OF_RANGE)
def test_a_knob_out_of_range_is_refused_with_its_value_and_limit(name: str, value: Any, limit: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value} is out of range: it must be .*{limit}"):
        Config("model", **{name: value})


SAMPLING_OUT_OF_RANGE = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", float("-inf"), "finite"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -1, "at least 1"),
    ("seed", 2**64, f"between {-(2**63)} and {2**64 - 1}"),
    ("seed", -(2**63) - 1, f"between {-(2**63)} and {2**64 - 1}"),
]


@pytest.mark.parametrize(("name", "value", "limit"), SAMPLING_OUT_OF_RANGE)
def test_a_sampling_parameter_out_of_range_is_refused_with_its_value_and_limit(
    name: str, value: Any, limit: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value} is out of range: it must be .*{limit}"):
        SamplingParams(**{name: value})


def test_a_number_too_large_for_a_float_is_out_of_range_like_infinity() -> None:
    with pytest.raises(ValueError, match=r"^temperature=10+ is out of range: it must be finite"):
        SamplingParams(temperature=10**400)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("device", "gpu", "'auto', 'cpu', 'cuda', 'cuda:0'"),
        ("device", "cuda:x", "'auto', 'cpu', 'cuda', 'cuda:0'"),
        ("device", "cuda:0 ", "'auto', 'cpu', 'cuda', 'cuda:0'"),
        ("dtype", "int8", "'auto', 'float32', 'bfloat16', 'float16'"),
        ("dtype", "bfloat", "Did you mean 'bfloat16'"),
        ("attention_backend", "xformers", "'auto', 'flash_attn', 'triton', 'torch'"),
        ("attention_backend", "flash_attention", "Did you mean 'flash_attn'"),
        ("load_format", "gguf", "'auto', 'dummy'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(name: str, value: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='{value}' is unknown.*{known}"):
        Config("model", **{name: value})


INT_KNOBS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "kvcache_block_size",
    "num_kvcache_blocks",
    "lookahead",
    "seed",
)


@pytest.mark.parametrize("name", INT_KNOBS)
@pytest.mark.parametrize("value", ["8", 8.0, True, [8]])
def test_a_count_that_is_no_int_is_a_typeerror(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be an int, not ") as error:
        Config("model", **{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("make", "name", "value", "kind"),
    [
        (Config, "gpu_memory_utilization", "0.9", "a number"),
        (Config, "gpu_memory_utilization", True, "a number"),
        (Config, "enforce_eager", 1, "True or False"),
        (Config, "enforce_eager", None, "True or False"),
        (Config, "max_num_seqs", None, "an int"),
        (Config, "tokenizer", 5, "a string"),
        (Config, "revision", 5, "a string"),
        (SamplingParams, "temperature", "1", "a number"),
        (SamplingParams, "temperature", None, "a number"),
        (SamplingParams, "temperature", True, "a number"),
        (SamplingParams, "max_tokens", 1.5, "an int"),
        (SamplingParams, "max_tokens", True, "an int"),
        (SamplingParams, "ignore_eos", 1, "True or False"),
        (SamplingParams, "seed", "1", "an int"),
        (SamplingParams, "seed", 1.0, "an int"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_typeerror(make: Any, name: str, value: Any, kind: str) -> None:
    args = ("model",) if make is Config else ()
    with pytest.raises(TypeError, match=f"^{name} must be {kind}.*, not {value!r}"):
        make(*args, **{name: value})


@pytest.mark.parametrize("model", [None, 3, Path("folder"), ["folder"]])
def test_a_model_that_is_no_string_is_a_typeerror(model: Any) -> None:
    with pytest.raises(TypeError, match="model must be a string"):
        Config(model)


@pytest.mark.parametrize("name", ["model", "tokenizer", "revision"])
@pytest.mark.parametrize("value", ["", " "])
def test_a_name_that_is_empty_is_refused_and_not_taken_for_the_working_folder(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value!r} is empty"):
        Config(**{"model": "embedded", name: value})


def test_values_at_their_limits_are_legal() -> None:
    Config("model", max_num_batched_tokens=1, max_num_seqs=1, max_model_len=2, gpu_memory_utilization=1, lookahead=0)
    Config("model", kvcache_block_size=1, num_kvcache_blocks=-1, seed=2**64 - 1, device="cuda:11")
    Config("model", kvcache_block_size=np.int64(16), num_kvcache_blocks=1, seed=-(2**63), revision="main")
    SamplingParams(temperature=0, max_tokens=1, seed=2**64 - 1)
    SamplingParams(temperature=np.float32(0.5), max_tokens=None, seed=-(2**63))


def test_temperatures_up_to_a_tiny_one_are_greedy() -> None:
    assert [SamplingParams(temperature=t).is_greedy for t in (0, 1e-300, 1e-10, 1.1e-10, 1)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config("model").max_num_seqs = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_defaults_are_those_that_users_know() -> None:
    assert dataclasses.asdict(Config("model")) == {
        "model": "model",
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 512,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "kvcache_block_size": None,
        "num_kvcache_blocks": None,
        "device": "auto",
        "dtype": "auto",
        "attention_backend": "auto",
        "load_format": "auto",
        "greedy_admission": False,
        "lookahead": 1,
        "seed": 0,
        "tokenizer": None,
        "revision": None,
    }
    params = SamplingParams(0.7, 5, True)  # these three first
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.7, 5, True)
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos, params.seed) == (1.0, 64, False, None)


# Settings as the engine takes them


def test_max_model_len_is_capped_by_the_model_with_a_warning(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanovllm"), LLM(folder, num_kvcache_blocks=4) as llm:
        assert llm.engine.config.max_model_len == 1024
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("nanovllm", "WARNING")
    assert "max_model_len=4096" in record.message and "1024" in record.message
    caplog.clear()
    with caplog.at_level(logging.WARNING, "nanovllm"), LLM(folder, max_model_len=1024, num_kvcache_blocks=4) as llm:
        assert llm.engine.config.max_model_len == 1024
    assert not caplog.records


@pytest.mark.parametrize(("asked", "given"), [(7, 7), (None, 3 * 5), (-1, 3 * 5)])
def test_the_number_of_kv_blocks_is_the_user_s_or_what_all_sequences_need(
    asked: int | None, given: int, folder: str
) -> None:
    knobs = {"max_num_seqs": 3, "max_model_len": 65, "num_kvcache_blocks": asked}
    with LLM(folder, **knobs) as llm:
        runner, manager = llm.engine.model_runner, llm.engine.scheduler.block_manager
        assert llm.engine.config.num_kvcache_blocks == runner.num_blocks == manager.num_blocks == given
        assert llm.engine.config.kvcache_block_size == 16
        assert tuple(runner.kv_cache.shape) == (2, 2, given, 16, 2, 8)


def test_the_default_pool_is_at_most_two_gib(folder: str) -> None:
    block_bytes = 2 * 2 * 256 * 2 * 8 * 4
    with LLM(folder, kvcache_block_size=256, max_num_seqs=65_535, max_model_len=1024) as llm:
        assert llm.engine.config.num_kvcache_blocks == 2**31 // block_bytes


def test_a_pool_that_cannot_be_allocated_is_refused_with_its_size(folder: str) -> None:
    # 2**31 blocks of a quarter of a megabyte: more than an address space holds, whatever the machine.
    sizes = rf"{2**31 - 1} KV blocks of kvcache_block_size=1024 tokens, {2 * 2 * 1024 * 2 * 8 * 4} bytes each"
    with pytest.raises(ValueError, match=rf"{sizes}, cannot be allocated on cpu\. Lower num_kvcache_blocks or"):
        LLM(folder, device="cpu", kvcache_block_size=1024, num_kvcache_blocks=2**31 - 1)


@pytest.mark.parametrize("size", [257, 10**9, 10**30])
def test_a_block_longer_than_any_sequence_is_refused(size: int, folder: str) -> None:
    """It gave torch's own error, or a pool of one huge block."""
    message = f"kvcache_block_size={size} is out of range: with max_model_len=64 it must be at most 256"
    for num_blocks in (4, None):
        with pytest.raises(ValueError, match=message):
            LLM(folder, max_model_len=64, kvcache_block_size=size, num_kvcache_blocks=num_blocks)


@pytest.mark.parametrize(("max_model_len", "size"), [(64, 256), (256, 256), (257, 512), (5000, 1024)])
def test_the_longest_block_is_max_model_len_rounded_up_to_what_flash_attn_takes(
    max_model_len: int, size: int, folder: str
) -> None:
    with LLM(folder, max_model_len=max_model_len, kvcache_block_size=size, num_kvcache_blocks=2) as llm:
        assert llm.engine.config.kvcache_block_size == size
    with pytest.raises(ValueError, match=f"kvcache_block_size={size + 1} .* at most {size},"):
        LLM(folder, max_model_len=max_model_len, kvcache_block_size=size + 1)


def test_a_block_beyond_the_measured_pool_is_refused_unless_the_user_names_a_number(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of one block took more than the pool's limit; 16 tokens of this model take 4096 bytes."""
    monkeypatch.setattr("nanovllm.engine.device._CPU_POOL_BYTES", 4096)
    with LLM(folder, device="cpu", max_model_len=64) as llm:
        assert llm.engine.config.num_kvcache_blocks == 1
    for num_blocks in (None, -1):
        with pytest.raises(ValueError, match=r"kvcache_block_size=32 takes 8192 bytes, but a measured pool has 4096\."):
            LLM(folder, device="cpu", max_model_len=64, kvcache_block_size=32, num_kvcache_blocks=num_blocks)
    with LLM(folder, device="cpu", max_model_len=64, kvcache_block_size=32, num_kvcache_blocks=3) as llm:
        assert llm.engine.config.num_kvcache_blocks == 3


def test_auto_is_replaced_by_what_was_chosen(folder: str) -> None:
    with LLM(folder, device="cpu", num_kvcache_blocks=4) as llm:
        assert (llm.engine.config.device, llm.engine.config.dtype) == ("cpu", "float32")
        assert llm.engine.model_runner.backend.name == "torch"


def test_a_device_that_is_not_there_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match=r"device='cuda:99' is not there: this machine has .* CUDA devices"):
        LLM(folder, device="cuda:99")


@pytest.mark.parametrize("backend", ["flash_attn", "triton"])
def test_a_backend_that_needs_a_gpu_is_refused_on_a_cpu(backend: str, folder: str) -> None:
    with pytest.raises(ValueError, match=f"attention_backend='{backend}'.*'cpu'"):
        LLM(folder, device="cpu", attention_backend=backend)


def test_two_engines_of_different_settings_live_side_by_side(tiny_checkpoint: Checkpoint, tiny_reference: Any) -> None:
    shapes = [SHAPES["tied"], SHAPES["bias"]]
    llms = [
        LLM(str(tiny_checkpoint(shape)), max_model_len=64, kvcache_block_size=size, num_kvcache_blocks=60, lookahead=i)
        for i, (shape, size) in enumerate(zip(shapes, (3, 16), strict=True))
    ]
    for llm, prompt in itertools.product(llms, ([1, 2, 3], [4, 5])):
        llm.add_request(prompt, GREEDY)
    outputs: list[list[Any]] = [[], []]
    while not all(llm.is_finished() for llm in llms):
        for llm, done in zip(llms, outputs, strict=True):
            done.extend(llm.step()[0])
    for llm, shape, done in zip(llms, shapes, outputs, strict=True):
        assert len(done) == 2
        assert_greedy(tiny_reference(shape), done)
        llm.close()


# Prompts


def test_a_bare_text_is_refused_showing_the_brackets(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"write generate\(\['Hello'\]\)"):
        llm.generate("Hello", GREEDY)


def test_a_bare_list_of_ids_is_refused_showing_the_brackets(llm: LLM) -> None:
    for prompt in ([1, 2, 3], (1, 2, 3)):
        with pytest.raises(TypeError, match=r"write generate\(\[\[1, 2, 3\]\]\)"):
            llm.generate(prompt, GREEDY)


def test_a_long_bare_prompt_is_shortened_in_the_message(llm: LLM) -> None:
    with pytest.raises(TypeError) as error:
        llm.generate("x" * 10_000, GREEDY)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, {(1, 2)}, iter([[1]])])
def test_prompts_that_are_no_list_are_a_typeerror(prompts: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match="prompts must be a list of str or of lists of ints, not "):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    "prompt", [None, 1.5, {"a": 1}, [1.0], [True], [1, "a"], ["a"], [None], [[1, 2]], [[1, 2], [3]], b"text"]
)
def test_a_prompt_that_is_no_list_of_ints_is_a_typeerror(prompt: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match="A prompt must be a str or a list of ints, not ") as error:
        llm.generate([[1, 2], prompt], GREEDY)
    assert repr(prompt) in str(error.value)
    with pytest.raises(TypeError, match="A prompt must be a str or a list of ints, not "):
        llm.add_request(prompt, GREEDY)
    assert llm.is_finished()


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5, [None], [{"temperature": 0}], "greedy"])
def test_sampling_params_of_the_wrong_type_are_a_typeerror(params: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams or a list of them, not "):
        llm.generate([[1]], params)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, not "):
        llm.add_request([1], params)


@pytest.mark.parametrize("num_params", [0, 1, 3])
def test_lists_of_different_lengths_are_refused_with_both(num_params: int, llm: LLM) -> None:
    with pytest.raises(ValueError, match=f"There are 2 prompts but {num_params} sampling_params"):
        llm.generate([[1], [2]], [GREEDY] * num_params)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []
    assert llm.generate((), GREEDY, use_tqdm=False) == []
    assert llm.generate([], [], use_tqdm=False) == []


def test_tuples_and_arrays_of_ids_are_prompts_too(llm: LLM) -> None:
    prompts = [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [out.prompt_token_ids for out in outputs] == [[1, 2, 3]] * 3
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert all(type(token) is int for out in outputs for token in out.prompt_token_ids + out.token_ids)


def test_one_parameter_a_prompt_goes_to_its_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 1, 5)]
    for chosen in (params, tuple(params)):
        outputs = llm.generate([[1], [2], [3]], chosen, use_tqdm=False)
        assert [len(out.token_ids) for out in outputs] == [3, 1, 5]
    (out,) = llm.generate([[1]], use_tqdm=False)
    assert len(out.token_ids) == 64 - 1  # max_tokens=64 by default, cut by max_model_len=64


BAD_ROWS = [
    ([], "The prompt is empty"),
    ([130], "Token id 130 is outside the vocabulary: ids run from 0 to 129"),
    ([5, -1], "Token id -1 is outside the vocabulary"),
    ([1] * 64, "The prompt has 64 tokens, which leaves no room .*max_model_len=64"),
]


def test_bad_rows_are_errors_of_their_own_and_harm_no_other(llm: LLM, tiny_reference: Any) -> None:
    good = [[1, 2, 3], [4, 5], [6], [7, 8]]
    prompts = [prompt for pair in zip(good, (row for row, _ in BAD_ROWS), strict=True) for prompt in pair]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [out.index for out in outputs] == list(range(8))
    assert [out.prompt_token_ids for out in outputs] == prompts
    assert [out.finish_reason for out in outputs] == ["length", "error"] * 4
    for out, (_, message) in zip(outputs[1::2], BAD_ROWS, strict=True):
        assert (out.token_ids, out.text) == ([], "")
        assert re.match(message, out.error)
    assert_greedy(tiny_reference(SHAPES["tied"]), outputs[::2])
    assert [out.token_ids for out in llm.generate(good, GREEDY, use_tqdm=False)] == [
        out.token_ids for out in outputs[::2]
    ]


@pytest.mark.parametrize(("prompt", "message"), BAD_ROWS)
def test_add_request_refuses_a_bad_row_with_a_valueerror(prompt: list[int], message: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match=message):
        llm.add_request(prompt, GREEDY)
    assert llm.is_finished()
    assert llm.step() == ([], 0)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_rows_that_outgrow_the_pool_fail_alone(lookahead: int, folder: str, tiny_reference: Any) -> None:
    # 2 blocks of 4: 8 tokens and one more that needs no slot.
    knobs = {"kvcache_block_size": 4, "num_kvcache_blocks": 2, "max_model_len": 64, "lookahead": lookahead}
    with LLM(folder, **knobs) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n) for n in (4, 1, 4, 6, 1)]
        prompts = [[*range(8)], [*range(8)], [1], [2, 3, 4], [*range(9)]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [out.finish_reason for out in outputs] == ["error", "length", "length", "length", "error"]
        assert "9 tokens need 3 KV blocks of 4 tokens, but the pool has 2" in outputs[0].error
        assert "9 tokens need 3 KV blocks of 4 tokens, but the pool has 2" in outputs[4].error
        assert len(outputs[0].token_ids) == 1  # what it had by then
        assert_greedy(tiny_reference(SHAPES["tied"]), outputs[:4])
        llm.engine.scheduler.block_manager.check_invariants([])


# After an error


class Interrupted:
    """Raises in the place of a runner's n-th step."""

    def __init__(self, llm: LLM, error: BaseException, after: int) -> None:
        self.run, self.error, self.left = llm.engine.model_runner.run, error, after

    def __call__(self, *args: Any) -> Any:
        if self.left == 0:
            raise self.error
        self.left -= 1
        return self.run(*args)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_call_after_an_interrupted_one_returns_its_own_results_only(
    lookahead: int, after: int, error: BaseException, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = {"max_model_len": 64, "kvcache_block_size": 4, "num_kvcache_blocks": 40, "lookahead": lookahead}
    with LLM(folder, **knobs) as llm:
        (expected,) = llm.generate([[1, 2, 3, 4, 5, 6]], GREEDY, use_tqdm=False)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.model_runner, "run", Interrupted(llm, error, after))
            with pytest.raises(type(error)):
                llm.generate([[1, 2, 3, 4, 5, 7], [4], [5]], GREEDY, use_tqdm=False)
        assert llm.is_finished()
        assert llm.step() == ([], 0)
        (out,) = llm.generate([[1, 2, 3, 4, 5, 6]], GREEDY, use_tqdm=False)
        assert (out.index, out.token_ids) == (0, expected.token_ids)
        llm.engine.scheduler.block_manager.check_invariants([])


def test_a_refused_call_leaves_nothing_behind(llm: LLM) -> None:
    (expected,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    for prompts, params in ((["text"], GREEDY), ([[1], None], GREEDY), ([[1]], [GREEDY] * 2), ("text", None)):
        with pytest.raises((TypeError, ValueError)):
            llm.generate(prompts, params, use_tqdm=False)
        assert llm.is_finished()
    assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].token_ids == expected.token_ids


def test_generate_keeps_the_results_of_requests_that_are_not_its_own(llm: LLM) -> None:
    other = llm.add_request([9, 8, 7], GREEDY)
    outputs = llm.generate([[1], [2]], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert [out.prompt_token_ids for out in outputs] == [[1], [2]]
    assert not llm.is_finished()
    (late,), _ = llm.step()
    assert (late.request_id, late.prompt_token_ids, len(late.token_ids)) == (other, [9, 8, 7], 6)
    assert llm.is_finished()


def test_generate_serves_its_rows_behind_a_full_queue_of_other_requests(folder: str) -> None:
    with LLM(folder, max_model_len=64, num_kvcache_blocks=40, max_num_seqs=2) as llm:
        others = [llm.add_request([i], GREEDY) for i in range(2)]
        (out,) = llm.generate([[9]], GREEDY, use_tqdm=False)
        assert (out.index, out.prompt_token_ids, len(out.token_ids)) == (0, [9], 6)
        late = []
        while not llm.is_finished():
            late += llm.step()[0]
        assert [done.request_id for done in late] == others


def test_a_closed_engine_says_so_and_closes_again(folder: str) -> None:
    llm = LLM(folder, max_model_len=64, num_kvcache_blocks=4)
    llm.add_request([1], GREEDY)
    llm.exit()
    llm.close()
    llm.exit()
    for call in (lambda: llm.add_request([1]), llm.step, lambda: llm.generate([[1]], use_tqdm=False)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_model_too_large_for_the_memory_of_a_cpu_is_an_error_of_ours(tmp_path: Path) -> None:
    raw = {**SHAPES["tied"].config_json(), "vocab_size": 2**31 - 1, "hidden_size": 2**15}  # 281 TB
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError, match=r"in float32 .* does not fit on cpu: .* take a smaller model"):
        LLM(str(tmp_path), load_format="dummy", device="cpu")
