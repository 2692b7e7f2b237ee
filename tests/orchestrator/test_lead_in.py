"""Steps that lead to a block, which are not timed, count wherever a trial's steps do."""

import math

from fake_engine import fake_trial

from castwise.analysis.steady_metrics import final_loss, step_seconds
from castwise.max_batch.render import num_steps
from castwise.orchestrator.runner import status_of
from castwise.records.schema import Block, Trial
from castwise.trial.user_model.side_effects import SideEffectWatch


def led(*losses: float, skipped: int = 0) -> Trial:
    """Return a trial with a block of 10 steps, a tenth of a second each, behind 5, for each loss."""
    blocks = tuple(
        Block(seconds=1.0, num_steps=10, lead_in_steps=5, loss=loss, loss_scale=2.0, skipped_steps=skipped)
        for loss in losses
    )
    trial = fake_trial()
    return trial.model_copy(update={"ranks": (trial.ranks[0].model_copy(update={"blocks": blocks}),)})


def test_lead_in_steps_are_trained_and_not_timed() -> None:
    trial = led(3.0, 2.0)
    assert trial.facts is not None
    assert step_seconds(trial) == 0.1
    assert final_loss(trial) == (2.0, trial.facts.warm_up_steps + 30)
    assert num_steps(trial) == trial.facts.warm_up_steps + 30


def test_divergence_counts_lead_in_steps() -> None:
    assert "30 steps after warm-up" in status_of(led(3.0, math.nan)).message
    assert "every one of 30 steps" in status_of(led(3.0, 2.0, skipped=15)).message
    assert status_of(led(3.0, 2.0, skipped=14)).status == "ok"


class Growing:
    """Memory that grows by 1,500 kB between looks."""

    def __init__(self) -> None:
        self.bytes = 0

    def current_bytes(self) -> int:
        self.bytes += 1_500_000
        return self.bytes


def test_memory_growth_counts_lead_in_steps() -> None:
    notes = []
    for lead_in_steps, steps in ((5, 10), (0, 15)):
        watch = SideEffectWatch(Growing())  # type: ignore[arg-type]
        watch.start()
        for _ in range(8):
            watch.record_block(Block(seconds=1.0, num_steps=steps, lead_in_steps=lead_in_steps, loss=1.0))
        notes.append(watch.notes())
    assert notes[0] == notes[1] != ()
