"""A trial's commands and their answers as documents, whoever carries them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from castwise.orchestrator.session import OnProgress, TrialFailedError
from castwise.records.schema import Block, Environment, Epoch, Facts, RankSamples, Resumed
from castwise.spec.frozen import FrozenModel
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel, UserWorkload

Command = dict[str, Any]
Answer = dict[str, Any]

_OPEN_TIMEOUT_SECONDS = 300.0  # torch's first import from a cold network disk has been seen to take minutes

_Document = TypeVar("_Document", bound=FrozenModel)


class _Weights(FrozenModel):
    files: dict[str, str | None]


class RpcSession(ABC):
    """The methods of a session but `open` and `close`, by what a subclass gets answered: an answer a rank.

    What is asked of the trial as a whole is rank 0's answer.
    """

    def __init__(self, timeout_seconds: float, data_dir: Path | None, commit: str | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._data_dir = data_dir
        self._commit = commit

    @abstractmethod
    def _ask(
        self, command: Command, timeout_seconds: float | None = None, on_progress: OnProgress | None = None
    ) -> list[Answer]:
        """Send a command and return each rank's answer.

        Args:
            command: The command, as rank 0 is to carry it out.
            timeout_seconds: How long it may take; None takes the session's own limit.
            on_progress: Is told of the progress of rank 0.

        Raises:
            TrialFailedError: A process failed, or did not answer in time.
        """

    @abstractmethod
    def _no_answer(self, command: Command, rank: int) -> TrialFailedError:
        """Return the failure of a rank whose answer to a command is none."""

    def _open(self, device: str) -> list[Environment]:
        """Open each rank's device ("auto": the first GPU, else the CPU) and say what they are."""
        command = {"command": "open", "device": device, "commit": self._commit}
        return self._ask_for(Environment, "environment", command, _OPEN_TIMEOUT_SECONDS)

    def check(self, workloads: Sequence[str]) -> None:
        """Make sure that the zoos named have these models."""
        self._ask({"command": "check", "workloads": list(workloads)})

    def inspect(self, model: UserModel) -> UserWorkload:
        """Run the user's code and say what is known of their model."""
        command = {"command": "inspect", "own": model.model_dump(mode="json")}
        return self._ask_for(UserWorkload, "workload", command)[0]

    def fetch(self, data_set: str, data_dir: Path) -> None:
        """Download a data set into a folder."""
        self._ask({"command": "fetch", "data_set": data_set, "data_dir": str(data_dir)})

    def find_weights(self, models: Sequence[str], where: Path | None) -> dict[str, str | None]:
        """Return the file of pretrained weights of each model of torchvision, None where it cannot be had."""
        command = {"command": "find_weights", "models": list(models), "where": str(where) if where else None}
        return self._ask_for(_Weights, "weights", command)[0].files

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        """Build model, data and optimizer; a training trial goes on from its checkpoint where there is one."""
        command: Command = {"command": "set_up", "spec": spec.model_dump(mode="json")}
        command["data_dir"] = str(self._data_dir) if self._data_dir else None
        command["checkpoint"] = str(checkpoint) if checkpoint else None
        self._ask(command)

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        """Run until the step time has settled."""
        return self._ask_for(Facts, "facts", {"command": "warm_up", "step_seconds": step_seconds})[0]

    def lead_in(self) -> None:
        """Launch the steps that lead to the next block."""
        self._ask({"command": "lead_in"})

    def run_block(self, length: int = 1) -> Block:
        """Time one block of steps, so many times as long as usual."""
        return self._ask_for(Block, "block", {"command": "run_block", "length": length})[0]

    def run_sustained(self, seconds: float) -> Block:
        """Run steps for about so many seconds at a stretch."""
        return self._ask_for(Block, "block", {"command": "run_sustained", "seconds": seconds})[0]

    def resume(self) -> Resumed:
        """Say where a training trial stands."""
        return self._ask_for(Resumed, "resumed", {"command": "resume"})[0]

    def run_epoch(self, on_progress: OnProgress | None = None) -> Epoch:
        """Train one epoch, validate, and write the checkpoint; a deadline runs from each sign of life anew."""
        return self._ask_for(Epoch, "epoch", {"command": "run_epoch"}, on_progress=on_progress)[0]

    def finish(self, weights: Path | None = None) -> tuple[RankSamples, ...]:
        """Return all that was measured, by rank, and end the processes."""
        command: Command = {"command": "finish", "weights": str(weights) if weights else None}
        return tuple(self._ask_for(RankSamples, "samples", command))

    def _ask_for(
        self,
        model: type[_Document],
        key: str,
        command: Command,
        timeout_seconds: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[_Document]:
        documents: list[_Document] = []
        for rank, answer in enumerate(self._ask(command, timeout_seconds, on_progress)):
            try:
                documents.append(model.model_validate(answer[key]))
            except (KeyError, ValueError):
                raise self._no_answer(command, rank) from None
        return documents


def command_label(command: Command) -> str:
    """Return what a command is called in messages."""
    return f"'{command['command'].replace('_', ' ')}'"
