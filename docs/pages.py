"""The pages of the site, from README, notebooks and docments: `python docs/pages.py FOLDER`.

What is on a page is found, never listed: tutorials stand in the order of the README, chapters in their
folders as CONTRIBUTING names them, an API page for each module; a name in backticks leads to its place there.
"""

import importlib
import inspect
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Repository"] + "/blob/main/"
ORPHAN = (
    "---\norphan: true\n---\n"  # In no table of contents: 150 entries more would double the time of each page
)
KERNEL = dict(display_name="Python 3", language="python", name="python3")

# Text


def text(cell):
    "The source of a cell"
    return "".join(cell["source"])


def flags_of(source):
    "The directives of nbdev in a cell, by name"
    return dict(re.findall(r"^#\|\s*([\w-]+):?[ \t]*(.*)$", source, re.M))


def anchor(module, name):
    "Where on its API page a name stands"
    return re.sub(r"[._]", "-", f"{module}.{name}".lower()).strip("-")


def linked(markdown, places, depth):
    "`markdown` in which each name in backticks leads to its API page; not in code, links and headings"
    up = "../" * depth

    def link(found):
        whole = found[1].split("(")[0]
        name = next((o for o in (whole, whole.split(".")[0]) if o in places), None)
        return found[0] if name is None else f"[`{found[1]}`]({up}api/{places[name]})"

    parts = re.split(r"(```.*?```|\[[^\]]*\]\([^)]*\)|^#[^\n]*$)", markdown, flags=re.S | re.M)
    names = r"(?<!`)`([A-Za-z_]\w*(?:[.(][^`]*)?)`(?!`)"
    return "".join(part if i % 2 else re.sub(names, link, part) for i, part in enumerate(parts))


def outward(markdown, here):
    "`markdown` of a file in folder `here`, whose links to files that are no pages lead to the repository"

    def link(found):
        label, target = found.groups()
        path, _, place = target.partition("#")
        if re.match(r"[a-z]+:|#", target) or path.endswith(".ipynb"):
            return found[0]
        file = (ROOT / here / path).resolve()
        is_page = file.name in ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "coverage.md")
        if is_page or not file.exists():
            return found[0]
        return f"[{label}]({SOURCE}{file.relative_to(ROOT)}{'#' + place if place else ''})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, markdown)


# Notebooks


