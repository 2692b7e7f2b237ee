"""Suites: every file is valid, its figures are the source's, and a mistake is named with its key."""

from pathlib import Path
from typing import Any

import pytest

from castwise.errors import UsageError
from castwise.registry.datasets import imitated_data_set, is_real
from castwise.registry.suites import SUITE_NAMES, Suite, SuiteFilter, find_suite, limit_specs, parse_suite, specs_of
from castwise.registry.technique_fit import why_unsupported

SMALL = """\
name = "mine"
title = "My loop"
source = "me"
machine = "my GPU"

[recipes.short]
epochs = 2
loader = { num_workers = 0 }

[quick.short]
stop_after = 1

[[cells]]
workloads = ["mnist-cnn"]
data_set = "mnist"
recipe = "short"
precisions = ["O0", "fp16-mixed"]
loss_scales = ["64", "dynamic"]
batch_sizes = [8]

[[published]]
gpu = "Tesla T4"
workload = "mnist-cnn"
precision = "fp32"
batch_size = 8
seconds = 1.0
"""


def specs(suite: Suite, **choice: Any) -> list[str]:
    made = specs_of(suite, device="cuda:0", choice=SuiteFilter(**choice))
    return [f"{spec.precision} {spec.loss_scale} {spec.recipe.num_epochs if spec.recipe else None}" for spec in made]


@pytest.mark.parametrize("name", SUITE_NAMES)
def test_every_suite_is_valid_and_covers_the_same_precisions_in_its_quick_form(name: str) -> None:
    suite = find_suite(name)
    assert suite.name == name
    full, quick = (specs_of(suite, device="cuda:0", choice=SuiteFilter(quick=form)) for form in (False, True))
    assert {spec.precision for spec in full} == {spec.precision for spec in quick}
    assert len({spec.key for spec in full}) == len(full) > 1
    cells = {(spec.workload, spec.precision, spec.batch_size) for spec in full}
    assert {(each.workload, each.precision, each.batch_size) for each in suite.published} <= cells
    for spec in specs_of(suite, device="cuda:0", choice=SuiteFilter(techniques=("tuned",))):
        assert spec.techniques
        assert why_unsupported(spec) is None


@pytest.mark.parametrize(("workload", "speedup"), [("mlp-4096", 2.78), ("mnist-cnn", 1.02)])
def test_the_published_speed_ups_are_the_sources(workload: str, speedup: float) -> None:
    """Source: leolui2004/tensorcore."""
    published = [each for each in find_suite("tensorcore").published if each.batch_size == 512]
    seconds = {each.precision: each.seconds or 0 for each in published if each.workload == workload}
    assert seconds["fp32"] / seconds["fp16-mixed"] == pytest.approx(speedup, abs=0.005)


def test_the_fastai_figures_are_the_notebooks_and_not_the_post_s() -> None:
    suite = find_suite("fastai-cifar100")
    figures = {(each.gpu, each.workload, each.precision): each for each in suite.published}
    assert len(figures) == len(suite.published) == 18

    def gain(gpu: str, workload: str) -> float:
        fp32, fp16 = (figures[gpu, workload, precision].seconds for precision in ("fp32", "fp16-master"))
        assert fp32 is not None
        assert fp16 is not None
        return round(fp32 / fp16, 2)

    # Source: init27/RTX-2080Ti-Vs-GTX-1080Ti-CIFAR-100-Benchmarks, 2080Ti.ipynb and 1080Ti Notebook.ipynb.
    names = [f"fastai-resnet{depth}" for depth in (18, 34, 50, 101, 152)]
    assert [gain("RTX 2080 Ti", name) for name in names] == [0.99, 1.23, 1.42, 1.48, 1.6]
    assert [gain("GTX 1080 Ti", name) for name in names[:-1]] == [1.04, 1.16, 1.24, 1.22]
    for figure in suite.published:
        assert figure.accuracy is not None
        assert figure.accuracy * 12_000 == pytest.approx(round(figure.accuracy * 12_000), abs=0.61)
        assert figure.loss_scale == ("512" if figure.precision == "fp16-master" else None)


