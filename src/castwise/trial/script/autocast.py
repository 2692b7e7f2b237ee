"""Autocast in a script: its own regions in another type, and a region of castwise's if it trains without one."""

import functools
import inspect
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_stack
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from castwise.apply.precision import autocast_maker
from castwise.errors import TechniqueError
from castwise.registry.precisions import AS_WRITTEN, Precision
from castwise.trial.script.policies import follow_policies
from castwise.trial.script.replacing import replaces
from castwise.trial.user_model.source import calling_line, is_own, is_users

HALVES = (torch.float16, torch.bfloat16)
# Modules that hand a script's arguments on to `torch.autocast`: who called them decides. Not the two functions of
# `custom_fwd` and `custom_bwd`, whose regions are torch's: they keep what surrounds a function off or as it was.
_OF_AUTOCAST = ("torch.amp.", "torch.cuda.amp.", "torch.cpu.amp.", "contextlib")
_OF_FUNCTIONS = ("decorate_fwd", "decorate_bwd")
# Whose regions are the precision of the whole training, as a script's own are; a model's layers may have others.
_FRAMEWORKS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
_MOST_SITES = 5
# torch's functions that switch autocast, or set its type, for the whole process.
_SWITCHES = [name for name in dir(torch) if name.startswith("set_autocast") and "cache" not in name]


@dataclass(frozen=True)
class _Region:
    """A `torch.autocast` as it was made."""

    is_enabled: bool  # by its argument
    dtype: torch.dtype
    names_half: bool  # whether that is an argument, and of 16 bits
    made: tuple[bool, torch.dtype]  # what torch made of both
    is_scripts: bool  # whether the user's code made it, or a framework that the user gave the loop to
    is_trainers: bool  # whether another library made it around its model's call, as a training loop does
    is_of_function: bool  # of an autograd function's forward or backward, by torch
    is_deepspeeds: bool  # DeepSpeed's, whose engine switches off autocast that surrounds it
    sites: tuple[tuple[CodeType, int], ...]  # the calls that made it, innermost first
    entered: list[tuple[bool, bool]] = field(default_factory=list)  # whether it is an island, and is within castwise's


