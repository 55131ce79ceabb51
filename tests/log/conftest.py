"Fixtures of this folder."

import fsspec
import pytest

import isaac_loop.log.upload as remote


@pytest.fixture
def memory():
    "An empty storage"
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


# ---- copies far away


class Far:
    "A file system in between, which notes what is asked of it, and fails when told"

    def __init__(self, fs):
        self.fs, self.calls, self.fail = fs, [], lambda name, path: False

    def __getattr__(self, name):
        return getattr(self.fs, name)

    def _note(self, name, path):
        if self.fail(name, path):
            raise OSError("the line is down")
        self.calls.append((name, path.rpartition("/far/")[2]))

    def put_file(self, local, path):
        self._note("put", path)
        self.fs.put_file(local, path)

    def rm_file(self, path):
        self._note("rm", path)
        self.fs.rm_file(path)

    def take(self):
        calls, self.calls = [o for o in self.calls if ".probe" not in o[1]], []
        return calls


@pytest.fixture
def far(memory, monkeypatch):
    made, connect = Far(memory), remote._connect
    monkeypatch.setattr(remote, "_connect", lambda url, options: (made, connect(url, options)[1]))
    return made
