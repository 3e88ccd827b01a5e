"""What a request asks for and what it gets, from end to end on a CPU in float32."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.engine.llm_engine import request_key
from nanovllm.engine.step import StepOutput
from nanovllm.layers.sampler import SamplingInputs, sample_two_level
from nanovllm.utils.tokenizer import StopStringFinder, decode

EMBEDDED = Path(nanovllm.__file__).parent / "embedded"
VOCAB_SIZE = 451  # three more than the embedded tokenizer knows
END, OTHER_END = 2, 0  # <|im_end|> and <|endoftext|>
SMALL_POOL = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 14,
    "max_num_batched_tokens": 8,
    "greedy_admission": True,  # so that sequences are preempted
}


def write_checkpoint(folder, generation=None, **config):
    """A small random Qwen3 with the embedded tokenizer, its config in the form of transformers 4."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape, initializer_range=0.3)).save_pretrained(folder)
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 10000.0, **shape, **config}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(tiny):
    """Log-probabilities [tokens, vocabulary] of all next tokens, by transformers."""
    model = Qwen3ForCausalLM.from_pretrained(tiny).float().eval()

    @torch.inference_mode()
    def logprobs(token_ids):
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return logprobs


@pytest.fixture(scope="module")
def wide(tiny):
    """The tiny model with room for everything: each row gets here what it gets alone."""
    with LLM(tiny, max_model_len=256, kvcache_block_size=4, num_kvcache_blocks=2000) as llm:
        yield llm


def run(llm, prompts, params=None):
    return llm.generate(prompts, params, use_tqdm=False)


