"What `pyproject.toml` cannot say: the README's links that work anywhere, a wheel without nbdev's index."

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
URLS = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]


def readme():
    "The README, with links to files that lead to the repository"
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({URLS['Repository']}/blob/main/", text)


class BuildWithoutIndex(build_py):
    "Leave out `_modidx`, in which nbdev looks up names while notebooks are exported, and nobody afterwards"

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [o for o in found if o[1] != "_modidx"]


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass=dict(build_py=BuildWithoutIndex),
)
