"""What a provider's own types say of our JSON: every field known, of its type, none missing."""

from functools import cache
from typing import Any

from require import require

pydantic = require("pydantic")


def strictly(kind: Any, data: Any) -> Any:
    """`data` as the SDK's type `kind`, validated: the SDKs themselves take what comes."""
    value = _adapter(kind).validate_python(data, strict=True)
    _no_extra(value)
    return value


@cache  # of a union of many types it takes a tenth of a second to make
def _adapter(kind: Any) -> Any:
    return pydantic.TypeAdapter(kind)


def _no_extra(value: Any) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, f"{type(value).__name__} knows no {value.model_extra}"
        for name in type(value).model_fields:
            _no_extra(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _no_extra(item)
