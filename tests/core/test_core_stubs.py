"""The stubs say what the compiled modules have: the same names, the same signatures."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.compiled import NAMES

import nsq_fast
from nsq_fast._codec import Records

PACKAGE = Path(nsq_fast.__file__).parent
MODULES = [import_module(f"nsq_fast.{name}") for name in NAMES]
# made by the interpreter or by Cython for every class
MACHINERY = set(dir(object)) | {"__pyx_vtable__", "__setstate_cython__", "__reduce_cython__", "__test__", "__next__"}
IMPORTED = {"json", "namedtuple", "deque", "server_error"}

Scope = dict[str, ast.stmt]


def stub_of(module: ModuleType) -> Scope:
    name = module.__name__.rpartition(".")[2]
    return scope_of(ast.parse((PACKAGE / f"{name}.pyi").read_text()).body)


def scope_of(body: list[ast.stmt]) -> Scope:
    scope: Scope = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            scope[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            scope[node.target.id] = node
    return scope


def public_names(module: ModuleType) -> set[str]:
    def is_ours(value: Any) -> bool:
        return getattr(value, "__module__", module.__name__) == module.__name__ and not inspect.ismodule(value)

    return {name for name, value in vars(module).items() if not name.startswith("_") and is_ours(value)} - IMPORTED


def classes() -> list[Any]:
    return [
        pytest.param(getattr(module, name), node, id=f"{module.__name__}.{name}")
        for module in MODULES
        for name, node in stub_of(module).items()
        if isinstance(node, ast.ClassDef)
    ]


def functions() -> list[Any]:
    found = []
    for module in MODULES:
        for name, node in stub_of(module).items():
            if isinstance(node, ast.FunctionDef):
                found.append(pytest.param(getattr(module, name), node, id=f"{module.__name__}.{name}"))
            if isinstance(node, ast.ClassDef):
                cls = getattr(module, name)
                found += [
                    pytest.param(getattr(cls, each.name), each, id=f"{module.__name__}.{name}.{each.name}")
                    for each in node.body
                    if isinstance(each, ast.FunctionDef) and not is_property(each) and not each.name.startswith("__")
                ]
    return found


def is_property(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list
    )


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_compiled_module_is_the_one_imported(module: ModuleType) -> None:
    assert module.__file__ is not None
    assert Path(module.__file__).suffix in {".so", ".pyd"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_names_of_modules(module: ModuleType) -> None:
    assert set(stub_of(module)) == public_names(module)


@pytest.mark.parametrize(("cls", "node"), classes())
def test_names_of_classes(cls: type, node: ast.ClassDef) -> None:
    if issubclass(cls, tuple):
        assert tuple(scope_of(node.body)) == cls._fields  # type: ignore[attr-defined]
        return
    inherited = {name for base in cls.__bases__ for name in vars(base)}
    declared = {name for name in scope_of(node.body) if name != "__init__"} | inherited
    own = {name for name in vars(cls) if not name.startswith("_") or name == "__len__"} - MACHINERY
    assert declared == own | inherited


@pytest.mark.parametrize(("cls", "node"), classes())
def test_bases_and_what_may_be_set(cls: type, node: ast.ClassDef) -> None:
    if issubclass(cls, tuple):
        return
    assert [base.id for base in node.bases if isinstance(base, ast.Name)] == [
        base.__name__ for base in cls.__bases__ if base is not object
    ]
    instance: Any = Records(bytes(4), b"") if cls is Records else cls.__new__(cls)
    for name, each in scope_of(node.body).items():
        if isinstance(each, ast.AnnAssign):
            setattr(instance, name, getattr(instance, name))
        elif is_property(each):
            with pytest.raises(AttributeError):
                setattr(instance, name, 0)


@pytest.mark.parametrize(("function", "node"), functions())
def test_signatures(function: Any, node: ast.FunctionDef) -> None:
    declared = [
        (name, kind, None if default is None else ast.literal_eval(default)) for name, kind, default in _declared(node)
    ]
    actual = [
        (each.name, each.kind, None if each.default is each.empty else each.default)
        for each in inspect.signature(function).parameters.values()
    ]
    assert declared == actual


def _declared(node: ast.FunctionDef) -> list[tuple[str, Any, ast.expr | None]]:
    arguments = node.args
    missing: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    kind = inspect.Parameter
    return (
        [
            (each.arg, kind.POSITIONAL_OR_KEYWORD, default)
            for each, default in zip(arguments.args, [*missing, *arguments.defaults], strict=True)
        ]
        + [(each.arg, kind.VAR_POSITIONAL, None) for each in (arguments.vararg,) if each is not None]
        + [
            (each.arg, kind.KEYWORD_ONLY, default)
            for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
    )


@pytest.mark.parametrize(("function", "node"), functions())
def test_every_public_function_says_what_it_does(function: Any, node: ast.FunctionDef) -> None:
    assert function.__doc__
