"""LLM: text in, text out. Batches, order of results, chat and progress; has an engine, knows nothing of tensors."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from tqdm import tqdm

from nanovllm.engine.llm_engine import LLMEngine, Prompt, check_token_ids, shorten
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

_PIECE = 256  # prompts tokenized together and handed to the engine at once

Message = dict[str, Any]
Row = tuple[int, Prompt, SamplingParams | None]


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
        self._is_generating = False

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
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: Texts or lists of token ids, mixed freely.
            sampling_params: One for all prompts, one a prompt, or None for `SamplingParams()`.
            use_tqdm: Show a progress bar.

        Returns:
            One output a prompt, in order. A prompt that cannot be served gives an output with
            ``finish_reason="error"`` and harms no other.

        Raises:
            TypeError: Prompts or parameters of the wrong type.
            ValueError: Lists of different lengths, or text for a model without tokenizer.
            RuntimeError: Another generate is under way, or the engine is closed.
        """
        prompts = _check_prompts(prompts)
        params = _check_params(sampling_params, len(prompts))
        if any(isinstance(prompt, str) for prompt in prompts):
            self.engine.encode([])  # raises if there is no tokenizer
        rows = ((i, prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)))
        outputs: dict[int, RequestOutput] = {}
        with tqdm(total=len(prompts), desc="Generating", unit="prompt", disable=not use_tqdm, mininterval=0.1) as bar:
            for output in self._run(rows, bar):
                outputs[output.index] = output
        return [outputs[i] for i in range(len(prompts))]

    def chat(
        self,
        conversations: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template.

        Args:
            conversations: One conversation (a list of messages with "role" and "content") or many.
            sampling_params: As in `generate`.
            use_tqdm: Show a progress bar.
            chat_template_kwargs: Passed on to the template, such as ``{"enable_thinking": False}``.

        Returns:
            One output a conversation, in order; a list of one for one conversation.

        Raises:
            TypeError: Conversations of the wrong type.
            ValueError: The model has no chat template, or the template refuses the messages.
        """
        if isinstance(conversations, list | tuple) and conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        if not isinstance(conversations, list | tuple) or not all(
            isinstance(c, list | tuple) and c and all(isinstance(message, dict) for message in c) for c in conversations
        ):
            raise TypeError(
                "conversations must be a list of messages like {'role': 'user', 'content': '...'}, or a list of such "
                f"lists, not {shorten(conversations)}."
            )
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{self.engine.config.model!r} has no chat template; use generate.")
        prompts: list[Prompt] = []
        for conversation in conversations:
            try:
                text = self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
                )
            except Exception as error:  # the template is the model's own program
                raise ValueError(f"The chat template refuses {shorten(conversation)}: {error}") from error
            prompts.append(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.generate(prompts, sampling_params, use_tqdm)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """See `LLMEngine.add_request`."""
        return self.engine.add_request(prompt, sampling_params)

    def step(self) -> tuple[list[RequestOutput], int]:
        """See `LLMEngine.step`."""
        others, self._others = self._others, []
        outputs, num_tokens = self.engine.step()
        return others + outputs, num_tokens

    def is_finished(self) -> bool:
        """See `LLMEngine.is_finished`."""
        return not self._others and self.engine.is_finished()

    def abort(self, request_id: int) -> None:
        """See `LLMEngine.abort`."""
        self.engine.abort(request_id)

    def exit(self) -> None:
        """Let go of weights, cache and requests; any number of times."""
        self.engine.exit()

    close = exit

    def _run(self, rows: Iterable[Row], bar: Any) -> Iterator[RequestOutput]:
        """Yield the output of each row as soon as it ends; what is left when the caller stops is dropped."""
        if self._is_generating:
            raise RuntimeError("Another generate is under way on this LLM; wait for it to end.")
        self._is_generating = True
        rows = iter(rows)
        index_of: dict[int, int] = {}  # request id -> row
        try:
            has_more = True
            while has_more or index_of:
                # Tokenized piece by piece, so that the first prompts run while the last are still text.
                while has_more and len(self.engine.scheduler.waiting) < self.engine.config.max_num_seqs:
                    piece = list(itertools.islice(rows, _PIECE))
                    has_more = len(piece) == _PIECE
                    for output in self._add(piece, index_of):
                        bar.update()
                        yield output
                if not index_of:
                    continue
                outputs, _ = self.engine.step()
                for output in outputs:
                    index = index_of.pop(output.request_id, None)
                    if index is None:
                        self._others.append(output)
                    else:
                        bar.update()
                        yield dataclasses.replace(output, index=index)
        finally:
            for request_id in index_of:
                self.engine.abort(request_id)
            self._is_generating = False

    def _add(self, rows: list[Row], index_of: dict[int, int]) -> Iterator[RequestOutput]:
        """Queue rows; yield an error output for each that is refused."""
        texts = [prompt for _, prompt, _ in rows if isinstance(prompt, str)]
        encoded = iter(self.engine.encode(texts) if texts else ())
        for index, prompt, params in rows:
            token_ids = next(encoded) if isinstance(prompt, str) else prompt
            try:
                if isinstance(token_ids, Exception):
                    raise ValueError(f"The prompt cannot be tokenized: {token_ids}")
                index_of[self.engine.add_request(token_ids, params)] = index
            except ValueError as error:
                known = [] if isinstance(token_ids, Exception) else list(token_ids)
                yield RequestOutput(index, -1, "", [], known, "error", error=str(error))


def _check_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        raise TypeError(f"prompts must be a list: write generate([{shorten(prompts)}]).")
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"prompts must be a list of str or of lists of ints, not {shorten(prompts)}.")
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        raise TypeError(f"prompts must be a list of prompts: write generate([{shorten(list(prompts))}]).")
    return [prompt if isinstance(prompt, str) else check_token_ids(prompt) for prompt in prompts]


def _check_params(params: Any, num_prompts: int) -> SequenceOf[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, list | tuple) or not all(isinstance(param, SamplingParams) for param in params):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, not {shorten(params)}.")
    if len(params) != num_prompts:
        raise ValueError(f"There are {num_prompts} prompts but {len(params)} sampling_params; give one, or one each.")
    return params
