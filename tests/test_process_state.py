# SPDX-License-Identifier: Apache-2.0
"""What is kept per process has one owner; nothing else in `src` keeps any."""

from __future__ import annotations

import ast
import os
import signal
import threading

import pytest
from sources import ROOT, nodes_of, tree_of

from stretto.process_state import STATE, ProcessPart, ProcessState

OWNER = "process_state.py"
REGISTRIES = {
    ("planner/baselines.py", "BASELINES"),
    ("workload/registry.py", "MODELS"),
}
"""Filled while modules are loaded, and only read afterwards. So are all objects of `registry.Registry`."""
MUTABLE = frozenset(
    [
        "dict",
        "list",
        "set",
        "bytearray",
        "deque",
        "defaultdict",
        "OrderedDict",
        "Counter",
        "WeakSet",
        "WeakValueDictionary",
        "WeakKeyDictionary",
        "count",
        "Queue",
        "SimpleQueue",
        "LifoQueue",
        "PriorityQueue",
        "Lock",
        "RLock",
        "Event",
        "Condition",
        "Semaphore",
        "Barrier",
        "local",
        "Thread",
        "ContextVar",
    ]
)
CHANGES = frozenset(
    [
        "append",
        "appendleft",
        "add",
        "update",
        "pop",
        "popitem",
        "popleft",
        "clear",
        "setdefault",
        "remove",
        "extend",
        "discard",
        "insert",
        "put",
        "set",
        "sort",
    ]
)


def changes(node: ast.ClassDef) -> bool:
    """Whether objects of a class change after they were made: a method other than `__init__` sets an attribute."""
    methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name != "__init__"]
    stored = (a for method in methods for a in ast.walk(method) if isinstance(a, ast.Attribute))
    return any(isinstance(a.ctx, ast.Store) and getattr(a.value, "id", "") == "self" for a in stored)


def classes_that_change() -> set[str]:
    """Names of classes of ours whose objects change."""
    nodes = (node for path in ROOT.rglob("*.py") for node in nodes_of(path))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef) and changes(node)}


def has_fields(node: ast.ClassDef) -> bool:
    """Whether what the body of a class assigns are defaults, of which every object gets its own."""
    return any("Struct" in ast.unparse(base) for base in node.bases)


def called(node: ast.expr) -> str:
    """The last name of what a call calls; empty for another expression."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return getattr(function, "attr", getattr(function, "id", ""))


def assigned(body: list[ast.stmt]) -> list[tuple[str, ast.expr]]:
    """Names and values of the assignments of a module or a class."""
    found: list[tuple[str, ast.expr]] = []
    for node in body:
        if isinstance(node, ast.Assign):
            found += [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            found.append((node.target.id, node.value))
    return found


def empty_or_mutable(value: ast.expr, changing: set[str]) -> bool:
    """Whether a value that a module or a class begins with is there to be changed."""
    if (isinstance(value, ast.List | ast.Set) and not value.elts) or (isinstance(value, ast.Dict) and not value.keys):
        return True
    return called(value) in changing or (called(value) in MUTABLE and not (isinstance(value, ast.Call) and value.args))


def changed_inside(tree: ast.Module, names: set[str]) -> list[str]:
    """Containers of a module that one of its functions changes, and classes that any function changes."""
    found = []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    local = {a.arg for f in functions for a in (*f.args.args, *f.args.kwonlyargs)}
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Global):
            found += node.names
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            name = getattr(node.value, "id", "")
            classlike = name[:1].isupper() and not name.isupper() and isinstance(node, ast.Attribute)
            if classlike or name == "cls" or (isinstance(node, ast.Subscript) and name in names):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in CHANGES and isinstance(owner, ast.Name) and owner.id in names - local:
                found.append(ast.unparse(node.func))
    return found


def kept(tree: ast.Module, changing: set[str]) -> list[str]:
    """What a file keeps per process by itself."""
    own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    changing = changing - {node.name for node in own if not changes(node)}
    bodies = [tree.body, *(node.body for node in own if not has_fields(node))]
    made = [(name, value) for body in bodies for name, value in assigned(body)]
    from_state = {
        name for name, value in made if called(value) in ("part", "TypeVar", "LateFunction") or name == "__slots__"
    }
    found = [name for name, value in made if name not in from_state and empty_or_mutable(value, changing)]
    names = {name for name, _ in assigned(tree.body)} - from_state
    return [*found, *changed_inside(tree, names - set(found))]


@pytest.mark.parametrize(
    "text",
    [
        "_known: dict[int, int] = {}",
        "_lock = threading.Lock()",
        "_numbers = itertools.count()",
        "_alive: weakref.WeakSet[int] = weakref.WeakSet()",
        "LEDGER = Ledger()",
        "TABLE = {1: 2}\ndef note(key):\n    TABLE[key] = 1",
        "SEEN = [1]\ndef note(key):\n    SEEN.append(key)",
        "class Current:\n    made: list[int] = []",
        "class Job:\n    current = None\n    def begin(self):\n        Job.current = self",
        "class Job:\n    current = None\n    @classmethod\n    def begin(cls):\n        cls.current = cls()",
        "x = 1\ndef f():\n    global x\n    x = 2",
    ],
)
def test_the_checker_sees_every_form(text: str) -> None:
    assert len(kept(ast.parse(text), {"Ledger"})) == 1


def test_only_the_owner_keeps_what_changes() -> None:
    changing = classes_that_change()
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in sorted(ROOT.rglob("*.py"))
        if str(path.relative_to(ROOT)) != OWNER
        for name in kept(tree_of(path), changing)
    }
    assert found == REGISTRIES


class Sample(ProcessPart):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.job: str | None = None

        self.forks: list[str] = []

    def job_ended(self) -> None:
        self.job = None

    def before_fork(self) -> None:
        self.forks.append("before")

    def after_fork_in_parent(self) -> None:
        self.forks.append("after")

    def after_fork(self) -> None:
        self.lock = threading.Lock()


def test_there_is_one_object_of_a_kind_and_a_job_takes_its_own_with_it() -> None:
    state = ProcessState()
    sample = state.part(Sample)
    assert state.part(Sample) is sample
    sample.job = "a job"
    state.job_ended()
    assert sample.job is None and state.part(Sample) is sample


def test_a_fork_is_told_before_and_after() -> None:
    sample = STATE.part(Sample)
    child = os.fork()
    if not child:
        os._exit(0 if sample.forks == ["before"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sample.forks == ["before", "after"]


def test_numbers_go_on_when_a_job_ends() -> None:
    state = ProcessState()
    assert [state.number("a"), state.number("a"), state.number(("b", 1))] == [1, 2, 1]
    state.job_ended()
    assert [state.number("a"), state.number(("b", 1))] == [3, 2]


def test_a_forked_child_gets_locks_that_nobody_holds() -> None:
    from stretto.files import typed
    from stretto.runtime.torch_backend.recording import LEDGER

    forks = STATE.forks
    with LEDGER._lock:
        child = os.fork()
        if not child:
            signal.alarm(60)
            typed(dict[str, list[int]])
            LEDGER.all()
            os._exit(0 if STATE.forks == forks + 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert STATE.forks == forks
