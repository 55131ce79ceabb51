"""Execute every notebook in a Jupyter kernel and save its outputs, then clean them."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def main():
    "Execute the notebooks whose path contains one of the arguments, or all"
    wanted = sys.argv[1:]
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm, about widgets that no output needs
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts or (wanted and not any(o in str(path) for o in wanted)):
            continue
        nb = nbformat.read(path, as_version=4)
        skipped = {
            i: c.source
            for i, c in enumerate(nb.cells)
            if c.cell_type == "code" and "nbdev_export()" in c.source
        }
        for i in skipped:
            nb.cells[i].source = ""
        NotebookClient(
            nb,
            timeout=600,
            coalesce_streams=True,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        ).execute()
        for i, source in skipped.items():
            nb.cells[i].source = source
        for cell in nb.cells:  # PyTorch's profiler prints the time at which it starts and stops
            if "outputs" in cell:
                cell.outputs = [
                    o for o in cell.outputs if not (o.output_type == "stream" and o.text.startswith("USDT:"))
                ]
                for o in cell.outputs:  # A temporary folder has another name each time
                    if o.output_type == "stream":
                        o.text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "...", o.text)
        nbformat.write(nb, path)
        print(path.relative_to(ROOT))
    subprocess.run([Path(sys.executable).parent / "nbdev-clean"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
