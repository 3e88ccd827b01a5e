"""SamplingParams: how one request's tokens are chosen and when it ends, checked on construction."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nanovllm.utils.checks import check_bool, check_float, check_int, strict_keywords

GREEDY_TEMPERATURE = 1e-10  # at or under this a row is greedy
_COLLECTIONS = (list, tuple, set, frozenset)


@strict_keywords
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request; names and defaults are vLLM's where it has them.

    Logits pass, in this order: allowed tokens, `min_tokens` and logit bias, penalties, temperature, `min_p`, `top_k`,
    `top_p`.

    Args:
        temperature: 0 (or at most 1e-10) takes the likeliest token, exactly; else logits are divided by it.
        max_tokens: Tokens to generate at most; None: up to the engine's `max_model_len`.
        ignore_eos: True: end tokens do not end the request (`stop_token_ids` still do).
        n: Completions of the prompt, at most 10,000; its prefill is computed once.
        top_k: Only the k likeliest tokens (ties kept); 0 or -1: all.
        top_p: Only the fewest tokens whose probabilities add up to this, in (0, 1].
        min_p: Only tokens with at least this share of the likeliest one's probability, 0..1.
        repetition_penalty: 1e-10..1e10; logits of tokens seen in prompt or completion are divided by it (multiplied
            if negative).
        presence_penalty: -2..2, subtracted once from each token of the completion.
        frequency_penalty: -2..2, subtracted for each occurrence in the completion.
        min_tokens: No end or stop token, and no end by a stop string, before this many tokens.
        stop: A string or strings that end the request and are cut from the text.
        stop_token_ids: Tokens that end the request.
        include_stop_str_in_output: Leave the stop string in the text.
        skip_special_tokens: Leave special tokens out of the text.
        logprobs: None, or log-probabilities of the chosen and the n likeliest tokens (raw: before all of the above).
        prompt_logprobs: The same for each prompt token; such a request uses no cached prefix.
        logit_bias: -1e15..1e15, added to the logits of these token ids.
        allowed_token_ids: Only these tokens may be chosen.
        seed: With it the request draws the same tokens whatever else runs beside it; None: from the engine's seed
            and the request's number.

    Raises:
        TypeError: Unknown keyword or a value of the wrong type.
        ValueError: A value out of range.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: str | Collection[str] | None = None
    stop_token_ids: Collection[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    seed: int | None = None
    # Derived once, since they are asked for at every step.
    is_greedy: bool = field(init=False, repr=False, compare=False)
    has_penalties: bool = field(init=False, repr=False, compare=False)
    has_filters: bool = field(init=False, repr=False, compare=False)
    has_extras: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, 0.0, 1e30)  # well within float32
        check_int("n", self.n, 1, 10_000)  # each sample holds a copy of the prompt's token ids on the host
        check_int("top_k", self.top_k, -1)
        check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        # logit_bias * repetition_penalty / temperature must stay finite in float32: inf - inf would undo every ban.
        check_float("repetition_penalty", self.repetition_penalty, 1e-10, 1e10)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name, low in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0), ("seed", -(2**63))):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, 2**64 - 1 if name == "seed" else None)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        self._settle("stop", self._check_stop())
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._settle(name, _check_ids(name, getattr(self, name)))
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids=[] is out of range: at least one token must be allowed.")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise TypeError(f"logit_bias must be a dict of token id to number, not {self.logit_bias!r}.")
            ids = _check_ids("logit_bias", list(self.logit_bias))
            values = [check_float("logit_bias value", value, -1e15, 1e15) for value in self.logit_bias.values()]
            self._settle("logit_bias", dict(zip(ids or (), values, strict=True)))
        self._settle("is_greedy", self.temperature <= GREEDY_TEMPERATURE)
        if self.is_greedy and self.n > 1:
            raise ValueError(f"n={self.n} with temperature={self.temperature} gives equal samples; use n=1.")
        self._settle(
            "has_penalties", (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        )
        filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        self._settle("has_filters", filters and not self.is_greedy)
        others = self.min_tokens or self.logit_bias or self.allowed_token_ids or self.logprobs is not None
        self._settle("has_extras", bool(self.has_penalties or self.has_filters or others))

    def _settle(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, _COLLECTIONS) or not all(isinstance(text, str) for text in stop):
            raise TypeError(f"stop must be a string or a list of strings, not {self.stop!r}.")
        if "" in stop:
            raise ValueError("stop holds an empty string, which would end every request at once.")
        return tuple(sorted(stop) if isinstance(stop, set | frozenset) else stop)  # alike in every process


def _check_ids(name: str, ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not isinstance(ids, _COLLECTIONS):
        raise TypeError(f"{name} must be a list of token ids, not {ids!r}.")
    checked = [check_int(f"{name} item", token_id, 0) for token_id in ids]
    return tuple(sorted(checked) if isinstance(ids, set | frozenset) else checked)
