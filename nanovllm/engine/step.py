"""One step's way to the device and back: flat arrays in, a promise of tokens out."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import Logprobs


@dataclass(frozen=True)
class PrefillInput:
    """One prefill step as flat arrays; the fields of `Context` have their meaning there.

    Attributes:
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        logits_indices: [num_rows] int64, the tokens after which one is sampled.
        temperatures: [num_rows] float32.
        keys: [num_rows, 2] int64, low and high half of each request's key.
        output_positions: [num_rows] int64, tokens of each completion before this one.
        sample_indices: [num_rows] int64.
        block_copies: [num_copies, 2] int64, source and target of KV blocks to copy after the forward.
        prompt_slices: [num_slices, 2] int64, first token and number of tokens whose logits prompt logprobs need.
        has_extras: Whether a row needs more than temperature.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray | None
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    logits_indices: np.ndarray
    temperatures: np.ndarray
    keys: np.ndarray
    output_positions: np.ndarray
    sample_indices: np.ndarray
    block_copies: np.ndarray | None = None
    prompt_slices: np.ndarray | None = None
    has_extras: bool = False


@dataclass(frozen=True)
class DecodeInput:
    """What the device does not know yet of a decode step; the rest it has kept from the last one (see `DecodeState`).

    Attributes:
        num_rows: Sequences in the step.
        order: [num_rows] int32, lane of each row; None: as in the last step.
        new_rows: [num_new, 1 + NUM_FIELDS] int32, lane and fields of each row that came; a negative input id -1 - i
            stands for the token that the last step sampled in its row i, which need not be known here.
        new_tables: [num_new, width] int32, their block tables.
        new_blocks: [num_blocks, 3] int32, lane, index and block of each block appended to a table.
        has_extras: Whether a row needs more than temperature.
    """

    num_rows: int
    order: np.ndarray | None
    new_rows: np.ndarray
    new_tables: np.ndarray
    new_blocks: np.ndarray
    has_extras: bool = False

    @property
    def parts(self) -> list[np.ndarray]:
        """The arrays in the order in which `packet` has them."""
        order = np.empty(0, np.int32) if self.order is None else self.order
        return [order, self.new_rows, self.new_tables, self.new_blocks]

    @property
    def packet(self) -> np.ndarray:
        """All of it as one array, to be uploaded at once."""
        return np.concatenate([part.ravel() for part in self.parts])


Input = TypeVar("Input", PrefillInput, DecodeInput)


def to_arrays(step: PrefillInput | DecodeInput) -> list[np.ndarray | None]:
    """Return a step's fields in order, as they travel to other ranks; numbers become arrays without dimensions."""
    values = [getattr(step, field.name) for field in fields(step)]
    return [None if value is None else np.asarray(value) for value in values]


def from_arrays(kind: type[Input], arrays: SequenceOf[np.ndarray | None]) -> Input:
    """Undo `to_arrays`."""
    values: list[Any] = [array if array is None or array.ndim else array.item() for array in arrays]
    return kind(*values)


class StepOutput(NamedTuple):
    """What a step yields, one entry for each of its sequences.

    Attributes:
        token_ids: The sampled token, None where none was sampled.
        logprobs: The token's log-probabilities, where asked for; None if nobody asked.
        prompt_logprobs: Those of the prompt tokens that the step's chunk predicts, likewise.
    """

    token_ids: list[int | None]
    logprobs: list[Logprobs | None] | None = None
    prompt_logprobs: list[list[Logprobs]] | None = None


class Promise(Protocol):
    """A step's results, which may still be on their way; `wait` returns them once they are known."""

    def wait(self) -> StepOutput: ...  # noqa: D102


# A copy to the host under way: waits for it and returns the tensors as lists.
HostTensors = Callable[[], tuple[Any, ...]]


@dataclass
class PendingStep:
    """A launched step whose results are on the device: a promise that `wait` redeems.

    Attributes:
        seqs: The step's sequences.
        rows: For each of them its row in `tokens`, or None if nothing was sampled for it.
        tokens: [num_rows].
        logprobs: Ids and values [L, 1 + n] of the rows that asked, as from `top_logprobs`, in order of rows.
        prompt_logprobs: The same for prompt tokens, a list of slices by index of the sequence.
    """

    seqs: SequenceOf[Sequence]
    rows: SequenceOf[int | None]
    tokens: HostTensors
    logprobs: HostTensors | None = None
    prompt_logprobs: dict[int, list[HostTensors]] | None = None

    def wait(self) -> StepOutput:
        """Return the results, after the device has computed them."""
        (tokens,) = self.tokens()
        token_ids = [None if row is None else tokens[row] for row in self.rows]
        logprobs: list[Logprobs | None] | None = None
        if self.logprobs is not None:
            wanted = [(row, i) for i, row in enumerate(self.rows) if row is not None]
            wanted = sorted((row, i) for row, i in wanted if self.seqs[i].sampling_params.logprobs is not None)
            logprobs = [None] * len(self.seqs)
            for (_, i), entry in zip(wanted, zip(*self.logprobs(), strict=True), strict=True):
                logprobs[i] = _entry(entry, self.seqs[i].sampling_params.logprobs or 0)
        prompt_logprobs: list[list[Logprobs]] | None = None
        if self.prompt_logprobs is not None:
            prompt_logprobs = [[] for _ in self.seqs]
            for i, slices in self.prompt_logprobs.items():
                num = self.seqs[i].sampling_params.prompt_logprobs or 0
                for wait in slices:
                    prompt_logprobs[i] += [_entry(entry, num) for entry in zip(*wait(), strict=True)]
        return StepOutput(token_ids, logprobs, prompt_logprobs)


def _entry(ids_and_values: tuple[list[int], list[float]], num: int) -> Logprobs:
    ids, values = ids_and_values
    return dict(zip(ids[: 1 + num], values[: 1 + num], strict=True))