class ScriptAutocast:
    """Makes a script's own autocast compute in a row's type, or not at all.

    Where a region is entered decides what it is. One for 16 bits is in the row's type. A disabled one, or one for
    float32, stays off within another. If the script has its autocast switched off, a disabled region with nothing
    around it is where the script would have it on, and is on; one with a literal `False` stays off.

    A script that trains without regions gets castwise's: `enter` begins it and `leave` ends it.
    """

    def __init__(self, row: Precision, device_type: str) -> None:
        self._device_type = device_type
        self._dtype = None if row.autocast_dtype is None else getattr(torch, row.autocast_dtype)
        self._region: Any = autocast_maker(row, device_type)()  # castwise's, entered and left time after time
        self._usual_dtype = torch.get_autocast_dtype(device_type)  # of the script's regions that name none
        self.is_on = False  # whether castwise's region is
        self.is_held = False  # whether a framework's step is under way, which is in it from begin to end
        self.has_been_on = False  # whether anything has run in a region of either, with gradients
        self.has_own = False  # whether the script trains in regions of its own
        self._asked_dtype: torch.dtype | None = None  # what the script itself would compute in
        self._num_islands = 0  # that are entered
        self._is_switching = False  # whether a region is being entered or left, whose type has been decided
        self._regions: WeakKeyDictionary[Any, _Region] = WeakKeyDictionary()
        self._is_scripts_alone = row.name == AS_WRITTEN
        self.written_in: set[torch.dtype | None] = set()  # the types of autocast in which the script calls its models
        if self._is_scripts_alone:
            return
        if self._dtype is not None:
            torch.set_autocast_dtype(device_type, self._dtype)
        self._follow_regions()
        self._follow_switches()

    @property
    def is_own_float16(self) -> bool:
        """Return whether the script trains in float16 by itself, and so cares for the range of its gradients."""
        return self.has_own and self._asked_dtype is torch.float16

    def enter(self) -> bool:
        """Begin castwise's region, unless it is on, or the script decides here; return whether it began."""
        is_enabled = torch.is_autocast_enabled(self._device_type)
        if self._is_scripts_alone:
            self.written_in.add(torch.get_autocast_dtype(self._device_type) if is_enabled else None)
            return False
        if is_enabled and not self.is_on:
            dtype = torch.get_autocast_dtype(self._device_type)
            if dtype in HALVES and dtype is not self._dtype:
                raise TechniqueError(f"{calling_line()} runs in autocast that was switched on without torch.autocast")
            # In backward a checkpoint computes again, in castwise's own.
            self.has_own |= torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
            self.has_been_on |= torch.is_grad_enabled()
            return False
        if self.is_on or self.has_own or self._num_islands or self._dtype is None:
            return False
        self._region.__enter__()
        self.is_on = True
        self.has_been_on |= torch.is_grad_enabled()
        return True

    @contextmanager
    def around(self, *, is_held: bool = False) -> Iterator[bool]:
        """Surround what runs by castwise's region, unless it is on or the script decides; yield whether it began."""
        has_begun = self.enter()
        try:
            self.is_held |= is_held and has_begun
            yield has_begun
        finally:
            if has_begun:
                self.is_held = False
                self.leave()

    def leave(self) -> bool:
        """End castwise's region, unless it is held; return whether it ended."""
        if self.is_held:
            return False
        was_on, self.is_on = self.is_on, False
        if was_on:
            self._region.__exit__(None, None, None)
        return was_on

    def _follow_regions(self) -> None:
        @replaces(torch.autocast, "__init__")
        def make_noted(make: Any, region: Any, *args: Any, **kwargs: Any) -> None:
            make(region, *args, **kwargs)
            named = dict(zip(("device_type", "dtype", "enabled"), args, strict=False)) | kwargs
            dtype, (module, sites) = named.get("dtype"), _sites()
            usual = self._usual_dtype if region.device == self._device_type else region.fast_dtype
            self._regions[region] = _Region(
                is_enabled=bool(named.get("enabled", True)),
                dtype=dtype or usual,
                names_half=dtype in HALVES,
                made=(region._enabled, region.fast_dtype),
                is_scripts=module.startswith(_FRAMEWORKS) or (bool(sites) and is_own(sites[0][0].co_filename)),
                is_trainers=not region._enabled
                and self._dtype is not None
                and not torch.is_autocast_enabled(self._device_type)  # else it takes time in each layer
                and not module.startswith(("torch.", *_FRAMEWORKS))
                and not _is_in_module(),
                is_of_function=bool(sites) and sites[0][0].co_name in _OF_FUNCTIONS and module.startswith("torch."),
                is_deepspeeds=module.startswith("deepspeed."),
                sites=sites,
            )

        @replaces(torch.autocast, "__enter__")
        def enter(method: Any, region: Any) -> Any:
            made = self._regions.get(region)
            if made is None:  # castwise's
                return self._switch(method, region)
            region._enabled, region.fast_dtype = self._decide(region.device, made)
            is_island = not region._enabled and region.device == self._device_type
            made.entered.append((is_island, self.is_on))
            self._num_islands += is_island
            return self._switch(method, region)

        @replaces(torch.autocast, "__exit__")
        def leave(method: Any, region: Any, *args: Any) -> Any:
            result = self._switch(method, region, *args)
            made = self._regions.get(region)
            if made is not None and made.entered:
                is_island, was_within = made.entered.pop()
                self._num_islands -= is_island
                if was_within and not self.is_on:  # castwise's has ended since, and would be restored
                    torch.set_autocast_enabled(self._device_type, False)
            return result

    def _decide(self, device_type: str, made: _Region) -> tuple[bool, torch.dtype]:
        """Return whether a region that is being entered is on, and its type."""
        is_ours = device_type == self._device_type
        is_within_scripts = torch.is_autocast_enabled(device_type) and not self.is_on
        if made.is_enabled and made.made[0] and made.dtype in HALVES:
            if is_ours and is_within_scripts and self._dtype is not None and made.dtype is not self._asked_dtype:
                return made.made  # a part that the script keeps in the other type of 16 bits
            # In backward a checkpoint computes again, in the row's type.
            is_asked = is_ours and not made.is_of_function and torch._C._current_graph_task_id() == -1
            self._asked_dtype = made.dtype if is_asked else self._asked_dtype
        elif not is_ours or is_within_scripts or not self._would_be_on(made):
            return made.made
        if self._dtype is None:
            return False, made.made[1]
        if self.is_on and torch.is_grad_enabled() and made.is_scripts:
            self.is_held = False
            self.leave()
            self.has_own = True
        self.has_been_on |= torch.is_grad_enabled()
        return True, self._dtype

    def _would_be_on(self, made: _Region) -> bool:
        """Return whether a region is a disabled one that the script itself would have on in the row's precision."""
        if made.is_deepspeeds:
            return self.is_on and not made.is_enabled
        is_around = made.is_scripts or (made.is_trainers and not self.is_on)
        if made.is_enabled or not is_around or self._num_islands or self._dtype is None:
            return False
        if _is_written_off(made.sites, of_library=not made.is_scripts):
            return False
        if self.is_on and not made.names_half:
            raise TechniqueError(
                f"{calling_line()} has autocast of its own, which a variable switches off: castwise cannot know "
                "whether it is to stay off. Run the script with it on"
            )
        return True

    def _switch(self, method: Any, region: Any, *args: Any) -> Any:
        was_switching, self._is_switching = self._is_switching, True
        try:
            return method(region, *args)
        finally:
            self._is_switching = was_switching

    def _follow_switches(self) -> None:

        def change(value: Any) -> Any:
            if value is True:
                self._asked_dtype = self._asked_dtype or self._usual_dtype
                return self._dtype is not None
            if not any(value is each for each in HALVES):
                return value
            self._asked_dtype = value
            return self._dtype or value

        def set_changed(function: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_switching:
                function(*args, **kwargs)
            else:
                function(*map(change, args), **{name: change(value) for name, value in kwargs.items()})

        for name in _SWITCHES:
            replaces(torch, name)(set_changed)


def note_own_precision(*, with_switches: bool = False) -> dict[str, list[str]]:
    """Return what gets the script's own autocasts and GradScalers that are on, each with the lines that make it.

    `with_switches` notes calls of torch's functions that switch autocast on, too: each region calls one.
    """
    found: dict[str, list[str]] = {}
    seen: set[tuple[CodeType, int]] = set()

    def note(kind: str, site: tuple[CodeType, int]) -> None:
        if site not in seen:  # once for all steps: to find a line takes a while
            seen.add(site)
            lines, line = found.setdefault(kind, []), calling_line()
            lines += [line] if line and line not in lines else []

    @replaces(torch.autocast, "__init__")
    def make_region(make: Any, region: Any, *args: Any, **kwargs: Any) -> None:
        make(region, *args, **kwargs)
        module, sites = _sites()
        if region._enabled and region.fast_dtype in HALVES and not module.startswith("torch."):
            note(f"autocast {str(region.fast_dtype).removeprefix('torch.')}", sites[0])

    def switch(function: Any, *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        if True in (*args, *kwargs.values()):
            note(function.__name__, _sites()[1][0])

    if with_switches:
        for name in _SWITCHES:
            if name.endswith("_enabled"):
                replaces(torch, name)(switch)

    follow_policies(None, lambda dtype: note(f"autocast {dtype}", _sites()[1][0]))

    @replaces(torch.amp.GradScaler, "__init__")
    def make_scaler(make: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        make(scaler, *args, **kwargs)
        _, sites = _sites()
        if scaler._enabled:
            note("GradScaler", sites[0])

    return found


def _sites() -> tuple[str, tuple[tuple[CodeType, int], ...]]:
    """Return the module that makes a `torch.autocast`, and the calls that are under way, that one first."""
    frame: Any = sys._getframe(3)
    modules, sites = list[str](), list[tuple[CodeType, int]]()
    while frame is not None and len(sites) < _MOST_SITES:
        if not _module_of(frame).startswith(_OF_AUTOCAST) or frame.f_code.co_name in _OF_FUNCTIONS:
            modules.append(_module_of(frame))
            sites.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return modules[0] if modules else "", tuple(sites)


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_in_module() -> bool:
    """Return whether a module's forward pass is under way, or a backward pass, which may compute one again."""
    codes = {frame.f_code for frame, _ in walk_stack(sys._getframe())}
    return nn.Module._call_impl.__code__ in codes or torch._C._current_graph_task_id() != -1


def _is_written_off(sites: tuple[tuple[CodeType, int], ...], *, of_library: bool) -> bool:
    """Return whether `False` is written where a region was made: in the call, or in that of a helper that made it.

    The helpers are the functions below that which enters the region. Source: chosen here; nothing at run time tells a
    part that is kept in float32 from autocast that an argument of the script switches off.
    """
    frame: Any = sys._getframe(5)
    while frame is not None and _module_of(frame).startswith(_OF_AUTOCAST):
        frame = frame.f_back
    codes = [code for code, _ in sites]
    last = codes.index(frame.f_code) if frame is not None and frame.f_code in codes else 0
    while last + 1 < len(codes) and codes[last].co_flags & inspect.CO_GENERATOR:  # it is a context manager's
        last += 1
    return any(_says_false(*site, of_library=of_library) for site in sites[: last + 1])


@functools.cache
def _says_false(code: CodeType, instruction: int, *, of_library: bool) -> bool:
    """Return whether a call has `False` among its arguments as written; unless asked, of a library's it is assumed."""
    first, last, *_ = list(code.co_positions())[instruction // 2]
    if not (of_library or is_users(code.co_filename)) or first is None or last is None:
        return True
    return any("False" in linecache.getline(code.co_filename, number) for number in range(first, last + 1))
