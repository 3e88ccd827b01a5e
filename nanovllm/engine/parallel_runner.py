"""ParallelRunner: rank 0 of several that share a model, and what the others run.

Every rank runs the same steps, of which rank 0 sends the flat arrays. Requests stay with rank 0, and so do sampled
tokens: each rank has them on its own device.
"""

import dataclasses
import time
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.channel import Channel
from nanovllm.engine.executor import AT_EXIT, Executor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import DecodeInput, PrefillInput, Promise, StepOutput, from_arrays, to_arrays
from nanovllm.models.config import ModelConfig
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.signals import interrupts_at_end

_SLOT_BYTES = 1 << 20  # more than the arrays of most steps, so that rank 0 need not wait for the others
_NEWS_S = 3.0  # what rank 0 waits, after a failed collective, for news of the death behind it
_BLAME_S = 1.0  # and what another rank waits before it dies too; rank 0 may notice nothing before that


class ParallelRunner(ModelRunner):
    """A model runner that has the other ranks run what it runs.

    Raises:
        ValueError: As in `ModelRunner`.
        RuntimeError: Another rank cannot start; says which, and why.
    """

    def __init__(self, config: Config, model_config: ModelConfig, folder: Path) -> None:
        size, is_cuda = config.tensor_parallel_size, config.device != "cpu"
        # Ranks on a CPU share its cores.
        self._num_threads = None if is_cuda else max(1, torch.get_num_threads() // size)
        args = config, model_config, folder.absolute(), self._num_threads  # a script that is imported may go elsewhere
        util.Finalize(self, _exit_alive, (weakref.ref(self),), exitpriority=AT_EXIT + 1)
        with self._all_or_none(BaseException, own=ValueError):
            with interrupts_at_end():
                self.executor = Executor(size, run_rank, args, slot_bytes=_SLOT_BYTES)
            tp = TensorParallel.join(0, size, self.executor.init_method, is_cuda, self.executor.check)
            self.executor.on_death = tp.close
            self.executor.check()  # for a death before that
            super().__init__(_config_of(0, config), model_config, folder, tp)
            self.executor.wait_ready()

    def run(self, seqs: SequenceOf[Sequence], is_prefill: bool) -> Promise:
        """See `ModelRunner.run`; after an error no rank can go on.

        Ctrl-C and the like wait until the step is launched, so that the ranks stay in step and the engine can go on.
        """
        self.executor.check()
        with interrupts_at_end(), self._all_or_none(BaseException), _threads(self._num_threads):
            return _CheckedPromise(super().run(seqs, is_prefill), self)

    def tell(self, command: str, step: PrefillInput | DecodeInput) -> None:
        """Send a step to the other ranks, without waiting for them."""
        self.executor.send(command, *to_arrays(step))

    def exit(self) -> None:
        """End the other ranks, then let go of weights and cache."""
        if hasattr(self, "executor"):  # not if it could not be built
            self.executor.close()
        super().exit()

    @contextmanager
    def _all_or_none(self, kind: type[BaseException], own: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """If this rank fails inside the block, end all of them, since the others would wait for it for ever.

        Args:
            kind: Errors that leave the ranks out of step.
            own: Errors, as of the checkpoint or the settings, that each rank finds by itself. Behind any other there
                may be another rank's death, which is raised instead.
        """
        try:
            yield
        except kind as error:
            if not hasattr(self, "executor"):
                raise
            try:
                if isinstance(error, Exception) and not isinstance(error, own):
                    self.executor.check(_NEWS_S if isinstance(error, ConnectionError) else 0.0)
            finally:
                self.executor.close(f"Rank 0 failed, so all ranks were stopped; make a new engine. It was: {error!r}")
                super().exit()  # ends collectives that are still under way on its device
            raise


def _exit_alive(runner_ref: "weakref.ref[ParallelRunner]") -> None:
    """End at exit what nobody has closed, as long as Python and the device can still do so in order."""
    if runner := runner_ref():
        runner.exit()


class _CheckedPromise:
    """A step's results, unless a rank died over it."""

    def __init__(self, promise: Promise, runner: ParallelRunner) -> None:
        self._promise, self._runner = promise, runner

    def wait(self) -> StepOutput:
        with self._runner._all_or_none(Exception):  # an interrupt while waiting leaves the ranks in step
            output = self._promise.wait()
            self._runner.executor.check()
            return output


def run_rank(
    rank: int, config: Config, model_config: ModelConfig, folder: Path, num_threads: int | None, channel: Channel
) -> None:
    """Be rank 1 or a further one, until rank 0 closes the channel."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    tp = TensorParallel.join(rank, config.tensor_parallel_size, channel.init_method, config.device != "cpu")
    try:
        runner = ModelRunner(_config_of(rank, config), model_config, folder, tp)
        channel.serve(_Commands(runner))
        runner.device_ops.synchronize()  # rank 0 may still be waiting for what this one's steps send
    except ConnectionError:
        time.sleep(_BLAME_S)  # the rank that died first is to be blamed
        raise
    runner.exit()


class _Commands:
    """The commands that rank 0 sends: `ModelRunner`'s methods, on arrays."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @torch.inference_mode()
    def run_prefill(self, *arrays: np.ndarray | None) -> None:
        with self._runner.device_ops.active():
            self._runner.run_prefill(from_arrays(PrefillInput, arrays))

    @torch.inference_mode()
    def run_decode(self, *arrays: np.ndarray | None) -> None:
        with self._runner.device_ops.active():
            self._runner.run_decode(from_arrays(DecodeInput, arrays))


def _config_of(rank: int, config: Config) -> Config:
    return config if config.device == "cpu" else dataclasses.replace(config, device=f"cuda:{rank}")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Have torch use so many threads inside the block; None: as many as it does."""
    previous = torch.get_num_threads()
    if number is None or number == previous:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
