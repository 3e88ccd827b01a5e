"""A batch never dies of a row: one output a prompt, in order, and the good rows as if they had run alone."""

import contextlib
import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import nanovllm
from nanovllm import LLM, RequestOutput, SamplingParams

EMBEDDED = Path(nanovllm.__file__).parent / "embedded"
VOCAB_SIZE = 451
GREEDY = SamplingParams(0, 6, True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A small random Qwen3 with the embedded tokenizer, its config in the form of transformers 4."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape, initializer_range=0.3)).save_pretrained(folder)
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 10000.0, **shape}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    return str(folder)


@pytest.fixture(scope="module")
def wide(tiny):
    """Room for everything: each row gets here what it gets alone."""
    with LLM(tiny, num_kvcache_blocks=3000, kvcache_block_size=16) as llm:
        yield llm


def run(llm, prompts, params=GREEDY, **kwargs):
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


@contextlib.contextmanager
def nothing_may_run(llm):
    """Fail if the engine takes a step inside the block."""
    real, llm.engine.model_runner = llm.engine.model_runner, None
    try:
        yield
    finally:
        llm.engine.model_runner = real
    assert llm.engine.scheduler.is_finished()


def alone(llm, prompt, params=GREEDY):
    [output] = run(llm, [prompt], params)
    assert output.error is None
    return output


def assert_same_answer(output, expected):
    for name in ("prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason", "error"):
        assert output[name] == expected[name]


def assert_clean(llm):
    scheduler = llm.engine.scheduler
    assert scheduler.block_manager.used_block_ids == set()
    assert scheduler.is_finished()
    scheduler.block_manager.check_invariants([])


# --- the stories ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_kv_memory_that_runs_out_ends_the_row_that_needs_it(tiny, wide, lookahead):
    """A pool of 2 blocks of 256 and a prompt of 512 tokens: a bare assert used to kill the whole batch.

    The first token needs no slot, so it is there; the second one's KV would need a third block.
    """
    big, small = [5] * 512, [7, 8, 9]
    with LLM(tiny, kvcache_block_size=256, num_kvcache_blocks=2, max_model_len=1024, lookahead=lookahead) as llm:
        params = SamplingParams(0, 4, True)
        outputs = run(llm, [small, big, small], params)
        assert_clean(llm)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    for output in (outputs[0], outputs[2]):
        assert_same_answer(output, alone(wide, small, params))
    assert outputs[1].token_ids == alone(wide, big, SamplingParams(0, 1, True)).token_ids
    assert outputs[1].prompt_token_ids == big
    assert outputs[1].error.startswith(
        "Out of KV memory: 513 tokens need 3 KV blocks of 256 tokens, but the pool has 2"
    )
    assert outputs[1].outputs[0].error == outputs[1].error


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_same_prompt_with_one_token_to_give_fits(tiny, wide, lookahead):
    with LLM(tiny, kvcache_block_size=256, num_kvcache_blocks=2, max_model_len=1024, lookahead=lookahead) as llm:
        output = alone(llm, [5] * 512, SamplingParams(0, 1, True))
    assert_same_answer(output, alone(wide, [5] * 512, SamplingParams(0, 1, True)))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_a_prompt_that_can_never_fit_is_refused_when_handed_in(tiny, wide):
    """A pool of 2 blocks and a prompt of 600 tokens: it used to wait for ever, then kill everything."""
    with LLM(tiny, kvcache_block_size=256, num_kvcache_blocks=2, max_model_len=1024) as llm:
        with pytest.raises(ValueError, match="600 tokens need 3 KV blocks of 256 tokens, but the pool has 2"):
            llm.add_request([5] * 600, GREEDY)
        assert llm.is_finished()
        outputs = run(llm, [[5] * 600, [7, 8, 9]])
        assert_clean(llm)
    assert outputs[0].finish_reason == "error"
    assert "600 tokens need 3 KV blocks of 256 tokens, but the pool has 2" in outputs[0].error
    assert (outputs[0].token_ids, outputs[0].text, outputs[0].request_id) == ([], "", -1)
    assert_same_answer(outputs[1], alone(wide, [7, 8, 9]))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_row_that_reaches_max_model_len_ends_by_length(tiny, wide, lookahead):
    """max_model_len=512, a prompt of 500 tokens, max_tokens=100: 12 tokens, in both loops; 512 tokens are too many."""
    prompts = [[5] * n for n in (500, 511, 512, 513)]
    with LLM(tiny, max_model_len=512, num_kvcache_blocks=200, kvcache_block_size=16, lookahead=lookahead) as llm:
        outputs = run(llm, prompts, SamplingParams(0, 100, True))
        assert_clean(llm)
    assert [output.finish_reason for output in outputs] == ["length", "length", "error", "error"]
    assert_same_answer(outputs[0], alone(wide, prompts[0], SamplingParams(0, 12, True)))
    assert_same_answer(outputs[1], alone(wide, prompts[1], SamplingParams(0, 1, True)))
    assert len(outputs[0].token_ids) == 12
    for output in outputs[2:]:
        assert f"{len(output.prompt_token_ids)} tokens, which leaves no room for a completion" in output.error
        assert "max_model_len=512" in output.error


