"""The table of all commands: what each does, in groups as help shows them, with examples.

Help, completion, the page of all commands and the parser are made from it.
"""

from collections.abc import Mapping

from ..recipes.packages import table_beside

_TABLE = table_beside(__file__)
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": tuple(_TABLE.pop("draftquant")["examples"]),
    **{name: tuple(row["examples"]) for rows in _TABLE.values() for name, row in rows.items()},
}
"""Command, or command and verb -> command lines; "" = `draftquant` itself."""
SUMMARIES: Mapping[str, str] = {
    name: row["does"] for rows in _TABLE.values() for name, row in rows.items()
}
"""Command, or command and verb -> what it does."""
EPILOGS: Mapping[str, str] = {
    name: row["epilog"] for rows in _TABLE.values() for name, row in rows.items() if "epilog" in row
}
"""Command -> the last paragraph of its help."""
GROUPS: Mapping[str, Mapping[str, str]] = {
    group: {name: SUMMARIES[name] for name in rows if " " not in name}
    for group, rows in _TABLE.items()
}
"""Heading -> command -> what it does."""
COMMANDS: Mapping[str, str] = {
    name: summary for group in GROUPS.values() for name, summary in group.items()
}
