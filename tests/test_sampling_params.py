"""SamplingParams: names, defaults and limits; and what only a model can check, before anything runs."""

import contextlib
import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import nanovllm
from nanovllm import LLM, SamplingParams

VLLM_DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "stop_token_ids": None,
    "seed": None,
}
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def llm():
    with LLM("embedded", max_num_seqs=4, max_model_len=64) as llm:
        yield llm


@contextlib.contextmanager
def nothing_may_run(llm):
    """Fail if the engine takes a step inside the block."""
    real, llm.engine.model_runner = llm.engine.model_runner, None
    try:
        yield
    finally:
        llm.engine.model_runner = real
    assert llm.engine.scheduler.is_finished()


# --- names and defaults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VLLM_DEFAULTS)
def test_defaults_equal_those_of_vllm(name):
    assert getattr(SamplingParams(), name) == VLLM_DEFAULTS[name]


def test_max_tokens_defaults_to_nano_vllms_64_and_stop_to_nothing():
    assert SamplingParams().max_tokens == 64
    assert SamplingParams().stop == ()


def test_the_first_three_arguments_are_nano_vllms():
    params = SamplingParams(0.6, 256, True)
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.6, 256, True)


def test_every_parameter_is_one_of_vllms_or_known_here():
    names = {f.name for f in dataclasses.fields(SamplingParams) if f.init}
    assert names == {*VLLM_DEFAULTS, "max_tokens", "stop"}


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("topk", "top_k"),
        ("top_P", "top_p"),
        ("minp", "min_p"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop_tokens_ids", "stop_token_ids"),
        ("logits_bias", "logit_bias"),
        ("prompt_logprob", "prompt_logprobs"),
        ("seeds", "seed"),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_near_name(wrong, near):
    with pytest.raises(TypeError, match=f"SamplingParams has no setting '{wrong}'. Did you mean '{near}'") as error:
        SamplingParams(**{wrong: 1})
    assert "Known: temperature, max_tokens, ignore_eos, n, top_k" in str(error.value)


@pytest.mark.parametrize("name", ["is_greedy", "has_penalties", "has_filters", "has_extras", "zzz"])
def test_derived_and_invented_names_are_no_keywords(name):
    with pytest.raises(TypeError, match=f"no setting '{name}'"):
        SamplingParams(**{name: True})


# --- ranges --------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", NAN, "finite, at least 0"),
    ("temperature", INF, "finite, at least 0"),
    ("temperature", -INF, "finite, at least 0"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("n", 0, "between 1 and 10000"),
    ("n", -1, "between 1 and 10000"),
    ("n", 10_001, "between 1 and 10000"),
    ("top_k", -2, "at least -1"),
    ("top_p", 0.0, "above 0 and at most 1"),
    ("top_p", -0.5, "above 0 and at most 1"),
    ("top_p", 1.0001, "above 0 and at most 1"),
    ("top_p", NAN, "above 0 and at most 1"),
    ("min_p", -0.01, "at least 0 and at most 1"),
    ("min_p", 1.01, "at least 0 and at most 1"),
    ("min_p", NAN, "at least 0 and at most 1"),
    ("repetition_penalty", 0.0, "at least 1e-10"),
    ("repetition_penalty", -1.0, "at least 1e-10"),
    ("repetition_penalty", 9e-11, "at least 1e-10"),
    ("repetition_penalty", 1.1e10, "at most 1e+10"),
    ("repetition_penalty", INF, "finite, at least 1e-10"),
    ("presence_penalty", -2.01, "at least -2 and at most 2"),
    ("presence_penalty", 2.01, "at least -2 and at most 2"),
    ("frequency_penalty", -2.01, "at least -2 and at most 2"),
    ("frequency_penalty", 2.01, "at least -2 and at most 2"),
    ("frequency_penalty", NAN, "at least -2 and at most 2"),
    ("min_tokens", -1, "between 0 and 64"),
    ("min_tokens", 65, "between 0 and 64"),
    ("logprobs", -1, "at least 0"),
    ("prompt_logprobs", -1, "at least 0"),
    ("seed", -(2**63) - 1, "between -9223372036854775808 and 18446744073709551615"),
    ("seed", 2**64, "between -9223372036854775808 and 18446744073709551615"),
]


@pytest.mark.parametrize(("name", "value", "limit"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named_with_its_limit(name, value, limit):
    with pytest.raises(ValueError, match="is out of range") as error:
        SamplingParams(**{name: value})
    assert f"{name}={value} is out of range" in str(error.value)
    assert limit in str(error.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0, 0.0, 1e-12, 1e-10, 1, 2.0, 100)),
        ("max_tokens", (1, 10**9, None)),
        ("n", (1, 2, 10_000)),
        ("top_k", (-1, 0, 1, 10**9)),
        ("top_p", (1e-6, 0.5, 1, 1.0)),
        ("min_p", (0, 0.5, 1, 1.0)),
        ("repetition_penalty", (1e-10, 0.01, 1, 5.0, 1e10)),
        ("presence_penalty", (-2, 0, 2.0)),
        ("frequency_penalty", (-2.0, 0, 2)),
        ("min_tokens", (0, 64)),
        ("logprobs", (None, 0, 20, 10**6)),
        ("prompt_logprobs", (None, 0, 20)),
        ("seed", (None, -(2**63), 0, 2**64 - 1)),
    ],
)
def test_values_at_the_limits_are_taken_as_they_are(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_min_tokens_may_reach_max_tokens_and_has_no_limit_without_it():
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6
    with pytest.raises(ValueError, match="min_tokens=6 is out of range: it must be between 0 and 5"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_several_samples_of_a_greedy_row_would_be_equal():
    with pytest.raises(ValueError, match="n=2 with temperature=0 gives equal samples; use n=1"):
        SamplingParams(temperature=0, n=2)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ("", "b")])
