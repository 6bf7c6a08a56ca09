# SPDX-License-Identifier: Apache-2.0
"""Replaces functions of TensorFlow and Keras, and restores them.

The table of `tfdist_ext.hooks` lists all attributes that this package replaces.
An attribute is replaced as long as an object needs it: `hold` registers the
object. `release`, or the deletion of the object, removes the registration.
Without registered objects Keras and TensorFlow are unchanged.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import importlib
import inspect
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

StageFn = Callable[..., Any]


class Need(enum.Enum):
    """Reasons to replace attributes."""

    STRATEGY = "an open strategy"
    RANKS = "an open strategy of several ranks"
    VARIABLES = "a strategy, also one that is closed"
    TABLES = "a layer with tables"
    MAX_NORM = "a table with `max_norm`"
    VOCABULARY = "a dynamic vocabulary"
    CHECKPOINTS = "a callback that saves checkpoints"
    TIMELINE = "a `Timeline`"
    UPDATE_WATCH = "a `NanGuard` or an `EmbeddingMonitor`"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A function that is called instead of a replaced one.

    Attributes:
        call: function of the inner function (the next stage, or the original)
            and the arguments of the call.
        needs: the stage is active while an object is held for one of these.
    """

    call: StageFn
    needs: frozenset[Need]


def stage(call: StageFn, *needs: Need) -> Stage:
    """A stage that is active while one of these needs is held."""
    return Stage(call, frozenset(needs))


@dataclasses.dataclass(frozen=True)
class Hook:
    """An attribute that this package replaces, and its stages.

    Attributes:
        owner: a class or a module.
        name: name of the attribute.
        why: what does not work without the hook.
        upstream: a change of Keras or TensorFlow that would replace the hook.
        stages: stages of a call, the outermost first.
        plain: whether AutoGraph calls the stages without conversion. Functions
            that they call are then converted, or not, as without the hook.
        subclasses: if given, the attribute is replaced in subclasses of the
            owner that define it and for which this function returns True,
            also in subclasses that are defined later; not in the owner.
    """

    owner: Any
    name: str
    why: str
    upstream: str
    stages: Sequence[Stage]
    plain: bool = False
    subclasses: Callable[[type], bool] | None = None


def hook(
    owner: Any,
    name: str,
    why: str,
    upstream: str,
    *stages: Stage,
    plain: bool = False,
    subclasses: Callable[[type], bool] | None = None,
) -> Hook:
    """Creates a `Hook`."""
    return Hook(owner, name, why, upstream, stages, plain, subclasses)


def hold(need: Need, holder: object) -> None:
    """Replaces what an object needs, until it is released or deleted.

    Args:
        need: reason to replace attributes.
        holder: any object that can be referenced weakly. A second call with
            the same object has no effect.
    """
    with _lock:
        holders = _holders.setdefault(need, {})
        if id(holder) not in holders:
            holders[id(holder)] = weakref.finalize(
                holder, _forget, need, id(holder)
            )
            holders[id(holder)].atexit = False  # type: ignore[misc]
            if len(holders) == 1:
                _update()


def release(holder: object) -> None:
    """Ends all needs of an object."""
    with _lock:
        for need, holders in _holders.items():
            if id(holder) in holders:
                holders[id(holder)].detach()
                _forget(need, id(holder))


def extend(owner: type, name: str, added: Stage) -> None:
    """Adds a stage to a method of a class that is not in the table.

    The stage is active while one of its needs is held.

    Args:
        owner: the class.
        name: name of the method.
        added: the stage. A second call with the same stage has no effect.
    """
    with _lock:
        patch = _patches.get((id(owner), name))
        if patch is None:
            patch = _Patch(owner, name, False, [added])
        patch.use(_needed())


@dataclasses.dataclass
class _Target:
    """The function that an installed function calls; references its patch.

    Each installed function has its own target. Code that stored an earlier
    installed function still calls the original of that time.
    """

    patch: _Patch
    call: StageFn


