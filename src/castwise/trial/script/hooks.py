"""Hooks in a script's process: its steps, its model, its losses, and how long it waits for its data.

What a model would carry into a copy or a file of its own is a plain function of this module.
"""

import functools
import inspect
import os
import re
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function
from torch.utils.data import dataloader
from torch.utils.hooks import RemovableHandle

from castwise.apply.pytree import tree_map_tensors, tree_tensors
from castwise.errors import UsageError
from castwise.registry.precisions import AS_WRITTEN
from castwise.trial.kernel_profile import mark
from castwise.trial.memory import without_storage
from castwise.trial.script.autocast import HALVES
from castwise.trial.script.others import OtherOptimizers
from castwise.trial.script.policies import is_kerass
from castwise.trial.script.precision import ScriptPrecision
from castwise.trial.script.replacing import on_import, replace_copies_in_libraries, replaces
from castwise.trial.script.scaling import weights_of
from castwise.trial.script.techniques import ScriptTechniques
from castwise.trial.trace_summary import CLOSURE_RANGE, UPDATE_RANGE
from castwise.trial.user_model.source import calling_line, is_own, is_users

_STRATEGIES = {"lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy"}  # Lightning's, by name
# Where samples are seen, the best first.
_SOURCES = {
    "loader": "the DataLoader's",
    "model": "the first dimension of the model's input",
    "compiled": "the first dimension of a compiled function's input",
}
_FEWEST_CALLS = 10  # of a model before the first step, without gradients: fewer are no rollout; chosen here
_UPDATES = 3  # changes of weights without an optimizer's step; a script may change them once or twice by itself
_NUM_WATCHED = 8  # of the weights, and of each one's values
_MANY_VALUES = 1_000_000  # of an output, whose copy in float32 would take time and memory
_LOSSES = [name for name in dir(nn.functional) if name.endswith("_loss")]
_LOSSES += ["binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "kl_div"]
_MOST_STEPS_OF_OTHERS = 2_000  # until the first optimizer's next step; chosen here
_FORWARD = ("forward", "_call_impl")  # of a module, around which its hooks run
_installed: list["ScriptHooks"] = []  # one at the most
_Calls = dict[tuple[int, int], tuple[Callable[[], Tensor | None], bool, int, int]]


class ScriptHooks:
    """What the hooks have seen of a script, to which they apply a precision and techniques.

    They call `after_step` after each step of the script's first optimizer, in the script's thread.
    """

    def __init__(
        self, precision: ScriptPrecision, techniques: ScriptTechniques, after_step: Callable[[], None]
    ) -> None:
        self.precision, self.techniques = precision, techniques
        self.models: list[nn.Module] = []  # the outermost modules that it trains
        self.optimizers = precision.optimizers
        self._others = OtherOptimizers(
            self.optimizers, precision.scaling, functools.partial(self.after_step, was_skipped=True)
        )
        self._num_looks: Counter[int] = Counter()  # at modules for whose weights an optimizer was looked for
        self.stepped: list[Optimizer] = []  # those that have stepped; the first one counts the steps
        self.steps_of_others = 0  # since the first one's last
        self.data_seconds = 0.0  # in which the script waited for its loaders
        self.num_prefetched = 0  # batches that a loader's workers may prepare while the script waits; 0 without workers
        self.uses_loader = False
        self.loss: Tensor | None = None  # of the last backward
        self.skipped_steps: int | Tensor = 0  # of the first optimizer; on the device if it skips them there
        self._after_step = after_step
        # Samples that were trained on, and the values of their tensors, by where they were seen: a model by its number.
        self._trained_on = defaultdict[str | int, list[int]](lambda: [0, 0])
        self._trained_data: set[int] = set()  # data sets of loaders with batches that an optimizer stepped for
        # Batches of others since the last step, and those that may come to count with the next change of mode.
        self._unsure: list[tuple[int, int, int]] = []  # each with its data set, samples and values
        self._left_out: list[tuple[int, int, int]] = []
        self.num_tokens = self.num_padding = 0  # that the masks of batches mark, and those that they do not
        self._has_graphs = False  # whether a batch has said of how many graphs it is
        self._samples = Counter[str | int]()  # of this step, by where they were seen
        self._samples_of_steps: list[Counter[str | int]] = []
        self._inputs: dict[int, Any] = {}  # of models that run, by number
        # What models were trained on, by their number and their first argument's id: that argument, whether the last
        # step had it, samples and values.
        self._calls, self._last_calls = _Calls(), _Calls()  # of this step and the last one
        self._known: set[int] = set()  # modules of the models, and others without weights
        self._always: WeakSet[nn.Module] = WeakSet()  # those with the precision in evaluations, too, and their parts
        self._around_prepared: WeakSet[nn.Module] = WeakSet()  # models with a part that Accelerate has prepared
        self._parts: WeakSet[nn.Module] = WeakSet()  # of models, which the script also calls by themselves
        self._fed: WeakSet[nn.Module] = WeakSet()  # models whose outputs, but for a loss, losses were computed from
        self._trained_in_eval: nn.Module | None = None  # the first model, if that is in evaluation mode
        self._is_looking = True
        self._known_late: WeakSet[Optimizer] = WeakSet()  # optimizers that first stepped after that, or were replaced
        self._late: list[str] = []  # those of them that have weights which none had stepped
        self._has_noted_loss = False
        self._has_backward = False
        self._has_stepped = False  # whether an optimizer's own step has begun since a GradScaler's
        self._num_stepping = 0  # steps under way: a subclass's may call its base's, and a wrapper's another optimizer's
        self._watched: list[list[float]] = []  # values of weights at the last backward, until an optimizer steps
        self._num_updates = 0  # how often they had changed
        self._untrained: dict[int, nn.Module] = {}  # modules in training before there was an optimizer of torch.optim
        self._followed: set[object] = set()  # Lightning's modules, and classes with calls of their own
        # Modules that were called without gradients before the first step, and when.
        self._called_without: dict[int, tuple[nn.Module, list[float]]] = {}
        self.seconds_before_steps = 0.0  # in which one of them that is trained was, again and again
        self._is_profiled = False
        self._left_with: nn.Module | None = None  # the model whose forward pass ends autocast
        self._without_weights = WeakSet[nn.Module]()  # modules that are called outside models, such as losses
        self._is_elsewhere = False  # whether this is a process that the script has forked
        os.register_at_fork(after_in_child=lambda: setattr(self, "_is_elsewhere", True))
        self._model_hooks: list[RemovableHandle] = []
        self._input_hooks: list[RemovableHandle] = []
        _installed.append(self)
        self._finders = [register_module_forward_pre_hook(hook) for hook in (_find_model, _widen_inputs)]
        untraced: Any = torch.compiler.disable  # a script that compiles its step would compile it anew after each
        register_optimizer_step_pre_hook(untraced(self.before_step))
        register_optimizer_step_post_hook(untraced(self.after_step))
        self._note_losses()
        self._replace_methods()
        self._follow_fabric()
        if precision.row.autocast_dtype is not None:
            replaces(torch.utils.checkpoint, "checkpoint")(_run_checkpoint)
        replace_copies_in_libraries()

    def have_more(self, *optimizers: Optimizer) -> bool:
        """Return whether optimizers have weights that none had stepped in warm-up, such as a generator's."""
        stepped = set(map(id, weights_of(*self.stepped)))
        return not stepped.issuperset(map(id, weights_of(*optimizers)))

    def _follows_first(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is of the first one's kind and for its weights: the script made it anew."""
        is_with_first = len(self._samples_of_steps) < 2  # it steps beside that one, or another is made for each step
        if is_with_first or optimizer in self.stepped or optimizer in self._known_late:
            return False
        both = ((type(each).__name__, set(map(id, weights_of(each)))) for each in (self.stepped[0], optimizer))
        return next(both) == next(both)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the row's figures lack."""
        late = [] if self.precision.row.name == AS_WRITTEN else self._late
        note = "the first step of its {} came after warm-up: what that trains stayed as written. Raise --warm-up"
        return (*self.precision.notes, *self.techniques.notes, *map(note.format, late))

    @property
    def model(self) -> nn.Module:
        return self.models[0] if self.models else nn.Module()

    def stop_looking(self) -> None:
        """Look for no further models and batches: it costs time in each module's call."""
        self._is_looking = False
        self.precision.stop_checking()
        if num_graphs():
            return  # without hooks torch.compile compiles modules anew, and compiled ones have few calls
        for finder in self._finders:
            finder.remove()
        for hook in self._input_hooks if not self.precision.weights.has_cast else ():
            hook.remove()
        row, is_counted = self.precision.row, self._trained_on["loader"][0]  # else by the model's calls
        if row.autocast_dtype is None and not row.master_weights and is_counted:
            for hook in self._model_hooks:
                hook.remove()

    @contextmanager
    def within_ranges(self) -> Iterator[None]:
        """Run the optimizers' steps within a profiler's range.

        The profile may begin and end within a step, in which torch's own range is cut off.
        """
        self._is_profiled = True
        with ExitStack() as stack:
            for optimizer in self.stepped:
                for hook in mark(UPDATE_RANGE, optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
                    stack.callback(hook.remove)
            yield
        self._is_profiled = False

    @property
    def samples_seen(self) -> dict[str, float]:
        """Return the samples of a step by where they were seen, the best first: what loaders gave, or models took.

        They are a mean of all steps but the first, before which a script may look at a batch.
        """
        steps = self._samples_of_steps[1:] or self._samples_of_steps
        sources = list(_SOURCES.items())[: 1 if self._has_graphs else None]  # a model's input is their nodes
        keys = {name: self._counted if key == "model" else key for key, name in sources}
        means = {name: sum(step[key] for step in steps) / max(1, len(steps)) for name, key in keys.items()}
        return {name: mean for name, mean in means.items() if mean}

    @property
    def _counted(self) -> int:
        """Return the number of the first model that each step trains on: not of an actor, if its critic has more."""
        steps = self._samples_of_steps[1:]
        return next((i for i in range(len(self.models)) if steps and all(step[i] for step in steps)), 0)

    @property
    def trained_on(self) -> tuple[int, int]:
        """Return the samples that the script has trained on, and the values of its batches: its loaders', if any."""
        samples, values = self._trained_on["loader" if self._trained_on["loader"][0] else self._counted]
        return samples, values

    def find_model(self, module: nn.Module, args: Any) -> None:
        """Keep a module that is called while no other is, and is trained: an optimizer has weights of it."""
        is_scripted = isinstance(module, torch.jit.ScriptModule)  # by torch.jit: it takes no hooks of its own
        if is_scripted and any(module is model for model in self.models):
            self.enter_model(module, args)
        if self._is_elsewhere:
            return
        if id(module) in self._known:
            self._find_part(module, args)
            return
        if next(module.parameters(), None) is None:
            self._take_without_weights(module, is_scripted=is_scripted)
        elif (self._trains(module) or self._finds_optimizer(module)) and (module.training or not self.models):
            self._take_model(module, is_scripted=is_scripted)
            self.enter_model(module, args)
        else:
            if module.training and torch.is_grad_enabled() and not self.optimizers:
                self._untrained[id(module)] = module
            if not torch.is_grad_enabled() and not self.stepped:
                self._called_without.setdefault(id(module), (module, []))[1].append(time.perf_counter())
            self.precision.weights.keep_teacher(module)
            self._find_teacher(module, args, is_scripted=is_scripted)
        is_without_weights = module in self._without_weights
        if is_without_weights or (self.precision.weights.prepare_model(module) and not is_scripted):
            # The next global hook gets its keyword arguments, too.
            module._forward_pre_hooks_with_kwargs[self._finders[-1].id] = True

    def widen_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast the inputs of a module's first call, before it has a hook of its own; of a model's, of further ones."""
        if module in self._without_weights:
            is_first = module._forward_pre_hooks_with_kwargs.pop(self._finders[-1].id, False)
            return self.enter_without_weights(module, args, kwargs) if is_first else None
        is_outermost = id(module) not in self._known or any(module is model for model in self.models)
        return self.precision.weights.widen_inputs(args, kwargs) if is_outermost else None

    def _run_checkpoint(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a checkpoint in castwise's autocast: it computes again in what was around it, not within."""
        if self.precision.autocast.is_on or not torch.is_grad_enabled() or any(map(_is_prepared, self.models)):
            return compute(*args, **kwargs)
        with self.precision.autocast.around() as has_begun:
            output = compute(*args, **kwargs)
        wide = tree_map_tensors(lambda each: each.float() if each.dtype in HALVES else each, output)
        return wide if has_begun else output

    def _find_part(self, module: nn.Module, args: Any) -> None:
        """Let a part of a model that the script calls by itself compute in autocast, as around all calls by hand."""
        autocast = self.precision.autocast
        if autocast.is_on or autocast.has_own or self.precision.row.autocast_dtype is None or self._around_prepared:
            return
        is_known = module in self._always or module in self._parts or any(module is model for model in self.models)
        has_weights = next(module.parameters(), None) is not None  # else it is a loss: `enter_without_weights`
        is_recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in its own autocast
        takes_hooks = module._compiled_call_impl is None and not isinstance(module, torch.jit.ScriptModule)
        if module.training and has_weights and takes_hooks and not is_known and not is_recomputed:
            self.enter_model(module, args)
            if self._left_with is module:
                self._parts.add(module)
                self._hook(module)

    def _hook(self, module: nn.Module) -> None:
        self._model_hooks.append(module.register_forward_pre_hook(_enter_model, with_kwargs=True))
        self._model_hooks.append(module.register_forward_hook(_leave_model, always_call=True))

    def _take_model(self, module: nn.Module, *, is_scripted: bool) -> None:
        """Hook a model that the script trains, and change it as the precision and the techniques want."""
        self._trained_in_eval = self._trained_in_eval if module.training else module
        # Keras' layers are not all among a model's modules.
        self._known.update(map(id, [*module.modules(), *getattr(module, "_flatten_layers", list)()]))
        self.precision.check_model(module)
        self.techniques.change_model(module)
        self.models.append(module)
        if is_scripted:
            return
        if self.precision.weights.has_widened(module):
            hook = module.register_forward_pre_hook(_widen_inputs, prepend=True, with_kwargs=True)
            self._input_hooks.append(hook)
        takes_hooks = module._compiled_call_impl is None  # else they would be compiled
        if takes_hooks:
            self._hook(module)
        if takes_hooks and self.precision.row.name == AS_WRITTEN and _is_prepared(module):
            # Its parts are called in its own autocast, which `enter_model` notes.
            self._input_hooks += [part.register_forward_pre_hook(_enter_model) for part in module.children()]
        if self.precision.row.autocast_dtype is None:
            return
        prepared = [part for part in module.modules() if _is_prepared(part)]
        # Evaluation may go past a wrapper such as DistributedDataParallel.
        parts = [part for wrapped in prepared for part in (wrapped, *wrapped.children()) if part is not module]
        self._always.update([*prepared, *parts])
        for part in parts:
            _surround(part)
        if prepared and module not in prepared:  # it computes the loss of one that is: not in autocast
            self._around_prepared.add(module)

    def _trains(self, module: nn.Module) -> bool:
        """Return whether an optimizer has weights of a module, which may be in evaluation mode for its norms."""
        weights = list(module.parameters())
        if not all(isinstance(weight, nn.Parameter) for weight in weights):  # `torch.func` calls it with others
            return torch.is_grad_enabled()
        trained = {id(weight) for weight in weights if weight.requires_grad}
        return torch.is_grad_enabled() and not trained.isdisjoint(map(id, weights_of(*self.optimizers)))

    def _finds_optimizer(self, module: nn.Module) -> bool:
        """Return whether one that is none of torch.optim's has weights of a module; one may be made at any time."""
        if self.stepped or not torch.is_grad_enabled():
            return False
        count = self._num_looks[id(module)]
        self._num_looks.update(map(id, module.modules()))
        if not count & (count + 1):  # call 1, 2, 4, 8 and so on, of it or with it
            self._others.find(module.parameters())
        return self._trains(module)

    def _find_teacher(self, module: nn.Module, args: Any, *, is_scripted: bool) -> None:
        """Let a module that no optimizer trains, such as a frozen encoder, have the precision in its forward passes."""
        if self.precision.row.autocast_dtype is None or is_scripted or module in self._always:
            return
        trained = set(map(id, weights_of(*self.optimizers)))
        is_frozen = not module.training or not any(weight.requires_grad for weight in module.parameters())
        if trained and is_frozen and trained.isdisjoint(map(id, module.parameters())):
            self._always.update(module.modules())
            _surround(module)
            self.enter_model(module, args)

    def enter_model(self, module: nn.Module, args: Any) -> None:
        self.precision.before_forward()
        is_trained = module.training or module is self._trained_in_eval
        is_counted = self._is_looking or not self._trained_on["loader"][0]
        if is_trained and is_counted and torch.is_grad_enabled():
            number = next((i for i, model in enumerate(self.models) if model is module), None)
            if number is not None:
                self._inputs[number] = args
                if isinstance(module, torch.jit.ScriptModule):  # which nothing tells of its output
                    self._note_call(module, None)
        if is_kerass(module):  # it has its policy
            narrow = self.precision.row.autocast_dtype
            self.precision.autocast.has_been_on |= narrow is not None and getattr(module, "compute_dtype", "") == narrow
            return
        if self._is_in_autocast(module, is_trained=is_trained) and self.precision.autocast.enter():
            self._left_with = module

    def _note_call(self, module: nn.Module, output: Any) -> None:
        """Count what a model was called with, as soon as gradients come back: a policy that acts gets none."""
        number = next((i for i in self._inputs if self.models[i] is module), None)
        if number is None:
            return
        args = self._inputs.pop(number)
        tensors, num_samples = tree_tensors(args), _num_samples_of_call(args)
        given = getattr(tensors[0], "castwise_source", tensors[0]) if tensors else None  # Fabric casts it in each call
        num_values, key = sum(tensor.numel() for tensor in tensors), (number, 0 if given is None else id(given))
        first = _nothing if given is None else ref(given)  # an output that stays would keep it
        if self._is_looking and not self.uses_loader and not number:
            self._note_padding(args)
        handles = list[RemovableHandle]()

        def note(_: Any = None) -> None:
            while handles:  # of a model's several outputs
                handles.pop().remove()
            # Sharpness-aware minimisation calls it twice.
            if not _has(self._calls, key, first()):
                self._calls[key] = first, _has(self._last_calls, key, first()), num_samples, num_values
                self._count(number, num_samples, num_values)

        outputs = [tensor for tensor in tree_tensors(output) if tensor.requires_grad]
        # Of these no hook is called.
        if not outputs or any(isinstance(each, FakeTensor) or is_functorch_wrapped_tensor(each) for each in outputs):
            note()
        else:
            handles += [tensor.register_hook(note) for tensor in outputs]  # type: ignore[no-untyped-call]

    def _take_back(self) -> None:
        """Take back calls with what the last step had, beside new ones: its actor was trained after the critic."""
        new = {number for (number, _), (_, is_again, *_) in self._calls.items() if not is_again}
        for (number, _), (_, is_again, num_samples, num_values) in self._calls.items():
            if is_again and number in new:
                self._count(number, -num_samples, -num_values)

    def _is_in_autocast(self, module: nn.Module, *, is_trained: bool) -> bool:
        if _is_prepared(module):
            return self.precision.row.name != AS_WRITTEN  # as written it is in its own, which its parts note
        is_in_training = is_trained and torch.is_grad_enabled() and module not in self._around_prepared
        return is_in_training or module in self._always

    def _count(self, where: str | int, num_samples: int, num_values: int) -> None:
        self._samples[where] += num_samples
        self._trained_on[where][0] += num_samples
        self._trained_on[where][1] += num_values

    def _note_loaded(self, batch: Any, batches: Any) -> None:
        """Count a batch that a loader gives, unless it is for an evaluation."""
        num_samples = _num_samples_of_batch(batch, batches)
        if not torch.is_grad_enabled():
            return
        num_values = sum(tensor.numel() for tensor in tree_tensors(batch)) or getattr(batch, "num_nodes", None) or 0
        loaded = id(batches._dataset), num_samples, num_values
        is_known = loaded[0] in self._trained_data
        if self.model.training or self.model is self._trained_in_eval:
            self._count("loader", *loaded[1:])
            self._unsure += [] if is_known else [loaded]
        elif is_known:  # the script may set the model to training in each step
            self._left_out = [loaded]

    def _change_mode(self, train: Any, module: nn.Module, mode: bool = True) -> Any:
        """Leave out the batches that a script had loaded for an evaluation before it set the model to that."""
        if self.models and module is self.models[0] is not self._trained_in_eval:
            batches = self._left_out if mode else self._unsure
            for _, *counts in batches:
                self._count("loader", *(count if mode else -count for count in counts))
            self._left_out = [] if mode else batches
            self._unsure = [*self._unsure, *batches] if mode else []
        return train(module, mode)

    def _note_padding(self, batch: Any) -> None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        tensors = tree_tensors(batch)
        if any(map(is_functorch_wrapped_tensor, tensors)):  # their values decide nothing
            return
        if isinstance(mask, Tensor) and mask.dim() == 2:
            num_values, num_padding = mask.numel(), mask.numel() - int(mask.count_nonzero())
        elif marked := next(((each.numel(), count) for each in tensors if (count := _num_masked(each))), None):
            num_values, num_padding = marked
        else:
            tokens = next(
                (each for each in tensors if each.dtype in (torch.int32, torch.int64) and each.dim() == 2), None
            )
            frames = next((each for each in tensors if each.is_floating_point() and each.dim() == 3), None)
            num_values, num_padding = (0, 0) if tokens is None else (tokens.numel(), _num_padding(tokens))
            if not num_padding and frames is not None:
                num_values, num_padding = frames.numel(), _num_blank(frames)
        self.num_padding += num_padding
        self.num_tokens += num_values - num_padding

    def leave_model(self, module: nn.Module, output: Any) -> Any:
        """End a forward pass and autocast with it: what follows gets float32 for 16 bits, as Accelerate has it.

        A loss function of torch's gets the 16 bits, in autocast, as it does by hand: `compute_loss`. An output that
        nothing else computes with stays as it is if it is large or beside a loss that the model computes itself.
        """
        self._note_call(module, output)
        if self._left_with is not module:
            return None
        self._left_with = None
        tensors = tree_tensors(output)
        if not self.precision.autocast.leave() or not any(tensor.dtype in HALVES for tensor in tensors):
            return None
        is_prepared = _is_prepared(module)
        has_loss = any(not tensor.dim() and tensor.requires_grad for tensor in tensors)

        def widen(tensor: Tensor) -> Tensor:
            may_stay = not is_prepared and tensor.dim() > 0 and (has_loss or tensor.numel() > _MANY_VALUES)
            if tensor.dtype not in HALVES or (may_stay and not self._is_looking and module not in self._fed):
                return tensor
            wide = tensor.float()
            if not is_prepared:
                _owner_of(wide).castwise_low = tensor  # type: ignore[attr-defined]
            if may_stay and wide.requires_grad and self._is_looking:
                wide.register_hook(lambda _: self._fed.add(module))  # type: ignore[no-untyped-call]
            return wide

        return tree_map_tensors(widen, output)

    def compute_loss(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss of a model's outputs in castwise's autocast, as around both by hand."""
        if (computed := _in_16_bits(args, kwargs)) is None:
            return loss(*args, **kwargs)
        with self.precision.autocast.around():
            return loss(*computed[0], **computed[1])

    def _take_without_weights(self, module: nn.Module, *, is_scripted: bool) -> None:
        if not self.models:
            return  # it may be a part of one
        self._known.add(id(module))
        has_autocast = self.precision.row.autocast_dtype is not None and self._left_with is None
        if has_autocast and not is_scripted and not module._compiled_call_impl:
            self._without_weights.add(module)
            module.register_forward_pre_hook(_enter_without_weights, with_kwargs=True)
            module.register_forward_hook(_leave_model, always_call=True)

    def enter_without_weights(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute in autocast, from a model's outputs, what has no weights, such as a loss: as around both by hand."""
        computed = _in_16_bits(args, kwargs)
        if computed is not None and self.precision.autocast.enter():
            self._left_with = module
        return computed

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Prepare gradients; return the step's arguments if they are others now."""
        self._has_stepped = True
        self._num_stepping += 1
        if self._is_elsewhere or self._num_stepping > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        prepared = closure
        if closure is not None and self._is_profiled:  # the profiler tells it from the step, which calls it
            prepared = record_function(CLOSURE_RANGE)(closure)
        prepared = self.precision.before_step(optimizer, prepared)
        if self._is_looking:
            self.precision.weights.check_step(optimizer)
            num_steps, is_first = len(self._samples_of_steps), self.stepped[:1] in ([], [optimizer])
            if is_first and not num_steps & (num_steps + 1):  # step 1, 2, 4, 8 and so on: a rate may begin at 0
                self.precision.weights.before_step(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and (not self.stepped or optimizer is self.stepped[0]):
            self.skipped_steps = self.skipped_steps + (found_inf > 0)
        if prepared is closure:
            return None
        return ((optimizer, prepared, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": prepared})

    def after_step(self, optimizer: Optimizer, *_: object, was_skipped: bool = False) -> None:
        """Count a step of the first optimizer: further ones are of the same step of the script.

        One of its kind that comes later, for the same weights, takes its place.
        """
        self._num_stepping = max(0, self._num_stepping - 1)
        if self._is_elsewhere or self._num_stepping:
            return
        self.precision.weights.after_step(self.models)
        if self._follows_first(optimizer):
            self.techniques.check_optimizer(optimizer)
            self._known_late.add(self.stepped[0])
            self.stepped[0] = optimizer
        if self._is_looking and optimizer not in self.stepped:
            self.techniques.check_optimizer(optimizer)
            self.stepped.append(optimizer)
            trained = set(map(id, weights_of(optimizer)))
            for module, times in self._called_without.values():
                if len(times) >= _FEWEST_CALLS and not trained.isdisjoint(map(id, module.parameters())):
                    self.seconds_before_steps = max(self.seconds_before_steps, times[-1] - times[0])
            self._called_without.clear()
        is_first = optimizer is self.stepped[0]
        was_skipped |= self.precision.after_step(optimizer)
        self.steps_of_others = 0 if is_first else self.steps_of_others + 1
        if self.steps_of_others > _MOST_STEPS_OF_OTHERS:
            raise SystemExit  # the script would run to its end
        if not self._is_looking and optimizer not in self.stepped and optimizer not in self._known_late:
            self._late += [type(optimizer).__name__] if self.have_more(optimizer) else []
            self._known_late.add(optimizer)
        if is_first:
            self._take_back()
            self.skipped_steps = self.skipped_steps + 1 if was_skipped else self.skipped_steps
            if self._is_looking:
                self._samples_of_steps.append(self._samples)
            self._samples = Counter()
            self._trained_data.update(data for data, *_ in self._unsure)
            self._unsure.clear()
            self._last_calls, self._calls = self._calls, {}
            self._after_step()

    def _call_compiled(self, module: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a module that was compiled in place: its own hooks are part of the compiled code, and do nothing."""
        if id(module) in self._known:
            self.enter_model(module, args)
        elif self._is_looking:
            self.find_model(module, args)
        args, kwargs = self.precision.weights.widen_inputs(args, kwargs) or (args, kwargs)
        return self._leave_after(module, compiled, args, kwargs)

    def _leave_after(self, module: nn.Module, compiled: Any, args: Any, kwargs: Any) -> Any:
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            in_float32 = self.leave_model(module, output)
        return output if in_float32 is None else in_float32

    def _follow_compiled(self, function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled function that is a forward pass: hooks of the models that it calls do not run there."""
        models: list[nn.Module] = []

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            if self._is_looking and not models:
                used = [module for module in _modules_used(function, *args, *kwargs.values()) if self._trains(module)]
                parts = {id(part) for module in used for part in module.modules() if part is not module}
                for module in used:
                    if id(module) not in parts:
                        self.find_model(module, args)
                        self.precision.autocast.leave()
                models[:] = [module for module in used if any(module is model for model in self.models)]
            if self._is_looking and any(model is self.model for model in models):
                self._samples["compiled"] += _num_samples_of_call(args or tuple(kwargs.values()))
            if not models:
                return compiled(*args, **kwargs)
            self.precision.before_forward()
            if self.precision.autocast.enter():
                self._left_with = models[0]
            return self._leave_after(models[0], compiled, args, kwargs)

        return call

    def _note_losses(self) -> None:
        """Replace what computes gradients and scales losses by what tells of its calls."""

        @replaces(torch.autograd, "backward")
        def noting_backward(backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # of a checkpoint, within another
                return backward(tensors, *args, **kwargs)
            if not self.stepped and not self._num_stepping:  # an optimizer may compute the loss within its step
                self._check_updates()
            losses = list(tensors) if type(tensors) in {list, tuple} else [tensors]
            if not self._has_noted_loss and isinstance(losses[0], Tensor):
                self.loss = without_storage(losses[0])
            self._has_noted_loss, self._has_backward = False, True
            losses = [self.precision.before_backward(loss) if isinstance(loss, Tensor) else loss for loss in losses]
            found = backward(losses, *args, **kwargs)
            self.precision.after_backward()
            return found

        @replaces(torch.autograd, "grad")
        def noting_grad(grad: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = {id(tensor) for tensor in tree_tensors(kwargs.get("inputs", args[:1]))}
            if not inputs.isdisjoint(map(id, weights_of(*self.optimizers))):
                self.precision.scaling.check_gradients()
            found = grad(outputs, *args, **kwargs)
            if not self._has_backward and isinstance(outputs, Tensor) and not is_functorch_wrapped_tensor(outputs):
                self.loss = without_storage(outputs)  # the script may have no other
            return found

        @replaces(torch.amp.GradScaler, "scale")
        def noting_scale(scale: Any, scaler: Any, loss: Any) -> Any:
            if isinstance(loss, Tensor):
                self.loss, self._has_noted_loss = without_storage(loss), True  # backward sees it times its scale
            return scale(scaler, loss)

        @replaces(torch.amp.GradScaler, "step")
        def noting_step(step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._has_stepped = False
            result = step(scaler, optimizer, *args, **kwargs)
            if not self._has_stepped and not isinstance(optimizer, Optimizer):  # fastai gives it a callback of its own
                found = scaler._found_inf_per_device(optimizer).values() if scaler._enabled else ()
                optimizer = self._others.of(weights_of(optimizer)) if any(each.item() for each in found) else None
            if not self._has_stepped and optimizer is not None:
                self.after_step(optimizer, was_skipped=True)
            return result

    def _check_updates(self) -> None:
        """Refuse a script whose weights change from backward to backward while no optimizer steps."""
        modules = self.models or list(self._untrained.values())
        weights = [weight for module in modules for weight in module.parameters()]
        weights = [weight for weight in weights if type(weight) is nn.Parameter and not weight.is_meta]
        values = [weight.detach().flatten()[:_NUM_WATCHED].tolist() for weight in weights[-_NUM_WATCHED:]]
        self._num_updates += bool(self._watched) and values != self._watched
        self._watched = values
        if self._num_updates >= _UPDATES:
            raise UsageError(
                "The script's weights change, but no optimizer takes a step, which is what castwise counts. Train them "
                "with one of torch.optim, or with an object that holds them, and changes them in its method 'step'."
            )

    def _replace_methods(self) -> None:

        @replaces(sys.modules["torch.multiprocessing.spawn"], "start_processes")
        def refuse_ranks(start: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.stepped and not self._is_elsewhere:
                raise UsageError(
                    f"{calling_line()} starts processes that train, which castwise does not see. Let the script take "
                    "its rank from the environment, and start it by torchrun: castwise run -- torchrun FILE.py"
                )
            return start(*args, **kwargs)

        replaces(sys.modules["torch.distributed.rendezvous"], "_create_c10d_store")(_store_on_a_port)
        replaces(nn.Module, "train")(self._change_mode)
        vars(torch.multiprocessing)["start_processes"] = sys.modules["torch.multiprocessing.spawn"].start_processes

        if self.precision.row.autocast_dtype is not None:
            for name in _LOSSES:
                replaces(nn.functional, name)(_compute_loss)

        @replaces(nn.Module, "compile")
        def compile_within_hooks(compile_in_place: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            compile_in_place(module, *args, **kwargs)
            compiled = module._compiled_call_impl
            module._compiled_call_impl = functools.partial(self._call_compiled, module, compiled)

        @replaces(torch, "compile")
        def compile_followed(compile_: Any, model: Any = None, **kwargs: Any) -> Any:
            if model is None:  # it is a decorator
                return functools.partial(torch.compile, **kwargs)
            compiled = compile_(model, **kwargs)
            is_forward = isinstance(getattr(model, "__self__", None), nn.Module) and model.__name__ in _FORWARD
            return compiled if is_forward or isinstance(model, nn.Module) else self._follow_compiled(model, compiled)

        @replaces(Optimizer, "__init__")
        def noting_init(make: Any, optimizer: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            self.optimizers.add(optimizer)
            if self._is_looking:  # it takes milliseconds, and a script may make many
                self._follow_lightning()
                self._follow_calls()
            self.techniques.change_optimizer(optimizer, defaults)
            make(optimizer, params, defaults)

        @replaces(dataloader._BaseDataLoaderIter, "_next_index")
        def noting_index(next_index: Any, batches: Any) -> Any:
            index = next_index(batches)
            # Workers are asked for batches ahead; what was asked for in the last epoch does not come.
            epoch, sizes = vars(batches).get("castwise_sizes", (None, None))
            if epoch is not batches._sampler_iter:
                epoch, sizes = vars(batches)["castwise_sizes"] = batches._sampler_iter, deque()
            sizes.append(len(index) if batches._auto_collation else 0)
            return index

        @replaces(dataloader._BaseDataLoaderIter, "__next__")
        def timed_next(next_batch: Any, batches: Any) -> Any:
            started = time.perf_counter()
            self._left_out = []
            batch = next_batch(batches)
            self.data_seconds += time.perf_counter() - started
            self._note_loaded(batch, batches)
            if self._is_looking:
                self.uses_loader = True
                self._has_graphs |= bool(_numbers_of_graphs(batch))
                if torch.is_grad_enabled():
                    self._note_padding(batch)
                workers = getattr(batches, "_num_workers", 0)
                self.num_prefetched = max(self.num_prefetched, workers * (getattr(batches, "_prefetch_factor", 0) or 0))
            return batch

    def _follow_lightning(self) -> None:
        """Let Lightning's steps run in the precision from their begin to their end, as its own has it.

        As written they are left alone: they switch autocast on themselves, before they call the model.
        """
        if self.precision.row.name == AS_WRITTEN:
            return
        for name in _STRATEGIES - self._followed & set(sys.modules):
            self._followed.add(name)
            for step in ("training_step", "validation_step", "test_step", "predict_step"):
                replaces(sys.modules[name].Strategy, step)(self._run_in_precision)

    def _follow_fabric(self) -> None:
        """Let Fabric cast its models' inputs to the row's type, as it does to that of its own mixed precision."""
        row = self.precision.row
        wanted = None if row.autocast_dtype is None else getattr(torch, row.autocast_dtype)

        def follow(kind: str, module: ModuleType) -> None:
            @replaces(vars(module)[kind], "convert_input")
            def convert(as_written: Any, precision: Any, data: Any) -> Any:
                if type(precision).__module__ != module.__name__:  # another one's, which inherits
                    return as_written(precision, data)
                return data if wanted is None else tree_map_tensors(narrow, data)

        def narrow(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or tensor.dtype is wanted:
                return tensor
            cast = tensor.to(wanted)
            cast.castwise_source = tensor  # type: ignore[attr-defined]
            return cast

        for library in ("lightning.fabric", "lightning_fabric") if row.name != AS_WRITTEN else ():
            for name, kind in (("precision", "Precision"), ("amp", "MixedPrecision")):
                on_import(f"{library}.plugins.precision.{name}", functools.partial(follow, kind))

    def _follow_calls(self) -> None:
        """Hook modules where torch's hooks may not run.

        Their class has a `__call__` of its own, as gpytorch's, or the user's code calls their `forward` by itself.
        """
        modules = [module for module in list(sys.modules.values()) if type(module) is ModuleType]  # lazy ones stay so
        calls_forward = any(_calls_forward(vars(module).get("__file__")) for module in modules)
        kinds: list[type[nn.Module]] = [nn.Module]
        for kind in kinds:  # which grows
            kinds += kind.__subclasses__()
            is_torchs = kind.__module__.partition(".")[0] == "torch"
            if "__call__" in vars(kind) and not is_torchs and kind not in self._followed:
                self._followed.add(kind)
                replaces(kind, "__call__")(_call_followed)
            if calls_forward and "forward" in vars(kind) and not is_torchs and (kind, "forward") not in self._followed:
                self._followed.add((kind, "forward"))
                replaces(kind, "forward")(_call_forward)

    def call_followed(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_elsewhere or self._left_with is module:  # of a base class
            return call(module, *args, **kwargs)
        if any(module is model for model in self.models):
            self.enter_model(module, args)
        elif self._is_looking:
            self.find_model(module, args)
        return self._leave_after(module, functools.partial(call, module), args, kwargs)

    def _run_in_precision(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        with self.precision.autocast.around(is_held=True):
            return step(*args, **kwargs)


def _nothing() -> None: ...


def _has(calls: _Calls, key: tuple[int, int], first: Tensor | None) -> bool:
    """Return whether a model was called with a tensor: an id may be another one's by now."""
    return first is not None and key in calls and calls[key][0]() is first


def _run_checkpoint(compute: Any, *args: Any, **kwargs: Any) -> Any:
    run = compute if torch.compiler.is_compiling() else functools.partial(_installed[0]._run_checkpoint, compute)
    return run(*args, **kwargs)


def _compute_loss(loss: Any, *args: Any, **kwargs: Any) -> Any:
    compute = loss if torch.compiler.is_compiling() else functools.partial(_installed[0].compute_loss, loss)
    return compute(*args, **kwargs)


def _call_followed(call: Any, *args: Any, **kwargs: Any) -> Any:
    return (call if torch.compiler.is_compiling() else functools.partial(_installed[0].call_followed, call))(
        *args, **kwargs
    )


def _call_forward(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Follow a call of `forward` by the user's code, around which torch runs no hooks."""
    if torch.compiler.is_compiling() or not is_own(sys._getframe(2).f_code.co_filename):
        return forward(*args, **kwargs)
    return _installed[0].call_followed(forward, *args, **kwargs)


@functools.cache
def _calls_forward(file: str | None) -> bool:
    """Return whether a file of the user's calls `forward` of a module, other than its own class's base."""
    if file is None or not os.path.isfile(file) or not is_own(file):  # torch._classes names a file that is none
        return False
    return re.search(r"[\w\]]\.forward\(", Path(file).read_text(errors="replace")) is not None


def _in_16_bits(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Return a loss's arguments as the model computed them; None without gradients, or if none is of 16 bits."""
    computed: tuple[Any, Any] = tree_map_tensors(_as_computed, (args, kwargs))
    is_low = torch.is_grad_enabled() and any(tensor.dtype in HALVES for tensor in tree_tensors(computed))
    return computed if is_low else None


def _as_computed(value: Any) -> Any:
    """Return a model's output, or a view of one, as it was before it became float32; any other value as it is."""
    if not isinstance(value, Tensor) or is_functorch_wrapped_tensor(value):
        return value
    wide = _owner_of(value)
    low = getattr(wide, "castwise_low", None)
    if low is None or value is wide or low.stride() != wide.stride():
        return value if low is None or value is not wide else low
    if value.is_contiguous() and value.numel() == low.numel():
        return low.view(value.shape)
    return low.as_strided(value.size(), value.stride(), value.storage_offset())


def _owner_of(tensor: Tensor) -> Tensor:
    """Return the tensor that one is a view of, or itself; a result of a subclass such as MONAI's is a view, too."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor if tensor._base is None else tensor._base


def _modules_used(*values: Any) -> Iterator[nn.Module]:
    """Yield the modules among values, their attributes, and the variables of functions of the user's among them."""
    waiting, seen = list(values), set[int]()
    for value in waiting:  # which grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, MethodType):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, FunctionType):
            function = inspect.unwrap(value)
            if is_users(function.__code__.co_filename):
                names, cells = _names_in(function.__code__), function.__closure__ or ()
                waiting += [function.__globals__[name] for name in names if name in function.__globals__]
                waiting += [cell.cell_contents for cell in cells if cell != CellType()]  # one that is filled
        elif type(value).__dictoffset__ and not isinstance(value, type | ModuleType):
            attributes = object.__getattribute__(value, "__dict__").values()
            waiting += [attribute for attribute in attributes if isinstance(attribute, nn.Module)]


def _store_on_a_port(create: Any, host: str, port: int, rank: int, world_size: int, *others: Any, **more: Any) -> Any:
    """Take a free port for one rank alone: a script may fix one, which processes of other precisions hold."""
    is_alone = world_size == 1 and not torch.distributed.is_torchelastic_launched()
    return create(host, 0 if is_alone else port, rank, world_size, *others, **more)


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code uses, and the functions within it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _num_samples(nested: Any) -> int:
    """Return the first dimension of the first tensor, or the number of a batch's graphs.

    Of images and labels in lists, as of detection, it is their number.
    """
    if graphs := _numbers_of_graphs(nested):
        return graphs[0]
    parts = nested if isinstance(nested, list | tuple) else ()
    lengths = {len(part) if isinstance(part, list | tuple) else None for part in parts}
    length = lengths.pop() if len(lengths) == 1 else None
    if length and any(isinstance(item, dict) for part in parts for item in part):
        return length
    tensors = tree_tensors(nested)
    return len(tensors[0]) if tensors and tensors[0].dim() else 0


def _numbers_of_graphs(nested: Any) -> list[int]:
    """Return of how many graphs a batch is, or its parts are, of those that say so."""
    parts = (nested, *(nested if isinstance(nested, list | tuple) else ()))
    return [found for part in parts if isinstance(found := getattr(part, "num_graphs", None), int)]


def _num_samples_of_batch(batch: Any, batches: Any) -> int:
    """Return the samples of a batch: what the loader asked its data set for, else what the batch says."""
    _, sizes = vars(batches).get("castwise_sizes", (None, ()))
    asked = sizes.popleft() if sizes else 0
    # A data set that is iterated over may have fewer left than it was asked for.
    if asked and batches._dataset_kind == dataloader._DatasetKind.Map:
        return int(asked)
    return asked if asked in {len(tensor) for tensor in tree_tensors(batch) if tensor.dim()} else _num_samples(batch)


def _num_padding(tokens: Tensor) -> int:
    """Return how many of the tokens in rows are padding: the one number that some rows end with, and no row has within.

    Numbers of another meaning, such as flags, are in the midst of rows, too.
    """
    last = tokens[:, -1:]
    is_end = (tokens == last).flip(1).cumprod(1).flip(1).bool()
    values = last[is_end.sum(1) > 1]
    if not len(values) or bool((values != values[0]).any()):
        return 0
    is_padding = tokens == values[0]
    is_elsewhere = bool((is_padding & ~is_end).any()) or bool(is_padding[:, :1].any())
    return 0 if is_elsewhere else int(is_padding.sum())


def _num_blank(frames: Tensor) -> int:
    """Return how many values lie in frames of one and the same number, with which most samples end, in either order."""
    found = 0
    for each in (frames, frames.transpose(1, 2)):
        lengths = (each == each[:, -1:, -1:]).all(2).flip(1).cumprod(1).sum(1)
        is_sample_blank = bool((lengths == each.shape[1]).any())  # as made-up data is
        if not is_sample_blank and 2 * int((lengths > 1).sum()) > len(lengths):
            found = max(found, int(lengths.sum()) * each.shape[2])
    return found


def _num_masked(mask: Tensor) -> int:
    """Return how much a mask of rows of unequal length marks as padding; 0 for what is no such mask.

    Each of its rows has one value, and then the other. That of the column in which all rows are alike marks tokens.
    """
    rows = mask.squeeze()
    if rows.dim() != 2 or min(rows.shape) < 2 or not bool(((rows == 0) | (rows == 1)).all()):
        return 0
    alike = next((column[0] for column in (rows[:, 0], rows[:, -1]) if bool((column == column[0]).all())), None)
    num_changes = (rows[:, 1:] != rows[:, :-1]).sum(1)
    if alike is None or bool((num_changes > 1).any()):
        return 0
    lengths = (rows == alike).sum(1)
    return 0 if bool((lengths == lengths[0]).all()) else rows.numel() - int(lengths.sum())


def num_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    module = sys.modules.get("torch._dynamo.utils")
    return 0 if module is None else module.counters["stats"]["unique_graphs"]


def _num_samples_of_call(args: Any) -> int:
    """Return the samples that a model is called with: one if it is a row of numbers, as a policy's observation."""
    tensors = tree_tensors(args)
    is_row = bool(tensors) and tensors[0].dim() == 1 and tensors[0].is_floating_point()
    return 1 if is_row else _num_samples(args)


def _find_model(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _installed[0].find_model(module, args)


def _widen_inputs(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
    if kwargs is None or torch.compiler.is_compiling():
        return None
    return _installed[0].widen_inputs(module, args, kwargs)


def _enter_model(module: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    if not torch.compiler.is_compiling():
        _installed[0].enter_model(module, (*args, *kwargs.values()) if kwargs else args)


def _leave_model(module: nn.Module, _: Any, output: Any) -> Any:
    return None if torch.compiler.is_compiling() else _installed[0].leave_model(module, output)


def _enter_without_weights(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return None if torch.compiler.is_compiling() else _installed[0].enter_without_weights(module, args, kwargs)


def _surround(module: nn.Module) -> None:
    module.register_forward_pre_hook(_enter_model)
    module.register_forward_hook(_leave_model, always_call=True)


def _is_prepared(module: nn.Module) -> bool:
    """Return whether Accelerate, which the Trainer of transformers uses, or Fabric runs a model: they mark or wrap it.

    They have autocast in forward passes alone, of evaluations, too. A loop by hand has the loss within, no evaluation.
    """
    marked = (module, getattr(module, "module", module))
    return type(module).__name__ == "_FabricModule" or any(
        hasattr(model, "_is_accelerate_prepared") for model in marked
    )
