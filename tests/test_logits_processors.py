"""The extras behind the logits: equal to the transformers logits processors, and harmless to rows without extras."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import SamplingParams
from nanovllm.engine.extras import build_extras
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logits_processors import process_logits, top_logprobs

NEG_INF = float("-inf")
VOCAB_SIZES = (151, 700, 3000)  # 3000 is more than the 1024 tokens that top_p sorts at first
SPREADS = (0.02, 1.0, 6.0)  # almost flat, so that the nucleus is most of the vocabulary; medium; peaked


def random_logits(num_rows, vocab_size, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def make_seq(params, prompt=(1,), completion=(), seq_id=0, pending=0):
    seq = Sequence(list(prompt), params, seq_id)
    seq.token_ids += completion
    seq.num_pending_tokens = pending
    return seq


def process(logits, seqs, newest_tokens=None, end_token_ids=()):
    extras = build_extras(seqs, end_token_ids, logits.size(1))
    assert extras is not None
    return process_logits(logits, extras, torch.tensor(newest_tokens or [0] * len(logits), dtype=torch.int64))


def process_one_param(logits, **kwargs):
    params = SamplingParams(**kwargs)
    return process(logits, [make_seq(params, seq_id=i) for i in range(len(logits))])


def nucleus_of(logits_row, share):
    """A top_p near ``share`` that lies in the middle between two sums of probabilities, clear of rounding."""
    sums = logits_row.double().softmax(0).sort(descending=True).values.cumsum(0)
    k = min(int((sums < share).sum()), len(sums) - 2)
    while k >= 0 and sums[k + 1] - sums[k] < 2e-5:
        k -= 1
    return float((sums[k] + sums[k + 1]) / 2) if k >= 0 else float(sums[0] / 2)


def left_by(warpers, row):
    """Which tokens transformers leaves in a row of logits."""
    return LogitsProcessorList(warpers)(None, row.unsqueeze(0)).squeeze(0) > NEG_INF


def assert_filtered(out, logits, row, warpers):
    expected = logits[row].masked_fill(~left_by(warpers, logits[row]), NEG_INF)
    assert torch.equal(out, expected)


# --- filters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_top_k_keeps_what_transformers_keeps(vocab_size, spread):
    logits = random_logits(5, vocab_size, spread)
    ks = (1, 2, 17, vocab_size - 1, vocab_size)
    out = process(logits, [make_seq(SamplingParams(top_k=k), seq_id=i) for i, k in enumerate(ks)])
    for row, k in enumerate(ks):
        assert_filtered(out[row], logits, row, [TopKLogitsWarper(k)])
        assert int((out[row] > NEG_INF).sum()) == k


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_top_p_keeps_what_transformers_keeps(vocab_size, spread, temperature):
    logits = random_logits(6, vocab_size, spread, seed=1)
    ps = [nucleus_of(row / temperature, p) for row, p in zip(logits, (1e-6, 0.1, 0.5, 0.9, 0.99, 0.999), strict=True)]
    seqs = [make_seq(SamplingParams(temperature, top_p=p), seq_id=i) for i, p in enumerate(ps)]
    out = process(logits, seqs)
    for row, p in enumerate(ps):
        assert_filtered(out[row], logits, row, [TemperatureLogitsWarper(temperature), TopPLogitsWarper(p)])


def test_top_p_over_a_flat_distribution_looks_beyond_its_sorted_head():
    """Of 3000 tokens almost alike 1024 hold a third of the mass: top_p=0.9 must still keep about 2700."""
    logits = random_logits(2, 3000, 0.02)
    ps = [nucleus_of(logits[0], 0.9), nucleus_of(logits[1], 0.2)]  # one row needs the full sort, one does not
    out = process(logits, [make_seq(SamplingParams(top_p=p), seq_id=i) for i, p in enumerate(ps)])
    kept = (out > NEG_INF).sum(1).tolist()
    assert 2600 < kept[0] < 2800
    assert 550 < kept[1] < 650
    for row, p in enumerate(ps):
        assert_filtered(out[row], logits, row, [TopPLogitsWarper(p)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_min_p_keeps_what_transformers_keeps(vocab_size, spread, temperature):
    logits = random_logits(4, vocab_size, spread, seed=2)
    ps = (0.01, 0.3, 0.9, 1.0)
    out = process(logits, [make_seq(SamplingParams(temperature, min_p=p), seq_id=i) for i, p in enumerate(ps)])
    for row, p in enumerate(ps):
        assert_filtered(out[row], logits, row, [TemperatureLogitsWarper(temperature), MinPLogitsWarper(p)])


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_filters_combine_as_the_transformers_warpers_in_the_documented_order(vocab_size, spread):
    """temperature, min_p, top_k, top_p: each works on what the one before has left."""
    temperature = 0.8
    logits = random_logits(6, vocab_size, spread, seed=3)
    kept_k = [5, 40, vocab_size, 100, 3, 60]
    kept_min_p = [0.02, 0.0, 0.1, 0.95, 0.5, 0.001]
    ps = []
    for row, k, m in zip(logits, kept_k, kept_min_p, strict=True):
        before = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(m), TopKLogitsWarper(k)]
        left = LogitsProcessorList(before)(None, row.unsqueeze(0)).squeeze(0)
        left = left[left > NEG_INF]
        ps.append(nucleus_of(left, 0.7) if len(left) > 1 else 0.7)
    seqs = [
        make_seq(SamplingParams(temperature, top_k=k, top_p=p, min_p=m), seq_id=i)
        for i, (k, p, m) in enumerate(zip(kept_k, ps, kept_min_p, strict=True))
    ]
    out = process(logits, seqs)
    for row, (k, p, m) in enumerate(zip(kept_k, ps, kept_min_p, strict=True)):
        order = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(m), TopKLogitsWarper(k), TopPLogitsWarper(p)]
        assert_filtered(out[row], logits, row, order)


def test_tokens_that_tie_with_the_last_one_kept_stay_too():
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0]])
    assert (process_one_param(logits, top_k=2) > NEG_INF).tolist() == [[True, True, True, False]]
    assert (process_one_param(logits, top_k=1) > NEG_INF).tolist() == [[True, False, False, False]]
    # Probabilities 0.53, 0.2, 0.2, 0.07: the second reaches 0.6, and the third cannot be told from it.
    assert (process_one_param(logits, top_p=0.6) > NEG_INF).tolist() == [[True, True, True, False]]
    assert (process_one_param(logits, top_p=0.5) > NEG_INF).tolist() == [[True, False, False, False]]
    equal = torch.zeros(1, 2000)
    for kwargs in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert bool((process_one_param(equal, **kwargs) > NEG_INF).all())


def test_the_likeliest_token_always_stays():
    logits = random_logits(3, 700, 5.0)
    for kwargs in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        out = process_one_param(logits, **kwargs)
        assert (out > NEG_INF).sum(1).tolist() == [1, 1, 1]
        assert torch.equal(out.argmax(1), logits.argmax(1))


@pytest.mark.parametrize("kwargs", [{"top_k": -1}, {"top_k": 0}, {"top_k": 151}, {"top_k": 10**9}, {"min_p": 0.0}])
def test_a_filter_at_its_off_value_beside_one_that_is_on_filters_nothing(kwargs):
    logits = random_logits(2, 151, 3.0)
    seqs = [make_seq(SamplingParams(min_tokens=1, **kwargs)), make_seq(SamplingParams(top_k=2), seq_id=1)]
    out = process(logits, seqs)
    assert torch.equal(out[0], logits[0])
    assert (out[1] > NEG_INF).sum() == 2


def test_filters_work_on_what_a_mask_has_left():
    """Only 3 of 3000 tokens are allowed: top_k=10 must not let the others back in, top_p counts the three alone."""
    logits = random_logits(3, 3000, 0.5)
    allowed = (7, 1500, 2999)
    seqs = [
        make_seq(SamplingParams(allowed_token_ids=allowed, **kwargs), seq_id=i)
        for i, kwargs in enumerate(({"top_k": 10}, {"top_p": 0.999999}, {"top_k": 2, "top_p": 0.9999}))
    ]
    out = process(logits, seqs)
    for row in (0, 1):
        assert torch.nonzero(out[row] > NEG_INF).flatten().tolist() == list(allowed)
    least = min(allowed, key=lambda token_id: logits[2, token_id])
    assert torch.nonzero(out[2] > NEG_INF).flatten().tolist() == [i for i in allowed if i != least]


def test_greedy_rows_need_no_filters():
    params = SamplingParams(0, top_k=3, top_p=0.5, min_p=0.5)
    assert build_extras([make_seq(params)], (), 151) is None


def test_a_batch_without_extras_builds_none():
    seqs = [make_seq(SamplingParams(0.6, seed=1, stop_token_ids=[4]), seq_id=i) for i in range(3)]
    assert build_extras(seqs, (2,), 151) is None


# --- penalties -----------------------------------------------------------------------------------------------------


def seen_tokens(vocab_size, seed):
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, vocab_size, 30).tolist()
    completion = generator.integers(0, vocab_size, 10).tolist() + prompt[:5] * 2
    return prompt, completion


@pytest.mark.parametrize("penalty", [0.5, 1.0001, 1.3, 2.0, 10.0])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_repetition_penalty_equals_transformers(vocab_size, penalty):
    logits = random_logits(3, vocab_size)
    logits[:, ::7] = 0.0
    seqs, expected = [], []
    for row in range(3):
        prompt, completion = seen_tokens(vocab_size, row)
        completion = completion[: row * 10]  # none; some; more, so that the rows differ in width
        seqs.append(make_seq(SamplingParams(repetition_penalty=penalty), prompt, completion, seq_id=row))
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected.append(processor(torch.tensor([prompt + completion]), logits[row : row + 1].clone()))
    assert torch.equal(process(logits, seqs), torch.cat(expected))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.3), (-2.0, 2.0), (1.5, -0.25)])
def test_presence_and_frequency_penalties_follow_the_formula(vocab_size, presence, frequency):
    """logit - frequency * (times in the completion) - presence * (is in the completion); the prompt does not count."""
    logits = random_logits(2, vocab_size)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    seqs, expected = [], logits.clone()
    for row in range(2):
        prompt, completion = seen_tokens(vocab_size, row)
        seqs.append(make_seq(params, prompt, completion, seq_id=row))
        for token_id, count in Counter(completion).items():
            expected[row, token_id] = expected[row, token_id] - frequency * count - presence
    torch.testing.assert_close(process(logits, seqs), expected, rtol=0, atol=1e-5)


def test_repetition_penalty_comes_before_the_two_others():
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0]])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    seq = make_seq(params, prompt=[0, 1], completion=[1, 1, 2])
    # 0: in the prompt only; 1: in both, twice in the completion; 2: once in the completion; 3: nowhere.
    assert process(logits, [seq]).tolist() == [[2.0, -8.0 - 1.0 - 1.0, 2.0 - 0.5 - 1.0, 4.0]]


def test_penalties_and_filters_combine_as_in_transformers():
    logits = random_logits(1, 700, 2.0)
    prompt, completion = seen_tokens(700, 5)
    steps = [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(0.7), TopKLogitsWarper(50)]
    expected = LogitsProcessorList(steps)(torch.tensor([prompt + completion]), logits.clone())
    top_p = nucleus_of(expected[expected > NEG_INF], 0.8)
    expected = TopPLogitsWarper(top_p)(None, expected)
    params = SamplingParams(0.7, repetition_penalty=1.8, top_k=50, top_p=top_p)
    out = process(logits, [make_seq(params, prompt, completion)])
    assert torch.equal(out > NEG_INF, expected > NEG_INF)
    torch.testing.assert_close(out[out > NEG_INF] / 0.7, expected[expected > NEG_INF], rtol=1e-6, atol=1e-6)


# --- a newest token that the host does not know yet ----------------------------------------------------------------

PENDING_STORIES = {
    "new": ([5, 9, 3], [9, 9], 77),
    "in the prompt only": ([5, 9, 3], [9, 9], 5),
    "in the completion already": ([5, 9, 3], [9, 9], 9),
    "in both": ([5, 9, 3], [9, 3], 3),
    "the smallest id, which also pads": ([5, 9, 3], [4, 4], 3),
    "id 0, new": ([5, 9, 3], [9], 0),
    "the first of the completion": ([5, 9, 3], [], 9),
    "alone with an equal prompt": ([6], [], 6),
}


@pytest.mark.parametrize("story", PENDING_STORIES)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 1.1},
    ],
)
def test_a_pending_newest_token_is_penalised_like_a_known_one(story, kwargs):
    prompt, completion, newest = PENDING_STORIES[story]
    logits = random_logits(1, 151)
    params = SamplingParams(**kwargs)
    known = process(logits, [make_seq(params, prompt, [*completion, newest], seq_id=4)])
    pending = make_seq(params, prompt, completion, seq_id=4, pending=1)
    assert torch.equal(process(logits, [pending], [newest]), known)
    counts_again = "frequency_penalty" in kwargs or newest not in prompt + completion
    assert not counts_again or not torch.equal(known, process(logits, [make_seq(params, prompt, completion)]))


def test_pending_and_known_rows_of_different_width_mix():
    logits = random_logits(6, 151)
    params = SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25)
    rows = [*PENDING_STORIES.values()][:6]
    rows[2] = (list(range(40)), [3] * 7, 3)
    known = [make_seq(params, p, [*c, newest], seq_id=i) for i, (p, c, newest) in enumerate(rows)]
    mixed = [
        make_seq(params, p, c, seq_id=i, pending=1) if i % 2 == 0 else known[i] for i, (p, c, _) in enumerate(rows)
    ]
    newest_tokens = [newest if i % 2 == 0 else 150 for i, (_, _, newest) in enumerate(rows)]  # of known ones: not read
    assert torch.equal(process(logits, mixed, newest_tokens), process(logits, known))


def test_a_pending_token_counts_towards_min_tokens():
    logits = random_logits(1, 151)
    params = SamplingParams(min_tokens=2)
    one_known = make_seq(params, [5], [8], seq_id=1)
    assert process(logits, [one_known], end_token_ids=(2,))[0, 2] == NEG_INF
    one_known_one_pending = make_seq(params, [5], [8], seq_id=1, pending=1)
    assert torch.equal(process(logits, [one_known_one_pending], [9], (2,)), logits)


# --- masks and bias ------------------------------------------------------------------------------------------------


def test_logit_bias_is_added_and_may_meet_a_ban():
    logits = random_logits(1, 151)
    params = SamplingParams(logit_bias={0: 2.5, 2: 100.0, 150: -7.0}, min_tokens=1)
    out = process(logits, [make_seq(params)], end_token_ids=(2,))
    expected = logits.clone()
    expected[0, 0] += 2.5
    expected[0, 150] -= 7.0
    expected[0, 2] = NEG_INF
    assert torch.equal(out, expected)


def test_only_allowed_tokens_stay():
    logits = random_logits(3, 151)
    seqs = [
        make_seq(SamplingParams(allowed_token_ids=ids), seq_id=i) for i, ids in enumerate(([3], [150, 0, 7], [7, 7]))
    ]
    out = process(logits, seqs)
    for row, ids in enumerate(([3], [0, 7, 150], [7])):
        assert torch.nonzero(out[row] > NEG_INF).flatten().tolist() == ids
        assert torch.equal(out[row, ids], logits[row, ids])


def test_min_tokens_holds_back_end_and_stop_tokens_until_it_is_reached():
    logits = random_logits(4, 151)
    seqs = [
        make_seq(SamplingParams(min_tokens=3, stop_token_ids=[9, 2]), [1, 2], [5, 6], seq_id=0),
        make_seq(SamplingParams(min_tokens=3, stop_token_ids=[9]), [1, 2], [5, 6, 7], seq_id=1),
        make_seq(SamplingParams(min_tokens=3, stop_token_ids=[9], ignore_eos=True), [1, 2], [5, 6], seq_id=2),
        make_seq(SamplingParams(min_tokens=1), [1, 2], [], seq_id=3),
    ]
    out = process(logits, seqs, end_token_ids=(2, 4))
    banned = [torch.nonzero(row == NEG_INF).flatten().tolist() for row in out]
    assert banned == [[2, 4, 9], [], [9], [2, 4]]
    kept = out > NEG_INF
    assert torch.equal(out[kept], logits[kept])


# --- what extras leave alone ---------------------------------------------------------------------------------------

ALL_EXTRAS = (
    SamplingParams(0.7, top_k=5),
    SamplingParams(0.7, top_p=0.5),
    SamplingParams(0.7, min_p=0.5),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-0.5),
    SamplingParams(logit_bias={3: 4.0}),
    SamplingParams(allowed_token_ids=[3, 4]),
    SamplingParams(min_tokens=2),
    SamplingParams(logprobs=3),
)


def test_rows_without_extras_are_left_bit_identical_in_a_mixed_batch():
    logits = random_logits(2 * len(ALL_EXTRAS), 700)
    seqs = []
    for i, params in enumerate(ALL_EXTRAS):
        seqs.append(make_seq(SamplingParams(0.7 * (i % 2)), [1, 2], [3], seq_id=2 * i))
        seqs.append(make_seq(params, [1, 2], [3], seq_id=2 * i + 1))
    out = process(logits, seqs, end_token_ids=(2,))
    assert torch.equal(out[::2], logits[::2])
    for i, params in enumerate(ALL_EXTRAS):  # and each row with extras is what it is alone
        row = 2 * i + 1
        alone = process(logits[row : row + 1], [make_seq(params, [1, 2], [3])], end_token_ids=(2,))
        assert torch.equal(out[row], alone[0]), params
        assert torch.equal(out[row], logits[row]) == (params.logprobs is not None), params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_handed_in_are_not_modified(dtype):
    logits = random_logits(len(ALL_EXTRAS), 151).to(dtype)
    before = logits.clone()
    out = process(logits, [make_seq(p, [1, 2], [3], seq_id=i) for i, p in enumerate(ALL_EXTRAS)], end_token_ids=(2,))
    assert torch.equal(logits, before)
    assert out.dtype == torch.float32
    assert not torch.equal(out, before.float())


# --- log-probabilities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 1, 5, 151, 1000])
def test_top_logprobs_are_those_of_the_chosen_token_and_of_the_likeliest(num):
    logits = random_logits(4, 151)
    chosen = torch.tensor([0, 150, 77, int(logits[3].argmax())])
    ids, values = top_logprobs(logits, chosen, num)
    expected = logits.double().log_softmax(1)
    num = min(num, 151)
    assert ids.shape == values.shape == (4, 1 + num)
    assert torch.equal(ids[:, 0], chosen)
    assert torch.equal(ids[:, 1:], expected.sort(descending=True).indices[:, :num])
    torch.testing.assert_close(values, expected.gather(1, ids).float(), rtol=0, atol=1e-5)


def test_top_logprobs_of_16_bit_logits_are_computed_in_float32():
    logits = random_logits(2, 700).bfloat16()
    ids, values = top_logprobs(logits, torch.tensor([3, 4]), 2)
    expected = logits.float().log_softmax(1).gather(1, ids)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)