def test_an_empty_stop_string_would_end_every_request_at_once(stop):
    with pytest.raises(ValueError, match="stop holds an empty string"):
        SamplingParams(stop=stop)


def test_no_allowed_token_at_all_is_out_of_range():
    with pytest.raises(ValueError, match=r"allowed_token_ids=\[\] is out of range: at least one"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_start_at_0(name):
    with pytest.raises(ValueError, match=f"{name} item=-1 is out of range: it must be at least 0"):
        SamplingParams(**{name: [3, -1]})


def test_logit_bias_starts_at_id_0_and_is_finite():
    with pytest.raises(ValueError, match="logit_bias item=-1 is out of range: it must be at least 0"):
        SamplingParams(logit_bias={-1: 1.0})
    for value in (INF, -INF, NAN, 1.1e15, -1e30):
        with pytest.raises(ValueError, match=r"is out of range: it must be finite, at least -1e\+15") as error:
            SamplingParams(logit_bias={1: value})
        assert f"logit_bias value={value} is out of range" in str(error.value)
    assert SamplingParams(logit_bias={1: 1e15, 2: -1e15}).logit_bias == {1: 1e15, 2: -1e15}


# --- types ---------------------------------------------------------------------------------------------------------

WRONG_TYPES = [
    *((name, value) for name in ("max_tokens", "n", "top_k", "min_tokens") for value in (1.0, "1", True, [1])),
    *((name, value) for name in ("logprobs", "prompt_logprobs", "seed") for value in (1.0, "1", True, [1])),
    *(
        (name, value)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for value in ("0.5", None, True, [0.5])
    ),
    *((name, None) for name in ("n", "top_k", "min_tokens")),
    *((n, v) for n in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens") for v in (0, 1, None, "yes")),
    *((name, value) for name in ("stop_token_ids", "allowed_token_ids") for value in (3, "3", {3: 1}, [1.0], ["3"])),
    *((name, [True]) for name in ("stop_token_ids", "allowed_token_ids")),
    *(("stop", value) for value in (5, 0, False, 0.0, b"a", b"", {"a": 1}, {}, iter(["a"]), {"a", 1})),
    *((name, value) for name in ("stop_token_ids", "allowed_token_ids", "logit_bias") for value in (0, False, "")),
    ("stop", [1]),
    ("stop", ["a", None]),
    ("stop", [b"a"]),
    ("logit_bias", [1]),
    ("logit_bias", "1"),
    ("logit_bias", {1: "2"}),
    ("logit_bias", {1: True}),
    ("logit_bias", {"1": 2.0}),
    ("logit_bias", {1.5: 2.0}),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_named(name, value):
    with pytest.raises(TypeError, match=f"{name}.* must be"):
        SamplingParams(**{name: value})


def test_numpy_numbers_are_numbers():
    params = SamplingParams(np.float32(0.5), np.int64(3), top_k=np.int32(4), stop_token_ids=[np.int64(5)])
    assert (params.temperature, params.max_tokens, params.top_k, params.stop_token_ids) == (0.5, 3, 4, (5,))


def test_a_set_is_taken_in_an_order_that_is_the_same_in_every_process():
    """The order of a set of strings differs from process to process, and the order of stop strings matters."""
    letters = [chr(ord("a") + i) for i in range(20)]
    for kind in (set, frozenset):
        assert SamplingParams(stop=kind(letters)).stop == tuple(letters)
        params = SamplingParams(stop_token_ids=kind([9, 70, 8, 10**6]), allowed_token_ids=kind([33, 1, 2]))
        assert (params.stop_token_ids, params.allowed_token_ids) == ((8, 9, 70, 10**6), (1, 2, 33))
    assert SamplingParams(stop=["b", "a"], stop_token_ids=(9, 8)).stop == ("b", "a")  # a list's order is the caller's


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()


# --- frozen, and free of the caller's objects ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["temperature", "stop", "has_extras", "max_tokens"])
def test_parameters_are_frozen(name):
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(params, name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(params, name)


def test_what_the_caller_does_to_its_lists_later_changes_nothing():
    stop, ids, allowed, bias = ["x"], [1], [1, 2], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, allowed_token_ids=allowed, logit_bias=bias)
    for mine in (stop, ids, allowed):
        mine.clear()
    bias.clear()
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("x",), (1,), (1, 2))
    assert params.logit_bias == {1: 2.0}


def test_equal_parameters_are_equal_and_replace_checks_again():
    assert SamplingParams(0.5, top_k=3) == SamplingParams(0.5, top_k=3) != SamplingParams(0.5, top_k=4)
    changed = dataclasses.replace(SamplingParams(0.5, stop="x"), top_p=0.5)
    assert changed == SamplingParams(0.5, stop=["x"], top_p=0.5)
    assert changed.has_filters
    with pytest.raises(ValueError, match="top_p=2"):
        dataclasses.replace(SamplingParams(), top_p=2)


# --- derived flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"temperature": 0},
        {"seed": 3, "n": 4},
        {"max_tokens": None, "ignore_eos": True},
        {"stop": "x", "stop_token_ids": [4]},
        {"top_k": -1, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"prompt_logprobs": 3},
        {"logit_bias": {}},
        {"min_tokens": 0},
    ],
)
def test_rows_that_sample_plainly_have_no_extras(kwargs):
    params = SamplingParams(**kwargs)
    assert (params.has_extras, params.has_penalties, params.has_filters) == (False, False, False)


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({"top_k": 1}, "filters"),
        ({"top_p": 0.999}, "filters"),
        ({"min_p": 0.001}, "filters"),
        ({"repetition_penalty": 1.01}, "penalties"),
        ({"presence_penalty": -0.1}, "penalties"),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"temperature": 0, "repetition_penalty": 1.01}, "penalties"),
        ({"logprobs": 0}, None),
        ({"logit_bias": {1: 0.5}}, None),
        ({"allowed_token_ids": [0]}, None),
        ({"min_tokens": 1}, None),
    ],
)
def test_each_extra_sets_the_flag(kwargs, kind):
    params = SamplingParams(**kwargs)
    flags = (params.has_extras, params.has_penalties, params.has_filters)
    assert flags == (True, kind == "penalties", kind == "filters")


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (1e-10, True), (1.01e-10, False), (0.1, False)])
def test_a_temperature_at_or_under_1e_10_is_greedy(temperature, is_greedy):
    assert SamplingParams(temperature).is_greedy is is_greedy