def test_an_empty_prompt_is_an_error_for_that_row_only(wide):
    """`generate([""])` used to be an IndexError."""
    good = "12 + 30 ="
    outputs = run(wide, ["", good, [], good, ""])
    assert [output.finish_reason for output in outputs] == ["error", "length", "error", "length", "error"]
    for output in (outputs[0], outputs[2], outputs[4]):
        assert output.error == "The prompt is empty: it needs at least one token."
    for output in (outputs[1], outputs[3]):
        assert_same_answer(output, alone(wide, good))
    assert [output.finish_reason for output in run(wide, [""])] == ["error"]


def test_one_bad_row_does_not_end_a_long_job(wide):
    """Row 500 empty, row 700 too long: a thousand results all the same, 998 of them right."""
    prompts = [[3 + i % 40, 5] for i in range(1000)]
    prompts[500], prompts[700] = [], [5] * 5000
    params = SamplingParams(0, 2, True)
    expected = [alone(wide, [3 + i, 5], params).token_ids for i in range(40)]
    outputs = run(wide, prompts, params)
    assert [output.index for output in outputs] == list(range(1000))
    assert [i for i, output in enumerate(outputs) if output.error] == [500, 700]
    assert all(output.token_ids == expected[i % 40] for i, output in enumerate(outputs) if i not in (500, 700))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_row_that_runs_out_in_the_middle_keeps_its_tokens(tiny, wide, lookahead):
    """4 blocks of 4 hold 16 tokens and the 17th needs no slot: a prompt of 8 leaves 9, and what belongs to them."""
    prompt = [30, 31, 32, 33, 34, 35, 36, 37]
    params = SamplingParams(0, 20, True, logprobs=1, prompt_logprobs=0)
    with LLM(tiny, kvcache_block_size=4, num_kvcache_blocks=4, max_model_len=64, lookahead=lookahead) as llm:
        outputs = run(llm, [[9], prompt, [9, 8]], [GREEDY, params, GREEDY])
        assert_clean(llm)
    assert_same_answer(outputs[0], alone(wide, [9]))
    assert_same_answer(outputs[2], alone(wide, [9, 8]))
    expected = alone(wide, prompt, dataclasses.replace(params, max_tokens=9))
    assert (outputs[1].token_ids, outputs[1].text) == (expected.token_ids, expected.text)
    assert len(outputs[1].logprobs) == 9
    assert len(outputs[1].prompt_logprobs) == 8
    assert outputs[1].finish_reason == "error"
    assert "17 tokens need 5 KV blocks of 4 tokens, but the pool has 4" in outputs[1].error


