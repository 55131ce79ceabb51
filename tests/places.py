"Where things are, for tests that read them or start a process which must find them"

from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "nbs/tutorials"
PATHS = [str(ROOT / "tests"), str(ROOT)]  # For `sys.path` of another process
