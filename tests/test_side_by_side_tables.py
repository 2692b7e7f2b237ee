"""The document's table of one loop on each GPU of a host at once."""

from fake_engine import fake_spec, fake_trial
from side_by_side_tables import side_by_side_table

from castwise.records.schema import Trial


def trial(uuid: str, seconds: float) -> Trial:
    made = fake_trial(fake_spec("bf16-master"), step_seconds=(seconds,) * 6)
    return made.model_copy(update={"environment": made.environment.model_copy(update={"gpu_uuid": uuid})})


def test_each_gpu_is_set_beside_the_shortest() -> None:
    text = side_by_side_table([trial("GPU-a", 0.0303), trial("GPU-b", 0.03)])
    assert text.splitlines()[-2:] == ["| GPU-a | 30.3 ms | +1.0 % |", "| GPU-b | 30.0 ms | +0.0 % |"]