@pytest.mark.parametrize("lookahead", [0, 1])
def test_samples_that_run_out_keep_their_tokens_each(tiny, wide, lookahead):
    prompt, params = [30, 31, 32, 33, 34, 35], SamplingParams(1.3, 40, True, n=3, seed=1)
    with LLM(tiny, kvcache_block_size=4, num_kvcache_blocks=4, max_model_len=64, lookahead=lookahead) as llm:
        [output] = run(llm, [prompt], params)
        assert_clean(llm)
    [expected] = run(wide, [prompt], dataclasses.replace(params, max_tokens=11))
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]
    assert {c.finish_reason for c in output.outputs} == {"error"}


# --- every kind of bad row among good ones -------------------------------------------------------------------------

MAX_MODEL_LEN, POOL_TOKENS = 2048, 100 * 16
BAD_ROWS = {  # name -> (prompt, part of the message, tokens that it keeps)
    "empty text": ("", "The prompt is empty", 0),
    "no ids": ([], "The prompt is empty", 0),
    "too long": ([5] * MAX_MODEL_LEN, "leaves no room for a completion within max_model_len=2048", 0),
    "too long by far": ([5] * 9000, "The prompt has 9000 tokens", 0),
    "long text": ("12 + 30 = 42 " * 600, "leaves no room for a completion", 0),
    "negative id": ([5, -1, 6], "Token id -1 is outside the vocabulary: ids run from 0 to 450", 0),
    "id beyond the vocabulary": ([5, VOCAB_SIZE], "Token id 451 is outside the vocabulary", 0),
    "id beyond 32 bits": ([2**40], f"Token id {2**40} is outside the vocabulary", 0),
    "id beyond 63 bits": ([5, 2**63], f"Token id {2**63} is outside the vocabulary", 0),
    "id beyond 64 bits": ([5, 2**70], f"Token id {2**70} is outside the vocabulary", 0),
    "ids beyond 64 bits both ways": ([-(2**70), 2**70], f"Token id {-(2**70)} is outside the vocabulary", 0),
    "lone surrogate": ("ab\ud800", r"The prompt cannot be tokenized: character 2 is '\ud800', a lone surrogate", 0),
    "never fits": ([5] * (POOL_TOKENS + 1), "1601 tokens need 101 KV blocks of 16 tokens, but the pool has 100", 0),
    "runs out": ([5] * (POOL_TOKENS - 1), "1601 tokens need 101 KV blocks of 16 tokens, but the pool has 100", 2),
}
GOOD_ROWS = [f"{n} + {n * 7 % 50} =" for n in range(25)] + [[3 + n, 50 + 2 * n, 9][: 1 + n % 3] for n in range(25)]


@pytest.fixture(scope="module")
def narrow(tiny):
    with LLM(tiny, max_model_len=MAX_MODEL_LEN, kvcache_block_size=16, num_kvcache_blocks=100) as llm:
        yield llm


def assert_bad(output, name, wide):
    prompt, message, num_kept = BAD_ROWS[name]
    assert output.finish_reason == "error"
    assert message in output.error
    assert len(output.token_ids) == num_kept
    if isinstance(prompt, list):
        assert output.prompt_token_ids == prompt
    if num_kept:
        expected = alone(wide, prompt, SamplingParams(0, num_kept, True))
        assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    else:
        assert (output.text, output.request_id) == ("", -1)
    [completion] = output.outputs
    assert (completion.finish_reason, completion.error) == ("error", output.error)


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_bad_row_among_good_ones_is_an_output_and_harms_none(narrow, wide, name, place):
    prompts = ["12 + 30 =", [7, 8, 9], "a b", [44]]
    expected = [alone(wide, prompt) for prompt in prompts]
    prompts.insert(place, BAD_ROWS[name][0])
    expected.insert(place, None)
    outputs = run(narrow, prompts)
    assert_clean(narrow)
    assert [output.index for output in outputs] == [0, 1, 2, 3, 4]
    for output, good in zip(outputs, expected, strict=True):
        assert isinstance(output, RequestOutput)
        if good is None:
            assert_bad(output, name, wide)
        else:
            assert_same_answer(output, good)


