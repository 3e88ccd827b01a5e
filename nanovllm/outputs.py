"""What a caller gets back: a RequestOutput a prompt, with a CompletionOutput for each of its samples."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

Logprobs = dict[int, float]  # token id -> log-probability


class _ReadsLikeDict:
    """Lets a dataclass be read as nano-vLLM's output dicts are: ``out["text"]``, ``json.dumps(dict(out))``."""

    def keys(self) -> list[str]:
        """Return the field names, so that ``dict(output)`` works."""
        return [f.name for f in fields(self)]  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict, ready for JSON."""
        return asdict(self)  # type: ignore[call-overload]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        value = getattr(self, name)
        return [sample.to_dict() for sample in value] if name == "outputs" else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()


@dataclass(frozen=True)
class CompletionOutput(_ReadsLikeDict):
    """One completion of a prompt.

    Attributes:
        index: Number of the sample, 0..n-1.
        text: The completion, without special tokens, cut before a stop string.
        token_ids: Its token ids, with the end token, or the token that completed a stop string.
        finish_reason: "stop" (end token, stop token or stop string), "length" (`max_tokens` or `max_model_len`
            reached) or "error".
        stop_reason: The stop string or stop token id that ended it; None for an end token.
        logprobs: For each token a dict of token id to log-probability, if asked for.
        error: What went wrong when `finish_reason` is "error".
        reasoning: The thinking text before the answer, in `chat` with a model that thinks.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    error: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class RequestOutput(_ReadsLikeDict):
    """One finished request. The fields of its first completion stand at the top, all of them in `outputs`.

    Attributes:
        index: Position of the prompt in its call (0 for requests added by `add_request`).
        request_id: The number that `add_request` returned; -1 for a prompt that was refused.
        prompt_token_ids: The prompt's token ids.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        prompt_logprobs: For each prompt token a dict of token id to log-probability (None for the first), if asked for.
        outputs: All completions.
    """

    index: int
    request_id: int
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    error: str | None = None
    reasoning: str | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)

    @classmethod
    def of(cls, completions: list[CompletionOutput], **fields_of_prompt: Any) -> "RequestOutput":
        """Build from completions and what belongs to the prompt."""
        first = {name: value for name, value in dict(completions[0]).items() if name != "index"}
        return cls(outputs=completions, **first, **fields_of_prompt)

    @classmethod
    def refused(cls, index: int, prompt_token_ids: list[int], error: str) -> "RequestOutput":
        """Build the output of a prompt that could not be queued."""
        completion = CompletionOutput(0, "", [], "error", error=error)
        return cls.of([completion], index=index, request_id=-1, prompt_token_ids=prompt_token_ids)