def prompt_ids(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


# --- log-probabilities ---------------------------------------------------------------------------------------------


def assert_logprobs(entries, token_ids, expected, num):
    """Each entry has the chosen token and the ``num`` likeliest, with the values that transformers computes."""
    assert len(entries) == len(token_ids) == len(expected)
    for entry, token_id, row in zip(entries, token_ids, expected, strict=True):
        likeliest = row.topk(num).values if num else row.new_empty(0)
        others = set(entry) - {token_id}
        assert token_id in entry
        is_among_likeliest = bool(num) and float(row[token_id]) > float(likeliest[-1]) - 1e-4
        assert len(entry) == num + 1 or (len(entry) == num and is_among_likeliest)
        for other, value in entry.items():
            assert abs(value - float(row[other])) < 1e-4
        best_others = sorted((float(row[i]) for i in others), reverse=True)
        assert all(
            abs(a - b) < 1e-4
            for a, b in zip(best_others, [v for v in likeliest.tolist() if v != float(row[token_id])], strict=False)
        )


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("pool", ["wide", "small"])
def test_logprobs_equal_the_log_softmax_of_transformers(tiny, oracle, pool, lookahead):
    """Prompts cut into chunks of 8 tokens, twice the same prompt, and a pool so small that rows are preempted."""
    prompts = [prompt_ids(n, seed=n) for n in (1, 9, 21)] * 3
    base = {"max_tokens": 14, "ignore_eos": True}
    params = [
        SamplingParams(0, logprobs=2, prompt_logprobs=3, **base),
        SamplingParams(0, logprobs=0, prompt_logprobs=0, **base),
        SamplingParams(0.9, logprobs=5, prompt_logprobs=1, seed=1, top_k=30, repetition_penalty=1.3, **base),
        SamplingParams(0, logprobs=1, **base),
        SamplingParams(1.2, prompt_logprobs=2, seed=2, logit_bias={5: 3.0}, **base),
        SamplingParams(0, **base),
        SamplingParams(1.2, logprobs=3, seed=3, presence_penalty=1.0, top_p=0.8, **base),
        SamplingParams(0, prompt_logprobs=4, **base),
        SamplingParams(0, logprobs=1, prompt_logprobs=1, **base),
    ]
    knobs = SMALL_POOL if pool == "small" else {"kvcache_block_size": 4, "num_kvcache_blocks": 500}
    with LLM(tiny, max_model_len=64, lookahead=lookahead, **knobs) as llm:
        outputs = run(llm, prompts, params)
        assert (llm.engine.scheduler.num_preemptions > 0) == (pool == "small")
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.error is None
        assert output.prompt_token_ids == prompt
        expected = oracle(prompt + output.token_ids)
        start = len(prompt)
        if param.logprobs is None:
            assert output.logprobs is None
        else:
            assert_logprobs(output.logprobs, output.token_ids, expected[start - 1 : -1], param.logprobs)
        if param.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert len(output.prompt_logprobs) == start
            assert output.prompt_logprobs[0] is None
            assert output.num_cached_tokens == 0  # a cached prefix has no logits
            assert_logprobs(output.prompt_logprobs[1:], prompt[1:], expected[: start - 1], param.prompt_logprobs)


@pytest.mark.parametrize("length", [63, 64, 65, 66, 150])
def test_prompt_logprobs_of_a_long_prompt_come_in_slices_and_are_all_there(wide, oracle, length):
    prompt = prompt_ids(length, seed=3)
    output = run(wide, [prompt], SamplingParams(0, 1, prompt_logprobs=2))[0]
    assert len(output.prompt_logprobs) == length
    assert_logprobs(output.prompt_logprobs[1:], prompt[1:], oracle(prompt)[:-1], 2)


def test_a_cached_prefix_does_not_take_prompt_logprobs_away(wide, oracle):
    prompt = prompt_ids(18, seed=4)
    first = run(wide, [prompt], SamplingParams(0, 1))[0]
    again = run(wide, [prompt], SamplingParams(0, 1))[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
    with_logprobs = run(wide, [prompt], SamplingParams(0, 1, prompt_logprobs=1))[0]
    assert with_logprobs.num_cached_tokens == 0
    assert_logprobs(with_logprobs.prompt_logprobs[1:], prompt[1:], oracle(prompt)[:-1], 1)


def test_more_logprobs_than_the_vocabulary_has_are_the_whole_vocabulary(wide, oracle):
    output = run(wide, [[7, 8]], SamplingParams(0, 1, logprobs=10**6, prompt_logprobs=10**6))[0]
    for entry, row in zip([output.prompt_logprobs[1], output.logprobs[0]], oracle([7, 8]), strict=True):
        assert sorted(entry) == list(range(VOCAB_SIZE))
        values = torch.tensor([entry[i] for i in range(VOCAB_SIZE)])
        torch.testing.assert_close(values, row, rtol=0, atol=1e-4)


def test_each_sample_has_its_own_logprobs(wide, oracle):
    prompt = prompt_ids(9, seed=5)
    output = run(wide, [prompt], SamplingParams(1.5, 5, True, n=3, seed=1, logprobs=2, prompt_logprobs=1))[0]
    for completion in output.outputs:
        expected = oracle(prompt + completion.token_ids)[len(prompt) - 1 : -1]
        assert_logprobs(completion.logprobs, completion.token_ids, expected, 2)
    assert_logprobs(output.prompt_logprobs[1:], prompt[1:], oracle(prompt)[:-1], 1)


# --- n samples -----------------------------------------------------------------------------------------------------


def draw_by_hand(oracle, prompt, params, sample_index):
    """One sample drawn from the log-probabilities of transformers with the request's noise."""
    key = request_key(params.seed, 0, 0, prompt)
    tokens = []
    while len(tokens) < params.max_tokens:
        inputs = SamplingInputs(
            torch.tensor([params.temperature]),
            torch.tensor([[key & 0xFFFFFFFF, key >> 32]]),
            torch.tensor([len(tokens)]),
            torch.tensor([sample_index]),
        )
        tokens.append(int(sample_two_level(oracle(prompt + tokens)[-1:], inputs)[0]))
    return tokens


@dataclasses.dataclass
class Watched:
    """A runner that writes down how many tokens each step computes."""

    runner: Any
    computed: list

    def run(self, seqs, is_prefill):
        self.computed.append((sum(seq.num_scheduled_tokens for seq in seqs), is_prefill))
        return self.runner.run(seqs, is_prefill)


@pytest.mark.parametrize("length", [12, 14])  # three full blocks; three and a half
def test_samples_share_one_prefill_and_differ_by_their_noise_alone(tiny, oracle, wide, length):
    prompt = prompt_ids(length, seed=length)
    params = SamplingParams(1.3, 8, True, n=5, seed=11)
    with LLM(tiny, max_model_len=64, kvcache_block_size=4, num_kvcache_blocks=100) as llm:
        computed, runner = [], llm.engine.model_runner
        llm.engine.model_runner = Watched(runner, computed)
        output = run(llm, [prompt], params)[0]
        llm.engine.model_runner = runner
        assert [num for num, is_prefill in computed if is_prefill] == [length]
        assert [num for num, is_prefill in computed if not is_prefill] == [5] * 7
        assert llm.engine.scheduler.block_manager.used_block_ids == set()
    samples = [completion.token_ids for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(sample) for sample in samples}) == 5
    assert samples == [draw_by_hand(oracle, prompt, params, i) for i in range(5)]
    alone = run(wide, [prompt], dataclasses.replace(params, n=1))[0]
    assert alone.token_ids == samples[0] == output.token_ids
    assert len(alone.outputs) == 1


def test_the_top_fields_are_those_of_the_first_sample(wide):
    output = run(wide, [prompt_ids(5)], SamplingParams(1.3, 6, True, n=3, seed=4, logprobs=1))[0]
    first = output.outputs[0]
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "error", "reasoning"):
        assert output[name] == first[name]


