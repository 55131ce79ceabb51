"""Write `isaac_loop/callbacks.py`, the face of all callbacks, from the lists of the folders."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FACE = ROOT / "isaac_loop" / "callbacks.py"
HEAD = """"All callbacks, whichever folder they come from; written by tools/list_callbacks.py"
from typing import TYPE_CHECKING

from .lazy import lazy

if TYPE_CHECKING:
"""
FOOT = """else:
    __getattr__, __dir__ = lazy(__name__)
"""


def face(root=ROOT):
    "The text of the face: every `…CB` that a folder lists, the folders in the order in which `all` has them"
    folders = re.findall(r"^ *from \.(\w+) import \*$", (root / "isaac_loop" / "all.py").read_text(), re.M)
    lines = []
    for folder in folders:
        text = (root / "isaac_loop" / folder / "__init__.py").read_text()
        names = re.findall(r"^    from \.\w+ import (\w+CB) as \1$", text, re.M)
        lines += [f"    from .{folder} import {name} as {name}\n" for name in names]
    return HEAD + "".join(lines) + FOOT


if __name__ == "__main__":
    FACE.write_text(face())
