"""What was built is whole: `python tools/check_dist.py dist`.

The wheel has the types and the digits but not nbdev's index, and links of the README lead somewhere from
anywhere; the source distribution has what one needs to change and test the library.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path


def check_wheel(path):
    "Raise an error that says what the wheel lacks, or has too much"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (wheel.read(o).decode() for o in names if o.endswith("METADATA"))
    wanted = "py.typed loop/trainer.pyi data/digits-train.parquet all.py"
    missing = {f"isaac_loop/{name}" for name in wanted.split()} - names
    if missing:
        raise SystemExit(
            f"{path.name} lacks {', '.join(sorted(missing))}. See `package-data` in pyproject.toml."
        )
    if "isaac_loop/_modidx.py" in names:
        raise SystemExit(f"{path.name} holds nbdev's index, a third of its size. See setup.py.")
    relative = re.findall(r"\]\((?![a-z]+:|#)([^)]*)\)", metadata)
    if relative:
        raise SystemExit(f"Links in the description of {path.name} lead nowhere: {relative}. See setup.py.")


def check_sdist(path):
    "Raise an error that says what the source distribution lacks"
    with tarfile.open(path) as sdist:
        names = {o.split("/", 1)[-1] for o in sdist.getnames()}
    wanted = (
        "nbs/loop/20_trainer.ipynb tools/coverage.py tests/conftest.py constraints.txt Makefile docs/conf.py"
    )
    missing = [o for o in wanted.split() if o not in names]
    if missing:
        raise SystemExit(f"{path.name} lacks {', '.join(missing)}. See MANIFEST.in.")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    print(f"{wheel.name} and {sdist.name} are whole")
