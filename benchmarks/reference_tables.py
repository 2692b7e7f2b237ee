"""Tables of the reference pages, read off the program: commands, registries, and the record's JSON Schema."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from pydantic import BaseModel
from stored import markdown

from castwise.analysis.code_snippets import loop_code
from castwise.api import RunKeywords
from castwise.cli import listings
from castwise.cli.app import app
from castwise.records import schema
from castwise.registry.precisions import NAMED_PRECISIONS, PRECISIONS
from castwise.registry.workloads import WORKLOADS
from castwise.show.fields import Field
from castwise.show.table import markdown_grid
from castwise.spec import recipe, trial, user_model
from castwise.spec.options import RunOptions, options_of

_COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _cell(text: str) -> str:
    """Return a text as a Markdown table can hold it."""
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")


def commands(_: str) -> str:
    """Return each command with its arguments and options, as `--help` has them."""
    lines = []
    for name, command in _COMMANDS.items():
        if command.hidden:
            continue
        context = command.context_class(command, info_name=f"castwise {name}")
        usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
        lines += [f"## castwise {name}", "", command.help, "", "```", usage, "```", ""]
        parameters = [each for each in command.get_params(context) if not each.hidden and each.name != "help"]
        records = [each.get_help_record(context) for each in parameters]
        if records:
            cells = [(f"`{names}`".replace("|", "\\|"), _cell(words)) for names, words in records]
            lines += [*markdown("option or argument | meaning", "ll", cells), ""]
        if command.epilog:
            examples = [line.strip() for line in command.epilog.splitlines() if line.strip().startswith("castwise ")]
            lines += ["```sh", *(re.sub(r"  +", "  # ", line) for line in examples), "```", ""]
    return "\n".join(lines)


def listing(name: str) -> str:
    """Return what `castwise list NAME` prints."""
    grid = getattr(listings, name)()[-1]
    columns = [*grid.table.columns, *(Field(each, each) for each in grid.setting)]
    quoted = [{**row, columns[0].name: f"`{row[columns[0].name]}`"} for row in grid.table.rows]
    return "\n".join(markdown_grid(columns, quoted)) + "\n"


def sizes(_: str) -> str:
    """Return parameters and multiply-accumulates of each workload, counted on its model as built, without weights."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from castwise.trial.models import build_task

    cells = []
    for row in WORKLOADS:
        with torch.device("meta"):
            task = build_task(row)
        samples = task.make_batches(1, 2, torch.device("cpu"), torch.Generator())[0]  # batch norm needs two of them
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            task.compute_loss(task.model, tuple(part.to("meta") for part in samples))
        macs = counter.get_total_flops() // (2 * 2)
        num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
        one = f"{task.units_per_sample:,} tokens" if row.unit == "tokens" else "×".join(map(str, samples[0].shape[1:]))
        momentum = dict(row.optimizer.arguments).get("momentum")
        optimizer = row.optimizer.name + (f", momentum {momentum}" if momentum else "")
        loss = "mean squared error" if row.family == "mlp" else "cross entropy"
        one += " numbers" if row.family == "mlp" else ""
        cells.append((f"`{row.name}`", f"{num_parameters:,}", f"{macs:,}", one, loss, optimizer))
    heading = "workload | parameters | MACs per sample | one sample | loss | optimizer"
    return "\n".join(markdown(heading, "lrrlll", cells)) + "\n"


def frameworks(_: str) -> str:
    """Return what each precision is called in Lightning, Accelerate and transformers."""
    cells = []
    for row in PRECISIONS:
        names = row.frameworks
        extra = [f"`{line}`" for line in (names.setting, names.cast) if line]
        arguments = (names.lightning, names.accelerate, names.transformers)
        texts = ["–" if each is None else f"`{each}`" if each else "nothing to set" for each in arguments]
        cells.append((f"`{row.name}`", *texts, ", ".join(extra) or "–"))
    heading = "precision | Lightning: `precision` | Accelerate: `mixed_precision` | transformers | and this line"
    return "\n".join(markdown(heading, "lllll", cells)) + "\n"


