"""Interrupts, errors and other threads: a call gives its own outputs, all of them right, and leaves nothing behind."""

import sys
import threading

import pytest
from fakes import LOOKAHEADS, Watch, make_llm, naive_completion, run_until_idle

from nanovllm.sampling_params import SamplingParams

BOTH_LOOPS = pytest.mark.parametrize("lookahead", LOOKAHEADS)
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


def naive(prompt):
    return naive_completion(prompt, PARAMS)


def assert_serves_again(llm, prompts):
    """Assert that a call gives its own outputs only, and that the engine is idle and empty after it."""
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.index for output in outputs] == list(range(len(prompts)))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [naive(prompt) for prompt in prompts]
    assert llm.step() == ([], 0)
    assert llm.is_finished()
    assert not llm.engine.scheduler.block_manager.used_block_ids
    assert not llm.engine._requests


@BOTH_LOOPS
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is lost")])
@pytest.mark.parametrize("place", ["on_run", "on_wait"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_after_an_error_in_a_step_the_next_call_gives_its_own_outputs_only(number, place, error, lookahead):
    """A call of three prompts was interrupted; the next one, of one prompt, returned four outputs."""
    llm = make_llm(8, 4, lookahead=lookahead, max_num_seqs=2)

    def fail(count):
        if count == number:
            raise error

    setattr(llm.engine.model_runner, place, fail)
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7]]
    with pytest.raises(type(error)):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert llm.is_finished()
    assert llm.step() == ([], 0)
    setattr(llm.engine.model_runner, place, None)
    assert_serves_again(llm, [[9, 8]])
    assert_serves_again(llm, prompts)


def interrupt_at(line, *, lookahead):
    """Interrupt a generate at the n-th line that it executes in the library.

    Returns the LLM and the interrupt, or None if there is no such line. The interrupt is kept alive, as an interactive
    session would, so that its frames live on.
    """
    llm = make_llm(6, 4, lookahead=lookahead, max_num_seqs=2)
    num_lines = 0

    def on_line(frame, event, _):
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame, *_):
        return on_line if frame.f_globals.get("__name__", "").startswith("nanovllm.") else None

    previous = sys.gettrace()
    sys.settrace(on_call)
    try:
        llm.generate([[1, 2], [3, 4, 5], [6]], PARAMS, use_tqdm=False)
    except KeyboardInterrupt as interrupt:
        return llm, interrupt
    finally:
        sys.settrace(previous)
    return None


@BOTH_LOOPS
def test_an_interrupt_at_any_line_of_a_generate_leaves_the_llm_usable(lookahead):
    line = 0
    while interrupted := interrupt_at(line := line + 1, lookahead=lookahead):
        assert_serves_again(interrupted[0], [[7, 8], [1, 2]])
    assert line > 1000


@BOTH_LOOPS
def test_rows_that_an_interrupted_call_left_waiting_do_not_block_the_next(lookahead, monkeypatch):
    """Rows aborted while they waited still counted as waiting; the next call saw a full queue and span for ever."""
    llm = make_llm(8, 4, lookahead=lookahead, max_num_seqs=1)
    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.llm.tqdm.update", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2], [3], [4]], PARAMS, use_tqdm=False)
    assert_serves_again(llm, [[9, 8], [1]])


def raise_interrupt(*_):
    raise KeyboardInterrupt


@BOTH_LOOPS
def test_statistics_go_on_after_an_error(lookahead):
    """The clean start after an error set the count of preemptions, alone of all, back to 0."""
    llm = make_llm(6, 4, lookahead=lookahead)
    prompts = [[1, 2, 3, i] for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    llm.generate(prompts, params, use_tqdm=False)
    before = llm.stats()
    assert before["num_preemptions"] > 0
    llm.engine.model_runner.on_run = raise_interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]], params, use_tqdm=False)
    assert llm.stats() == before
    llm.engine.model_runner.on_run = None
    llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats()["num_preemptions"] == 2 * before["num_preemptions"]


# Aborts and steps by hand while a call is under way.

LENGTHS = [4, 30, 12]
ROWS = [[1, 2, 3], [4], [7, 8, 9, 10]], [SamplingParams(temperature=0.0, max_tokens=n) for n in LENGTHS]


def assert_rows(outputs, aborted, error):
    """Assert that the ROWS in ``aborted`` ended with the error, and the others as if nothing had been."""
    outputs = {output.index: output for output in outputs}
    assert sorted(outputs) == [0, 1, 2]
    for i, (prompt, params) in enumerate(zip(*ROWS, strict=True)):
        expected, _ = naive_completion(prompt, params)
        if i in aborted:
            assert (outputs[i].finish_reason, outputs[i].outputs[0].error) == ("error", outputs[i].error)
            assert error in outputs[i].error
            assert len(outputs[i].token_ids) < LENGTHS[i]
            assert outputs[i].token_ids == expected[: len(outputs[i].token_ids)]
        else:
            assert (outputs[i].token_ids, outputs[i].error) == (expected, None)


