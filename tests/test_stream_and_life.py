"""Results as they finish, chat, the progress bar, and the life of an engine from its start to its end."""

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import nanovllm
import nanovllm.llm
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import CompletionOutput
from nanovllm.utils.tokenizer import split_reasoning

EMBEDDED = Path(nanovllm.__file__).parent / "embedded"
VOCAB_SIZE = 451
QUESTION = "12 + 30 ="


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
        "max_position_embeddings": 1024,
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


def new_llm(model, **knobs):
    return LLM(model, **{"max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 500, **knobs})


@pytest.fixture(scope="module", params=[0, 1], ids=["lookahead0", "lookahead1"])
def llm(tiny, request):
    with new_llm(tiny, lookahead=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny):
    """What a greedy row gets alone, by prompt and length."""
    known = {}
    with new_llm(tiny) as llm:

        def look_up(prompt, max_tokens):
            key = (tuple(prompt), max_tokens)
            if key not in known:
                [output] = llm.generate([prompt], SamplingParams(0, max_tokens, True), use_tqdm=False)
                known[key] = output.token_ids
            return known[key]

        yield look_up


def greedy(max_tokens):
    return SamplingParams(0, max_tokens, True)


def assert_clean(llm, expected):
    """No block is held, and the next call gives its own results only, and the right ones."""
    assert llm.engine.scheduler.block_manager.used_block_ids == set()
    outputs = llm.generate([[7, 8], [9]], greedy(4), use_tqdm=False)
    assert [output.index for output in outputs] == [0, 1]
    assert [output.token_ids for output in outputs] == [expected([7, 8], 4), expected([9], 4)]
    assert llm.engine._requests == {}
    assert llm._others == []
    llm.engine.scheduler.block_manager.check_invariants([])


# --- stream --------------------------------------------------------------------------------------------------------


def test_a_stream_yields_each_output_as_soon_as_it_ends(llm, expected):
    lengths = [9, 2, 5, 1, 7, 3]
    prompts = [[10 + i, 20] for i in range(6)]
    seen = []
    for output in llm.stream(prompts, [greedy(n) for n in lengths]):
        seen.append(output.index)
        assert output.token_ids == expected(prompts[output.index], lengths[output.index])
        assert output.prompt_token_ids == prompts[output.index]
        unfinished = len(llm.engine._requests)
        assert unfinished == len(prompts) - len(seen)
    assert seen == [3, 1, 5, 2, 4, 0]  # in order of their lengths


def test_a_stream_of_texts_and_ids_has_the_outputs_of_generate(llm):
    prompts = [QUESTION, [7, 8], "", "a b c", [9] * 300]
    generated = llm.generate(prompts, greedy(5), use_tqdm=False)
    streamed = sorted(llm.stream(prompts, greedy(5)), key=lambda output: output.index)
    assert [output.error for output in streamed] == [output.error for output in generated]
    for one, two in zip(streamed, generated, strict=True):
        ignored = {"request_id": 0, "num_cached_tokens": 0}
        assert dataclasses.replace(one, **ignored) == dataclasses.replace(two, **ignored)


@pytest.mark.parametrize("num_taken", [1, 2, 5])
def test_leaving_a_stream_early_drops_the_rest(llm, expected, num_taken):
    prompts = [[10 + i, 20] for i in range(8)]
    taken = []
    for output in llm.stream(prompts, [greedy(3 + i) for i in range(8)]):
        taken.append(output.index)
        if len(taken) == num_taken:
            break
    gc.collect()
    assert taken == list(range(num_taken))
    assert_clean(llm, expected)


def test_closing_a_stream_drops_the_rest(llm, expected):
    stream = llm.stream([[10 + i] for i in range(8)], greedy(20))
    with contextlib.closing(iter(stream)):
        pass  # never begun
    assert_clean(llm, expected)
    stream = llm.stream([[10 + i] for i in range(8)], [greedy(1 + 10 * i) for i in range(8)])
    assert next(stream).index == 0
    stream.close()
    assert_clean(llm, expected)
    assert list(stream) == []


def test_an_exception_in_the_loop_over_a_stream_drops_the_rest(llm, expected):
    def use():
        for output in llm.stream([[10 + i] for i in range(8)], [greedy(2 + i) for i in range(8)]):
            if output.index == 1:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        use()
    assert_clean(llm, expected)


def test_a_lazy_source_is_read_piece_by_piece(tiny):
    """A hundred thousand rows: when the first output comes, only the first few hundred have been read."""
    num_read = 0

    def source():
        nonlocal num_read
        for i in range(100_000):
            num_read += 1
            yield [10 + i % 50]

    with new_llm(tiny, max_num_seqs=8) as llm:
        stream = llm.stream(source(), greedy(2))
        assert num_read == 0
        first = next(stream)
        assert first.index == 0
        assert num_read <= 256
        for count, _ in enumerate(itertools.islice(stream, 999), 2):
            assert num_read <= count + 8 + 2 * 256  # what is done, alive and waiting
        assert count == 1000
        assert num_read >= 1000
        stream.close()
        at_close = num_read
        assert llm.engine.scheduler.block_manager.used_block_ids == set()
    assert num_read == at_close < 2000


def test_a_lazy_source_is_read_to_its_end_with_parameters_beside_it(llm, expected):
    num_rows = 600  # more than two pieces
    prompts = ([10 + i % 7] for i in range(num_rows))
    params = [greedy(1), greedy(2), greedy(3)]
    outputs = list(llm.stream(prompts, (params[i % 3] for i in range(num_rows))))
    assert sorted(output.index for output in outputs) == list(range(num_rows))
    for output in outputs:
        assert output.token_ids == expected([10 + output.index % 7], 1 + output.index % 3)


def test_parameters_beside_a_lazy_source_may_go_on_for_ever(llm, expected):
    outputs = list(llm.stream(iter([[10]] * 300), itertools.cycle([greedy(1), greedy(2)])))
    assert len(outputs) == 300
    assert all(output.token_ids == expected([10], 1 + output.index % 2) for output in outputs)


@pytest.mark.parametrize("num_rows", [255, 256, 257, 512, 513])
def test_no_row_is_lost_at_the_border_of_a_piece(llm, num_rows):
    outputs = list(llm.stream(iter([[5]] * num_rows), greedy(1)))
    assert sorted(output.index for output in outputs) == list(range(num_rows))
    assert len(llm.generate([[5]] * num_rows, greedy(1), use_tqdm=False)) == num_rows


def test_a_second_call_while_one_is_open_is_a_runtime_error(llm, expected):
    message = "Another generate or stream is under way on this LLM; end it first"
    stream = llm.stream([[10], [11]], [greedy(1), greedy(30)])
    other = llm.stream([[12]], greedy(1))  # neither has begun, so either may
    assert next(stream).index == 0
    for call in (
        lambda: llm.generate([[12]], greedy(1), use_tqdm=False),
        lambda: llm.generate([], greedy(1), use_tqdm=False),
        lambda: llm.stream([[12]], greedy(1)),
        lambda: llm.chat([{"role": "user", "content": "a"}], greedy(1), use_tqdm=False),
        lambda: next(other),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    assert [output.token_ids for output in stream] == [expected([11], 30)]  # unharmed
    assert_clean(llm, expected)


@pytest.mark.parametrize("num_params", [0, 1, 299])
@pytest.mark.parametrize(("prompts_in", "params_in"), [(iter, list), (iter, iter), (list, iter)])
def test_each_row_beyond_the_last_parameters_is_an_error(llm, expected, num_params, prompts_in, params_in):
    """They must not vanish without a word, nor take the rows before them along."""
    prompts = [[10 + i % 7] for i in range(300)]
    outputs = list(llm.stream(prompts_in(prompts), params_in([greedy(1)] * num_params)))
    assert sorted(output.index for output in outputs) == list(range(300))
    for output in outputs:
        if output.index < num_params:
            assert output.token_ids == expected([10 + output.index % 7], 1)
        else:
            assert output.error == "sampling_params ended before this prompt; give one for all, or one each."
    assert_clean(llm, expected)


def test_any_iterable_of_parameters_goes_with_a_list_of_prompts_and_none_is_the_default(chatty):
    """Beside a list an iterator was a TypeError, and None in it counted as its end."""
    params = [SamplingParams(0, 3, True), None, SamplingParams(0, 5, True)]
    [default] = chatty.generate([QUESTION], use_tqdm=False)
    assert len(default.token_ids) not in (3, 5)
    for prompts in ([QUESTION] * 3, iter([QUESTION] * 3)):
        outputs = sorted(chatty.stream(prompts, iter(params)), key=lambda output: output.index)
        assert [output.error for output in outputs] == [None] * 3
        assert [len(output.token_ids) for output in outputs] == [3, len(default.token_ids), 5]
        assert outputs[1].token_ids == default.token_ids


def test_a_slow_source_delays_neither_the_first_output_nor_rows_under_way(tiny, expected):
    """The first output came when 256 rows, here all, had been read; a row under way waited for each piece."""
    num_read = 0

    def source():
        nonlocal num_read
        for i in range(20):
            time.sleep(0.05)
            num_read += 1
            yield [10 + i]

    with new_llm(tiny) as llm:
        seen = {}
        for output in llm.stream(source(), greedy(12)):
            assert output.token_ids == expected([10 + output.index], 12)
            seen[output.index] = num_read
    assert sorted(seen) == list(range(20))
    assert seen[0] < 6  # 1 unless this machine is very busy; a step for each row read would make it 12
    assert seen[10] < 18


@pytest.mark.parametrize("wrong", ["greedy", b"ab", {"temperature": 0}, 0.5])
def test_parameters_of_the_wrong_type_beside_a_lazy_source_raise_before_it_is_read(llm, wrong):
    source = iter([[10]] * 9)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams or a list of them"):
        llm.stream(source, wrong)
    assert len(list(source)) == 9


# --- exceptions in the middle --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_an_exception_of_the_source_leaves_nothing_over(llm, expected, error):
    def source():
        yield from [[10 + i % 50] for i in range(300)]
        raise error("no more")

    with pytest.raises(error):
        list(llm.stream(source(), greedy(3)))
    assert_clean(llm, expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("at_step", [0, 1, 2, 5])
def test_an_exception_in_a_step_leaves_nothing_over(llm, expected, monkeypatch, at_step, error):
    """Interrupt a call of three prompts, then ask one: it used to come with the leftovers of the others."""
    runner, steps = llm.engine.model_runner, itertools.count()
    real_run = runner.run

    def run(seqs, is_prefill):
        if next(steps) == at_step:
            raise error("in the middle")
        return real_run(seqs, is_prefill)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", run)
        with pytest.raises(error):
            llm.generate([[10], [11], [12]], greedy(9), use_tqdm=False)
        assert llm.is_finished()
        assert llm.step() == ([], 0)
        steps = itertools.count(100)
        assert_clean(llm, expected)
    [output] = llm.generate([[13]], greedy(5), use_tqdm=False)
    assert (output.index, output.token_ids) == (0, expected([13], 5))
    assert_clean(llm, expected)


def test_an_exception_while_results_are_awaited_leaves_nothing_over(llm, expected, monkeypatch):
    real_run = llm.engine.model_runner.run

    class Broken:
        def wait(self):
            raise KeyboardInterrupt

    steps = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(
            llm.engine.model_runner,
            "run",
            lambda seqs, is_prefill: Broken() if next(steps) == 2 else real_run(seqs, is_prefill),
        )
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[10], [11], [12]], greedy(9), use_tqdm=False)
    assert_clean(llm, expected)


def test_an_exception_of_the_tokenizer_is_one_of_its_row(llm, monkeypatch, expected):
    tokenizer = llm.tokenizer

    def refuse(texts, **kwargs):
        if "bad" in texts:
            raise RuntimeError("I do not like it")
        return tokenizer(texts, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "tokenizer", _Callable(tokenizer, refuse))
        outputs = llm.generate(["a", "bad", "b"], greedy(2), use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "I do not like it" in outputs[1].error
    assert_clean(llm, expected)


def test_an_exception_in_a_step_by_hand_is_a_clean_start(llm, expected, monkeypatch):
    for i in range(3):
        llm.add_request([10 + i], greedy(9))
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model_runner, "run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    assert llm.is_finished()
    assert llm.step() == ([], 0)
    assert_clean(llm, expected)


class _Callable:
    """A tokenizer whose call is another function."""

    def __init__(self, tokenizer, call):
        self._tokenizer, self._call = tokenizer, call

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


# --- outputs -------------------------------------------------------------------------------------------------------

OUTPUT_KEYS = [
    "index",
    "request_id",
    "text",
    "token_ids",
    "prompt_token_ids",
    "finish_reason",
    "stop_reason",
    "num_cached_tokens",
    "logprobs",
    "prompt_logprobs",
    "error",
    "reasoning",
    "outputs",
]


@pytest.fixture(scope="module")
def output(tiny):
    with new_llm(tiny) as llm:
        params = SamplingParams(1.2, 3, True, n=2, seed=1, logprobs=1, prompt_logprobs=0)
        return llm.generate([[7, 8, 9]], params, use_tqdm=False)[0]


def test_an_output_reads_like_nano_vllms_dict(output):
    assert output["text"] == output.text
    assert output["token_ids"] == output.token_ids
    assert output.keys() == OUTPUT_KEYS == list(output)
    samples = {"outputs": [sample.to_dict() for sample in output.outputs]}
    assert dict(output) == {name: getattr(output, name) for name in OUTPUT_KEYS} | samples
    assert json.loads(json.dumps(dict(output)))["outputs"][0]["text"] == output.text
    assert "text" in output
    assert "logprobs" in output
    for name in ("texts", "keys", "to_dict", "__class__", 0, None):
        assert name not in output
        with pytest.raises(KeyError, match=re.escape(repr(name))):
            output[name]
    assert {**output}["prompt_token_ids"] == [7, 8, 9]


def test_a_completion_reads_like_a_dict_too(output):
    first = output.outputs[0]
    names = ["index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs", "error", "reasoning"]
    assert first.keys() == names
    assert dict(first) == {name: getattr(first, name) for name in names} == output["outputs"][0]


def test_outputs_are_frozen(output):
    for frozen in (output, output.outputs[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.text = "other"
        with pytest.raises(TypeError):
            frozen["text"] = "other"


def test_to_dict_is_ready_for_json_all_the_way_down(output):
    plain = output.to_dict()
    assert type(plain["outputs"][1]) is dict
    again = json.loads(json.dumps(plain))
    assert again["token_ids"] == output.token_ids
    assert again["outputs"][1]["text"] == output.outputs[1].text
    assert again["prompt_logprobs"][0] is None
    assert {int(token_id): value for token_id, value in again["logprobs"][0].items()} == output.logprobs[0]
    assert json.loads(json.dumps(output.outputs[0].to_dict()))["index"] == 0


def test_an_error_output_has_every_field_as_well(llm):
    [refused] = llm.generate([""], greedy(1), use_tqdm=False)
    assert refused.keys() == OUTPUT_KEYS
    assert refused == RequestOutput(
        index=0,
        request_id=-1,
        text="",
        token_ids=[],
        prompt_token_ids=[],
        finish_reason="error",
        error=refused.error,
        outputs=[CompletionOutput(0, "", [], "error", error=refused.error)],
    )
    json.dumps(refused.to_dict())


# --- chat ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatty():
    with LLM("embedded", max_model_len=512, num_kvcache_blocks=500, kvcache_block_size=16) as llm:
        yield llm


@pytest.fixture
def template(chatty):
    """Set a chat template for one test."""
    before = chatty.tokenizer.chat_template

    def change(text):
        chatty.tokenizer.chat_template = text

    yield change
    chatty.tokenizer.chat_template = before


def user(content):
    return {"role": "user", "content": content}


def test_one_conversation_gives_a_list_of_one_and_many_a_list_in_order(chatty):
    [one] = chatty.chat([user("What is 12 + 30?")], use_tqdm=False)
    assert one.text.startswith("12 + 30 = 42")
    assert (one.finish_reason, one.stop_reason, one.reasoning) == ("stop", None, None)
    assert "<|" not in one.text
    many = chatty.chat([[user("a")], [user("What is 12 + 30?")], (user("b"),)], use_tqdm=False)
    assert [output.index for output in many] == [0, 1, 2]
    assert many[1].token_ids == one.token_ids
    for question, output in zip(("a", "What is 12 + 30?", "b"), many, strict=True):
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids == chatty.tokenizer(prompt)["input_ids"]
    dialog = [user("What is 12 + 30?"), {"role": "assistant", "content": one.text}, user("b")]
    [answer] = chatty.chat(dialog, SamplingParams(0, 2), use_tqdm=False)
    assert chatty.tokenizer.decode(answer.prompt_token_ids).count("<|im_start|>") == 4


def test_one_set_of_parameters_a_conversation(chatty):
    params = [SamplingParams(0, 3, True), SamplingParams(0, 5, True, n=1)]
    outputs = chatty.chat([[user("a")], [user("b")]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.token_ids for output in outputs]
    with pytest.raises(ValueError, match="There are 1 prompts but 2 sampling_params"):
        chatty.chat([user("a")], params, use_tqdm=False)


def test_template_arguments_and_tools_reach_the_template(chatty, template):
    template(
        "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
        "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
        "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}"
        "{% if add_generation_prompt %}[go]{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    def prompt_of(**kwargs):
        [output] = chatty.chat([user("hi")], SamplingParams(0, 1), use_tqdm=False, **kwargs)
        return chatty.tokenizer.decode(output.prompt_token_ids)

    assert prompt_of() == "[user: hi][go]"
    assert prompt_of(chat_template_kwargs={"enable_thinking": False}) == "[thinking False][user: hi][go]"
    assert prompt_of(tools=tools) == "[tool add][user: hi][go]"
    assert prompt_of(tools=tools, chat_template_kwargs={"enable_thinking": True}) == (
        "[thinking True][tool add][user: hi][go]"
    )


def test_a_conversation_that_cannot_be_tokenized_is_an_error_of_its_row(chatty):
    conversations = [[user("What is 12 + 30?")], [user("ab\ud800")], [user("b")]]
    outputs = chatty.chat(conversations, SamplingParams(0, 20), use_tqdm=False)
    assert [output.index for output in outputs] == [0, 1, 2]
    assert "The prompt cannot be tokenized" in outputs[1].error
    for i in (0, 2):
        [alone] = chatty.chat(conversations[i], SamplingParams(0, 20), use_tqdm=False)
        assert (outputs[i].error, outputs[i].token_ids) == (None, alone.token_ids)


def test_a_conversation_that_the_template_refuses_is_an_error_of_its_row(chatty, template):
    """It ended the whole batch, after all conversations before it had been rendered."""
    template(
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    conversations = [[user("a")], [{"role": "bad", "content": "hi"}], [user("b")], [{"role": "user"}]]
    outputs = chatty.chat(conversations, SamplingParams(0, 5, True), use_tqdm=False)
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert outputs[1].error == ("The chat template refuses [{'role': 'bad', 'content': 'hi'}]: roles must alternate")
    assert (outputs[1].finish_reason, outputs[1].prompt_token_ids, outputs[1].reasoning) == ("error", [], None)
    for i, text in ((0, "a"), (2, "b")):
        [alone] = chatty.generate([text], SamplingParams(0, 5, True), use_tqdm=False)
        assert (outputs[i].error, outputs[i].token_ids) == (None, alone.token_ids)
    with pytest.raises(RuntimeError, match=r"^Prompt 1: The chat template refuses .*: roles must alternate"):
        chatty.chat(conversations, SamplingParams(0, 5, True), use_tqdm=False, on_error="raise")


def test_a_model_without_chat_template_says_so(chatty, template):
    template(None)
    with pytest.raises(ValueError, match="'embedded' has no chat template; use generate"):
        chatty.chat([user("hi")], use_tqdm=False)


@pytest.mark.parametrize(
    ("text", "starts_open", "reasoning", "answer"),
    [
        ("42", False, None, "42"),
        ("", False, None, ""),
        ("  42 ", False, None, "  42 "),
        ("<think>\n12 and 30\n</think>\n\n42", False, "12 and 30", "42"),
        ("\n<think>12</think>42", False, "12", "42"),
        ("<think>\n\n</think>\n\n42", False, "", "42"),
        ("<think>cut off", False, "cut off", ""),
        ("<think>one\n\ntwo</think>\nthree\n\nfour\n", False, "one\n\ntwo", "three\n\nfour\n"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("answer <think>late</think>", False, None, "answer <think>late</think>"),
        ("answer</think>", False, None, "answer</think>"),
        ("12 and 30\n</think>\n\n42", True, "12 and 30", "42"),
        ("\n12\n</think>42", True, "12", "42"),
        ("cut off", True, "cut off", ""),
        ("", True, "", ""),
        ("<think>12</think>42", True, "12", "42"),
    ],
)
def test_reasoning_is_set_apart_from_the_answer(text, starts_open, reasoning, answer):
    assert split_reasoning(text, starts_open) == (reasoning, answer)


class _Saying:
    """A runner that says one text over and over, ended by the end token, whatever it is asked."""

    def __init__(self, token_ids):
        self.token_ids = token_ids

    def run(self, seqs, is_prefill):
        from nanovllm.engine.step import StepOutput

        tokens = [(self.token_ids + [2] * 9)[seq.num_completion_tokens] for seq in seqs]
        return type("Done", (), {"wait": lambda self: StepOutput(tokens)})()


@pytest.mark.parametrize(
    ("ends_with", "said", "reasoning", "answer"),
    [
        ("go\n", "<think>\nhm\n</think>\n\n42", "hm", "42"),
        ("go\n<think>\n", "hm\n</think>\n\n42", "hm", "42"),
        ("go\n<think>\n\n</think>\n\n", "42", None, "42"),
        ("go\n", "42", None, "42"),
    ],
)
def test_chat_sets_the_thinking_text_apart(chatty, template, monkeypatch, ends_with, said, reasoning, answer):
    template("{{ messages[0].content }}" + ends_with)
    monkeypatch.setattr(chatty.engine, "model_runner", _Saying(chatty.tokenizer(said)["input_ids"]))
    params = SamplingParams(1.0, 60, n=2)
    [output] = chatty.chat([user("hi")], params, use_tqdm=False)
    assert (output.reasoning, output.text) == (reasoning, answer)
    assert [(c.reasoning, c.text) for c in output.outputs] == [(reasoning, answer)] * 2
    assert chatty.tokenizer.decode(output.token_ids, skip_special_tokens=True) == said
    [generated] = chatty.generate(["hi"], params, use_tqdm=False)
    assert (generated.reasoning, generated.text) == (None, said)  # generate leaves texts alone


# --- progress bar --------------------------------------------------------------------------------------------------


class _Screen(io.StringIO):
    """Keeps each redraw of the bar with its time."""

    def __init__(self):
        super().__init__()
        self.draws = []

    def write(self, text):
        if "Generating" in text:
            self.draws.append((time.perf_counter(), text))
        return len(text)


@pytest.fixture
def screen(monkeypatch):
    screen, tqdm = _Screen(), nanovllm.llm.tqdm
    monkeypatch.setattr(nanovllm.llm, "tqdm", lambda **kwargs: tqdm(**kwargs, file=screen))
    return screen


def test_the_progress_bar_is_redrawn_at_most_ten_times_a_second(tiny, screen, expected):
    with new_llm(tiny, max_num_seqs=4, num_kvcache_blocks=9, kvcache_block_size=4, greedy_admission=True) as llm:
        real_run = llm.engine.model_runner.run

        def slow_run(seqs, is_prefill):
            time.sleep(0.002)
            return real_run(seqs, is_prefill)

        llm.engine.model_runner.run = slow_run
        start = time.perf_counter()
        outputs = llm.generate([[10 + i % 50] for i in range(150)], greedy(12))
        elapsed = time.perf_counter() - start
        assert llm.engine.scheduler.num_preemptions > 0
    assert all(output.token_ids == expected([10 + i % 50], 12) for i, output in enumerate(outputs))
    times = [at for at, _ in screen.draws]
    middle = times[1:-1]  # besides the first and the last drawing
    assert elapsed > 0.4
    assert 2 <= len(middle) <= elapsed / 0.1
    assert all(b - a > 0.09 for a, b in itertools.pairwise(middle))
    assert "0/150" in screen.draws[0][1]
    assert "150/150" in screen.draws[-1][1]
    shown = screen.draws[-1][1]
    numbers = re.search(r"in (\d+) tok/s, out (\d+) tok/s, KV (\d+)%, preempted (\d+)", shown)
    assert numbers, shown
    tokens_in, tokens_out, kv_use, preempted = map(int, numbers.groups())
    assert 0 < tokens_in < tokens_out < 1800 / elapsed * 3
    assert 0 <= kv_use <= 100
    assert any(int(found) > 30 for _, text in screen.draws for found in re.findall(r"KV (\d+)%", text))
    assert preempted > 0


def test_a_stream_shows_a_bar_on_demand_only_and_generate_does_unless_told(tiny, screen, capsys):
    with new_llm(tiny) as llm:
        llm.generate([[7]], greedy(1), use_tqdm=False)
        list(llm.stream([[7]], greedy(1)))
        assert screen.draws == []
        list(llm.stream([[7]] * 3, greedy(1), use_tqdm=True))
        assert "3/3" in screen.draws[-1][1]
        num_draws = len(screen.draws)
        list(llm.stream(iter([[7]] * 3), greedy(1), use_tqdm=True))  # a source of unknown length
        assert "3prompt" in screen.draws[-1][1]
        assert len(screen.draws) > num_draws
        num_draws = len(screen.draws)
        llm.generate([[7], ""], greedy(1))
        assert "2/2" in screen.draws[-1][1]
        assert len(screen.draws) > num_draws
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


# --- the engine's own interface -------------------------------------------------------------------------------------


def run_to_end(engine):
    outputs, nums = [], []
    while not engine.is_finished():
        ended, num_tokens = engine.step()
        outputs += ended
        nums.append(num_tokens)
    return outputs, nums


def test_requests_may_be_added_step_by_step(llm, expected):
    llm.generate([[5]], greedy(1), use_tqdm=False)
    while not llm.is_finished():
        llm.step()
    assert llm.step() == ([], 0)  # an idle engine has nothing to do
    first = llm.add_request([31, 32, 33], greedy(3))
    second = llm.add_request([41, 42], greedy(5))
    assert second == first + 1
    assert not llm.is_finished()
    ended, num_tokens = llm.step()
    assert (ended, num_tokens) == ([], 5)  # the tokens of a prefill step
    ended, num_tokens = llm.step()
    assert (ended, num_tokens) == ([], -2)  # minus the sequences of a decode step
    third = llm.add_request([51], greedy(1))
    outputs, nums = run_to_end(llm)
    by_id = {output.request_id: output for output in outputs}
    assert sorted(by_id) == [first, second, third]
    assert by_id[first].token_ids == expected([31, 32, 33], 3)
    assert by_id[second].token_ids == expected([41, 42], 5)
    assert by_id[third].token_ids == expected([51], 1)
    assert {output.index for output in outputs} == {0}
    assert nums.count(1) == 1  # the prefill of the third
    assert llm.step() == ([], 0)
    assert llm.is_finished()


def test_nothing_is_left_to_do_after_a_call(chatty, tiny):
    """A row that ends by its end token has a step under way that nobody waits for; it must not count as work."""
    [output] = chatty.generate([QUESTION], use_tqdm=False)
    assert (output.finish_reason, output.token_ids[-1]) == ("stop", 2)
    assert chatty.is_finished()
    assert chatty.step() == ([], 0)
    for _ in chatty.stream(["a", QUESTION, "b"], SamplingParams(0, 40)):
        break
    gc.collect()
    assert chatty.is_finished()
    assert chatty.step() == ([], 0)
    prompts = [[10 + i % 5, 20 + i] for i in range(12)]  # preempted rows may end by a token that was under way
    with new_llm(tiny, kvcache_block_size=2, num_kvcache_blocks=9) as llm:
        llm.generate(prompts, SamplingParams(1.5, 14, stop_token_ids=list(range(0, 451, 5))), use_tqdm=False)
        assert llm.is_finished()
        assert llm.step() == ([], 0)


def test_the_engine_works_alone(tiny, expected):
    engine = LLMEngine(tiny, max_model_len=64)
    ids = [engine.add_request([10 + i], greedy(2 + i)) for i in range(4)]
    outputs, _ = run_to_end(engine)
    assert [output.request_id for output in outputs] == ids  # in the order in which they end
    assert [output.token_ids for output in outputs] == [expected([10 + i], 2 + i) for i in range(4)]
    assert engine.tokenizer is not None
    engine.exit()


def test_an_aborted_request_gives_no_output_and_holds_no_memory(llm, expected):
    llm.generate([[5]], greedy(1), use_tqdm=False)
    ids = [llm.add_request([10 + i], greedy(10)) for i in range(3)]
    llm.abort(ids[2])  # before it ran
    llm.step()
    llm.step()
    llm.abort(ids[0])  # while it runs
    llm.abort(ids[0])
    llm.abort(10**9)
    outputs, _ = run_to_end(llm)
    assert [output.request_id for output in outputs] == [ids[1]]
    assert outputs[0].token_ids == expected([11], 10)
    llm.abort(ids[1])  # when it has ended
    assert_clean(llm, expected)


def test_an_aborted_request_with_several_samples_is_gone_whole(tiny, expected):
    with new_llm(tiny, max_num_seqs=2) as llm:
        number = llm.add_request([10, 11, 12], SamplingParams(1.0, 20, True, n=5))  # three of them wait
        for _ in range(3):
            llm.step()
        llm.abort(number)
        assert run_to_end(llm)[0] == []
        assert_clean(llm, expected)


def test_requests_added_by_hand_and_a_generate_do_not_take_each_others_outputs(llm, expected):
    mine = llm.add_request([61, 62], greedy(3))
    outputs = llm.generate([[10], [11]], greedy(6), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [expected([10], 6), expected([11], 6)]
    assert not llm.is_finished()
    found, _ = run_to_end(llm)
    assert [(output.request_id, output.token_ids) for output in found] == [(mine, expected([61, 62], 3))]


def test_requests_added_from_another_thread_during_a_generate_are_not_lost(llm, expected):
    ids, errors = [], []

    def add():
        try:
            for i in range(50):
                ids.append(llm.add_request([10 + i], greedy(3)))
                time.sleep(0.0005)
        except Exception as error:  # seen by the test below
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    outputs = llm.generate([[10 + i] for i in range(40)], greedy(8), use_tqdm=False)
    thread.join()
    assert errors == []
    assert [output.token_ids for output in outputs] == [expected([10 + i], 8) for i in range(40)]
    found, _ = run_to_end(llm)
    assert sorted(output.request_id for output in found) == sorted(ids)
    by_id = {output.request_id: output.token_ids for output in found}
    assert [by_id[number] for number in ids] == [expected([10 + i], 3) for i in range(50)]
    assert_clean(llm, expected)


# --- the end -------------------------------------------------------------------------------------------------------


def test_an_engine_may_be_closed_any_number_of_times_and_is_of_no_use_afterwards(tiny):
    llm = new_llm(tiny)
    llm.generate([[7]], greedy(1), use_tqdm=False)
    stream = llm.stream([[7]], greedy(1))
    for close in (llm.close, llm.exit, llm.close, llm.engine.exit, llm.engine.close):
        close()
    for call in (
        lambda: llm.generate([[7]], greedy(1), use_tqdm=False),
        lambda: llm.generate([], use_tqdm=False),
        lambda: llm.stream([[7]], greedy(1)),
        lambda: llm.chat([user("a")], greedy(1), use_tqdm=False),
        lambda: llm.add_request([7], greedy(1)),
        lambda: llm.step(),
        lambda: llm.engine.add_request([7]),
        lambda: llm.engine.step(),
        lambda: next(stream),
    ):
        with pytest.raises(RuntimeError, match="This engine is closed; make a new one"):
            call()
    assert llm.is_finished()


def test_a_context_manager_closes_also_on_an_exception(tiny):
    def use(llm):
        with llm as same:
            assert same is llm
            raise OSError("mine")

    llm = new_llm(tiny)
    with pytest.raises(OSError, match="mine"):
        use(llm)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[7]], use_tqdm=False)


def test_closing_in_the_middle_of_a_stream_ends_it(tiny):
    llm = new_llm(tiny)
    stream = llm.stream([[7], [8]], [greedy(1), greedy(50)])
    assert next(stream).index == 0
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


@pytest.mark.parametrize("how", ["del", "close", "with", "left stream", "exception"])
def test_the_model_is_freed_at_once(tiny, how):
    """Without a run of the garbage collector: on a card the next engine needs the memory now."""
    gc.collect()
    gc.disable()
    try:
        llm = new_llm(tiny)
        llm.generate([[7, 8], QUESTION], SamplingParams(0.9, 4, stop="zzz", logprobs=1, top_k=3), use_tqdm=False)
        llm.generate([[7, 8]], SamplingParams(0.9, 4, n=3), use_tqdm=False)
        if how == "left stream":
            for _ in llm.stream([[7], [8]], [greedy(1), greedy(50)]):
                break
        if how == "exception":
            with pytest.raises(ZeroDivisionError):
                list(llm.stream((1 / 0 for _ in range(3)), greedy(1)))
        runner = llm.engine.model_runner
        watched = [
            weakref.ref(runner.model),
            weakref.ref(runner.kv_cache),
            weakref.ref(next(runner.model.parameters())),
        ]
        watched += [weakref.ref(layer) for layer in runner.model.modules()]
        del runner
        if how == "close":
            llm.close()
        elif how == "with":
            with llm:
                pass
        else:
            del llm
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_two_engines_of_different_settings_live_in_one_process(tiny, expected):
    prompts = [[10 + i, 20, 30, 40, 50] for i in range(3)]
    with (
        new_llm(tiny, kvcache_block_size=4, num_kvcache_blocks=9, lookahead=0, max_num_seqs=2) as small,
        new_llm(tiny, kvcache_block_size=32, max_num_batched_tokens=7) as large,
        LLM("embedded", max_model_len=128) as embedded,
    ):
        answer = embedded.generate([QUESTION], use_tqdm=False)[0].text
        assert answer.startswith(" 42")
        streams = [llm.stream(prompts, [greedy(n) for n in (3, 6, 9)]) for llm in (small, large)]
        question = embedded.stream([QUESTION])
        for i, n in enumerate((3, 6, 9)):  # in turns
            for stream in streams:
                output = next(stream)
                assert (output.index, output.token_ids) == (i, expected(prompts[i], n))
        assert next(question).text == answer
        small.close()
        assert list(streams[1]) == []
        outputs = large.generate(prompts, greedy(6), use_tqdm=False)
        assert [output.token_ids for output in outputs] == [expected(prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "llm.close()",
        "stream = llm.stream([[7], [8]], SamplingParams(0, 50, True)); llm.add_request([5]); llm.step()",
        "stream = llm.stream([[7], [8]], [SamplingParams(0, 1), SamplingParams(0, 50, True)]); next(stream)",
    ],
    ids=["open", "closed", "requests left", "stream left"],
)
def test_nothing_is_printed_when_the_interpreter_ends(tiny, ending):
    code = f"""
from nanovllm import LLM, SamplingParams
llm = LLM({tiny!r}, max_model_len=64)
outputs = llm.generate([[7, 8]], SamplingParams(0, 3, True), use_tqdm=False)
{ending}
"""
    root = str(Path(nanovllm.__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: no memory")]
)
def test_out_of_memory_in_mid_run_raises_once_and_names_the_knobs(tiny, monkeypatch, error):
    with new_llm(tiny) as llm:
        expected = llm.generate([[5, 6]], greedy(4), use_tqdm=False)[0].token_ids
        sample, calls = llm.engine.model_runner.device_ops.sample, []

        def fail_once(*args):
            calls.append(args)
            if len(calls) == 3:
                raise error
            return sample(*args)

        monkeypatch.setattr(llm.engine.model_runner.device_ops, "sample", fail_once)
        with pytest.raises(RuntimeError, match=r"Out of memory on cpu in a decode step of 9 sequences: .*max_num_seqs"):
            llm.generate([[5, 6]] * 9, greedy(4), use_tqdm=False)
        assert llm.is_finished()
        assert [o.token_ids for o in llm.generate([[5, 6]] * 9, greedy(4), use_tqdm=False)] == [expected] * 9


def test_other_errors_in_mid_run_stay_what_they_are(tiny, monkeypatch):
    with new_llm(tiny) as llm:

        def fail(*args):
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(llm.engine.model_runner.device_ops, "sample", fail)
        with pytest.raises(RuntimeError, match=r"^a fault of ours$"):
            llm.generate([[5, 6]], greedy(4), use_tqdm=False)