def notebooks():
    "All notebooks, as paths below `nbs`"
    found = (p.relative_to(NBS) for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return sorted(found)


def title(path):
    "The first heading of a notebook"
    cells = json.loads((NBS / path).read_text())["cells"]
    headings = (line for o in cells for line in text(o).splitlines() if line.startswith("# "))
    return next(headings, f"# {path.stem}").removeprefix("# ")


def shown_cell(cell, links):
    "What the site shows of a cell, or None; `links` puts links into text"
    source = text(cell)
    if cell["cell_type"] == "markdown":
        return cell | dict(source=links(source))
    flags = flags_of(source)
    code = re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip("\n")
    if not code or {"hide", "default_exp"} & set(flags):
        return None
    tags = ["exported"] * bool({"export", "exporti", "exports"} & set(flags))
    if flags.get("echo") == "false" or "hide_input" in flags:
        tags.append("remove-input")
    if flags.get("output") == "false" or "hide_output" in flags:
        tags.append("remove-output")
    return cell | dict(source=code, execution_count=None, metadata=dict(tags=tags))


def write_notebook(path, out, places):
    "One notebook as the site shows it"
    cells = json.loads((NBS / path).read_text())["cells"]
    depth = len(path.parts) - 1

    def links(markdown):
        return linked(outward(markdown, Path("nbs") / path.parent), places, depth)

    kept = [shown for cell in cells if (shown := shown_cell(cell, links)) is not None]
    meta = dict(kernelspec=KERNEL, language_info=dict(name="python"))
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    (out / path).write_text(json.dumps(dict(cells=kept, metadata=meta, nbformat=4, nbformat_minor=5)))


# API


def modules():
    "Each exported module by its name without the package, and its notebook"
    found = {}
    for path in notebooks():
        first = text(json.loads((NBS / path).read_text())["cells"][0])
        if "default_exp" in first:
            found[first.split("default_exp")[1].split()[0]] = path
    return found


def places_of(modules):
    "Where on the API pages each public name stands, and each method of the trainer, `fit` or `trainer.fit`"
    places = {}
    for module, found in modules.items():
        for name in getattr(found, "__all__", []):
            places.setdefault(name, f"{module}.md#{anchor(module, name)}")
    trainer = modules["loop.trainer"].Trainer
    for name in (o for o in vars(trainer) if is_method(trainer, o)):
        place = f"loop.trainer.md#{anchor('loop.trainer', f'Trainer.{name}')}"
        places |= {f"trainer.{name}": place, f"Trainer.{name}": place}
        if "_" in name or name == "fit":  # `save` and `split` alone may be those of others
            places.setdefault(name, place)
    return places


def is_method(cls, name):
    "Whether `cls` has a public method of this name that says what it does"
    method = getattr(vars(cls)[name], "__func__", vars(cls)[name])
    return not name.startswith("_") and inspect.isfunction(method) and bool(method.__doc__)


def shown_parameter(parameter):
    "A parameter as it is written in Python; a class or an object as default is its name"
    default = parameter.default
    if default is parameter.empty:
        return str(parameter.replace(annotation=parameter.empty))
    named = getattr(default, "__name__", None)
    value = named if callable(default) and named else repr(default)
    kind = parameter.replace(default=parameter.empty, annotation=parameter.empty)
    return f"{kind}={value if not value.startswith('<') else '...'}"


def signature(obj, name):
    "The call of `name`, on one line or on several"
    try:
        found = list(inspect.signature(obj).parameters.values())
    except (TypeError, ValueError):
        return name  # No function
    if "." in name and found and found[0].name == "self":
        found = found[1:]
    shown = []
    for p in found:
        starred = any(o.startswith("*") for o in shown)
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown.append("*")
        shown.append(shown_parameter(p))
    one_line = f"{name}({', '.join(shown)})"
    return one_line if len(one_line) < 90 else f"{name}(\n" + "".join(f"    {o},\n" for o in shown) + ")"


def parameters(obj, places):
    "A table of the parameters and the result, as docments tell them"
    from fastcore.docments import docments

    try:
        found = docments(obj.__init__ if inspect.isclass(obj) else obj, full=True, args_kwargs=True)
    except (OSError, TypeError, ValueError):
        return ""  # A dataclass has no source of `__init__`
    rows = {k: o for k, o in found.items() if k != "self" and o.docment}
    if not rows:
        return ""
    lines = ["| parameter | default | meaning |", "|---|---|---|"]
    for k, o in rows.items():
        default = "" if o.default is inspect.Parameter.empty else f"`{_default(o.default)}`"
        meaning = linked(o.docment.replace("|", r"\|").replace("\n", " "), places, 1)
        lines.append(
            f"| {'returns' if k == 'return' else f'`{_typed(k, o.anno)}`'} | {default} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def _typed(name, annotation):
    "A parameter with its type, as in Python"
    named = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return f"{name}: {named}" if named and named != "_empty" else name


def _default(value):
    named = getattr(value, "__name__", None)
    shown = named if callable(value) and named else repr(value)
    return (shown if not shown.startswith("<") else "...").replace("|", r"\|")


def entry(obj, name, module, places, level=2):
    "A name on an API page, with the public methods of a class below it"
    call = signature(obj, name) if callable(obj) else name
    kind = "class " if inspect.isclass(obj) else ""
    index = f"```{{index}} single: {name}\n```\n"  # What is in the index comes first in a search
    place = [index, f"({anchor(module, name)})=", f"{'#' * level} {name}\n"]
    lines = [*place, f"```python\n{kind}{call}\n```\n"]
    if callable(obj) and obj.__doc__:
        lines.append(linked(inspect.cleandoc(obj.__doc__), places, 1) + "\n")
    if callable(obj):
        lines.append(parameters(obj, places))
    if inspect.isclass(obj):
        for key in (o for o in vars(obj) if is_method(obj, o)):
            method = getattr(vars(obj)[key], "__func__", vars(obj)[key])
            lines += entry(method, f"{name}.{key}", module, places, level + 1)
    return lines


def api_page(module, found, notebook, places):
    "The page of one module"
    up = f"../{notebook}"
    says = (found.__doc__ or "").rstrip(".")
    head = [
        ORPHAN,
        f"# {module}\n",
        f"{says}. Its chapter: [{title(notebook)}]({up}); [all modules](index.md)\n",
    ]
    names = [name for name in getattr(found, "__all__", []) if hasattr(found, name)]
    body = [line for name in names for line in entry(getattr(found, name), name, module, places)]
    return "\n".join(head + body)


def api_index(found):
    "All modules with what they are about, folder by folder"
    lines = ["# API\n"]
    for folder in folders():
        mine = {module: o for module, o in found.items() if module.split(".")[0] == folder}
        rows = [f"| [{module}]({module}.md) | {o.__doc__ or ''} |" for module, o in mine.items()]
        lines += [f"\n## {folder}\n", "| module | what it is about |", "|---|---|", *rows] * bool(rows)
    return "\n".join(lines) + "\n"


# The tree


def tree(entries, caption="", hidden=True):
    "A table of contents"
    options = ":hidden:\n" * hidden + f":caption: {caption}\n" * bool(caption) + ":maxdepth: 1\n"
    return "```{toctree}\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def folders():
    "What each folder holds, as CONTRIBUTING says, from the loop up to what stands on it"
    table = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    return dict(reversed(table))


def tutorials(readme):
    "The tutorials, in the order in which the README lists them"
    found = [p for p in notebooks() if p.parts[0] == "tutorials"]
    listed = re.findall(r"tutorials/(\w+)\.ipynb", readme)
    order = {name: i for i, name in reversed(list(enumerate(listed)))}
    lists = re.search(r"^1\. \[.*?(?=^What a parameter|\Z)", readme, re.S | re.M)
    if lists:
        order |= {name: -99 + i for i, name in enumerate(re.findall(r"tutorials/(\w+)\.ipynb", lists[0]))}
    return sorted(found, key=lambda p: order.get(p.stem, 99))


def write_chapters(out):
    "A page for each folder, which lists its notebooks; returns their names"
    says = folders()
    names = [o for o in says if (NBS / o).is_dir()]
    for name in names:
        mine = [f"/{p.with_suffix('')}" for p in notebooks() if p.parts[0] == name]
        says_it = says[name][0].upper() + says[name][1:]
        (out / f"folder-{name}.md").write_text(f"# {name}\n\n{says_it}.\n\n{tree(mine, hidden=False)}")
    return [f"folder-{name}" for name in names]


def write_pages(out):
    "All pages of the site, into the folder `out`"
    from isaac_loop import all as everything  # noqa: F401 (a public name is at home where `all` has it from)

    chapters = modules()
    found = {module: importlib.import_module(f"isaac_loop.{module}") for module in chapters}
    places = places_of(found)
    shutil.rmtree(out, ignore_errors=True)
    (out / "api").mkdir(parents=True)
    for path in notebooks():
        write_notebook(path, out, places)
    for module, mod in found.items():
        (out / "api" / f"{module}.md").write_text(api_page(module, mod, chapters[module], places))
    (out / "api" / "index.md").write_text(api_index(found))
    write_texts(out, places, write_chapters(out))


def write_texts(out, places, chapters):
    "The pages that are text: the README as the index, and what is for reference"
    readme = (ROOT / "README.md").read_text()
    for name in ("CHANGELOG", "CONTRIBUTING"):
        page = outward((ROOT / f"{name}.md").read_text(), ".")
        (out / f"{name}.md").write_text(page.replace("](nbs/", "]("))
    coverage = re.sub(
        r"\A---\n.*?---\n", "# What is shown where\n", (NBS / "coverage.md").read_text(), flags=re.S
    )
    (out / "coverage.md").write_text(outward(coverage, "nbs"))
    index = linked(outward(readme, ".").replace("](nbs/", "](").replace("](docs/", "]("), places, 0)
    shutil.copytree(ROOT / "docs" / "pictures", out / "pictures")
    first = tree([str(p.with_suffix("")) for p in tutorials(readme)], "Tutorials")
    rest = tree(["api/index", "coverage", "CHANGELOG", "CONTRIBUTING"], "Reference")
    (out / "index.md").write_text("\n".join([index, first, tree(chapters, "Chapters"), rest]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write_pages(Path(sys.argv[1]).resolve())