def test_samples_of_several_prompts_in_one_batch_are_those_of_each_alone(wide):
    prompts = [prompt_ids(n, seed=n) for n in (4, 7, 8, 13)]
    params = [SamplingParams(1.3, 7, True, n=n, seed=5) for n in (3, 1, 4, 2)]
    together = run(wide, prompts, params)
    for prompt, param, output in zip(prompts, params, together, strict=True):
        assert output.outputs == run(wide, [prompt], param)[0].outputs
        assert len(output.outputs) == param.n


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("length", [12, 14])
@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
        {"max_num_seqs": 3},
        {"num_kvcache_blocks": 7},
        {"num_kvcache_blocks": 7, "greedy_admission": True},
        {"num_kvcache_blocks": 11},
        {"num_kvcache_blocks": 7, "max_num_batched_tokens": 5},
    ],
)
def test_samples_that_do_not_fit_wait_and_come_out_the_same(tiny, wide, knobs, length, lookahead):
    """Places for fewer than n, or blocks for fewer: the others start when there is room, with the same answers."""
    prompts = [prompt_ids(length, seed=length), prompt_ids(5, seed=5)]
    params = [SamplingParams(1.3, 12, True, n=5, seed=11), SamplingParams(1.3, 9, True, n=2, seed=11)]
    expected = [output.outputs for output in run(wide, prompts, params)]
    knobs = {"kvcache_block_size": 4, "num_kvcache_blocks": 100, "max_model_len": 28, **knobs}
    with LLM(tiny, lookahead=lookahead, **knobs) as llm:
        assert [output.outputs for output in run(llm, prompts, params)] == expected
        assert llm.engine.scheduler.block_manager.used_block_ids == set()
        llm.engine.scheduler.block_manager.check_invariants([])


def test_samples_that_end_at_different_times_are_one_output(wide):
    """Each sample may stop for its own reason; the request ends with the last of them."""
    params = SamplingParams(1.5, 30, True, n=6, seed=2)
    plain = [completion.token_ids for completion in run(wide, [[9, 9, 9]], params)[0].outputs]
    stop = plain[1][10]
    output = run(wide, [[9, 9, 9]], dataclasses.replace(params, stop_token_ids=[stop]))[0]
    for completion, tokens in zip(output.outputs, plain, strict=True):
        if stop in tokens:
            assert completion.token_ids == tokens[: tokens.index(stop) + 1]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        else:
            assert completion.token_ids == tokens
            assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert len({len(completion.token_ids) for completion in output.outputs}) > 1


# --- seeds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(tiny, wide, lookahead):
    prompt, params = prompt_ids(10, seed=1), SamplingParams(1.2, 20, True, seed=123)
    alone = run(wide, [prompt], params)[0].token_ids
    assert len(alone) == 20
    neighbours = [prompt_ids(3 + n, seed=n) for n in range(6)]
    others = [SamplingParams(1.2 if n % 2 else 0, 10 + n, True, top_k=n % 3) for n in range(6)]
    for place in (0, 3, 6):  # among neighbours, in another order
        prompts, many = list(neighbours), list(others)
        prompts.insert(place, prompt)
        many.insert(place, params)
        assert run(wide, prompts, many)[place].token_ids == alone
        with LLM(tiny, max_model_len=64, lookahead=lookahead, **SMALL_POOL) as llm:  # chunked and preempted
            assert run(llm, prompts, many)[place].token_ids == alone
            assert llm.engine.scheduler.num_preemptions > 0
        with LLM(tiny, max_model_len=64, lookahead=lookahead, max_num_seqs=2, seed=99) as llm:
            assert run(llm, prompts, many)[place].token_ids == alone
    assert run(wide, [prompt], dataclasses.replace(params, n=4))[0].token_ids == alone
    assert run(wide, [prompt], params)[0].token_ids == alone  # its prefix is cached by now
    assert run(wide, [prompt], dataclasses.replace(params, seed=124))[0].token_ids != alone


def test_one_seed_over_a_batch_does_not_correlate_its_rows(wide):
    """With all tokens about equally likely, rows that shared their noise would draw the same tokens."""
    params = SamplingParams(1e6, 20, True, seed=1)
    outputs = run(wide, [[3, n] for n in range(10, 30)], params)
    drawn = [output.token_ids for output in outputs]
    same = sum(a == b for one, two in itertools.combinations(drawn, 2) for a, b in zip(one, two, strict=True))
    assert same < 30  # 3800 comparisons, 451 tokens: 8.4 expected by chance
    assert [output.token_ids for output in run(wide, [[3, 10], [3, 10]], params)] == [drawn[0], drawn[0]]


