"What the tutorials define, for tests that hold it to more than the page shows."

import ast
import json
from functools import cache

from places import TUTORIALS

DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


@cache
def page(name):
    "All that a tutorial imports and defines"
    cells = json.loads((TUTORIALS / f"{name}.ipynb").read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    nodes = [
        o
        for source in sources
        for o in ast.parse(source).body
        if isinstance(o, DEFINITIONS) and "nbdev" not in ast.unparse(o)
    ]
    names = {"dls": None}  # The default of an argument
    exec(compile(ast.Module(nodes, []), name, "exec"), names)
    return names
