"""A plugin of mypy: `record.with_fields(name=value)` is checked as the record's constructor is, name by name.

pydantic takes any mapping in `model_copy(update=...)`, and mypy any too: a field with a wrong name or type
would be written to etcd and fail in the process that reads it.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_NAMED_OPT, ARG_STAR2, CallExpr
from mypy.plugin import MethodSigContext, Plugin
from mypy.types import CallableType, FunctionLike, Instance, TypedDictType, get_proper_type

METHOD = ".with_fields"
BASE = ".record.Record"


class TypedCopies(Plugin):
    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        return _signature if fullname.endswith(METHOD) else None


def _signature(context: MethodSigContext) -> FunctionLike:
    """The fields of the record, each optional, with the types that the pydantic plugin gave
    `model_construct`."""
    record = get_proper_type(context.type)
    if not isinstance(record, Instance) or not any(base.fullname.endswith(BASE) for base in record.type.mro):
        return context.default_signature
    made = record.type.get_method("model_construct")
    construct = get_proper_type(made.type) if made is not None else None
    if not isinstance(construct, CallableType):
        return context.default_signature
    fields = [
        (name, kind)
        for name, kind in zip(construct.arg_names, construct.arg_types, strict=True)
        if name not in (None, "_cls", "_fields_set", "cls")
    ]
    if isinstance(call := context.context, CallExpr):
        for value, kind in zip(call.args, call.arg_kinds, strict=True):
            given = get_proper_type(context.api.get_expression_type(value)) if kind is ARG_STAR2 else None
            if given is not None and not isinstance(given, TypedDictType):
                context.api.fail("with_fields(**mapping): name the fields, or give a TypedDict", call)
    return context.default_signature.copy_modified(
        arg_names=[name for name, _ in fields],
        arg_types=[kind for _, kind in fields],
        arg_kinds=[ARG_NAMED_OPT for _ in fields],
    )


def plugin(version: str) -> type[Plugin]:
    return TypedCopies