def test_all_kinds_of_bad_rows_alone_in_a_batch(narrow, wide):
    outputs = run(narrow, [prompt for prompt, _, _ in BAD_ROWS.values()])
    for output, name in zip(outputs, BAD_ROWS, strict=True):
        assert_bad(output, name, wide)
    assert_clean(narrow)


def test_bad_rows_of_a_stream_come_as_outputs_too(narrow, wide):
    """Taken lazily, also a prompt of the wrong type is a bad row: the rows before it are on their way already."""
    prompts = [7, [7, 8, 9], None, [1.5], "", [44], {"a": 1}, [[1, 2]], b"ab", [1, True]]
    outputs = {output.index: output for output in narrow.stream(iter(prompts), GREEDY)}
    assert sorted(outputs) == list(range(10))
    for i in (1, 5):
        assert_same_answer(outputs[i], alone(wide, prompts[i]))
    for i in (0, 2, 3, 6, 7, 8, 9):
        assert outputs[i].finish_reason == "error"
        assert "A prompt must be a str or a list of ints, not" in outputs[i].error
    assert "The prompt is empty" in outputs[4].error


def test_a_stream_of_parameters_may_hold_bad_ones(narrow, wide):
    params = [GREEDY, SamplingParams(stop_token_ids=[9999]), "greedy", GREEDY]
    outputs = {output.index: output for output in narrow.stream(iter([[7]] * 4), iter(params))}
    assert_same_answer(outputs[0], alone(wide, [7]))
    assert_same_answer(outputs[3], alone(wide, [7]))
    assert "stop_token_ids: token id 9999 is outside the vocabulary" in outputs[1].error
    assert "sampling_params must be SamplingParams, not 'greedy'" in outputs[2].error


@pytest.mark.parametrize("name", BAD_ROWS)
def test_on_error_raise_raises_the_first_row_error_and_leaves_nothing_over(narrow, wide, name):
    prompt, message, _ = BAD_ROWS[name]
    with pytest.raises(RuntimeError, match=r"^Prompt 1: ") as error:
        run(narrow, [[7, 8, 9], prompt, [44]], SamplingParams(0, 50, True), on_error="raise")
    assert message in str(error.value)
    assert_same_answer(run(narrow, [[7, 8, 9]], on_error="raise")[0], alone(wide, [7, 8, 9]))
    assert_clean(narrow)


@pytest.mark.parametrize("on_error", ["rise", None, 1, True])
def test_on_error_is_output_or_raise(narrow, on_error):
    for call in (narrow.generate, narrow.stream):
        with pytest.raises(ValueError, match=r"on_error=.* is unknown.* Known: 'output', 'raise'"):
            call([[7]], GREEDY, on_error=on_error)


def test_ten_thousand_rows_with_one_in_a_hundred_bad_give_ten_thousand_outputs_each_right(narrow, wide):
    prompts = [GOOD_ROWS[i % len(GOOD_ROWS)] for i in range(10_000)]
    params_of = [SamplingParams(0, max_tokens, True) for max_tokens in (1, 2, 3)]
    params = [params_of[i % 3] for i in range(10_000)]
    longest = [alone(wide, prompt, params_of[2]) for prompt in GOOD_ROWS]
    for prompt, output in zip(GOOD_ROWS, longest, strict=True):
        for shorter in params_of[:2]:
            assert alone(wide, prompt, shorter).token_ids == output.token_ids[: shorter.max_tokens]
    bad = {}
    for k, name in zip(range(100), list(BAD_ROWS) * 100, strict=False):
        at = 37 + 100 * k + k % 50
        bad[at], prompts[at], params[at] = name, BAD_ROWS[name][0], SamplingParams(0, 5, True)
    assert set(bad.values()) == set(BAD_ROWS)
    outputs = run(narrow, prompts, params)
    assert len(outputs) == 10_000
    kept = {name: alone(wide, BAD_ROWS[name][0], SamplingParams(0, 2, True)).token_ids for name in ("runs out",)}
    for i, output in enumerate(outputs):
        assert output.index == i
        if i in bad:
            assert output.finish_reason == "error"
            assert BAD_ROWS[bad[i]][1] in output.error
            assert output.token_ids == kept.get(bad[i], [])
        else:
            expected = longest[i % len(GOOD_ROWS)]
            assert output.error is None
            assert output.prompt_token_ids == expected.prompt_token_ids
            assert output.token_ids == expected.token_ids[: params[i].max_tokens]
            assert output.finish_reason == "length"
    assert_clean(narrow)