def test_a_users_suite(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    suite = find_suite(str(path))
    assert specs(suite) == ["fp32 none 2", "fp16-mixed 64 2", "fp16-mixed dynamic 2"]
    assert specs(suite, quick=True)[0] == "fp32 none 1"
    assert specs(suite, quick=True, epochs=2)[0] == "fp32 none 2", "what the user says wins"
    assert specs(suite, epochs=5)[0] == "fp32 none 2", "a longer run would be another run"
    assert len(specs(suite, seeds=3)) == 9
    assert specs(suite, precisions=("O1",)) == ["fp16-mixed 64 2", "fp16-mixed dynamic 2"]
    with pytest.raises(UsageError, match="no run that these filters"):
        specs(suite, workloads=("resnet50",))
    whole, cut = (specs_of(suite, device="cpu", choice=SuiteFilter(epochs=n))[0].recipe for n in (2, 1))
    assert whole is not None
    assert cut is not None
    assert whole.stop_after is None, "the whole run is the same question however asked"
    assert (cut.epochs, cut.num_epochs) == (2, 1), "a run cut short keeps its schedule"
    (spec, *_) = specs_of(suite, device="cpu", choice=SuiteFilter(synthetic=True))
    assert (is_real(spec.data_set), imitated_data_set(spec.data_set)) == (False, "mnist")


def test_the_searches_for_the_largest_batch() -> None:
    searches = limit_specs(find_suite("dpn-cifar10"), device="cuda:0", choice=SuiteFilter(precisions=("fp16-master",)))
    ((spec, multiple),) = searches
    assert (spec.precision, spec.loss_scale, spec.batch_size, multiple) == ("fp16-master", "128", 128, 128)
    assert spec.recipe is not None
    assert spec.recipe.max_steps == 4


def test_validating_follows_runs_on_real_data_whose_sources_do_not() -> None:
    choice = SuiteFilter(validate=True)
    validated = {
        name: {
            spec.workload: (spec.recipe.validate_each_epoch, spec.recipe.validate_at_end)
            for spec in specs_of(find_suite(name), device="cuda:0", choice=choice)
            if spec.recipe is not None
        }
        for name in ("tensorcore", "wrn-cifar10", "dpn-cifar10")
    }
    assert validated["tensorcore"] == {"mlp-4096": (False, False), "mnist-cnn": (False, True)}
    assert validated["wrn-cifar10"] == {"wrn-28-10": (True, False)}
    assert validated["dpn-cifar10"] == {"dpn92": (False, True)}
    for spec, _ in limit_specs(find_suite("dpn-cifar10"), device="cuda:0", choice=choice):
        assert spec.recipe is not None
        assert not spec.recipe.validates, "a search is about memory"


def test_one_gpu_has_no_parallelism() -> None:
    text = SMALL.replace("batch_sizes = [8]", 'batch_sizes = [8]\nworld_sizes = [1, 2]\nparallelisms = ["dp", "ddp"]')
    made = specs_of(parse_suite(text, "x"), device="cuda:0")
    assert {(spec.world_size, spec.parallelism) for spec in made} == {(1, "none"), (2, "dp"), (2, "ddp")}
    made = specs_of(parse_suite(text, "x"), device="cuda:0", choice=SuiteFilter(techniques=("coalesced-reduce",)))
    assert {(spec.world_size, spec.techniques) for spec in made} == {(1, ()), (2, ("coalesced-reduce",))}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("epochs = 2", "epoch = 2", ["recipes.short.epoch", "not permitted"]),
        ("num_workers = 0", "num_worker = 0", ["recipes.short.loader.num_worker"]),
        ("seconds = 1.0", "second = 1.0", ["published.0.second"]),
        ("seconds = 1.0", "seconds = -1.0", ["published.0.seconds", "greater than 0"]),
        ('recipe = "short"', 'recipe = "long"', ["'long'", "not among"]),
        ("[quick.short]", "[quick.long]", ["quick.long"]),
        ('"mnist-cnn"]', '"mnist-cn"]', ["Did you mean mnist-cnn"]),
        ('"O0"', '"fp31"', ["Did you mean"]),
        ('"64"', '"many"', ["'many' is no loss scale"]),
        ("epochs = 2", "epochs = ", ["no TOML", "line 7"]),
    ],
)
def test_a_mistake_is_named_in_one_line(old: str, new: str, words: list[str]) -> None:
    assert old in SMALL
    with pytest.raises(UsageError) as caught:
        parse_suite(SMALL.replace(old, new, 1), "mine.toml")
    message = str(caught.value)
    assert message.startswith("'mine.toml'")
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_every_cell_is_run_in_every_loop() -> None:
    suite = parse_suite(SMALL, "mine.toml")
    plain = specs_of(suite, device="cuda:0")
    choice = SuiteFilter(techniques=("none", "resident-data+cuda-graph", "tuned"))
    specs = specs_of(suite, device="cuda:0", choice=choice)
    assert [spec for spec in specs if not spec.techniques] == plain
    assert [spec.techniques for spec in specs[:3]] == [
        (),
        ("resident-data", "cuda-graph"),
        ("resident-data", "channels-last", "cudnn-search"),
    ]
    assert len(specs) == 3 * len(plain)
    with pytest.raises(UsageError, match="No technique named 'fast'"):
        specs_of(suite, device="cuda:0", choice=SuiteFilter(techniques=("fast",)))


def test_a_tuned_loop_leaves_out_techniques_that_a_cell_cannot_have() -> None:
    own = '[tuned]\nmnist-cnn = "resident-data+fused-optimizer+compile+cuda-graph"\n'
    (spec, *_) = specs_of(
        parse_suite(SMALL + own, "mine.toml"), device="cuda:0", choice=SuiteFilter(techniques=("tuned",))
    )
    assert spec.techniques == ("resident-data", "compile", "cuda-graph"), "torch has no fused Adadelta"


def test_a_suite_cannot_train_a_transformer_on_text() -> None:
    text = SMALL.replace("mnist-cnn", "gpt2").replace('"mnist"', '"wikitext-2"')
    with pytest.raises(UsageError, match="No suite trains gpt2 on wikitext-2"):
        parse_suite(text, "mine.toml")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ('resnet50 = "compile"', r"\[tuned\] names 'resnet50', which none of"),
        ('mnist-cnn = "tuned+compile"', "name techniques, not sets of them"),
        ('mnist-cnn = "fast"', "No technique named 'fast'"),
    ],
)
def test_a_tuned_loop_that_cannot_be_is_refused(own: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_suite(f"{SMALL}[tuned]\n{own}\n", "mine.toml")