@BOTH_LOOPS
def test_a_row_aborted_within_the_loop_over_its_stream_ends_with_an_error(lookahead):
    """The stream waited for the aborted row for ever."""
    llm = make_llm(40, 4, lookahead=lookahead)
    Watch(llm.engine)
    outputs = []
    for output in llm.stream(*ROWS):
        outputs.append(output)
        if output.index == 0:
            llm.abort(output.request_id + 1)
            llm.abort(output.request_id + 1)
    assert_rows(outputs, {1}, "The request was aborted.")
    assert (outputs[1].index, outputs[1].prompt_token_ids, len(outputs[1].token_ids) >= 4) == (1, [4], True)
    assert_serves_again(llm, [[1], [2]])


@BOTH_LOOPS
@pytest.mark.parametrize("number", [1, 2, 3, 9])
def test_a_row_of_a_generate_may_be_aborted_by_another_thread(number, lookahead):
    """It was dropped in the middle of a step, and generate waited for it for ever."""
    llm = make_llm(40, 4, lookahead=lookahead, max_num_seqs=2)  # the third waits
    Watch(llm.engine)
    mine = llm.add_request([5, 6], SamplingParams(temperature=0.0, max_tokens=40))

    def on_run(count):
        if count == number:
            for id_ in (mine, mine + 2, mine + 3):
                assert in_thread(lambda id_=id_: llm.abort(id_)) is None

    llm.engine.model_runner.on_run = on_run
    assert_rows(llm.generate(*ROWS, use_tqdm=False), {1, 2}, "The request was aborted.")
    assert_serves_again(llm, [[1], [2]])  # an aborted request that was added by hand gives no output


@BOTH_LOOPS
def test_an_abort_in_the_loop_over_a_stream_that_is_left_at_once_is_not_forgotten(lookahead):
    llm = make_llm(40, 4, lookahead=lookahead)
    mine = llm.add_request([5, 6], SamplingParams(temperature=0.0, max_tokens=40))
    stream = llm.stream(*ROWS)
    assert next(stream).index == 0
    llm.abort(mine)
    stream.close()
    assert llm.step() == ([], 0)
    assert_serves_again(llm, [[1], [2]])


@BOTH_LOOPS
def test_all_samples_of_an_aborted_row_come_with_what_they_have(lookahead):
    llm = make_llm(40, 4, lookahead=lookahead, max_num_seqs=3)  # a part of them waits
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=30, n=4)]
    first, second = (llm.abort(out.request_id + 1) or out for out in llm.stream([[1, 2], [3, 4, 5]], params))
    assert (first.index, first.error) == (0, None)
    assert second.prompt_token_ids == [3, 4, 5]
    assert [sample.finish_reason for sample in second.outputs] == ["error"] * 4
    assert second.outputs[0].token_ids and not second.outputs[3].token_ids
    for i, sample in enumerate(second.outputs):
        expected, _ = naive_completion([3, 4, 5], params[1], sample_index=i)
        assert sample.token_ids == expected[: len(sample.token_ids)]
    assert_serves_again(llm, [[1], [2]])


def test_a_step_by_hand_within_the_loop_over_a_stream_is_refused_and_harms_nothing():
    """It took the outputs of the stream's rows away, for which the stream then waited for ever."""
    llm = make_llm(40, 4)
    outputs = []
    for output in llm.stream(*ROWS):
        outputs.append(output)
        with pytest.raises(RuntimeError, match="Another generate or stream is under way on this LLM"):
            llm.step()
    assert_rows(outputs, set(), None)


@BOTH_LOOPS
@pytest.mark.parametrize(
    ("meddle", "lost"),
    [
        (lambda llm, id_: llm.engine.abort(id_), {1}),
        (lambda llm, id_: run_until_idle(llm.engine), {1, 2}),
        (lambda llm, id_: llm.engine.reset(), {1, 2}),
    ],
    ids=["abort", "step", "reset"],
)
def test_rows_that_the_engine_lost_by_a_direct_call_end_with_an_error(meddle, lost, lookahead):
    llm = make_llm(40, 4, lookahead=lookahead)
    outputs = []
    for output in llm.stream(*ROWS):
        outputs.append(output)
        if output.index == 0:
            meddle(llm, output.request_id + 1)
    assert_rows(outputs, lost, "The request was aborted, or its output was taken, by a direct call of the engine.")
    assert_serves_again(llm, [[1], [2]])


