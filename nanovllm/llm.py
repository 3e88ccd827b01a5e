"""LLM: text in, text out. Batches, order of results, chat and progress; has an engine, knows nothing of tensors."""

import dataclasses
import inspect
import itertools
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from tqdm import tqdm

from nanovllm.engine.llm_engine import LLMEngine, Prompt, check_token_ids, shorten
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_choice
from nanovllm.utils.tokenizer import split_reasoning

_PIECE = 256  # prompts tokenized together and handed to the engine at once
_PIECE_S = 0.01  # fewer, if their source takes longer than this

Message = dict[str, Any]
Row = tuple[int, Any, Any]  # place, prompt and parameters, or the exception in the place of one of them


class LLM:
    """An offline engine for batches of prompts.

    Args:
        model: A folder with a checkpoint, a hub id, or "embedded" for the model inside the package.
        **knobs: Fields of `nanovllm.config.Config`.

    Raises:
        TypeError, ValueError: A knob that is unknown or out of range, or a checkpoint that cannot be run.
        OSError: A hub id that cannot be fetched.
    """

    def __init__(self, model: str, **knobs: Any) -> None:
        self.engine = LLMEngine(model, **knobs)
        self._others: list[RequestOutput] = []  # outputs of requests that a running generate does not own
        self._aborts: deque[int] = deque()  # ids whose abort waits for the end of a step
        self._last_run: weakref.ref[Generator] | None = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None if its folder has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: str = "output",
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: Texts or lists of token ids, mixed freely.
            sampling_params: One for all prompts, one a prompt, or None for `get_default_sampling_params()`.
            use_tqdm: Show a progress bar.
            on_error: "output", or "raise" to raise RuntimeError at the first prompt that fails, dropping the rest.

        Returns:
            One output a prompt, in order. A prompt that cannot be served gives an output with
            ``finish_reason="error"`` and harms no other.

        Raises:
            TypeError: Prompts or parameters of the wrong type.
            ValueError: Lists of different lengths, text for a model without tokenizer, token ids of parameters outside
                the vocabulary.
            RuntimeError: Another generate or stream is under way, or the engine is closed.
        """
        return self._collect(_check_prompts(prompts), sampling_params, use_tqdm, on_error)

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = False,
        on_error: str = "output",
    ) -> Iterator[RequestOutput]:
        """Complete prompts and yield each output, with its `index`, as soon as it ends.

        Leaving the loop early drops the rest. Any iterable will do, of prompts and of parameters, and is taken piece by
        piece, so a million prompts need not fit into memory; one of the wrong type is then an error output too.

        Args, raises: As in `generate`.
        """
        if isinstance(prompts, list | tuple | str) or not isinstance(prompts, Iterable):
            prompts = _check_prompts(prompts)
        return self._stream(prompts, sampling_params, use_tqdm, on_error)

    def chat(
        self,
        conversations: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        on_error: str = "output",
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template.

        Args:
            conversations: One conversation (a list of messages with "role" and "content") or many.
            sampling_params: As in `generate`.
            use_tqdm: Show a progress bar.
            chat_template_kwargs: Passed on to the template, such as ``{"enable_thinking": False}``.
            tools: Descriptions of tools, passed on to the template.
            on_error: As in `generate`.

        Returns:
            One output a conversation, in order; a list of one for one conversation. What a thinking model thought
            stands apart from `text`, in `reasoning`.

        Raises:
            TypeError: Conversations, template arguments or tools of the wrong type.
            ValueError: The model has no chat template. (A conversation that it refuses is an error of its row.)
        """
        if not isinstance(conversations, list | tuple) or (conversations and isinstance(conversations[0], dict)):
            conversations = [conversations]  # type: ignore[assignment]
        for c in conversations:
            if not isinstance(c, list | tuple) or not c or not all(isinstance(message, dict) for message in c):
                raise TypeError(
                    "conversations must be a list of messages like {'role': 'user', 'content': '...'}, or a list of "
                    f"such lists, none of them empty, not {shorten(c)}."
                )
        for name, value, kind in (("chat_template_kwargs", chat_template_kwargs, dict), ("tools", tools, list)):
            if not isinstance(value, kind | None):
                raise TypeError(f"{name} must be a {kind.__name__} or None, not {shorten(value)}.")
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{self.engine.config.model!r} has no chat template; use generate.")
        template_kwargs = chat_template_kwargs or {}
        texts: list[str | ValueError] = []
        for conversation in conversations:
            try:
                text = self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=True, tools=tools, **template_kwargs
                )
            except Exception as error:  # the template is the model's own program
                text = ValueError(f"The chat template refuses {shorten(conversation)}: {error}")
            texts.append(text)
        encoded = iter(self.engine.encode([t for t in texts if isinstance(t, str)], add_special_tokens=False))
        prompts = [next(encoded) if isinstance(text, str) else text for text in texts]
        outputs = self._collect(prompts, sampling_params, use_tqdm, on_error)
        return [
            _with_reasoning(output, isinstance(text, str) and text.rstrip().endswith("<think>"))
            for output, text in zip(outputs, texts, strict=True)
        ]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what prompts without parameters get: `SamplingParams()` with the model's generation_config.json."""
        return self.engine.default_sampling_params

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """See `LLMEngine.add_request`."""
        return self.engine.add_request(prompt, sampling_params)

    def step(self) -> tuple[list[RequestOutput], int]:
        """See `LLMEngine.step`; RuntimeError too while a generate or stream is under way, which steps by itself."""
        self._check_idle()
        self._carry_out_aborts({})
        outputs, num_tokens = self.engine.step()
        others, self._others = self._others, []
        return others + outputs, num_tokens

    def is_finished(self) -> bool:
        """See `LLMEngine.is_finished`."""
        return not self._others and self.engine.is_finished()

    def stats(self) -> dict[str, float]:
        """See `LLMEngine.stats`."""
        return self.engine.stats()

    def abort(self, request_id: int) -> None:
        """Drop a request without an output; a row of a generate or stream under way ends with an error."""
        if self._is_under_way():
            self._aborts.append(request_id)
        else:
            self.engine.abort(request_id)

    def exit(self) -> None:
        """Let go of weights, cache and requests; any number of times."""
        self.engine.exit()

    close = exit

    def _collect(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool, on_error: str) -> list[RequestOutput]:
        """Run all prompts and return their outputs in order."""
        outputs: dict[int, RequestOutput] = {}
        for output in self._stream(prompts, sampling_params, use_tqdm, on_error):
            outputs[output.index] = output
        return [outputs[i] for i in range(len(prompts))]

    def _stream(
        self, prompts: Iterable[Prompt], sampling_params: Any, use_tqdm: bool, on_error: str
    ) -> Iterator[RequestOutput]:
        """Check the call, then return the generator that runs it."""
        check_choice("on_error", on_error, ("output", "raise"))
        self._check_idle()
        self.engine.check_open()
        total = len(prompts) if isinstance(prompts, list) else None
        params = self._check_params(sampling_params, total)
        if isinstance(prompts, list) and any(isinstance(prompt, str) for prompt in prompts):
            self.engine.encode([])  # raises if there is no tokenizer
        ended = ValueError("sampling_params ended before this prompt; give one for all, or one each.")
        rows = zip(itertools.count(), prompts, itertools.chain(params, itertools.repeat(ended)))
        return self._run(rows, _Progress(self.engine, total, use_tqdm), on_error)

    def _is_under_way(self) -> bool:
        # Read off the generator itself: a flag could be left standing by an interrupt that comes before its reset.
        last = self._last_run() if self._last_run is not None else None
        return last is not None and inspect.getgeneratorstate(last) in (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)

    def _check_idle(self) -> None:
        if self._is_under_way():
            raise RuntimeError("Another generate or stream is under way on this LLM; end it first.")

    def _carry_out_aborts(self, index_of: dict[int, int]) -> None:
        while self._aborts:
            request_id = self._aborts.popleft()
            self.engine.abort(request_id, "The request was aborted." if request_id in index_of else None)

    def _run(self, rows: Iterator[Row], progress: "_Progress", on_error: str) -> Iterator[RequestOutput]:
        """Start `_run_rows`, of which there may be one at a time, when its first output is asked for."""
        self._check_idle()
        run = self._run_rows(rows, progress, on_error)
        self._last_run = weakref.ref(run)
        yield from run

    def _run_rows(
        self, rows: Iterator[Row], progress: "_Progress", on_error: str
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output of each row as soon as it ends; what is left when the caller stops is dropped."""
        index_of: dict[int, int] = {}  # request id -> row
        try:
            has_more, next_take = True, 0.0
            while has_more or index_of:
                outputs: list[RequestOutput] = []
                self._carry_out_aborts(index_of)
                # Taken and tokenized piece by piece, so that the first prompts run while the last are still text.
                has_room = len(self.engine.scheduler.waiting) < self.engine.config.max_num_seqs
                start = time.perf_counter()
                if has_more and has_room and (start >= next_take or self.engine.is_finished()):
                    piece, has_more = _take_piece(rows)
                    if len(piece) < _PIECE:  # a slow source gets half of the time, so that rows under way go on
                        next_take = 2 * time.perf_counter() - start
                    outputs = self._add(piece, index_of)
                else:  # without rows of its own it makes room for them
                    ended, _ = self.engine.step()
                    if not ended and self.engine.is_finished():  # else the loop would wait for them for ever
                        self.engine.check_open()
                        gone = "The request was aborted, or its output was taken, by a direct call of the engine."
                        outputs = [RequestOutput.refused(index, [], gone) for index in index_of.values()]
                        index_of.clear()
                    for output in ended:
                        if output.request_id in index_of:
                            index = index_of.pop(output.request_id)
                            outputs.append(dataclasses.replace(output, index=index))
                        else:
                            self._others.append(output)
                progress.update(len(outputs))
                for output in outputs:
                    if on_error == "raise" and output.finish_reason == "error":
                        raise RuntimeError(f"Prompt {output.index}: {output.error}")
                    yield output
        finally:
            for request_id in index_of:
                self.engine.abort(request_id)
            progress.close()

    def _add(self, rows: list[Row], index_of: dict[int, int]) -> list[RequestOutput]:
        """Queue rows; return an error output for each that is refused."""
        refused: list[RequestOutput] = []
        texts = [prompt for _, prompt, _ in rows if isinstance(prompt, str)]
        encoded = iter(self.engine.encode(texts) if texts else ())
        for index, prompt, params in rows:
            token_ids: Any = next(encoded) if isinstance(prompt, str) else prompt
            try:
                for given in (token_ids, params):
                    if isinstance(given, Exception):
                        raise ValueError(str(given))
                seqs = self.engine.new_request(token_ids, params)
                index_of[seqs[0].request_id] = index  # before it is queued, so that an interrupt leaves no stray behind
                self.engine.queue(seqs)
            except (TypeError, ValueError) as error:
                known = list(token_ids) if isinstance(token_ids, list | tuple) else []
                refused.append(RequestOutput.refused(index, known, str(error)))
        return refused

    def _check_params(self, params: Any, num_prompts: int | None) -> Iterable[Any]:
        """Return parameters for each prompt, checked as far as they are at hand."""
        if params is None or isinstance(params, SamplingParams):
            params = self.engine.default_sampling_params if params is None else params
            self.engine.check_params(params)
            return itertools.repeat(params)
        is_lazy = num_prompts is None or not isinstance(params, list | tuple)
        if is_lazy and isinstance(params, Iterable) and not isinstance(params, str | bytes | dict):
            return params  # checked on the way
        if not isinstance(params, list | tuple) or not all(isinstance(param, SamplingParams) for param in params):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, not {shorten(params)}.")
        if len(params) != num_prompts:
            raise ValueError(
                f"There are {num_prompts} prompts but {len(params)} sampling_params; give one, or one each."
            )
        for param in {id(param): param for param in params}.values():
            self.engine.check_params(param)
        return params


class _Progress:
    """The progress bar: prompts done, tokens a second, KV use, preemptions; redrawn at most ten times a second."""

    def __init__(self, engine: LLMEngine, total: int | None, is_shown: bool) -> None:
        self._engine = engine
        self._bar = tqdm(total=total, desc="Generating", unit="prompt", mininterval=0.1, disable=not is_shown)
        self._start = self._drawn = time.perf_counter()
        self._stats = engine.stats()

    def update(self, num_done: int) -> None:
        """Count ``num_done`` more prompts as done."""
        now = time.perf_counter()
        if not self._bar.disable and now - self._drawn >= 0.1:
            self._drawn, elapsed = now, now - self._start
            stats = self._engine.stats()
            tokens_in, tokens_out = (
                (stats[name] - self._stats[name]) / elapsed for name in ("num_prompt_tokens", "num_completion_tokens")
            )
            scheduler = self._engine.scheduler
            use = len(scheduler.block_manager.used_block_ids) / scheduler.block_manager.num_blocks
            self._bar.set_postfix_str(
                f"in {tokens_in:.0f} tok/s, out {tokens_out:.0f} tok/s, KV {use:.0%}, "
                f"preempted {stats['num_preemptions'] - self._stats['num_preemptions']:.0f}",
                refresh=False,
            )
        self._bar.update(num_done)

    def close(self) -> None:
        """Draw the bar a last time."""
        self._bar.close()


def _with_reasoning(output: RequestOutput, starts_open: bool) -> RequestOutput:
    """Return the output with the thinking text of each completion set apart."""
    completions = []
    for completion in output.outputs:
        reasoning, text = split_reasoning(completion.text, starts_open)
        completions.append(dataclasses.replace(completion, reasoning=reasoning, text=text))
    first = completions[0]
    return dataclasses.replace(output, outputs=completions, text=first.text, reasoning=first.reasoning)


def _take_piece(rows: Iterator[Row]) -> tuple[list[Row], bool]:
    """Return the next rows, as many as come within the time of a piece but at least one, and if there may be more."""
    piece: list[Row] = []
    end = time.perf_counter() + _PIECE_S
    for row in rows:
        piece.append(row)
        if len(piece) == _PIECE or time.perf_counter() >= end:
            return piece, True
    return piece, False


def _check_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        raise TypeError(f"prompts must be a list: write generate([{shorten(prompts)}]).")
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"prompts must be a list of str or of lists of ints, not {shorten(prompts)}.")
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        raise TypeError(f"prompts must be a list of prompts: write generate([{shorten(list(prompts))}]).")
    return [prompt if isinstance(prompt, str) else check_token_ids(prompt) for prompt in prompts]
