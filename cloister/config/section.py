"""Strict base class of all configuration sections, and the types of their keys."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Scalar = str | int | float | bool
Auto = Literal["auto"]
Count = Annotated[int, Field(gt=0)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Inner = Annotated[float, Field(gt=0, lt=1)]
Word = Annotated[str, Field(pattern=r"^\w{0,200}$")]


def kebab(name: str) -> str:
    """Return the name of a field in the spelling of configuration files."""
    return name.replace("_", "-")


class Section(BaseModel):
    """Frozen group of keys: refuses unknown keys, converts no types, and refuses NaN and infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True, allow_inf_nan=False
    )

    def leaves(self) -> dict[str, Scalar]:
        """Return the flat keys with their values, including those of nested sections."""
        found: dict[str, Scalar] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            found |= value.leaves() if isinstance(value, Section) else {field.alias or name: value}
        return found
