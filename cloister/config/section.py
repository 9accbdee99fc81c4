"""The one strict section that every file of settings is read into, and the types of its keys."""

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
    """The name of a field as it is written in a file."""
    return name.replace("_", "-")


class Section(BaseModel):
    """A frozen group of keys that refuses what it does not know, converts nothing and has no NaN and no infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True, allow_inf_nan=False
    )

    def leaves(self) -> dict[str, Scalar]:
        """The flat keys with their values; those of a section inside this one stand beside its own."""
        found: dict[str, Scalar] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            found |= value.leaves() if isinstance(value, Section) else {field.alias or name: value}
        return found