# --- what only a model knows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stop_token_ids": [448]}, "stop_token_ids: token id 448 is outside the vocabulary: ids run from 0 to 447"),
        ({"allowed_token_ids": [1, 2**70]}, f"allowed_token_ids: token id {2**70} is outside the vocabulary"),
        ({"logit_bias": {5: 1.0, 448: 1.0}}, "logit_bias: token id 448 is outside the vocabulary"),
        ({"min_tokens": 1, "allowed_token_ids": [2]}, "min_tokens=1 forbids all of allowed_token_ids"),
        ({"min_tokens": 1, "allowed_token_ids": [0, 2]}, "min_tokens=1 forbids all of allowed_token_ids"),
        ({"min_tokens": 1, "allowed_token_ids": [9], "stop_token_ids": [9]}, "forbids all of allowed_token_ids"),
        ({"min_tokens": 2, "allowed_token_ids": [9, 2], "stop_token_ids": [9]}, "forbids all of allowed_token_ids"),
    ],
)
def test_a_mistake_that_only_the_model_knows_raises_before_anything_runs(llm, kwargs, message):
    params = SamplingParams(**kwargs)
    good = SamplingParams(max_tokens=1)
    conversation = [{"role": "user", "content": "a"}]
    calls = [
        lambda: llm.generate(["a", "b"], params, use_tqdm=False),
        lambda: llm.generate(["a", "b"], [good, params], use_tqdm=False),
        lambda: llm.stream(["a", "b"], params),
        lambda: llm.stream(["a", "b"], [good, params]),
        lambda: llm.stream(iter(["a", "b"]), params),
        lambda: llm.chat(conversation, params, use_tqdm=False),
        lambda: llm.add_request("a", params),
    ]
    for call in calls:
        with nothing_may_run(llm), pytest.raises(ValueError, match="token") as error:
            call()
        assert message in str(error.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"min_tokens": 1, "allowed_token_ids": [2, 5]},
        {"min_tokens": 1, "allowed_token_ids": [2], "ignore_eos": True},
        {"min_tokens": 0, "allowed_token_ids": [2]},
        {"stop_token_ids": [447], "logit_bias": {447: 1.0}},
    ],
)
def test_what_leaves_a_token_to_choose_is_fine(llm, kwargs):
    output = llm.generate(["a"], SamplingParams(max_tokens=2, **kwargs), use_tqdm=False)[0]
    assert output.error is None
    assert output.finish_reason in ("stop", "length")