EXTREMES = [
    {"top_p": 1e-50},
    {"top_p": 1e-50, "min_p": 1e-50, "top_k": 1},
    {"logit_bias": {5: 1e15}, "top_p": 0.9},
    {"logit_bias": {5: 1e15, 6: 1e15}, "temperature": 1e-9, "top_p": 0.9},
    {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -1e15), "top_p": 0.9, "min_p": 0.5},
    {"repetition_penalty": 1e-10, "top_p": 0.9},
    {"repetition_penalty": 1e10, "top_p": 0.9, "top_k": 3},
    {"temperature": 1.1e-10, "top_p": 0.5},
    {"temperature": 1e30, "top_p": 0.5, "min_p": 1.0},
    {"top_k": 10**18, "top_p": 0.999999999},
]


@pytest.mark.parametrize("kwargs", EXTREMES)
def test_parameters_at_the_end_of_their_range_do_not_end_the_batch(narrow, wide, kwargs):
    """All of these are legal, and rounded to float32 some are 0 or infinite; `top_p=1e-50` ended everything once."""
    params = [GREEDY, SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **kwargs}), GREEDY]
    outputs = run(narrow, [[7, 8, 9], [7, 8, 9], "a b"], params)
    assert_same_answer(outputs[0], alone(wide, [7, 8, 9]))
    assert_same_answer(outputs[2], alone(wide, "a b"))
    assert (outputs[1].error, len(outputs[1].token_ids)) == (None, 4)
    assert_clean(narrow)


def test_the_least_top_p_leaves_the_likeliest_token(narrow, wide):
    [output] = run(narrow, [[7, 8, 9]], SamplingParams(1.0, 6, True, top_p=1e-50))
    assert output.token_ids == alone(wide, [7, 8, 9]).token_ids


@pytest.mark.parametrize("temperature", [1e20, 1e30, 1e38, 1e39, 1e300])
def test_no_temperature_lets_a_forbidden_token_through(narrow, temperature):
    """Beyond float32 it would be infinite, and -inf / inf is not a number, which wins every comparison."""
    try:
        params = SamplingParams(temperature, 8, True, allowed_token_ids=[30, 31], seed=1)
    except ValueError:
        assert temperature > 1e29  # refused is as good
        return
    [output] = run(narrow, [[7, 8, 9]], params)
    assert set(output.token_ids) <= {30, 31}


@pytest.mark.parametrize("bias", [1e15, -1e15, 1e30, -1e30])
@pytest.mark.parametrize("penalty", [1e-10, 1.0, 1e10, 1e-30, 1e30])
@pytest.mark.parametrize("kwargs", [{}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}])
def test_no_bias_or_penalty_lets_a_forbidden_token_through(narrow, bias, penalty, kwargs):
    """A product beyond float32 was infinite, and inf - inf is not a number: token 0 came, though it was forbidden."""
    try:
        params = SamplingParams(
            1.1e-10,
            4,
            True,
            allowed_token_ids=[30, 31, 32],
            logit_bias={30: bias, 31: bias},
            repetition_penalty=penalty,
            **kwargs,
        )
    except ValueError:
        assert abs(bias) > 1e15 or not 1e-10 <= penalty <= 1e10  # refused is as good
        return
    [output] = run(narrow, [[30, 31, 7]], params)
    assert len(output.token_ids) == 4
    assert set(output.token_ids) <= {30, 31, 32}