class _Patch:
    """One replaced attribute and its stages."""

    def __init__(
        self, owner: Any, name: str, plain: bool, stages: Sequence[Stage]
    ) -> None:
        self.owner, self.name, self._plain = owner, name, plain
        self._stages = stages
        self._used: list[Stage] = []
        self._installed: Any = None
        _patches[id(owner), name] = self

    def _find_original(self) -> Any:
        owner, name = self.owner, self.name
        found = getattr(owner, name, None)
        if found is None and hasattr(builtins, name):
            # The module gets an attribute in place of a builtin function,
            # which other code may replace as well.
            return lambda *args: getattr(builtins, name)(*args)
        bound = inspect.ismethod(found)
        if self._own is not _ABSENT or not isinstance(owner, type) or bound:
            return found
        if found is None:
            return None

        # The base class may have a patch of its own. A stage may pass an
        # object that is no instance of the class.
        @functools.wraps(found)
        def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, owner):
                return found(self, *args, **kwargs)
            return getattr(super(owner, self), name)(*args, **kwargs)

        return inherited

    def use(self, needed: set[Need]) -> None:
        """Activates the stages of the needs that are held."""
        used = [each for each in self._stages if each.needs & needed]
        if used == self._used:
            return
        new = self._installed is None
        if new:  # Another library may have replaced the attribute meanwhile.
            self._own = vars(self.owner).get(self.name, _ABSENT)
            self._original = self._find_original()
        call = self._original
        for each in reversed(used):
            call = _around(each.call, call)
        self._used = used
        if new:
            self._install(_Target(self, call))
            return
        self._target.call = call
        if not used:
            self._remove()

    def _install(self, target: _Target) -> None:
        def patched(*args: Any, **kwargs: Any) -> Any:
            return target.call(*args, **kwargs)

        self._target = target

        if self._original is not None:
            functools.update_wrapper(patched, self._original)
        if self._plain:
            patched.autograph_info__ = {}  # type: ignore[attr-defined]
        bound = isinstance(self._own, staticmethod | classmethod)
        self._installed = staticmethod(patched) if bound else patched
        setattr(self.owner, self.name, self._installed)

    def _remove(self) -> None:
        # If another library has replaced the attribute since, its function
        # still calls this one, which calls the original.
        if vars(self.owner).get(self.name) is not self._installed:
            return
        self._installed = None
        if self._own is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._own)


_ABSENT = object()


def _around(call: StageFn, inner: Any) -> Any:
    def staged(*args: Any, **kwargs: Any) -> Any:
        return call(inner, *args, **kwargs)

    if inner is not None:
        functools.update_wrapper(staged, inner)
    return staged


class _Subclasses:
    """A replaced method in the subclasses of a class, also in later ones."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._installed = False

    def use(self, needed: set[Need]) -> None:
        """Activates the stages of the needs that are held."""
        wanted = any(each.needs & needed for each in self._hook.stages)
        if wanted != self._installed:
            self._installed = wanted
            self._watch() if wanted else self._unwatch()

    def _watch(self) -> None:
        base = self._hook.owner
        assert "__init_subclass__" not in vars(base)

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            with _lock:
                self._add(cls)

        base.__init_subclass__ = classmethod(init_subclass)
        for cls in _subclasses(base):
            self._add(cls)

    def _unwatch(self) -> None:
        del self._hook.owner.__init_subclass__

    def _add(self, cls: type) -> None:
        hook = self._hook
        assert hook.subclasses is not None
        if hook.name not in vars(cls) or not hook.subclasses(cls):
            return
        if (id(cls), hook.name) not in _patches:
            patch = _Patch(cls, hook.name, hook.plain, hook.stages)
            patch.use(_needed())


def _subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


_lock = threading.RLock()
_holders: dict[Need, dict[int, weakref.finalize[Any, Any]]] = {}
# Patches by the id of the owner and the name. A patch is referenced by its
# installed function, or by the table.
_patches: weakref.WeakValueDictionary[tuple[int, str], _Patch] = (
    weakref.WeakValueDictionary()
)


@functools.cache
def _table() -> list[_Patch | _Subclasses]:
    hooks = importlib.import_module("tfdist_ext.hooks.table").table()
    return [
        _Subclasses(hook)
        if hook.subclasses is not None
        else _Patch(hook.owner, hook.name, hook.plain, hook.stages)
        for hook in hooks
    ]


def _needed() -> set[Need]:
    return {need for need, holders in _holders.items() if holders}


def _forget(need: Need, holder: int) -> None:
    with _lock:
        _holders[need].pop(holder, None)
        if not _holders[need]:
            _update()


class _Update:
    """Whether `_update` is running, and whether it must run once more."""

    running = False
    again = False


def _update() -> None:
    # The garbage collector may delete a holder during this call, and call
    # this function again from within it.
    _Update.again = True
    if _Update.running:
        return
    _Update.running = True
    try:
        while _Update.again:
            _Update.again = False
            needed = _needed()
            for each in (*_table(), *_patches.values()):
                each.use(needed)
    finally:
        _Update.running = False
