"""The document's table of the six models."""

from fake_engine import fake_spec, fake_trial
from own_tables import models
from stored import NOT_MEASURED

from castwise.records.schema import Trial


def trial(model: str, precision: str, seconds: float) -> Trial:
    spec = fake_spec(precision).model_copy(update={"workload": f"six_models.py:{model}_full"})
    return fake_trial(spec, step_seconds=(seconds,) * 6)


def test_models_stand_by_their_short_names_each_beside_its_own_float32() -> None:
    pairs = (("timm_vit", "fp32", 0.4), ("timm_vit", "bf16-mixed", 0.1), ("lightning_module", "fp32", 0.2))
    text = models([trial(*each) for each in pairs])
    assert text.startswith("batch 256")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    place = rows[0].index("speed-up")
    assert [(row[1], row[2], row[place]) for row in rows[1:]] == [
        ("timm_vit", "fp32", "1.00×"),
        ("timm_vit", "bf16-mixed", "4.00×"),
        ("lightning_module", "fp32", "1.00×"),
    ]
    assert "six_models" not in text


def test_nothing_measured_says_so() -> None:
    assert models([]) == NOT_MEASURED
