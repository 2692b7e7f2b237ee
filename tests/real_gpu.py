"""What tests on real GPUs share: when they are skipped, and a trial in real processes."""

import pytest
import torch

from castwise.orchestrator.machine import detect_machine
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.records.schema import Trial
from castwise.registry.precisions import Hardware, Precision, why_emulated, why_unsupported
from castwise.spec.trial import TrialSpec


def on_gpus(count: int = 1) -> list[pytest.MarkDecorator]:
    """Return the marks of a module whose tests need so many CUDA devices."""
    is_missing = torch.cuda.device_count() < count
    return [pytest.mark.gpu, pytest.mark.skipif(is_missing, reason=f"needs CUDA devices: {count}")]


def skip_unsupported(row: Precision) -> None:
    """Skip a test if the first GPU has no hardware for a precision."""
    hardware = Hardware(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    reason = why_unsupported(row, hardware) or why_emulated(row, hardware)
    if reason is not None:
        pytest.skip(reason)


def measured(spec: TrialSpec) -> Trial:
    """Return a trial, in processes as a command starts them."""
    machine = detect_machine("cuda:0", None)
    (trial,) = TrialRunner(machine.engine, None, machine.environment, NullListener()).run([spec])
    return trial
