"""castwise compare, from the command line: what it reads, prints, writes, refuses, and its exit codes."""

import json
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import fake_environment, fake_run, fake_spec, fake_trial
from fake_records import HOSTILE, every_kind, other_machine, poisoned, steady, stored

from castwise.records.schema import Trial
from castwise.registry.published import find_published
from castwise.spec.user_model import UserModel


def rounds(factor: float = 1.0, **machine: object) -> list[Trial]:
    trials = [steady(precision, repeat, factor) for repeat in range(3) for precision in ("fp32", "bf16-mixed")]
    return [trial.model_copy(update={"environment": fake_environment(**machine)}) for trial in trials]


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Return the records of two machines, the second of which is half as fast."""
    return stored(tmp_path / "before", rounds()), stored(tmp_path / "after", rounds(2.0, gpu="Slow GPU"))


def test_a_table_says_how_many_times_as_fast(command: CommandLine, sides: tuple[Path, Path]) -> None:
    outcome = command("compare", *sides)
    assert (outcome.code, outcome.err) == (0, "")
    said, details, *_ = outcome.out.splitlines()
    assert said == "resnet50: take bf16-mixed on both, Slow GPU is 0.50× as fast"
    assert details.startswith("Speed, Slow GPU over Fake GPU: 0.50×, geometric mean 0.50× over 2 configurations")
    assert "▼ slower" in outcome.out
    assert "\x1b[" not in outcome.out, "no colour where it is piped"
    assert "Slow GPU" in outcome.out.split("What differs")[1]


@pytest.mark.parametrize(("factor", "code"), [(2.0, 1), (1.05, 1), (1.0, 0), (0.5, 0)])
def test_fail_on_slower(command: CommandLine, tmp_path: Path, factor: float, code: int) -> None:
    before, after = stored(tmp_path / "a", rounds()), stored(tmp_path / "b", rounds(factor, torch="9.9"))
    outcome = command("compare", before, after, "--fail-on", "slower")
    assert outcome.code == code
    assert ("Slower: resnet50 fp32 batch 256" in outcome.err) == bool(code)


def test_a_margin_makes_a_slowdown_the_same(command: CommandLine, tmp_path: Path) -> None:
    before, after = stored(tmp_path / "a", rounds()), stored(tmp_path / "b", rounds(1.05, torch="9.9"))
    assert command("compare", before, after, "--fail-on", "slower", "--margin", "10%").code == 0


def test_markdown_is_for_github(command: CommandLine, sides: tuple[Path, Path]) -> None:
    text = command("compare", *sides, "--format", "markdown").out
    assert text.startswith("**resnet50: take bf16-mixed on both, ")
    assert "- ▼ resnet50 fp32 batch 256: 0.50× [0." in text
    assert "| resnet50 | fp32 | 256 |" in text
    assert "<details><summary>What differs</summary>" in text


def test_json_has_intervals_and_refusals(command: CommandLine, tmp_path: Path) -> None:
    after = [*rounds(2.0, gpu="Slow GPU"), other_machine(steady(batch_size=8))]
    folders = stored(tmp_path / "a", rounds()), stored(tmp_path / "b", after)
    document = json.loads(command("compare", *folders, "--format", "json").out)
    cell = document["cells"][0]["places"][1]
    assert (cell["verdict"], cell["verdict_text"]) == ("slower", "slower, this card")
    (means,) = document["geometric_means"]
    assert (means["machine"], means["cells"], means["ratio"]) == ("Slow GPU", 2, pytest.approx(0.5))
    assert cell["ratio"]["low"] < 0.5 < cell["ratio"]["high"]
    assert document["refused"][0]["cells"] == ["resnet50 fp32 batch 8"]
    assert len(document["slower"]) == 2


@pytest.mark.parametrize("suffix", ["html", "md", "json"])
def test_a_file_by_its_suffix(command: CommandLine, sides: tuple[Path, Path], tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"both.{suffix}"
    outcome = command("compare", *sides, "-o", output)
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith(f"{output}: ")
    assert "Slow GPU" in output.read_text()


def test_one_folder_of_two_machines_is_two_sides(command: CommandLine, tmp_path: Path) -> None:
    folder = stored(tmp_path / "both", [*rounds(), *rounds(2.0, gpu="Slow GPU")])
    assert "Slow GPU over Fake GPU: 0.50×" in command("compare", folder).out
    assert "Slow GPU over Fake GPU: 0.50×" in command("compare", "--results", folder).out
    assert "Slow GPU over Fake GPU: 0.50×" in command("compare", "fake-gpu", "slow-gpu", "--results", folder).out
    refused = command("compare", "gpu", "published:T4", "--results", folder)
    assert (refused.code, len(refused.error_lines)) == (2, 1)
    assert "'gpu' stands for 2 machines" in refused.err


def test_records_without_a_common_question_are_refused(
    command: CommandLine, sides: tuple[Path, Path], tmp_path: Path
) -> None:
    other = stored(tmp_path / "other", [other_machine(steady(batch_size=8))])
    for folders, words in {(sides[0], sides[0]): "hold the same records", (sides[0], other): "batch size"}.items():
        outcome = command("compare", *folders)
        assert (outcome.code, len(outcome.error_lines)) == (2, 1)
        assert words in outcome.err


def test_published_figures_are_a_machine(command: CommandLine, tmp_path: Path) -> None:
    runs = [fake_run(f.spec) for f in find_published("T4").figures if f.spec is not None]
    folder = stored(tmp_path / "mine", [*runs, steady()])
    outcome = command("compare", "published:T4", folder)
    assert outcome.code == 0
    assert outcome.out.startswith("Fake GPU is 0.67× to ")
    assert "diverged on T4 (published)" in outcome.out
    assert "resnet50 fp32 batch 256: no other machine has this workload" in outcome.out
    two = command("compare", "published:T4", "published:P100", "published:k80")
    assert "P100 (published) over T4 (published): 0.65× to 1.22×, geometric mean" in two.out


def test_the_chart_becomes_a_picture(command: CommandLine, sides: tuple[Path, Path], tmp_path: Path) -> None:
    outcome = command("compare", *sides, "--charts", tmp_path / "charts")
    assert (outcome.code, outcome.out) == (0, ""), outcome.err
    assert {path.name for path in (tmp_path / "charts").iterdir()} == {"ratios.svg"}
    drawing = (tmp_path / "charts" / "ratios.svg").read_text()
    assert "geometric mean" in drawing
    assert "Slow GPU over Fake GPU" in drawing


def test_prices_by_the_hour_are_of_machines_by_their_names(command: CommandLine, sides: tuple[Path, Path]) -> None:
    outcome = command("compare", *sides, "--price-hour", "GPU=4,slow gpu=1", "--price-kwh", "0.5")
    assert "Work for the same money, Slow GPU over Fake GPU, at 1 and 4 an hour: 2.00×." in outcome.out
    assert "work per" in outcome.out.split("Energy and price")[1]
    cell = json.loads(command("compare", *sides, "--price-hour", "slow=1", "--format", "json").out)["cells"][0]
    assert [place["units_per_price"] is None for place in cell["places"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["published:H100", "published:T4"], "No published GPU named 'H100'"),
        (["published:MI50", "published:T4"], "plots only"),
        (["published:T4", "published:P100", "-o", "both.pdf"], "one of .html, .md, .json."),
        (["published:T4"], "records of only one machine: T4"),
        (
            ["published:T4", "published:2080Ti"],
            "Workloads: T4 (published) has mlp-4096, mnist-cnn, wrn-28-10; RTX 2080",
        ),
        (["published:T4", "published:P100", "--price-hour", "H100=3"], "no machine here is named 'H100'"),
        (["published:T4", "published:P100", "--price-hour", "T4"], "takes NAME=PRICE"),
        (["published:T4", "published:P100", "--price-kwh", "-1"], "A price of -1 per kWh is impossible"),
        (["published:T4", "published:P100", "--fail-on", "faster"], "'faster' is not one of 'slower'"),
        (["published:T4", "published:P100", "--format", "html"], "'html' is not one of 'table', 'markdown', 'json'"),
    ],
)
def test_bad_input_is_a_line(command: CommandLine, arguments: list[str], words: str) -> None:
    outcome = command("compare", *arguments)
    assert (outcome.code, outcome.out, len(outcome.error_lines)) == (2, "", 1)
    assert words in outcome.err


def test_copies_and_files_that_are_no_records_are_named(command: CommandLine, sides: tuple[Path, Path]) -> None:
    record = next(iter(sides[0].rglob("*fp32*.json")))
    (sides[0] / "copy.json").write_bytes(record.read_bytes())
    (sides[1] / "newer.json").write_text('{"schema_version": 99}')
    outcome = command("compare", *sides)
    assert outcome.code == 0
    assert "Left out: after/newer.json: a record of schema 99" in outcome.err
    assert "Fake GPU: 1 record is a copy of another, and counted once" in outcome.out


def test_hostile_records_are_words(command: CommandLine, tmp_path: Path) -> None:
    before = stored(tmp_path / "a", [poisoned(steady(), "precision")])
    after = stored(tmp_path / "b", [poisoned(other_machine(steady()), "precision")])
    for name in ("both.html", "both.md"):
        assert command("compare", before, after, "-o", tmp_path / name).code == 0
        text = (tmp_path / name).read_text()
        assert HOSTILE not in text
        assert "<img" not in text
    assert command("compare", before, after).code == 0
    markup = stored(
        tmp_path / "c", [steady().model_copy(update={"environment": fake_environment(gpu="[bold]G[/bold]")})]
    )
    assert "[bold]G[/bold]" in command("compare", before, stored(tmp_path / "d", [steady()]), markup).out


def test_changed_code_of_a_user_model_is_reported(command: CommandLine, tmp_path: Path) -> None:
    def own(digest: str, gpu: str) -> Trial:
        model = UserModel(kind="file", path="/x/train_me.py", name="build", digest=digest)
        return fake_trial(fake_spec(workload="own:build", own=model), environment=fake_environment(gpu=gpu))

    folders = stored(tmp_path / "a", [own("1", "GPU")]), stored(tmp_path / "b", [own("2", "GPU")])
    assert "The code of own:build is not the same on all machines." in command("compare", *folders).out
    same = stored(tmp_path / "c", [own("1", "Other GPU")])
    assert "The code of" not in command("compare", folders[0], same).out


def test_every_kind_of_record_is_compared(command: CommandLine, tmp_path: Path) -> None:
    trials = every_kind()
    folders = stored(tmp_path / "a", trials), stored(tmp_path / "b", [other_machine(trial) for trial in trials])
    outcome = command("compare", *folders, "-o", tmp_path / "both.html")
    assert outcome.code == 0, outcome.err
    assert "no other machine" not in (tmp_path / "both.html").read_text()