def test_without_a_seed_rows_differ_and_a_whole_run_repeats(tiny):
    def draw(seed):
        with LLM(tiny, max_model_len=64, seed=seed) as llm:
            return [output.token_ids for output in run(llm, [[5, 6, 7]] * 4, SamplingParams(1.5, 8, True))]

    first = draw(0)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert draw(0) == first
    assert not {tuple(tokens) for tokens in draw(1)} & {tuple(tokens) for tokens in first}


# --- everything mixed in one batch ---------------------------------------------------------------------------------

MIXED = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_k": 5},
    {"seed": 3, "top_p": 0.7},
    {"seed": 4, "min_p": 0.1, "temperature": 0.7},
    {"temperature": 0, "repetition_penalty": 1.8},
    {"seed": 5, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"seed": 6, "logit_bias": {7: 6.0, 8: -100.0}},
    {"seed": 7, "allowed_token_ids": list(range(20, 40))},
    {"temperature": 0, "logprobs": 2},
    {"seed": 8, "min_tokens": 9, "stop_token_ids": list(range(0, 400, 2))},
    {"seed": 9, "n": 3, "temperature": 1.4},
    {"temperature": 0, "top_k": 3, "top_p": 0.2},
    {"seed": 10, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "logprobs": 1},
    {"seed": 11, "prompt_logprobs": 1, "max_tokens": 3},
    {"seed": 12, "n": 2, "repetition_penalty": 2.0, "max_tokens": 6},
]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("pool", ["wide", "small"])
def test_rows_of_every_kind_mix_and_each_gets_what_it_gets_alone(tiny, wide, pool, lookahead):
    params = [SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **kwargs}) for kwargs in MIXED]
    prompts = [prompt_ids(3 + i % 7, seed=i) for i in range(len(params))]
    expected = [run(wide, [prompt], param)[0] for prompt, param in zip(prompts, params, strict=True)]
    knobs = {**SMALL_POOL, "num_kvcache_blocks": 10} if pool == "small" else {"kvcache_block_size": 4}
    with LLM(tiny, max_model_len=40, lookahead=lookahead, **knobs) as llm:
        outputs = run(llm, prompts, params)
        assert (llm.engine.scheduler.num_preemptions > 0) == (pool == "small")
    for output, alone in zip(outputs, expected, strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
        assert [c.text for c in output.outputs] == [c.text for c in alone.outputs]
        assert [(c.finish_reason, c.stop_reason) for c in output.outputs] == [
            (c.finish_reason, c.stop_reason) for c in alone.outputs
        ]
    greedy, allowed, banned = expected[0], expected[8], expected[7]
    assert expected[12].token_ids == run(wide, [prompts[12]], SamplingParams(0, 12, True))[0].token_ids
    assert len(greedy.token_ids) == 12
    assert set(allowed.token_ids) <= set(range(20, 40))
    assert 8 not in banned.token_ids
    assert 10 <= len(expected[10].token_ids) <= 12


def test_a_greedy_row_with_a_penalty_is_the_argmax_of_the_penalised_logits(wide, oracle):
    """With repetition penalty the pending token counts: the newest token is penalised before the host knows it."""
    prompt = prompt_ids(6, seed=8)
    tokens = run(wide, [prompt], SamplingParams(0, 15, True, repetition_penalty=1.9, presence_penalty=0.5))[0].token_ids
    for at, token in enumerate(tokens):
        logits = torch.tensor(wide_logits(wide, prompt + tokens[:at]))
        seen = set(prompt + tokens[:at])
        for i in seen:
            logits[i] = logits[i] / 1.9 if logits[i] > 0 else logits[i] * 1.9
        for i in set(tokens[:at]):
            logits[i] -= 0.5
        assert float(logits.max() - logits[token]) < 1e-3


def wide_logits(llm, token_ids):
    """Logits after the last token, straight from the weights (log-softmax has lost their offset)."""
    model = Qwen3ForCausalLM.from_pretrained(llm.engine.config.model).float().eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, -1].tolist()


# --- answers that are written down beforehand ----------------------------------------------------------------------


class ScriptedRunner:
    """Answers the prompt [i] with the i-th of a list of completions, then with end tokens."""

    block_size, num_blocks = 16, 200

    def __init__(self, completions):
        self.completions = completions

    def run(self, seqs, is_prefill):
        tokens = []
        for seq in seqs:
            completion, at = self.completions[seq.token_ids[0]], seq.num_completion_tokens
            is_last = seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens
            tokens.append((completion[at] if at < len(completion) else END) if is_last else None)
        return Done(StepOutput(tokens))

    def exit(self):
        pass