def code(_: str) -> str:
    """Return the code that switches each precision on, on a GPU."""
    lines = []
    for row in (*PRECISIONS, *NAMED_PRECISIONS):
        spec = trial.TrialSpec(
            workload="resnet50",
            precision=row.name,
            loss_scale=row.loss_scale,
            batch_size=1,
            device="cuda:0",
            protocol=trial.CUDA_ROUND,
        )
        if code := loop_code(row, spec) if row.is_trained else []:
            lines += [f"### {row.name}", "", "```python", *code, "```", ""]
    return "\n".join(lines)


def keywords(_: str) -> str:
    """Return the options of `castwise run` as Python has them."""
    options = [option for option in options_of(RunOptions) if option.keyword in RunKeywords.__annotations__]
    cells = []
    for option in options:
        kind = str(RunKeywords.__annotations__[option.keyword]).replace("collections.abc.", "")
        kind = re.sub(r"<class '(\w+)'>", r"\1", kind).replace("os.", "").replace("|", "\\|")
        cells.append((f"`{option.keyword}`", f"`{kind}`", _cell(option.help)))
    return "\n".join(markdown("keyword | type | meaning", "lll", cells)) + "\n"


def record_schema() -> dict[str, Any]:
    """Return the JSON Schema of a record as files hold it; the comments of fields are their descriptions."""
    document = schema.Trial.model_json_schema(by_alias=True, mode="serialization")
    document["title"] = f"castwise record, schema version {schema.SCHEMA_VERSION}"
    for model in _models():
        definition = document if model is schema.Trial else document["$defs"].get(model.__name__, {})
        definition["description"] = inspect.cleandoc(model.__doc__ or "")
        meanings = dict(_meanings(model))
        for name, field in model.model_fields.items():
            properties = definition.get("properties", {}).get(field.serialization_alias or name)
            if properties is not None:
                properties.pop("title", None)
                properties |= {"description": meanings[name]} if name in meanings else {}
    return document


def _models() -> Iterator[type[BaseModel]]:
    for module in (schema, trial, recipe, user_model):
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, BaseModel) and value.__module__ == module.__name__:
                yield value


def _meanings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield the fields that a comment describes."""
    comments: list[str] = []
    for line in inspect.getsource(model).splitlines():
        if line.startswith("    #"):
            comments.append(line.strip(" #"))
        elif found := re.match(r"    (\w+): [^#]*(?:#\s*(.*))?$", line):
            if words := found[2] or " ".join(comments):
                yield found[1], words
            comments = []
        else:
            comments = []


def schema_tables(_: str) -> str:
    """Return the fields of a record, object by object."""
    document = record_schema()
    lines = [f"Schema version {schema.SCHEMA_VERSION}.", ""]
    for name, definition in (("Trial", document), *document["$defs"].items()):
        required = definition.get("required", ())
        cells = [
            (f"`{field}`", _type(values), "yes" if field in required else "–", _cell(values.get("description", "")))
            for field, values in definition["properties"].items()
        ]
        lines += [f"## {name}", "", definition["description"], ""]
        lines += [*markdown("field | type | required | meaning", "llll", cells), ""]
    return "\n".join(lines)


def _type(values: dict[str, Any]) -> str:
    """Return the type of a schema's property in words."""
    if "$ref" in values:
        name = values["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in values:
        return " or ".join(dict.fromkeys(map(_type, values["anyOf"])))
    if "enum" in values:
        return ", ".join(f"`{value}`" for value in values["enum"])
    if values.get("type") == "array":
        items: Iterable[dict[str, Any]] = values.get("prefixItems") or [values.get("items", {})]
        return "list of " + ", ".join(dict.fromkeys(map(_type, items)))
    if values.get("type") == "object" and isinstance(values.get("additionalProperties"), dict):
        return f"object of {_type(values['additionalProperties'])}"
    return str(values.get("const", values.get("type", "any")))


def schema_file() -> str:
    """Return the text of docs/record.schema.json."""
    return json.dumps(record_schema(), indent=1, ensure_ascii=False) + "\n"
