"""Messages as JSON, for people and scripts."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_INT64_TYPES: Final = (
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT64,
)


def json_form(message: Message) -> dict[str, Any]:
    """Return a message as protobuf's JSON mapping has it, zeros included, and numbers as numbers.

    The mapping makes strings of 64-bit integers, for JavaScript's sake; its parsers take both.
    """
    form: dict[str, Any] = MessageToDict(message, always_print_fields_with_no_presence=True)
    _numbers(message, form)
    return form


def _numbers(message: Message, form: dict[str, Any]) -> None:
    """Replace the strings of 64-bit integers, in place."""
    for field in message.DESCRIPTOR.fields:
        name = field.json_name
        value = getattr(message, field.name)
        if name not in form:
            continue
        if field.cpp_type in _INT64_TYPES:
            form[name] = list(value) if field.is_repeated else value
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            values, forms = (value, form[name]) if field.is_repeated else ([value], [form[name]])
            for part, part_form in zip(values, forms, strict=True):
                if isinstance(part_form, dict):  # durations and the like are strings
                    _numbers(part, part_form)