@dataclasses.dataclass
class Done:
    result: StepOutput

    def wait(self):
        return self.result


@pytest.fixture(scope="module", params=[0, 1], ids=["lookahead0", "lookahead1"])
def embedded(request):
    knobs = {"kvcache_block_size": 16, "num_kvcache_blocks": 200, "max_model_len": 512}
    with LLM("embedded", lookahead=request.param, **knobs) as llm:
        yield llm


@contextlib.contextmanager
def answering(llm, *completions):
    """Let the model answer prompt [i] with ``completions[i]``: texts, or lists of token ids."""
    real = llm.engine.model_runner
    ids = [llm.tokenizer(c)["input_ids"] if isinstance(c, str) else c for c in completions]
    llm.engine.model_runner = ScriptedRunner(ids)
    try:
        yield ids
    finally:
        llm.engine.model_runner = real


def answer(llm, completion, **kwargs):
    """The output of a request whose completion is written down."""
    with answering(llm, completion):
        return run(llm, [[0]], SamplingParams(0, **{"max_tokens": 200, **kwargs}))[0]


MULTI_BYTE = "héllo wörld 日本語 🎉 done"


def tokens_until(llm, text, end):
    """The least number of tokens of a text whose decoding has at least its first ``end`` characters, all whole."""
    ids = llm.tokenizer(text)["input_ids"]
    return next(k for k in range(1, len(ids) + 1) if text[:end] == llm.tokenizer.decode(ids[:k])[:end])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("12 + 30 = 42, forty-two.", " = "),  # across token borders
        ("12 + 30 = 42, forty-two.", "12"),  # at the first token
        ("12 + 30 = 42, forty-two.", "1"),
        ("12 + 30 = 42, forty-two.", "o."),  # the last two tokens
        ("12 + 30 = 42, forty-two.", "."),
        ("12 + 30 = 42, forty-two.", "12 + 30 = 42, forty-two."),  # the whole text
        ("one two three", "e t"),  # within words
        ("one\n\ntwo", "\n\n"),
        ("one\n\ntwo", "\n"),
        ("aaaaab", "aab"),
        (MULTI_BYTE, "é"),
        (MULTI_BYTE, "lo wö"),
        (MULTI_BYTE, "日"),
        (MULTI_BYTE, "本語 "),
        (MULTI_BYTE, "🎉"),
        (MULTI_BYTE, "語 🎉 d"),
        (MULTI_BYTE, "done"),
        ("🎉🎉🎊", "🎊"),
        ("日", "日"),
    ],
)
def test_a_stop_string_ends_the_request_and_is_cut_from_the_text(embedded, text, stop, include):
    output = answer(embedded, text + " and more", stop=stop, include_stop_str_in_output=include)
    at = text.index(stop)
    assert output.text == text[: at + len(stop) if include else at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    # The tokens keep the one that completed the stop string, and nothing after it.
    num_tokens = tokens_until(embedded, text + " and more", at + len(stop))
    assert output.token_ids == embedded.tokenizer(text + " and more")["input_ids"][:num_tokens]


@pytest.mark.parametrize(
    ("stops", "reason"),
    [
        (["forty", "30"], "30"),  # the one that is completed first
        (["= 42", "30 = 4"], "30 = 4"),
        (["zzz", "two"], "two"),
        (["orty", "forty", "rt"], "forty"),
        ([" 30", "+ 30"], "+ 30"),  # both end together: the one that begins first
        (["0", "30"], "30"),  # within one text piece the earliest begins first
    ],
)
def test_of_several_stop_strings_the_earliest_wins(embedded, stops, reason):
    text = "12 + 30 = 42, forty-two."
    for order in (stops, stops[::-1]):
        output = answer(embedded, text, stop=order)
        assert (output.finish_reason, output.stop_reason) == ("stop", reason)
        assert output.text == text[: text.index(reason)]


def test_a_text_without_the_stop_string_ends_as_it_would(embedded):
    plain = answer(embedded, MULTI_BYTE)
    output = answer(embedded, MULTI_BYTE, stop=["donee", "Done", "héé"])
    assert output == dataclasses.replace(plain, request_id=output.request_id)
    assert (output.text, output.finish_reason, output.stop_reason) == (MULTI_BYTE, "stop", None)
    assert output.token_ids[-1] == END


def test_a_stop_string_beside_rows_without_one_ends_its_row_alone(embedded):
    text = "12 + 30 = 42, forty-two."
    params = [SamplingParams(0, stop=stop) for stop in (None, "=", ["42", "+"], "forty")]
    with answering(embedded, text, text, text, text):
        outputs = run(embedded, [[0], [1], [2], [3]], params)
    assert [output.text for output in outputs] == [text, "12 + 30 ", "12 ", "12 + 30 = 42, "]
    assert [output.stop_reason for output in outputs] == [None, "=", "+", "forty"]


def test_no_stop_string_counts_before_min_tokens(embedded):
    text = "a b a b a b a b"
    ids = embedded.tokenizer(text)["input_ids"]
    for min_tokens in range(len(ids)):
        output = answer(embedded, text, stop="b", min_tokens=min_tokens, max_tokens=50)
        ends = [k for k in range(1, len(ids) + 1) if embedded.tokenizer.decode(ids[:k]).endswith("b")]
        expected = next((k for k in ends if k >= min_tokens), None)
        assert expected is not None
        assert output.token_ids == ids[:expected]
        assert output.text == embedded.tokenizer.decode(ids[:expected])[:-1]
        assert output.stop_reason == "b"


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_it_counts(embedded):
    text = "x12 + 30 = 42"
    output = answer(embedded, text, stop="12 + 30", min_tokens=4)
    assert (output.text, output.stop_reason) == ("x", "12 + 30")


@pytest.mark.parametrize("text", [MULTI_BYTE, "日本語", "🎉🎉", "é", "ab\u0301c", "👩\u200d🚀!"])
def test_no_broken_character_stands_at_the_end_of_a_text(embedded, text):
    """max_tokens may cut through the bytes of a character: the text ends before it, the tokens keep it."""
    ids = embedded.tokenizer(text)["input_ids"]
    seen = set()
    for max_tokens in range(1, len(ids) + 1):
        for stop in (None, "zzz"):
            output = answer(embedded, text, max_tokens=max_tokens, stop=stop)
            assert output.token_ids == ids[:max_tokens]
            assert output.finish_reason == "length"
            data = b"".join(bytes_of(embedded.tokenizer, i) for i in ids[:max_tokens])
            assert output.text == data.decode("utf-8", errors="ignore")
        seen.add(output.text)
    assert text in seen


def byte_level_table():
    """The characters that stand for bytes in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_level_table()


def bytes_of(tokenizer, token_id):
    return bytes(BYTE_OF[c] for c in tokenizer.convert_ids_to_tokens(token_id))


def byte_token_ids(data):
    """The embedded tokenizer's ids of single bytes, which need not be text."""
    vocabulary = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    char_of = {b: c for c, b in BYTE_OF.items()}
    return [vocabulary[char_of[b]] for b in data]


def test_the_tokens_of_the_real_model_can_be_forced_into_the_middle_of_a_character(embedded):
    [byte] = byte_token_ids(b"\xe6")
    output = run(embedded, ["12"], SamplingParams(0, 3, allowed_token_ids=[byte]))[0]
    assert output.token_ids == [byte] * 3
    assert output.text == ""


# --- the finder itself ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    from nanovllm.utils.tokenizer import load_tokenizer

    return load_tokenizer(EMBEDDED)


def feed(tokenizer, completion, stop, prompt=(5, 6), **kwargs):
    """Grow a completion token by token; return the finder, what it found, and how many tokens that took."""
    finder = StopStringFinder(tokenizer, SamplingParams(stop=stop, max_tokens=None, **kwargs))
    token_ids = list(prompt)
    for count, token_id in enumerate(completion, 1):
        token_ids.append(token_id)
        found = finder.find(token_ids, len(prompt))
        full = tokenizer.decode(token_ids[len(prompt) :], skip_special_tokens=True)
        assert full.startswith(finder.text)
        if found is not None:
            return finder, found, count
    return finder, None, len(completion)


@pytest.mark.parametrize("text", [MULTI_BYTE, "plain", "🎉", "日本語日本語", "a\nb\n\n", "e\u0301 👩\u200d🚀"])
def test_the_finder_reads_a_text_to_its_end(tokenizer, text):
    finder, found, _ = feed(tokenizer, tokenizer(text)["input_ids"], "\x00")
    assert found is None
    assert finder.text == text
    assert finder.end is None


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=25),
    data=st.data(),
)
def test_a_stop_string_is_found_exactly_when_the_text_contains_it(tokenizer, text, data):
    alphabet = st.sampled_from(text) if text else st.just("x")
    inside = st.builds(lambda a, n: text[a : a + n], st.integers(0, max(0, len(text) - 1)), st.integers(1, 5))
    any_stop = st.one_of(st.text(alphabet, min_size=1, max_size=3), inside.filter(bool) if text else st.just("y"))
    stops = data.draw(st.lists(any_stop, min_size=1, max_size=3))
    include = data.draw(st.booleans())
    ids = tokenizer(text)["input_ids"]
    finder, found, count = feed(tokenizer, ids, stops, include_stop_str_in_output=include)
    contained = [stop for stop in stops if stop in text]
    assert (found is not None) == bool(contained)
    if found is None:
        assert finder.text == text
        return
    before, now = whole(tokenizer, ids[: count - 1]), whole(tokenizer, ids[:count])
    assert not any(stop in before for stop in stops)  # no token too late
    at, _, expected = min((now.find(stop), i, stop) for i, stop in enumerate(stops) if stop in now)
    assert found == expected
    assert finder.text[: finder.end] == now[: at + len(found) if include else at]