def test_min_tokens_without_any_token_that_goes_on_raises_before_anything_runs(narrow):
    params = SamplingParams(min_tokens=1, stop_token_ids=list(range(VOCAB_SIZE)), top_p=0.9)
    with pytest.raises(ValueError, match="min_tokens=1"):
        run(narrow, [[7]], params)


# --- mistakes in the call ------------------------------------------------------------------------------------------

WRONG_PROMPTS = {
    "a bare text": ("12 + 30 =", r"prompts must be a list: write generate\(\['12 \+ 30 ='\]\)"),
    "bare ids": ([7, 8, 9], r"prompts must be a list of prompts: write generate\(\[\[7, 8, 9\]\]\)"),
    "a bare tuple of ids": ((7, 8), r"prompts must be a list of prompts: write generate\(\[\[7, 8\]\]\)"),
    "nothing": (None, "prompts must be a list of str or of lists of ints, not None"),
    "a number": (3, "prompts must be a list of str or of lists of ints, not 3"),
    "a float row": ([[7], [1.5]], r"A prompt must be a str or a list of ints, not \[1.5\]"),
    "floats that are whole": ([[1.0, 2.0]], r"A prompt must be a str or a list of ints, not \[1.0, 2.0\]"),
    "a float": ([0.5], "A prompt must be a str or a list of ints, not 0.5"),
    "a row that is None": (["ab", None], "A prompt must be a str or a list of ints, not None"),
    "lists too deep": ([[[7, 8]]], r"A prompt must be a str or a list of ints, not \[\[7, 8\]\]"),
    "lists too deep and ragged": ([[[7, 8], [9]]], "A prompt must be a str or a list of ints"),
    "texts too deep": ([["ab", "cd"]], "A prompt must be a str or a list of ints"),
    "bools": ([[True, False]], "A prompt must be a str or a list of ints"),
    "a bool among ids": ([[1, True]], r"A prompt must be a str or a list of ints, not \[1, True\]"),
    "a bool of numpy among ids": ([(1, np.True_)], "A prompt must be a str or a list of ints"),
    "an array of bools": ([np.array([True])], "A prompt must be a str or a list of ints"),
    "bytes": ([b"ab"], "A prompt must be a str or a list of ints, not b'ab'"),
    "a dict": ([{"prompt": "ab"}], "A prompt must be a str or a list of ints"),
    "a text among ids": ([[7, "8"]], "A prompt must be a str or a list of ints"),
    "None among ids": ([[7, None]], "A prompt must be a str or a list of ints"),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
def test_prompts_of_the_wrong_type_raise_before_anything_runs(narrow, name):
    prompts, message = WRONG_PROMPTS[name]
    for call in (narrow.generate, narrow.stream):
        with nothing_may_run(narrow), pytest.raises(TypeError, match=message):
            call(prompts, GREEDY, use_tqdm=False)
    assert_clean(narrow)


def test_the_good_rows_before_a_wrong_type_do_not_run(narrow):
    with nothing_may_run(narrow), pytest.raises(TypeError, match="not None"):
        run(narrow, [[7, 8]] * 1000 + [None])


@pytest.mark.parametrize("prompts", [iter(["ab"]), {"ab"}, {"ab": 1}, np.array([[7, 8]])], ids=type)
def test_generate_wants_a_list(narrow, prompts):
    with pytest.raises(TypeError, match="prompts must be a list of str or of lists of ints, not"):
        run(narrow, prompts)


def test_arrays_of_ints_and_tuples_are_prompts(narrow, wide):
    expected = alone(wide, [7, 8, 9])
    rows = [np.array([7, 8, 9]), np.array([7, 8, 9], np.uint8), (7, 8, 9), [np.int64(7), np.int32(8), 9]]
    for output in run(narrow, rows) + run(narrow, tuple(rows)):
        assert_same_answer(output, expected)
        assert all(type(token_id) is int for token_id in output.prompt_token_ids + output.token_ids)


USER = {"role": "user", "content": "ab"}
WRONG_CONVERSATIONS = {
    "a text": "ab",
    "nothing": None,
    "a message": USER,
    "texts": ["ab", "cd"],
    "lists too deep": [[[USER]]],
    "an empty conversation": [[USER], []],
    "one empty conversation": [[]],
    "a conversation that is None": [[USER], None],
    "a message that is no dict": [[USER, "ab"]],
    "ids": [[7, 8]],
    "one conversation with a text in it": [USER, "ab"],
}


@pytest.mark.parametrize("name", WRONG_CONVERSATIONS)
def test_conversations_of_the_wrong_type_raise_before_anything_runs(narrow, name):
    with nothing_may_run(narrow), pytest.raises(TypeError, match="conversations must be a list of messages like") as e:
        narrow.chat(WRONG_CONVERSATIONS[name], GREEDY, use_tqdm=False)
    assert ("none of them empty, not []." in str(e.value)) == ("empty" in name)


@pytest.mark.parametrize("name", ["chat_template_kwargs", "tools"])
def test_template_arguments_of_the_wrong_type_raise_before_anything_runs(narrow, name):
    kind = {"chat_template_kwargs": "dict", "tools": "list"}[name]
    for wrong in (5, "ab", 0, False):
        with nothing_may_run(narrow), pytest.raises(TypeError, match=f"{name} must be a {kind} or None, not {wrong!r}"):
            narrow.chat([USER], GREEDY, use_tqdm=False, **{name: wrong})


def test_a_long_prompt_is_no_matter_for_a_warning_of_the_tokenizer(narrow, monkeypatch):
    """transformers warned of "indexing errors" at lengths that this engine serves, or refuses by itself."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(narrow.tokenizer, "model_max_length", 4)
    logger.addHandler(handler)
    try:
        assert [output.error for output in run(narrow, ["12 + 30 = 42", "1 + 2 = 3"])] == [None, None]
        narrow.add_request("12 + 30 = 42 and so on", GREEDY)
        assert records == []
        narrow.tokenizer("12 + 30 = 42")
        assert "Token indices sequence length is longer" in records[0].getMessage()  # so there was something to silence
    finally:
        logger.removeHandler(handler)
        while not narrow.is_finished():
            narrow.step()


def test_no_prompts_give_no_outputs(narrow):
    assert run(narrow, []) == []
    assert run(narrow, (), []) == []
    assert narrow.chat([], GREEDY, use_tqdm=False) == []
    assert list(narrow.stream([])) == []
    assert list(narrow.stream(iter([]))) == []


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (None, TypeError, "A prompt must be a str or a list of ints, not None"),
        (7, TypeError, "A prompt must be a str or a list of ints, not 7"),
        ([1.5], TypeError, "A prompt must be a str or a list of ints"),
        ("", ValueError, "The prompt is empty"),
        ([], ValueError, "The prompt is empty"),
        ([-1], ValueError, "Token id -1 is outside the vocabulary"),
        ([2**70], ValueError, "is outside the vocabulary"),
        ("\ud800", ValueError, r"The prompt cannot be tokenized: character 0 is '\\ud800', a lone surrogate"),
        ([1, True], TypeError, "A prompt must be a str or a list of ints"),
        ([5] * 2048, ValueError, "leaves no room for a completion"),
    ],
)
def test_add_request_raises_what_is_wrong_with_a_row(narrow, prompt, error, message):
    with pytest.raises(error, match=message):
        narrow.add_request(prompt, GREEDY)
    assert narrow.engine._requests == {}