@pytest.mark.parametrize("wrong", [0.5, "greedy", {"temperature": 0}, [None, None], [{}, {}], SamplingParams])
def test_parameters_of_another_type_raise_before_anything_runs(llm, wrong):
    for call in (llm.generate, llm.stream):
        with (
            nothing_may_run(llm),
            pytest.raises(TypeError, match="sampling_params must be SamplingParams or a list of"),
        ):
            call(["a", "b"], wrong, use_tqdm=False)


@pytest.mark.parametrize("num_params", [0, 1, 3])
def test_as_many_parameters_as_prompts_or_one(llm, num_params):
    with pytest.raises(ValueError, match=f"There are 2 prompts but {num_params} sampling_params; give one, or one"):
        llm.generate(["a", "b"], [SamplingParams()] * num_params, use_tqdm=False)


def test_stop_strings_need_a_tokenizer(tmp_path):
    folder = tmp_path / "no_tokenizer"
    folder.mkdir()
    shutil.copy(Path(nanovllm.__file__).parent / "embedded" / "config.json", folder)
    with LLM(str(folder), load_format="dummy", max_num_seqs=2, max_model_len=32) as llm:
        assert llm.tokenizer is None
        with nothing_may_run(llm), pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer, and .* has none"):
            llm.generate([[1, 2]], SamplingParams(stop="x"), use_tqdm=False)
        with nothing_may_run(llm), pytest.raises(ValueError, match="has no tokenizer files: give prompts as token ids"):
            llm.generate([[1, 2], "text"], SamplingParams(), use_tqdm=False)
        output = llm.generate([[1, 2]], SamplingParams(0, 3, True, stop_token_ids=[1]), use_tqdm=False)[0]
        assert output.text == ""
        assert output.token_ids