@settings(max_examples=300, deadline=None)
@given(completion=st.lists(st.integers(3, 447), max_size=30), stop=st.text("0123456789+= ao", min_size=1, max_size=2))
def test_bytes_that_are_no_text_do_not_confuse_the_finder(tokenizer, completion, stop):
    """`feed` holds that the text read so far is a beginning of the full decoding, broken characters and all."""
    finder, found, count = feed(tokenizer, completion, stop)
    full = tokenizer.decode(completion[:count])
    if found is None:
        assert stop not in finder.text
        assert finder.text == full or full.endswith("\ufffd")
    else:
        assert finder.text[: finder.end] == full[: full.index(stop)]


GARBAGE = byte_token_ids(b"\xe6\x97\xa5\xf0\x9f\x8e\x89\x80\xffA")


@settings(max_examples=1000, deadline=None)
@given(data=st.lists(st.sampled_from(GARBAGE), max_size=14))
def test_broken_characters_in_a_row_are_read_as_the_tokenizer_reads_them_at_once(tokenizer, data):
    finder, _, _ = feed(tokenizer, data, "zzz")
    full = tokenizer.decode(data)
    assert finder.text == full or full.rstrip("\ufffd").startswith(finder.text.rstrip("\ufffd"))


def whole(tokenizer, ids):
    """The text up to the last token that completes a character."""
    while ids and tokenizer.decode(ids).endswith("\ufffd"):
        ids = ids[:-1]
    return tokenizer.decode(ids)


