"""Changes that wait for somebody else's import."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from deepinfer_vllm.compat.late import after_import
seen = []
after_import("late_target", lambda module: seen.append(module.VALUE))
after_import("late_target", lambda module: seen.append(-module.VALUE))
assert seen == [] and "late_target" not in sys.modules
import late_other
assert seen == []
import late_target
assert sorted(seen) == [-7, 7], seen
after_import("late_target", lambda module: seen.append(module.VALUE + 1))
assert seen[2:] == [8]
assert not [f for f in sys.meta_path if type(f).__module__.startswith("deepinfer_vllm")]
after_import("late_nothing", seen.append)
try:
    import late_nothing
except ModuleNotFoundError as error:
    assert error.name == "late_nothing"
else:
    raise AssertionError
assert len(seen) == 3
"""


def test_a_change_is_made_once_as_the_import_ends(tmp_path: Path) -> None:
    (tmp_path / "late_target.py").write_text("import late_other\nVALUE = 7\n")
    (tmp_path / "late_other.py").write_text("")
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"], check=True)
