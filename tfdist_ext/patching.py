# SPDX-License-Identifier: Apache-2.0
"""Puts stages around methods of TensorFlow and Keras, and removes them again.

The table of `tfdist_ext.hooks` lists all attributes that this package replaces.
They are replaced while an object that needs it is there: `hold` says so, and
`release`, or the end of the object, takes it back. With nothing held, Keras and
TensorFlow are as they were before.
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
    """What attributes are replaced for."""

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
    """A function through which calls go while it is needed.

    Attributes:
        call: takes the function that it stands around, then the arguments.
        needs: it is in use while one of these is held.
    """

    call: StageFn
    needs: frozenset[Need]


def stage(call: StageFn, *needs: Need) -> Stage:
    """A stage that is in use while one of these needs is held."""
    return Stage(call, frozenset(needs))


@dataclasses.dataclass(frozen=True)
class Hook:
    """An attribute that this package replaces, and by what.

    Attributes:
        owner: a class or a module.
        name: of its attribute.
        why: what does not work without it.
        upstream: what would make it unnecessary.
        stages: calls go through these, the first one first.
        plain: whether AutoGraph is to call it as it is. What it calls is then
            converted, or not, as before.
        subclasses: if given, the attribute is replaced in the classes that
            come from the owner and have their own, also in those that are
            defined later, if this is true of them; not in the owner.
    """

    owner: Any
    name: str
    why: str
    upstream: str
    stages: Sequence[Stage]
    plain: bool = False
    subclasses: Callable[[type[Any]], bool] | None = None


def hook(
    owner: Any,
    name: str,
    why: str,
    upstream: str,
    *stages: Stage,
    plain: bool = False,
    subclasses: Callable[[type[Any]], bool] | None = None,
) -> Hook:
    """An attribute, and the stages that it gets: see `Hook`."""
    return Hook(owner, name, why, upstream, stages, plain, subclasses)


def hold(need: Need, holder: Any) -> None:
    """Replaces what an object needs, until it is released or gone.

    Args:
        need: what for.
        holder: any object that can be referenced weakly; twice is once.
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


def release(holder: Any) -> None:
    """Takes back all that was held for an object."""
    with _lock:
        for need, holders in _holders.items():
            if id(holder) in holders:
                holders[id(holder)].detach()
                _forget(need, id(holder))


def extend(owner: type[Any], name: str, added: Stage) -> None:
    """Puts a stage around a method of a class that is known only now.

    It stands there as long as what it needs is held.

    Args:
        owner: the class.
        name: of its method.
        added: the stage; twice is once.
    """
    with _lock:
        patch = _patches.get((id(owner), name))
        if patch is None:
            patch = _Patch(owner, name, False, [added])
        patch.use(_needed())


@dataclasses.dataclass
class _Target:
    """What one function that was put in place calls; it keeps its patch.

    Each has its own: who kept a function from before still calls what it stood
    around then.
    """

    patch: _Patch
    call: StageFn


class _Patch:
    """One attribute, and the stages that stand around it."""

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
            # A module has its own in place of Python's, which others may
            # replace too.
            return lambda *args: getattr(builtins, name)(*args)
        bound = inspect.ismethod(found)
        if self._own is not _ABSENT or not isinstance(owner, type) or bound:
            return found
        if found is None:
            return None

        # What it comes from may have a patch of its own. A stage may call it
        # with what only resembles an instance.
        @functools.wraps(found)
        def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, owner):
                return found(self, *args, **kwargs)
            return getattr(super(owner, self), name)(*args, **kwargs)

        return inherited

    def use(self, needed: set[Need]) -> None:
        """Lets calls go through the stages for what is needed."""
        used = [each for each in self._stages if each.needs & needed]
        if used == self._used:
            return
        new = self._installed is None
        if new:  # another library may have replaced it since the last time
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
        # Where another library has replaced it since, that calls this still,
        # which calls the original.
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
    """A method in the classes that come from one, now and later."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._installed = False

    def use(self, needed: set[Need]) -> None:
        """Lets calls go through the stages for what is needed."""
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

    def _add(self, cls: type[Any]) -> None:
        hook = self._hook
        assert hook.subclasses is not None
        if hook.name not in vars(cls) or not hook.subclasses(cls):
            return
        if (id(cls), hook.name) not in _patches:
            patch = _Patch(cls, hook.name, hook.plain, hook.stages)
            patch.use(_needed())


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


_lock = threading.RLock()
_holders: dict[Need, dict[int, weakref.finalize[Any, Any]]] = {}
# By the owner's id and the name. The function that a patch has put in its place
# keeps it, and the table those that are listed there.
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
    """Whether `_update` runs, and is to run once more."""

    running = False
    again = False


def _update() -> None:
    # An object whose end the garbage collector notes meanwhile asks for it
    # again, within this call.
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
