"""Techniques that a script's own loop is given from outside: on its model, its optimizers and its loaders."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from castwise.apply.techniques.batch_layout import prepare_inputs
from castwise.apply.techniques.compile import check_compiler
from castwise.apply.techniques.optimizer_state import keep_state_in, state_written
from castwise.errors import TechniqueError
from castwise.registry.techniques import PLAIN, rows_of, step_config_of
from castwise.spec.recipe import Recipe
from castwise.trial.script.replacing import replaces


class ScriptTechniques:
    """What is changed in the objects that a script makes."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.config = step_config_of(names) if names else PLAIN
        self._names = names
        self._has_changed_loader = False
        self._has_state = False  # whether an optimizer keeps it in fewer bits
        self._refusal: TechniqueError | None = None  # why another does not
        self._has_arguments = False  # whether the script gives an optimizer these itself
        if self.config.compile_mode is not None:
            check_compiler(device)
        self._has_changed_wrapper = False
        if self.config.loader_workers or self.config.pinned_transfer:
            self._change_loaders()
        if self.config.optimizer_state:
            check_compiler(device)
            replaces(Adam, "__init__")(self._keep_state)  # as soon as one is made: schedulers keep its step
        if self.config.ddp_arguments or self.config.reduces_in_bf16:
            self._change_wrapper()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return that one of several optimizers stays as it is."""
        return (f"{self._refusal}. It keeps a plain state",) if self._has_state and self._refusal else ()

    def _refuse(self, setting: str, why: str) -> None:
        name = next(row.name for row in rows_of(self._names) if setting in row.settings)
        raise TechniqueError(f"{name} finds nothing to do: {why}")

    def change_model(self, model: nn.Module) -> None:
        """Change a model during its first forward pass; the second one runs with all changes."""
        config, weights = self.config, [each for each in model.parameters() if each.dim() == 4]
        if config.channels_last:
            if all(each.is_contiguous(memory_format=torch.channels_last) for each in weights):
                self._refuse("channels_last", "the script's model has no convolution in another layout")
            model.to(memory_format=torch.channels_last)
            prepare_inputs(model, config)
        if config.fp16_accumulation:
            if torch.backends.cuda.matmul.allow_fp16_accumulation:
                self._refuse("fp16_accumulation", "the script has it")
            torch.backends.cuda.matmul.allow_fp16_accumulation = True
        if config.cudnn_search:
            if torch.backends.cudnn.benchmark or not weights:
                self._refuse("cudnn_search", "the script has it, or no convolution")
            torch.backends.cudnn.benchmark = True
        if config.compile_mode is not None:
            if isinstance(model, OptimizedModule) or model._compiled_call_impl is not None:
                self._refuse("compile_mode", "the script compiles its model")
            # Not the module: castwise's hooks on it stay outside.
            model.forward = torch.compile(model.forward, mode=config.compile_mode)

    def change_optimizer(self, optimizer: Optimizer, defaults: dict[str, Any]) -> None:
        """Change the defaults of an optimizer like torch's, such as `fused`, while it is made."""
        wanted = dict(self.config.optimizer_arguments)
        if wanted and {"fused", "foreach"} <= defaults.keys():
            self._has_arguments |= all(map(defaults.get, wanted))
            defaults |= {"fused": None, "foreach": None, **wanted}
            optimizer._step_supports_amp_scaling = "fused" in wanted  # type: ignore[attr-defined]  # as torch's set it

    def _keep_state(self, make: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Let an Adam keep its state in fewer bits, or an AdamW, which is made as one."""
        make(optimizer, *args, **kwargs)
        if type(optimizer) in (Adam, AdamW):
            try:
                keep_state_in(optimizer, self.config.optimizer_state)
                self._has_state = True
            except TechniqueError as error:
                self._refusal = error

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that did not take the arguments."""
        if self.config.optimizer_state and not self._has_state:
            if self._refusal is not None:
                raise self._refusal
            written, is_adam = state_written(optimizer), isinstance(optimizer, Adam)
            why = "is a subclass of torch's Adam" if is_adam else "is no Adam of torch's"
            why = f"keeps its state in {written} already" if written else why
            self._refuse("optimizer_state", f"the script steps {type(optimizer).__name__}, which {why}")
        for name, _ in self.config.optimizer_arguments:
            if self._has_arguments or not optimizer.defaults.get(name):
                kind = type(optimizer).__name__
                self._refuse("optimizer_arguments", f"the script has it, or there is no such {kind} in torch.optim")

    def check_found(self) -> None:
        """Refuse a script without a loader or a wrapper to change."""
        if (self.config.loader_workers or self.config.pinned_transfer) and not self._has_changed_loader:
            setting = "loader_workers" if self.config.loader_workers else "pinned_transfer"
            self._refuse(setting, "the script makes no DataLoader that lacks it")
        if (self.config.ddp_arguments or self.config.reduces_in_bf16) and not self._has_changed_wrapper:
            setting = "ddp_arguments" if self.config.ddp_arguments else "reduces_in_bf16"
            self._refuse(setting, "the script makes no DistributedDataParallel that lacks it")

    def _change_wrapper(self) -> None:
        signature, wanted = inspect.signature(DistributedDataParallel.__init__), dict(self.config.ddp_arguments)

        @replaces(DistributedDataParallel, "__init__")
        def wrapping(wrap: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            before = {name: given.arguments.get(name) for name in wanted}
            given.arguments |= wanted
            wrap(*given.args, **given.kwargs)
            if self.config.reduces_in_bf16:
                given.arguments["self"].register_comm_hook(None, bf16_compress_hook)
            self._has_changed_wrapper |= self.config.reduces_in_bf16 or before != wanted

    def _change_loaders(self) -> None:
        signature = inspect.signature(DataLoader.__init__)
        wanted = self.config.recipe(Recipe(epochs=1)).loader

        @replaces(DataLoader, "__init__")
        def making(make: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            named, is_iterable = given.arguments, isinstance(given.arguments["dataset"], IterableDataset)
            # Each worker would read all of an iterable data set.
            if self.config.loader_workers and not is_iterable and (named.get("num_workers") or 0) < wanted.num_workers:
                ahead = wanted.prefetch_batches
                # Not persistent: workers see how the script changes its data set between epochs.
                named |= {"num_workers": wanted.num_workers, "prefetch_factor": ahead}
                self._has_changed_loader = True
            if self.config.pinned_transfer and not named.get("pin_memory"):
                named["pin_memory"] = self._has_changed_loader = True
            make(*given.args, **given.kwargs)

        if self.config.pinned_transfer:
            for name in ("to", "cuda"):
                replaces(Tensor, name)(_not_blocking)


def _not_blocking(method: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Let a method copy from page-locked memory while the host goes on."""
    is_asked = "non_blocking" in kwargs or any(isinstance(each, bool) for each in args)
    if tensor.device.type == "cpu" and not is_asked and not torch.compiler.is_compiling() and tensor.is_pinned():
        kwargs["non_blocking"] = True
    return method(tensor, *args, **kwargs)