def test_the_cost_of_looking_for_stop_strings_does_not_grow_with_the_text(tokenizer):
    """Each token decodes a bounded tail, also where nothing but broken characters come."""
    lens = []

    class Counting:
        def decode(self, token_ids, **kwargs):
            lens.append(len(token_ids))
            return tokenizer.decode(token_ids, **kwargs)

    [garbage] = byte_token_ids(b"\xe6")
    for completion in ([garbage] * 300, tokenizer(MULTI_BYTE * 10)["input_ids"]):
        finder = StopStringFinder(Counting(), SamplingParams(stop="zzz"))
        token_ids = [1]
        for token_id in completion:
            token_ids.append(token_id)
            finder.find(token_ids, 1)
        assert max(lens) <= 16


def test_decode_cuts_a_broken_character_and_needs_no_tokenizer(tokenizer):
    ids = tokenizer("日本")["input_ids"]
    assert [decode(tokenizer, ids[:k]) for k in range(len(ids) + 1)] == ["", "", "", "日", "日", "日", "日本"]
    assert decode(None, [1, 2, 3]) == ""


# --- where a completion ends ---------------------------------------------------------------------------------------


def test_an_end_token_stays_in_token_ids_and_shows_in_the_text_only_on_demand(embedded):
    output = answer(embedded, "42.")
    assert (output.text, output.finish_reason, output.stop_reason) == ("42.", "stop", None)
    assert output.token_ids == [*embedded.tokenizer("42.")["input_ids"], END]
    shown = answer(embedded, "42.", skip_special_tokens=False)
    assert shown.text == "42.<|im_end|>"
    assert shown.token_ids == output.token_ids
    stopped = answer(embedded, "42.", skip_special_tokens=False, stop="<|im_", ignore_eos=True)
    assert (stopped.text, stopped.stop_reason) == ("42.", "<|im_")


