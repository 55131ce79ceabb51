"""Draw the loop of the README's first example, as the README shows it."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main():
    "Run the example, and save the map of its trainer"
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[1]
    namespace = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block, "README.md", "exec"), namespace)
    path = ROOT / "docs" / "pictures" / "first_loop.svg"
    path.parent.mkdir(exist_ok=True)
    namespace["trainer"].map("loss").save(path)
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