# Other threads.


def in_thread(work):
    """Run ``work`` in another thread to its end; return what it raised, or None."""
    raised = []

    def run():
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return raised[0] if raised else None


@BOTH_LOOPS
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_request_added_by_another_thread_runs_beside_a_generate_that_does_not_return_it(number, lookahead):
    llm = make_llm(40, 4, lookahead=lookahead, max_num_seqs=3)
    Watch(llm.engine)
    added = []

    def on_run(count):
        if count == number:
            assert in_thread(lambda: added.append(llm.add_request([5, 6], PARAMS))) is None

    llm.engine.model_runner.on_run = on_run
    prompts = [[1, 2, 3], [4], [7, 8, 9, 10]]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.token_ids for output in outputs] == [naive(prompt)[0] for prompt in prompts]
    others = []
    while not llm.is_finished():
        others += llm.step()[0]
    assert [(output.request_id, output.token_ids) for output in others] == [(added[0], naive([5, 6])[0])]


def test_requests_added_all_along_by_another_thread_end_once_each():
    llm = make_llm(60, 4, max_num_seqs=5)
    mine = [[i % 11, i // 11] for i in range(110)]
    theirs = [[i % 11, i // 11, 3] for i in range(100)]
    ids = {}
    started = threading.Event()

    def add():
        started.wait(20)
        for prompt in theirs:
            ids[llm.add_request(prompt, PARAMS)] = prompt

    thread = threading.Thread(target=add)
    thread.start()
    llm.engine.model_runner.on_run = lambda count: started.set()
    outputs = llm.generate(mine, PARAMS, use_tqdm=False)
    thread.join(20)
    assert [output.prompt_token_ids for output in outputs] == mine
    assert [output.token_ids for output in outputs] == [naive(prompt)[0] for prompt in mine]
    others = []
    while not llm.is_finished():
        others += llm.step()[0]
    assert sorted(output.request_id for output in others) == sorted(ids)
    for output in others:
        assert output.token_ids == naive(ids[output.request_id])[0]


def test_a_request_added_before_a_generate_is_handed_out_by_the_next_step():
    llm = make_llm(40, 4)
    id_ = llm.add_request([5, 6], PARAMS)
    (output,) = llm.generate([[1]], SamplingParams(max_tokens=9), use_tqdm=False)
    assert output.prompt_token_ids == [1]
    assert not llm.is_finished()
    outputs, _ = llm.step()
    assert [(output.request_id, output.token_ids) for output in outputs] == [(id_, naive([5, 6])[0])]
    assert llm.is_finished()


def test_a_generate_runs_behind_requests_that_fill_the_queue():
    """With as many requests waiting as may be alive, generate handed in nothing, stepped nothing and span for ever."""
    llm = make_llm(40, 4, max_num_seqs=1)
    ids = [llm.add_request([5, i], PARAMS) for i in range(3)]
    (output,) = llm.generate([[1]], PARAMS, use_tqdm=False)
    assert output.token_ids == naive([1])[0]
    outputs, _ = llm.step()
    assert [(other.request_id, other.token_ids) for other in outputs] == [
        (id_, naive([5, i])[0]) for i, id_ in enumerate(ids)
    ]
    assert llm.is_finished()


@pytest.mark.parametrize("method", ["schedule", "take_finished"])
def test_a_request_added_by_another_thread_during_an_idle_step_is_served(method):
    """An idle step took a request that came in meanwhile for one that nothing can run, raised and forgot it."""
    llm = make_llm(40, 4)
    scheduler = llm.engine.scheduler
    original = getattr(scheduler, method)
    ids = []

    def hooked():
        result = original()
        if not ids:
            assert in_thread(lambda: ids.append(llm.add_request([5, 6], PARAMS))) is None
        return result

    setattr(scheduler, method, hooked)
    outputs, num_tokens = llm.step()
    assert (outputs, num_tokens) == ([], 0)
    while not llm.is_finished():
        outputs += llm.step()[0]
    assert [(output.request_id, output.token_ids) for output in outputs] == [(ids[0], naive([5, 6])[0])]


def test_a_second_generate_while_one_is_under_way_is_refused_and_harms_nothing():
    llm = make_llm(40, 4)
    raised = []

    def on_run(count):
        if count == 2:
            raised.append(in_thread(lambda: llm.generate([[2]], PARAMS, use_tqdm=False)))

    llm.engine.model_runner.on_run = on_run
    (output,) = llm.generate([[1]], PARAMS, use_tqdm=False)
    assert output.token_ids == naive([1])[0]
    assert isinstance(raised[0], RuntimeError)
    assert "Another generate or stream is under way" in str(raised[0])
    assert_serves_again(llm, [[1], [2]])