def test_a_stop_token_ends_the_request_and_is_named(embedded):
    ids = embedded.tokenizer("12 + 30 = 42")["input_ids"]
    output = answer(embedded, "12 + 30 = 42", stop_token_ids=[ids[4], 400])
    assert output.token_ids == ids[: ids.index(ids[4]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", ids[4])
    assert output.text == embedded.tokenizer.decode(output.token_ids)


def test_ignore_eos_goes_past_end_tokens_but_not_past_stop_tokens(embedded):
    completion = [30, END, 31, OTHER_END, 32, 33, END]
    assert answer(embedded, completion).token_ids == [30, END]
    assert answer(embedded, completion, ignore_eos=True, max_tokens=6).token_ids == completion[:6]
    output = answer(embedded, completion, ignore_eos=True, stop_token_ids=[OTHER_END])
    assert (output.token_ids, output.stop_reason) == (completion[:4], OTHER_END)
    output = answer(embedded, completion, stop_token_ids=[END])  # an end token is an end token first
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([30, END], "stop", None)


def test_the_last_token_allowed_may_be_the_end_token(embedded):
    output = answer(embedded, [30, 31, END], max_tokens=3)
    assert (output.token_ids, output.finish_reason) == ([30, 31, END], "stop")
    output = answer(embedded, [30, 31, 32], max_tokens=3)
    assert (output.token_ids, output.finish_reason) == ([30, 31, 32], "length")
    output = answer(embedded, "12", max_tokens=2, stop="2")
    assert (output.finish_reason, output.stop_reason) == ("stop", "2")


def test_end_tokens_of_tokenizer_config_and_generation_config_all_count(tmp_path):
    folder = write_checkpoint(tmp_path, generation={"eos_token_id": [7, 8]}, eos_token_id=5)
    with LLM(folder, max_model_len=64, num_kvcache_blocks=200, kvcache_block_size=16) as llm:
        assert llm.engine.end_token_ids == {END, 5, 7, 8}
        for end in (END, 5, 7, 8):
            output = answer(llm, [30, 31, end, 32, 33])
            assert (output.token_ids, output.finish_reason, output.stop_reason) == ([30, 31, end], "stop", None)
        assert answer(llm, [30, OTHER_END, 31, END]).token_ids == [30, OTHER_END, 31, END]


def test_min_tokens_holds_every_end_back_in_the_real_model(embedded):
    prompt = "12 + 30 ="
    plain = run(embedded, [prompt], SamplingParams(0))[0]
    assert plain.token_ids[-1] == END
    length = len(plain.token_ids)
    longer = run(embedded, [prompt], SamplingParams(0, min_tokens=length + 5))[0]
    assert longer.token_ids[: length - 1] == plain.token_ids[:-1]
    assert not {END, OTHER_END} & set(longer.token_ids[: length + 5])
    assert len(longer.token_ids) > length + 5


@pytest.mark.parametrize("lookahead", [0, 1])
def test_max_tokens_none_runs_to_max_model_len(tiny, lookahead):
    with LLM(tiny, max_model_len=24, lookahead=lookahead) as llm:
        params = [SamplingParams(0, m, True) for m in (None, 3, 1, 1000)]
        outputs = run(llm, [prompt_ids(n, seed=n) for n in (5, 5, 23, 20)], params)
    assert [len(output.token_ids) for output in outputs] == [19, 3, 1, 4]
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_row_that_does_not_stop_has_exactly_max_tokens(tiny, wide, oracle, max_tokens, lookahead):
    prompts = [prompt_ids(n, seed=n) for n in (1, 4, 9)]
    with LLM(tiny, max_model_len=64, lookahead=lookahead) as llm:
        outputs = run(llm, prompts, SamplingParams(0, max_tokens, True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == max_tokens
        assert output.finish_reason == "length"
        expected = oracle(prompt + output.token_ids)[len(prompt) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        assert float((expected.amax(1) - chosen).max()) < 1e-4


# --- defaults from generation_config.json --------------------------------------------------------------------------


def test_generation_config_gives_the_defaults_of_prompts_without_parameters(tmp_path):
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "max_new_tokens": 9,
        "eos_token_id": END,
    }
    folder = write_checkpoint(tmp_path, generation=generation)
    expected = SamplingParams(0.7, 9, top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.1)
    outputs = []
    for params in (None, expected):
        with LLM(folder, max_model_len=64) as llm:
            assert llm.get_default_sampling_params() == expected
            outputs.append(run(llm, [[5, 6], "text"], params))
            # Parameters that are given are taken as they are: nothing of the file is mixed in.
            assert len(run(llm, [[5, 6]], SamplingParams(0, 20, True))[0].token_ids) == 20
    assert outputs[0] == outputs[1]


def test_without_generation_config_the_defaults_are_those_of_sampling_params(tiny):
    with LLM(tiny, max_model_len=64) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_do_sample_false_means_greedy(embedded):
    assert embedded.get_default_sampling_params() == SamplingParams(0.0)
    default, greedy = run(embedded, ["12 + 30 ="]), run(embedded, ["12 + 30 ="], SamplingParams(0))
    assert default[0].token_ids == greedy[0].token_ids
    assert default[0].text.startswith(" 42")
