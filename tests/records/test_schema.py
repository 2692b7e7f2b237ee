import json
import math

import pytest
from fake_engine import fake_environment, fake_spec, fake_trial
from fake_gpu import fake_reading

from castwise.records.schema import EnergyMeasurement, StepFlops, Trial

# What must be equal for figures to be set side by side, each with another value.
FINGERPRINTED: dict[str, object] = {
    "castwise": "9.9",
    "torch": "9.9",
    "torchvision": "9.9",
    "host": "another-host",
    "gpu": "Another Fake GPU",
    "driver": "9.9",
    "cuda": "9.9",
    "cudnn": "9",
    "num_threads": 99,
    "power_limit_watts": 300.0,
    "packed": True,
    "other_hosts": ("node2",),
}


def strictly(text: str) -> object:
    """Parse JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_trial_with_broken_numbers_survives_strict_json() -> None:
    spec = fake_spec("bf16-true", workload="wörkload", repeat=3)
    trial = fake_trial(spec, status="diverged", step_seconds=(0.1,) * 3, losses=(math.nan, math.inf, -math.inf))
    text = trial.model_dump_json(indent=1)
    strictly(text)
    again = Trial.model_validate_json(text)
    assert again.model_dump_json(indent=1) == text
    assert repr(again) == repr(trial)  # == would find no not-a-number equal to itself
    assert (again.spec.key, again.environment.fingerprint) == (spec.key, trial.environment.fingerprint)


@pytest.mark.parametrize("name", list(FINGERPRINTED))
def test_the_fingerprint_tells_machines_apart(name: str) -> None:
    assert fake_environment(**{name: FINGERPRINTED[name]}).fingerprint != fake_environment().fingerprint


def test_the_fingerprint_leaves_out_what_does_not_move_figures() -> None:
    same = fake_environment(commit=None, python="9.9", system="Linux 9.9", gpu_uuids=("GPU-0", "GPU-1"))
    assert same.fingerprint == fake_environment().fingerprint
    two_on_one_host = fake_environment(other_hosts=(fake_environment().host,))
    assert two_on_one_host.fingerprint == fake_environment().fingerprint


def test_the_nodes_of_a_trial_have_no_order_but_for_the_first() -> None:
    one, other = (fake_environment(host="node1", other_hosts=each) for each in (("node3", "node2"), ("node2", "node3")))
    assert (one.hosts, one.fingerprint) == ("node1+node2+node3", other.fingerprint)


def test_the_gpus_of_a_trial_are_as_many_from_its_device_on() -> None:
    machine = fake_environment(gpu_uuid="GPU-1", gpu_uuids=("GPU-0", "GPU-1", "GPU-2"), num_gpus=3)
    assert machine.gpus_of(fake_spec(device="cuda:1")) == {"cuda:1": "GPU-1"}
    two = fake_spec(device="cuda:1", world_size=2, parallelism="ddp")
    assert machine.gpus_of(two) == {"cuda:1": "GPU-1", "cuda:2": "GPU-2"}
    assert machine.gpus_of(fake_spec(device="cuda:2", world_size=2, parallelism="dp"))["cuda:3"] == ""
    assert fake_environment(None).gpus_of(fake_spec(device="cpu", world_size=2, parallelism="ddp")) == {}


def test_a_record_from_before_all_gpus_were_watched_has_the_first() -> None:
    readings = (fake_reading(),)
    metered = EnergyMeasurement(joules=500.0, seconds=1.0, num_ticks=10)
    trial = fake_trial(fake_spec(world_size=2, parallelism="ddp"), environment=fake_environment(gpu_uuid="GPU-0"))
    trial = trial.model_copy(update={"readings": readings, "energy_measurement": metered})
    old = json.loads(trial.model_dump_json())
    del old["environment"]["gpu_uuids"], old["metered"]["num_gpus"]
    del old["readings"][0]["num_gpus"], old["readings"][0]["whose"]
    read = Trial.model_validate_json(json.dumps(old))
    assert read == trial
    assert (read.readings[0].num_gpus, read.energy_measurement and read.energy_measurement.num_gpus) == (1, 1)
    assert read.environment.gpus_of(read.spec) == {"cuda:0": "GPU-0", "cuda:1": ""}


def test_a_renamed_field_keeps_its_first_name_in_json() -> None:
    reading = fake_reading(affected_gpus={"hw_slowdown": ("cuda:1",)})
    measured = EnergyMeasurement(joules=1.0, seconds=1.0)
    trial = fake_trial(fake_spec(), readings=(reading,))
    trial = trial.model_copy(update={"session_id": "s", "energy_measurement": measured})
    document = json.loads(trial.model_dump_json())
    assert {"sitting", "metered"} <= document.keys()
    assert "lead_steps" in document["ranks"][0]["blocks"][0]
    assert {"own"} <= document["spec"].keys()
    assert "lead_seconds" in document["spec"]["protocol"]
    assert "whose" in document["readings"][0]
    assert Trial.model_validate_json(trial.model_dump_json()) == trial


@pytest.mark.parametrize(
    ("products", "layers"), [({"attention": {"bf16": 1}}, ("batch norm", "attention")), ({}, ("batch norm",))]
)
def test_attention_is_a_layer_if_a_step_computes_it(
    products: dict[str, dict[str, int]], layers: tuple[str, ...]
) -> None:
    trial = fake_trial()
    assert trial.facts is not None
    assert trial.layers is None
    facts = trial.facts.model_copy(update={"layers": ("batch norm",)})
    rank = trial.ranks[0].model_copy(update={"flops": StepFlops(products=products)})
    assert trial.model_copy(update={"facts": facts, "ranks": (rank,)}).layers == layers
