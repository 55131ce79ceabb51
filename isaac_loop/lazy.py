"""A face: a module that lists names of other modules, and imports one of these when its name is asked for.

The list is the imports under `if TYPE_CHECKING:`, where editors and type checkers read it as well.
"""
import ast
import sys
from functools import cache
from importlib import import_module
from pathlib import Path


def lazy(name):
    "`__getattr__` and `__dir__` of the face called `name`; the first also gives `__all__`, without modules"
    face = sys.modules[name]

    @cache
    def listed():
        "The list, read when somebody asks: whoever imports a module of the folder does not pay for it"
        return _imports(Path(face.__file__).read_text())

    def __getattr__(public):
        if public == '__all__': return [o for o,(_,there) in listed().items() if there]
        if public not in listed(): raise AttributeError(f'module {name!r} has no attribute {public!r}')
        module,there = listed()[public]
        found = import_module(module, face.__package__)
        return getattr(found, there) if there else found

    def __dir__(): return {*listed(), *(o for o in vars(face) if o.startswith('__'))}

    return __getattr__, __dir__


def _imports(source):
    "For each name under `if TYPE_CHECKING:`, its module and its name in there; None if it is the module"
    conditions = [o for o in ast.parse(source).body if isinstance(o, ast.If)]
    block = next(o for o in conditions if ast.unparse(o.test) == 'TYPE_CHECKING')
    imports = {}
    for node in block.body:
        dots = '.'*node.level
        for name in node.names:
            imports[name.asname] = (dots+node.module, name.name) if node.module else (dots+name.name, None)
    return imports


def help_in_notebooks():
    "Have `?` and Shift-Tab show what each parameter means, where there is an IPython"
    if 'IPython' not in sys.modules: return
    module = import_module('.basics.notebook_help', __package__)
    module.show_docments(sys.modules['IPython'].get_ipython())
