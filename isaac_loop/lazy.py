"""A face: a module that lists names of other modules, and imports one of these when its name is asked for.

The list is the imports under `if TYPE_CHECKING:`, where editors and type checkers read it as well.
"""
import ast
import linecache
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
        if public not in listed(): raise _not_here(face, public)
        module,there = listed()[public]
        found = import_module(module, face.__package__)
        return getattr(found, there) if there else found

    def __dir__(): return {*listed(), *(o for o in vars(face) if o.startswith('__'))}

    return __getattr__, __dir__


def nothing_more(name):
    "`__getattr__` of a module called `name` that has all its names already"
    def __getattr__(public): raise _not_here(sys.modules[name], public)
    return __getattr__


def _not_here(face, public):
    "The error for a name that `face` does not list, with the place or the name that it has here"
    hint = _hint(public) if not _is_module(face, public) else ''
    message = f'module {face.__name__!r} has no attribute {public!r}' + (f'.{hint}' if hint else '')
    if hint and _at_import(sys._getframe(2)): return ImportError(message)
    return AttributeError(message, name=None, obj=None) if hint else AttributeError(message) # One guess

def _at_import(frame):
    "Whether this is `from ... import ...`, where Python's own message takes the place of an AttributeError"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return frame.f_code.co_name == '_handle_fromlist' or line.lstrip().startswith('from ')

def _is_module(face, public):
    "Whether `public` is a module beside or below `face`, which Python is about to import"
    folder = Path(face.__file__).parent
    return (folder/f'{public}.py').exists() or (folder/public).is_dir()

def _hint(public):
    "Where `public` is, or what it is called"
    words = import_module('.basics.old_names', __package__)
    package,known = Path(__file__).parent,{}
    for path in [package/'__init__.py', package/'callbacks.py', *sorted(package.glob('*/__init__.py'))]:
        names = _imports(path.read_text())
        known |= names
        if public in names:
            place = path.stem if path.parent == package else path.parent.name
            return f' It is in `{__package__}.{place}`.'.replace('.__init__', '')
    return words.called_here(public, words.NAMES) or _near(public, known)

def _near(public, known):
    "A question after the callback that ends in `CB` instead, or else after the nearest name"
    as_callback = public.removesuffix('Callback')+'CB'
    if as_callback in known: return f' Did you mean `{as_callback}`?'
    others = [o for o in known if not public.endswith(o)] # An `RNNCallback` is no `Callback` misspelt
    return import_module('.basics.checks', __package__).did_you_mean(public, others, cutoff=0.8)


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
    "Have an IPython, where there is one, show what each parameter means, and say what old names are here"
    if 'IPython' not in sys.modules: return
    shell = sys.modules['IPython'].get_ipython()
    if shell is None: return
    import_module('.basics.notebook_help', __package__).show_docments(shell)
    import_module('.basics.old_names', __package__).tell_in(shell)
